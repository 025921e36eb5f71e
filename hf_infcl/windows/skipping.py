"""Decides which windows are not trained, because their numbers are not finite.

Every process decides by the same numbers, so all of them skip the same windows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..checkpoints.record import RunRecord

logger = logging.get_logger(__name__)


class SkippedWindows:
    """Decides which windows are skipped. A skipped window changes no weight, no buffer, no optimizer and no schedule.

    ``most`` is the maximum number of windows to skip in a row.
    """

    def __init__(self, most: int, resumed: RunRecord | None = None) -> None:
        self._most = most
        self._in_a_row = 0 if resumed is None else resumed.skipped_in_a_row  # skipped just before the current window
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.skipping = False  # the current window
        # Skipped since the run began, including those with an overflow in fp16.
        self.count = 0 if resumed is None else resumed.skipped_windows
        self.last_loss = 0.0 if resumed is None else resumed.last_loss  # of the last window that was trained

    def begin_window(self, buffers: Iterable[Tensor]) -> None:
        """Begins a window. ``buffers`` are tensors that its forwards may change, such as statistics of batch norms."""
        self.skipping = False
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers] if self._most > 0 else []

    def end_window(self, loss: float) -> None:
        """Ends a window that was trained."""
        self._in_a_row, self.last_loss = 0, loss

    def refuse(self, problem: str) -> None:
        """Skips the present window, or ends the training if as many as are allowed were skipped just before it.

        ``problem`` is a sentence that says which numbers are not finite.

        Raises:
            ValueError: no more windows may be skipped.
        """
        if self._in_a_row >= self._most:
            before = f" Steps skipped just before it: {self._in_a_row}." if self._in_a_row else ""
            raise ValueError(
                f"{problem}{before} The weights are those after the last step. Look at the data of this batch, lower "
                "the learning rate, use bf16 instead of fp16, or skip such steps with skip_nonfinite."
            )
        self._in_a_row += 1
        logger.warning(f"{problem} The step is skipped ({self._in_a_row} in a row; skip_nonfinite is {self._most}).")
        self.skipping = True
        self.count += 1
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)

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
        return {"skipped_windows": self.count, "skipped_in_a_row": self._in_a_row, "last_loss": self.last_loss}

    def logs(self) -> dict[str, float]:
        """``skipped_windows``, the number since the run began, if any were skipped."""
        return {"skipped_windows": self.count} if self.count else {}
