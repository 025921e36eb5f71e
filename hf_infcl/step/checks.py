"""Looks at the loss and gradient of each window, so that windows which must not change the weights do not."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from ..files.text import listed
from ..loss import OBJECTIVES, local_contrastive_loss
from ..models.dual_encoder import IMAGE_INPUTS, NO_TEXTS, TEXT_INPUTS, embeds_of, part_of, return_dict_for
from ..options.record import RunRecord
from ..processes.collectives import Processes, by_rank
from .grad_cache import CachedWindow, undoing, undone
from .terms import Context
from .window import GradientNorms, MicroBatch, Window
from .wrappers import Wrapper

logger = logging.get_logger(__name__)

_MOST_NAMES = 8  # in a message
_KINDS = ("image embeddings", "text embeddings")


class NumberChecks:
    """The checks of a training. Every process decides by the same numbers, so all of them skip the same windows.

    A skipped window changes no weight, no buffer, no optimizer and no schedule.

    Args:
        of_terms: the parameters that terms train beside the model.
    """

    def __init__(self, context: Context, record: RunRecord | None, of_terms: list[nn.Parameter]) -> None:
        self._encoder, self._accelerator, self._of_terms = context.encoder, context.accelerator, of_terms
        self._most = context.args.skip_nonfinite  # the windows to skip in a row
        self._in_a_row = 0 if record is None else record.skipped_in_a_row  # skipped just before the current window
        # Skipped since the run began, including those with an overflow in fp16.
        self.skipped = 0 if record is None else record.skipped_windows
        self.last_loss = 0.0 if record is None else record.last_loss  # of the last window that was trained
        self._has_warned_of_zero = False
        # ---- Of the current window ----
        self.skipping, self._loss = False, math.nan
        self.undo: Callable[[], object] = lambda: None  # see `undoing`
        # For images and texts, whether the embedding of each row is finite, [rows of the window] bool.
        self.finite_rows: Sequence[Tensor] = ()

    def record(self) -> dict[str, Any]:
        """The fields of `RunRecord` that this state continues from."""
        return {"skipped_windows": self.skipped, "skipped_in_a_row": self._in_a_row, "last_loss": self.last_loss}

    def begin_window(self, model: Wrapper) -> None:
        """Begins a window, before anything of its step."""
        self.skipping, self.undo = False, undoing(model, self._of_terms)
        self._parameters = [*model.parameters(), *self._of_terms]  # that are trained
        # For each micro-batch, whether this process's gradient is finite after its backward.
        self._finite_gradients: list[Tensor] = []

    def check(self, passes: CachedWindow[MicroBatch], window: Window, step: int, *, last: bool) -> None:
        """Refuses or skips the window if its loss or its gradient is not finite.

        Call it after the backward of each micro-batch; the gradient is complete after the ``last``. A message can name
        the first micro-batch of a process only while the gradient is that of this process. The host reads loss and
        gradient together, after the last one: while it waits for a number, the device runs out of work.

        Raises:
            ValueError: the window must not be trained, and no more windows may be skipped.
        """
        finite, norms = torch.tensor(True), None
        # The gradient of the loss that fp16 scales may overflow, which skips the step.
        if self._accelerator.scaler is None and (last or not self._accelerator.is_fsdp2):
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            kinds = {(type(one), one.device, one.dtype) for one in gradients}
            if last and len(kinds) == 1 and type(gradients[0]) is Tensor:
                norms = GradientNorms(self._parameters)
            finite = all_finite(gradients) if norms is None else norms.total.isfinite()
            if not last or self._accelerator.num_processes == 1:
                self._finite_gradients.append(finite)
        if not last:
            return
        self._loss, is_finite = torch.stack([passes.loss, finite.to(passes.loss)]).tolist()
        if math.isfinite(self._loss) and is_finite:
            window.gradient_norms = norms
            return
        Processes().agree([])  # where an error of another process's observer arrives
        if not math.isfinite(self._loss):
            because = f"{self._loss}, because {self._cause_of_loss(window)}"
            self.refuse(f"The loss of the global batch after step {step} is {because}.")
        else:
            which = self._cause_of_gradient(passes, window)
            self.refuse(f"The gradient of the global batch after step {step} is not finite: {which}.")

    def _cause_of_loss(self, window: Window) -> str:
        cause = self._places(self.finite_rows, window)
        terms = [name for name, term in window.term_values.items() if not term.isfinite()]
        cause = cause or (f"the term {' and '.join(terms)}" if terms else "")
        with torch.no_grad():
            scale = self._encoder.scale_and_bias()[0].item()
        return f"these are not finite: {cause}" if cause else f"logit_scale is {scale:g}"

    def _cause_of_gradient(self, passes: CachedWindow[MicroBatch], window: Window) -> str:
        if not all_finite([p.grad for p in self._of_terms if p.grad is not None]):
            return "that of the parameters of a term"
        first = next((index for index, finite in enumerate(self._finite_gradients) if not finite), None)
        # A feature without a gradient, as of a frozen tower, has no rows.
        of_features = [torch.empty(0, 1) if gradient is None else gradient for gradient in passes.gradients]
        places = self._places(window.in_order(finite_rows(of_features)), window)
        places = places or of_all_ranks("" if first is None else f"micro-batch {first}")
        named = {n: p.grad for n, p in self._encoder.model.named_parameters() if p.grad is not None}
        local = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in named.items()}
        bad = [name for name, gradient in local.items() if not gradient.isfinite().all()]
        parameters = of_all_ranks(listed(bad, _MOST_NAMES))  # the first ones on each process
        return "; ".join(filter(None, (parameters, places)))

    def _places(self, finite: Sequence[Tensor], window: Window) -> str:
        """The rows of all processes' windows with values that are not finite, as a phrase; collective.

        The same on every process, such as ``rank 1: image embeddings of micro-batch 0, row 3 (17 of the training
        set)``; empty if all rows are finite. ``finite`` as `finite_rows`.
        """
        parts = []
        for kind, rows, sizes in zip(_KINDS, finite, window.sizes, strict=True):
            bad = (~rows).nonzero().flatten().tolist()
            places_of_rows = [(index, row) for index, size in enumerate(sizes) for row in range(size)]
            places = [places_of_rows[row] for row in bad[:_MOST_NAMES]]
            # With several captions of an image, or negative ones, the places of texts are not those of rows.
            rows_known = window.rows_at(places) if sizes == window.sizes[0] else []
            known = [f" ({row} of the training set)" for row in rows_known] or [""] * len(places)
            named = [f"micro-batch {index}, row {row}{name}" for (index, row), name in zip(places, known, strict=True)]
            if len(bad) > len(places):
                named.append(f"{len(bad) - len(places)} more rows")
            if bad:
                parts.append(f"{kind} of {'; '.join(named)}")
        return of_all_ranks(" and ".join(parts))

    def refuse(self, problem: str) -> None:
        """Skips the present window, or ends the training if as many as are allowed were skipped just before it."""
        self.undo()
        if self._in_a_row >= self._most:
            before = f" Steps skipped just before it: {self._in_a_row}." if self._in_a_row else ""
            raise ValueError(
                f"{problem}{before} The weights are those after the last step. Look at the data of this batch, lower "
                "the learning rate, use bf16 instead of fp16, or skip such steps with skip_nonfinite."
            )
        self._in_a_row += 1
        logger.warning(f"{problem} The step is skipped ({self._in_a_row} in a row; skip_nonfinite is {self._most}).")
        self.skipping = True
        self.skipped += 1

    def end_window(self, overflowed_by: float | None = None) -> None:
        """Ends a window that was not refused, after the optimizer's step.

        Its gradient may have overflowed in fp16, so that the scaler of the loss has skipped its step. ``overflowed_by``
        is then the factor by which the scaler multiplies the loss of the next window.

        Raises:
            ValueError: the gradient overflows although it is not scaled up.
        """
        if overflowed_by is None:
            self._in_a_row, self.last_loss = 0, self._loss
            return
        self.skipped += 1
        if overflowed_by < 1:
            raise ValueError(
                f"The gradient is not finite in fp16, although the loss is scaled by {overflowed_by:g} only. The "
                "weights are those after the last step that was not skipped. Use bf16 instead of fp16, or lower the "
                "learning rate."
            )

    def logs(self, logs: Mapping[str, float]) -> dict[str, float]:
        """``skipped_windows`` since the run began, if there were any; ``logs`` are Trainer's.

        Warns once of a loss and a gradient of exactly 0.
        """
        if logs["loss"] == logs.get("grad_norm") == 0 and not self.skipping and not self._has_warned_of_zero:
            self._has_warned_of_zero = True
            logger.warning(
                "The loss and its gradient are exactly 0, so the model learns nothing: the pairs of a global batch "
                "have no negatives (a single pair, or equal pair_ids), or it tells them apart and the loss rounds to 0."
            )
        return {"skipped_windows": self.skipped} if self.skipped else {}


# ---- Numbers that are not finite, on all processes ----


def finite_rows(features: Iterable[Tensor]) -> list[Tensor]:
    """For each tensor [rows, ...] whether the values of each row are finite, [rows] bool."""
    return [feature.isfinite().flatten(1).all(1) for feature in features]


def all_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Whether all gradients are finite, bool []; those of FSDP on all processes, which is collective."""
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    norm: Any = nn.utils.get_total_norm([gradient for gradient in gradients if not isinstance(gradient, DTensor)])
    if sharded:
        norm_of_shards: Any = nn.utils.get_total_norm(sharded)
        norm = norm + norm_of_shards.full_tensor()
    return norm.isfinite()


def of_all_ranks(text: str) -> str:
    """`by_rank` of every process's text; collective."""
    return by_rank(Processes().gather_objects(text))


def check_own_loss(context: Context, batch: Mapping[str, Any]) -> None:
    """Asks the model for its loss of a micro-batch, of as many images as texts, in a forward beside the training's.

    It leaves random states and buffers as they are. See `asked_for_loss`, which needs no other forward.
    """
    if batch.get("pixel_values") is None or batch.get(NO_TEXTS):
        return
    batch = context.prepare_inputs(dict(batch))
    rows = min(len(batch["pixel_values"]), len(batch["input_ids"]))
    inputs = {name: batch[name][:rows] for name in IMAGE_INPUTS + TEXT_INPUTS if name in batch}
    model = context.encoder.model
    with torch.no_grad(), undone(model, context.args.device):
        asked_for_loss(context, model)(**inputs, **return_dict_for(context.encoder.base))


def asked_for_loss(context: Context, forward: Callable[..., object]) -> Callable[..., object]:
    """The forward of a model, which raises a ValueError if it adds something to the contrastive loss of its inputs.

    The trainer would not train that. The forwards of transformers compute the contrastive loss alone.
    """
    encoder, name = context.encoder, type(context.encoder.base).__name__
    parameters = inspect.signature(encoder.base.forward).parameters.values()
    of_transformers = any(one.__module__.startswith("transformers.") for one in type(encoder.base).__mro__)
    takes = any(p.name == "return_loss" or (of_transformers and p.kind == p.VAR_KEYWORD) for p in parameters)

    def asking(**inputs: Any) -> object:
        output = forward(**inputs, **({"return_loss": True} if takes else {}))
        if (loss := part_of(output, "loss")) is None:
            return output
        with torch.no_grad():
            own, embeds = loss.mean(), [one.detach() for one in embeds_of(output, encoder.base)]
            loss_of = partial(local_contrastive_loss, *embeds, *encoder.scale_and_bias())
            losses = {one: loss_of(objective=one).item() for one in OBJECTIVES}
        tolerance = 1e-3 if context.accelerator.mixed_precision == "no" and own.dtype == torch.float32 else 0.03
        if not any(math.isclose(own.item(), one, rel_tol=tolerance) for one in losses.values()):
            raise ValueError(
                f"The forward of {name} computes a loss of its own: {own.item():.5g} for the first micro-batch, whose "
                f"contrastive loss is {losses[context.objective]:.5g}. InfCLTrainer would not train it: write a "
                "LossTerm (hf_infcl.step.extensions), let forward return no loss, or use transformers.Trainer."
            )
        if Processes().rank == 0:
            logger.warning_once(
                f"InfCLTrainer takes only the embeddings of {name}'s own forward, whose loss is the contrastive loss "
                "of the first micro-batch. What it adds to its loss later is not trained; write that as a LossTerm."
            )
        return output

    return asking
