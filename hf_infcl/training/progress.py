"""How much a training has trained and how fast, for its logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import ProgressCallback, TrainerState
from transformers.utils.logging import tqdm

from ..loading.batch_plan import BatchPlan
from ..options.batch_schedule import Course

_SECONDS = "train_seconds"


class Progress:
    """Counts the pairs and the seconds of a training, interruptions included, and the operations of a batch.

    Args:
        step: the number of trained optimizer steps at the start.
        course: the pairs trained before each step of this training, also in global batches of other sizes.
        earlier: the seconds of the training before, if it was interrupted; see `trained_seconds`.
    """

    def __init__(self, step: int, course: Course, earlier: float = 0.0) -> None:
        now = time.perf_counter()
        self.first_step, self.samples = step, course.samples_before
        self._began = now - earlier
        self._last_log = now, step
        self._operations: dict[tuple[tuple[str, torch.Size], ...], int] = {}  # by the shapes of a batch

    def keep_seconds(self, state: TrainerState) -> None:
        """Puts the seconds of the training up to now into the part of Trainer's state that checkpoints keep."""
        kept: Any = state.stateful_callbacks
        kept[_SECONDS] = round(time.perf_counter() - self._began, 3)

    def logs(self, step: int, device: torch.device) -> dict[str, float]:
        """global_batch_size, samples_seen, samples_per_second since the last call, train_seconds, peak_memory.

        The global batch is that of the last step.
        """
        now, (since, at) = time.perf_counter(), self._last_log
        self._last_log = now, step
        seen = self.samples(step)
        logs: dict[str, float] = {"global_batch_size": seen - self.samples(step - 1), "samples_seen": seen}
        if step > at:
            logs["samples_per_second"] = round((seen - self.samples(at)) / (now - since), 3)
        logs[_SECONDS] = round(now - self._began, 3)
        if device.type == "cuda":
            logs["peak_memory"] = torch.cuda.max_memory_allocated(device)
        return logs

    def rate(self, logs: dict[str, float], step: int) -> dict[str, float]:
        """train_samples_per_second, at the end of this training: Trainer takes its steps for equally large."""
        pairs = self.samples(step) - self.samples(self.first_step)
        return {"train_samples_per_second": round(pairs / logs["train_runtime"], 3)} if "train_runtime" in logs else {}

    def operations(self, inputs: dict[str, Tensor], count: Callable[[dict[str, Tensor]], int]) -> int:
        """Trainer's ``count`` of the operations of a batch, made once for each shape, since it lists all parameters."""
        shapes = tuple((name, value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor))
        if shapes not in self._operations:
            self._operations[shapes] = count(inputs)
        return self._operations[shapes]


def trained_seconds(state: TrainerState) -> float:
    """The seconds of a training, which its checkpoints keep; for those of versions that did not, up to the last log."""
    kept: Any = state.stateful_callbacks
    logged = (entry[_SECONDS] for entry in reversed(state.log_history) if _SECONDS in entry)
    return float(kept[_SECONDS] if _SECONDS in kept else next(logged, 0.0))


class BarOfSamples(ProgressCallback):
    """Trainer's progress bar, in pairs: where the global batch grows, the later steps take longer."""

    def __init__(self, plan: Callable[[], BatchPlan]) -> None:
        super().__init__()
        self._plan_of = plan

    def on_train_begin(self, args: object, state: TrainerState, *_: object, **kwargs: object) -> None:
        self._plan = self._plan_of()
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=self._plan.samples, unit="pairs", unit_scale=True, dynamic_ncols=True)

    def on_step_end(self, args: object, state: TrainerState, *_: object, **kwargs: object) -> None:
        bar: Any = self.training_bar
        if state.is_world_process_zero:
            bar.update(self._plan.samples_before(state.global_step) - bar.n)
