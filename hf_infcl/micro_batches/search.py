"""Tries which division of a global batch fits into memory and is fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

ENOUGH = 256  # pairs of a micro-batch with which a GPU is at its rate; what fits beyond it keeps graphs
SINGLE = 4 * ENOUGH  # a window of up to so many pairs may be one micro-batch, which is encoded only once
TEXTS_AT_ONCE = (4, 2)  # texts are shorter than images: a GPU is at its rate with more of them


@dataclass(frozen=True)
class Trial:
    """A window that is tried."""

    micro_batch: int  # its pairs
    texts: int = 1  # the micro-batches whose texts are encoded at once
    graphs: int = 1  # the micro-batches whose graphs are kept


# attempt(trial): the bytes that the window takes above its resting state, and those left over. Raises an
# OutOfMemoryError if it does not fit.
Attempt = Callable[[Trial], tuple[int, int]]
# agree(number): the least number of all processes.
Agree = Callable[[int], int]


def find_micro_batch(attempt: Attempt, trial: Trial, possible: Sequence[int], pairs: int, agree: Agree) -> int:
    """The largest of the micro-batches that fits on all processes and is not larger than is of use; 0 if none fits.

    Args:
        trial: with the texts and the graphs that are decided already, or 1 of them.
        possible: the pairs of the micro-batches, in rising order.
        pairs: the pairs of a window on this process.
    """
    candidates = [n for n in possible if n <= ENOUGH or n == pairs <= SINGLE]
    first, last = 0, len(candidates)  # all before the first fit, and none from the last on
    while first < last:
        middle = last - 1 if last == len(candidates) else (first + last) // 2
        if _fits(attempt, replace(trial, micro_batch=candidates[middle])):
            first = middle + 1
        else:
            last = middle
    return agree(candidates[first - 1] if first else 0)


def find_texts_at_once(attempt: Attempt, trial: Trial, most: int, agree: Agree, *, compiled: bool) -> int:
    """The micro-batches, at most so many, whose texts all processes can encode at once; see `find_micro_batch`.

    Of a compiled model it is 1: it launches few kernels, so that texts at once save as much time as the graphs that fit
    in their place, and it would have to be compiled twice, with texts and without.
    """
    fitting = (n for n in TEXTS_AT_ONCE if n <= most and not compiled and _fits(attempt, replace(trial, texts=n)))
    return agree(next(fitting, 1))


def find_graphs(attempt: Attempt, trial: Trial, most: int, agree: Agree) -> int:
    """The number of graphs, at most so many, that can be kept on all processes; see `find_micro_batch`."""
    graphs, wanted, of_first = 0, 1, 0
    while graphs < wanted:
        try:
            taken, left = attempt(replace(trial, graphs=wanted))
        except torch.OutOfMemoryError:
            most, wanted = wanted - 1, (graphs + wanted) // 2
            continue
        if graphs == 0:
            # An upper bound, which includes the texts of several micro-batches, so that one more is always tried.
            of_first, more = taken, max(1, left // max(1, taken))
        else:
            more = left // max(1, (taken - of_first) // (wanted - 1))
        graphs, wanted = wanted, min(most, wanted + more)
    return agree(max(1, graphs))


def _fits(attempt: Attempt, trial: Trial) -> bool:
    try:
        attempt(trial)
    except torch.OutOfMemoryError:
        return False
    return True
