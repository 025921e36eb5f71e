"""Decides which windows are not trained, because their numbers are not finite or their loss has exploded.

Every process decides by the same numbers, so all of them skip the same windows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..checkpoints.record import RunRecord

WINDOWS_COMPARED = 20  # the number of previous windows with whose mean the loss of a window is compared

logger = logging.get_logger(__name__)


class SkippedWindows:
    """Decides which windows are skipped. A skipped window changes no weight, no buffer, no optimizer and no schedule.

    Args:
        most: the maximum number of windows to skip in a row because their numbers are not finite.
        divergence_factor: a loss has exploded if it exceeds this factor times the mean of the previous
            `WINDOWS_COMPARED` windows; None for no such limit.
    """

    def __init__(self, most: int, divergence_factor: float | None, resumed: RunRecord | None = None) -> None:
        self._most, self._factor = most, divergence_factor
        # Skipped just before the current window because of numbers that are not finite.
        self.in_a_row = 0 if resumed is None else resumed.skipped_in_a_row
        # Of the last trained windows.
        self.losses: deque[float] = deque(() if resumed is None else resumed.losses, maxlen=WINDOWS_COMPARED)
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.skipping = False  # the current window
        # Skipped since the run began, including those with an overflow in fp16.
        self.count = 0 if resumed is None else resumed.skipped_windows
        self.last_loss = self.losses[-1] if self.losses else 0.0

    def begin_window(self, buffers: Iterable[Tensor]) -> None:
        """Begins a window. ``buffers`` are tensors that its forwards may change, such as statistics of batch norms."""
        self.skipping = False
        may_skip = self._most > 0 or self._factor is not None
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers] if may_skip else []

    def end_window(self, loss: float) -> None:
        """Ends a window that was trained."""
        self.in_a_row = 0
        self.losses.append(loss)
        self.last_loss = loss

    def refuse(self, problem: str) -> None:
        """Skips the present window, or ends the training if as many as are allowed were skipped just before it.

        ``problem`` is a sentence that says which numbers are not finite.

        Raises:
            ValueError: no more windows may be skipped.
        """
        if self.in_a_row >= self._most:
            before = f" Steps skipped just before it: {self.in_a_row}." if self.in_a_row else ""
            raise ValueError(
                f"{problem}{before} The weights are those after the last step. Look at the data of this batch, lower "
                "the learning rate, use bf16 instead of fp16, or skip such steps with skip_nonfinite."
            )
        self.in_a_row += 1
        logger.warning(f"{problem} The step is skipped ({self.in_a_row} in a row; skip_nonfinite is {self._most}).")
        self.skip()

    def skip(self) -> None:
        """Skips the present window."""
        self.skipping = True
        self.count += 1
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)

    def divergence(self, loss: float) -> str:
        """A sentence about the loss of the present window if it has exploded; otherwise empty."""
        if self._factor is None or len(self.losses) < WINDOWS_COMPARED:
            return ""
        mean = math.fsum(self.losses) / len(self.losses)
        if loss <= self._factor * mean:
            return ""
        return (
            f"The loss of the global batch is {loss:.4g}, more than {self._factor:g} times {mean:.4g}, the mean of the "
            f"previous {WINDOWS_COMPARED} steps."
        )

    def skipped_by_scaler(self, scale: float) -> None:
        """Counts a window whose gradient overflowed in fp16, so that the scaler of the loss has skipped its step.

        ``scale`` is the factor by which the scaler multiplies the loss of the next window.

        Raises:
            ValueError: the gradient overflows although it is not scaled up.
        """
        self.count += 1
        if scale < 1:
            raise ValueError(
                f"The gradient is not finite in fp16, although the loss is scaled by {scale:g} only. The weights are "
                "those after the last step that was not skipped. Use bf16 instead of fp16, or lower the learning rate."
            )

    def record(self) -> dict[str, Any]:
        """The fields of `RunRecord` that this state continues from."""
        return {"skipped_windows": self.count, "skipped_in_a_row": self.in_a_row, "losses": list(self.losses)}

    def logs(self) -> dict[str, float]:
        """``skipped_windows``, the number since the run began, if any were skipped."""
        return {"skipped_windows": self.count} if self.count else {}
