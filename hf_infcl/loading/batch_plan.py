"""Where a training goes on; and the global batches of one whose batch grows, from its first step to its last."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..checkpoints.record import RunRecord
from ..options.arguments import InfCLTrainingArguments
from ..options.batch_schedule import BatchSchedule, Course, EqualBatches, divided_batch
from .sampling import windows_lacking


@dataclass(frozen=True)
class Position:
    """How far a training has come, between two steps.

    Attributes:
        step: the trained optimizer steps.
        samples: the trained pairs.
        epoch: the completed passes over the data.
        windows, rows: of the pass under way, the global batches and the rows that were trained.
    """

    step: int = 0
    samples: int = 0
    epoch: int = 0
    windows: int = 0
    rows: int = 0


_BEGIN = Position()


class Section(NamedTuple):
    """Steps of one size within one pass over the data: where they begin, their number, and their division.

    ``first`` is the number of micro-batches, of all processes, before them in this training.
    """

    begin: Position
    size: int
    steps: int
    micro_batch: int
    first: int

    def after(self, steps: int) -> Position:
        """The position after some of these steps."""
        at, rows = self.begin, steps * self.size
        return Position(at.step + steps, at.samples + rows, at.epoch, at.windows + steps, at.rows + rows)

    @property
    def micro_batches(self) -> int:
        """Of one global batch, on all processes."""
        return self.size // self.micro_batch


class MicroBatchPlace(NamedTuple):
    """Where a micro-batch is: its step, how far the training has come before that, and its rows in the pass."""

    at: Position
    rows: range


class BatchPlan(Course):
    """The size and the place of each global batch, from a position on.

    A stage ends with the first step after which its share of the training has been trained. The training is measured in
    rows of the passes, or with ``max_steps`` in samples. A pass ends where the next global batch does not fit into its
    rows. The plan depends on the number of processes only in the division of a global batch into micro-batches.

    Args:
        schedule: the stages.
        rows: the pairs of a pass over the data; None if it has no end.
        epochs: the passes of the training, if ``max_steps`` does not limit it.
        max_steps: its steps, or a number below 1.
        micro_batch: ``per_device_train_batch_size``.
        processes: their number.
        at: the position from which the training goes on.

    Attributes:
        steps: the steps of the training from its first on.
        samples: its pairs.
        epochs: the passes, the last of which may be incomplete.

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
        at: Position = _BEGIN,
    ) -> None:
        self._rows, self._schedule, self._by_steps = rows, schedule, max_steps > 0
        self._max_steps, self._micro_batch, self._processes = max_steps, micro_batch, processes
        self._whole = round(max_steps * schedule.mean_size()) if self._by_steps else round(epochs * (rows or 0))
        for size in schedule.sizes:
            divided_batch(size, micro_batch, processes)
            if rows is not None and size > rows:
                raise ValueError(
                    f"A pass over the training set has {rows:,} pairs, fewer than the global batch of {size:,} pairs "
                    "in global_batch_schedule. Lower it, or use more data."
                )
        self.begin = at
        self._too_large: set[int] = set()  # for the rest of a pass
        self._sections = list(self._walk(at))
        end = self._sections[-1].after(self._sections[-1].steps) if self._sections else at
        self.steps, self.samples, self.epochs = end.step, end.samples, end.epoch + 1
        self._steps = [section.begin.step for section in self._sections]
        self._micro_batches = [section.first for section in self._sections]
        self._check_stages()

    def _check_stages(self) -> None:
        """Raises a ValueError if a stage that is still to come gets no step."""
        reached = self._reached(self.begin)
        begun = bisect_right([round(end * self._whole) for end in self._schedule.ends], reached)
        to_come = self._schedule.sizes[begun + 1 :] if self.begin.step else self._schedule.sizes
        if missing := sorted(set(to_come) - {section.size for section in self._sections}):
            why = f"the {self.steps:,} steps with {self.samples:,} pairs in all are too few for its share"
            cure = "Give it a larger share, train longer, or lower the batches"
            if missing[0] in self._too_large:
                why = f"a pass over {self._rows:,} pairs ends where it no longer fits in"
                cure = "Lower that batch, give it a larger share, or train longer"
            raise ValueError(
                f"global_batch_schedule has a batch of {missing[0]:,} pairs that no step would train: {why}. {cure}."
            )

    def _walk(self, at: Position) -> Iterator[Section]:
        first = 0
        while (left := self._max_steps - at.step if self._by_steps else self._whole - self._reached(at)) > 0:
            # ---- The stage, and the rest of it and of the pass ----
            ends = [round(end * self._whole) for end in self._schedule.ends]
            stage = bisect_right(ends, self._reached(at))
            size = self._schedule.sizes[stage]
            micro_batch, _ = divided_batch(size, self._micro_batch, self._processes)
            fit = None if self._rows is None else max(0, self._rows - at.rows) // size
            if fit == 0:
                self._too_large.add(size)
                at = replace(at, epoch=at.epoch + 1, windows=0, rows=0)
                continue
            in_stage = -(-(ends[stage] - self._reached(at)) // size) if stage < len(ends) else None
            in_training = left if self._by_steps else -(-left // size)
            # ---- Its steps ----
            steps = min(number for number in (fit, in_stage, in_training) if number is not None)
            yield (section := Section(at, size, steps, micro_batch, first))
            first += steps * section.micro_batches
            at = section.after(steps)

    def _reached(self, at: Position) -> int:
        return at.samples if self._by_steps else at.epoch * (self._rows or 0) + at.rows

    # ---- By step ----

    def _section(self, step: int) -> Section | None:
        found = bisect_right(self._steps, step) - 1
        return self._sections[found] if found >= 0 else None

    def position(self, step: int) -> Position:
        """The position before a step; before the plan begins, of its first one."""
        section = self._section(step)
        return self.begin if section is None else section.after(min(step - section.begin.step, section.steps))

    def samples_before(self, step: int) -> int:
        """The pairs trained before a step. Before the plan begins, all steps are taken for equally large."""
        begin = self.begin
        return begin.samples * step // begin.step if step < begin.step else self.position(step).samples

    def size(self, step: int) -> int:
        """The pairs of the global batch of a step; after the last step, of that one."""
        section = self._section(step) or (self._sections[0] if self._sections else None)
        return self._schedule.sizes[-1] if section is None else section.size

    def micro_batches(self, step: int) -> int:
        """The micro-batches of each process in a step."""
        return divided_batch(self.size(step), self._micro_batch, self._processes)[1]

    def windows(self, epoch: int) -> int:
        """The global batches of a pass."""
        return max((section.begin.windows + section.steps for section in self._of_epoch(epoch)), default=0)

    def micro_batches_of_epoch(self, epoch: int) -> int:
        """The micro-batches of one process in a pass."""
        return sum(section.steps * section.micro_batches for section in self._of_epoch(epoch)) // self._processes

    def _of_epoch(self, epoch: int) -> list[Section]:
        return [section for section in self._sections if section.begin.epoch == epoch]

    def first(self) -> tuple[int, int]:
        """The completed passes, and the trained global batches of the next one, where the plan begins."""
        at = self._sections[0].begin if self._sections else replace(self.begin, epoch=self.begin.epoch + 1, windows=0)
        return at.epoch, at.windows

    def epochs_before(self, step: int) -> float:
        """The passes before a step, in which global batches count by their pairs; without passes, the share."""
        before = self._section(step - 1)
        at = self.begin if before is None else before.after(step - before.begin.step)
        if self._rows is None:
            return at.samples / self.samples
        if not (sections := self._of_epoch(at.epoch)):
            return float(at.epoch)
        last = sections[-1]
        whole = last.after(last.steps).rows
        if last is self._sections[-1]:  # a pass that the training does not end
            whole += (self._rows - whole) // last.size * last.size
        return at.epoch + at.rows / whole

    def stages(self) -> Iterator[tuple[int, int, int, int]]:
        """For each size: its pairs, those of a micro-batch, the micro-batches of each process, and its steps."""
        for size, sections in itertools.groupby(self._sections, key=lambda section: section.size):
            micro_batch, accumulation = divided_batch(size, self._micro_batch, self._processes)
            yield size, micro_batch, accumulation, sum(section.steps for section in sections)

    # ---- By micro-batch ----

    def steps_after(self, micro_batches: int) -> int:
        """The steps that this training trains with so many micro-batches of all processes; no more than it has."""
        place = self.place(micro_batches)
        return (self.steps if place is None else place.at.step) - self.begin.step

    def place(self, number: int) -> MicroBatchPlace | None:
        """The place of a micro-batch of all processes, counted from where the plan begins; None after its end."""
        section = self._sections[bisect_right(self._micro_batches, number) - 1] if self._sections else None
        if section is None:
            return None
        window, own = divmod(number - section.first, section.micro_batches)
        if window >= section.steps:
            return None
        at = section.after(window)
        first = at.rows + own * section.micro_batch
        return MicroBatchPlace(at, range(first, first + section.micro_batch))


def plan_of(args: InfCLTrainingArguments, rows: int | None, record: RunRecord | None = None) -> BatchPlan | None:
    """The plan of a training with ``global_batch_schedule``; None without one.

    Args:
        args: its arguments.
        rows: the pairs of a pass over its data; None if it has no end.
        record: that of the checkpoint that it resumes from, if any.

    Raises:
        ValueError: as `BatchPlan`; or neither the data nor the training (``max_steps``) has a length.
    """
    if args.global_batch_schedule is None:
        return None
    if rows is None and args.max_steps < 1:
        raise ValueError("global_batch_schedule needs max_steps for data without a length, whose shares it divides.")
    at = _BEGIN
    if record is not None:
        if record.step is None:
            raise ValueError(
                "The checkpoint was written by a version of hf_infcl that did not record its step, from which "
                "global_batch_schedule goes on. Resume without it, or start a new run from the checkpoint's model."
            )
        within = {} if args.ignore_data_skip else {"windows": record.windows, "rows": record.rows_of_epoch}
        at = Position(record.step, record.samples_seen, record.epoch, **within)
    return BatchPlan(
        BatchSchedule.of(args.global_batch_schedule),
        rows,
        epochs=args.num_train_epochs,
        max_steps=args.max_steps,
        micro_batch=args.per_device_train_batch_size,
        processes=args.world_size,
        at=at,
    )


def resumed_position(record: RunRecord, batch: int, windows: int, pairs: int | None) -> Position:
    """Where a training with equal global batches goes on, after parts of it whose batches may have had other sizes.

    A pass over the data ends where no further global batch fits in.

    Args:
        record: that of the checkpoint.
        batch: the pairs of a global batch.
        windows: the global batches of a whole pass.
        pairs: those of a pass, if reading can go on with any of them; None if it goes on with a whole window.

    Returns:
        The position, whose ``windows`` are those that Trainer's loop counts as trained: what they lack of a whole pass
        is left of this one.
    """
    rows = record.rows_of_epoch
    trained = -(-rows // batch) if pairs is None else windows_lacking(rows, batch, pairs)
    if trained >= windows:
        return Position(record.step or 0, record.samples_seen, record.epoch + 1)
    rows = rows if pairs is not None else trained * batch
    return Position(record.step or 0, record.samples_seen, record.epoch, trained, rows)


def course_of(args: InfCLTrainingArguments, state: Any, record: RunRecord | None, plan: BatchPlan | None) -> Course:
    """The samples of the steps of a training, those before it was resumed included.

    Args:
        args: its arguments.
        state: Trainer's.
        record: that of the checkpoint that it resumes from, if any.
        plan: of global batches that grow.
    """
    earlier = 0 if record is None else record.samples_seen
    return plan or EqualBatches(args.global_batch_size, state.max_steps, state.global_step, earlier)
