"""A global batch that grows: its stages, and how each global batch is divided among processes and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .combinations import SCHEDULES_BY_METRIC, ExclusiveOptionsError
from .stages import same_words, stages_of


@dataclass(frozen=True)
class BatchSchedule:
    """The global batches of the stages of a training.

    Attributes:
        sizes: pairs of a global batch, each larger than the one before.
        ends: for each stage but the last, the share of the samples after which it ends.
    """

    sizes: tuple[int, ...]
    ends: tuple[float, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> BatchSchedule:
        """The schedule of words such as 256:0.25 512:0.25 1024: pairs with their shares of the samples.

        Raises:
            ValueError: the words are no such schedule, or a batch is not larger than the one before.
        """
        of = "global batches with their shares of the samples", "batches of at least one pair"
        return cls(*stages_of("global_batch_schedule", words, *of, "256:0.25 512:0.25 1024"))

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
    own = size // processes
    micro_batch = min(micro_batch, own)
    if micro_batch == 0 or size % (micro_batch * processes):
        fits = max(1, round(size / (max(micro_batch, 1) * processes))) * max(micro_batch, 1) * processes
        raise ValueError(
            f"global_batch_schedule has a batch of {size:,} pairs, which {processes} process"
            f"{'es' if processes > 1 else ''} with micro-batches of {max(micro_batch, 1)} "
            f"(per_device_train_batch_size) cannot share equally. {fits:,} pairs would do, or change the micro-batch."
        )
    return micro_batch, own // micro_batch


def check_batch_schedule(args: Any) -> None:
    """Raises a ValueError for a ``global_batch_schedule`` that is none, or that other options contradict."""
    if args.global_batch_schedule is None:
        return
    BatchSchedule.of(args.global_batch_schedule)
    args.global_batch_schedule = same_words(args.global_batch_schedule)
    if args.gradient_accumulation_steps > 1:
        raise ExclusiveOptionsError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} contradicts global_batch_schedule, from "
            "which the micro-batches of each step follow. Set it to 1, the default.",
            *("gradient_accumulation_steps", "global_batch_schedule"),
        )
    by_metric = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) in SCHEDULES_BY_METRIC
    if by_metric and args.learning_rate_batch_size is not None:
        raise ExclusiveOptionsError(
            "learning_rate_batch_size cannot follow global_batch_schedule while the learning rate depends on a metric. "
            "Leave it out, or choose another lr_scheduler_type.",
            *("learning_rate_batch_size", "global_batch_schedule", "lr_scheduler_type"),
        )
