"""What makes up the windows of a training: full batches of distinct rows, in a form that the trainer can use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from torch import Tensor
from torch.utils.data import Sampler


class WindowSampler(Sampler[int]):
    """The rows of an epoch in the order of its global batches: full ones only, shuffled anew each epoch.

    Which rows make up a global batch depends on seed, epoch and its size alone, not on how it is split over processes
    and accumulation steps. With shuffling the rows left over differ from epoch to epoch.

    Args:
        dataset: sized; its ``set_epoch``, if any, is called along.
        global_batch_size: rows of one optimizer step over all processes.
        shuffle: otherwise rows come in the dataset's order.
        seed: of the shuffling.

    Raises:
        ValueError: the dataset has fewer rows than one global batch.
    """

    def __init__(self, dataset: Any, global_batch_size: int, *, shuffle: bool, seed: int) -> None:
        if len(dataset) < global_batch_size:
            raise ValueError(
                f"The training set has {len(dataset)} pairs, fewer than one global batch of {global_batch_size} "
                "(per_device_train_batch_size × gradient_accumulation_steps × processes). Lower one of the three."
            )
        self._dataset, self._shuffle, self._seed, self._epoch = dataset, shuffle, seed, 0
        self._length = len(dataset) // global_batch_size * global_batch_size

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        if not self._shuffle:
            return iter(range(self._length))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return iter(torch.randperm(len(self._dataset), generator=generator)[: self._length].tolist())


def drop_rest_of_stream(dataloader: Any) -> None:
    """Only full batches of a stream: a short one would end the pass, and accelerate fills up with rows of the first."""
    vars(dataloader.base_dataloader)["drop_last"] = True  # each worker's last batch may be short; not to be set by name
    if isinstance(dataloader, DataLoaderDispatcher):
        dataloader._drop_last = True
    if isinstance(dataloader.dataset, IterableDatasetShard):
        dataloader.dataset.drop_last = True


def check_batch(batch: Any) -> None:
    """Raises a ValueError for what no data collator should give in training."""
    if not isinstance(batch, Mapping) or not {"pixel_values", "input_ids"} <= batch.keys():
        got = f"keys {list(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ValueError(f"The data collator must give a dict with pixel_values and input_ids at least, got {got}.")
    for name in ("pixel_values", "input_ids", "pair_ids", "skipped"):
        if name in batch and not isinstance(batch[name], Tensor):
            raise ValueError(
                f"The data collator must give {name} as a tensor, or leave pair_ids and skipped out, got a "
                f"{type(batch[name]).__name__}."
            )
    if "caption_image" in batch:
        raise ValueError(
            "A training batch has images with several captions or none; one is drawn per epoch by "
            "ImageTextDataset(dataset) with all_captions=False. Wrap the training rows in that."
        )
