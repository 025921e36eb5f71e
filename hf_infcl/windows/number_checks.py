"""Looks at the loss and gradient of each window, so that windows which must not change the weights do not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers.utils import logging

from ..encoders.dual_encoder import DualEncoder
from ..passes.grad_cache import CachedWindow
from .nonfinite import RowsOfDataset, all_finite, describe_rows, finite_rows, of_all_ranks, parameters_not_finite
from .skipping import SkippedWindows
from .window import MicroBatch, Window

logger = logging.get_logger(__name__)


class NumberChecks:
    """The checks of a training. Every process gets the same answers.

    Args:
        rows_of_dataset: as for `describe_rows`.
    """

    def __init__(
        self,
        skipped: SkippedWindows,
        encoder: DualEncoder,
        accelerator: Accelerator,
        *,
        rows_of_dataset: RowsOfDataset,
    ) -> None:
        self.skipped = skipped
        self._encoder, self._accelerator = encoder, accelerator
        self._rows_of_dataset = rows_of_dataset
        self._fsdp = accelerator.distributed_type == DistributedType.FSDP
        self._loss = math.nan
        self._scale = math.inf  # of the scaler of fp16
        self._parameters: list[nn.Parameter] = []  # that are trained, listed once for a window
        self._of_terms: Sequence[nn.Parameter] = ()  # those of them that terms train beside the model
        # For each micro-batch, whether this process's gradient is finite after its backward.
        self._finite_gradients: list[Tensor] = []
        self._has_warned_of_zero = False

    def begin_window(self, model: nn.Module, of_terms: Sequence[nn.Parameter] = ()) -> None:
        """Begins a window, before its first forward. ``of_terms`` are trained beside the model."""
        self.skipped.begin_window(model.buffers())
        self._parameters, self._of_terms = [*model.parameters(), *of_terms], of_terms
        self._finite_gradients, self._loss = [], math.nan

    def check_loss(self, loss: Tensor, finite: Sequence[Tensor], window: Window, step: int) -> None:
        """Refuses or skips the window if its loss is not finite.

        ``finite`` says for images and texts whether the embedding of each row is finite, [rows of the window] bool.

        Raises:
            ValueError: the window must not be trained, and no more windows may be skipped.
        """
        self._loss = value = loss.item()
        if not math.isfinite(value):
            cause = describe_rows(finite, window.sizes, self._rows_of_dataset)
            with torch.no_grad():
                scale = self._encoder.scale_and_bias()[0].item()
            terms = [name for name, term in window.term_values.items() if not term.isfinite()]
            cause = cause or (f"the term {' and '.join(terms)}" if terms else "")
            cause = f"these are not finite: {cause}" if cause else f"logit_scale is {scale:g}"
            self.skipped.refuse(f"The loss of the global batch after step {step} is {value}, because {cause}.")

    def check_gradient(
        self, model: Any, passes: CachedWindow[MicroBatch], window: Window, step: int, *, last: bool
    ) -> None:
        """Refuses or skips the window if its gradient is not finite.

        Call it after the backward of each micro-batch; the gradient is complete after the ``last``. A message can name
        the first micro-batch of a process only while the gradient is that of this process.

        Raises:
            ValueError: as `check_loss`.
        """
        if self._accelerator.scaler is not None:  # the gradient of the scaled loss may overflow, which skips the step
            return
        if self._fsdp and not last:
            return
        finite = all_finite([p.grad for p in self._parameters if p.grad is not None])
        if not last or self._accelerator.num_processes == 1:
            self._finite_gradients.append(finite)
        if not last or finite:
            return
        first = next((index for index, finite in enumerate(self._finite_gradients) if not finite), None)
        # A feature without a gradient, as of a frozen tower, has no rows.
        gradients = [torch.empty(0, 1) if gradient is None else gradient for gradient in passes.gradients]
        places = describe_rows(window.in_order(finite_rows(gradients)), window.sizes, self._rows_of_dataset)
        places = places or of_all_ranks("" if first is None else f"micro-batch {first}")
        parameters = of_all_ranks(parameters_not_finite(self._encoder.model))
        of_terms = not all_finite([p.grad for p in self._of_terms if p.grad is not None])
        self.skipped.refuse(
            f"The gradient of the global batch after step {step} is not finite: "
            f"{'that of the parameters of a term' if of_terms else '; '.join(filter(None, (parameters, places)))}."
        )
        model.zero_grad()

    def prepare_skip(self, model: nn.Module) -> None:
        """Removes the gradients of a skipped window, and makes the scaler of fp16 skip its step without them."""
        for parameter in self._of_terms:
            parameter.grad = None
        if self._accelerator.scaler is not None:
            first = next(p for p in model.parameters() if p.requires_grad)
            first.grad = torch.full_like(first, math.inf)

    def before_optimizer_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Keeps accelerate's optimizer and Trainer's schedule where they are if the window is skipped."""
        if self._accelerator.scaler is not None:
            self._scale = self._accelerator.scaler.get_scale()
        else:
            # accelerate's optimizer takes no step between two synchronisations of the gradient.
            self._accelerator.gradient_state._set_sync_gradients(not self.skipped.skipping)
            optimizer._is_overflow = self.skipped.skipping  # Trainer then leaves the schedule as it is

    def after_optimizer_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Counts the window as trained, or as skipped by the scaler of fp16."""
        self._accelerator.gradient_state._set_sync_gradients(True)
        scale = math.inf
        if self._accelerator.scaler is not None:
            # A fused optimizer skips the step in its kernel, which accelerate does not see. The scale falls then.
            scale = self._accelerator.scaler.get_scale()
            optimizer._is_overflow = scale < self._scale
        if self.skipped.skipping:
            return
        if self._accelerator.optimizer_step_was_skipped:
            self.skipped.skipped_by_scaler(scale)
        else:
            self.skipped.end_window(self._loss)

    def logs(self, logs: Mapping[str, float]) -> dict[str, float]:
        """The logs of `SkippedWindows`. Warns once if ``loss`` and ``grad_norm`` in Trainer's are exactly 0."""
        if logs["loss"] == logs.get("grad_norm") == 0 and not self.skipped.skipping and not self._has_warned_of_zero:
            self._has_warned_of_zero = True
            logger.warning(
                "The loss and its gradient are exactly 0, so the model learns nothing. Either the pairs of a global "
                "batch have no negatives, as with a single pair or with equal pair_ids, or the model tells them apart "
                "so well that the loss rounds to 0."
            )
        return self.skipped.logs()
