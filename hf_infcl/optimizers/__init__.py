"""Muon for the matrices of a model and AdamW for its other parameters, and a moving average of what either trains."""

from .groups import NAMES, divided, matching, parameter_groups, table_of_groups, words_of_groups
from .moving_average import MovingAverage, unwrapped, update_average, without_average
from .muon_adamw import MuonAdamW

__all__ = [
    "NAMES",
    "MovingAverage",
    "MuonAdamW",
    "divided",
    "matching",
    "parameter_groups",
    "table_of_groups",
    "unwrapped",
    "update_average",
    "without_average",
    "words_of_groups",
]
