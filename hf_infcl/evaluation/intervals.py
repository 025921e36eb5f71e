"""Bootstrap intervals of metrics, and of the differences between two models on one set.

These are the 2.5th and 97.5th percentiles of 1,000 resamples of the images (Efron and Tibshirani 1993, An Introduction
to the Bootstrap, section 13.3). The captions of an image stay together, because they are not independent. The resamples
of two sets of equal size are the same, so two models are compared on the same resamples. `ScoreChanges` tells how far
the score of a set has changed since before a training.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .metrics import CHANGE, HIGH, LOW, Found, Hits, count_hits, measured, score_if_measured

RESAMPLES = 1000
WEIGHTS_NUMEL = 2**21  # weights held at a time (16 MiB); one resample is held even if it is larger


def resampled(hits: Sequence[Hits]) -> np.ndarray:
    """The values of metrics on resamples, [metrics, RESAMPLES] float64, from their hits on the same N images."""
    size = len(hits[0].right)
    # Images with the same hits are of one kind. Sums over a few kinds are, to the bit, those over many images, since
    # they are of whole numbers.
    kind = np.zeros(size, np.int64)
    for column in (column for one in hits for column in one if column is not None):
        values = column.numpy().astype(np.int64)
        kind = np.unique(kind * (values.max() + 1) + values, return_inverse=True)[1].reshape(-1)
    examples = np.unique(kind, return_index=True)[1]
    random = np.random.default_rng(0)
    rows, kinds = max(1, WEIGHTS_NUMEL // size), len(examples)
    blocks = []
    for start in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - start)
        drawn = kind[random.integers(size, size=(count, size))]
        drawn += kinds * np.arange(count)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=count * kinds)
        weights = weights.reshape(count, kinds).astype(np.float64)  # how often images of each kind were drawn
        blocks.append(np.stack([one.shares(examples, weights) for one in hits]))
    return np.concatenate(blocks, axis=1)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95% interval of a metric, or of a difference, from its values [RESAMPLES] on resamples."""
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def bounds(resamples: dict[str, np.ndarray]) -> dict[str, float]:
    """`interval` of each metric, as the name with `LOW` and with `HIGH`."""
    intervals = {name: interval(values) for name, values in resamples.items()}
    return {name + end: bound for name, both in intervals.items() for end, bound in zip((LOW, HIGH), both, strict=True)}


@dataclass(frozen=True)
class Difference:
    """One metric of two models on the same images, as fractions."""

    first: float
    second: float
    low: float | None = None  # the bounds of the paired 95% interval of second - first; None for a metric without one
    high: float | None = None

    def words(self, factor: float = 1, digits: int = 4) -> str:
        """The difference times ``factor`` with its interval, and that it is noise if the interval includes 0."""
        change = f"{factor * (self.second - self.first):+.{digits}f}"
        if self.low is None or self.high is None:
            return change
        noise = " within noise" if self.low <= 0 <= self.high else ""
        return f"{change} [{factor * self.low:+.{digits}f}, {factor * self.high:+.{digits}f}]{noise}"


def differences(first: Found, second: Found) -> dict[str, Difference]:
    """The metrics of two models on the same images, by name; for `LabelScores` without an interval.

    Raises:
        ValueError: the results are of other images.
    """
    ours, theirs = count_hits(first), count_hits(second)
    sizes = [sorted({len(one.right) for one in hits.values()}) for hits in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"Only results on the same images can be compared, got {sizes[0]} and {sizes[1]}.")
    others, intervals = measured(second), dict[str, tuple[float, float]]()
    if ours:
        values = resampled([*ours.values(), *theirs.values()])
        changes = values[len(ours) :] - values[: len(ours)]
        intervals = dict(zip(ours, map(interval, changes), strict=True))
    return {name: Difference(value, others[name], *intervals.get(name, ())) for name, value in measured(first).items()}


class ScoreChanges:
    """Keeps the resampled scores that the sets had before the first step, and compares later ones with them.

    Args:
        before: what is kept of each set, by the prefix of its metrics; it is filled in place before the first step:
            ``values``, the resampled values of its score, and ``set``, a digest of its labels.
        logged: the entries that the training has logged so far, by name.
        at_start: whether no step is trained yet.
    """

    def __init__(self, before: dict[str, Any], logged: list[dict[str, float]], *, at_start: bool) -> None:
        self._before, self._logged, self._at_start = before, logged, at_start
        self._set = ""  # the digest of the labels of the last set

    def recognise(self, prefix: str, labels: object) -> None:
        """Drops what another set of this name had before a training that was resumed with this set.

        ``labels``, an array or a tuple of them, tell the sets apart.
        """
        arrays = labels if isinstance(labels, tuple) else (labels,)
        content = b"".join(torch.as_tensor(array).cpu().numpy().tobytes() for array in arrays)
        self._set = hashlib.sha256(content).hexdigest()[:16]
        if self._at_start or self._before.get(prefix, {}).get("set", self._set) == self._set:
            return
        del self._before[prefix]
        for entry in self._logged:
            for name in [name for name in entry if name.startswith(f"{prefix}_")]:
                del entry[name]

    def intervals(self, prefix: str, found: Found | None) -> dict[str, float]:
        """The bounds of the metrics of the set that was recognised last, and of the change of its score."""
        if found is None or not (hits := count_hits(found)):
            return {}
        values: dict[str, Any] = dict(zip(hits, resampled([*hits.values()]), strict=True))
        resampled_score: Any = score_if_measured(values)
        score = [round(float(value), 6) for value in resampled_score]  # short in checkpoints
        if self._at_start:
            self._before[prefix] = {"values": score, "set": self._set}
        elif prefix in self._before:
            values[CHANGE] = np.subtract(score, self._before[prefix]["values"])
        return bounds(values)
