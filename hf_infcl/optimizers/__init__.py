"""Muon for the matrices of a model and AdamW for its other parameters, and a moving average of what either trains."""

from .groups import parameter_groups
from .muon_adamw import MuonAdamW

__all__ = ["MuonAdamW", "parameter_groups"]
