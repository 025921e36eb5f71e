"""Scores each pair of a training set against the other pairs of a window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
from .ledger import Ledger, make_ledger
from .sheet import SHOWN, small_jpeg

_ROWS = 1024  # of the cosines that are compared at a time


class _ReadPairs(NamedTuple):
    """Pairs as they are read."""

    inputs: dict[str, Tensor]  # of the collator
    keys: list[int]
    captions: list[str]  # one of each pair
    pictures: list[bytes]  # small JPEGs
    names: list[str]  # of the samples of a stream


class _Collated:
    """Collates keyed items."""

    def __init__(self, collate: DataCollator) -> None:
        self._collate = collate

    def __call__(self, items: list[KeyedItem]) -> _ReadPairs:
        plain = [one.item for one in items]
        pictures = [small_jpeg(item["image"]) for item in plain]
        captions = [item["caption"][0] for item in plain]
        return _ReadPairs(
            self._collate(plain), [one.key for one in items], captions, pictures, [one.name for one in items]
        )


@dataclass
class _Embedded:
    """The same with their embeddings.

    Args:
        pairs: without the inputs.
        images, texts: [images, D] and [texts, D] fp32, of length 1.
        belongs: [texts] int64, the image of each text.
        pair_ids: [images] int64, or None.
    """

    pairs: _ReadPairs
    images: Tensor
    texts: Tensor
    belongs: Tensor
    pair_ids: Tensor | None

    def __len__(self) -> int:
        return len(self.images)

    @classmethod
    def joined(cls, parts: Sequence[_Embedded]) -> _Embedded:
        firsts = itertools.accumulate(map(len, parts), initial=0)
        ids = [part.pair_ids for part in parts if part.pair_ids is not None]
        return cls(
            _ReadPairs(
                {},
                [key for part in parts for key in part.pairs.keys],
                [caption for part in parts for caption in part.pairs.captions],
                [picture for part in parts for picture in part.pairs.pictures],
                [name for part in parts for name in part.pairs.names],
            ),
            torch.cat([part.images for part in parts]),
            torch.cat([part.texts for part in parts]),
            torch.cat([part.belongs + first for part, first in zip(parts, firsts, strict=False)]),
            torch.cat(ids) if ids else None,
        )


@dataclass
class _Scored:
    """Pairs with their scores: arrays and words of the `Ledger`, and pictures of some pairs by their keys."""

    key: np.ndarray
    score: np.ndarray
    text_key: np.ndarray
    image_key: np.ndarray
    caption: list[str]
    name: list[str]
    pictures: dict[int, bytes]

    @classmethod
    def joined(cls, parts: Sequence[_Scored]) -> _Scored:
        return cls(
            np.concatenate([part.key for part in parts]),
            np.concatenate([part.score for part in parts]),
            np.concatenate([part.text_key for part in parts]),
            np.concatenate([part.image_key for part in parts]),
            [caption for part in parts for caption in part.caption],
            [name for part in parts for name in part.name],
            {key: picture for part in parts for key, picture in part.pictures.items()},
        )

    def only(self, kept: np.ndarray) -> _Scored:
        """Some of the pairs, [n] bool, with all pictures."""
        arrays = self.key[kept], self.score[kept], self.text_key[kept], self.image_key[kept]
        caption, name = (list(itertools.compress(words, kept)) for words in (self.caption, self.name))
        return _Scored(*arrays, caption, name, self.pictures)


def score_pairs(
    dataset: ImageTextDataset | ImageTextStream,
    encoder: DualEncoder,
    collate: DataCollator,
    *,
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    autocast: Callable[[], AbstractContextManager[object]],
    window: int = 4096,
    batch_size: int = 64,
    num_workers: int = 0,
    pin_memory: bool = False,
    averages: tuple[Tensor, Tensor] | None = None,
) -> tuple[Ledger, dict[int, bytes]]:
    """The ledger of a training set, read once, and pictures of its most suspicious pairs by their keys; collective.

    The processes divide the pairs among themselves. Each compares those of a window with each other: so many pairs
    drawn at random from a table, or those that a stream gives one after the other. The last window is larger.

    Args:
        dataset: the pairs. Of a stream every sample is read once.
        encoder: the model, in evaluation mode.
        collate: the collator.
        prepare: moves a batch to the device and normalises its images.
        autocast: the context of the forwards.
        window: the pairs of a window.
        batch_size: the pairs of a forward.
        num_workers, pin_memory: of the data loader.
        averages: the keys [n] int64 of pairs in ascending order, and scores [n] to take instead, such as those of a
            training; only these pairs are then in the ledger.

    Raises:
        ValueError: there are fewer than two pairs for a process.
    """
    processes = Processes()
    shown = None if averages is None else averages[0][averages[1].argsort(stable=True)[:SHOWN]].tolist()
    load = partial(DataLoader, num_workers=num_workers, pin_memory=pin_memory)
    parts: list[_Scored] = []
    waiting: list[_Embedded] = []
    with failures_announced(), torch.no_grad(), autocast():
        for pairs in _read(dataset, _Collated(collate), processes, batch_size, num_workers, load):
            waiting.append(_embedded(pairs, encoder, prepare))
            if sum(map(len, waiting)) >= 2 * window:
                whole = -(-window // batch_size)
                parts.append(_scored(_Embedded.joined(waiting[:whole]), shown))
                waiting = waiting[whole:]
        if sum(map(len, waiting)) < 2:
            raise ValueError("There are fewer than two pairs for each process, so none can be compared.")
        parts.append(_scored(_Embedded.joined(waiting), shown))
    found = _Scored.joined(processes.gather_objects(_Scored.joined(parts)))
    if averages is not None:
        known, scores = (part.numpy() for part in averages)
        found = found.only(np.isin(found.key, known))
        found.score = scores[np.searchsorted(known, found.key)]
    content = dataset.content_fingerprint()
    name = None if not any(found.name) else found.name
    ledger = make_ledger(content, found.key, found.score, (found.text_key, found.image_key), found.caption, name)
    return ledger, found.pictures


def _read(
    dataset: ImageTextDataset | ImageTextStream,
    collate: _Collated,
    processes: Processes,
    batch_size: int,
    num_workers: int,
    load: Callable[..., Iterable[Any]],
) -> Iterator[_ReadPairs]:
    """The pairs of this process, every one once."""
    rank, count = processes.rank, processes.world_size
    if not isinstance(dataset, ImageTextStream):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
        rows = order.tensor_split(count)[rank].tolist()
        yield from load(KeyedRows(dataset), batch_size, sampler=rows, collate_fn=collate)
        return
    lanes, seen, without_new = max(1, num_workers), set[int](), 0
    where = {"rank": rank, "world_size": count, "num_workers": num_workers, "keyed": True}
    for pairs, _ in load(dataset.batches(batch_size, collate, **where), batch_size=None):
        new = [key not in seen for key in pairs.keys]
        seen.update(pairs.keys)
        # One batch comes from each lane in turn: when all of them have only known samples, the pass is over.
        without_new = 0 if any(new) else without_new + 1
        if without_new == lanes:
            return
        if any(new):
            yield pairs._replace(keys=[key if first else NO_KEY for key, first in zip(pairs.keys, new, strict=True)])


def _embedded(
    pairs: _ReadPairs, encoder: DualEncoder, prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> _Embedded:
    inputs = prepare(pairs.inputs)
    images, texts = (F.normalize(rows.float(), dim=-1) for rows in encoder.embed(encoder.model, inputs))
    belongs = inputs.get("caption_image", torch.arange(len(images))).to(images.device)
    return _Embedded(
        pairs._replace(inputs={}), images, texts[belongs >= 0], belongs[belongs >= 0], inputs.get("pair_ids")
    )


def _scored(window: _Embedded, shown: Collection[int] | None) -> _Scored:
    """The pairs of a window, and the pictures of some of them: those that are shown, or with the lowest scores."""
    images, texts, belongs = window.images, window.texts, window.belongs
    score = pair_scores(images, texts, belongs, window.pair_ids, Processes(alone=True))
    key = torch.tensor(window.pairs.keys, device=images.device)
    # ---- What each image and each text prefers, a part of the rows at a time ----
    text_key = key[belongs[torch.cat([(rows @ texts.T).argmax(1) for rows in images.split(_ROWS)])]]
    of_texts = torch.cat([(rows @ images.T).argmax(1) for rows in texts.split(_ROWS)])
    first = torch.full_like(key, len(texts)).scatter_reduce(
        0, belongs, torch.arange(len(texts), device=key.device), "amin"
    )
    image_key = key[of_texts[first]]  # of the first text of each pair
    every = _Scored(
        *(key.cpu().numpy(), score.cpu().numpy(), text_key.cpu().numpy(), image_key.cpu().numpy()),
        window.pairs.captions,
        window.pairs.names,
        dict(zip(window.pairs.keys, window.pairs.pictures, strict=True)),
    )
    found = every.only(every.key != NO_KEY)
    wanted = found.key[found.score.argsort()[:SHOWN]].tolist() if shown is None else set(shown) & {*found.key.tolist()}
    found.pictures = {one: every.pictures[one] for one in wanted}
    return found
