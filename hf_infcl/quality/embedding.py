"""Embeds whole data sets by all processes into a store: for `infcl embed`, the teacher of a training, and its cache.

The cache (``cache_features``) has what a frozen model returns, computed once and read at every epoch: the outputs of a
frozen image tower, read instead of the images (LiT, arXiv 2111.07991), and the embeddings of the start of a training,
which ``keep_features`` compares with. The name of the folder is the `fingerprint` of the weights and config of what is
frozen, the preparation of images and captions, the rows and their order, and the dtype of the computation. If any of
these changes, so does the folder.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers.utils import logging

from ..data import ContrastiveCollator, ImageTextDataset, transparency
from ..data.loader import worker_options
from ..data.replay import Replayed
from ..data.sources import Item, ItemSource, TableSource, collated
from ..data.store import PartFiles, Store, Writer, of_caption
from ..files.text import was_and_is
from ..files.whole import written_whole
from ..models.adapters import weight_fingerprint
from ..models.dual_encoder import DualEncoder
from ..options.record import as_json, options_of_model
from ..processes.collectives import Processes, failures_announced
from ..processes.lock import check_writable
from ..processes.signals import Interruptions
from ..step.grad_cache import random_state_kept
from ..step.terms import Context

logger = logging.get_logger(__name__)

Encode = Callable[[dict[str, Tensor]], Tensor]  # inputs of a model, images or texts, on the device, to rows [n, D]


def compute(
    source: ItemSource,
    context: Context,
    encoders: Mapping[str, Encode],
    writers: Mapping[str, Writer],
    batch_size: int,
    agree: Callable[[], object],
) -> dict[str, int]:
    """Writes what is missing of the rows that a model returns for a source. Collective.

    The processes divide the parts among themselves. A run after an interruption computes only the missing ones.

    Args:
        context: its collator, a `ContrastiveCollator`, prepares images and texts, and ``prepare_inputs`` moves them.
        encoders, writers: by the ``kinds`` of the source. Beside the keys and values, the files have the ``names`` by
            which people know the rows, and of texts the ``captions``.
        batch_size: the most images, or texts, of a forward.
        agree: called before each part of a process and at the end; collective. It raises an error on all processes if
            one has failed, and may end the program.

    Returns:
        The numbers of rows that were computed, by "images" and "texts", and of pairs that were left out as "skipped".

    Raises:
        ValueError: a pair is bad, or a row is not finite. The other processes raise an OtherRankFailedError.
    """
    processes, args = Processes(), context.args
    counts = dict.fromkeys(("images", "texts", "skipped"), 0)
    mine = range(processes.rank, source.parts, processes.world_size)
    missing = [part for part in mine if any(writer.lacks(part) for writer in writers.values())]
    load = partial(DataLoader, collate_fn=partial(collated, context.collator), **worker_options(args))
    batches_of_parts = source.read(missing, batch_size, load)

    def compute_part(part: int) -> None:
        items: list[Item] = []
        vectors: dict[str, list[Tensor]] = {kind: [] for kind in writers}
        for good, bad, images, texts in next(batches_of_parts):
            items += good
            for reason in bad:
                logger.warning(f"Left out: {reason}")
            counts["skipped"] += len(bad)
            for kind, batch in (("images", images or {}), ("texts", texts or {})):
                splits = [values.split(batch_size) for values in batch.values()]  # an item may have many captions
                for split in zip(*splits, strict=True):
                    with torch.no_grad(), context.accelerator.autocast():
                        rows = encoders[kind](context.prepare_inputs(dict(zip(batch, split, strict=True))))
                    vectors[kind].append(rows.cpu())
        for kind, writer in writers.items():
            counts[kind] += _write_part(writer, part, kind, items, vectors[kind])

    for first in range(0, source.parts, processes.world_size):
        agree()
        with failures_announced():
            if (part := first + processes.rank) in missing:
                compute_part(part)
                logger.info(f"Part {part} of {source.parts} was computed.")
    agree()  # waits until all are computed
    every = processes.agree([len(missing), *counts.values()])
    computed, *totals = (int(sum(of_ranks)) for of_ranks in zip(*every, strict=True))
    with failures_announced():
        for writer in writers.values() if processes.rank == 0 else ():
            if isinstance(writer, Store) and (computed or not writer.is_finished):
                writer.finish()
    processes.agree([])
    return dict(zip(counts, totals, strict=True))


def _write_part(writer: Writer, part: int, kind: str, items: Sequence[Item], vectors: list[Tensor]) -> int:
    """Writes the rows of a part, those of some items, and returns their number."""
    rows = [(item, caption) for item in items for caption in (item["caption"] if kind == "texts" else [""])]
    values = torch.cat(vectors).numpy() if rows else np.empty((0, 1), np.float32)
    order = np.argsort([item["row"] for item, _ in rows], kind="stable")  # workers return a shard's samples in turn
    rows, values = [rows[place] for place in order], values[order]
    keys = [item["key"] for item, _ in rows]
    columns = {"names": [item["name"] for item, _ in rows]}
    if (wrong := ~np.isfinite(values).all(1)).any():
        place = f"The embedding of {keys[int(wrong.argmax())]!r} ({kind})"
        raise ValueError(f"{place} is not finite. Compute in another precision, or look at the weights of the model.")
    if kind == "texts":
        columns["captions"] = [caption for _, caption in rows]
        keys = [*map(of_caption, keys, columns["captions"])]
    elif isinstance(writer, Store) and len(set(keys)) < len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise ValueError(f"Several images have the name {twice!r}, by which a training finds them. Rename them.")
    writer.write(part, keys, values, **columns)
    return len(values)


def fingerprint(source: ItemSource, tower: nn.Module, context: Context, dims: int | None = None) -> str:
    """A hash, 32 hexadecimal digits, of all on which it depends what a model returns for the images and captions."""
    collator, dtype = context.collator, context.accelerator.mixed_precision
    content = source.fingerprint() + (collator.text_fingerprint() if "texts" in source.kinds else "")
    content += "" if dims is None else f" {dims} dimensions"
    digest = hashlib.sha256(f"3 {type(tower).__name__} {dtype} {collator.image_backend} {transparency()}\n".encode())
    # The config has what the weights do not show, and the printed modules show what was changed after loading.
    digest.update(f"{json.dumps(options_of_model(tower), sort_keys=True)} {tower}\n".encode())
    digest.update(collator.processor.image_processor.to_json_string().encode())
    digest.update(content.encode())
    for name, value in tower.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


RECORD = "embeddings.json"
_RECORDED = {"data", "fingerprint", "kinds", "model", "parts", "weights"}  # what it has at least
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
    if half and format != "npy":
        raise ValueError(f"half_precision is for the format npy, got {format}. Leave it out, or choose npy.")
    with failures_announced():
        known = described(source, context) if record is None else record
        if Processes().rank == 0:
            begin(Path(folder), {**known, "format": format, "half": half, "licence": licence})
    opened: Callable[..., Writer] = Store if format == "npy" else partial(PartFiles, format=format)
    writers = {kind: opened(Path(folder), kind, source.parts) for kind in source.kinds}
    encoders, batch_size = normalised(context.encoder, half), context.args.per_device_eval_batch_size
    return compute(source, context, encoders, writers, batch_size, partial(Processes().agree, []))


def normalised(encoder: DualEncoder, half: bool = False) -> dict[str, Encode]:
    """The functions that return embeddings in fp32 or fp16, of length 1: those in bf16 are up to 0.3% off."""

    def embeddings(encode: Encode, inputs: dict[str, Tensor]) -> Tensor:
        return F.normalize(encode(inputs).float(), dim=-1).to(torch.float16 if half else torch.float32)

    return {"images": partial(embeddings, encoder.encode_images), "texts": partial(embeddings, encoder.encode_texts)}


def described(source: ItemSource, context: Context) -> dict[str, Any]:
    """What the record says of model and data, besides the fingerprint of all that decides."""
    encoder = context.encoder
    config = getattr(encoder.base, "config", None)
    return {
        "fingerprint": fingerprint(source, encoder.model, context, encoder.dims),
        "dtype": context.accelerator.mixed_precision,
        "dims": encoder.dims,
        "kinds": list(source.kinds),
        "parts": source.parts,
        "model": getattr(config, "_name_or_path", "") or type(encoder.base).__name__,
        "weights": weight_fingerprint(encoder.model),
        "revision": getattr(config, "_commit_hash", None),
        "preprocessing": as_json(context.collator.options),
        "data": source.described(),
    }


def begin(folder: Path, record: Mapping[str, object]) -> None:
    """Writes the record of what is embedded; raises a ValueError if the folder has another one, or a damaged one."""
    if (before := read_record(folder)) is None:
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(folder / RECORD) as partial_path:
            partial_path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return
    every = dict.fromkeys(_flat(before) | _flat(record))
    old, new = every | _flat(before), every | _flat(record)
    if any(old[name] != new[name] for name in every if name.partition(" ")[0] in _DECISIVE):
        # A fingerprint says nothing beside what differs.
        shown = was_and_is(old, new | {"fingerprint": old["fingerprint"]}) or was_and_is(old, new)
        raise ValueError(f"{folder} holds other embeddings ({shown}). Choose another --output_dir, or delete this one.")


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of the embeddings in a folder; None if there is none. A ValueError says that it is damaged."""
    path = folder / RECORD
    try:
        record = dict(json.loads(path.read_text(encoding="utf-8")))
        if lacking := sorted(_RECORDED - record.keys()):
            raise ValueError(f"it lacks {', '.join(lacking)}")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Delete {folder}, or embed into another folder.") from error
    return record


def _flat(record: Mapping[str, object]) -> dict[str, object]:
    """A record without mappings: what is in one has the name of the mapping before its own."""
    flat: dict[str, object] = {}
    for name, value in record.items():
        flat |= {f"{name} {part}": one for part, one in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


# ---- What is frozen in a training ----


class CachedItems(Dataset[dict[str, Any]]):
    """The items of an `ImageTextDataset` with what a frozen model has returned for them.

    Args:
        features: those of a frozen tower. An item then has ``image_features`` [H] fp32 in place of ``image``, which is
            not read.
        start: the embeddings of the start of a training, by "images" and "texts". An item then also has ``at_start``
            [1 + captions, D] fp32, of its image and of its captions.
    """

    def __init__(self, pairs: ImageTextDataset, features: Store | None, start: Mapping[str, Store] | None) -> None:
        self.dataset, self._features, self._start = pairs, features, start

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        key = str(self.dataset.number(row))
        if self._features is None:
            item = self.dataset[row]
        else:
            item = {"image_features": _read(self._features, [key])[0]} | self.dataset.without_image(row)
        if self._start is not None:
            captions = [of_caption(key, caption) for caption in item["caption"]]
            item["at_start"] = torch.cat([_read(self._start["images"], [key]), _read(self._start["texts"], captions)])
        return item


def _read(store: Store, keys: Sequence[str]) -> Tensor:
    values, known = store.find(keys)
    if not known.all():
        raise ValueError(f"{store.folder} lacks the features of {keys[int((~known).argmax())]!r}. Delete that folder.")
    return torch.from_numpy(values)


def with_cached_features(context: Context, interruptions: Interruptions) -> Any:
    """The training set with what ``args.cache_features`` has, if it is set, and computes what it lacks; collective.

    These are the outputs of a frozen image tower instead of the images, and with ``keep_features`` the embeddings of
    the start. Any number of datasets and models share the folder, which all processes can read.

    Raises:
        ValueError: the features of the images are not the same at every step, or cannot be used; the folder is not
            writable.
    """
    pairs, args = context.data, context.args
    if pairs is None or args.cache_features is None:
        return pairs
    if isinstance(pairs, Replayed):
        new, old = (with_cached_features(replace(context, data=part), interruptions) for part in pairs.datasets)
        return Replayed(new, old, args)
    interruptions.phases.enter("computing features")
    tower: Any = context.encoder.frozen_towers().get("image")
    start = context.start if args.keep_features else None
    check_cacheable(context, tower, keeps=start is not None)

    def encoded(encode: Encode, inputs: dict[str, Tensor]) -> Tensor:
        interruptions.phases.note_progress()
        return encode(inputs).float()

    def stores(model: nn.Module, encoders: Mapping[str, Encode]) -> dict[str, Store]:
        source = TableSource(pairs.table, pairs, pairs.caption_column if "texts" in encoders else None)
        place = Path(str(args.cache_features), fingerprint(source, model, context))
        with failures_announced():
            check_writable(place, "cache_features")
        each = {kind: partial(encoded, encode) for kind, encode in encoders.items()}
        computed = {kind: Store(place, kind, source.parts) for kind in encoders}
        compute(source, context, each, computed, args.per_device_train_batch_size, interruptions.agree)
        return computed

    features, of_start = None, None
    with random_state_kept(args.device):  # the training is the same if the features are there already
        if tower is not None:
            features = stores(tower.eval(), {"images": context.encoder.image_features})["images"]
        if start is not None:
            assert start.encoder is not None
            of_start = stores(start.encoder.model, normalised(start.encoder))
    return CachedItems(pairs, features, of_start)


def check_cacheable(context: Context, tower: nn.Module | None, *, keeps: bool) -> None:
    """Raises a ValueError if the features of the images are not the same at every step, or cannot be used."""
    pairs, collator, reason = context.data, context.collator, ""
    if tower is None and not keeps:
        reason = 'the image tower trains. Freeze it with freeze="image", or keep the start\'s with keep_features'
    elif not isinstance(pairs, ImageTextDataset):
        reason = f"the training set is a {type(pairs).__name__}. Use an ImageTextDataset"
    elif pairs.augmentation != "none" or pairs.on_bad_sample == "skip":
        reason = "images may differ from epoch to epoch. Use augmentation='none' and on_bad_sample='raise'"
    elif not isinstance(collator, ContrastiveCollator):
        reason = f"the data collator is a {type(collator).__name__}. Pass processing_class, or a ContrastiveCollator"
    elif context.accelerator.is_fsdp2:
        reason = "FSDP is on. Use plain processes, which hold the whole tower"
    elif keeps and pairs.negative_caption_column:
        reason = "keep_features needs the embeddings of negative captions at every step. Leave one of the three out"
    elif context.args.torch_compile and tower is not None:
        reason = "torch_compile is on, which would compile the model again without the tower. Leave it off"
    if reason:
        raise ValueError(f"cache_features computes what is frozen once, but {reason}.")
