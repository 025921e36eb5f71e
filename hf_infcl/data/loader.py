"""Loads the micro-batches of a training, and records which global batch follows the trained ones.

It checks the batches that a data collator returns, and measures how long a process waits for them."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader

from ..evaluation.tasks import group_by_image
from ..models.dual_encoder import IMAGE_FEATURES, images_of
from ..options.arguments import InfCLTrainingArguments
from ..options.record import RunRecord
from ..processes.signals import heed_parent_alone
from .collator import DataCollator
from .replay import epochs_of, make_micro_batches
from .streams import Share

# After WAIT_WINDOWS windows, a warning is logged if the share of the whole training exceeds WAIT_SHARE, and one if a
# process is behind the median one by SLOW_SHARE of a step.
WAIT_SHARE, WAIT_WINDOWS, SLOW_SHARE = 0.1, 20, 0.2


class DataWait:
    """Measures how long a process trains, and how much of that time it waits for data.

    The first window does not count, because the workers start in it. Evaluations and checkpoints do not count either:
    the clock stands still while it is `stopped`.
    """

    def __init__(self) -> None:
        self.windows = -1
        self._trained = self._waited = 0.0
        self._logged = 0.0, 0.0, 0
        self._started = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The context of what follows each window, in which the clock stands still."""
        self.windows += 1
        if self.windows == 0:
            self._trained = self._waited = 0.0
        else:
            self._trained += time.perf_counter() - self._started
        yield
        self._started = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def share(self) -> float:
        """The share of the time since the training began."""
        return self._waited / self._trained if self._trained else 0.0

    def since_last(self) -> tuple[float, float]:
        """The mean seconds of the windows since the last call of this method, and of its waits for data."""
        trained, waited, windows = self._trained - self._logged[0], self._waited - self._logged[1], max(self.windows, 0)
        count, self._logged = windows - self._logged[2], (self._trained, self._waited, windows)
        return (trained / count, waited / count) if count else (0.0, 0.0)


def check_window(window: Sequence[Mapping[str, Tensor]], equal_ids: str) -> None:
    """Raises a ValueError if the batches of a window cannot be trained on together; see `check_batch`."""
    for batch in window:
        check_batch(batch, equal_ids)
    with_ids = sum("pair_ids" in batch for batch in window)
    if 0 < with_ids < len(window):
        raise ValueError(
            f"pair_ids are in {with_ids} of the {len(window)} micro-batches of a global batch, and not in the others. "
            "The data collator must give them for all or for none."
        )


def check_batch(batch: object, equal_ids: str) -> None:
    """Raises a ValueError if a data collator returns a batch that cannot be trained on.

    Args:
        equal_ids: ``"exclude"``, with which every image needs exactly one caption, or ``"positive"``.
    """
    if not isinstance(batch, Mapping) or images_of(batch) is None or "input_ids" not in batch:
        got = f"keys {list(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ValueError(
            f"The data collator must give a dict with pixel_values and input_ids at least, got {got}. "
            'The default one makes them of the "image" of each item and of its "caption", a list of strings.'
        )
    for name in ("pixel_values", IMAGE_FEATURES, "input_ids", "pair_ids", "skipped", "caption_image"):
        if name in batch and not isinstance(batch[name], Tensor):
            got = type(batch[name]).__name__
            raise ValueError(f"The data collator must give {name}, if at all, as a tensor, got a {got}.")
    images, texts = len(images_of(batch)), len(batch["input_ids"])
    if "pair_ids" in batch and (shape := list(batch["pair_ids"].shape)) != [images]:
        raise ValueError(f"The data collator must give pair_ids as [{images}] int64, one for each image, got {shape}.")
    _, captions = group_by_image(batch.get("caption_image"), texts, images)
    if equal_ids == "exclude" and (captions > 1).any():
        raise ValueError(
            f"Image {captions.argmax()} of a training batch has {captions.max()} captions, and equal_ids is 'exclude'. "
            "Pass equal_ids='positive', which trains on all, or give each image one: an ImageTextDataset draws it in "
            "each epoch, a Dataset or collator of your own has to choose it."
        )


def checked_batches(make_loader: Callable[[], Iterable[object]], equal_ids: str) -> Iterator[Any]:
    """The batches of a new training loader, each of which is checked; see `check_batch`."""
    for batch in make_loader():
        check_batch(batch, equal_ids)
        yield batch


class TrainingLoader(DataLoader[Any]):
    """The training loader of a dataset with a length, of an `ImageTextStream`, or of new and old pairs.

    It has the length of the first epoch, but the training reads it with `lasting` throughout.

    The workers therefore read ahead across the ends of epochs. Trainer starts a new iteration with each epoch and skips
    batches when it resumes, and callbacks may look into the loader. Neither moves the training: each such iteration has
    workers of its own, and begins with the batch that follows the consumed ones.

    Args:
        dataset: the training set. An epoch of a `Replayed` ends with its new pairs.
        record: of the checkpoint to resume from, if there is one.

    Raises:
        ValueError: an epoch has fewer pairs than a global batch; or as `hf_infcl.data.streams.StreamBatches`.
    """

    def __init__(
        self, dataset: Any, collate: DataCollator, args: InfCLTrainingArguments, record: RunRecord | None = None
    ) -> None:
        # Trainer makes another loader of this one where a resumed run has trained a part of an epoch, and reads
        # nothing from that, which therefore needs no workers.
        super().__init__(dataset, batch_size=args.per_device_train_batch_size)
        self._args, self._device = args, "cpu" if args.offload_inputs else args.device
        self.epochs = epochs_of(dataset, args)
        sizes = args.per_device_train_batch_size, args.gradient_accumulation_steps * args.world_size
        where: dict[str, Any] = {"rank": args.process_index, "world_size": args.world_size}
        where |= {"num_workers": args.dataloader_num_workers, "keyed": args.leave_out is not None}
        if record is not None:
            where |= {"position": record.position or 0, "states": record.stream or ()}
        self.batches = make_micro_batches(dataset, Share(*sizes), collate, args, **where)
        self._lasting: Iterator[Any] | None = None
        self._fetched: list[dict[str, Any]] = []  # the tags of batches that are not consumed yet
        self._seconds = self._made = 0.0  # since the last `progress`: the workers' time, and their pairs

    def __len__(self) -> int:
        """The micro-batches of one process in the first epoch; later ones may have a window less."""
        if self.epochs is None:  # Trainer recognises data without a length by this error
            raise TypeError("A stream without samples_per_epoch has no length.")
        return self.epochs.windows() * self._args.gradient_accumulation_steps

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches that follow the consumed ones. They do not count as consumed."""
        for batch, _ in itertools.islice(self._read(), None if self.epochs is None else len(self)):
            yield self._to_device(batch)

    def begin_epoch(self, epoch: int, skipped: Callable[[], Tensor]) -> dict[str, int]:
        """Begins an epoch, or goes on in it where the checkpoint was written, without the ``skipped()`` rows.

        Returns the arguments of ``Trainer._run_epoch`` that differ from those of the first epoch.
        """
        if self.epochs is None:
            return {}
        # The epoch before may have been ended early.
        if self.batches.begin_at(max(self.batches.position, self.epochs.begin(epoch)), skipped):
            self.close()
        windows, accumulated = self.epochs.windows(epoch), self._args.gradient_accumulation_steps
        return {"num_update_steps_per_epoch": windows, "steps_in_epoch": windows * accumulated}

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
            self._seconds, self._made = self._seconds + tag["seconds"], self._made + tag["pairs"]
            yield self._to_device(batch)

    def _read(self) -> DataLoader[Any]:
        args, generator = self._args, torch.Generator()
        # torch draws the workers' seeds from it. If dropout used the same one, resumes would change it.
        generator.manual_seed(args.seed + self.batches.position * args.world_size + args.process_index)
        return DataLoader(self.batches, batch_size=None, generator=generator, **worker_options(args))

    def _to_device(self, batch: object) -> object:
        return send_to_device(batch, self._device, non_blocking=self._args.dataloader_pin_memory)

    def consume(self) -> None:
        """Records, for the next checkpoint, that the batches of `lasting` since the last call were trained on."""
        for tag in self._fetched:
            self.batches.consume(tag)
        self._fetched = []

    def close(self) -> None:
        """Ends the workers. The next batch, if any, comes from new workers and follows the consumed batches."""
        self._lasting, self._fetched = None, []

    def progress(self) -> dict[str, float]:
        """The `counts` since the run began, and the samples per second that this process's workers can prepare.

        The rate is measured since the last call, from the seconds that the workers spent on each batch.
        """
        workers = max(1, self._args.dataloader_num_workers)
        rate = self._made * workers / self._seconds if self._seconds else 0.0
        self._seconds = self._made = 0.0
        return {**self.batches.counts(), "rate": rate}


def worker_options(args: InfCLTrainingArguments) -> dict[str, Any]:
    """The arguments of a DataLoader that decide about its workers."""
    # This option is not in transformers before 5.15.
    context = getattr(args, "dataloader_multiprocessing_context", None)
    return {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory,
        "multiprocessing_context": context if args.dataloader_num_workers else None,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "worker_init_fn": heed_parent_alone,
    }
