"""The choice between weights of a path: the greatest gain that costs no guard more than is tolerated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..evaluation.metrics import SCORES

ALPHAS = tuple(step / 10 for step in range(11))
ROUNDING = 1e-9  # so that a loss of exactly the tolerance is within it


@dataclass(frozen=True)
class Measured:
    """What was measured at one α. All scores are fractions from 0 to 1, see `score`."""

    alpha: float  # from 0, the start, to 1, the end
    gained: float | None  # the mean score of the sets that the training was for; None if there is none
    validation: Mapping[str, float]  # the score of that half of each guard set by which α may be chosen
    rest: Mapping[str, float]  # the score of the other half of each guard set, on which the choice is reported
    gained_low: float | None = None  # the bounds of the 95% interval of ``gained``; None if a set has no interval
    loss: float | None = (
        None  # the mean contrastive loss of those sets that are image-text pairs; None if there is none
    )
    gained_high: float | None = None
    rest_bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # the 95% intervals of ``rest``


def score(metrics: Mapping[str, float], prefix: str = "") -> float:
    """The score of one set by the table `hf_infcl.evaluation.metrics.SCORES`, such as the top-1 accuracy of classes.

    The names of its ``metrics`` begin with the prefix, such as "eval_pairs_".

    Raises:
        ValueError: neither was measured on the set.
    """
    if (found := score_if_measured(metrics, prefix)) is None:
        raise ValueError(f"Neither recall@1 nor acc1 was measured with the prefix {prefix!r}, but {sorted(metrics)}.")
    return found


def score_if_measured(metrics: Mapping[str, float], prefix: str = "", end: str = "") -> float | None:
    """The `score`, or with ``end`` the mean of these bounds of its parts; None if they were not measured."""
    for names in SCORES.values():
        keys = [prefix + name + end for name in names]
        if all(key in metrics for key in keys):
            return sum(metrics[key] for key in keys) / len(keys)
    return None


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
        raise ValueError(f"A guard set is split into two halves, but it has {len(rows)} rows. Give at least 2.")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    first, second = order.tensor_split([(len(rows) + 1) // 2])
    return rows.select(first.sort().values.tolist()), rows.select(second.sort().values.tolist())
