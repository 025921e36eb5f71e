"""Reads the windows of a training, on all processes or on none, and knows how far the training has come in the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..data.collator import DataCollator
from ..data.loader import WAIT_SHARE, WAIT_WINDOWS, DataWait, TrainingLoader, check_window
from ..data.store import set_epoch
from ..models.dual_encoder import images_of
from ..options.arguments import InfCLTrainingArguments
from ..options.record import RunRecord
from ..processes.collectives import Processes, announce_failure
from ..processes.signals import Interruptions
from ..step.window import Window, split_batches
from .loaders import training_collator

logger = logging.get_logger(__name__)


class TrainingData:
    """The data of one training, read window by window.

    Args:
        loader: the training loader; None before there is one.
        collator: the data collator, which knows how captions are padded.
    """

    def __init__(
        self,
        loader: object,
        args: InfCLTrainingArguments,
        resumed: RunRecord | None = None,
        collator: DataCollator | None = None,
    ) -> None:
        self.window = Window([])  # that is trained now
        self.wait = DataWait()
        self._loader = loader if isinstance(loader, TrainingLoader) else None
        self._stream = getattr(loader, "dataset", None)  # of another loader
        self._images = args.global_batch_size // args.world_size  # of a window
        self._args, self._processes = args, Processes()
        self._text_padding: Mapping[str, int] | None = (
            None if collator is None else getattr(training_collator(collator, args), "text_padding", None)
        )
        # None until the data reports it. On the main process a resumed run continues the earlier count.
        self._skipped = None if resumed is None else resumed.skipped_samples
        if self._skipped is not None and self._processes.rank > 0:
            self._skipped = 0
        self._has_warned_of_wait = False
        self._loaded: list[dict[str, Any]] = []  # see `_without_images`, of the window's batches before their split
        self._exhausted = False  # whether a stream has no full window left

    def begin_epoch(self, epoch: int, windows: int, skipped_rows: Callable[[int], Tensor]) -> dict[str, int]:
        """Begins a pass over the data, in which so many windows are trained.

        See `WindowStep.skipped_rows` and, for what is returned, `TrainingLoader.begin_epoch`.
        """
        self._exhausted = False
        if self._loader is not None:
            return self._loader.begin_epoch(epoch, windows, partial(skipped_rows, epoch))
        set_epoch(self._stream, epoch)
        return {}

    def fetch(
        self,
        read: Callable[[Iterator[object], int, torch.device], tuple[list[dict[str, Tensor]], object]],
        epoch_iterator: Iterator[object],
        step: int,
        *,
        equal_ids: str,
        interruptions: Interruptions,
    ) -> Window:
        """Fetches the next window, or an empty one if the remaining rows of a stream do not fill it; collective.

        All processes agree here that they have a window, so an error in the data of one process stops all of them.

        Args:
            read: takes a number of batches from an iterator: `Trainer.get_batch_samples`.
            epoch_iterator: of Trainer's loop; a `TrainingLoader` reads from one that lasts for the whole training.

        Raises:
            ValueError: the collator returns batches that cannot be trained on; the stream is shorter than a global
                batch.
            EndRequestedError: any process has received a signal to end.
        """
        interruptions.phases.enter("loading data", step)
        self.window, self._loaded = Window([]), []  # the batches of the last one take memory
        rows = 0
        batches: list[Any] = []
        if self._exhausted:
            return self.window
        try:
            with self.wait.waiting():
                iterator = epoch_iterator if self._loader is None else self._loader.lasting()
                batches, _ = read(iterator, self._args.gradient_accumulation_steps, self._args.device)
            check_window(batches, equal_ids)
            rows = sum(len(images_of(batch)) for batch in batches)
        except Exception as error:
            if not interruptions.is_ending:
                announce_failure(error)
                raise
        agreed = interruptions.agree([rows, len(batches)])
        seen = [int(rows) for rows, _ in agreed]
        if seen == [self._images] * len(seen):
            # Gradients are exchanged in the backward of the last micro-batch, which needs both towers for it.
            self._loaded = list(map(_without_images, batches))
            batches = split_batches(batches, self._args.largest_micro_batch)
            dealt = {
                "last_has_texts": self._processes.grouped,
                "keeps_loaded": self._args.divides_by_itself or bool(self._args.chosen),
            }
            self.window = Window(batches, self._text_padding, self._args.texts_together, **dealt)
            return self.window
        # All batches of these loaders are full: a whole window lacks rows only if the collator left them out.
        if self._loader is not None and any(count == self._args.gradient_accumulation_steps for _, count in agreed):
            raise ValueError(
                f"The data collator has left rows out, or added some: the processes got {seen} rows of {self._images} "
                "each for a global batch. It must return every row that it receives. Remove bad rows beforehand."
            )
        # Training on a short window would change the objective, and Trainer would leave its gradient behind.
        if step == 0:
            raise ValueError(
                f"The stream ended before its first global batch of {self._images * self._processes.world_size} pairs "
                f"was full: the processes got {seen} of {self._images} each in full micro-batches. Lower the batch."
            )
        self._exhausted = True
        return self.window

    def batches_of_loop(self) -> list[Any]:
        """The batches of the window for Trainer's loop: as many as were loaded, also where they have been split."""
        return self.window.batches if len(self._loaded) == len(self.window) else self._loaded

    def end_window(self) -> None:
        """Records that the window is trained."""
        if skipped := [int(batch["skipped"].sum()) for batch in self.window.batches if "skipped" in batch]:
            self._skipped = (self._skipped or 0) + sum(skipped)
        if self._loader is not None:
            self._loader.consume()

    def rows_at(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """The rows of the training set at (micro-batch, row) of the current window; empty for a stream."""
        if self._loader is None:
            return []
        size = self._images // max(1, len(self._loaded))  # of the loader's micro-batches, which may have been split
        of_loader = [divmod(sum(self.window.sizes[0][:i]) + row, size) for i, row in places]
        return self._loader.batches.rows_at(of_loader)

    def position(self) -> dict[str, Any]:
        """The fields of `RunRecord` that say how far the training has come in the data; collective."""
        loader, position, stream = self._loader, None, None
        if loader is not None:
            position = loader.batches.position
            # For each process, the part of the stream that it has trained on.
            stream = [json.loads(state) for state in self._processes.gather_objects(json.dumps(loader.batches.state()))]
            stream = None if None in stream else stream
        return {"position": position, "skipped_samples": self._skipped_samples(), "stream": stream}

    def _skipped_samples(self) -> int | None:
        """The sum over all processes since the run began, or None if the data does not report them; collective."""
        if self._skipped is None:
            return None
        return int(sum(count for (count,) in self._processes.agree([self._skipped])))

    def logs(self) -> dict[str, float]:
        """Metrics of the data, and a warning if the training waits for it; collective.

        The README of the training lists them. ``data_wait`` is since the last log; ``texts_per_image`` is that of the
        last global batch; numbers of samples and of shards are since the run began.
        """
        logs: dict[str, float] = {}
        if (skipped := self._skipped_samples()) is not None:
            logs["skipped_samples"] = skipped
        wait, loader = self.wait, self._loader
        progress = None if loader is None else loader.progress()
        numbers = [wait.share_since_last(), wait.share(), sum(self.window.sizes[1]), *(progress or {}).values()]
        recent, overall, texts, *sums = zip(*self._processes.agree(numbers), strict=True)
        if sum(texts) != (images := self._images * len(texts)) and len(self.window):
            logs["texts_per_image"] = round(sum(texts) / images, 3)
        if wait.windows > 0:
            logs["data_wait"] = round(max(recent), 4)
        if progress is not None:
            totals = dict(zip(progress, map(sum, sums), strict=True))
            if "replayed" in totals:
                logs["replay_samples"] = int(totals["replayed"])
            if "shards" in totals:
                logs["stream_samples"], logs["stream_shards"] = int(totals["samples"]), int(totals["shards"])
            logs["loader_samples_per_second"] = round(totals["rate"], 1)
        if wait.windows >= WAIT_WINDOWS and max(overall) > WAIT_SHARE and not self._has_warned_of_wait:
            self._has_warned_of_wait = True
            if self._processes.rank == 0:
                workers = self._args.dataloader_num_workers
                logger.warning(
                    f"The training has waited for its data for {max(overall):.0%} of the time. Raise "
                    f"dataloader_num_workers, which is {workers}, up to the number of CPU cores; decode JPEGs faster "
                    "(pip install simplejpeg); or store smaller images."
                )
        return logs

    def close(self) -> None:
        """Lets go of the last window, and ends the workers of a stream."""
        self.window = Window([])
        if self._loader is not None:
            self._loader.close()


def _without_images(batch: Mapping[str, object]) -> dict[str, object]:
    """A batch for Trainer's loop, which counts it and holds it during the step; images would take memory."""
    return {name: value for name, value in batch.items() if name != "pixel_values"}
