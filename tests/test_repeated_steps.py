"""A step that was repeated after memory had run out is, to the bit, the one that began with those micro-batches."""

from typing import Any
from unittest import mock

import pytest
import torch
from helpers import models
from helpers.concepts import Concepts, linear
from helpers.processors import END, clip_processor
from helpers.shards import write_tars
from helpers.streams import collate, stream_of
from helpers.trainers import parameters, trained, trainer_for
from test_micro_batches import FREE, RunsOut
from test_teachers import rows, store, table_source
from torch import Tensor

from hf_infcl import ImageTextDataset, InfCLTrainer
from hf_infcl.options import arguments as batch_division
from hf_infcl.quality.selection import WithoutNoisyPairs
from hf_infcl.step.extensions import LossTerm, of_kind
from hf_infcl.step.grad_cache import Features

PLAIN: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_steps": 2}


def repeated(folder: Any, number: int, *, backward: bool = False, most: int = 9, **options: Any) -> InfCLTrainer:
    """A training whose micro-batches of 4 pairs run out of memory in this forward, or its backward, and each after it.

    They do so at most so many times.
    """
    with mock.patch.object(batch_division, "UNTRIED", 4):
        sizes = {**FREE, "global_batch_size": 16}
        trainer = trainer_for(folder, **{"data": models.Pairs(64), **PLAIN, **sizes, **options})
    assert trainer.args.per_device_train_batch_size == 4
    graphs = int(options.get("retain_graphs", 1))
    memory = RunsOut(trainer.model, number, backward=backward, most=most)
    trainer.train()
    halved = most >= graphs
    assert memory.raised == (graphs if halved else most), "once for each graph that was kept"
    assert trainer.args.largest_micro_batch == (2 if halved else None)
    assert trainer.window_step.graphs.kept == max(1, graphs - most)
    return trainer


def whole(folder: Any, micro_batch: int, **options: Any) -> InfCLTrainer:
    """The same with enough memory, in micro-batches of so many pairs from the start."""
    sizes = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 16 // micro_batch}
    return trained(trainer_for(folder, **{"data": models.Pairs(64), **PLAIN, **sizes, **options}))


def state_of(trainer: InfCLTrainer) -> list[Tensor]:
    """The weights, the buffers, and what the optimizer keeps of them, such as an average."""
    state = [*trainer.model.parameters(), *trainer.model.buffers()]
    kept = trainer.optimizer.state_dict()["state"]
    return state + [value for of_one in kept.values() for value in of_one.values() if isinstance(value, Tensor)]


def logged(trainer: InfCLTrainer) -> list[tuple[Any, ...]]:
    names = ("loss", "grad_norm", "positive_cosine", "teacher_loss", "keep_features_loss", "replay_samples", "left_out")
    return [tuple(entry.get(name) for name in names) for entry in trainer.state.log_history if "loss" in entry]


def assert_same(one: InfCLTrainer, other: InfCLTrainer) -> None:
    pairs = zip(state_of(one), state_of(other), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
    assert logged(one) == logged(other)


def assert_close(one: InfCLTrainer, other: InfCLTrainer) -> None:
    for first, second in zip(state_of(one), state_of(other), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


# Of the first window, whose first pass takes four forwards, and whose second pass three or, with graphs, two.
PLACES = [(1, False), (4, False), (6, False), (4, True), (6, True)]


@pytest.mark.parametrize(("number", "backward"), PLACES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "muon", "optim": "adamw_torch", "learning_rate": 1e-3},
        {"offload_inputs": True, "texts_at_once": 2},
        {"keep_features": 0.5, "matryoshka_dims": [4]},
        {"equal_ids": "positive", "data": models.Pairs(64, repeats=2)},
        {"max_grad_norm": 0.1, "skip_nonfinite": 1},
        {"gradient_checkpointing": True, "retain_graphs": "2"},
    ],
    ids=lambda options: " ".join(options),
)
def test_a_repeated_step_is_the_one_of_smaller_micro_batches(tmp_path, once, options, number, backward):
    expected = once((*options,), lambda: whole(tmp_path, 2, **options))
    assert_same(repeated(tmp_path, number, backward=backward, **options), expected)


@pytest.mark.parametrize(("number", "backward"), [(1, False), (3, False), (4, True), (5, False)])
@pytest.mark.parametrize("most", [1, 2])
def test_graphs_are_done_without_before_micro_batches_are_halved(tmp_path, once, number, backward, most):
    options = {"retain_graphs": "3", "offload_inputs": True}
    expected = once("graphs", lambda: whole(tmp_path, 4, **options))
    assert_same(repeated(tmp_path, number, backward=backward, most=most, **options), expected)


def test_memory_may_run_out_in_the_last_backward(tmp_path, once):
    assert_same(repeated(tmp_path, 7, backward=True), once((), lambda: whole(tmp_path, 2)))


@pytest.mark.parametrize("options", [{"replay_share": 0.25}, {"replay_share": 0.5}], ids=str)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("number", "backward"), [(9, False), (13, True)])
def test_old_pairs_stay_what_they_are(tmp_path, once, options, streams, number, backward):
    """In another order, as each micro-batch has its share of them."""

    def data() -> dict[str, Any]:
        if not streams:
            return {"replay_dataset": models.Pairs(64, seed=3)}
        parts = {"data": stream_of(tmp_path), "replay_dataset": stream_of(tmp_path, seed=3)}
        return {**parts, "data_collator": collate}

    write_tars(tmp_path, [10] * 8) if streams else None
    found = repeated(tmp_path / "a", number, backward=backward, **options, **data())
    expected = once((*options.items(), streams), lambda: whole(tmp_path / "b", 4, **options, **data()))
    assert_close(found, expected)
    assert [entry[5] for entry in logged(found)] == [entry[5] for entry in logged(expected)] != [None] * 2


@pytest.mark.parametrize("captions", [1, 2])
@pytest.mark.parametrize(("number", "backward"), [(1, False), (4, True), (6, False)])
def test_stored_teachers(tmp_path, once, captions, number, backward):
    folder = store(table_source(rows()), tmp_path / "stored")
    made = {"teacher_embeddings": folder, "processing_class": clip_processor(), "data_collator": None}

    def run(train: Any, *place: Any, **more: Any) -> InfCLTrainer:
        data = ImageTextDataset(rows(), captions_per_image=captions)
        return train(tmp_path / "out", *place, **more, data=data, model=models.clip(end=END), **made)

    expected = once(f"{captions} captions", lambda: run(whole, 2))
    assert_same(run(repeated, number, backward=backward), expected)


# ---- Pairs that are left out ----


def selection_of(trainer: InfCLTrainer) -> WithoutNoisyPairs:
    (found,) = of_kind(trainer.window_step.extensions, WithoutNoisyPairs)
    return found


def left_out(folder: Any, number: int | None, *, backward: bool = False, micro_batch: int = 16) -> InfCLTrainer:
    """A training that begins to leave pairs out, and of which memory may run out in a forward or its backward."""
    options = {**PLAIN, **FREE, "learning_rate": 0.3, "leave_out": "noisy", "max_steps": 32}
    with mock.patch.object(batch_division, "UNTRIED", micro_batch):
        trainer = trainer_for(folder, linear(), Concepts(128, wrong=0.3), **options, global_batch_size=64)
    memory = None if number is None else RunsOut(trainer.model, number, backward=backward, images=micro_batch)
    trainer.train()
    assert memory is None or memory.raised == 1
    return trainer


@pytest.mark.parametrize("number", [1, 4])
def test_pairs_are_left_out_as_of_smaller_micro_batches(tmp_path, once, number):
    """If memory runs out before the decision."""
    one, other = left_out(tmp_path, number), once("left out, by 8", lambda: left_out(tmp_path, None, micro_batch=8))
    assert_same(one, other)
    for first, second in zip(selection_of(one).averages.slow(), selection_of(other).averages.slow(), strict=True):
        assert torch.equal(first, second), "each pair was visited once in each window"
    assert any(entry[-1] for entry in logged(one)), "it had begun"


# A window of four micro-batches takes seven forwards.
@pytest.mark.parametrize(("number", "backward"), [(150, False), (153, False), (155, True), (200, True)])
def test_a_decision_about_pairs_is_kept_when_its_step_is_repeated(tmp_path, once, number, backward):
    one = left_out(tmp_path, number, backward=backward)
    other = once("left out", lambda: left_out(tmp_path, None))
    assert one.args.largest_micro_batch == 8
    assert_close(one, other)
    assert [entry[-1] for entry in logged(one)] == [entry[-1] for entry in logged(other)]
    assert selection_of(one).averages.mean_visits == selection_of(other).averages.mean_visits


def rank_left_out(rank: int, world_size: int, folder: str, failing: int, number: int) -> tuple[Any, ...]:
    one = left_out(folder, number if rank == failing else None, micro_batch=8)
    return one.args.largest_micro_batch, parameters(one), logged(one), selection_of(one).averages.mean_visits


@pytest.mark.parametrize(("failing", "number"), [(0, 150), (1, 153), (0, 160)])
def test_all_processes_keep_their_decision(ranks, tmp_path, once, failing, number):
    other = once("left out, by 8", lambda: left_out(tmp_path, None, micro_batch=8))
    for largest, weights, logs, visits in ranks.run(rank_left_out, 2, str(tmp_path), failing, number):
        assert largest == 4
        torch.testing.assert_close(weights, parameters(other), rtol=1e-4, atol=1e-5)
        assert [entry[-1] for entry in logs] == [entry[-1] for entry in logged(other)]
        assert visits == selection_of(other).averages.mean_visits


# ---- Terms of the loss ----


class Large(LossTerm):
    """The first time, there may be no memory for it."""

    name = "large"

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def value(self, features: Features, references: Features) -> Tensor:
        fails, self.fails = self.fails, False
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (features[0] * features[1]).mean()


def rank_term(rank: int, world_size: int, folder: str, failing: int) -> tuple[int | None, Tensor]:
    options = {**PLAIN, **FREE, "global_batch_size": 16, "extensions": [Large(rank == failing)]}
    with mock.patch.object(batch_division, "UNTRIED", 4):
        trainer = trainer_for(folder, data=models.Pairs(64), **options)
    trainer.train()
    return trainer.args.largest_micro_batch, parameters(trainer)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_term_without_memory_on_one_process_repeats_the_step_on_all(ranks, tmp_path, failing):
    (_, expected), _ = ranks.run(rank_term, 2, str(tmp_path), None, timeout=60)
    for largest, weights in ranks.run(rank_term, 2, str(tmp_path), failing, timeout=60):
        assert largest == 2
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
