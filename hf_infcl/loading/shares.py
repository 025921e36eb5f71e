"""How many pairs of each micro-batch come from which source of a training set: new pairs and old ones, or all."""

from __future__ import annotations

import random

from ..data.stream_batches import Shares
from .batch_plan import BatchPlan, MicroBatchPlace


def replay_share(option: float | None) -> float:
    """The share of old pairs of a global batch, before rounding, that is meant by ``replay_share``."""
    return 0.5 if option is None else option


class SourceShare(Shares):
    """The pairs of each micro-batch of a training that come from one source: new, old (``is_old``), or the only one.

    Every global batch of one size has the same number of old pairs, and each of its micro-batches equally many but for
    one. Which ones have one more is drawn for each global batch, so that all lanes of a stream are read at the same
    pace; the processes differ by at most one pair. Nothing depends on the number of processes.

    Micro-batches are counted on all processes, from where the plan begins.
    """

    def __init__(self, plan: BatchPlan, is_old: bool | None = None) -> None:
        size, step = plan.size(plan.begin.step), plan.begin.step
        micro_batches = plan.micro_batches(step) * plan.processes
        super().__init__(size // micro_batches, micro_batches)
        self.plan, self.is_alone, self.is_old = plan, is_old is None, bool(is_old)
        self.kind = "old" if is_old else "new"
        if is_old is None:
            return
        self.words = f"its {self.of_batch(size)} pairs of one global batch"
        if not plan.grows:  # where it does, a training resumes with other ones
            self.identity |= {"micro_batches": micro_batches, "old": plan.old(size)}
        self.identity["is_old"] = is_old

    def of_batch(self, size: int) -> int:
        """The pairs of a global batch of this size that come from the source."""
        old = self.plan.old(size)
        return old if self.is_old else size - old

    def size(self, number: int) -> int | None:
        """The pairs of a micro-batch that come from the source; None after the end of the plan."""
        place = self.plan.place(number)
        return None if place is None else len(self.pairs(place))

    def pairs(self, place: MicroBatchPlace) -> range:
        """The pairs of a micro-batch among those of the source in its global batch."""
        return range(self._before(place, place.number), self._before(place, place.number + 1))

    def _before(self, place: MicroBatchPlace, number: int) -> int:
        """The pairs of the source in the first ``number`` micro-batches of a global batch."""
        section = place.section
        micro_batches, old = section.micro_batches, self.plan.old(section.size)
        each, left = divmod(old, micro_batches)
        # `left` micro-batches from `start` on have one more; beyond the last one they go on with the first ones.
        start = random.Random(place.at.step).randrange(micro_batches) if left else 0
        end, again = start + left, start + left - micro_batches
        of_old = each * number + min(number, end) - min(number, start) + max(0, min(number, again))
        return of_old if self.is_old else section.micro_batch * number - of_old
