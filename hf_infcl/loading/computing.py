"""What a model returns for the images and captions of a data set, computed by all processes into a store."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.utils import logging

from ..checkpoints.run_options import options_of_model
from ..data import ContrastiveCollator
from ..data.store import Store, of_caption
from ..processes.collectives import Processes, failures_announced
from ..windows.setup import Context
from .sources import Batch, ItemSource, collated

logger = logging.get_logger(__name__)

Encode = Callable[[dict[str, Tensor]], Tensor]  # inputs of a model, images or texts, on the device, to rows [n, D]


class Writer(Protocol):
    """What is written in parts, as a `Store` is."""

    @property
    def is_finished(self) -> bool: ...

    def lacks(self, part: int) -> bool: ...

    def write(self, part: int, keys: Sequence[str], values: np.ndarray, **columns: Sequence[str]) -> None: ...

    def finish(self) -> None: ...


def compute(
    source: ItemSource,
    context: Context,
    encoders: Mapping[str, Encode],
    writers: Mapping[str, Writer],
    *,
    batch_size: int,
    agree: Callable[[], object],
) -> dict[str, int]:
    """Writes what is missing of the rows that a model returns for a source. Collective.

    The processes divide the parts among themselves. A run after an interruption computes only the missing ones.

    Args:
        context: its collator, a `ContrastiveCollator`, prepares images and texts, and ``prepare_inputs`` moves them.
        encoders, writers: by "images" and "texts", those that are to be computed. Beside the keys and values, a writer
            gets the ``names`` by which people know the rows, and of texts the ``captions``.
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
    load = partial(
        DataLoader,
        collate_fn=partial(collated, context.collator),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
    )
    batches = source.read(missing, batch_size, load)
    for first in range(0, source.parts, processes.world_size):
        agree()
        with failures_announced():
            if (part := first + processes.rank) in missing:
                _compute_part(part, next(batches), context, encoders, writers, batch_size, counts)
                logger.info(f"Part {part} of {source.parts} was computed.")
    agree()  # waits until all are computed
    every = processes.agree([len(missing), *counts.values()])
    computed, *totals = (int(sum(of_ranks)) for of_ranks in zip(*every, strict=True))
    with failures_announced():
        for writer in writers.values() if processes.rank == 0 else ():
            if computed or not writer.is_finished:
                writer.finish()
    processes.agree([])
    return dict(zip(counts, totals, strict=True))


def _compute_part(
    part: int,
    batches: Iterator[Batch],
    context: Context,
    encoders: Mapping[str, Encode],
    writers: Mapping[str, Writer],
    batch_size: int,
    counts: dict[str, int],
) -> None:
    items: dict[str, list[tuple[int, str, str, str]]] = {kind: [] for kind in writers}  # row, key, name and caption
    vectors: dict[str, list[Tensor]] = {kind: [] for kind in writers}
    for kept, bad, images, texts in batches:
        for reason in bad:
            logger.warning(f"Left out: {reason}")
        counts["skipped"] += len(bad)
        for kind, inputs in (("images", images), ("texts", texts)):
            if kind not in writers or inputs is None:
                continue
            for first in range(0, len(next(iter(inputs.values()))), batch_size):  # an item may have many captions
                split = {name: values[first : first + batch_size] for name, values in inputs.items()}
                with torch.no_grad(), context.accelerator.autocast():
                    vectors[kind].append(encoders[kind](context.prepare_inputs(split)).cpu())
            for item in kept:
                captions = item["caption"] if kind == "texts" else [""]
                items[kind] += [(item["row"], item["key"], item["name"], caption) for caption in captions]
    for kind, described in items.items():
        values = torch.cat(vectors[kind]).numpy() if described else np.empty((0, 1), np.float32)
        # Workers return the samples of a shard in turn.
        order = sorted(range(len(described)), key=lambda number: described[number][0])
        keys = [described[number][1] for number in order]
        columns = {"names": [described[number][2] for number in order]}
        if (wrong := ~np.isfinite(values[order]).all(1)).any():
            raise ValueError(
                f"The embedding of {keys[int(wrong.argmax())]!r} ({kind}) is not finite. Compute in another precision, "
                "or look at the weights of the model."
            )
        if kind == "texts":
            columns["captions"] = [described[number][3] for number in order]
            keys = [*map(of_caption, keys, columns["captions"])]
        elif isinstance(writers[kind], Store) and len(set(keys)) < len(keys):
            twice = next(key for key, count in Counter(keys).items() if count > 1)
            raise ValueError(
                f"Several images have the name {twice!r}, by which a training finds their embeddings. Rename these "
                "samples: no two of a shard may have one name."
            )
        writers[kind].write(part, keys, values[order], **columns)
        counts[kind] += len(keys)


def fingerprint(content: str, tower: nn.Module, collator: ContrastiveCollator, dtype: str) -> str:
    """A hash, 32 hexadecimal digits, of all that what a model returns for data of this fingerprint depends on."""
    digest = hashlib.sha256(f"3 {type(tower).__name__} {dtype} {collator.image_backend}\n".encode())
    # The config has what the weights do not show, and the printed modules show what was changed after loading.
    digest.update(f"{json.dumps(options_of_model(tower), sort_keys=True)} {tower}\n".encode())
    digest.update(collator.processor.image_processor.to_json_string().encode())
    digest.update(content.encode())
    for name, value in tower.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]
