"""The gradient noise scale of a training, from the parts that micro-batches have in one gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..processes.collectives import Processes
from .extensions import StepObserver
from .window import Window

KEPT = 0.95  # of the weight of a measurement, with each further one: a mean over about the last 20


class GradientNoise(StepObserver):
    """Estimates how many pairs a global batch needs before its gradient is more signal than noise.

    With the gradient g_i of the loss by the rows of pair i, the gradient of a batch of B pairs is their mean, and its
    squared norm has the expectation |g|² + tr(Σ)/B, where g and Σ are mean and covariance of the g_i. Two batch sizes,
    the micro-batch and the global batch, give both unknowns; their quotient tr(Σ)/|g|² is the simple noise scale of
    arXiv 1812.06162, appendix A.1. The g_i of a contrastive loss depend on the negatives too: the estimate is
    conditional on them, each micro-batch being contrasted with the whole global batch. It leaves out what a larger
    batch gains by more negatives. Where texts are dealt out by length, those of the measured micro-batch are the
    longest of its process rather than a random sample.

    Per window it takes the norm of the gradient twice, after the first micro-batch and after the last one, and does not
    wait for the device.

    Args:
        parameters: those that the micro-batches train, without the temperature.
        every: the number of steps of which one is measured.
    """

    name = "gradient_noise"

    def __init__(self, parameters: Iterable[nn.Parameter], every: int, processes: int) -> None:
        self._parameters, self._every = [p for p in parameters if p.requires_grad], every
        self._processes = processes
        self._measures = False  # the window that has begun
        self._pairs: tuple[int, int] = 0, 0  # of a micro-batch and of a global batch
        self._small: Tensor | None = None
        self._sums: Tensor | None = None  # decayed, of |g|² and tr(Σ), and their weight

    def begin_window(self, window: Window, step: int) -> None:
        micro_batch, local_batch = window.sizes[0][0], sum(window.sizes[0])
        pairs = micro_batch, local_batch * self._processes
        if pairs != self._pairs:  # other negatives
            self._pairs, self._sums = pairs, None
        # The gradient of a single micro-batch is reduced as soon as it is there.
        self._measures = len(window) > 1 and step % self._every == 0
        self._share, self._small = micro_batch / local_batch, None  # halved micro-batches may differ by one pair

    def after_backward(self, index: int, scale: float) -> None:
        if self._measures and index == 0:
            self._small = (self._norm() / (scale * self._share)) ** 2

    def end_window(self, window: Window, scale: float) -> None:
        if not self._measures:
            return
        assert self._small is not None
        (b, whole), big = self._pairs, (self._norm() / scale) ** 2
        signal, spread = (whole * big - b * self._small) / (whole - b), (self._small - big) / (1 / b - 1 / whole)
        terms = torch.stack((signal, spread, torch.ones_like(signal)))
        terms = torch.where(terms.isfinite().all(), terms, 0.0)  # it is not in a step that the scaler of fp16 skips
        self._sums = terms if self._sums is None else KEPT * self._sums + terms

    def state_dict(self) -> dict[str, Any]:
        if self._sums is None:
            return {}
        micro_batch, global_batch = self._pairs
        return {"micro_batch": micro_batch, "global_batch": global_batch, "sums": Processes().sum(self._sums).tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pairs = state["micro_batch"], state["global_batch"]
        # They are those of all processes.
        sums = torch.tensor(state["sums"], device=self._parameters[0].device)
        self._sums = sums * float(Processes().rank == 0)

    def _norm(self) -> Tensor:
        return get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def logs(self) -> dict[str, float]:
        """``gradient_noise_scale`` in pairs; collective. Nothing if none was measured.

        Nor where an estimate is not positive: they are unbiased, and their error then exceeds what they estimate.
        """
        if (estimates := self.estimates()) is None:
            return {}
        signal, noise = estimates
        return {"gradient_noise_scale": round(noise / signal, 1)} if min(estimates) > 0 else {}

    def estimates(self) -> tuple[float, float] | None:
        """The means of |g|² and of tr(Σ) over the last measured windows; collective. None before the first."""
        if self._sums is None:
            return None
        signal, noise, weight = Processes().sum(self._sums).tolist()
        return (signal / weight, noise / weight) if weight > 0 else None
