"""The change of the step that drops patches."""

from __future__ import annotations

from ..encoders.dual_encoder import DualEncoder
from ..encoders.patch_dropout import PatchDropout
from .extensions import StepChange
from .window import Window


class DroppedPatches(StepChange):
    """Drops a share of the patches of each image (``patch_dropout``), from the first window of a training on."""

    name = "patch_dropout"

    def __init__(self, encoder: DualEncoder, share: float) -> None:
        self._encoder, self._share = encoder, share
        self._dropout: PatchDropout | None = None

    def begin_window(self, window: Window, step: int) -> None:
        self._dropout = self._dropout or PatchDropout(self._encoder, self._share)

    def close(self) -> None:
        if self._dropout is not None:
            self._dropout.remove()
        self._dropout = None
