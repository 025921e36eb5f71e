"""Steps that are replayed as CUDA graphs: the same weights, and what is computed as it is."""

import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import graphs, models
from helpers.trainers import StopAt, parameters, trained, trainer_for
from torch.utils.data import default_collate
from transformers import TrainerCallback

from hf_infcl import InfCLTrainer
from hf_infcl.models.dual_encoder import NO_MASK
from hf_infcl.step import compilation, recording
from hf_infcl.step.extensions import StepChange

STEPS = 7
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", ON_GPU])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Steps are recorded after two of the same shapes; receives the recordings. On a CPU tapes stand for graphs."""
    monkeypatch.setattr(recording, "PATIENCE", 2)
    found: list[Any] = []

    class Noted(recording._Recording):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(recording, "_Recording", Noted)
    if request.param == "cuda":
        if torch.cuda.device_count() > 1:
            pytest.skip("Trainer takes all GPUs that a process sees: run it with CUDA_VISIBLE_DEVICES=0")
        yield found
        return
    monkeypatch.setattr(recording, "may_compile", lambda args: args.torch_compile is None)
    memory = {
        "max_memory_allocated": lambda device: 1,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=100),
    }
    with graphs.on_a_cpu(), mock.patch.multiple(torch.cuda, **memory):
        yield found


def unmasked(rows: Any) -> dict[str, Any]:
    """A batch as the training's collator makes it for a GPU, of texts that need no mask."""
    return {**default_collate(rows), NO_MASK: True}


def run(folder: Any, model: Any = None, resume: Any = None, **options: Any) -> InfCLTrainer:
    defaults = {
        "max_steps": STEPS,
        "global_batch_size": 8,
        "data_collator": unmasked,
        "use_cpu": not torch.cuda.is_available(),
        "optim": "adamw_torch",
        "data": models.Pairs(64),
    }
    sizes = dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"))
    model = models.clip() if model is None else model
    return trained(trainer_for(folder, model, **{**sizes, **defaults, **options}), resume)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (models.clip, {}),
        (models.siglip, {}),
        (models.clip, {"max_grad_norm": 0.1, "bf16": True}),
        (models.clip, {"freeze_layers": 1}),
        (lambda: models.siglip(dropout=0.2), {}),
    ],
    ids=["clip", "siglip", "bf16", "frozen-layers", "dropout"],
)
def test_replayed_steps_compute_the_same(tmp_path, made, build, options):
    expected = run(tmp_path, build(), **options, torch_compile=False)
    assert not made
    trainer = run(tmp_path, build(), **options)
    assert len(made) == 1
    assert torch.equal(parameters(trainer), parameters(expected))
    losses = [[log["loss"] for log in one.state.log_history if "loss" in log] for one in (trainer, expected)]
    assert losses[0] == losses[1]
    assert not trainer.window_step.recording._recordings, "they would keep memory"


def test_a_resume_equals_the_run_without_interruption(tmp_path, made):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}
    expected = run(tmp_path / "a", **saving)
    run(tmp_path / "b", **saving, callbacks=[StopAt(4)])
    resumed = run(tmp_path / "b", None, str(tmp_path / "b" / "checkpoint-4"), **saving)
    assert len(made) == 3
    assert torch.equal(parameters(resumed), parameters(expected))


@pytest.mark.parametrize("made", [ON_GPU], indirect=True)
def test_compiled_layers_are_recorded(tmp_path, monkeypatch, made):
    monkeypatch.setattr(compilation, "ENOUGH", 0.0)
    recorded = run(tmp_path, bf16=True)
    assert recorded.window_step.compilation.decided == compilation.LAYERS
    assert len(made) == 1
    monkeypatch.setattr(recording, "PATIENCE", STEPS)
    assert torch.equal(parameters(recorded), parameters(run(tmp_path, bf16=True)))
    assert len(made) == 1


def masked(rows: Any) -> dict[str, Any]:
    """A batch whose texts need their mask, which leaves out a token in the middle."""
    batch = default_collate(rows)
    batch["attention_mask"][:, 1] = 0
    return batch


def hooked(model: Any) -> None:
    model.visual_projection.register_forward_hook(lambda module, inputs, output: None)


def compiled(model: Any) -> None:
    model.vision_model.compile(backend="eager")


def hooked_gradient(model: Any) -> None:
    model.visual_projection.weight.register_hook(lambda gradient: 2 * gradient)


def chance(model: Any) -> None:
    class Chance(torch.nn.Identity):
        def forward(self, features: Any) -> Any:
            return features * random.choice([1, -1])

    model.vision_model.post_layernorm = torch.nn.Sequential(model.vision_model.post_layernorm, Chance())


def chance_in_place(model: Any) -> None:
    forward = model.text_projection.forward
    model.text_projection.forward = lambda features: forward(features) * random.choice([1, -1])


def own_forward(model: Any) -> None:
    forward = model.forward
    model.forward = lambda **inputs: forward(**inputs)


def batch_norm(model: Any) -> None:
    linear = model.visual_projection
    model.visual_projection = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(linear.out_features))


class EachStep(TrainerCallback):
    """Calls a function of the model and of the step before each step."""

    def __init__(self, function: Callable[[Any, int], object]) -> None:
        self.function = function

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.function(model, state.global_step)


def rates(model: Any, step: int) -> None:
    model.text_model.encoder.layers[0].self_attn.dropout = step / 10


def frozen_weights(model: Any, step: int) -> None:
    """Other values, in other memory, of what is frozen."""
    weight = model.text_model.embeddings.token_embedding.weight
    kept.append(weight.data)
    weight.data = weight.data + 0.01


kept: list[Any] = []  # no later one gets the same memory


class Adds(StepChange):
    """Adds to the images what gets a gradient, by which it changes."""

    def __init__(self) -> None:
        self.added = torch.zeros(())

    def inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self.added = self.added.to(inputs["pixel_values"].device)
        if self.added.grad is not None:
            self.added = self.added + self.added.grad
        self.added = self.added.detach().requires_grad_()
        return {**inputs, "pixel_values": inputs["pixel_values"] + self.added}


class Moves(TrainerCallback):
    """Gives all parameters new memory after each step, as a callback may do that swaps weights."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
            self.kept = [*getattr(self, "kept", []), parameter.data]  # no later one gets the same memory


@pytest.mark.parametrize(
    "options",
    [
        {"data_collator": masked},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"freeze": "text"},
        {"prepare": hooked},
        {"patch_dropout": 0.5},
        {"callbacks": [Moves()]},
        {"prepare": compiled},
        {"prepare": hooked_gradient},
        {"prepare": chance},
        {"prepare": chance_in_place},
        {"prepare": own_forward},
        {"prepare": batch_norm},
        {"callbacks": [EachStep(rates)]},
        {"callbacks": [EachStep(frozen_weights)], "freeze_layers": 0},
        {"extensions": Adds},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_a_replay_would_not_see_is_computed_as_it_is(tmp_path, made, options):
    prepare = options.get("prepare", lambda model: None)
    runs = []
    for more in ({}, {"torch_compile": False}):
        torch.compiler.reset()  # the second run would else find what the first one has compiled
        prepare(model := models.clip())
        chosen = {name: value for name, value in options.items() if name != "prepare"}
        if "extensions" in chosen:
            chosen["extensions"] = [chosen["extensions"]()]
        runs.append(run(tmp_path, model, **chosen, **more))
    assert not made
    assert torch.equal(*map(parameters, runs))
    assert all(map(torch.equal, *(trainer.model.buffers() for trainer in runs)))


def change_at_four(model: Any, step: int) -> None:
    """Changes a rate of dropout at step 4, and freezes a tower at step 8, as a callback may do."""
    if step == 4:
        model.vision_model.encoder.layers[0].self_attn.dropout = 0.3
    if step == 8:
        model.text_model.requires_grad_(False)
        model.text_projection.requires_grad_(False)


def test_a_changed_model_is_recorded_anew_or_no_more(tmp_path, made):
    options = {"max_steps": 12, "data": models.Pairs(96)}
    runs = [run(tmp_path, **options, callbacks=[EachStep(change_at_four)], torch_compile=c) for c in (None, False)]
    assert torch.equal(*map(parameters, runs))
    assert len(made) == 2


class KeepsGradients(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append(model.visual_projection.weight.grad)


def test_gradients_that_a_callback_keeps_stay(tmp_path, made):
    as_it_is, replayed = KeepsGradients(), KeepsGradients()
    run(tmp_path, callbacks=[as_it_is], torch_compile=False)
    run(tmp_path, callbacks=[replayed])
    assert len(made) == 1
    assert all(map(torch.equal, as_it_is.seen, replayed.seen))


def test_models_that_others_compile_are_computed_as_they_are(tmp_path, made):
    model = models.clip()
    model.vision_model.compile(backend="eager")
    run(tmp_path, model)
    assert not made


def test_gradients_that_are_there_are_added_to(tmp_path, made, monkeypatch):
    calls = itertools.count()

    def zero_grad(model: Any, set_to_none: bool = True) -> None:
        """Trainer's call after each step, here without an effect after odd ones."""
        for parameter in model.parameters() if next(calls) % 2 else ():
            parameter.grad = None

    monkeypatch.setattr(torch.nn.Module, "zero_grad", zero_grad)
    expected = run(tmp_path, max_steps=8, torch_compile=False)
    calls = itertools.count()
    assert torch.equal(parameters(run(tmp_path, max_steps=8)), parameters(expected))
    assert len(made) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_large_steps_and_failures_go_on_as_they_are(tmp_path, made, monkeypatch, caplog, fails):
    def record(*args: Any) -> None:
        raise torch.AcceleratorError("operation not permitted")

    if fails:
        monkeypatch.setattr(recording, "_Recording", record)
    else:
        monkeypatch.setattr(recording, "SHARE", 0.0)
    assert torch.equal(parameters(run(tmp_path)), parameters(run(tmp_path, torch_compile=False)))
    assert not made
    assert caplog.text.count("not replayed as CUDA graphs: operation not permitted") == fails


def test_each_of_two_lengths_is_recorded(tmp_path, made):
    def alternating(rows: Any) -> dict[str, Any]:
        lengths.append(models.LENGTH - len(lengths) % 3)
        batch = unmasked(rows)
        texts = {name: batch[name][:, -lengths[-1] :] for name in ("input_ids", "attention_mask")}
        return {**batch, **texts}

    def weights(**options: Any) -> Any:
        lengths.clear()
        return parameters(run(tmp_path, data_collator=alternating, max_steps=12, data=models.Pairs(96), **options))

    lengths: list[int] = []
    assert torch.equal(weights(), weights(torch_compile=False))
    assert len(made) == len({one.inputs[1].shape for one in made}) == 2


def test_a_lack_of_memory_ends_recordings(tmp_path, made, monkeypatch):
    replay, calls = recording._Replayed.apply, []

    def fails_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return replay(*args)

    monkeypatch.setattr(recording._Replayed, "apply", fails_once)
    trainer = run(tmp_path)
    assert (len(made), len(calls), trainer.args.largest_micro_batch) == (1, 2, 4)
    torch.testing.assert_close(parameters(trainer), parameters(run(tmp_path, torch_compile=False)), rtol=0, atol=1e-5)
