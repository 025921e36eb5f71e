"""Measures the averages between two ends, half of each guard at a time, and prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation.metrics import HIGH, LOW
from .average_choice import ALPHAS, Measured, chosen, score, score_if_measured

VALIDATION, REST = "validation", "rest"  # end the names of the two halves of a guard
SPLIT = (
    "A random half of the rows of each guard (validation, always the same) may choose alpha; the other half (rest) "
    "reports what was kept. The gain is measured on the same rows that choose."
)
BY_LOSS = "Of gains within the 95% interval of the greatest, the one with the lowest loss is chosen."


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
        path: on which ``move`` moves.
        tolerance: as for `chosen`.
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
    why = "as was asked for (α = 0)"
    if average.tolerance is not None:
        why = "since every average with those after it costs a guard more than was tolerated, or gains nothing (α = 0)"
    return f"This model was not trained: its weights are those before the training, {why}."


def described(average: Averaged) -> Iterator[str]:
    """Lines with the table of what was measured, and what the average is."""
    if average.measured:
        guards = list(average.measured[0].rest)
        if guards:
            yield SPLIT
        if average.tolerance is not None and average.measured[0].loss is not None:
            yield BY_LOSS
        yield "  ".join(["alpha", "  gained", *(f"{name} ({VALIDATION}, {REST})" for name in guards)])
        for one in average.measured:
            gained = "       -" if one.gained is None else f"{100 * one.gained:7.2f}%"
            kept = (f"{100 * one.validation[g]:.2f}%, {100 * one.rest[g]:.2f}%".rjust(len(g) + 20) for g in guards)
            yield "  ".join([f"{one.alpha:5.2g}", gained, *kept]) + ("  <" if one.alpha == average.alpha else "")
    if average.batch_norms:
        yield (
            f"The running statistics of {average.batch_norms} batch norms were averaged like the weights. They are not "
            "those that the averaged weights would have on data, so measure the model before you use it."
        )
