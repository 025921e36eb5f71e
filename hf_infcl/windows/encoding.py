"""How the step encodes a micro-batch, in both passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..encoders.dual_encoder import DualEncoder
from ..passes.grad_cache import Features
from ..processes.phases import Phases
from .extensions import LossTerm, StepChange
from .memory import WindowMemory
from .terms import OF_TEACHERS
from .window import MicroBatch, Window


class MicroBatchEncoder:
    """Encodes micro-batches with the model as it is wrapped for the training.

    Args:
        encoder: the model, unwrapped.
        prepare_inputs: moves a batch to the device.
        changes: of the inputs.
        terms: whose references are computed in the first pass.
        memory: of the windows.
        phases: learns that this process makes progress.
        compiled: whether the model is compiled.
        resizes: whether the images of different steps have other shapes.
    """

    def __init__(
        self,
        encoder: DualEncoder,
        prepare_inputs: Callable[[dict[str, Any]], dict[str, Any]],
        changes: Sequence[StepChange],
        terms: Sequence[LossTerm],
        memory: WindowMemory,
        phases: Phases,
        *,
        compiled: bool,
        resizes: bool,
    ) -> None:
        self._encoder, self._prepare_inputs = encoder, prepare_inputs
        self._changes, self._terms, self._memory, self._phases = changes, terms, memory, phases
        self._compiled, self._resizes = compiled, resizes

    def encode(self, model: nn.Module, window: Window, micro_batch: MicroBatch) -> Features:
        """Image and text embeddings of a micro-batch, [images, D] and [texts, D], normalised.

        The first time, it also computes what the terms compare them with.
        """
        self._phases.note_progress()
        if window.encoded == 1:
            self._memory.collect_after_compiling()
        inputs = self._prepare_inputs(window.inputs(micro_batch))
        for change in self._changes:
            inputs = change.inputs(inputs)
        if self._compiled and self._resizes and "pixel_values" in inputs:  # for each size, rather than once for all
            torch._dynamo.mark_static(inputs["pixel_values"])
        # Leaving out a tower would trigger another compilation of a compiled model.
        frozen_outputs = None if self._compiled else micro_batch.frozen_outputs
        embeds = self._encoder.embed(model, inputs, frozen_outputs)
        if micro_batch.references is None:
            micro_batch.references = [term.reference(inputs, frozen_outputs or {}) for term in self._terms]
            for name in [name for name in micro_batch.inputs if name.startswith(OF_TEACHERS)]:
                del micro_batch.inputs[name]  # images of another size may take much memory
        # DeepSpeed's fp16 has no autocast that returns fp32.
        return tuple(e.float() if e.dtype == torch.float16 else e for e in embeds)
