"""The files of embeddings: parquet or safetensors, each written completely or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...loading.stored_embeddings import RECORD, hashed, keys_of, of_caption


@dataclass
class Rows:
    """Embeddings of images, or of texts.

    Args:
        keys: of the rows that they belong to.
        captions: the texts; None for images.
        places: what each row is found by in a training: the number of the row, or the names of shard and sample.
        embeddings: [n, D] float32, of length 1.
    """

    keys: list[str]
    captions: list[str] | None
    embeddings: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    places: list[str] = field(default_factory=list)


def write(path: Path, rows: Rows) -> None:
    """Writes a file whose name ends in .parquet, .safetensors or .npy."""
    partial = path.with_name(f"_{os.getpid()}.{path.name}")  # which images-* does not match
    _WRITERS[path.suffix](partial, rows)
    if path.suffix == ".npy":  # whose keys are there first
        captions = rows.places if rows.captions is None else map(of_caption, rows.places, rows.captions)
        np.save(keys_of(path), hashed(captions))
    os.replace(partial, path)


def _write_npy(path: Path, rows: Rows) -> None:
    np.save(path, rows.embeddings)


def _write_parquet(path: Path, rows: Rows) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = pa.array(rows.embeddings.reshape(-1), pa.float32())
    columns: dict[str, Any] = {"key": pa.array(rows.keys, pa.string())}
    if rows.captions is not None:
        columns["caption"] = pa.array(rows.captions, pa.string())
    columns["embedding"] = pa.FixedSizeListArray.from_arrays(flat, max(1, rows.embeddings.shape[1]))
    pq.write_table(pa.table(columns), path)


def _write_safetensors(path: Path, rows: Rows) -> None:
    from safetensors.numpy import save_file

    names = {"keys": json.dumps(rows.keys, ensure_ascii=False)}
    if rows.captions is not None:
        names["captions"] = json.dumps(rows.captions, ensure_ascii=False)
    save_file({"embeddings": rows.embeddings}, path, names)


_WRITERS = {".parquet": _write_parquet, ".safetensors": _write_safetensors, ".npy": _write_npy}


def begin(folder: Path, record: dict[str, Any]) -> None:
    """Writes the record of what is embedded into the folder, or compares it with the one that is there.

    Raises:
        ValueError: the folder holds other embeddings.
    """
    path = folder / RECORD
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        # What later versions say beside the fingerprint is not in older records.
        if differing := sorted(name for name in before if before[name] != record.get(name)):
            shown = "; ".join(f"{name} was {before.get(name)} and is {record.get(name)}" for name in differing)
            raise ValueError(
                f"{folder} holds other embeddings ({shown}). Choose another --output_dir, or delete this one."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
