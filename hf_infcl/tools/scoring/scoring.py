"""Scores each pair of a training set against the other pairs of a window."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ...data import ImageTextDataset, ImageTextStream
from ...data.collator import DataCollator
from ...data.keyed import NO_KEY, KeyedItem, KeyedRows
from ...loss.pair_scores import pair_scores
from ...processes.collectives import Processes, failures_announced
from . import WINDOW
from .ledger import Ledger, make_ledger
from .sheet import SHOWN, small_jpeg

if TYPE_CHECKING:
    from ...training.trainer import InfCLTrainer

logger = logging.getLogger(__name__)

# [n] of each pair: its key, a caption, the name of a stream's sample and, until they are drawn, a small JPEG.
Columns = dict[str, np.ndarray]


class _Embedded(NamedTuple):
    """Pairs with their embeddings."""

    columns: Columns
    images: Tensor  # [images, D] fp32, of length 1
    texts: Tensor  # [texts, D] fp32, of length 1
    belongs: Tensor  # [texts] int64, the image of each text
    pair_ids: Tensor | None  # [images] int64


def score_pairs(
    trainer: InfCLTrainer, dataset: ImageTextDataset | ImageTextStream, window: int = WINDOW
) -> tuple[Ledger, dict[int, bytes]]:
    """The ledger of a training set, read once, and pictures of its most suspicious pairs by their keys; collective.

    The processes divide the pairs among themselves. Each compares those of a window with each other: so many pairs
    drawn at random from a table, or those that a stream gives one after the other. The last window is larger.

    Args:
        trainer: of the model, which is in evaluation mode. ``per_device_eval_batch_size`` is the number of pairs of a
            forward.
        dataset: the pairs. Of a stream every sample is read once.
        window: the pairs of a window.

    Raises:
        ValueError: there are fewer than two pairs for a process, or a score is not finite.
    """
    processes, context = Processes(), trainer.context
    parts: list[Columns] = []
    lowest: list[tuple[float, int, bytes]] = []
    waiting: list[_Embedded] = []
    alone = [0]  # pairs without others

    def score(several: Sequence[_Embedded]) -> None:
        pairs, without_others = _scored(several)
        alone[0] += without_others
        pictures = zip(pairs["score"].tolist(), pairs["key"].tolist(), pairs.pop("picture"), strict=True)
        lowest[:] = heapq.nsmallest(SHOWN, [*lowest, *pictures])
        parts.append(pairs)

    with failures_announced(), torch.no_grad():
        for inputs, columns in _read(dataset, trainer, processes):
            inputs = context.prepare_inputs(inputs)
            with context.accelerator.autocast():  # of the forwards alone: scores are products in fp32
                embeds = context.encoder.embed(context.encoder.model, inputs)
            images, texts = (F.normalize(rows.float(), dim=-1) for rows in embeds)
            belongs = inputs.get("caption_image", torch.arange(len(images))).to(images.device)
            new = torch.from_numpy(columns["key"] != NO_KEY).to(images.device)  # repeats are not among the others
            kept, ids = (belongs >= 0) & new[belongs], inputs.get("pair_ids")
            columns = {name: values[new.cpu().numpy()] for name, values in columns.items()}
            belongs = (new.cumsum(0) - 1)[belongs[kept]]
            waiting.append(_Embedded(columns, images[new], texts[kept], belongs, None if ids is None else ids[new]))
            if sum(len(one.images) for one in waiting) >= 2 * window:
                whole = -(-window // context.args.per_device_eval_batch_size)
                score(waiting[:whole])
                waiting = waiting[whole:]
        if sum(len(one.images) for one in waiting) < 2:
            raise ValueError("There are fewer than two pairs for each process, so none can be compared.")
        score(waiting)
    every = processes.agree(alone)  # or raises what another process has announced
    pairs = _joined(processes.gather_objects(_joined(parts)))
    if wrong := int((~np.isfinite(pairs["score"])).sum()):
        raise ValueError(
            f"The scores of {wrong:,} of {len(pairs['score']):,} pairs are not finite, because embeddings are not. "
            "Compute in another precision, or look at the weights of the model."
        )
    if without_others := sum(int(count) for (count,) in every):
        said = f"{without_others:,} of {without_others + len(pairs['score']):,} pairs have no score, because all pairs "
        said += "of their window have one pair id. Pass a larger --window, or shuffle the shards."
        if not len(pairs["score"]):
            raise ValueError(said)
        if processes.rank == 0:
            logger.warning(said)
    of_all = itertools.chain(*processes.gather_objects(lowest))
    pictures = {key: picture for _, key, picture in heapq.nsmallest(SHOWN, of_all)}
    caption, name = pairs["caption"].tolist(), pairs["name"].tolist()
    ledger = make_ledger(dataset.key_fingerprint(), pairs["key"], pairs["score"], caption, name if any(name) else ())
    return ledger, pictures


def _read(
    dataset: ImageTextDataset | ImageTextStream, trainer: InfCLTrainer, processes: Processes
) -> Iterator[tuple[dict[str, Tensor], Columns]]:
    """The model's inputs for the pairs of this process, every one once, and their columns."""
    args, collate = trainer.args, partial(_collated, trainer.data_collator)
    rank, count, workers = processes.rank, processes.world_size, args.dataloader_num_workers
    load = partial(DataLoader, num_workers=workers, pin_memory=args.dataloader_pin_memory)
    if not isinstance(dataset, ImageTextStream):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
        rows = order.tensor_split(count)[rank].tolist()
        yield from load(KeyedRows(dataset), args.per_device_eval_batch_size, sampler=rows, collate_fn=collate)
        return
    lanes, seen, without_new = max(1, workers), set[int](), 0
    where = {"rank": rank, "world_size": count, "num_workers": workers, "keyed": True}
    batches = dataset.batches(args.per_device_eval_batch_size, collate, **where)
    for (inputs, columns), _ in load(batches, batch_size=None):
        columns["key"] = np.asarray(columns["key"])  # which the loader makes a tensor
        for place, key in enumerate(columns["key"].tolist()):
            columns["key"][place] = NO_KEY if key in seen else key
            seen.add(key)
        # One batch comes from each lane in turn: when all of them have only known samples, the pass is over.
        without_new = 0 if (columns["key"] != NO_KEY).any() else without_new + 1
        if without_new == lanes:
            return
        if not without_new:
            yield inputs, columns


def _collated(collate: DataCollator, items: list[KeyedItem]) -> tuple[dict[str, Tensor], Columns]:
    """The model's inputs, and the columns of the pairs."""
    plain = [one.item for one in items]
    words = {
        "caption": [item["caption"][0] for item in plain],
        "picture": [small_jpeg(item["image"]) for item in plain],
        "name": [one.name for one in items],
    }
    columns = {name: np.array(values, object) for name, values in words.items()}
    return collate(plain), {"key": np.array([one.key for one in items]), **columns}


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _scored(parts: Sequence[_Embedded]) -> tuple[Columns, int]:
    """The pairs of several batches with their scores, for which they are compared with each other.

    Those without others are left out and counted.
    """
    firsts = itertools.accumulate((len(part.images) for part in parts), initial=0)
    belongs = torch.cat([part.belongs + first for part, first in zip(parts, firsts, strict=False)])
    ids = [part.pair_ids for part in parts if part.pair_ids is not None]
    images, texts = torch.cat([part.images for part in parts]), torch.cat([part.texts for part in parts])
    score = pair_scores(images, texts, belongs, torch.cat(ids) if ids else None, Processes(alone=True))
    columns = _joined([part.columns for part in parts]) | {"score": score.cpu().numpy()}
    alone = (score.isnan() & images.isfinite().all() & texts.isfinite().all()).cpu().numpy()
    return {name: values[~alone] for name, values in columns.items()}, int(alone.sum())
