"""The global batches of a training, from its first step to its last: their sizes, passes and micro-batches."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..options.batch_schedule import BatchSchedule, Course, divided_batch
from ..shards.values import counted


@dataclass(frozen=True)
class Position:
    """How far a training has come, between two steps."""

    step: int = 0  # the trained optimizer steps
    samples: int = 0  # the trained pairs
    epoch: int = 0  # the completed passes over the data
    windows: int = 0  # of the pass under way, the trained global batches
    rows: int = 0  # of the pass under way, the trained rows; with replay, of the new pairs


BEGIN = Position()
MOST_PASSES = 2**20  # each is planned, and so many take seconds and 300 MB
_ENDLESS = 2**40  # steps of data without an end


class Section(NamedTuple):
    """Steps of one size within one pass over the data: where they begin, their number, and their division."""

    begin: Position
    size: int
    rows: int  # of the pass in one step
    steps: int
    micro_batch: int
    first: int  # the micro-batches, of all processes, that this training has before them

    def after(self, steps: int) -> Position:
        """The position after some of these steps."""
        at, samples, rows = self.begin, steps * self.size, steps * self.rows
        return Position(at.step + steps, at.samples + samples, at.epoch, at.windows + steps, at.rows + rows)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of one global batch, on all processes."""
        return self.size // self.micro_batch


class MicroBatchPlace(NamedTuple):
    """Where a micro-batch is: how far the training has come before its step, and its number in the global batch."""

    at: Position
    section: Section
    number: int


class BatchPlan(Course):
    """The size and the place of each global batch, from a position on.

    A stage ends with the first step after which its share of the training has been trained. The training is measured in
    rows of the passes, or with ``max_steps`` in samples. A pass ends where the next global batch does not fit into its
    rows. Global batches of one size are one stage, which goes on to the end of a pass, so that there is one to look at
    after the training. The plan depends on the number of processes only in the division of a global batch into
    micro-batches.

    Args:
        rows: the pairs of a pass over the data, with replay over the new ones; None if it has no end.
        epochs: the passes of the training, if ``max_steps`` does not limit it.
        max_steps: its steps, or a number below 1.
        at: the position from which the training goes on.
        replay_share: the share of each global batch that is not from this data, rounded to whole pairs.

    Raises:
        ValueError: a global batch does not fit into a pass, no step would have it, or the processes cannot share it
            equally.
    """

    def __init__(
        self,
        schedule: BatchSchedule,
        rows: int | None,
        *,
        epochs: float,
        max_steps: int,
        micro_batch: int,
        processes: int,
        at: Position = BEGIN,
        replay_share: float = 0.0,
    ) -> None:
        self._rows, self._schedule, self._by_steps = rows, schedule, max_steps > 0
        self._max_steps, self._micro_batch, self.processes = max_steps, micro_batch, processes
        self._replay_share, self.grows, self.has_passes = replay_share, len(schedule.sizes) > 1, rows is not None
        self._whole = round(max_steps * schedule.mean_size()) if self._by_steps else round(epochs * (rows or 0))
        self._ends = [round(end * self._whole) for end in schedule.ends]  # of all stages but the last
        for size in schedule.sizes:
            divided_batch(size, micro_batch, processes)
            if rows is not None and size - self.old(size) > rows:
                options = "global_batch_size, or per_device_train_batch_size × gradient_accumulation_steps × processes"
                new = f", of which {size - self.old(size):,} are new" if self.old(size) else ""
                fits = 1 << max(0, (rows // 4).bit_length() - 1)  # with four steps in a pass, or more
                raise ValueError(
                    f"A pass over the training set has {counted(rows, 'pair')}, fewer than one global batch of {size:,}"
                    f"{new} ({'global_batch_schedule' if self.grows else options}). Lower it, for example to {fits}, "
                    "use more data, or raise samples_per_epoch of a stream."
                )
        passes = self._whole / rows if rows else 0.0
        if passes > MOST_PASSES:
            raise ValueError(
                f"The training would make about {passes:.3g} passes over {counted(rows or 0, 'pair')}, and a plan has "
                f"room for {MOST_PASSES:,}. Lower num_train_epochs or max_steps."
            )
        self.begin, self.largest = at, max(schedule.sizes)  # the latter in pairs
        self._too_large: set[int] = set()  # for the rest of a pass
        self.sections = list(self._walk(at))  # its steps, by size and pass
        end = self.sections[-1].after(self.sections[-1].steps) if self.sections else at
        self.steps = end.step if self.grows else max_steps
        end = self.reached(self.steps)
        self.samples, self.epochs = end.samples, end.epoch + 1  # the last pass may be incomplete
        if self.grows:
            self._check_stages()

    @classmethod
    def endless(cls, size: int, micro_batch: int, processes: int = 1, replay_share: float = 0.0) -> BatchPlan:
        """Global batches of one size, of data whose passes are not known."""
        division: Any = {"micro_batch": micro_batch, "processes": processes}
        return cls(BatchSchedule((size,), ()), None, epochs=0, max_steps=0, replay_share=replay_share, **division)

    def old(self, size: int) -> int:
        """The pairs of a global batch of this size that are not from this data."""
        return round(size * self._replay_share)

    def _check_stages(self) -> None:
        """Raises a ValueError if a stage that is still to come gets no step."""
        reached = self._reached(self.begin)
        begun = bisect_right(self._ends, reached)
        to_come = self._schedule.sizes[begun + 1 :] if self.begin.step else self._schedule.sizes
        if missing := sorted(set(to_come) - {section.size for section in self.sections}):
            why = f"the {self.steps:,} steps with {self.samples:,} pairs in all are too few for its share"
            cure = "Give it a larger share, train longer, or lower the batches"
            if missing[0] in self._too_large:
                why = f"a pass over {self._rows:,} pairs ends where it no longer fits in"
                cure = "Lower that batch, give it a larger share, or train longer"
            raise ValueError(
                f"global_batch_schedule has a batch of {missing[0]:,} pairs that no step would train: {why}. {cure}."
            )

    def _walk(self, at: Position) -> Iterator[Section]:
        first, goes_on = 0, not self.grows
        while (left := self._max_steps - at.step if self._by_steps else self._whole - self._reached(at)) > 0 or goes_on:
            # ---- The stage, and the rest of it and of the pass ----
            stage = bisect_right(self._ends, self._reached(at))
            size = self._schedule.sizes[stage]
            micro_batch, _ = divided_batch(size, self._micro_batch, self.processes)
            rows = size - self.old(size)
            fit = None if self._rows is None else max(0, self._rows - at.rows) // rows
            if fit == 0:
                self._too_large.add(size)
                at = replace(at, epoch=at.epoch + 1, windows=0, rows=0)
                continue
            each = size if self._by_steps else rows
            in_stage = -(-(self._ends[stage] - self._reached(at)) // each) if stage < len(self._ends) else None
            in_training = None if not self.grows else left if self._by_steps else -(-left // rows)
            # ---- Its steps ----
            limits = (number for number in (fit, in_stage, in_training) if number is not None)
            steps, goes_on = min(limits, default=_ENDLESS), False
            yield (section := Section(at, size, rows, steps, micro_batch, first))
            first += steps * section.micro_batches
            at = section.after(steps)

    def _reached(self, at: Position) -> int:
        return at.samples if self._by_steps else at.epoch * (self._rows or 0) + at.rows

    # ---- By step ----

    def _section(self, step: int) -> Section | None:
        index = bisect_right(self.sections, step, key=lambda section: section.begin.step) - 1
        return self.sections[index] if index >= 0 else None

    def position(self, step: int) -> Position:
        """The position before a step; before the plan begins, of its first one."""
        section = self._section(step)
        return self.begin if section is None else section.after(min(step - section.begin.step, section.steps))

    def reached(self, step: int) -> Position:
        """The position after the step before this one, which may be the end of a pass."""
        before = self._section(step - 1)
        return self.begin if before is None else before.after(step - before.begin.step)

    def samples_before(self, step: int) -> int:
        """The pairs trained before a step. Before the plan begins, all steps are taken for equally large."""
        begin = self.begin
        return begin.samples * step // begin.step if step < begin.step else self.position(step).samples

    def size(self, step: int) -> int:
        """The pairs of the global batch of a step; after the last step, of that one."""
        section = self._section(step) or (self.sections[0] if self.sections else None)
        return self._schedule.sizes[-1] if section is None else section.size

    def micro_batches(self, step: int) -> int:
        """The micro-batches of each process in a step."""
        return divided_batch(self.size(step), self._micro_batch, self.processes)[1]

    def windows(self, epoch: int) -> int:
        """The global batches of a pass."""
        return max((section.begin.windows + section.steps for section in self._of_epoch(epoch)), default=0)

    def micro_batches_of_epoch(self, epoch: int) -> int:
        """The micro-batches of one process in a pass."""
        if not self.grows:
            return self.windows(epoch) * self.micro_batches(self.begin.step)
        return sum(section.steps * section.micro_batches for section in self._of_epoch(epoch)) // self.processes

    def _of_epoch(self, epoch: int) -> list[Section]:
        return [section for section in self.sections if section.begin.epoch == epoch]

    def first(self) -> Position:
        """Where the plan begins, with a new pass if nothing of the one before fills a global batch."""
        end = replace(self.begin, epoch=self.begin.epoch + 1, windows=0, rows=0)
        return self.sections[0].begin if self.sections else end

    def epochs_before(self, step: int) -> float:
        """The passes before a step, in which global batches count by their pairs; without passes, the share."""
        at = self.reached(step)
        if self._rows is None:
            return at.samples / self.samples
        if not (sections := self._of_epoch(at.epoch)):
            return float(at.epoch)
        last = sections[-1]
        whole = last.after(last.steps).rows
        if last is self.sections[-1]:  # a pass that the training does not end
            whole += (self._rows - whole) // last.rows * last.rows
        return at.epoch + at.rows / whole

    def stages(self) -> Iterator[tuple[int, int]]:
        """The sizes of the global batches in pairs, and the steps of each."""
        for size, sections in itertools.groupby(self.sections, key=lambda section: section.size):
            yield size, sum(section.steps for section in sections)

    # ---- By micro-batch ----

    def steps_after(self, micro_batches: int) -> int:
        """How many steps this number of micro-batches of all processes makes; at most all that the training has."""
        place = self.place(micro_batches)
        return (self.steps if place is None else place.at.step) - self.begin.step

    def place(self, number: int) -> MicroBatchPlace | None:
        """The place of a micro-batch of all processes, counted from where the plan begins; None after its end."""
        if not self.sections:
            return None
        section = self.sections[bisect_right(self.sections, number, key=lambda section: section.first) - 1]
        window, micro_batch = divmod(number - section.first, section.micro_batches)
        return None if window >= section.steps else MicroBatchPlace(section.after(window), section, micro_batch)
