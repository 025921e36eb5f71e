"""Replays the forward and backward of a small model as CUDA graphs: its kernels take longer to launch than to run.

A step of 1,024 pairs of a CLIP with 7 and 3 layers of width 320 took an H200 44 to 51 ms, depending on its host, and
with compiled layers 48 to 55, although their kernels run for 20 only; replayed, it took 29 to 31.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import CLIPModel, SiglipModel
from transformers.utils import import_utils, logging

from ..loss.cuda_graphs import capturing, choices_of_kernels
from ..models.dual_encoder import IMAGE_FEATURES, IMAGE_INPUTS, NO_MASK, NO_TEXTS, TEXT_INPUTS
from .compilation import may_compile
from .grad_cache import Features, random_state_kept
from .terms import Context
from .wrappers import Wrapper, hooked

PATIENCE = 10  # windows with inputs of the same shapes before they are recorded
KEPT = 2  # the maximum number of recordings; each holds the activations of a micro-batch
SHARE = 1 / 4  # of the device's memory that a training may have taken until it records
_INPUTS = ("pixel_values", "input_ids")
_OTHERS = {*IMAGE_INPUTS, *TEXT_INPUTS, IMAGE_FEATURES, NO_TEXTS} - {*_INPUTS, "attention_mask"}
_KNOWN = ("torch.", "transformers.", "hf_infcl.")  # modules of others may depend on more than their attributes

logger = logging.get_logger(__name__)


class StepRecording:
    """Encodes windows of one micro-batch: those whose shapes come often it records, and from then on replays them.

    It records CLIP and SigLIP on one GPU, with texts that need no attention mask: nothing in their forward waits for
    the device or depends on values. A replay would leave out hooks and gradients of the inputs, so a window that has
    them is computed as it is. Changes that it would not see end the recordings: other modules, modes, rates of dropout,
    and weights that have moved.

    Args:
        wanted: whether the model is neither wrapped nor compiled by others, and trains.
    """

    def __init__(self, context: Context, *, wanted: bool) -> None:
        self._context, encoder = context, context.encoder
        plain = type(encoder.model) in (CLIPModel, SiglipModel) and not encoder.has_own_forward
        self._wanted = wanted and plain and may_compile(context.args)
        self._model = Wrapper(encoder.model)
        self._seen: tuple[list[object], list[object]] = [], []  # in the last window
        self._calls: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, _Recording] = {}

    def encode(
        self, forward: Callable[..., object], batch: Mapping[str, Any], frozen_outputs: dict[str, object] | None
    ) -> Features:
        """Computes what `DualEncoder.embed` does, with a gradient."""
        embed = self._context.encoder.embed
        special = not batch.get(NO_MASK) or any(batch.get(name) is not None for name in _OTHERS)
        if not self._wanted or special:
            return embed(forward, batch, frozen_outputs)
        if not self._is_as_before():
            self._model = Wrapper(self._context.encoder.model)  # whose modules may be others
            self._calls.clear()
            self._recordings.clear()
        tensors = [batch[name] for name in _INPUTS]
        parameters = self._model.parameters()
        watched = hooked(self._model.modules) or any(p._backward_hooks for p in parameters)
        if watched or any(t.requires_grad for t in tensors):
            return embed(forward, batch, frozen_outputs)
        trained = [p for p in parameters if p.requires_grad]
        key = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
        self._calls[key] += 1
        if self._calls[key] == PATIENCE + 1 and len(self._recordings) < KEPT and self._can_record():

            def function(*inputs: Tensor) -> Features:
                named: dict[str, Any] = dict(zip(_INPUTS, inputs, strict=True))
                return embed(forward, named | {NO_MASK: True})

            try:
                with random_state_kept(self._context.args.device):
                    self._recordings[key] = _Recording(function, tensors, trained)
            except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
                self._wanted = False
                logger.warning("The model is not replayed as CUDA graphs: %s", error)
        if key not in self._recordings:
            return embed(forward, batch, frozen_outputs)
        return _Replayed.apply(self._recordings[key], *tensors, *trained)

    def _is_as_before(self) -> bool:
        """Whether all is as in the last window that a recording depends on beside inputs and the values of weights."""
        before, attributes = self._seen, list[object]()
        for module in self._model.modules:  # such as the mode, rates of dropout, and functions in place of the class's
            attributes += (*vars(module)["_modules"].values(), *vars(module).values())
        tensors = (*self._model.parameters(), *self._model.buffers())
        places = [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors]
        self._seen = attributes, [choices_of_kernels(), len(attributes), *places]
        return self._seen[1] == before[1] and all(map(operator.is_, attributes, before[0]))

    def _can_record(self) -> bool:
        """Whether there is memory for a recording, and nothing that it would leave out."""
        device = self._context.args.device
        total = torch.cuda.get_device_properties(device).total_memory
        large = torch.cuda.max_memory_allocated(device) > SHARE * total
        parts = self._model.modules[1:]
        foreign = any(not type(one).__module__.startswith(_KNOWN) or "forward" in vars(one) for one in parts)
        checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in self._model.modules)
        # Buffers such as those of batch norms, which the forwards before the recorded one would change, too.
        counting = any(buffer.is_floating_point() for buffer in self._model.buffers())
        return not (large or foreign or checkpoints or counting or self._context.encoder.frozen_towers())

    def stop(self) -> None:
        """Frees the memory of all recordings, and makes no more."""
        self._wanted = False
        self._recordings.clear()


class _Recording:
    """The CUDA graphs of a function's forward and backward, and the memory that they read and write."""

    def __init__(self, function: Callable[..., Features], inputs: Sequence[Tensor], trained: Sequence[Tensor]) -> None:
        self.inputs = [one.clone() for one in inputs]
        # While recording, some versions of transformers would create masks that they otherwise leave out.
        with patch.object(import_utils, "is_cuda_stream_capturing", lambda: False):
            for _ in range(2):  # kernels are chosen and compiled, which is impossible while recording
                outputs = function(*self.inputs)
                torch.autograd.grad(outputs, trained, [one.detach() for one in outputs], allow_unused=True)
                del outputs
            with capturing() as capture:
                outputs = function(*self.inputs)
                self.output_gradients = [torch.empty_like(one) for one in outputs]
                capture.interrupt()
                self.gradients = torch.autograd.grad(outputs, trained, self.output_gradients, allow_unused=True)
        self.forward, self.backward = capture.graphs
        self.outputs = [one.detach() for one in outputs]


class _Replayed(torch.autograd.Function):
    """A recording as a function of its inputs and of the parameters that get a gradient."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, *tensors: Tensor) -> Features:
        ctx.recording = recording
        for own, tensor in zip(recording.inputs, tensors, strict=False):
            own.copy_(tensor)
        recording.forward.replay()
        return tuple(one.detach() for one in recording.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recording = ctx.recording
        for own, gradient in zip(recording.output_gradients, gradients, strict=True):
            own.copy_(gradient)
        recording.backward.replay()
        # They get memory of their own: a callback may keep them, and the next replay overwrites the recording's.
        found = [None if one is None else one.clone() for one in recording.gradients]
        return None, *(None for _ in recording.inputs), *found
