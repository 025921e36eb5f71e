"""Predicts memory and time of a training from the model's config and from rates measured on GPUs."""

from .counting import ROWS, Counts, Operation, count
from .fitting import check_memory, choice_of, counts_of
from .measuring import measure
from .prediction import (
    GIB,
    GPU,
    GPUS,
    USABLE,
    Choice,
    best,
    block_seconds,
    choices,
    hiding_bandwidth,
    is_gathered,
    is_replayed,
    link_bytes,
    loss_seconds,
    memory,
    seconds,
)

__all__ = [
    "GIB",
    "GPU",
    "GPUS",
    "ROWS",
    "USABLE",
    "Choice",
    "Counts",
    "Operation",
    "best",
    "block_seconds",
    "check_memory",
    "choice_of",
    "choices",
    "count",
    "counts_of",
    "hiding_bandwidth",
    "is_gathered",
    "is_replayed",
    "link_bytes",
    "loss_seconds",
    "measure",
    "memory",
    "seconds",
]
