"""How a global batch is divided among processes and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .batch_options import DIVISION
from .batch_schedule import BatchSchedule

UNTRIED = 32  # the most pairs of a micro-batch where the memory is not known, as on a CPU
_LEAST = 0.25  # of the pairs that fit: with smaller micro-batches a device is far from its rate


def divide_global_batch(args: Any, size: int, micro_batch: int | None, accumulation: int | None) -> None:
    """Sets the micro-batch and the accumulation of a training so that they make up its ``global_batch_size``.

    Args:
        args: `InfCLTrainingArguments`, whose processes are set up.
        size: ``global_batch_size`` as the user passed it.
        micro_batch, accumulation: their values where they are decided already; otherwise None.

    Raises:
        ValueError: the global batch cannot be divided so.
    """
    if args.global_batch_schedule is not None:
        if size != args.global_batch_size:
            raise ValueError(
                f"global_batch_size={size:,}, but global_batch_schedule ends with {args.global_batch_size:,}. Leave "
                "one of them out."
            )
        args.per_device_train_batch_size = micro_batch or _untried(args)
        return
    factors = [(name, n) for name, n in zip(DIVISION, (micro_batch, accumulation), strict=True) if n is not None]
    least = math.prod([args.world_size, *(n for _, n in factors)])
    words = " × ".join([f"{name}={n}" for name, n in factors] + [_processes(args.world_size)])
    if len(factors) == 2 and least != size:
        raise ValueError(
            f"global_batch_size={size:,}, but {words} is {least:,}. Leave one of them out, or pass "
            f"global_batch_size={least:,}."
        )
    if size % least:  # none gives way: without the number, one of its factors would make up another, small batch
        raise ValueError(
            f"global_batch_size={size:,} is no multiple of {words}, which is {least:,}. Choose "
            f"{_or(_multiples(size, least))}, or {f'leave {factors[0][0]} out' if factors else 'other processes'}."
        )
    rows = size // args.world_size
    micro_batch = micro_batch or (rows // accumulation if accumulation else _untried(args))
    args.per_device_train_batch_size, args.gradient_accumulation_steps = micro_batch, rows // micro_batch


def _untried(args: Any) -> int:
    """The micro-batch that nobody has tried: the last word on a CPU, and until the first step on a GPU."""
    if args.device.type == "cpu":
        return largest_micro_batch(args, possible_micro_batches(args), UNTRIED)
    return max((n for n in possible_micro_batches(args) if n <= UNTRIED), default=1)


def possible_micro_batches(args: Any, *, exceeds: bool = False) -> list[int]:
    """The micro-batches that divide every global batch of a training equally, in rising order.

    Args:
        exceeds: whether a micro-batch may be larger than what a process has of the first of growing global batches,
            whose single micro-batch is smaller then. That of a stream may not.
    """
    sizes = BatchSchedule.of_arguments(args).sizes
    if any(size % args.world_size for size in sizes):
        return []
    per_process = [size // args.world_size for size in sizes]
    most = per_process[-1] if exceeds else min(per_process)
    pairs = ((n, per_process[-1] // n) for n in range(1, math.isqrt(per_process[-1]) + 1) if per_process[-1] % n == 0)
    divisors = {divisor for pair in pairs for divisor in pair}
    return sorted(n for n in divisors if n <= most and all(rows % min(n, rows) == 0 for rows in per_process))


def largest_micro_batch(args: Any, possible: Sequence[int], most: int) -> int:
    """The largest of `possible_micro_batches` with at most this many pairs.

    Raises:
        ValueError: it is much smaller than ``most``; the message names global batches that can be divided.
    """
    fits = [n for n in possible if n <= most]
    if fits and (fits[-1] >= _LEAST * most or fits[-1] == possible[-1]):
        return fits[-1]
    size, step = args.global_batch_size, args.world_size * max(1, most // 2)
    if args.global_batch_schedule is not None:
        raise ValueError(
            f"No micro-batch of up to {most} pairs divides all global batches of {args.global_batch_schedule} on "
            f"{_processes(args.world_size)}, but for very small ones. Choose multiples of {step:,} pairs, or give "
            "per_device_train_batch_size."
        )
    raise ValueError(
        f"global_batch_size={size:,} on {_processes(args.world_size)} cannot be divided into micro-batches that are "
        f"nearly as large as fits, which is {most} pairs here: the largest that divides it has "
        f"{fits[-1] if fits else 'none'}. "
        f"Choose {_or(_multiples(size, step))}, or give per_device_train_batch_size."
    )


def _processes(processes: int) -> str:
    return f"{processes} process{'es' if processes > 1 else ''}"


def _multiples(size: int, step: int) -> list[int]:
    """The multiples of a number of pairs below and above a size."""
    return [near for near in (size // step * step, -(-size // step) * step) if near]


def _or(sizes: Iterable[int]) -> str:
    return " or ".join(f"{size:,}" for size in dict.fromkeys(sizes))
