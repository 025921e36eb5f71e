"""The trainers that the benchmarks compare, with the time of their steps and their peak memory."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import hf_infcl.step.compilation
import hf_infcl.step.terms
from hf_infcl import InfCLTrainer, InfCLTrainingArguments
from hf_infcl.models.dual_encoder import NO_MASK, DualEncoder, drop_patches
from hf_infcl.step.terms import SIDES, TeacherDistance

from . import peers
from .inputs import Batch, Loader, collator, sizes_of, stored_teacher

# Options of all trainers, which do nothing but steps, and hardly change the weights.
ONLY_STEPS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "optim": "adamw_torch_fused",
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class Clock(transformers.TrainerCallback):
    """Records the time at which each step ended, and the memory of all steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stamps: list[float] = []
        self.peak, self.loss_peak = 0, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def look(self) -> None:
        """Records the peak so far, and starts a new one."""
        if self._device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forgets the peak of the windows that InfCLTrainer has tried, with memory that they left to a training."""
        self.look()
        self.peak = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        self.stamps.append(time.perf_counter())

    def recorded(self, loss: Any) -> Any:
        """Wraps the loss, and records what it allocates from its call to its gradients."""

        def measured(
            image_embeds: Tensor, text_embeds: Tensor, logit_scale: Any, logit_bias: Any = None, **options: Any
        ) -> Tensor:
            self.look()
            before = torch.cuda.memory_allocated() if image_embeds.is_cuda else 0

            def ended(gradient: Tensor) -> None:
                if gradient.is_cuda:
                    self.loss_peak = max(self.loss_peak, torch.cuda.max_memory_allocated() - before)

            for tensor in (image_embeds, text_embeds):
                if tensor.requires_grad:
                    tensor.register_hook(ended)
            return loss(image_embeds, text_embeds, logit_scale, logit_bias, **options)

        return measured


class PlainTrainer(transformers.Trainer):
    """Trainer with batches from a pool. Its loss is that of the model, for each micro-batch."""

    pool: list[Batch]

    def get_train_dataloader(self) -> Any:
        return Loader(self.pool, self.args.max_steps * self.args.gradient_accumulation_steps, self.args.device)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {**inputs, "return_loss": True}, *args, **kwargs)


class OpenCLIPTrainer(PlainTrainer):
    """OpenCLIP's --accum-freq: encodes all micro-batches without a graph, then each one again, with a loss for each.

    Each loss is that of the whole batch, with new features of one micro-batch. K micro-batches thus cost K additional
    forwards and K losses of the whole batch. The products of the loss are in bf16 if the model's are, as in our loss.
    """

    def get_batch_samples(self, *args: Any) -> tuple[list, Any]:
        self._window, _ = super().get_batch_samples(*args)
        self._cached: list[tuple[Tensor, ...]] = []
        self._index = 0
        return self._window, None

    def _features(self, model: Any, batch: Batch) -> tuple[Tensor, ...]:
        outputs = model(**batch)
        parts = outputs.image_embeds, outputs.text_embeds
        return tuple(part.bfloat16() for part in parts) if self.args.bf16 else parts

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        if not self._cached:
            with torch.no_grad():
                self._cached = [self._features(model, batch) for batch in self._window]
        j, self._index = self._index, self._index + 1
        fresh = [*self._cached[:j], self._features(model, inputs), *self._cached[j + 1 :]]
        images, texts = (torch.cat(column) for column in zip(*fresh, strict=True))
        scale = self.accelerator.unwrap_model(model).logit_scale.exp()
        loss = (peers.clip if self.args.world_size == 1 else peers.open_clip_local)(images, texts, scale, scale)
        self.accelerator.backward(loss)
        return loss.detach().float() / len(self._window)


class PooledInfCLTrainer(InfCLTrainer):
    """InfCLTrainer with batches from a pool. With ``offload_inputs`` they stay in host memory."""

    pool: list[Batch]

    def get_train_dataloader(self) -> Any:
        device = None if self.args.offload_inputs else self.args.device
        pool = self.pool
        if any(isinstance(one, TeacherDistance) for one in self.window_step.extensions):
            pool = [self._with_embeddings(batch) for batch in pool]
        length, rows = self.args.max_steps * self.args.gradient_accumulation_steps, self._train_batch_size
        no_mask = {NO_MASK: True} if self.args.device.type == "cuda" else {}  # the captions end with their last token
        return Loader(pool, length, device, rows if self.args.divides_by_itself else None, **no_mask)

    def _with_embeddings(self, batch: Batch) -> Batch:
        """A batch with random embeddings of a teacher, as stored ones are."""
        shape = len(batch["pixel_values"]), self.model.config.projection_dim
        names = "teacher_images", "teacher_texts"
        return {**batch, **{name: F.normalize(torch.randn(shape), dim=-1).half() for name in names}}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Also creates Adam's state, which otherwise appears only after the first step: one step shows all memory."""
        optimizer = super().create_optimizer(*args, **kwargs)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


def train(
    trainer_class: Any,
    model: Any,
    pool: list[Batch],
    steps: int,
    accumulation: int,
    *,
    loss: Any = None,
    patch_dropout: float = 0.0,
    taught: bool = False,
    **options: Any,
) -> tuple[Clock, Any]:
    """Trains; returns the clock and the trainer.

    ``loss`` replaces `contrastive_loss` in InfCLTrainer, and its memory is recorded. If it is ``taught``, a teacher's
    embeddings lie in the batch. The other trainers drop patches with the hook of InfCLTrainer's ``patch_dropout``, at
    each forward anew.
    """
    on_gpu = torch.cuda.is_available()
    if patch_dropout and issubclass(trainer_class, InfCLTrainer):
        options["patch_dropout"] = patch_dropout
    elif patch_dropout:
        drop_patches(DualEncoder(model), patch_dropout)
    sizes = {"per_device_train_batch_size": len(pool[0]["pixel_values"]), "gradient_accumulation_steps": accumulation}
    if "global_batch_size" in options:
        sizes = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        args = (InfCLTrainingArguments if issubclass(trainer_class, InfCLTrainer) else transformers.TrainingArguments)(
            output_dir=folder,
            max_steps=steps,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            ddp_find_unused_parameters=False,
            **ONLY_STEPS,
            **sizes,
            **options,
        )
        clock = Clock(args.device)
        term: dict[str, Any] = {"extensions": [TeacherDistance(stored_teacher(SIDES), 1.0)]} if taught else {}
        trainer = trainer_class(model, args, callbacks=[clock], **term)
        trainer.pool = pool
        in_uint8, by_default = pool[0]["pixel_values"].dtype == torch.uint8, "global_batch_size" in options
        if in_uint8 or by_default:
            trainer.data_collator = collator(in_uint8=in_uint8, padded=by_default)
        trainer.remove_callback(transformers.PrinterCallback)
        stack.enter_context(mock.patch.object(hf_infcl.step.compilation, "ENOUGH", 0.0))  # as in a long training
        if loss is not None:
            terms = hf_infcl.step.terms
            stack.enter_context(mock.patch.object(terms, "contrastive_loss", clock.recorded(loss)))
        trainer.train()
        return clock, trainer


def train_open_clip(
    name: str,
    pool: list[Batch],
    steps: int,
    accumulation: int,
    device: torch.device,
    *,
    image_size: int | None = None,
    patch_dropout: float = 0.0,
    compiled: bool = False,
) -> tuple[Clock, None]:
    """Trains OpenCLIP's own model of the same size with its own training loop, loss, patch dropout and --accum-freq.

    The package with the loop (open_clip_torch from 2.27 on) is optional. As by OpenCLIP's default, gradients are not
    clipped. One accumulation step means plain training: a loss and an optimizer step for each micro-batch.
    """
    import open_clip
    from open_clip_train.train import train_one_epoch

    sizes = sizes_of(name, image_size)
    vision, text = sizes["vision_config"], sizes["text_config"]
    config = transformers.CLIPConfig(**sizes)
    torch.manual_seed(0)
    model: Any = open_clip.CLIP(
        sizes["projection_dim"],
        {
            "layers": vision["num_hidden_layers"],
            "width": vision["hidden_size"],
            "head_width": vision["hidden_size"] // vision["num_attention_heads"],
            "mlp_ratio": vision["intermediate_size"] / vision["hidden_size"],
            "patch_size": vision["patch_size"],
            "image_size": vision["image_size"],
            "patch_dropout": patch_dropout,
        },
        {
            "layers": text["num_hidden_layers"],
            "width": text["hidden_size"],
            "heads": text["num_attention_heads"],
            "context_length": pool[0]["input_ids"].shape[1],  # it takes texts of no other length
            "vocab_size": config.text_config.vocab_size,
        },
        output_dict=True,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    if compiled:
        model = torch.compile(model)
    clock = Clock(device)
    rows = len(pool[0]["pixel_values"])

    class Batches(Loader):
        num_batches, num_samples = steps * accumulation, steps * accumulation * rows

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield batch["pixel_values"], batch["input_ids"]

    def at_each_micro_batch(step: int) -> None:  # called in place of the scheduler, before the forward
        if len(clock.stamps) == step:
            clock.on_step_end(None, None, None)

    loader = Batches(pool, steps * accumulation, None)
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
    off = dict.fromkeys(("distill", "skip_scheduler", "horovod", "wandb"), False)
    alone = {"world_size": 1, "rank": 0, "local_rank": 0, "log_every_n_steps": 10**9, "grad_clip_norm": None}
    precision = "amp_bf16" if device.type == "cuda" else "fp32"
    counts = {"accum_freq": accumulation, "batch_size": rows}
    args = SimpleNamespace(device=str(device), precision=precision, **counts, **alone, **off)
    train_one_epoch(model, data, open_clip.ClipLoss(), 0, optimizer, None, at_each_micro_batch, None, args)
    clock.on_step_end(None, None, None)
    return clock, None
