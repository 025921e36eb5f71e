"""Changes of the step: patches that are dropped, and images that are smaller at first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..encoders.dual_encoder import DualEncoder
from ..encoders.image_size import OtherSizes, resized
from ..encoders.patch_dropout import PatchDropout
from ..options.batch_schedule import Course
from ..options.image_sizes import ImageSizes
from .extensions import StepChange
from .window import Window


class DroppedPatches(StepChange):
    """Drops a share of the patches of each image (``patch_dropout``), except in the last steps.

    Args:
        full_last: the share of the samples, at the end, that see all patches (``full_tokens_last``).
        course: the samples of the steps of the training; None before it begins.
    """

    name = "patch_dropout"

    def __init__(self, encoder: DualEncoder, share: float, full_last: float | None, course: Course | None) -> None:
        self._encoder, self._share = encoder, share
        self._first_full = course.steps - course.last_steps(full_last) if full_last and course else math.inf
        self._dropout: PatchDropout | None = None
        self.graphs: float = 0.0  # the share that the present window drops

    def begin_window(self, window: Window, step: int) -> None:
        self.graphs = self._share if step < self._first_full else 0.0
        if self._dropout is None:
            self._dropout = PatchDropout(self._encoder, self.graphs)
        self._dropout.share = self.graphs

    def close(self) -> None:
        if self._dropout is not None:
            self._dropout.remove()
        self._dropout = None


class ImageSizeOfStep(StepChange):
    """Gives the images the size of the step (``image_size_schedule``), with hooks from the first window on."""

    name = "image_size_schedule"
    resizes = True

    def __init__(self, encoders: Sequence[DualEncoder], sizes: ImageSizes) -> None:
        self._encoders, self._sizes = encoders, sizes
        self._hooks: list[OtherSizes] = []
        self.graphs: int | None = None  # the size of the images of the present window in pixels

    def begin_window(self, window: Window, step: int) -> None:
        self.graphs = self._sizes.at(step)
        if not self._hooks:
            self._hooks = [OtherSizes(encoder) for encoder in self._encoders]

    def inputs(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        assert self.graphs is not None
        return {**inputs, "pixel_values": resized(inputs["pixel_values"], self.graphs)}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
