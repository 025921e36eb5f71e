"""One optimizer step's gradient: the two passes over a window, and the loss between them.

`WindowStep.run` is the whole step, from the inputs of a window to the gradient of every parameter.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.profiler import record_function
from transformers.utils import logging

from ..loss import OBJECTIVES
from ..models.dual_encoder import NO_TEXTS, images_of
from ..options.declaring import CHECKPOINTING
from ..options.record import RunRecord
from ..processes.collectives import Processes, failures_announced
from ..processes.signals import Phases
from . import extensions
from .checks import NumberChecks, asked_for_loss, check_own_loss, finite_rows
from .compilation import LAYERS, MODEL, LayerCompilation
from .extensions import NO_ROWS, Extension, LossTerm, PairSelection, StepChange, StepObserver, of_kind, term_parameters
from .grad_cache import CachedWindow, Features, Fetcher, GraphBudget, undone
from .recording import StepRecording
from .terms import Context, DroppedPatches, KeptFeatures, PositiveCosines, TowerNorms, loss_of_window
from .window import MicroBatch, Window, contents
from .wrappers import DDP, Wrapper, make_wrapper

logger = logging.get_logger(__name__)


class WindowStep:
    """Computes the gradient of one window after the other, for as long as a training lasts.

    Args:
        model: its model as the training loop calls it, wrapped and compiled.
        steps: of the whole training; 0 before it begins.
    """

    def __init__(
        self, context: Context, model: nn.Module, record: RunRecord | None = None, *, phases: Phases, steps: int = 0
    ) -> None:
        args = context.args
        self.windows, self._asks = 0, False  # that were trained; whether the next forward is asked for its loss
        encoder, start = context.encoder, context.start
        own: list[Extension] = [DroppedPatches(encoder, args.patch_dropout)] if args.patch_dropout else []
        if start is not None and args.keep_features:
            own.append(KeptFeatures(start, context.accelerator, args.keep_features))
        self.extensions = [*own, TowerNorms(encoder), PositiveCosines(), *context.extensions]
        extensions.check_names(self.extensions)
        self._changes, self._selections = of_kind(self.extensions, StepChange), of_kind(self.extensions, PairSelection)
        self._terms, self._observers = of_kind(self.extensions, LossTerm), of_kind(self.extensions, StepObserver)
        self._term_values: dict[str, Tensor] = {}  # of the last trained window
        # Whether processes wait for each other where nothing but an extension that others wrote can have failed.
        self._awaits_observers = args.world_size > 1 and bool(of_kind(context.extensions, StepObserver))
        # Whether a step that runs out of memory can be repeated in any of its parts: not if the wrapper exchanges
        # parameters within a forward or a backward.
        self.repeats = not context.accelerator.is_fsdp2
        # Whether the present step can, if memory runs out on this process. It cannot within a selection, which
        # remembers what it has seen, nor, among several processes, within the loss and the backward of the last
        # micro-batch, where other processes wait for what this one sends.
        self.may_repeat = self.repeats
        self._together = False  # whether all processes repeat the present step if memory runs out on one of them
        self.wrapper = make_wrapper(model)
        self.compilation = LayerCompilation(context, record, self.wrapper, steps)
        self.graphs = GraphBudget(args.retain_graphs, args.device)
        alone = type(self.wrapper) is Wrapper and self.compilation.decided is None
        self.recording = StepRecording(context, wanted=alone and steps > 0)
        self._fetcher = Fetcher(args.device) if args.offload_inputs else None
        self.term_parameters = term_parameters(self.extensions)  # what trains beside the model
        self.checks = NumberChecks(context, record, self.term_parameters)
        self.context, self._phases, self._model = context, phases, model
        self._resumes = record is not None and isinstance(self.wrapper, DDP) and args.world_size > 2
        if isinstance(self.wrapper, DDP) and args.ddp_broadcast_buffers is None:
            # Buffers that never change need no exchange, and a process that fails before it would block the others.
            self.wrapper.model.broadcast_buffers = bool(encoder.batch_norms())
        if not any((getattr(args, f"{name}_kwargs", None) or {}).get("use_reentrant") for name in CHECKPOINTING):
            encoder.stop_gradients_at_frozen_layers()
        self._largest_scale = _largest_scale(context, warns=steps > 0)
        self._scale = 1.0  # of the gradients of the last step, by the scaler of fp16
        self._first_pass: tuple[Any, Any] = 0.0, 0.0  # when that of the last step began and ended

    # ---- The step ----

    def run(self, window: Window, step: int) -> Tensor:
        """Adds the gradient of a window to that of the parameters.

        Returns:
            The global loss; if the window is skipped, that of the last trained window.
        """
        encoder, accelerator, args = self.context.encoder, self.context.accelerator, self.context.args
        checks, wrapper, count = self.checks, self.wrapper, len(window)
        self._together = self.repeats and bool(window.loaded) and args.world_size > 1
        self.may_repeat = self.repeats
        checks.begin_window(wrapper)
        wrapper.train()  # once, as the mode must be the same in both passes
        encoder.eval_frozen_parts()
        with self._announced():
            for extension in self.extensions:
                extension.begin_window(window, step)
        wrapper.begin_window()
        if self.windows == 0 and self._resumes:
            self._order_buckets(window)
        # ---- First pass: the features of all micro-batches ----
        self._phases.enter("the first pass", step)
        micro_batches, self._forwards = [MicroBatch() for _ in window.batches], 0
        passes = CachedWindow(
            lambda micro_batch: self._encode(micro_batch, arriving, alone=count == 1),
            micro_batches,
            device=args.device,
            retain=self.graphs.graphs(wrapper.most_graphs(count)),
            keep_grad_mode=self.compilation.decided in (LAYERS, MODEL),
            alike=True,
            buffers=wrapper.buffers(),
        )
        loaded = (window.batches[index] for index in passes.order)  # as both passes encode them
        arriving = loaded if self._fetcher is None else self._fetcher.fetch(loaded)
        with wrapper.gradient_sync(count == 1):
            # The other processes learn of an error here when they exchange the inputs of the loss.
            with self._announced(), record_function("infcl: first pass"):
                for batch in window.batches if self.windows == 0 else ():
                    encoder.check_texts(batch)
                if self.windows == 0 and encoder.has_own_forward:
                    # The same forwards tell it, except those of a compiled model and of FSDP, which change with it.
                    alone = self.compilation.decided == MODEL or not self.repeats
                    self._asks = not alone and any(images == texts for images, texts in zip(*window.sizes, strict=True))
                    if not self._asks:
                        check_own_loss(self.context, window.batches[0])
                began = self._now()
                encoded = passes.encode()
                self._first_pass = began, self._now()
                rows, expected = list(map(len, encoded)), list(map(sum, window.sizes))
                if rows != expected:
                    raise ValueError(
                        f"The step has {expected[0]} images and {expected[1]} texts, but {rows[0]} and {rows[1]} "
                        "embeddings. The model, and what changes its inputs, must keep every row."
                    )
                features = window.in_order(encoded)
                for observer in self._observers:
                    observer.after_first_pass(window, features)
            checks.finite_rows = finite_rows(features)
            # ---- Selection: the pairs of which the contrastive loss is computed ----
            if self._selections and not window.is_selected:
                Processes().agree([])  # where an error of the first pass of another process arrives
                self.may_repeat = False
                with self._announced():
                    window.selected, window.is_selected = self._select(window, features), True
            del encoded, features  # they take the memory of the whole window
            # ---- The terms and the contrastive loss, and the gradient of the features ----
            self.may_repeat = self.repeats
            with record_function("infcl: loss"):
                loss_of = partial(self._loss_and_terms, window, micro_batches)
                loss = passes.differentiate(loss_of, lambda: encoder.temperature_parameters, self.term_parameters)
        self._scale = scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
        # No wrapper averages these over the processes, and no backward scales them as fp16 needs it.
        for parameter, gradient in zip(self.term_parameters, passes.other_gradients, strict=True):
            parameter.grad = Processes().sum(gradient) * (scale / args.world_size)
        # ---- Second pass: one micro-batch after the other, with the gradient of its features ----
        self._phases.enter("the second pass", step)
        self.may_repeat = self.repeats
        every = args.torch_empty_cache_steps
        for index in range(count):
            last = index == count - 1
            if last and (self._together or self._awaits_observers):
                Processes().agree([])  # where a lack of memory, or an observer's error, on another process arrives
                self.may_repeat = False
            watched = self._announced if self._together and not last else nullcontext
            with watched(), wrapper.gradient_sync(last), record_function("infcl: second pass"):
                if (surrogate := passes.surrogate(index)) is not None:
                    accelerator.backward(surrogate)
                del surrogate  # and its graph
            with self._announced():
                for observer in self._observers:
                    observer.after_backward(index, scale)
            with watched():
                checks.check(passes, window, step, last=last)
            window.release(index)
            if every is not None and step % every == 0:
                clear_device_cache()
            if index in (0, count - 1):
                self._collect_after_compiling()
        # ---- The end of the window ----
        if checks.skipping:
            if accelerator.scaler is not None:  # which then skips the step, for which there are no gradients
                first = next(p for p in wrapper.parameters() if p.requires_grad)
                first.grad = torch.full_like(first, math.inf)
            return torch.full_like(loss, checks.last_loss, dtype=torch.float32)
        if self.windows == 0:
            wrapper.check_gradients()
        self.windows += 1
        self._term_values = window.term_values
        self.graphs.end_window()
        with self._announced():
            for observer in self._observers:
                observer.end_window(window, scale)
        if self._awaits_observers:
            Processes().agree([])  # where an error of another process arrives, before anything else is exchanged
        return loss.float()

    def _order_buckets(self, window: Window) -> None:
        """Lets DDP order its buckets before a resumed training, as it does after its first backward.

        The sum of three processes or more depends on the place of a gradient in its bucket, so that the first step
        would not equal that of an uninterrupted training. The gradients of this backward are dropped.
        """
        self._forwards, parameters = 0, self.context.encoder.temperature_parameters
        with undone(self.wrapper, self.context.args.device), self.wrapper.gradient_sync(True):
            features = self._encode(MicroBatch(), iter([dict(window.batches[-1])]), alone=False)
            total = torch.stack([one.float().sum() for one in (*features, *parameters)]).sum()
            if total.requires_grad:
                self.context.accelerator.backward(total)
        self.wrapper.begin_window()

    def _now(self) -> Any:
        """A moment of the device, which on a GPU may be later than on the host."""
        if self.context.args.device.type != "cuda":
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def seconds_of_first_pass(self) -> float:
        """How long this process computed in the last step before it needed others; 0 under FSDP, which always does."""
        began, ended = self._first_pass
        if not self.repeats:
            return 0.0
        if isinstance(began, float):
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    def _announced(self) -> AbstractContextManager[None]:
        """Announces errors, except under FSDP, where the other processes may be waiting within the same forward."""
        return failures_announced(repeats=self._together and self.may_repeat) if self.repeats else nullcontext()

    def _encode(self, micro_batch: MicroBatch, arriving: Iterator[dict[str, Any]], alone: bool) -> Features:
        """Image and text embeddings of a micro-batch, [images, D] and [texts, D], normalised; in both passes."""
        self._phases.note_progress()
        self._forwards += 1
        if self._forwards == 2:
            self._collect_after_compiling()
        loaded = next(arriving)
        before, inputs = contents(loaded), self.context.prepare_inputs(loaded)
        for change in self._changes:
            inputs = change.inputs(inputs)
        if contents(loaded) != before:
            raise ValueError(
                "_prepare_inputs or a StepChange has changed a batch in place, but makes it twice. Return a new one."
            )
        # Leaving out a tower would trigger another compilation of a whole model.
        frozen_outputs = None if self.compilation.decided == MODEL else micro_batch.frozen_outputs
        forward: Callable[..., object] = self._model
        if self._asks and len(images_of(inputs)) == len(inputs["input_ids"]) and not inputs.get(NO_TEXTS):
            forward, self._asks = asked_for_loss(self.context, self._model), False
        encode = self.recording.encode if alone and forward is self._model else self.context.encoder.embed
        embeds: Features = encode(forward, inputs, frozen_outputs)
        if not micro_batch.references:  # in the first pass
            micro_batch.references = [term.reference(inputs, frozen_outputs or {}) for term in self._terms]
        return embeds

    def _collect_after_compiling(self) -> None:
        """Frees activations in the first two windows of a compiled model; the window of a trial counts as the second.

        Compilation leaves reference cycles that hold the activations of a micro-batch, so the window would hold the
        activations of two micro-batches. This is called after the first forward, the first backward and the last one.
        """
        if self.windows < 2 and self.compilation.decided in (LAYERS, MODEL):
            gc.collect()

    @torch.no_grad()
    def _select(self, window: Window, features: Features) -> Tensor | None:
        selected: Tensor | None = None
        for selection in self._selections:
            chosen = selection.select(window, features, *self.context.encoder.scale_and_bias())
            if chosen is not None:
                extensions.check_mask(selection, "select", chosen, len(features[0]))
                selected = chosen if selected is None else selected & chosen
        if selected is not None and not selected.any():
            names = ", ".join(selection.name for selection in self._selections)
            raise ValueError(
                f"None of the {sum(window.sizes[0])} pairs that this process has of the step is left to be trained: "
                f"the selection ({names}) has left them all out. Every process needs one at least."
            )
        return selected

    def _loss_and_terms(
        self, window: Window, micro_batches: Sequence[MicroBatch], features: Features, parameters: tuple[Tensor, ...]
    ) -> Tensor:
        """A scalar with the value of the contrastive loss, and the gradient of its weighted sum with the terms."""
        temperature, in_order = self.context.encoder.scale_and_bias(parameters), window.in_order(features)
        values = []
        # The other processes learn of an error here when they exchange the inputs of the loss.
        with self._announced():
            for term, *of_micro_batches in zip(self._terms, *(m.references for m in micro_batches), strict=True):
                given = in_order if term.in_order else features
                values.append(extensions.value_of_term(term, given, of_micro_batches))
        self.may_repeat = self.repeats and self.context.args.world_size == 1
        loss = loss_of_window(self.context, window, in_order, *temperature)
        if (weight := self.context.args.contrastive_weight) != 1:
            loss = loss.detach() + weight * (loss - loss.detach())
        for term, value in zip(self._terms, values, strict=True):
            mean = Processes().sum(value.detach()) / self.context.args.world_size
            window.term_values[term.name] = mean
            # All processes have to see it if the term of one is not finite.
            loss = loss + (value - value.detach()) + (mean - mean)
        return loss

    # ---- Around the step ----

    def skipped_rows(self, epoch: int) -> Tensor:
        """The rows of the training set that this epoch, which begins or goes on, does without; see `PairSelection`."""
        for selection in self._selections:
            if len(rows := selection.skipped_rows(epoch)):
                extensions.check_mask(selection, "skipped_rows", rows, self.context.rows or 0)
                return rows
        return NO_ROWS

    def before_optimizer_step(self, optimizer: AcceleratedOptimizer, step: int) -> None:
        """Keeps the optimizer and Trainer's schedule where they are if the window is skipped."""
        self._phases.enter("the optimizer's step", step)
        accelerator, skipping = self.context.accelerator, self.checks.skipping
        if accelerator.scaler is None:
            # accelerate's optimizer takes no step between two synchronisations of the gradient.
            accelerator.gradient_state._set_sync_gradients(not skipping)
            optimizer._is_overflow = skipping  # Trainer then leaves the schedule as it is

    def after_optimizer_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Counts the window as trained, or as skipped, and keeps logit_scale between 1 and its largest value."""
        encoder, accelerator = self.context.encoder, self.context.accelerator
        accelerator.gradient_state._set_sync_gradients(True)
        scale = math.inf
        if accelerator.scaler is not None:
            # A fused optimizer skips the step in its kernel, which accelerate does not see. The scale falls then.
            scale = accelerator.scaler.get_scale()
            optimizer._is_overflow = scale < self._scale
        if not self.checks.skipping:
            self.checks.end_window(scale if accelerator.optimizer_step_was_skipped else None)
        if self._largest_scale is not None and encoder.temperature_parameters[0].requires_grad:
            encoder.clamp_temperature(self._largest_scale)

    def logs(self, logs: dict[str, float]) -> dict[str, float]:
        """The logs of extensions and checks, which read Trainer's; terms, logit_scale and bias; collective."""
        metrics: dict[str, float] = {}
        for extension in self.extensions:
            with self._announced():
                metrics |= {name: float(value) for name, value in extension.logs().items()}  # JSON has no tensors
            if extension in self.context.extensions:
                Processes().agree([])  # as at the end of a window
        metrics |= {f"{name}_loss": mean.item() for name, mean in self._term_values.items()}
        scale, bias = self.context.encoder.scale_and_bias()
        metrics |= {"logit_scale": scale.item()} | ({} if bias is None else {"logit_bias": bias.item()})
        return metrics | self.checks.logs(logs)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The states of the extensions that have one, by their names; collective."""
        return {one.name: state for one in self.extensions if (state := extensions.checked_state(one))}

    def load_state_dict(self, states: Mapping[str, Mapping[str, object]]) -> None:
        """Lets the extensions go on from states of `state_dict`; those without one begin anew."""
        for extension in self.extensions:
            if extension.name in states:
                extension.load_state_dict(states[extension.name])

    def close(self) -> None:
        """Leaves the model as it was before the training, but for its weights."""
        for extension in self.extensions:
            extension.close()
        self.recording.stop()


def _largest_scale(context: Context, *, warns: bool) -> float | None:
    """The largest multiplier of the cosines: ``max_logit_scale``, or by default that of the objective, if it has one.

    It ``warns`` if the default lowers the multiplier of the model in the first step.
    """
    if context.args.max_logit_scale is not None:
        return context.args.max_logit_scale
    limit = OBJECTIVES[context.objective].largest_scale
    if warns and limit is not None and context.encoder.temperature_parameters[0].requires_grad:
        scale = context.encoder.scale_and_bias()[0].item()
        if scale > 1.001 * limit:  # CLIP's checkpoints are at 100, but for rounding
            logger.warning(
                f"The logit_scale of the model is {scale:.4g}, and the first step lowers it to {limit:g}, the default "
                f"of max_logit_scale. To keep it, pass max_logit_scale={math.ceil(scale)}."
            )
    return limit
