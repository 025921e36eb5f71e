"""What is plugged into the step from outside of the package: a term, a change, an observer and a selection of pairs."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import models
from helpers.numerics import descend
from helpers.trainers import StopAt, parameters, trained, trainer_for
from torch import Tensor

from hf_infcl import InfCLTrainer
from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.step.extensions import Extension, LossTerm, PairSelection, StepChange, StepObserver, value_of_term
from hf_infcl.step.grad_cache import Features
from hf_infcl.step.window import Window

RATE, WEIGHT = 5e-3, 2.0
PLAIN = {"max_steps": 2, "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0, "optim": "sgd"}
ROWS = 24


class NearBrightness(LossTerm):
    """Draws the first number of each embedding of an image to the image's mean."""

    name = "brightness"

    def reference(self, inputs: Mapping[str, Any], frozen_outputs: Mapping[str, Any]) -> Features:
        return (inputs["pixel_values"].flatten(1).mean(1),)

    def value(self, features: Features, references: Features) -> Tensor:
        return WEIGHT * (features[0][:, 0] - references[0]).square().mean()


class Dimmed(StepChange):
    """Halves the images in every second step."""

    name = "dimmed"

    def __init__(self) -> None:
        self.closed = False

    def begin_window(self, window: Window, step: int) -> None:
        self._factor = 0.5 if step % 2 else 1.0

    def inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "pixel_values": self._factor * inputs["pixel_values"]}

    def close(self) -> None:
        self.closed = True


class WindowsSeen(StepObserver):
    """Counts windows and backwards, also after a resume."""

    name = "windows_seen"

    def __init__(self) -> None:
        self.backwards = 0
        self._windows = torch.zeros((), dtype=torch.int64)

    def after_backward(self, index: int, scale: float) -> None:
        self.backwards += 1

    def end_window(self, window: Window, scale: float) -> None:
        self._windows += 1

    def logs(self) -> dict[str, float]:
        return {"windows_seen": self._windows.item()}

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self._windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._windows = state["windows"]


class FirstTokens(PairSelection):
    """Lets pairs take part whose second token is even."""

    name = "first_tokens"

    def select(self, window: Window, features: Features, logit_scale: Tensor, logit_bias: Tensor | None) -> Tensor:
        return torch.cat([batch["input_ids"][:, 1] % 2 == 0 for batch in window.batches]).cpu()


def pairs() -> models.Pairs:
    """Every third pair does not take part."""
    data = models.Pairs(ROWS)
    data.tokens[:, 1] = 2 * (data.tokens[:, 1] // 2)
    data.tokens[::3, 1] += 1
    return data


def trainer(folder: Any, *extensions: Extension, build: Any = models.clip, **options: Any) -> InfCLTrainer:
    options = {**PLAIN, "max_logit_scale": 1e6, "extensions": extensions, **options}
    return trainer_for(folder, build(), pairs(), **options)


def expected(objective: str) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """The weights after two steps of plain gradient descent, and the loss and the term of each."""
    model, data = {"softmax": models.clip, "sigmoid": models.siglip}[objective](), pairs()
    encoder, takes_part = DualEncoder(model), data.tokens[:, 1] % 2 == 0
    encoder.initialise_sigmoid()
    told = []
    for factor in (1.0, 0.5):
        batch = data.batch() | {"pixel_values": factor * data.images}
        images, texts = encoder.embed(model, batch)
        term = WEIGHT * (images[:, 0] - batch["pixel_values"].flatten(1).mean(1)).square().mean()
        chosen = images[takes_part], texts[takes_part]
        loss = reference.contrastive_loss(*chosen, *encoder.scale_and_bias(), objective=objective).sum()
        (loss + term).backward()
        told.append((loss.item(), term.item()))
        descend(model.parameters(), RATE)
    return dict(model.named_parameters()), told


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("size", "steps", "retain"), [(ROWS, 1, "1"), (6, 4, "1"), (6, 4, "3")])
def test_steps_with_extensions_are_those_of_autograd(tmp_path, objective, size, steps, retain):
    build = {"softmax": models.clip, "sigmoid": models.siglip}[objective]
    begin, change, seen = dict(build().named_parameters()), Dimmed(), WindowsSeen()
    batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "retain_graphs": retain}
    run = trained(trainer(tmp_path, NearBrightness(), change, seen, FirstTokens(), build=build, **batch))
    weights, told = expected(objective)
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert [value for entry in logs for value in (entry["loss"], entry["brightness_loss"])] == pytest.approx(
        [value for values in told for value in values], rel=1e-4
    )
    assert [entry["windows_seen"] for entry in logs] == [1, 2]
    assert (seen.backwards, change.closed) == (2 * steps, True)
    for name, found in run.model.named_parameters():
        moved = (weights[name].reshape(found.shape) - begin[name]).norm()
        assert (found - weights[name].reshape(found.shape)).norm() <= 1e-4 * moved + 1e-7, name


def test_the_states_of_extensions_are_in_checkpoints(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "per_device_train_batch_size": 3}
    whole = trained(trainer(tmp_path / "whole", WindowsSeen(), **options))
    trainer(tmp_path / "part", WindowsSeen(), **options, callbacks=[StopAt(2)]).train()
    rest = trained(trainer(tmp_path / "part", WindowsSeen(), **options), resume=True)
    assert torch.equal(parameters(whole), parameters(rest))
    assert [e["windows_seen"] for e in rest.state.log_history if "windows_seen" in e] == [1, 2, 3, 4]


class Returns(LossTerm, StepChange, PairSelection):
    """Keeps to what is asked of it, but for what is given in place of one of its methods."""

    name = "returns"
    options: Mapping[str, Any] = {"of": object()}  # what is no JSON has a name in it

    def __init__(self, **methods: Any) -> None:
        vars(self).update(methods)

    def value(self, features: Features, references: Features) -> Tensor:
        return features[0].square().sum()

    def select(self, window: Window, features: Features, logit_scale: Tensor, logit_bias: Tensor | None) -> None:
        return None


def always(value: Any) -> Any:
    return lambda *_: value


MASK = torch.ones(8, dtype=torch.bool)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"select": always(MASK[:2])}, r"select of the extension 'returns' must return a tensor \[8\] of torch.bool"),
        ({"select": always(torch.arange(8))}, r"got \[8\] torch.int64"),
        ({"select": always(MASK[:, None])}, r"got \[8, 1\] torch.bool"),
        ({"select": always(MASK.to("meta"))}, r"on the CPU, got \[8\] torch.bool on meta"),
        ({"select": always([True] * 8)}, "got list"),
        ({"skipped_rows": always(MASK)}, r"skipped_rows of the extension 'returns' must return a tensor \[24\]"),
        ({"value": lambda features, _: features[0].sum(1)}, r"value of the term 'returns' .* got \[8\] torch.float32"),
        ({"value": always(1.0)}, r"value of the term 'returns' must return a scalar tensor of floats, got 1.0"),
        ({"reference": always(torch.ones(4))}, "reference of the term 'returns' must return a tuple of tensors"),
        ({"reference": always(torch.ones(4, 2))}, "reference of the term 'returns' .*: it is a tensor"),
        ({"reference": always((torch.tensor(1.0),))}, "reference of the term 'returns' .*: zero-dimensional"),
        (
            {"inputs": lambda inputs: {name: value[:3] for name, value in inputs.items()}},
            "The step has 8 images and 8 texts, but 6 and 6 embeddings",
        ),
        ({"state_dict": always({"n": {"of": object()}})}, "state_dict of the extension 'returns' must return a dict"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_an_extension_must_not_return_is_refused(tmp_path, methods, message):
    options = {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, Returns(**methods), **options).train()


def test_references_that_do_not_fit_into_memory_are_no_mistake():
    made = Returns()
    with mock.patch.object(torch, "cat", side_effect=torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError):
        value_of_term(made, (torch.zeros(2, 3),) * 2, [(torch.zeros(2, 3),)])


def test_numbers_and_options_of_an_extension_become_json(tmp_path):
    made = Returns(logs=lambda: {"seen": torch.tensor(2.0)})
    made.unused = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)]
    made.parameters = lambda: made.unused
    run = trained(trainer(tmp_path, made, save_strategy="steps", save_steps=1))
    assert [entry["seen"] for entry in run.state.log_history if "loss" in entry] == [2.0, 2.0]
    assert torch.equal(torch.stack(made.unused), torch.ones(2, 2)), "what a step does not use, or train, stays"
    trainer(tmp_path, made, save_strategy="steps", save_steps=1, max_steps=3).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("extensions", "message"),
    [
        ([Returns], "got the class Returns"),
        (Returns(), "must be a list of objects of the classes .*, got Returns"),
        ({"one": Returns()}, "got dict"),
        ([WindowsSeen(), WindowsSeen()], "Several extensions of the step have the name 'windows_seen'"),
        ([Returns(name="tower_norms")], "have the name 'tower_norms': tower_norms, positive_cosines, tower_norms"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_list_of_different_extensions_is_refused(tmp_path, extensions, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, data=pairs(), extensions=extensions)


class Roots(LossTerm):
    """Has an infinite gradient by its parameter, or is NaN itself, on the last rank."""

    name = "roots"

    def __init__(self, value: float, is_last: bool) -> None:
        self.weight, self.is_last = torch.nn.Parameter(torch.full((1,), value)), is_last

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.weight]

    def value(self, features: Features, references: Features) -> Tensor:
        return self.weight.sqrt().sum() if self.is_last else self.weight.square().sum()


def rank_of_roots(
    rank: int, world_size: int, folder: str, value: float, skips: int, fails_at: int | None = None
) -> tuple[str, float, list[Any], list[Any]]:
    term, seen, backwards = Roots(value, rank == world_size - 1), WindowsSeen(), []

    def after_backward(index: int, scale: float) -> None:
        backwards.append((index, term.weight.grad is not None))
        assert rank == 0 or index != fails_at

    vars(seen)["after_backward"] = after_backward
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    run = trainer(folder, term, seen, skip_nonfinite=skips, **sizes)
    try:
        run.train()
    except (ValueError, AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", term.weight.item(), [], backwards
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    return "", term.weight.item(), [(entry.get("skipped_windows"), entry["grad_norm"]) for entry in logs], backwards


@pytest.mark.parametrize("skips", [0, 5])
@pytest.mark.parametrize(
    ("value", "cause"),
    [(-1.0, "these are not finite: the term roots"), (0.0, "that of the parameters of a term")],
)
def test_numbers_of_a_term_that_are_not_finite_are_found_on_all_processes(ranks, tmp_path, value, cause, skips):
    """An observer sees every backward: which window is skipped is known after its last one."""
    for message, weight, skipped, seen in ranks.run(rank_of_roots, 2, str(tmp_path), value, skips, timeout=60):
        assert weight == value
        assert cause in message if skips == 0 else skipped == [(1, 0.0), (2, 0.0)]
        assert seen == [(0, True), (1, True)] * (1 if skips == 0 else 2)


@pytest.mark.parametrize("index", [0, 1])
def test_an_observer_that_fails_on_one_process_in_a_window_that_is_skipped_ends_all(ranks, tmp_path, index):
    heard, own = ranks.run(rank_of_roots, 2, str(tmp_path), -1.0, 5, index, timeout=60)
    assert "rank 1: AssertionError" in heard[0]
    assert own[0].startswith("AssertionError")


OF_OBSERVERS = ("after_first_pass", "after_backward", "end_window")


def rank_fails(rank: int, world_size: int, folder: str, method: str, count: int) -> str:
    made = WindowsSeen() if method in OF_OBSERVERS else Returns()
    if rank == 1:
        vars(made)[method] = lambda *_: 1 / 0
    try:
        trainer(folder, made, per_device_train_batch_size=6, gradient_accumulation_steps=count).train()
    except (ZeroDivisionError, RuntimeError) as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("method", ["begin_window", "inputs", "reference", "select", "value", *OF_OBSERVERS, "logs"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_extension_that_fails_on_one_process_ends_all(ranks, tmp_path, method, count):
    heard, own = ranks.run(rank_fails, 2, str(tmp_path), method, count, timeout=60)
    assert "rank 1: ZeroDivisionError: division by zero" in heard
    assert own == "division by zero"


def test_a_training_without_states_has_no_file_of_them_and_reads_none(tmp_path, monkeypatch):
    trainer_for(tmp_path, save_strategy="steps", save_steps=2).train()
    assert not list(tmp_path.rglob("infcl_extensions.pt"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "infcl_extensions.pt").write_text("of a checkpoint in which the command is called")
    trainer_for(tmp_path / "new")
