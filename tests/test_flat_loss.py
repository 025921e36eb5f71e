"""A loss that stays that of chance is told once, with what to do; a training that is slow at its start is not."""

import math
import re
from typing import Any

import pytest
import torch
from helpers import models
from helpers.trainers import trained, trainer_for

from hf_infcl.reference import contrastive_loss
from hf_infcl.training import progress
from hf_infcl.training.flat_loss import loss_of_chance, words_of_flat_loss


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_the_loss_of_chance_is_that_of_equal_embeddings(objective):
    pairs = 12
    equal = torch.ones(pairs, 4, dtype=torch.float64) / 2
    bias = torch.tensor(-math.log(pairs - 1) - 3.0, dtype=torch.float64)  # the best one at a multiplier of 3
    loss = contrastive_loss(equal, equal, torch.tensor(3.0), bias, objective=objective)
    assert loss.item() == pytest.approx(loss_of_chance(pairs, objective))


def history(losses: list[float], norms: tuple[float, float] = (10.0, 5.0), pairs: int = 64) -> list[dict[str, Any]]:
    last = len(losses) - 1
    logs = [
        {"step": 10 * n, "loss": loss, "global_batch_size": pairs, "grad_norm": norms[n == last]}
        for n, loss in enumerate(losses)
    ]
    return [*logs[:1], {"step": 0, "eval_loss": 3.0}, *logs[1:]]


CHANCE = math.log(64)
# Losses of a small CLIP on digits, in batches of 64, at rates of 1e-7, 1e-5, 1e-4 and 1e-2; at 1e-5 it may learn yet.
UNMOVED = [4.367, 4.398, 4.355, 4.384, 4.357, 4.348, 4.369, 4.353]
SLOW = [4.295, 4.218, 4.184, 4.176, 4.159, 4.157, 4.155, 4.154]
LEARNS = [4.198, 4.155, 4.144, 4.103, 3.943, 3.680, 3.405, 3.263]
COLLAPSED = [4.179, *[4.159] * 7]


@pytest.mark.parametrize(
    ("losses", "norms", "told"),
    [
        (
            UNMOVED,
            (13.0, 10.0),
            r"\(ln 64\)\. The weights change too slowly: raise the learning rate, which is 0.001, or",
        ),
        (
            SLOW,
            (6.0, 0.6),
            "If all embeddings became alike in the first steps, start .* If the weights change too slowly, raise",
        ),
        (COLLAPSED, (12.0, 1e-4), r"has vanished \(norm 0.0001, first 12\), because all embeddings are alike: start"),
        ([3.0, 2.0, *[4.159] * 6], (12.0, 1e-4), "with a tenth of the learning rate, 0.0001, and a warm-up"),
        ([4.2, 9.0, 12.0, 15.0, 14.0, 15.0, 16.0, 15.0], (10.0, 9.0), "higher than at the start: start again"),
        (LEARNS, (10.0, 5.0), ""),
        ([9.0, 8.8, 8.6, 8.4, 8.2, 8.0, 7.8, 7.6], (10.0, 5.0), ""),  # above chance, and falls
        ([4.159] * 3, (12.0, 1e-4), ""),  # too few to tell
        ([3.9] * 8, (10.0, 5.0), ""),  # below chance
    ],
)
def test_only_a_loss_that_stays_that_of_chance_is_told(losses, norms, told):
    said = words_of_flat_loss(history(losses, norms), 10 * (len(losses) // 2) - 10, "softmax", 1e-3)
    assert bool(said) == bool(told)
    if told:
        assert re.search(told, said)
        assert "all 64 pairs of a global batch look alike it is 4.16 (ln 64)" in said


def test_batches_that_grow_and_other_terms():
    grown = [{**entry, "global_batch_size": 4096, "loss": math.log(4096)} for entry in history([1.0] * 8)]
    logs = history([CHANCE] * 8)[:5] + [{**entry, "step": entry["step"] + 50} for entry in grown[4:] if "loss" in entry]
    assert "all 4,096 pairs" in words_of_flat_loss(logs, 20, "softmax", 1e-3)
    assert "is 9.32 (about ln 4,096 + 1)" in words_of_flat_loss(
        [{**entry, "loss": entry.get("loss", 0) + 1} for entry in logs], 20, "sigmoid", 1e-3
    )
    with_teacher = [{**entry, "teacher_loss": 1.0} for entry in logs]
    assert not words_of_flat_loss(with_teacher, 20, "softmax", 1e-3), "the loss is a sum"


@pytest.mark.parametrize(
    ("model", "rate", "equal_ids", "times"),
    [
        *((models.clip, 0.0, None, 1), (models.siglip, 0.0, None, 1), (models.clip, 1e-2, None, 0)),
        (models.clip, 0.0, "positive", 0),  # whose loss of chance is another
    ],
)
def test_a_training_tells_it_once(tmp_path, monkeypatch, model, rate, equal_ids, times):
    monkeypatch.setattr(progress, "SLOW_START", 8)
    said: list[str] = []
    monkeypatch.setattr(progress.logger, "warning", said.append)
    options = {"learning_rate": rate, "max_steps": 24, "equal_ids": equal_ids}
    trainer = trained(trainer_for(tmp_path, model(), models.Pairs(8), **options))
    assert len(said) == times
    told_at = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert told_at[-1] == 24
    assert all("from step 7 to 12" in words and "of a global batch look alike" in words for words in said)
