"""Replays a repeated computation as a CUDA graph, for kernels that take longer to launch than to run."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

Tensors = tuple[Tensor | None, ...]

PATIENCE = 2  # calls before one is recorded: evaluations come in many sizes, a training in one
KEPT = 2  # recordings at a time, each with the memory of its computation

_logger = logging.getLogger(__name__)
_lock = threading.Lock()  # a recording's inputs are written and then read by its replay


def run(name: Hashable, function: Callable[..., Tensors], *tensors: Tensor | None) -> Tensors:
    """Computes ``function(*tensors)``; from the third call with the same name and shapes on it replays a recording.

    Args:
        name: says what the function computes; functions of the same name are taken for the same.
        function: launches the same kernels whenever shapes are the same, and does nothing else: no random numbers, no
            waiting for the device, no collectives.
        tensors: on one CUDA device, the first not None.

    Returns:
        What the function returns, in memory of its own.
    """
    if torch.cuda.is_current_stream_capturing():  # the kernels become a part of the caller's graph
        return function(*tensors)
    with _lock, torch.cuda.device_of(tensors[0]):
        shapes = tuple(None if t is None else (t.shape, t.dtype) for t in tensors)
        state = (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.matmul.fp32_precision,
            torch.is_inference_mode_enabled(),
        )
        return _recording(name, shapes, state, torch.cuda.current_stream())(function, tensors)


@functools.lru_cache(KEPT)
def _recording(*key: Hashable) -> _Recording:
    return _Recording()


class _Recording:
    def __init__(self) -> None:
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Tensors = ()
        self._outputs: Tensors = ()

    def __call__(self, function: Callable[..., Tensors], tensors: Tensors) -> Tensors:
        self._calls += 1
        if self._calls == PATIENCE + 1:
            try:
                self._record(function, tensors)
            except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
                # Without a recording, less memory is enough. Any other error will occur again.
                _logger.warning("A small loss is not replayed as a CUDA graph: %s", error)
                self._inputs = self._outputs = ()
        if self._graph is None:
            return function(*tensors)
        self._fill(tensors)
        self._graph.replay()
        return tuple(None if t is None else t.clone() for t in self._outputs)

    def _record(self, function: Callable[..., Tensors], tensors: Tensors) -> None:
        self._inputs = tuple(None if t is None else t.new_empty(t.shape) for t in tensors)
        self._fill(tensors)
        function(*self._inputs)  # compiles kernels for their alignment, which is impossible while recording
        graph = torch.cuda.CUDAGraph()
        # The recording has its own stream, because cuBLAS keeps a workspace per stream. Other threads may go on.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            self._outputs = function(*self._inputs)
        self._graph = graph

    def _fill(self, tensors: Tensors) -> None:
        for own, given in zip(self._inputs, tensors, strict=True):
            if own is not None and given is not None:
                own.copy_(given)
