"""Small trainers, and callbacks that stop them."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate
from transformers import TrainerCallback

from hf_infcl import ImageTextDataset, InfCLTrainer, InfCLTrainingArguments

from . import models
from .processes import without_tf32
from .processors import clip_processor


def arguments(folder: Any, **options: Any) -> InfCLTrainingArguments:
    """On the CPU, except in a group of GPUs."""
    on_gpus = dist.is_initialized() and dist.get_backend() == "nccl"
    defaults = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "use_cpu": not on_gpus,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    return InfCLTrainingArguments(output_dir=str(folder), **{**defaults, **options})


# The parameters of `InfCLTrainer` that are no options of a training.
PARTS = ("eval_dataset", "replay_dataset", "callbacks", "compute_metrics", "model_init", "processing_class")
PARTS += ("extensions", "optimizers")


def trainer_for(folder: Any, model: Any = None, data: Any = None, **options: Any) -> InfCLTrainer:
    """A trainer of a small CLIP, by default on 40 pairs; images with captions are prepared by a small processor."""
    parts = {name: options.pop(name) for name in PARTS if name in options}
    data = models.Pairs(40) if data is None else data
    if isinstance(data, ImageTextDataset) and "data_collator" not in options:
        parts = {"processing_class": clip_processor(), **parts}
        options["data_collator"] = None
    model = model if model is not None or "model_init" in parts else models.clip()
    collator = options.pop("data_collator", default_collate)
    return InfCLTrainer(model, arguments(folder, **options), collator, train_dataset=data, **parts)


def trained(trainer: InfCLTrainer, resume: Any = None) -> InfCLTrainer:
    """The trainer after its training, which begins anew or, as ``resume_from_checkpoint`` of a trainer, goes on."""
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def parameters(trainer: InfCLTrainer) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights, also of those that FSDP2 divides among the processes; collective for these."""
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in model.named_parameters()}


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


class AtEndOf(TrainerCallback):
    """Calls a function at the end of a step."""

    def __init__(self, step: int, function: Callable[[], Any]) -> None:
        self.step, self.function = step, function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.function()


def killed_at(step: int) -> AtEndOf:
    """Kills this process at the end of a step."""
    return AtEndOf(step, lambda: os.kill(os.getpid(), signal.SIGKILL))


class FullPrecision(TrainerCallback):
    """Turns TF32 off, which accelerate enables on GPUs."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        without_tf32()


class TrainedRows(TrainerCallback):
    """Records the text of every row that is encoded with autograd, in one list per optimizer step."""

    def __init__(self) -> None:
        self.steps: list[list[tuple]] = [[]]
        self._watched: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not self._watched:
            self._watched = model
            model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.steps[-1] += map(tuple, kwargs["input_ids"].tolist())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append([])


class TowerTokens(TrainerCallback):
    """The numbers of tokens that the layers of the image tower get in each step."""

    def __init__(self) -> None:
        self.steps: list[set[int]] = [set()]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        layers: Any = model.vision_model.encoder.layers
        layers[0].register_forward_pre_hook(lambda module, inputs: self.steps[-1].add(inputs[0].shape[1]))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(set())
