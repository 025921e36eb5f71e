"""Training without the pairs that a ledger says are wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from ...data import ImageTextDataset, ImageTextStream
from ...processes.collectives import Processes
from .ledger import check_data, read_as_ledger, recorded_content


def rows_kept(dataset: ImageTextDataset, asked: str) -> np.ndarray:
    """The rows of a table whose pairs are not wrong with at least some probability, [n] int64.

    The file of the ledger and the probability are asked for as in ``"_ledger.parquet:0.5"``. ``"_ledger.parquet:5%"``
    asks for that share of the pairs, those with the lowest scores, rounded down. A ValueError says that the number is
    missing, or that the file is no ledger, is of another table, or excludes all pairs.
    """
    wrong, _ = _wrong_in(dataset, asked)
    if len(wrong) and not 0 <= wrong.min() <= wrong.max() < len(dataset):
        raise ValueError(
            f"The ledger of {asked} leaves out rows {wrong.min()} to {wrong.max()}, but the table has {len(dataset):,} "
            "rows, the first of which is row 0. Keep the keys in a copy of a ledger."
        )
    kept = np.setdiff1d(np.arange(len(dataset)), wrong)
    _tell(len(kept), len(dataset), asked)
    return kept


def stream_kept(stream: ImageTextStream, asked: str) -> ImageTextStream:
    """A stream without the samples that are wrong with at least some probability; as `rows_kept`.

    Every process and worker holds 8 bytes for each sample that is left out, and none for the others.
    """
    wrong, count = _wrong_in(stream, asked)
    _tell(count - len(wrong), count, asked)
    return stream.without(np.sort(wrong))


def _wrong_in(dataset: ImageTextDataset | ImageTextStream, asked: str) -> tuple[np.ndarray, int]:
    """The keys [n] int64 to leave out, and the number of all pairs, of a ledger of this dataset."""
    keys, count, recorded = _wrong(asked)
    check_data(recorded, dataset, asked.rpartition(":")[0])
    return keys, count


def _wrong(asked: str) -> tuple[np.ndarray, int, str]:
    """The keys [n] int64 of a ledger's pairs that are to be left out, the number of all pairs, and whose they are."""
    import pyarrow.parquet as pq

    path, _, number = asked.rpartition(":")
    is_share = number.endswith("%")
    try:
        least = float(number.removesuffix("%"))
    except ValueError:
        least = -1.0
    if not path or not 0 < least <= (100 if is_share else 1):
        raise ValueError(
            "exclude must be a ledger and the least probability of the pairs to leave out, more than 0 and at most 1, "
            f"or the share with the lowest scores, such as _ledger.parquet:0.5 or _ledger.parquet:5%, got {asked!r}."
        )
    with read_as_ledger(path), pq.ParquetFile(path) as file:
        recorded = recorded_content(file)
        keys = _with_lowest_scores(file, least) if is_share else _probably_wrong(file, least)
        count = int(file.metadata.num_rows)
    return keys, count, recorded


def _with_lowest_scores(file: Any, percent: float) -> np.ndarray:
    key, score = (column.to_numpy() for column in file.read(columns=["key", "score"]).columns)
    _check_numbers("score", score)
    count = int(percent * len(key) / 100)  # in this order, since 0.58 * 50 is less than 29
    return key[np.argsort(score, kind="stable")[:count]].astype(np.int64)


def _probably_wrong(file: Any, least: float) -> np.ndarray:
    found = [np.empty(0, np.int64)]
    for batch in file.iter_batches(columns=["key", "p_wrong"]):  # so that the other keys take no memory
        key, p_wrong = (batch[name].to_numpy(zero_copy_only=False) for name in ("key", "p_wrong"))
        _check_numbers("p_wrong", p_wrong)
        found.append(key[p_wrong >= least].astype(np.int64))
    return np.concatenate(found)


def _check_numbers(name: str, numbers: np.ndarray) -> None:
    if numbers.dtype.kind not in "fiu" or not np.isfinite(numbers).all():
        raise ValueError(f"its column {name} does not hold a number in every row")


def words_of_excluded(asked: str) -> tuple[str, str]:
    """A phrase that says how many pairs of a ledger are left out, and which; and the name of its file."""
    path, _, number = asked.rpartition(":")
    keys, count, _ = _wrong(asked)
    lowest = number.endswith("%")
    which = f"the {number} with the lowest scores" if lowest else f"wrong with a probability of at least {number}"
    return f"{len(keys):,} of {count:,}, {which}", Path(path).name


def _tell(kept: int, count: int, asked: str) -> None:
    if kept == 0:
        raise ValueError(f"{asked} excludes all {count:,} pairs. Choose a higher probability, or a smaller share.")
    if Processes().rank == 0:
        print(f"Excluded by {asked}: {count - kept:,} of {count:,} pairs.", file=sys.stderr)
