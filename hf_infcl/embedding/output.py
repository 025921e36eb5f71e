"""The files of embeddings: parquet or safetensors, each written completely or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

RECORD = "embeddings.json"


@dataclass
class Rows:
    """Embeddings of images, or of texts.

    Args:
        keys: of the rows that they belong to.
        captions: the texts; None for images.
        embeddings: [n, D] float32, of length 1.
    """

    keys: list[str]
    captions: list[str] | None
    embeddings: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))


def write(path: Path, rows: Rows) -> None:
    """Writes a file whose name ends in .parquet or .safetensors."""
    partial = path.with_name(f"_{os.getpid()}.{path.name}")  # which images-* does not match
    (_write_parquet if path.suffix == ".parquet" else _write_safetensors)(partial, rows)
    os.replace(partial, path)


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


def begin(folder: Path, record: dict[str, Any]) -> None:
    """Writes the record of what is embedded into the folder, or compares it with the one that is there.

    Raises:
        ValueError: the folder holds other embeddings.
    """
    path = folder / RECORD
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if differing := sorted(name for name in {*before, *record} if before.get(name) != record.get(name)):
            shown = "; ".join(f"{name} was {before.get(name)} and is {record.get(name)}" for name in differing)
            raise ValueError(
                f"{folder} holds other embeddings ({shown}). Choose another --output_dir, or delete this one."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
