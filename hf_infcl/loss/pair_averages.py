"""Averages of numbers about single pairs over a training, by the keys of the pairs, the same on every process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NO_KEY = -1  # of a pair that is not known from one window to the next

_WAYS = 8  # slots in which a key of a stream may be
_FEWEST, _MOST = 2**16, 2**26  # slots of the table of a stream
_MOST_VISITS = 255


class PairAverages:
    """A fast and a slow moving average for each pair, and the number of its visits.

    The first visits count alike: the weight of a visit is at least 1 divided by the number of visits.

    A pair of a table is known by its row and takes 9 bytes, in the host memory of every process and in checkpoints: a
    billion rows take 9 GB. A pair of a stream, whose length is unknown, is known by a hash of its name. It takes 17
    bytes of a table that doubles until it has 2²⁶ slots, which are 1.1 GB. A key has 8 slots to choose from; if others
    have taken them, it overwrites one, whose pair is then as if it had never been seen. In the first pass over a
    billion samples nearly all of them are overwritten before they come again.

    Args:
        rows: of the table; None for a stream.
        fast, slow: the least weights of a visit in the two averages.
    """

    def __init__(self, rows: int | None, *, fast: float, slow: float) -> None:
        self._weights = fast, slow
        slots = _FEWEST if rows is None else rows
        self._averages = torch.zeros(2, slots)
        self._visits = torch.zeros(slots, dtype=torch.uint8)
        self._keys = torch.full((slots,), NO_KEY) if rows is None else None
        self._count()

    def visit(self, keys: Tensor, values: Tensor, least: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Adds a visit of each pair, and returns the fast averages after it, [n] fp64, and the visits, [n] int64.

        Pairs that are equal get the mean of their values as one visit. Those without a key, or whose value is not
        finite, are not kept; their average is NaN and they have no visits.

        Args:
            keys: [n] int64 on the CPU, at least 0, or `NO_KEY`.
            values: [n] fp64 on the CPU.
            least: [2, n] fp64, the least weights of these visits in the two averages, equal for pairs that are equal;
                of a weight of 0 nothing is added. By default ``fast`` and ``slow``.
        """
        kept = (keys != NO_KEY) & values.isfinite()
        pairs, place, repeats = keys[kept].unique(return_inverse=True, return_counts=True)
        value = torch.zeros(len(pairs), dtype=torch.float64).index_add_(0, place, values[kept]) / repeats
        slots = pairs if self._keys is None else self._slots(pairs)
        stored = slots >= 0
        before = torch.where(stored, self._visits[slots.clamp(min=0)], 0)
        visits = (before.long() + 1).clamp(max=_MOST_VISITS)
        earlier = torch.where(before > 0, self._averages[:, slots.clamp(min=0)], 0.0)
        weights = torch.tensor(self._weights, dtype=torch.float64)[:, None].repeat(1, len(pairs))
        if least is not None:
            weights[:, place] = least[:, kept]
        weights = torch.where(weights > 0, weights.clamp(min=1 / visits.double()), 0.0)
        averages = (earlier.double() + weights * (value - earlier.double())).float()
        self._seen += int((stored & (before == 0)).sum())
        self._visited += int((visits - before)[stored].sum())
        self._below += int((averages[0] < 0)[stored].sum()) - int((earlier[0] < 0)[stored].sum())
        self._averages[:, slots[stored]] = averages[:, stored]
        self._visits[slots[stored]] = visits[stored].to(torch.uint8)
        results = torch.full(keys.shape, math.nan, dtype=torch.float64), torch.zeros(keys.shape, dtype=torch.int64)
        results[0][kept], results[1][kept] = averages[0].double()[place], visits[place]
        return results

    @property
    def mean_visits(self) -> float:
        """The visits of a pair that was seen, on average."""
        return self._visited / max(1, self._seen)

    @property
    def share_below_zero(self) -> float:
        """The share of the pairs seen whose fast average is below 0."""
        return self._below / max(1, self._seen)

    @property
    def fast(self) -> tuple[Tensor, Tensor]:
        """The fast averages and the visits of all rows of a table, [rows] fp32 and uint8."""
        return self._averages[0], self._visits

    def slow(self) -> tuple[Tensor, Tensor]:
        """The keys [n] int64 of all pairs seen, in ascending order, and their slow averages [n] fp32."""
        keys, slots = self._of_seen()
        return keys, self._averages[1][slots]

    def fast_of_seen(self) -> tuple[Tensor, Tensor]:
        """The fast averages [n] fp32 and the visits [n] uint8 of the pairs of `slow`, in its order."""
        _, slots = self._of_seen()
        return self._averages[0][slots], self._visits[slots]

    def _of_seen(self) -> tuple[Tensor, Tensor]:
        """The keys of all pairs seen, in ascending order, and their slots."""
        slots = self._visits.nonzero().flatten()
        keys = slots if self._keys is None else self._keys[slots]
        order = keys.argsort()
        return keys[order], slots[order]

    # ---- The table of a stream ----

    def _slots(self, keys: Tensor) -> Tensor:
        """The slot of each key, emptied if it was another's; -1 if a key of the same window has taken it."""
        assert self._keys is not None
        while self._seen + len(keys) > len(self._keys) // 2 and len(self._keys) < _MOST:
            self._double()
        buckets = len(self._keys) // _WAYS
        bucket = keys & (buckets - 1)
        inside = self._keys.view(buckets, _WAYS)[bucket]  # [keys, ways]
        same, free = inside == keys[:, None], inside == NO_KEY
        new = ~same.any(1)
        # The first new key of a bucket takes its first free slot, and so on; without one it overwrites any.
        ordered, order = torch.where(new, bucket, buckets).sort(stable=True)
        place = torch.empty_like(keys)
        place[order] = torch.arange(len(keys)) - torch.searchsorted(ordered, ordered)
        taken = torch.where(new[:, None], free & (free.cumsum(1) == place[:, None] + 1), same)
        overwrites = ~taken.any(1)
        way = torch.where(overwrites, (keys >> 40) & (_WAYS - 1), taken.int().argmax(1))
        slots = bucket * _WAYS + way
        # One key for each slot: of those that would overwrite it, none that another one of this window has.
        order = (2 * slots + overwrites).argsort(stable=True)
        late = torch.zeros(len(keys), dtype=torch.bool)
        late[order[1:]] = slots[order[1:]] == slots[order[:-1]]
        emptied = slots[new & ~late]
        self._seen -= int((self._visits[emptied] > 0).sum())
        self._visited -= int(self._visits[emptied].sum(dtype=torch.int64))
        self._below -= int((self._averages[0][emptied] < 0).sum())
        self._visits[emptied], self._averages[:, emptied] = 0, 0.0
        self._keys[emptied] = keys[new & ~late]
        return torch.where(late, -1, slots)

    def _double(self) -> None:
        """Moves each key to one of two slots, depending on its next bit."""
        assert self._keys is not None
        buckets = len(self._keys) // _WAYS
        upper = ((self._keys & buckets) > 0) & (self._keys != NO_KEY)

        def doubled(values: Tensor, free: int) -> Tensor:
            return torch.cat((torch.where(upper, free, values), torch.where(upper, values, free)), -1)

        self._averages, self._visits = doubled(self._averages, 0), doubled(self._visits, 0)
        self._keys = doubled(self._keys, NO_KEY)

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """The averages [2, slots], the visits [slots] and, of a stream, the keys [slots]."""
        keys = {} if self._keys is None else {"keys": self._keys}
        return {"averages": self._averages, "visits": self._visits, **keys}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what is known of the pairs. A table may have more rows than that of the state, or fewer.

        Raises:
            ValueError: one of both is of a stream, and the other of a table.
        """
        if ("keys" in state) != (self._keys is not None):
            kinds = ("a stream", "a table") if "keys" in state else ("a table", "a stream")
            raise ValueError(
                f"The checkpoint has averages of the pairs of {kinds[0]}, but the training set is {kinds[1]}, whose "
                "pairs have other keys. Train on the same data, or begin a new run from the model of the checkpoint."
            )
        averages, visits = state["averages"].clone(), state["visits"].clone()
        if self._keys is not None:
            self._averages, self._visits, self._keys = averages, visits, state["keys"].clone()
        else:
            known = min(len(self._visits), len(visits))
            self._averages[:, :known], self._visits[:known] = averages[:, :known], visits[:known]
        self._count()

    def _count(self) -> None:
        self._seen = int((self._visits > 0).sum())
        self._visited = int(self._visits.sum(dtype=torch.int64))
        self._below = int((self._averages[0] < 0).sum())
