"""Measures the averages between two ends, half of each guard at a time, and chooses and prints them.

The choice is the greatest gain that costs no guard more than is tolerated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..evaluation.metrics import HIGH, LOW, score, score_if_measured
from ..shards.values import counted

ALPHAS = tuple(step / 10 for step in range(11))
ROUNDING = 1e-9  # so that a loss of exactly the tolerance is within it
VALIDATION, REST = "validation", "rest"  # end the names of the two halves of a guard
SPLIT = (
    "A random half of the rows of each guard (validation, always the same) may choose alpha; the other half (rest) "
    "reports what was kept. The gain is measured on the same rows that choose."
)
BY_LOSS = "Of gains within the 95% interval of the greatest, the one with the lowest loss is chosen."


@dataclass(frozen=True)
class Measured:
    """What was measured at one α. All scores are fractions from 0 to 1, see `score`."""

    alpha: float  # from 0, the start, to 1, the end
    gained: float | None  # the mean score of the sets that the training was for; None if there is none
    validation: Mapping[str, float]  # the score of that half of each guard set by which α may be chosen
    rest: Mapping[str, float]  # the score of the other half of each guard set, on which the choice is reported
    gained_low: float | None = None  # the bounds of the 95% interval of ``gained``; None if a set has no interval
    loss: float | None = None  # the mean contrastive loss of the sets of pairs among these; None if there is none
    gained_high: float | None = None
    rest_bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # the 95% intervals of ``rest``


@dataclass(frozen=True)
class Averaged:
    """An average of the weights before and after a fine-tuning."""

    alpha: float  # from 0, the start, to 1, the end
    path: str  # one of `PATHS`
    tolerance: float | None = None  # what a guard may lose for an average to be chosen; None if alpha was set
    measured: Sequence[Measured] = ()  # in the order of their α; empty if there was nothing to measure them on
    batch_norms: int = 0  # whose running statistics were averaged like the weights

    def at(self, alpha: float) -> Measured:
        """What was measured at one of the α that were measured."""
        return next(one for one in self.measured if one.alpha == alpha)


def check_tolerance(tolerance: float) -> None:
    """Raises a ValueError unless the tolerance is a fraction."""
    if not 0 <= tolerance <= 1:
        raise ValueError(
            f"guard_tolerance is a fraction from 0 to 1 (0.01 is one point of recall or accuracy), got {tolerance}."
        )


def chosen(measured: Sequence[Measured], tolerance: float) -> Measured:
    """The greatest gain at which no guard loses more than is tolerated, or one that is as good within the noise.

    Of the gains within the 95% interval of the greatest, the one with the lowest loss is chosen, if there are pairs:
    where captions repeat, or rows are few, the recall@1 of the greatest is the greatest by chance. Of equals, it is the
    one nearest to the start. Only the validation halves of the guards decide.

    Args:
        measured: with different α, among them the start's.
        tolerance: what the score of a guard may be below that of the start, as a fraction: 0.01 is one point.

    Raises:
        ValueError: the start was not measured; the tolerance is no fraction.
    """
    check_tolerance(tolerance)
    start = next((one for one in measured if one.alpha == 0), None)
    if start is None:
        raise ValueError(
            f"What a guard loses is compared with alpha 0, but only {[one.alpha for one in measured]} were measured."
        )
    least = {name: value - tolerance - ROUNDING for name, value in start.validation.items()}
    kept = [one for one in measured if all(one.validation[name] >= value for name, value in least.items())]
    best = max(kept, key=lambda one: (one.gained or 0.0, -one.alpha))
    if best.gained_low is None or best.loss is None:
        return best
    alike = [one for one in kept if (one.gained or 0.0) >= best.gained_low]
    return min(alike, key=lambda one: (one.loss or 0.0, one.alpha))


def halves(rows: Any) -> tuple[Any, Any]:
    """A guard set, a `datasets.Dataset`, in two halves of random rows: one to choose by, one to report on.

    They are always the same.

    Raises:
        ValueError: it has fewer than two rows.
    """
    if len(rows) < 2:
        raise ValueError(
            f"A guard set is split into two halves, but it has {counted(len(rows), 'row')}. Give at least 2."
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    first, second = order.tensor_split([(len(rows) + 1) // 2])
    return rows.select(first.sort().values.tolist()), rows.select(second.sort().values.tolist())


def find_average(
    move: Callable[[float], None],
    measure: Callable[[float], Measured] | None,
    *,
    alpha: float | None,
    path: str,
    tolerance: float,
    batch_norms: int = 0,
) -> Averaged:
    """Measures averages, and gives the model the weights at ``alpha``, or else at the α that it chooses.

    Args:
        move: gives the model the weights at an α.
        measure: measures the model, which has the weights at this α; None if there is nothing to measure it on.
        alpha: of the wanted average, which is measured beside both ends; None to measure `ALPHAS` and choose.
        batch_norms: those of the model that have running statistics.
    """
    measured = []
    for one in () if measure is None else ALPHAS if alpha is None else sorted({0.0, alpha, 1.0}):
        move(one)
        assert measure is not None
        measured.append(measure(one))
    best = chosen(measured, tolerance).alpha if alpha is None else alpha
    move(best)
    return Averaged(best, path, tolerance if alpha is None else None, measured, batch_norms)


def with_halves(validation: Mapping[str, object], rest: Mapping[str, object]) -> dict[str, Any]:
    """Both halves of each guard, by names that end with `VALIDATION` and `REST`."""
    parts = ((VALIDATION, validation), (REST, rest))
    return {f"{name}_{part}": half for part, sets in parts for name, half in sets.items()}


def measured_at(alpha: float, metrics: Mapping[str, float], gains: Sequence[str], guards: Sequence[str]) -> Measured:
    """The scores of one evaluation, whose metrics have the prefix ``eval``.

    ``gains`` are the names of the sets that the training was for, and ``guards`` those of the guard sets without their
    halves.
    """
    gained = [score(metrics, f"eval_{name}_") for name in gains]
    validation, rest = ({g: score(metrics, f"eval_{g}_{part}_") for g in guards} for part in (VALIDATION, REST))
    ends = [[score_if_measured(metrics, f"eval_{name}_", end) for name in gains] for end in (LOW, HIGH)]
    low, high = (_mean([one for one in of if one is not None]) if None not in of else None for of in ends)
    bounds = {}
    for name in guards:
        least, most = (score_if_measured(metrics, f"eval_{name}_{REST}_", end) for end in (LOW, HIGH))
        if least is not None and most is not None:
            bounds[name] = least, most
    losses = [metrics[loss] for name in gains if (loss := f"eval_{name}_loss") in metrics]
    return Measured(alpha, _mean(gained), validation, rest, low, _mean(losses), high, bounds)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def not_trained(average: Averaged) -> str:
    """A sentence if the average is the start itself; otherwise nothing."""
    if average.alpha != 0:
        return ""
    why, advice = "as was asked for (α = 0)", ""
    if average.tolerance is not None:
        why = "since every average with those after it costs a guard more than was tolerated, or gains nothing (α = 0)"
        advice = f" Guards of more rows are less noisy; guard_tolerance above {average.tolerance:g} allows more."
    return f"This model was not trained: its weights are those before the training, {why}.{advice}"


def described(average: Averaged) -> Iterator[str]:
    """Lines with the table of what was measured, and what the average is."""
    if average.measured:
        guards = list(average.measured[0].rest)
        if guards:
            yield SPLIT
        if average.tolerance is not None and average.measured[0].loss is not None:
            yield BY_LOSS
        yield "  ".join(["alpha", "trained for", *(f"{name} ({VALIDATION}, {REST})" for name in guards)])
        for one in average.measured:
            gained = f"{'-' if one.gained is None else f'{100 * one.gained:.2f}%':>11}"
            kept = (f"{100 * one.validation[g]:.2f}%, {100 * one.rest[g]:.2f}%".rjust(len(g) + 20) for g in guards)
            yield "  ".join([f"{one.alpha:5.2g}", gained, *kept]) + ("  < chosen" if one.alpha == average.alpha else "")
    if average.batch_norms:
        yield (
            f"The running statistics of {counted(average.batch_norms, 'batch norm')} were averaged like the weights. "
            "They are not those that the averaged weights would have on data, so measure the model before you use it."
        )
