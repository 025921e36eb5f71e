"""Predicts memory and time of a training from the model's config and from rates measured on GPUs.

Memory is counted, and within 10% of what was measured. Times are operations over a measured share of the GPU's peak, or
the launches of the host, and within 25% for most of the measured steps (scripts/benchmarks/results/PLAN.md).
"""

from .costs import COSTS, GPUS, RATES, USABLE, Choice, Cost
from .counting import Counts, Setting, Tower, Work, count, measure
from .planner import Planner, check_memory, count_training, make_choice
from .prediction import GIB, best, choices, memory, seconds

__all__ = [
    "COSTS",
    "GIB",
    "GPUS",
    "RATES",
    "USABLE",
    "Choice",
    "Cost",
    "Counts",
    "Planner",
    "Setting",
    "Tower",
    "Work",
    "best",
    "check_memory",
    "choices",
    "count",
    "count_training",
    "make_choice",
    "measure",
    "memory",
    "seconds",
]
