"""How a global batch is divided among processes and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .contrastive import DIVISION

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


def possible_micro_batches(args: Any) -> list[int]:
    """The micro-batches that divide the global batch of a training equally, in rising order."""
    rows, left = divmod(args.global_batch_size, args.world_size)
    pairs = ((n, rows // n) for n in range(1, math.isqrt(rows) + 1) if rows % n == 0 and not left)
    return sorted({divisor for pair in pairs for divisor in pair})


def largest_micro_batch(args: Any, possible: Sequence[int], most: int) -> int:
    """The largest of `possible_micro_batches` with at most this many pairs.

    Raises:
        ValueError: it is much smaller than ``most``; the message names global batches that can be divided.
    """
    fits = [n for n in possible if n <= most]
    if fits and (fits[-1] >= _LEAST * most or fits[-1] == possible[-1]):
        return fits[-1]
    size, step = args.global_batch_size, args.world_size * max(1, most // 2)
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
