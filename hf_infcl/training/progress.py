"""How much a training has trained and how fast, for its logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

_SECONDS = "train_seconds"


class Progress:
    """Counts the pairs and the seconds of a training, interruptions included, and the operations of a batch.

    Args:
        step: the number of trained optimizer steps at the start.
        batch: the pairs of a global batch.
        earlier: the seconds of the training before, if it was interrupted; see `trained_seconds`.
    """

    def __init__(self, step: int, batch: int, earlier: float = 0.0) -> None:
        now = time.perf_counter()
        self.first_step, self._batch = step, batch
        self._began = now - earlier
        self._last_log = now, step
        self._operations: dict[tuple[tuple[str, torch.Size], ...], int] = {}  # by the shapes of a batch

    def keep_seconds(self, state: TrainerState) -> None:
        """Puts the seconds of the training up to now into the part of Trainer's state that checkpoints keep."""
        kept: Any = state.stateful_callbacks
        kept[_SECONDS] = round(time.perf_counter() - self._began, 3)

    def logs(self, step: int, device: torch.device) -> dict[str, float]:
        """global_batch_size, samples_seen, samples_per_second since the last call, train_seconds, peak_memory."""
        now, (since, at) = time.perf_counter(), self._last_log
        self._last_log = now, step
        logs: dict[str, float] = {"global_batch_size": self._batch, "samples_seen": step * self._batch}
        if step > at:
            logs["samples_per_second"] = round((step - at) * self._batch / (now - since), 3)
        logs[_SECONDS] = round(now - self._began, 3)
        if device.type == "cuda":
            logs["peak_memory"] = torch.cuda.max_memory_allocated(device)
        return logs

    def rate(self, logs: dict[str, float], step: int) -> dict[str, float]:
        """train_samples_per_second, at the end of this training: Trainer's has the steps before a resume."""
        pairs = (step - self.first_step) * self._batch
        return {"train_samples_per_second": round(pairs / logs["train_runtime"], 3)} if "train_runtime" in logs else {}

    def operations(self, inputs: dict[str, Tensor], count: Callable[[dict[str, Tensor]], int]) -> int:
        """Trainer's ``count`` of the operations of a batch, made once for each shape, since it lists all parameters."""
        shapes = tuple((name, value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor))
        if shapes not in self._operations:
            self._operations[shapes] = count(inputs)
        return self._operations[shapes]


def trained_seconds(state: TrainerState) -> float:
    """The seconds of a training, which its checkpoints keep; for those of other trainers, up to the last log."""
    kept: Any = state.stateful_callbacks
    logged = (entry[_SECONDS] for entry in reversed(state.log_history) if _SECONDS in entry)
    return float(kept[_SECONDS] if _SECONDS in kept else next(logged, 0.0))
