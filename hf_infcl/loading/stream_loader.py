"""Loads batches that know their place in the training, and records the position that it has reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from ..data import ImageTextStream
from ..data.stream_batches import StepSides
from ..options.arguments import InfCLTrainingArguments
from .batch_plan import BatchPlan
from .planned_rows import PlannedRows


class StreamLoader(DataLoader[Any]):
    """The training loader of a stream, of new and old pairs, or of global batches that grow.

    Its length is one epoch, but the training reads it with `lasting` throughout.

    The workers therefore read ahead across the ends of epochs. Trainer starts a new iteration with each epoch and skips
    batches when it resumes, and callbacks may look into the loader. Neither moves the training: each such iteration has
    workers of its own, and begins with the batch that follows the consumed ones.

    Args:
        dataset: the training set. Of a `Replayed` an epoch is that of its new pairs.
        collate: the data collator.
        args: the arguments of the training.
        device: the device to which batches are moved; None leaves them in host memory.
        states: the `state` of every process of the checkpoint to resume from, for data that has one.
        plan: of global batches that grow.

    Raises:
        ValueError: as `hf_infcl.data.stream_batches.StreamBatches`; or an epoch is shorter than a global batch.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[dict[str, Any]]], Any],
        args: InfCLTrainingArguments,
        *,
        device: torch.device | None,
        states: Sequence[Mapping[str, Any]] = (),
        plan: BatchPlan | None = None,
    ) -> None:
        workers = args.dataloader_num_workers
        super().__init__(dataset, batch_size=args.per_device_train_batch_size, num_workers=workers)
        self._length = _micro_batches_of_epoch(dataset, args, plan)
        self._args, self._device = args, device
        self._batches = _batches(dataset, collate, args, states, plan)
        self._lasting: Iterator[Any] | None = None
        self._fetched: list[dict[str, Any]] = []  # the tags of batches that are not consumed yet
        self._seconds = self._made = 0.0  # since the last `progress`: the workers' time, and their pairs

    def __len__(self) -> int:
        """The micro-batches of one process in an epoch, of full windows only."""
        if self._length is None:  # Trainer recognises data without a length by this error
            raise TypeError("A stream without samples_per_epoch has no length.")
        return self._length

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
            pairs = tag.get("pairs", self._args.per_device_train_batch_size)
            self._seconds, self._made = self._seconds + tag["seconds"], self._made + pairs
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

    def state(self) -> dict[str, Any] | None:
        """This process's part of a checkpoint; see `StreamBatches.state`. None if the plan knows the position."""
        return self._batches.state()

    def rows_at(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """The rows of a dataset with a length at (micro-batch, row) after the consumed ones; else empty."""
        return self._batches.rows_at(places) if isinstance(self._batches, PlannedRows) else []

    def progress(self) -> dict[str, float]:
        """This process's consumption since the run began, and the samples per second that its workers can prepare.

        The rate is measured since the last call, from the seconds that the workers spent on each batch.
        """
        workers = max(1, self._args.dataloader_num_workers)
        rate = self._made * workers / self._seconds if self._seconds else 0.0
        self._seconds = self._made = 0.0
        return {**self._batches.counts(), "rate": rate}


def _micro_batches_of_epoch(dataset: Any, args: InfCLTrainingArguments, plan: BatchPlan | None) -> int | None:
    """Those of one process in an epoch, of the first one if they differ; None without an end."""
    samples = dataset.samples_per_epoch if hasattr(dataset, "samples_per_epoch") else len(dataset)
    if samples is None:
        return None
    if plan is not None:
        return max(1, plan.micro_batches_of_epoch(plan.first()[0]))  # Trainer divides by it before it sees the end
    windows = samples // args.global_batch_size
    if windows == 0:
        raise ValueError(
            f"An epoch of {samples} samples is shorter than one global batch of {args.global_batch_size} pairs. Raise "
            "samples_per_epoch or lower the batch."
        )
    return int(windows * args.gradient_accumulation_steps)


def _batches(
    dataset: Any,
    collate: Any,
    args: InfCLTrainingArguments,
    states: Sequence[Mapping[str, Any]],
    plan: BatchPlan | None,
) -> Any:
    """The micro-batches of this process, with the methods of `StreamBatches`."""
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    where = {"rank": args.process_index, "world_size": args.world_size, "num_workers": args.dataloader_num_workers}
    of_samples: dict[str, Any] = {**where, "states": states, "keyed": args.leave_out is not None}
    if plan is None:
        return dataset.batches(size, collate, accumulation_steps=accumulation, **of_samples)
    if not isinstance(dataset, ImageTextStream):
        shuffle = args.train_sampling_strategy == "random"
        return PlannedRows(dataset, plan, collate, shuffle=shuffle, seed=args.seed_of_data, **where)
    accumulation = plan.micro_batches(plan.begin.step)
    planned = {"accumulation_steps": accumulation, "steps_after": plan.steps_after}
    return dataset.batches(size, collate, **planned, **of_samples)
