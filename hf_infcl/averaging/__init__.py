"""Averages of the weights before and after a fine-tuning, and the choice of one of them."""

from .choice import ALPHAS, Measured, check_tolerance, chosen, halves, score, score_if_measured
from .search import SPLIT, Averaged, described, find_average, measured_at, not_trained, with_halves
from .weights import (
    PATHS,
    adapters_of_zero,
    check_alpha,
    check_new_adapters,
    interpolated,
    running_statistics,
    with_factors_of_end,
)

__all__ = [
    "ALPHAS",
    "PATHS",
    "SPLIT",
    "Averaged",
    "Measured",
    "adapters_of_zero",
    "check_alpha",
    "check_new_adapters",
    "check_tolerance",
    "chosen",
    "described",
    "find_average",
    "halves",
    "interpolated",
    "measured_at",
    "not_trained",
    "running_statistics",
    "score",
    "score_if_measured",
    "with_factors_of_end",
    "with_halves",
]
