"""Embeds a collection on several processes; a run after an interruption computes what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.utils import logging

from ...checkpoints.run_options import as_json
from ...data import ContrastiveCollator
from ...encoders.adapters import weight_fingerprint
from ...encoders.dual_encoder import DualEncoder
from ...loading.feature_cache import fingerprint, for_each_missing
from ...loading.stored_embeddings import index_paths
from ...processes.collectives import Processes, failures_announced
from .output import Rows, begin, join, write
from .sources import Batch, ItemSource, collated

if TYPE_CHECKING:
    from ...training.trainer import InfCLTrainer
    from ...windows.setup import Setup

logger = logging.get_logger(__name__)


def embed(
    source: ItemSource,
    folder: str | Path,
    trainer: InfCLTrainer,
    *,
    format: str = "parquet",
    half: bool = False,
    licence: str | None = None,
) -> dict[str, int]:
    """Writes the embeddings of images and texts, with their keys. Collective: every process calls it.

    The processes divide the parts of the source among themselves. Each part becomes one file of images, one of texts,
    or both, such as ``images-00002-of-00010.parquet``. Files that are there already are not computed again.

    Args:
        folder: a folder that all processes can write. It also gets ``embeddings.json``, the record of the run.
        trainer: of the model, which is in evaluation mode; its collator is a `ContrastiveCollator`. Of its arguments,
            ``per_device_eval_batch_size`` is the number of images, and of texts, of one forward.
        format: "parquet", "safetensors" or "npy", in which the parts become one file at the end.
        half: whether npy has fp16 instead of fp32.
        licence: of the model, for the record of npy.

    Returns:
        The numbers of images and texts that this call has embedded and of the rows that it has left out, over all
        processes, by "images", "texts" and "skipped".

    Raises:
        ValueError: the folder holds other embeddings, a row is bad, or an embedding is not finite. The other processes
            raise an OtherRankFailedError.
    """
    processes, place, setup = Processes(), Path(folder), trainer.setup
    encoder, collator, args = setup.encoder, setup.collator, setup.args
    dtype = setup.accelerator.mixed_precision
    content = source.image_fingerprint() + (collator.text_fingerprint() if "texts" in source.kinds else "")
    content += "" if encoder.dims is None else f" {encoder.dims} dimensions"
    record = {
        "fingerprint": fingerprint(content, encoder.model, collator, dtype),
        "dtype": dtype,
        "dims": encoder.dims,
        "format": format,
        "kinds": list(source.kinds),
        "parts": source.parts,
        **({**_told(source, encoder, collator, licence), "half": half} if format == "npy" else {}),
    }
    if half and format != "npy":
        raise ValueError(f"half_precision is for the format npy, got {format}. Leave it out, or choose npy.")
    with failures_announced():
        if processes.rank == 0:
            begin(place, record)
    processes.agree([])
    names = {
        kind: [place / f"{kind}-{n:05}-of-{source.parts:05}.{format}" for n in range(source.parts)]
        for kind in source.kinds
    }
    counts = dict.fromkeys(("images", "texts", "skipped"), 0)
    missing = [
        part
        for part in range(processes.rank, source.parts, processes.world_size)
        if not all(names[kind][part].exists() or index_paths(place, kind)[-1].exists() for kind in source.kinds)
    ]

    load = partial(
        DataLoader,
        collate_fn=partial(collated, collator),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
    )
    parts = source.read(missing, args.per_device_eval_batch_size, load)

    def compute(part: int) -> None:
        with torch.no_grad(), setup.accelerator.autocast():
            encoded = _encoded(next(parts), setup, counts)
        for kind, rows in encoded.items():
            if kind in source.kinds:
                values = rows.embeddings.astype(np.float16) if half else rows.embeddings
                write(names[kind][part], replace(rows, embeddings=values))
        logger.info(f"Part {part} of {source.parts} was embedded.")

    for_each_missing(source.parts, lambda part: part not in missing, compute, lambda: processes.agree([]))
    if format == "npy":
        with failures_announced():
            for kind in source.kinds if processes.rank == 0 else ():
                join(place, kind, names[kind])
    totals = processes.agree([counts[name] for name in counts])
    return {name: int(sum(of_rank)) for name, of_rank in zip(counts, zip(*totals, strict=True), strict=True)}


def _told(
    source: ItemSource, encoder: DualEncoder, collator: ContrastiveCollator, licence: str | None
) -> dict[str, Any]:
    """What the record of files for a training says of model and data, besides the fingerprint of all that decides."""
    config = getattr(encoder.base, "config", None)
    return {
        "model": getattr(config, "_name_or_path", "") or type(encoder.base).__name__,
        "weights": weight_fingerprint(encoder.model),
        "licence": licence,
        "revision": getattr(config, "_commit_hash", None),
        "preprocessing": as_json(collator.options),
        "data": source.described(),
    }


def _encoded(batches: Iterator[Batch], setup: Setup, counts: dict[str, int]) -> dict[str, Rows]:
    """The images and texts of a part, in the order of its rows; counts them."""
    encoder, batch_size = setup.encoder, setup.args.per_device_eval_batch_size
    items: dict[str, list[tuple[int, str, str | None, str]]] = {"images": [], "texts": []}
    vectors: dict[str, list[Tensor]] = {"images": [], "texts": []}
    for kept, bad, images, texts in batches:
        for reason in bad:
            logger.warning(f"Left out: {reason}")
        counts["skipped"] += len(bad)
        for kind, inputs, encode in (("images", images, encoder.encode_images), ("texts", texts, encoder.encode_texts)):
            if inputs is not None:
                encoded = (encode(setup.prepare_inputs(part)).float() for part in _split(inputs, batch_size))
                vectors[kind] += [F.normalize(part, dim=-1) for part in encoded]  # in bf16, lengths are up to 0.3% off
        if images is not None:
            items["images"] += [(item["row"], item["key"], None, place) for item in kept for place in item["images"]]
        if texts is not None:
            items["texts"] += [(item["row"], item["key"], c, item["place"]) for item in kept for c in item["caption"]]
    rows = {}
    for kind, described in items.items():
        values = torch.cat(vectors[kind]).cpu().numpy() if described else np.empty((0, 1), np.float32)
        if (wrong := ~np.isfinite(values).all(1)).any():
            raise ValueError(
                f"The embedding of {described[int(wrong.argmax())][1]!r} ({kind}) is not finite. Compute in another "
                "precision, or look at the weights of the model."
            )
        counts[kind] += len(described)
        # Workers return the samples of a shard in turn.
        order = sorted(range(len(described)), key=lambda number: described[number][0])
        keys = [described[number][1] for number in order]
        captions = [described[number][2] or "" for number in order] if kind == "texts" else None
        places = [described[number][3] for number in order]
        rows[kind] = Rows(keys, captions, values[order] if order else values, places)
    return rows


def _split(inputs: dict[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """Splits inputs into at most ``size`` images or texts: an item may have many captions or views."""
    for first in range(0, len(next(iter(inputs.values()))), size):
        yield {name: values[first : first + size] for name, values in inputs.items()}
