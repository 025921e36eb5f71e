"""Tries whether a window fits into memory: both passes and the loss, with the largest shapes, and no update."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from ..encoders.dual_encoder import TEXT_INPUTS
from ..encoders.tower_outputs import other_forward
from ..loss.cuda_graphs import forget_recordings
from ..passes.graph_budget import MARGIN
from ..passes.random_state import random_state_kept
from ..processes.collectives import Processes, alone
from ..processes.phases import Phases
from ..windows.extensions import LossTerm, StepChange, term_parameters
from ..windows.setup import Setup
from ..windows.step import WindowStep
from ..windows.texts import widened
from ..windows.window import Window
from .rows import repeated
from .search import Trial

_STATE = 8  # bytes of an optimizer for each trained parameter: two moments in fp32


def memory_is_known(device: torch.device) -> bool:
    """Whether a window that does not fit into the memory of a device raises an OutOfMemoryError."""
    return device.type == "cuda"


class Trials:
    """Tries windows on this process alone, whatever the other processes do.

    Args:
        batch: one of its data loader, whose rows are repeated.
        pairs: the pairs of a window on this process.

    Attributes:
        pads: whether texts are padded to the longest one of their batch, or all to one length.
    """

    def __init__(self, setup: Setup, batch: Mapping[str, object], *, pairs: int) -> None:
        collator: Any = setup.collator
        self._padding: Mapping[str, int] | None = getattr(collator, "text_padding", None)
        # Other collators may return texts of any length: those of the batch are taken then.
        longest = None if self._padding is None else setup.args.max_text_tokens or getattr(collator, "max_length", None)
        self.pads = self._padding is not None or getattr(collator, "text_options", {}).get("padding") == "max_length"
        self._setup, self._pairs, self._batch = setup, pairs, _with_longest_texts(batch, longest)
        self._grouped, self._fitted = Processes().grouped, True

    def __call__(self, trial: Trial) -> tuple[int, int]:
        """Tries a window.

        Returns:
            The bytes that it takes beside the weights, their gradients and the optimizer, and those that are left.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        setup, device = self._setup, self._setup.args.device
        trained = [p for p in setup.encoder.model.parameters() if p.requires_grad] + term_parameters(setup.extensions)
        buffers = [(buffer, buffer.clone()) for buffer in setup.encoder.model.buffers()]
        if not self._fitted:  # what the error of the trial before held
            release_memory()
        self._fitted = False
        try:
            with random_state_kept(device), alone(), _as_prepared(setup.encoder.model, setup.accelerator):
                memory = self._run(trial)
            self._fitted = True
        finally:
            for parameter in trained:
                parameter.grad = None
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        return memory

    def _run(self, trial: Trial) -> tuple[int, int]:
        args = copy.copy(self._setup.args)
        args.retain_graphs = str(trial.graphs)
        args.skip_nonfinite = 1  # a loss that is not finite is the training's to refuse
        # Those that only look, or keep what they have seen, would take the trial for a step.
        changing = [one for one in self._setup.extensions if isinstance(one, (LossTerm, StepChange))]
        step = WindowStep(
            replace(self._setup, args=args, extensions=changing),
            self._setup.encoder.model,
            rows_of_dataset=lambda places: [],
            phases=Phases(),
        )
        step.windows = 1  # the first one of a training is looked at more closely
        batch = repeated(self._batch, trial.micro_batch)
        count = min(-(-self._pairs // trial.micro_batch), max(trial.graphs, trial.texts) + 1)
        batches = [{name: _copied(value) for name, value in batch.items()} for _ in range(count)]
        device, on_gpu = args.device, args.device.type == "cuda"
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        reserved = torch.empty(self._reserve(trial, batch, count) if on_gpu else 0, dtype=torch.uint8, device=device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            # As a window of the training, which keeps what was loaded.
            window = Window(batches, self._padding, trial.texts, last_has_texts=self._grouped, keeps_loaded=True)
            step.run(self._setup.encoder.model, window, 0)
        finally:
            step.close()
        if not on_gpu:
            return 1, 0
        peak = torch.cuda.max_memory_allocated(device)
        free, _ = torch.cuda.mem_get_info(device)
        return max(1, peak - before - len(reserved)), free + torch.cuda.memory_reserved(device) - peak

    def _reserve(self, trial: Trial, batch: Mapping[str, Tensor], count: int) -> int:
        """The bytes that a step of the training takes beside the trial: optimizer, other inputs, and a margin."""
        args, model = self._setup.args, self._setup.encoder.model
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        of_each = _STATE + (4 if args.world_size > 1 else 0)  # DDP's buckets
        of_inputs = sum(value.nbytes for value in batch.values() if isinstance(value, Tensor))
        loaded = 0 if args.offload_inputs else max(0, self._pairs // trial.micro_batch - count) + 1  # and the next one
        of_features = 4 * self._setup.encoder.width() * (4 * args.global_batch_size + 8 * self._pairs)
        total = torch.cuda.get_device_properties(args.device).total_memory
        return int(trained * of_each + loaded * of_inputs + of_features + MARGIN * total)


def release_memory() -> None:
    """Gives back what a window that did not fit has left."""
    forget_recordings()
    gc.collect()
    clear_device_cache()


def _with_longest_texts(batch: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    """A batch all of whose texts have so many tokens; None for as many as the longest of the batch may have."""
    inputs = dict(batch)
    for name in (name for name in TEXT_INPUTS if name in inputs):
        tokens: Tensor = inputs[name]
        if longest is not None and tokens.shape[1] < longest:
            inputs[name] = widened(tokens, longest, 0)
    if "attention_mask" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    return inputs


def _copied(value: object) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _as_prepared(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """The context in which a model computes in the precision of the training, as accelerate will prepare it."""
    forward = model.forward
    scaler, accelerator.scaler = accelerator.scaler, None

    @functools.wraps(forward)
    def in_precision(*inputs: object, **named: object) -> Any:
        with accelerator.autocast():
            return convert_outputs_to_fp32(forward)(*inputs, **named)

    try:
        with other_forward(model, in_precision):
            yield
    finally:
        accelerator.scaler = scaler
