"""Recognises a loss that stays at the level of chance, and says what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

# Steps after the warm-up that show nothing yet: a training from random weights may begin to learn after a hundred.
SLOW_START = 100
_FEWEST = 4  # losses that are compared
# A loss is flat if its mean over the later half of the steps is at least the first share of the loss of chance (equal
# pair ids lower it a little, which that loss does not consider), and has fallen by less than the second share since the
# earlier half.
_NEAR_CHANCE, _LEAST_FALL = 0.97, 0.005
# The share of its first norm below which a gradient has vanished, as it does where all embeddings are alike.
_VANISHED = 0.02
# The share of its first value above which a loss has risen, since its steps are too large.
_RISEN = 1.1
# The share of the loss of chance up to which all embeddings may be alike.
_AT_CHANCE = 1.02


def loss_of_chance(pairs: int, objective: str) -> float:
    """The loss, in nats, of a model to which all pairs of a global batch look alike; with the best bias for sigmoid."""
    if objective == "softmax" or pairs < 2:
        return math.log(pairs)
    return math.log(pairs) + (pairs - 1) * math.log(pairs / (pairs - 1))


def words_of_flat_loss(history: Sequence[Mapping[str, Any]], since: int, objective: str, rate: float) -> str:
    """Sentences about a loss that has stayed at the level of chance, or above it, since a step; empty if it has not.

    A loss with further terms, such as those of teachers, is not judged.

    Args:
        history: Trainer's ``log_history``.
        since: the last step that is not looked at.
        rate: the learning rate at its peak.
    """
    logs = [entry for entry in history if "loss" in entry and "global_batch_size" in entry]
    shown = [entry for entry in logs if entry["step"] > since]
    if len(shown) < _FEWEST or any(name.endswith("_loss") for name in shown[-1]):
        return ""
    ratios = [entry["loss"] / max(loss_of_chance(entry["global_batch_size"], objective), 1e-9) for entry in shown]
    middle = len(ratios) // 2
    before, after = fmean(ratios[:middle]), fmean(ratios[middle:])
    if not (after >= _NEAR_CHANCE and after >= before * (1 - _LEAST_FALL)):  # also if one is not a number
        return ""
    pairs, loss = shown[-1]["global_batch_size"], fmean(entry["loss"] for entry in shown)
    norms = [entry["grad_norm"] for entry in logs if entry.get("grad_norm")]
    vanished = bool(norms) and norms[-1] < _VANISHED * norms[0]
    risen, at_chance = after > 1 and loss > _RISEN * logs[0]["loss"], after < _AT_CHANCE
    lower = f"start again with a tenth of the learning rate, {rate / 10:g}, and a warm-up (warmup_steps)"
    higher = (
        f"raise the learning rate, which is {rate:g}, or train longer; from random weights, take more pairs or a "
        "pretrained model. If nothing helps, see whether images and captions belong together (infcl check)"
    )
    if vanished and at_chance:
        norm = f"norm {norms[-1]:.2g}, first {norms[0]:.2g}"
        advice = f"The gradient has vanished ({norm}), because all embeddings are alike: {lower}."
    elif risen:
        advice = f"It is higher than at the start: {lower}."
    elif at_chance:
        advice = (
            f"If all embeddings became alike in the first steps, {lower}. If the weights change too slowly, {higher}."
        )
    else:
        advice = f"The weights change too slowly: {higher}."
    chance = f"ln {pairs:,}" if objective == "softmax" else f"about ln {pairs:,} + 1"
    return (
        f"The model has learned nothing from step {shown[0]['step']:,} to {shown[-1]['step']:,}: the loss stays at "
        f"{loss:.3g}, and where all {pairs:,} pairs of a global batch look alike it is "
        f"{loss_of_chance(pairs, objective):.3g} ({chance}). {advice}"
    )
