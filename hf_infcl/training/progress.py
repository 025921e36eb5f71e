"""How much a training has trained and how fast, for its logs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class Progress:
    """Counts the pairs and the seconds of a training, interruptions included.

    Args:
        step: the number of trained optimizer steps at the start.
        samples: the pairs trained by then, also in global batches of other sizes.
        global_batch_size: the pairs of one step.
        log_history: Trainer's, from which the seconds before an interruption are known.
    """

    def __init__(
        self, step: int, samples: int, global_batch_size: int, log_history: Sequence[dict[str, Any]] = ()
    ) -> None:
        earlier = (entry["train_seconds"] for entry in reversed(log_history) if "train_seconds" in entry)
        now = time.perf_counter()
        self._first_step, self._samples, self._batch = step, samples, global_batch_size
        self._began = now - next(earlier, 0.0)
        self._last_log = now, step

    def steps(self, step: int) -> int:
        """The optimizer steps of this training up to a step."""
        return step - self._first_step

    def samples(self, step: int) -> int:
        """The pairs trained up to a step."""
        return self._samples + self.steps(step) * self._batch

    def logs(self, step: int, device: torch.device) -> dict[str, float]:
        """global_batch_size, samples_seen, samples_per_second since the last call, train_seconds, peak_memory."""
        now, (since, at) = time.perf_counter(), self._last_log
        self._last_log = now, step
        logs: dict[str, float] = {"global_batch_size": self._batch, "samples_seen": self.samples(step)}
        if step > at:
            logs["samples_per_second"] = round((step - at) * self._batch / (now - since), 3)
        logs["train_seconds"] = round(now - self._began, 3)
        if device.type == "cuda":
            logs["peak_memory"] = torch.cuda.max_memory_allocated(device)
        return logs
