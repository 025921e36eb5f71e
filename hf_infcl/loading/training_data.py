"""Reads the windows of a training, on all processes or on none, and knows how far the training has come in the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..checkpoints.record import RunRecord
from ..data.collator import DataCollator
from ..encoders.dual_encoder import images_of
from ..micro_batches.rows import split_batches
from ..options.arguments import InfCLTrainingArguments
from ..processes.collectives import Processes, announce_failure
from ..processes.preemption import Interruptions
from ..windows.terms import OF_TEACHERS
from ..windows.window import Window
from .batch_checks import check_window
from .batch_plan import BEGIN, BatchPlan, Position
from .data_wait import WAIT_SHARE, WAIT_WINDOWS, DataWait
from .loaders import training_collator
from .training_loader import TrainingLoader
from .wrapped import set_epoch

logger = logging.get_logger(__name__)


class TrainingData:
    """The data of one training, read window by window.

    Args:
        loader: the training loader; None before there is one.
        collator: the data collator, which knows how captions are padded.
        plan: of its global batches; None if all have one size and nothing is known of the passes over the data.
        begin: where a resumed training goes on, with all rows of the pass.
    """

    def __init__(
        self,
        loader: object,
        args: InfCLTrainingArguments,
        resumed: RunRecord | None = None,
        collator: DataCollator | None = None,
        plan: BatchPlan | None = None,
        begin: Position | None = None,
    ) -> None:
        self.window = Window([])  # that is trained now
        self.wait = DataWait()
        self._loader = loader if isinstance(loader, TrainingLoader) else None
        self._stream = getattr(loader, "dataset", None)  # of another loader
        division = args.per_device_train_batch_size, args.world_size
        self._plan = plan or BatchPlan.endless(args.global_batch_size, *division)
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
        self._begin = begin
        self.passed_over: Callable[[int], Any] = lambda epoch: torch.empty(0)  # see `WindowStep.passed_over`
        self._at, self._exhausted = BEGIN, False  # where the pass is, and whether a stream has no full window left

    def begin_epoch(self, epoch: int, windows: int = 0, step: int = 0) -> None:
        """Begins a pass over the data with this step, in which ``windows`` windows are trained already."""
        rows, begin = windows * self._args.global_batch_size, self._begin
        if begin is not None and (epoch, windows) == (begin.epoch, begin.windows):
            rows = begin.rows
        self._at, self._exhausted = Position(epoch=epoch, windows=windows, rows=rows), False
        if self._loader is None:
            set_epoch(self._stream, epoch)
        else:
            self._loader.begin_epoch(epoch, windows, step, lambda: self.passed_over(epoch))

    def begin_epoch_of_loop(self, epoch: int, step: int, counted: Mapping[str, int]) -> dict[str, int]:
        """Begins the pass over the data that Trainer's loop begins after so many steps.

        Returns those of Trainer's numbers of the pass (``counted``, as in ``Trainer._run_epoch``) that differ if the
        global batch grows, since passes then have different numbers of steps.
        """
        trained = counted["steps_trained_in_current_epoch"] if epoch == counted["epochs_trained"] else 0
        self.begin_epoch(epoch, trained // self._args.gradient_accumulation_steps, step)
        if not self._plan.grows:
            return {}
        return dict.fromkeys(("steps_in_epoch", "num_update_steps_per_epoch"), self._plan.windows(epoch))

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
            AskedToEndError: any process has received a signal to end.
        """
        interruptions.phases.enter("loading data", step)
        self._images = self._plan.size(step) // self._processes.world_size
        self.window, self._loaded = Window([]), []  # the batches of the last one take memory
        rows = 0
        batches: list[Any] = []
        if self._exhausted:
            return self.window
        try:
            with self.wait.waiting():
                iterator = epoch_iterator if self._loader is None else self._loader.lasting()
                batches, _ = read(iterator, self._plan.micro_batches(step), self._args.device)
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
                "keeps_loaded": self._args.divides_by_itself or bool(self._args.found),
            }
            self.window = Window(batches, self._text_padding, self._args.texts_together, **dealt)
            return self.window
        # All batches of these loaders are full: a whole window lacks rows only if the collator left them out.
        if self._loader is not None and any(count == self._plan.micro_batches(step) for _, count in agreed):
            raise ValueError(
                f"The data collator has left rows out, or added some: the processes got {seen} rows of {self._images} "
                "each for a global batch. It must return every row that it receives. Remove bad rows from the dataset "
                "beforehand."
            )
        # Training on a short window would change the objective, and Trainer would leave its gradient behind.
        if step == 0:
            raise ValueError(
                f"The stream ended before its first global batch of {self._images * self._processes.world_size} pairs "
                f"was full: the processes got {seen} of {self._images} each in full micro-batches. Lower the batch, or "
                "use more data."
            )
        self._exhausted = True
        return self.window

    def batches_of_loop(self) -> list[Any]:
        """The batches of the window for Trainer's loop, which takes it for one batch if the global batch grows."""
        count = len(self._loaded) - len(self.beyond_loop)
        return self.window.batches if count == len(self.window) else self._loaded[:count]

    @property
    def beyond_loop(self) -> list[Any]:
        """The batches of the window that `batches_of_loop` leaves out, without their images."""
        return self._loaded[1:] if self._plan.grows else []

    def end_window(self) -> None:
        """Records that the window is trained."""
        rows = self._at.rows + self._images * self._processes.world_size
        self._at = replace(self._at, windows=self._at.windows + 1, rows=rows)
        if skipped := [int(batch["skipped"].sum()) for batch in self.window.batches if "skipped" in batch]:
            self._skipped = (self._skipped or 0) + sum(skipped)
        if self._loader is not None:
            self._loader.consume()

    def epochs(self, step: int, counted: float) -> float:
        """The passes trained before a step, where Trainer has counted its steps, as if they were equally large."""
        return self._plan.epochs_before(step) if self._plan.grows else counted

    def rows_at(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """The rows of the training set at (micro-batch, row) of the current window; empty for a stream."""
        if self._loader is None:
            return []
        size = self._images // max(1, len(self._loaded))  # of the loader's micro-batches, which may have been split
        of_loader = [divmod(sum(self.window.sizes[0][:i]) + row, size) for i, row in places]
        return self._loader.batches.rows_at(of_loader)

    def position(self) -> dict[str, Any]:
        """The fields of `RunRecord` that say how far the training has come in the data; collective."""
        loader, stream = self._loader, None
        if loader is not None:  # for each process, the part of the stream that it has trained on
            stream = [json.loads(state) for state in self._processes.gather_objects(json.dumps(loader.batches.state()))]
            stream = None if None in stream else stream
        return {
            "epoch": self._at.epoch,
            "windows": self._at.windows,
            "rows": self._at.rows,
            "skipped_samples": self._skipped_samples(),
            "stream": stream,
        }

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
    return {name: v for name, v in batch.items() if name != "pixel_values" and not name.startswith(OF_TEACHERS)}
