"""Scores each pair of a training set against the other pairs of a window."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ...data import ImageTextDataset, ImageTextStream
from ...data.collator import DataCollator
from ...data.keyed import NO_KEY, KeyedItem, KeyedRows
from ...encoders.dual_encoder import DualEncoder
from ...loss.pair_scores import pair_scores
from ...processes.collectives import Processes, failures_announced
from . import WINDOW
from .ledger import Ledger, make_ledger
from .sheet import SHOWN, small_jpeg

if TYPE_CHECKING:
    from ...training.trainer import InfCLTrainer

_ROWS = 1024  # of the cosines that are compared at a time

# [n] of each pair: its key, a caption, checksum and small JPEG of the image, the name of a stream's sample; its scores.
Columns = dict[str, np.ndarray]


def _collated(collate: DataCollator, items: list[KeyedItem]) -> tuple[dict[str, Tensor], Columns]:
    """The model's inputs, and the columns of the pairs."""
    plain = [one.item for one in items]
    words = {
        "caption": [item["caption"][0] for item in plain],
        "image": [zlib.crc32(item["image"].tobytes()) for item in plain],
        "picture": [small_jpeg(item["image"]) for item in plain],
        "name": [one.name for one in items],
    }
    columns = {name: np.array(values, object) for name, values in words.items()}
    return collate(plain), {"key": np.array([one.key for one in items]), **columns}


class _Embedded(NamedTuple):
    """Pairs with their embeddings."""

    columns: Columns
    images: Tensor  # [images, D] fp32, of length 1
    texts: Tensor  # [texts, D] fp32, of length 1
    belongs: Tensor  # [texts] int64, the image of each text
    pair_ids: Tensor | None  # [images] int64


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _window(parts: Sequence[_Embedded]) -> _Embedded:
    """The pairs of several batches, which are compared with each other."""
    firsts = itertools.accumulate((len(part.images) for part in parts), initial=0)
    ids = [part.pair_ids for part in parts if part.pair_ids is not None]
    return _Embedded(
        _joined([part.columns for part in parts]),
        torch.cat([part.images for part in parts]),
        torch.cat([part.texts for part in parts]),
        torch.cat([part.belongs + first for part, first in zip(parts, firsts, strict=False)]),
        torch.cat(ids) if ids else None,
    )


def score_pairs(
    trainer: InfCLTrainer,
    dataset: ImageTextDataset | ImageTextStream,
    window: int = WINDOW,
    averages: tuple[Tensor, Tensor] | None = None,
) -> tuple[Ledger, dict[int, bytes]]:
    """The ledger of a training set, read once, and pictures of its most suspicious pairs by their keys; collective.

    The processes divide the pairs among themselves. Each compares those of a window with each other: so many pairs
    drawn at random from a table, or those that a stream gives one after the other. The last window is larger.

    Args:
        trainer: of the model, which is in evaluation mode. ``per_device_eval_batch_size`` is the number of pairs of a
            forward.
        dataset: the pairs. Of a stream every sample is read once.
        window: the pairs of a window.
        averages: the keys [n] int64 of pairs in ascending order, and scores [n] to take instead, such as those of a
            training; only these pairs are then in the ledger.

    Raises:
        ValueError: there are fewer than two pairs for a process, or a score is not finite.
    """
    processes, setup = Processes(), trainer.setup
    batch_size, num_workers = setup.args.per_device_eval_batch_size, setup.args.dataloader_num_workers
    collate = partial(_collated, setup.collator)
    shown = None if averages is None else averages[0][averages[1].argsort(stable=True)[:SHOWN]].tolist()
    load = partial(DataLoader, num_workers=num_workers, pin_memory=setup.args.dataloader_pin_memory)
    parts: list[Columns] = []
    waiting: list[_Embedded] = []
    with failures_announced(), torch.no_grad():
        for inputs, columns in _read(dataset, collate, processes, batch_size, num_workers, load):
            with setup.accelerator.autocast():  # of the forwards alone: scores are products in fp32
                embedded = _embedded(setup.prepare_inputs(inputs), columns, setup.encoder)
            waiting.append(embedded)
            if sum(len(one.images) for one in waiting) >= 2 * window:
                whole = -(-window // batch_size)
                parts.append(_scored(_window(waiting[:whole]), shown))
                waiting = waiting[whole:]
        if sum(len(one.images) for one in waiting) < 2:
            raise ValueError("There are fewer than two pairs for each process, so none can be compared.")
        parts.append(_scored(_window(waiting), shown))
    processes.agree([])  # or raises what another process has announced
    pairs = _joined(processes.gather_objects(_joined(parts)))
    pictures = {int(key): picture for key, picture in zip(pairs["key"], pairs.pop("picture"), strict=True) if picture}
    if averages is not None:
        known, scores = (part.numpy() for part in averages)
        kept = np.isin(pairs["key"], known)
        pairs = {name: values[kept] for name, values in pairs.items()}
        pairs["score"] = scores[np.searchsorted(known, pairs["key"])]
    if wrong := int((~np.isfinite(pairs["score"])).sum()):
        raise ValueError(
            f"The scores of {wrong:,} of {len(pairs['score']):,} pairs are not finite, because embeddings are not. "
            "Compute in another precision, or look at the weights of the model."
        )
    caption, name = pairs["caption"].tolist(), pairs["name"].tolist()
    prefers = pairs["text_key"], pairs["image_key"]
    content = dataset.key_fingerprint()
    ledger = make_ledger(content, pairs["key"], pairs["score"], prefers, caption, name if any(name) else None)
    return ledger, pictures


def _read(
    dataset: ImageTextDataset | ImageTextStream,
    collate: Callable[[list[KeyedItem]], tuple[dict[str, Tensor], Columns]],
    processes: Processes,
    batch_size: int,
    num_workers: int,
    load: Callable[..., Iterable[Any]],
) -> Iterator[tuple[dict[str, Tensor], Columns]]:
    """The pairs of this process, every one once."""
    rank, count = processes.rank, processes.world_size
    if not isinstance(dataset, ImageTextStream):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
        rows = order.tensor_split(count)[rank].tolist()
        yield from load(KeyedRows(dataset), batch_size, sampler=rows, collate_fn=collate)
        return
    lanes, seen, without_new = max(1, num_workers), set[int](), 0
    where = {"rank": rank, "world_size": count, "num_workers": num_workers, "keyed": True}
    for (inputs, columns), _ in load(dataset.batches(batch_size, collate, **where), batch_size=None):
        new = [key not in seen for key in columns["key"].tolist()]
        seen.update(columns["key"].tolist())
        # One batch comes from each lane in turn: when all of them have only known samples, the pass is over.
        without_new = 0 if any(new) else without_new + 1
        if without_new == lanes:
            return
        if any(new):
            yield inputs, {**columns, "key": np.where(new, columns["key"], NO_KEY)}


def _embedded(inputs: dict[str, Tensor], columns: Columns, encoder: DualEncoder) -> _Embedded:
    images, texts = (F.normalize(rows.float(), dim=-1) for rows in encoder.embed(encoder.model, inputs))
    belongs = inputs.get("caption_image", torch.arange(len(images))).to(images.device)
    return _Embedded(columns, images, texts[belongs >= 0], belongs[belongs >= 0], inputs.get("pair_ids"))


def _scored(window: _Embedded, shown: Collection[int] | None) -> Columns:
    """The pairs of a window, with the pictures of some: those that are shown, or else those with the lowest scores."""
    columns, images, texts, belongs, pair_ids = window
    score = pair_scores(images, texts, belongs, pair_ids, Processes(alone=True))
    # ---- What each image and each text prefers, a part of the rows at a time ----
    of_images = belongs[torch.cat([(rows @ texts.T).argmax(1) for rows in images.split(_ROWS)])]
    of_texts = torch.cat([(rows @ images.T).argmax(1) for rows in texts.split(_ROWS)])
    first = torch.full_like(of_images, len(texts)).scatter_reduce(
        0, belongs, torch.arange(len(texts), device=images.device), "amin"
    )
    # Pairs that share one of these are not told apart: the key, a caption, an image or an id.
    identities = [columns["key"], columns["caption"], columns.pop("image")]
    identities += [] if pair_ids is None else [pair_ids.cpu().numpy()]

    def keys_of(preferred: Tensor) -> np.ndarray:
        """The keys of these pairs; a pair that prefers one with its own image, caption or id prefers itself."""
        places = preferred.cpu().numpy()
        is_copy = np.any([values[places] == values for values in identities], 0)
        return np.where(is_copy, columns["key"], columns["key"][places])

    # Each pair has the preferences of its image and of the first of its texts.
    every = columns | {"text_key": keys_of(of_images), "image_key": keys_of(of_texts[first])}
    every["score"] = score.cpu().numpy()
    pairs = {name: values[every["key"] != NO_KEY] for name, values in every.items()}
    wanted = pairs["key"][pairs["score"].argsort()[:SHOWN]] if shown is None else list(shown)
    pairs["picture"][~np.isin(pairs["key"], wanted)] = b""
    return pairs
