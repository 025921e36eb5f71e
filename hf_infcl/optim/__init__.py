"""Muon for the matrices of a model and AdamW for its other parameters."""

from .groups import parameter_groups
from .muon import MuonAdamW

__all__ = ["MuonAdamW", "parameter_groups"]
