"""One optimizer step's gradient: the two passes over a window, and the loss between them."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.profiler import record_function
from transformers.utils import logging

from ..checkpoints.record import RunRecord
from ..encoders.image_size import OtherSizes, resized
from ..encoders.patch_dropout import PatchDropout
from ..encoders.sharding import failures_announced_unless_sharded
from ..encoders.tower_gradients import TowerGradients
from ..loss import OBJECTIVES
from ..loss.cuda_graphs import forget_recordings
from ..passes.grad_cache import CachedWindow, Features
from ..passes.graph_budget import GraphBudget
from ..passes.offload import Fetcher
from ..passes.wrappers import is_compiled, wrapper_of
from ..processes.collectives import Processes
from ..processes.phases import Phases
from .gradient_noise import GradientNoise
from .nonfinite import finite_rows
from .number_checks import NumberChecks, RowsOfDataset
from .setup import Setup
from .skipping import SkippedWindows
from .start import squared_distance
from .window import MicroBatch, Window, positive_cosines, window_loss

logger = logging.get_logger(__name__)


class WindowStep:
    """Computes the gradient of one window after the other, for as long as a training lasts.

    Args:
        setup: of the training.
        model: its model as the training loop calls it, wrapped and compiled.
        record: that of the checkpoint that the training resumes from, if any.
        prepare_inputs: moves a batch to the device.
        rows_of_dataset: as for `NumberChecks`.
        roll_back: restores the last checkpoint, for the reason that it is given.
        phases: learns what this process is doing.
        steps: the optimizer steps of the whole training, of which ``full_tokens_last`` is a share; 0 before it begins.

    Attributes:
        windows: the number that was trained.
        skipped: decides which windows are not trained, and counts them.
        checks: look at the loss and the gradient of each window.
        noise: measures the gradient noise scale, if ``gradient_noise_steps`` asks for it.
        graph_budget: decides for how many micro-batches the graph is kept.
    """

    def __init__(
        self,
        setup: Setup,
        model: nn.Module,
        record: RunRecord | None = None,
        *,
        prepare_inputs: Callable[[dict[str, Any]], dict[str, Any]],
        rows_of_dataset: RowsOfDataset,
        roll_back: Callable[[str], None],
        phases: Phases,
        steps: int = 0,
    ) -> None:
        encoder, args = setup.encoder, setup.args
        self.skipped = SkippedWindows(args.skip_nonfinite, args.divergence_factor, record)
        self.checks = NumberChecks(
            self.skipped,
            encoder,
            setup.accelerator,
            rolls_back=args.on_divergence == "roll_back",
            rows_of_dataset=rows_of_dataset,
        )
        self.windows = 0
        self._encoder, self._accelerator, self._args = encoder, setup.accelerator, args
        self._objective = setup.objective
        self._loss_options: dict[str, Any] = {
            **{"rank": args.process_index, "equal_ids": setup.equal_ids, "objective": setup.objective},
            **{"strategy": args.strategy, "backend": args.backend, "replay_as": args.replay_as},
            "in_bf16": setup.accelerator.mixed_precision == "bf16",  # accelerate returns fp32 from an autocast forward
        }
        self._prepare_inputs, self._roll_back = prepare_inputs, roll_back
        self._phases = phases
        self._compiled = is_compiled(model)
        self._wrapper = wrapper_of(model)
        if args.ddp_broadcast_buffers is None:
            # Buffers that never change need no exchange, and a process that fails before it would block the others.
            self._wrapper.broadcast_buffers(bool(encoder.batch_norms()))
        if args.freeze_layers is not None:
            encoder.stop_gradients_at_frozen_layers()
        self.graph_budget = self._new_budget()
        self._patches: PatchDropout | None = None  # from the first window on, as well
        self._other_sizes: list[OtherSizes] = []
        self._sizes = args.image_sizes(steps)
        self._tokens: tuple[float, int | None] = 0.0, None  # of the last window: patches dropped, size of its images
        self._batch: list[int] | None = None  # the images of its micro-batches
        self._full_from = steps - math.ceil((args.full_tokens_last or 0.0) * steps)
        self._fetcher = Fetcher(args.device) if args.offload_inputs else None
        self._tower_gradients = TowerGradients(encoder)
        self.noise: GradientNoise | None = None
        if args.gradient_noise_steps is not None:
            temperature = [id(parameter) for parameter in encoder.temperature_parameters]
            of_towers = [p for p in encoder.model.parameters() if id(p) not in temperature]
            self.noise = GradientNoise(of_towers, args.gradient_noise_steps)
        self._start = setup.start if args.keep_features else None
        self._kept: Tensor | None = None  # this process's part of keep_features' term in the last window
        self._positive_cosines: Tensor | None = None  # of the last window
        self._losses: list[Tensor] = []  # its parts, see `Window`
        self._has_warned_of_zero = False
        self._largest_scale = args.max_logit_scale
        if self._largest_scale is None:
            self._largest_scale = OBJECTIVES[setup.objective].largest_scale
            if steps:
                self._warn_of_lower_scale()

    def _warn_of_lower_scale(self) -> None:
        """Warns if the default of ``max_logit_scale`` lowers the scale of the model in the first step."""
        scale, limit = self._encoder.scale_and_bias()[0].item(), self._largest_scale
        trains = self._encoder.temperature_parameters[0].requires_grad
        if trains and limit is not None and scale > 1.001 * limit:  # CLIP's checkpoints are at 100, but for rounding
            logger.warning(
                f"The logit_scale of the model is {scale:.4g}, and the first step lowers it to {limit:g}, the default "
                f"of max_logit_scale. To keep it, pass max_logit_scale={math.ceil(scale)}."
            )

    def run(self, model: nn.Module, window: Window, step: int) -> Tensor:
        """Adds the gradient of the next micro-batch of a window; with its first one, also runs first pass and loss.

        Args:
            model: as the training loop calls it.
            window: the window; call this once for each of its micro-batches.
            step: the number of trained optimizer steps.

        Returns:
            The global loss for the last micro-batch of a window and 0 for the others. If the window is skipped, the
            loss of the last trained window.
        """
        index, last = window.advance()
        if index == 0:
            model.train()  # once, as the mode must be the same in both passes
            self._encoder.eval_frozen_parts()
            self._set_tokens(step)
            self._set_batch(window)
            if self.noise is not None:
                self.noise.begin_window(window.sizes[0][0], len(window), self._args.world_size, step)
            self._wrapper.begin_window()
            self.checks.begin_window(model)
        with self._wrapper.gradient_sync(last):
            # ---- First pass and loss: the whole window, with its first micro-batch ----
            if index == 0:
                self._phases.enter("the first pass", step)
                window.cached = self._first_pass(model, window, step)
                self._phases.enter("the second pass", step)
            assert window.cached is not None
            loss = window.cached.loss.float()
            # ---- Second pass: this micro-batch ----
            if not self.skipped.skipping:
                with record_function("infcl: second pass"):
                    surrogate = window.cached.surrogate(index)
                    if surrogate is not None:
                        self._accelerator.backward(surrogate, **self._wrapper.backward_options)
                if self.noise is not None and self.noise.measures and index == 0:
                    self.noise.after_first(self._gradient_scale)
                self.checks.check_gradient(model, window.cached, window, step, last=last)
        # ---- Memory ----
        window.release(index)
        every = self._args.torch_empty_cache_steps
        if every is not None and step % every == 0:
            clear_device_cache()
        if index == 0 or last:
            self._collect_after_compiling()
        if not last:
            return torch.zeros_like(loss)
        # ---- The end of the window ----
        window.cached = None
        if self.skipped.skipping:
            self.checks.prepare_skip(model)
            return torch.full_like(loss, self.skipped.last_loss)
        if self.windows == 0:
            self._wrapper.check_gradients()
        self.windows += 1
        self._tower_gradients.measure(self._gradient_scale)
        if self.noise is not None and self.noise.measures:
            self.noise.after_last(self._gradient_scale)
        return loss

    def run_whole(self, model: nn.Module, window: Window, step: int) -> Tensor:
        """`run` for each micro-batch of a window that Trainer's loop takes for one batch; returns the global loss."""
        # What Trainer's loop does around each micro-batch.
        for _ in range(len(window) - 1):
            with self._accelerator.no_sync(model=model):
                self._accelerator.gradient_state._set_sync_gradients(False)
                self.run(model, window, step)
        self._accelerator.gradient_state._set_sync_gradients(True)
        return self.run(model, window, step)

    @property
    def _gradient_scale(self) -> float:
        """The scale of fp16's gradients."""
        scaler = self._accelerator.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def _new_budget(self) -> GraphBudget:
        retain = self._args.retain_graphs
        return GraphBudget(None if retain == "auto" else int(retain), self._args.device)

    def _set_tokens(self, step: int) -> None:
        """Sets the share of the patches that the window of this step drops, and the size of its images."""
        args = self._args
        share = args.patch_dropout or 0.0 if step < self._full_from or not args.full_tokens_last else 0.0
        size = None if self._sizes is None else self._sizes.at(step)
        if args.patch_dropout and self._patches is None:
            self._patches = PatchDropout(self._encoder, share)
        elif self._patches is not None:
            self._patches.share = share
        if self._sizes is not None and not self._other_sizes:
            of_start = None if self._start is None else self._start.encoder
            self._other_sizes = [OtherSizes(encoder) for encoder in (self._encoder, of_start) if encoder is not None]
        if self._tokens != (share, size):
            self._tokens = share, size
            self.graph_budget = self._new_budget()  # a graph takes another amount of memory now

    def _set_batch(self, window: Window) -> None:
        """Lets go of the memory of smaller global batches, and plans the kept graphs anew."""
        batch = window.sizes[0]
        if self._args.global_batch_schedule is not None and self._batch not in (None, batch):
            self.graph_budget = self._new_budget()
            forget_recordings()
            clear_device_cache()
        self._batch = list(batch)

    def close(self) -> None:
        """Leaves the model as it was before the training, but for its weights."""
        for hook in (self._patches, *self._other_sizes):
            if hook is not None:
                hook.remove()
        self._patches, self._other_sizes = None, []

    def _first_pass(self, model: nn.Module, window: Window, step: int) -> CachedWindow:
        """Encodes the window and evaluates its loss, on every process at once."""
        micro_batches = [MicroBatch(batch) for batch in window.batches]
        cached = CachedWindow(
            partial(self._encode, model, window),
            micro_batches,
            device=self._args.device,
            retain=self.graph_budget.graphs(self._wrapper.most_graphs(len(window))),
            keep_grad_mode=self._compiled,
            buffers=model.buffers(),
        )
        if self._fetcher is not None:
            window.fetch(self._fetcher, cached.order)
        # The other processes learn of an error here when they exchange the inputs of the loss.
        with failures_announced_unless_sharded(self._accelerator), record_function("infcl: first pass"):
            features = window.in_order(cached.encode())
        finite, cosines = finite_rows(features), positive_cosines(window, features)
        del features  # they take the memory of the whole window
        with record_function("infcl: loss"):
            at_start = tuple(map(torch.cat, zip(*(micro_batch.at_start for micro_batch in micro_batches), strict=True)))
            loss = cached.evaluate(partial(self._loss, window, at_start), lambda: self._encoder.temperature_parameters)
        # Before anything has been changed.
        if reason := self.checks.check_loss(loss, finite, window, step):
            self._roll_back(reason)
        if not self.skipped.skipping:
            self._positive_cosines, self._losses = cosines, window.losses
        return cached

    def _encode(self, model: nn.Module, window: Window, micro_batch: MicroBatch) -> Features:
        self._phases.note_progress()
        if window.encoded == 1:
            self._collect_after_compiling()
        inputs = self._prepare_inputs(window.inputs(micro_batch))
        if self.windows == 0:
            self._encoder.check_texts(inputs)
        if (size := self._tokens[1]) is not None:
            inputs = {**inputs, "pixel_values": resized(inputs["pixel_values"], size)}
        changes = size is not None or self._args.global_batch_schedule is not None
        if self._compiled and changes and "pixel_values" in inputs:  # for each size, rather than once for all
            torch._dynamo.mark_static(inputs["pixel_values"])
        # Leaving out a tower would trigger another compilation of a compiled model.
        frozen_outputs = None if self._compiled else micro_batch.frozen_outputs
        embeds = self._encoder.embed(model, inputs, frozen_outputs)
        if self._start is not None and not micro_batch.at_start:  # in the first pass
            cached = (inputs["start_images"], inputs["start_texts"]) if "start_images" in inputs else None
            micro_batch.at_start = cached or self._start.embed(inputs, frozen_outputs or {})
        # DeepSpeed's fp16 has no autocast that returns fp32.
        return tuple(e.float() if e.dtype == torch.float16 else e for e in embeds)

    def _loss(self, window: Window, at_start: Features, features: Features, parameters: tuple[Tensor, ...]) -> Tensor:
        """The contrastive loss; its gradient is that of the sum with the term of ``keep_features``, logged apart."""
        in_order = window.in_order(features)
        loss = window_loss(window, in_order, *self._encoder.scale_and_bias(parameters), **self._loss_options)
        if self._args.keep_features is None or not at_start:
            return loss
        term = self._args.keep_features * squared_distance(features, at_start)
        self._kept = term.detach()
        return loss + (term - self._kept)

    def _collect_after_compiling(self) -> None:
        """Frees activations in the first window of a compiled model.

        Compilation leaves reference cycles that hold the activations of a micro-batch, so the window would hold the
        activations of two micro-batches. This is called after the first forward, the first backward and the last one.
        """
        if self._compiled and self.windows == 0:
            gc.collect()

    def before_optimizer_step(self, optimizer: Any, step: int) -> None:
        """Lets the optimizer update nothing if the window is skipped."""
        self._phases.enter("the optimizer's step", step)
        self.checks.before_optimizer_step(optimizer)

    def after_optimizer_step(self, optimizer: Any) -> None:
        """Counts the window after the optimizer's step, and keeps logit_scale between 1 and its largest value."""
        self.checks.after_optimizer_step(optimizer)
        scale = self._encoder.temperature_parameters[0]
        if self._largest_scale is not None and scale.requires_grad:
            self._wrapper.change(scale, partial(self._encoder.clamp_temperature, maximum=self._largest_scale))

    def logs(self, logs: dict[str, float]) -> dict[str, float]:
        """The metrics of the last windows; collective. Warns once of a loss and a gradient that are exactly 0.

        These are logit_scale, the multiplier, and logit_bias, if any; positive_cosine, the mean cosine of the positives
        of the last global batch, and with replay also that of its new and of its old pairs; with ``replay_as="own"``
        the losses of both; keep_features_loss, the term of ``keep_features``, if any, which the loss does not
        contain; gradient_noise_scale, see `GradientNoise`; grad_norm_image and grad_norm_text, the gradient norms of
        the towers in the last step
        before clipping (not under DeepSpeed); and skipped_windows, the number since the run began, if any.

        Args:
            logs: Trainer's, with ``loss`` and ``grad_norm``.
        """
        found = self._tower_gradients.logs()
        if self.noise is not None:
            found |= self.noise.logs()
        if (cosines := self._positive_cosines) is not None:
            sums, counts = Processes().sum(cosines)
            names = ("positive_cosine", "new_positive_cosine", "replay_positive_cosine")
            found |= dict(zip(names, (sums / counts).tolist(), strict=False))
        found |= {name: loss.item() for name, loss in zip(("new_loss", "replay_loss"), self._losses, strict=False)}
        if self._kept is not None:
            found["keep_features_loss"] = Processes().sum(self._kept).item() / Processes().world_size
        scale, bias = self._encoder.scale_and_bias()
        found["logit_scale"] = scale.item()
        if bias is not None:
            found["logit_bias"] = bias.item()
        if logs["loss"] == logs.get("grad_norm") == 0 and not self.skipped.skipping and not self._has_warned_of_zero:
            self._has_warned_of_zero = True
            logger.warning(
                "The loss and its gradient are exactly 0, so the model learns nothing. Either the pairs of a global "
                "batch have no negatives, as with a single pair or with equal pair_ids, or the model tells them apart "
                "so well that the loss rounds to 0."
            )
        return {**found, **self.skipped.logs()}
