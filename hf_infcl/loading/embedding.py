"""Embeds whole collections: `infcl embed`, and the teacher of a training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoints.run_options import as_json
from ..data.store import Store
from ..encoders.adapters import weight_fingerprint
from ..processes.collectives import Processes, failures_announced
from ..readable import give_usual_modes, written_whole
from ..windows.setup import Context
from .computing import Encode, Writer, compute, fingerprint
from .sources import ItemSource

RECORD = "embeddings.json"
_DECISIVE = {"fingerprint", "dtype", "dims", "format", "half", "kinds", "parts", "data"}  # the rest is told


def embed(
    source: ItemSource,
    folder: str | Path,
    context: Context,
    *,
    format: str = "npy",
    half: bool = False,
    record: Mapping[str, Any] | None = None,
    licence: str | None = None,
) -> dict[str, int]:
    """Writes the embeddings of images and texts, with their keys. Collective; see `compute`.

    Each part of the source becomes one file of images, one of texts, or both, such as
    ``images-00002-of-00010.parquet``. Files that are there already are not computed again.

    Args:
        folder: a folder that all processes can write. It also gets ``embeddings.json``, the record of the run.
        context: of the model, which is in evaluation mode. Of its arguments, ``per_device_eval_batch_size`` is the
            number of images, and of texts, of one forward.
        format: "npy", those of a `Store`, in which a training finds them; "parquet" or "safetensors".
        half: whether npy has fp16 instead of fp32.
        record: as `described` has returned it, if it is known.
        licence: of the model, for the record.

    Returns:
        As `compute`.

    Raises:
        ValueError: as `compute`; or the folder holds other embeddings.
    """
    place, encoder = Path(folder), context.encoder
    if half and format != "npy":
        raise ValueError(f"half_precision is for the format npy, got {format}. Leave it out, or choose npy.")
    with failures_announced():
        known = described(source, context) if record is None else record
        if Processes().rank == 0:
            begin(place, {**known, "format": format, "half": half, "licence": licence})
    Processes().agree([])
    encoders: dict[str, Encode] = {"images": encoder.encode_images, "texts": encoder.encode_texts}
    writers: dict[str, Writer] = {}
    for kind in source.kinds:
        is_store = format == "npy"
        writers[kind] = Store(place, kind, source.parts) if is_store else _Files(place, kind, source.parts, format)
    return compute(
        source,
        context,
        {kind: partial(normalised_by, encode, half=half) for kind, encode in encoders.items()},
        writers,
        batch_size=context.args.per_device_eval_batch_size,
        agree=lambda: Processes().agree([]),
    )


def normalised_by(encode: Encode, inputs: dict[str, Tensor], *, half: bool = False) -> Tensor:
    """The embeddings of inputs in fp32 or fp16, of length 1: those that a model returns in bf16 are up to 0.3% off."""
    return F.normalize(encode(inputs).float(), dim=-1).to(torch.float16 if half else torch.float32)


def described(source: ItemSource, context: Context) -> dict[str, Any]:
    """What the record says of model and data, besides the fingerprint of all that decides."""
    encoder, collator, dtype = context.encoder, context.collator, context.accelerator.mixed_precision
    content = source.fingerprint() + (collator.text_fingerprint() if "texts" in source.kinds else "")
    content += "" if encoder.dims is None else f" {encoder.dims} dimensions"
    config = getattr(encoder.base, "config", None)
    return {
        "fingerprint": fingerprint(content, encoder.model, collator, dtype),
        "dtype": dtype,
        "dims": encoder.dims,
        "kinds": list(source.kinds),
        "parts": source.parts,
        "model": getattr(config, "_name_or_path", "") or type(encoder.base).__name__,
        "weights": weight_fingerprint(encoder.model),
        "revision": getattr(config, "_commit_hash", None),
        "preprocessing": as_json(collator.options),
        "data": source.described(),
    }


def begin(folder: Path, record: Mapping[str, object]) -> None:
    """Writes the record of what is embedded; raises a ValueError if the folder has another one, or a damaged one."""
    path = folder / RECORD
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial_path:
            partial_path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        before["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Delete {folder}, or choose another --output_dir.") from error
    differing = _differences(before, record)
    if _DECISIVE & {name.partition(" ")[0] for name in differing}:
        # A fingerprint says nothing beside what differs.
        named = {name: told for name, told in differing.items() if name != "fingerprint"} or differing
        shown = "; ".join(f"{name} was {was} and is {now}" for name, (was, now) in named.items())
        raise ValueError(f"{folder} holds other embeddings ({shown}). Choose another --output_dir, or delete this one.")


def _differences(before: Mapping[str, object], record: Mapping[str, object]) -> dict[str, tuple[Any, Any]]:
    """What differs in two records, from ``before`` to now, and in the mappings in them."""
    differing: dict[str, tuple[Any, Any]] = {}
    for name, was in before.items():
        now = record.get(name)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            inner = _differences(dict.fromkeys(now) | dict(was), now)
            differing |= {f"{name} {part}": values for part, values in inner.items()}
        elif was != now:
            differing[name] = was, now
    return differing


class _Files:
    """Parts in parquet or safetensors, which no training reads."""

    is_finished = True

    def __init__(self, folder: Path, kind: str, parts: int, format: str) -> None:
        self._paths = [folder / f"{kind}-{part:05}-of-{parts:05}.{format}" for part in range(parts)]
        formats: dict[str, Callable[..., None]] = {"parquet": _write_parquet, "safetensors": _write_safetensors}
        self._write = formats[format]

    def lacks(self, part: int) -> bool:
        return not self._paths[part].exists()

    def write(self, part: int, keys: Sequence[str], values: np.ndarray, **columns: Sequence[str]) -> None:
        with written_whole(self._paths[part]) as partial_path:
            self._write(partial_path, values, **columns)

    def finish(self) -> None:
        """Nothing is left to do."""


def _write_parquet(path: Path, values: np.ndarray, names: Sequence[str], captions: Sequence[str] | None = None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {"key": pa.array(names, pa.string())}
    if captions is not None:
        columns["caption"] = pa.array(captions, pa.string())
    flat = pa.array(values.reshape(-1), pa.float32())
    columns["embedding"] = pa.FixedSizeListArray.from_arrays(flat, max(1, values.shape[1]))
    pq.write_table(pa.table(columns), path)


def _write_safetensors(
    path: Path, values: np.ndarray, names: Sequence[str], captions: Sequence[str] | None = None
) -> None:
    from safetensors.numpy import save_file

    told = {"keys": json.dumps(names, ensure_ascii=False)}
    if captions is not None:
        told["captions"] = json.dumps(captions, ensure_ascii=False)
    save_file({"embeddings": values}, path, told)
    give_usual_modes(path)
