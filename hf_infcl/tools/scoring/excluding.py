"""Training without the pairs that a ledger says are wrong."""

from __future__ import annotations

import numpy as np

from ...data import ImageTextDataset
from .ledger import Ledger


def rows_kept(dataset: ImageTextDataset, asked: str) -> np.ndarray:
    """The rows of a table whose pairs are not wrong with at least some probability, [n] int64.

    Args:
        dataset: the table.
        asked: the file of its ledger and the probability, such as ``"_ledger.parquet:0.9"``.

    Raises:
        ValueError: the file is no ledger, is of another table, or excludes all pairs; the probability is missing.
    """
    path, _, number = asked.rpartition(":")
    try:
        least = float(number)
    except ValueError:
        least = -1.0
    if not path or not 0 < least <= 1:
        raise ValueError(
            "exclude must be a ledger and the least probability of the pairs to leave out, more than 0 and at most 1, "
            f"such as _ledger.parquet:0.9, got {asked!r}."
        )
    ledger = Ledger.read(path)
    ledger.check_data(dataset.content_fingerprint(), path)
    kept = np.setdiff1d(np.arange(len(dataset)), ledger.wrong(least))
    if len(kept) == 0:
        raise ValueError(f"{asked} excludes all {len(dataset):,} pairs. Choose a higher probability.")
    return kept
