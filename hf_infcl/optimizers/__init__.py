"""Muon for the matrices of a model and AdamW for its other parameters, in one optimizer."""

from .groups import divided, matching, parameter_groups, table_of_groups, words_of_groups
from .muon_adamw import MuonAdamW

__all__ = ["MuonAdamW", "divided", "matching", "parameter_groups", "table_of_groups", "words_of_groups"]
