"""Loads the batches of a stream, or of new and old pairs, and records the position that a training has reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from ..data import ImageTextStream
from ..data.stream_batches import StepSides
from ..options.arguments import InfCLTrainingArguments
from .replay import Replayed


class StreamLoader(DataLoader[Any]):
    """The training loader of a stream. Its length is one epoch, but the training reads it with `lasting` throughout.

    The workers therefore read ahead across the ends of epochs. Trainer starts a new iteration with each epoch and skips
    batches when it resumes, and callbacks may look into the loader. Neither moves the training: each such iteration has
    workers of its own, and begins with the batch that follows the consumed ones.

    Args:
        stream: the training set. Of a `Replayed` an epoch is that of its new pairs.
        collate: the data collator.
        args: the arguments of the training.
        device: the device to which batches are moved; None leaves them in host memory.
        states: the `state` of every process of the checkpoint to resume from.

    Raises:
        ValueError: as `hf_infcl.data.stream_batches.StreamBatches`; or an epoch is shorter than a global batch.
    """

    def __init__(
        self,
        stream: ImageTextStream | Replayed,
        collate: Callable[[list[dict[str, Any]]], Any],
        args: InfCLTrainingArguments,
        *,
        device: torch.device | None,
        states: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        workers = args.dataloader_num_workers
        super().__init__(stream, batch_size=args.per_device_train_batch_size, num_workers=workers)
        self._windows: int | None = None
        if stream.samples_per_epoch is not None:
            self._windows = stream.samples_per_epoch // args.global_batch_size
            if self._windows == 0:
                raise ValueError(
                    f"An epoch of {stream.samples_per_epoch} samples is shorter than one global batch of "
                    f"{args.global_batch_size} pairs. Raise samples_per_epoch or lower the batch."
                )
        self._args, self._device = args, device
        self._batches = stream.batches(
            args.per_device_train_batch_size,
            collate,
            rank=args.process_index,
            world_size=args.world_size,
            num_workers=workers,
            accumulation_steps=args.gradient_accumulation_steps,
            states=states,
        )
        self._lasting: Iterator[Any] | None = None
        self._fetched: list[dict[str, Any]] = []  # the tags of batches that are not consumed yet
        self._seconds = self._made = 0.0  # since the last `progress`: the workers' time, and their batches

    def __len__(self) -> int:
        """The micro-batches of one process in an epoch, of full windows only."""
        if self._windows is None:  # Trainer recognises data without a length by this error
            raise TypeError("A stream without samples_per_epoch has no length.")
        return self._windows * self._args.gradient_accumulation_steps

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches that follow the consumed ones. They do not count as consumed."""
        for batch, _ in self._read():
            yield self._to_device(batch)

    def set_sides(self, sides: StepSides | None, step: int) -> None:
        """Lets the batches that follow the consumed ones, of this step, have images of these sides."""
        self._batches.set_sides(sides, step)

    def lasting(self) -> Iterator[Any]:
        """The iterator of the training, whose batches `consume` records; the same one until `close`.

        If batches of it were not consumed, they come again.
        """
        if self._fetched:
            self.close()
        if self._lasting is None:
            self._lasting = self._fetch()
        return self._lasting

    def _fetch(self) -> Iterator[Any]:
        for batch, tag in self._read():
            self._fetched.append(tag)
            self._seconds, self._made = self._seconds + tag["seconds"], self._made + 1
            yield self._to_device(batch)

    def _read(self) -> DataLoader[Any]:
        args = self._args
        # Not in transformers before 5.15.
        context = getattr(args, "dataloader_multiprocessing_context", None)
        return DataLoader(
            self._batches,
            batch_size=None,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            multiprocessing_context=context if args.dataloader_num_workers else None,
            prefetch_factor=args.dataloader_prefetch_factor,
            # torch draws the workers' seed from it. If dropout used the same one, resumes would change it.
            generator=torch.Generator(),
        )

    def _to_device(self, batch: Any) -> Any:
        if self._device is None:
            return batch
        return send_to_device(batch, self._device, non_blocking=self._args.dataloader_pin_memory)

    def consume(self) -> None:
        """Records, for the next checkpoint, that the batches of `lasting` since the last call were trained on."""
        for tag in self._fetched:
            self._batches.consume(tag)
        self._fetched = []

    def close(self) -> None:
        """Ends the workers. The next batch, if any, comes from new workers and follows the consumed batches."""
        self._lasting, self._fetched = None, []

    def state(self) -> dict[str, Any]:
        """This process's part of a checkpoint; see `StreamBatches.state`."""
        return self._batches.state()

    def progress(self) -> dict[str, float]:
        """This process's consumption since the run began, and the samples per second that its workers can prepare.

        The rate is measured since the last call, from the seconds that the workers spent on each batch.
        """
        workers = max(1, self._args.dataloader_num_workers)
        made = self._made * self._args.per_device_train_batch_size * workers
        rate = made / self._seconds if self._seconds else 0.0
        self._seconds = self._made = 0.0
        return {**self._batches.counts(), "rate": rate}
