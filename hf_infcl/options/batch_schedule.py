"""The samples of the steps of a training, its stages, and a global batch that grows from one to the next."""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Course:
    """How far a training has come before each of its steps, in samples, of which all shares are shares."""

    steps: int  # of the whole training, from its first on
    samples: int  # its pairs
    grows = False  # whether global batches have several sizes that were planned

    def samples_before(self, step: int) -> int:
        """The pairs trained before a step."""
        raise NotImplementedError

    def size(self, step: int) -> int:
        """The pairs of the global batch of a step."""
        raise NotImplementedError

    def first_step(self, share: float) -> int:
        """The first step before which this share of the samples is trained."""
        return bisect_left(range(self.steps + 1), round(share * self.samples), key=self.samples_before)

    def last_steps(self, share: float) -> int:
        """How many steps at the end train this share of the samples, or a little more."""
        before = self.samples - math.ceil(share * self.samples)
        return self.steps + 1 - bisect_right(range(self.steps + 1), before, key=self.samples_before)


class EqualBatches(Course):
    """The course of a training without ``global_batch_schedule``, in global batches of this size."""

    def __init__(self, size: int, steps: int) -> None:
        self.steps, self.samples, self._size = steps, steps * size, size

    def samples_before(self, step: int) -> int:
        return step * self._size

    def size(self, step: int) -> int:
        return self._size

    def first_step(self, share: float) -> int:
        return round(share * self.steps)

    def last_steps(self, share: float) -> int:
        return math.ceil(share * self.steps)


# ---- Words such as 112:0.5 160:0.4 224: a number for each stage, with the share that the stage takes ----


def _split_words(value: Sequence[str]) -> list[str]:
    """The words of the option, one for each stage, of a value that may hold several in one."""
    return " ".join([value] if isinstance(value, str) else map(str, value)).split()


def same_words(value: Sequence[str]) -> list[str]:
    """The words in which all values of the same stages are equal, for comparisons with another run."""
    parts = (word.partition(":") for word in _split_words(value))
    return [f"{int(number)}:{float(share)}" if share else str(int(number)) for number, _, share in parts]


def read_stages(
    name: str, words: Sequence[str], of: str, least: str, example: str
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The numbers of the stages, and for each stage but the last the share of the training after which it ends.

    Args:
        words: its value; the last stage gets the rest, and has no share.
        of: what the words list, for messages.
        least: the smallest numbers that are allowed, for messages.
        example: a valid value, for messages.

    Raises:
        ValueError: the words are no such stages, or a number is not larger than the one before.
    """
    words = _split_words(words)
    *earlier, last = [re.fullmatch(r"(\d+)(?::(0?\.\d+))?", word) for word in words] or [None]
    shares = [float(stage[2] or 0) if stage else 0.0 for stage in earlier]
    if not earlier or last is None or last[2] or not all(shares) or sum(shares) >= 1:
        raise ValueError(
            f"{name} must be {of} and then the last one, which gets the rest, such as {example}, got "
            f"{' '.join(words) or 'nothing'}."
        )
    numbers = tuple(int(stage[1]) for stage in (*earlier, last) if stage)
    if numbers[0] == 0 or any(later <= number for number, later in itertools.pairwise(numbers)):
        raise ValueError(f"{name} must have {least} that grow, got {' '.join(words)}.")
    return numbers, tuple(itertools.accumulate(shares))


# ---- A global batch that grows ----


@dataclass(frozen=True)
class BatchSchedule:
    """The global batches of the stages of a training."""

    sizes: tuple[int, ...]  # pairs of a global batch, each larger than the one before
    ends: tuple[float, ...]  # for each stage but the last, the share of the samples after which it ends

    @classmethod
    def of(cls, words: Sequence[str]) -> BatchSchedule:
        """The schedule of words such as 256:0.25 512:0.25 1024: pairs with their shares of the samples.

        Raises:
            ValueError: the words are no such schedule, or a batch is not larger than the one before.
        """
        of = "global batches with their shares of the samples", "batches of at least one pair"
        return cls(*read_stages("global_batch_schedule", words, *of, "256:0.25 512:0.25 1024"))

    @classmethod
    def of_arguments(cls, args: Any) -> BatchSchedule:
        """The schedule of ``global_batch_schedule``; without this option, a single stage."""
        words = args.global_batch_schedule
        return cls((args.global_batch_size,), ()) if words is None else cls.of(words)

    def mean_size(self) -> float:
        """The samples per step of a whole training."""
        shares = (end - begin for begin, end in zip((0.0, *self.ends), (*self.ends, 1.0), strict=True))
        return 1 / sum(share / size for share, size in zip(shares, self.sizes, strict=True))


def divided_batch(size: int, micro_batch: int, processes: int) -> tuple[int, int]:
    """The pairs of a micro-batch, and the micro-batches of each process, of a global batch of this size.

    The micro-batch is that of ``per_device_train_batch_size``, or all pairs of a process if these are fewer.

    Raises:
        ValueError: the processes cannot have equally many micro-batches.
    """
    rows = size // processes
    micro_batch = min(micro_batch, rows)
    if micro_batch == 0 or size % (micro_batch * processes):
        fits = max(1, round(size / (max(micro_batch, 1) * processes))) * max(micro_batch, 1) * processes
        raise ValueError(
            f"global_batch_schedule has a batch of {size:,} pairs, which {processes} process"
            f"{'es' if processes > 1 else ''} with micro-batches of {max(micro_batch, 1)} "
            f"(per_device_train_batch_size) cannot share equally. {fits:,} pairs would do, or change the micro-batch."
        )
    return micro_batch, rows // micro_batch


def check_batch_schedule(args: Any) -> None:
    """Raises a ValueError for a ``global_batch_schedule`` that is none, or that other options contradict."""
    if args.global_batch_schedule is None:
        return
    BatchSchedule.of(args.global_batch_schedule)
    args.global_batch_schedule = same_words(args.global_batch_schedule)
    if args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} contradicts global_batch_schedule, from "
            "which the micro-batches of each step follow. Set it to 1, the default."
        )
