"""Replay in a global batch that grows: shares, exact gradients of each stage, the order of the pairs, and resumes."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.demo import infcl
from helpers.parity import MODELS, EachGradient, check_each_gradient
from helpers.shards import numbered, write_tars
from helpers.streams import PAIRS, collate, stream_of
from helpers.trainers import StopAt, TrainedRows, parameters, trainer_for
from torch import Tensor, nn

from hf_infcl import InfCLTrainer, reference
from hf_infcl.encoders.dual_encoder import DualEncoder

NEW, OLD = models.Pairs(70), models.Pairs(22, seed=1)
GROWS = {
    "global_batch_schedule": ["8:0.3", "16:0.3", "32"],
    "gradient_accumulation_steps": 1,
    "max_steps": 12,
    "replay_share": 0.3,
}
SIZES = [8] * 7 + [16] * 4 + [32]
OLD_OF = {8: 2, 16: 5, 32: 10}  # rounded
OLD_SEED = 42 + 2**31


def trainer_of(folder: Any, model: Any, new: Any = NEW, old: Any = OLD, **options: Any) -> InfCLTrainer:
    return trainer_for(folder, model, new, replay_dataset=old, **{**GROWS, **options})


# ---- Exact gradients ----


def rank_gradients(rank: int, world_size: int, folder: str, objective: str) -> tuple[list[Tensor], list[list[Tensor]]]:
    seen, options = EachGradient(), {"optim": "sgd", "learning_rate": 0.01, "max_grad_norm": 0}
    trainer_of(folder, MODELS[objective](), callbacks=[seen], **options).train()
    return seen.weights, seen.gradients


def drawn(sizes: list[int], rows: int, seed: int) -> list[Tensor]:
    """The rows of global batches from passes over a table, each of which is shuffled and ends where none fits in."""
    found, first, epoch = [], 0, 0
    for size in sizes:
        if first + size > rows:
            first, epoch = 0, epoch + 1
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch))
        found.append(order[first : first + size])
        first += size
    return found


def gradients_of_whole_batches(objective: str, weights: list[Tensor]) -> list[list[Tensor]]:
    """Plain autograd in one process that holds the new and the old pairs of each global batch."""
    model, found = MODELS[objective](), []
    encoder = DualEncoder(model)
    new = drawn([size - OLD_OF[size] for size in SIZES], len(NEW), 42)
    old = drawn([OLD_OF[size] for size in SIZES], len(OLD), OLD_SEED)
    for at, *rows in zip(weights, new, old, strict=True):
        nn.utils.vector_to_parameters(at, model.parameters())
        parts = [encoder.embed(model, data.batch(own)) for data, own in zip((NEW, OLD), rows, strict=True)]
        scalars = encoder.scale_and_bias()
        both = (torch.cat(column) for column in zip(*parts, strict=True))
        loss = reference.contrastive_loss(*both, *scalars, objective=objective)
        found.append(list(torch.autograd.grad(loss.sum(), list(model.parameters()), materialize_grads=True)))
    return found


@pytest.mark.parametrize("objective", MODELS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_each_stage_equal_one_process_with_the_whole_batch(ranks, tmp_path, world_size, objective):
    of_ranks = ranks.run(rank_gradients, world_size, str(tmp_path), objective, always_ring=True)
    check_each_gradient(of_ranks, partial(gradients_of_whole_batches, objective))


# ---- The order of the pairs, and resumes ----


def trained(folder: Path, sets: Any, stop: int = 0, **options: Any) -> tuple[InfCLTrainer, list[list[tuple]]]:
    """A training with dropout up to a step, or to its end from a checkpoint if there is one; the rows of its steps."""
    rows = TrainedRows()
    options = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": stop or 100, **options}
    options["callbacks"] = [rows, *([StopAt(stop)] if stop else [])]
    resumes = any(folder.glob("checkpoint-*"))
    trainer = trainer_of(folder, models.clip(dropout=0.3, seed=5 if resumes else 0), *sets, **options)
    trainer.train(resume_from_checkpoint=resumes or None)
    return trainer, rows.steps[:-1]


def tokens(pairs: models.Pairs) -> set[tuple]:
    return set(map(tuple, pairs.tokens.tolist()))


def test_new_and_old_pairs_have_the_order_of_a_constant_batch(tmp_path):
    _, grown = trained(tmp_path / "grown", (NEW, OLD))
    constant = {"global_batch_schedule": None, "per_device_train_batch_size": 8, "max_steps": 8}
    _, equal = trained(tmp_path / "constant", (NEW, OLD), **constant)
    assert [len(rows) for rows in grown] == SIZES
    old = tokens(OLD)
    assert [sum(row in old for row in rows) for rows in grown] == [OLD_OF[size] for size in SIZES]
    for of_old, rows_of_pass in ((False, 70), (True, 22)):
        flat = [[row for row in itertools.chain(*steps) if (row in old) == of_old] for steps in (grown, equal)]
        length = min(*map(len, flat), rows_of_pass * 9 // 10)  # the first pass, whose end depends on the batch
        assert flat[0][:length] == flat[1][:length]
        assert len(set(flat[0][:length])) == length


def pairs_of(kind: str, folder: Path, numbers: range, **options: Any) -> Any:
    """Pairs as a stream, or as a table, for the collator of `helpers.streams`."""
    if kind == "stream":
        return stream_of(folder, **options)
    return numbered(numbers)


def sets_of(kinds: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    new, old = kinds.split()
    return pairs_of(new, folder / "new", range(70), **options), pairs_of(old, folder / "old", range(500, 522))


@pytest.fixture
def shards(tmp_path):
    write_tars(tmp_path / "new", [10] * 16)
    write_tars(tmp_path / "old", [10] * 4, first=500)
    return tmp_path


EPOCHS = {"max_steps": -1, "num_train_epochs": 2.5}


def rank_resumes(
    rank: int, world_size: int, folder: str, kinds: str, stops: tuple[int, ...], options: dict[str, Any]
) -> list[Any]:
    """Stops at steps and goes on with other weights and random state; returns the rows of the steps."""
    data = {"samples_per_epoch": 70} if "max_steps" in options else {}
    options = {"data_collator": collate, "per_device_train_batch_size": 4, **options}
    runs = Path(folder, f"{kinds} {world_size}")
    whole, steps = trained(runs / "whole", sets_of(kinds, Path(folder), **data), save_strategy="no", **options)
    for begin, end in itertools.pairwise((0, *stops, None)):
        torch.manual_seed(rank + 7)
        resumed, part = trained(runs / "parts", sets_of(kinds, Path(folder), **data), end or 0, **options)
        assert part == steps[begin:end]
    assert torch.equal(parameters(whole), parameters(resumed))
    names = ("loss", "samples_seen", "replay_samples", "epoch")
    logs = [[{k: e[k] for k in names} for e in t.state.log_history if "loss" in e] for t in (whole, resumed)]
    assert logs[0] == logs[1]
    return steps


@pytest.mark.parametrize(
    ("kinds", "stops", "options"),
    [
        ("table table", (5, 6, 7, 10), {}),  # around each change
        ("table stream", (11,), {"dataloader_num_workers": 1}),
        ("stream table", (11,), {}),
        ("stream stream", (11,), {}),
        ("table table", (11,), {**EPOCHS, "dataloader_num_workers": 2}),
        ("table stream", (11,), EPOCHS),
    ],
    ids=lambda value: value if isinstance(value, str) else "epochs" if "max_steps" in value else "",
)
def test_resume_is_bit_identical(shards, kinds, stops, options):
    rank_resumes(0, 1, str(shards), kinds, stops, options)


@pytest.mark.parametrize("kinds", ["table table", "stream table"])
def test_two_processes_have_the_global_batches_of_one_and_resume_to_the_bit(ranks, shards, kinds):
    """In epochs, of which the second begins with the smallest batch and ends with the largest."""
    one, two = (ranks.run(rank_resumes, n, str(shards), kinds, (9, 11), EPOCHS) for n in (1, 2))
    joined = [[sorted(itertools.chain(*rows)) for rows in zip(*of_ranks, strict=True)] for of_ranks in (one, two)]
    assert joined[0] == joined[1]
    old = set(map(tuple, PAIRS.tokens[500:540].tolist()))
    assert [sum(row in old for row in rows) for rows in joined[0]] == [OLD_OF[len(rows)] for rows in joined[0]]
    if kinds == "table table":
        steps = [[row for row in rows if row not in old] for rows in joined[0]]
        first = next(n for n in range(len(steps)) if sum(map(len, steps[: n + 1])) > 70)
        of_pass = list(itertools.chain(*steps[:first]))
        assert len(set(of_pass)) == len(of_pass) > 50, "each new pair once"


# ---- Bad input ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replay_share": 0.05}, r"replay_share=0\.05 of a global batch of 8 pairs is 0 old pairs after rounding"),
        ({"replay_share": 0.8}, "replay set has 22 pairs, fewer than its 26 of each global batch of 32 pairs"),
        ({"max_steps": -1, "num_train_epochs": 0.1}, "16 pairs that no step would train"),
    ],
)
def test_shares_that_a_stage_cannot_have_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        trainer_of(tmp_path, models.clip(), **options)


def test_smaller_micro_batches_are_refused_with_a_stream(shards):
    options = {"per_device_train_batch_size": 16, "data_collator": collate}
    with pytest.raises(ValueError, match=r"batch of 8 pairs.*micro-batches of a stream.*at most 8"):
        trainer_of(shards / "out", models.clip(), *sets_of("table stream", shards), **options)


# ---- The command ----


def test_the_command_replays_in_a_batch_that_grows(small, demo, tmp_path, capsys):
    old = ["--replay_dataset", demo / "digits", "--replay_share", 0.5, "--global_batch_schedule", "4:0.5", "8"]
    infcl(*small, *old, "--max_steps", 3, "--save_strategy", "steps", "--save_steps", 2)  # with a card of each batch
    printed = capsys.readouterr().out
    assert "The global batch grows: 4 pairs for 2 steps, 8 pairs for 1 step" in printed
    logs = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    assert [entry["replay_samples"] for entry in logs if "replay_samples" in entry][-1] == 2 * 2 + 4
    assert "4 old pairs in each global batch (50.0%)" in (tmp_path / "out/README.md").read_text()
