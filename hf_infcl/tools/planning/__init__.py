"""Predicts memory and time of a training from the model's config and from rates measured on GPUs.

Memory is counted, and within 10% of what was measured. Times are operations over a measured share of each GPU's peak,
or the launches of the host, and within 25% for most of the measured steps (scripts/benchmarks/results/PLAN.md). The
micro-batches are those that the search of the training would find with this memory.
"""

from .costs import COSTS, GIB, GPUS, LAUNCHES, MODEL_CHANGES, USABLE, Choice, Cost
from .counting import Counts, Tower, Work
from .planner import Planner, check_memory, make_choice, model_options, search
from .prediction import count, measure, memory, seconds

__all__ = [
    "COSTS",
    "GIB",
    "GPUS",
    "LAUNCHES",
    "MODEL_CHANGES",
    "USABLE",
    "Choice",
    "Cost",
    "Counts",
    "Planner",
    "Tower",
    "Work",
    "check_memory",
    "count",
    "make_choice",
    "measure",
    "memory",
    "model_options",
    "search",
    "seconds",
]
