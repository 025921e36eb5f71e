"""`InfCLTrainer` is one class over Trainer, which people extend as they extend Trainer, and its parts know neither."""

from collections.abc import Iterator, Mapping
from typing import Any

import peft
import pytest
import torch
import transformers
from helpers import models
from helpers.trainers import arguments, parameters, trained, trainer_for
from transformers import Trainer, TrainerCallback

from hf_infcl import InfCLTrainer
from hf_infcl.processes.signals import Phases
from hf_infcl.step.checks import NumberChecks, SkippedWindows
from hf_infcl.step.step import WindowStep
from hf_infcl.step.window import Window
from hf_infcl.trainer import evaluating
from hf_infcl.trainer.checkpoints import Checkpoints
from hf_infcl.trainer.loaders import TrainingData
from hf_infcl.trainer.loop_events import LoopEvents, Progress
from hf_infcl.trainer.model_files import Pushes
from hf_infcl.trainer.resuming import Resumption


class Own(InfCLTrainer):
    """Overrides what people override, and calls Trainer's method from each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "micro_batches": len(self.losses)}, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        self.loader = super().get_train_dataloader()
        return self.loader


class Notes(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.logs: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(logs)


def test_trainer_is_the_only_base():
    assert InfCLTrainer.__bases__ == (Trainer,)


def test_a_subclass_with_its_own_steps_logs_and_callbacks_trains_the_same(tmp_path):
    plain = trainer_for(tmp_path / "plain")
    passed, added = Notes(), Notes()
    torch.manual_seed(0)
    start = plain.model.state_dict()
    own = Own(
        type(plain.model)(plain.model.config),
        arguments(tmp_path / "own"),
        plain.data_collator,
        train_dataset=plain.train_dataset,
        callbacks=[passed],
    )
    own.model.load_state_dict(start)
    own.add_callback(added)
    plain.train()
    own.train()

    torch.testing.assert_close(parameters(own), parameters(plain), rtol=0, atol=0)
    logged = [entry for entry in own.state.log_history if "loss" in entry]
    assert [entry["micro_batches"] for entry in logged] == [2, 4]
    assert all("logit_scale" in entry and "samples_seen" in entry for entry in logged)
    assert own.losses[::2] == [0, 0]
    torch.testing.assert_close([entry["loss"] for entry in logged], own.losses[1::2], rtol=1e-5, atol=0)
    assert passed.steps == added.steps == [1, 2]
    assert passed.logs == added.logs
    assert [entry["micro_batches"] for entry in passed.logs if "loss" in entry] == [2, 4]
    assert own.callback_handler.train_dataloader is own.loader


def reached(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The objects that a part holds in its attributes, in containers or in further parts; not through functions."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    yield value
    if isinstance(value, Mapping):
        held = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        held = list(value)
    else:
        held = list(vars(value).values()) if type(value).__module__.startswith("hf_infcl.") else []
    for one in held:
        if not isinstance(value, Trainer):
            yield from reached(one, seen)


def test_no_part_holds_the_trainer(tmp_path):
    """A part names what it needs in its constructor; what only the trainer can do, it gets as a function."""
    trainer = trained(trainer_for(tmp_path, save_strategy="steps", save_steps=1))
    ours = [value for value in vars(trainer).values() if type(value).__module__.startswith("hf_infcl.")]
    seen: dict[int, Any] = {}
    found = [value for part in [*ours, *trainer.callback_handler.callbacks] for value in reached(part, seen)]
    kinds = {type(value) for value in found}
    assert kinds >= {Checkpoints, LoopEvents, NumberChecks, Phases, Progress, Pushes, Resumption, SkippedWindows}
    assert kinds >= {TrainingData, Window, WindowStep}
    assert not [value for value in found if isinstance(value, Trainer)]

    trainer.progress.trainer = trainer  # type: ignore[attr-defined]
    assert any(isinstance(value, Trainer) for value in reached(trainer.progress, {}))


class Regularised(transformers.CLIPModel):
    """A CLIP whose own forward adds to the loss, by default nothing."""

    weight = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + self.weight * output.text_embeds.abs().sum()
        return output


def add_to_loss(module: Any, args: Any, output: Any) -> None:
    if output.loss is not None:
        output.loss = output.loss + 1.0


def own_model(weight: float) -> Any:
    plain = models.clip(dropout=0.3)
    model = Regularised(plain.config)
    model.load_state_dict(plain.state_dict())
    model.weight = weight
    return model


@pytest.mark.parametrize("how", ["forward", "hook", "peft"])
def test_a_loss_that_the_forward_adds_to_is_refused(tmp_path, how):
    model = models.clip() if how == "hook" else own_model(0.1)
    if how == "hook":
        model.register_forward_hook(add_to_loss)
    elif how == "peft":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    words = r"CLIPModel|Regularised computes a loss of its own: .* for the first micro-batch, whose contrastive loss is"
    with pytest.raises(ValueError, match=words):
        trainer_for(tmp_path, model, max_steps=1).train()


def test_a_forward_of_one_s_own_that_adds_nothing_trains_the_same(tmp_path):
    plain = trained(trainer_for(tmp_path, models.clip(dropout=0.3), max_steps=2))
    assert torch.equal(parameters(trained(trainer_for(tmp_path, own_model(0.0), max_steps=2))), parameters(plain))


@pytest.mark.parametrize(
    "name", ["compute_loss", "_get_train_sampler", "compute_loss_context_manager", "prediction_step"]
)
def test_an_override_that_would_not_be_called_as_trainer_does_is_refused(tmp_path, name):
    kind = type("Mine", (InfCLTrainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match=rf"(would never call|takes no loss and logits from) Mine\.{name}\. \w+"):
        kind(models.clip(), arguments(tmp_path), train_dataset=models.Pairs(8))


def test_what_trainer_would_give_as_logits_is_told(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="computes no logits that preprocess_logits_for_metrics could change"):
        InfCLTrainer(models.clip(), arguments(tmp_path), preprocess_logits_for_metrics=lambda logits, labels: logits)
    said: list[str] = []
    monkeypatch.setattr(evaluating.logger, "warning_once", said.append)
    trainer_for(tmp_path, eval_dataset=models.Pairs(8)).evaluate()
    assert not any("where Trainer gives logits" in line for line in said)
    trainer = trainer_for(tmp_path, eval_dataset=models.Pairs(8), compute_metrics=lambda prediction: {})
    trainer.evaluate()
    trainer.predict(models.Pairs(8))
    assert sum("get embeddings here, (image_embeds, text_embeds), where Trainer gives logits" in s for s in said) == 2
