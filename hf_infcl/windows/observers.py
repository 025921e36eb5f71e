"""Extensions of the step that only log, gradients of the towers and cosines of positives, or drop patches."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ..encoders.dual_encoder import DualEncoder
from ..encoders.patch_dropout import PatchDropout
from ..passes.grad_cache import Features
from ..processes.collectives import Processes
from .extensions import StepChange, StepObserver
from .window import Window, positive_cosines


class TowerNorms(StepObserver):
    """The norms of the gradients of the image tower and of the text tower, with their projections.

    It reads every gradient once and does not wait for the device; `logs` fetches the values. FSDP2 has to have
    replaced the parameters before.
    """

    name = "tower_norms"

    def __init__(self, encoder: DualEncoder) -> None:
        self._parameters = {
            tower: [p for module in parts for p in module.parameters() if p.requires_grad]
            for tower, parts in encoder.parts().items()
        }
        self._norms: dict[str, Tensor] = {}

    def end_window(self, window: Window, scale: float) -> None:
        for tower, parameters in self._parameters.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                self._norms[tower] = get_total_norm(gradients) / scale

    def logs(self) -> dict[str, float]:
        """``grad_norm_image`` and ``grad_norm_text`` of the last window, before clipping; collective under FSDP2."""
        whole = {t: norm.full_tensor() if isinstance(norm, DTensor) else norm for t, norm in self._norms.items()}
        return {f"grad_norm_{tower}": norm.item() for tower, norm in whole.items()}


class PositiveCosines(StepObserver):
    """The mean cosine of all pairs of the global batch, also of those that are left out."""

    name = "positive_cosines"

    def __init__(self) -> None:
        self._of_window: Tensor | None = None
        self._of_trained: Tensor | None = None

    def after_first_pass(self, window: Window, features: Features) -> None:
        self._of_window = positive_cosines(window, features)

    def end_window(self, window: Window, scale: float) -> None:
        self._of_trained = self._of_window

    def logs(self) -> dict[str, float]:
        """``positive_cosine`` of the last window; with replay also that of its new and of its old pairs; collective."""
        if self._of_trained is None:
            return {}
        sums, counts = Processes().sum(self._of_trained)
        names = ("positive_cosine", "new_positive_cosine", "replay_positive_cosine")
        return dict(zip(names, (sums / counts).tolist(), strict=False))


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
