"""The files of embeddings: parquet, safetensors or npy, each written completely or not at all."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...loading.stored_embeddings import ORDER, RECORD, hashed, index_paths, of_caption
from ...readable import give_usual_modes


@dataclass
class Rows:
    """Embeddings of images, or of texts."""

    keys: list[str]  # of the rows that they belong to
    captions: list[str] | None  # the texts; None for images
    embeddings: np.ndarray  # [n, D] float32, or float16 for npy, of length 1
    # By what a training looks up each row: its number, the names of shard and sample, or the seed of an augmentation.
    places: list[str]


def write(path: Path, rows: Rows) -> None:
    """Writes a file whose name ends in .parquet, .safetensors or .npy."""
    partial = path.with_name(f"_{os.getpid()}.{path.name}")  # which images-* does not match
    _WRITERS[path.suffix](partial, rows)
    if path.suffix == ".npy":  # whose keys are there first
        if rows.captions is None and len(set(rows.places)) < len(rows.places):
            twice = next(place for place, count in Counter(rows.places).items() if count > 1)
            raise ValueError(
                f"Several images have the name {twice!r}, by which a training finds their embeddings. Rename these "
                "samples: no two of a shard may have one name."
            )
        captions = rows.places if rows.captions is None else map(of_caption, rows.places, rows.captions)
        np.save(keys_path(path), hashed(captions))
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
    give_usual_modes(path)


_WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    ".parquet": _write_parquet,
    ".safetensors": _write_safetensors,
    ".npy": lambda path, rows: np.save(path, rows.embeddings),
}


def join(folder: Path, kind: str, parts: Sequence[Path]) -> None:
    """Makes one file of the embeddings of all ``parts``, in their order, with its index, and removes the parts.

    Beside each part, the file of `keys_path` has the hashes of its keys. ``kind`` is "images" or "texts".
    """
    hashes_path, rows_path, path = index_paths(folder, kind)
    if path.exists():
        return
    pieces = [piece for part in parts if len(piece := np.load(part, mmap_mode="r"))]
    hashes = np.concatenate([np.empty(0, np.uint64), *[np.load(keys_path(part)) for part in parts]])
    order = hashes.argsort(kind="stable")
    np.save(hashes_path, hashes[order])
    np.save(rows_path, order.astype(np.uint32 if len(order) < 2**32 else np.int64))
    partial = path.with_name(f"_{os.getpid()}.{path.name}")
    shape = len(hashes), pieces[0].shape[1] if pieces else 1
    joined = np.lib.format.open_memmap(partial, "w+", pieces[0].dtype if pieces else np.float32, shape)
    first = 0
    for piece in pieces:
        joined[first : first + len(piece)] = piece
        first += len(piece)
    joined.flush()
    os.replace(partial, path)
    for part in parts:
        part.unlink()
        keys_path(part).unlink()


def keys_path(part: Path) -> Path:
    """The file of the hashes of the keys of a part."""
    return part.with_name(f"_keys.{part.name}")


def _differences(before: Mapping[str, object], record: Mapping[str, object]) -> dict[str, tuple[Any, Any]]:
    """What differs in two records, from ``before`` to now, and in the mappings in them."""
    differing: dict[str, tuple[Any, Any]] = {}
    for name, was in before.items():
        now = record.get(name)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            new = dict.fromkeys(name for name in now if name not in ORDER)  # these, records have not had always
            inner = _differences(new | dict(was), now)
            differing |= {f"{name} {part}": values for part, values in inner.items()}
        elif was != now:
            differing[name] = was, now
    return differing


def begin(folder: Path, record: Mapping[str, object]) -> None:
    """Writes the record of what is embedded; raises a ValueError if the folder has another one, or a damaged one."""
    path = folder / RECORD
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            before["fingerprint"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}. Delete {folder}, or choose another --output_dir.") from error
        # What later versions say beside the fingerprint is not in older records.
        if differing := _differences(before, record):
            # A fingerprint says nothing beside what differs.
            named = {name: told for name, told in differing.items() if name != "fingerprint"} or differing
            shown = "; ".join(f"{name} was {was} and is {now}" for name, (was, now) in named.items())
            raise ValueError(
                f"{folder} holds other embeddings ({shown}). Choose another --output_dir, or delete this one."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
