"""What a training will take: counted from a model's config, predicted from measured rates."""

from .counting import Counts, count
from .plan import GIB, GPU, GPUS, USABLE, Choice, best, choices, hiding_bandwidth, link_bytes, memory, seconds

__all__ = [
    "GIB",
    "GPU",
    "GPUS",
    "USABLE",
    "Choice",
    "Counts",
    "best",
    "choices",
    "count",
    "hiding_bandwidth",
    "link_bytes",
    "memory",
    "seconds",
]
