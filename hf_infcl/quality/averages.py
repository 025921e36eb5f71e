"""Averages of the weights before and after a fine-tuning (WiSE-FT, arXiv 2109.01903), and which of them is chosen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..evaluation.metrics import LOW, score, score_if_measured
from ..files.text import counted

ALPHAS = tuple(step / 10 for step in range(11))
VALIDATION, REST = "validation", "rest"  # end the names of the two halves of a guard
SPLIT = (
    "A random half of the rows of each guard (validation, always the same) may choose alpha; the other half (rest) "
    "reports what was kept. The gain is measured on the same rows that choose."
)
_BY_LOSS = "Of gains within the 95% interval of the greatest, the one with the lowest loss is chosen."
_ROUNDING = 1e-9  # so that a loss of exactly the tolerance is within it


@dataclass(frozen=True)
class Measured:
    """What was measured at one α. All scores are fractions from 0 to 1, see `score`."""

    alpha: float  # from 0, the start, to 1, the end
    gained: float | None  # the mean score of the sets that the training was for; None if there is none
    validation: Mapping[str, float]  # the score of that half of each guard set by which α may be chosen
    rest: Mapping[str, float]  # the score of the other half of each guard set, on which the choice is reported
    gained_low: float | None = None  # the lower bound of the 95% interval of ``gained``; None if a set has none
    loss: float | None = None  # the mean contrastive loss of the sets of pairs among these; None if there is none


@dataclass(frozen=True)
class Averaged:
    """An average of the weights before and after a fine-tuning."""

    alpha: float  # from 0, the start, to 1, the end
    tolerance: float | None = None  # what a guard may lose for an average to be chosen; None if alpha was set
    measured: Sequence[Measured] = ()  # in the order of their α; empty if there was nothing to measure them on
    batch_norms: int = 0  # whose running statistics were averaged like the weights

    def at(self, alpha: float) -> Measured:
        """What was measured at one of the α that were measured."""
        return next(one for one in self.measured if one.alpha == alpha)


def interpolated(start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """The weights start + α·(end − start); at 0 and 1, exactly those of the start and of the end.

    What did not change stays as it is to the bit, as does all that was frozen. Changes are scaled in fp32 or a more
    exact dtype and rounded once. Running statistics of batch norms move like the weights; what is not floating, such as
    the counters of batch norms, is that of the end, or that of the start at 0.

    Args:
        start, end: tensors by name, with the same names and shapes; those of the end decide about order and dtypes.

    Returns:
        New tensors for what changed, and those of ``end`` for the rest.

    Raises:
        ValueError: alpha is outside of [0, 1]; start and end differ in names or shapes.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0, the weights of the start, to 1, those of the end, got {alpha}.")
    cure = "Name the checkpoint from which the training began as the start."
    if different := sorted(start.keys() ^ end.keys()):
        side = "start" if different[0] in start else "end"
        raise ValueError(
            f"Start and end are not the same model: {counted(len(different), 'weight')} without a counterpart, such "
            f"as {different[0]} of the {side}. {cure}"
        )
    for name, tensor in end.items():
        if start[name].shape != tensor.shape:
            raise ValueError(
                f"Start and end are not the same model: {name} has the shape {tuple(start[name].shape)} at the start "
                f"and {tuple(tensor.shape)} at the end. {cure}"
            )
    return {name: _between(start[name].to(tensor.device), tensor, alpha) for name, tensor in end.items()}


def _between(start: Tensor, end: Tensor, alpha: float) -> Tensor:
    if torch.equal(start, end):  # also of equal infinities, whose difference is no number
        return end
    if not end.is_floating_point():
        return start if alpha == 0 else end
    if alpha == 0:
        return start.to(end.dtype, copy=True)  # torch.lerp would turn -0.0 into 0.0
    exact = torch.promote_types(end.dtype, torch.float32)
    return torch.lerp(start.to(exact), end.to(exact), alpha).to(end.dtype)


def halves(rows: Any) -> tuple[Any, Any]:
    """A guard set, a `datasets.Dataset`, in two halves of random rows: one to choose by, one to report on.

    They are always the same.

    Raises:
        ValueError: it has fewer than two rows.
    """
    if len(rows) < 2:
        raise ValueError(f"A guard set is split into halves, but it has {counted(len(rows), 'row')}. Give at least 2.")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    first, second = order.tensor_split([(len(rows) + 1) // 2])
    return rows.select(first.sort().values.tolist()), rows.select(second.sort().values.tolist())


def with_halves(validation: Mapping[str, object], rest: Mapping[str, object]) -> dict[str, Any]:
    """Both halves of each guard, by names that end with `VALIDATION` and `REST`."""
    parts = ((VALIDATION, validation), (REST, rest))
    return {f"{name}_{part}": half for part, sets in parts for name, half in sets.items()}


def measured_at(alpha: float, metrics: Mapping[str, float], gains: Sequence[str], guards: Sequence[str]) -> Measured:
    """The scores of one evaluation, whose metrics have the prefix ``eval``.

    ``gains`` are the names of the sets that the training was for, and ``guards`` those of the guard sets without their
    halves.
    """
    validation, rest = ({g: score(metrics, f"eval_{g}_{part}_") for g in guards} for part in (VALIDATION, REST))
    gained = _mean([score(metrics, f"eval_{name}_") for name in gains])
    lowest = [score_if_measured(metrics, f"eval_{name}_", LOW) for name in gains]
    low = None if None in lowest else _mean([one for one in lowest if one is not None])
    loss = _mean([metrics[name] for one in gains if (name := f"eval_{one}_loss") in metrics])
    return Measured(alpha, gained, validation, rest, low, loss)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def chosen(measured: Sequence[Measured], tolerance: float) -> Measured:
    """The greatest gain at which no guard loses more than is tolerated, or one that is as good within the noise.

    Of the gains within the 95% interval of the greatest, the one with the lowest loss is chosen, if there are pairs:
    where captions repeat, or rows are few, the recall@1 of the greatest is the greatest by chance. Of equals, it is the
    one nearest to the start. Only the validation halves of the guards decide.

    Args:
        measured: with different α, among them the start's.
        tolerance: what the score of a guard may be below that of the start, as a fraction: 0.01 is one point.
    """
    start = next(one for one in measured if one.alpha == 0)
    least = {name: value - tolerance - _ROUNDING for name, value in start.validation.items()}
    kept = [one for one in measured if all(one.validation[name] >= value for name, value in least.items())]
    best = max(kept, key=lambda one: (one.gained or 0.0, -one.alpha))
    if best.gained_low is None or best.loss is None:
        return best
    alike = [one for one in kept if (one.gained or 0.0) >= best.gained_low]
    return min(alike, key=lambda one: (one.loss or 0.0, one.alpha))


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
            yield _BY_LOSS
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
