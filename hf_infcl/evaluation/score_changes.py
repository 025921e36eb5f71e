"""The intervals of the metrics of a set, and how far its score has changed since before a training."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from .bootstrap import bounds, count_hits, interval, resampled
from .metrics import CHANGE, HIGH, LOW, Found, score_if_measured


class ScoreChanges:
    """Keeps the resampled scores that the sets had before the first step, and compares later ones with them.

    Args:
        before: what is kept of each set, by the prefix of its metrics; it is filled in place before the first step:
            ``images``, the number of its images, ``values``, the resampled values of its score, and ``set``, a digest
            of its labels.
        logged: the entries that the training has logged so far, by name.
        at_start: whether no step is trained yet.
    """

    def __init__(self, before: dict[str, Any], logged: list[dict[str, float]], *, at_start: bool) -> None:
        self._before, self._logged, self._at_start = before, logged, at_start
        self._set = ""  # the digest of the labels of the last set

    def recognise(self, prefix: str, labels: object) -> None:
        """Drops what another set of this name had before a training that was resumed with this set.

        Args:
            prefix: begins the names of its metrics.
            labels: an array or a tuple of them, which tell the sets apart.
        """
        arrays = labels if isinstance(labels, tuple) else (labels,)
        content = b"".join(torch.as_tensor(array).cpu().numpy().tobytes() for array in arrays)
        self._set = hashlib.sha256(content).hexdigest()[:16]
        before = self._before.get(prefix, {}).get("set", self._set)
        if self._at_start or before == self._set:
            return
        del self._before[prefix]
        for entry in self._logged:
            for name in [name for name in entry if name.startswith(f"{prefix}_")]:
                del entry[name]

    def intervals(self, prefix: str, found: Found | None) -> dict[str, float]:
        """The bounds of the metrics of the set that was recognised last, and of the change of its score."""
        if found is None or not (hits := count_hits(found)):
            return {}
        values = dict(zip(hits, resampled(list(hits.values())), strict=True))
        intervals = bounds(values)
        resampled_score: Any = score_if_measured(values)
        score = [round(float(value), 6) for value in resampled_score]  # short in checkpoints
        size = len(next(iter(hits.values())).right)
        if self._at_start:
            self._before[prefix] = {"images": size, "values": score, "set": self._set}
        elif (before := self._before.get(prefix)) is not None and before["images"] == size:
            low, high = interval(np.subtract(score, before["values"]))
            intervals |= {CHANGE + LOW: low, CHANGE + HIGH: high}
        return intervals
