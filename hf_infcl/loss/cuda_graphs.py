"""Replays a repeated computation as CUDA graphs, for kernels that take longer to launch than to run.

A computation without collectives is one graph. Collectives are not recorded: each one ends a graph, and the next graph
begins after it. A replay runs the collectives between the graphs, on the tensors of the recording. Processes may record
at different times, because recording exchanges nothing and replays run the same collectives as the computation.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor | None, ...]
Collective = Callable[..., Any]

PATIENCE = 2  # calls before the recorded one; each of the many sizes of an evaluation occurs only once or twice
KEPT = 2  # the maximum number of recordings; each holds the memory of its computation

_logger = logging.getLogger(__name__)
_lock = threading.Lock()  # no other thread may overwrite the inputs of a recording before its replay reads them


class Collectives(Protocol):
    """The processes that run the collectives of a computation: `hf_infcl.processes.collectives.Processes`."""

    def perform(self, collective: Collective) -> None:
        """Runs a collective."""

    def redirected(self, instead: Callable[[Collective], None]) -> AbstractContextManager[None]:
        """A context in which collectives are handed to ``instead`` and do not run."""


def run(name: Hashable, exchange: Collectives, function: Callable[..., Tensors], *tensors: Tensor | None) -> Tensors:
    """Computes ``function(*tensors)``; from the third call with the same name and shapes on it replays a recording.

    Args:
        name: identifies what the function computes; functions with equal names must compute the same.
        exchange: runs the collectives of the function.
        function: launches the same kernels and runs the same collectives whenever shapes are the same, and does
            nothing else: no random numbers, no waiting for the device.
        tensors: on one CUDA device; the first is not None.

    Returns:
        The results of the function, in new memory.
    """
    if torch.cuda.is_current_stream_capturing():  # the kernels become part of the caller's graph
        return function(*tensors)
    first = tensors[0]
    assert first is not None
    with _lock, torch.cuda.device_of(first):
        shapes = tuple(None if t is None else (t.shape, t.dtype) for t in tensors)
        state = (*choices_of_kernels(), torch.is_inference_mode_enabled())
        return recording(name, shapes, state, torch.cuda.current_stream(first.device))(exchange, function, tensors)


def choices_of_kernels() -> tuple[object, ...]:
    """The settings by which torch chooses kernels, which a replay would not see."""
    of: Any = torch.backends
    precisions = of.cuda.matmul.fp32_precision, of.cudnn.conv.fp32_precision
    return torch.are_deterministic_algorithms_enabled(), *precisions


@functools.lru_cache(KEPT)
def recording(*key: Hashable) -> Recording:
    """The recording of a computation with these properties; the one that was used longest ago makes room."""
    return Recording()


def forget_recordings() -> None:
    """Frees the memory of all recordings."""
    recording.cache_clear()


class Recording:
    """A computation that is recorded after `PATIENCE` calls and replayed from then on.

    Attributes:
        graphs: what is replayed; empty before it is recorded, and without the memory for it.
        collectives: number i runs after graph i.
    """

    def __init__(self) -> None:
        self._calls = 0
        self.graphs: Sequence[torch.cuda.CUDAGraph] = ()
        self.collectives: Sequence[Collective] = ()
        self._inputs: Tensors = ()
        self._outputs: Tensors = ()

    def __call__(self, exchange: Collectives, function: Callable[..., Tensors], tensors: Tensors) -> Tensors:
        self._calls += 1
        if self._calls == PATIENCE + 1:
            try:
                self.record(exchange, function, tensors)
            except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
                # Without a recording less memory is needed. Any other error will occur again below.
                _logger.warning("A small loss is not replayed as a CUDA graph: %s", error)
                self._inputs = self._outputs = ()
        if not self.graphs:
            return function(*tensors)
        self._fill(tensors)
        for graph, collective in zip_longest(self.graphs, self.collectives):
            graph.replay()
            if collective is not None:
                exchange.perform(collective)
        return tuple(None if t is None else t.clone() for t in self._outputs)

    def record(self, exchange: Collectives, function: Callable[..., Tensors], tensors: Tensors) -> None:
        """Records the computation of ``function(*tensors)``."""
        self._inputs = tuple(None if t is None else t.new_empty(t.shape) for t in tensors)
        self._fill(tensors)
        # This compiles kernels for the alignment of these tensors, which is impossible while recording. It exchanges
        # nothing, because other processes may record at another time. Its results are not used.
        with exchange.redirected(lambda collective: None):
            function(*self._inputs)
        with capturing() as capture, exchange.redirected(capture.interrupt):
            self._outputs = function(*self._inputs)
        self.graphs, self.collectives = capture.graphs, capture.collectives

    def _fill(self, tensors: Tensors) -> None:
        for recorded, tensor in zip(self._inputs, tensors, strict=True):
            if recorded is not None and tensor is not None:
                recorded.copy_(tensor)


@contextmanager
def capturing() -> Iterator[Capture]:
    """A context in which launched kernels are recorded."""
    # torch keeps a workspace of cuBLAS for each stream until all are cleared. Without the first call the graphs could
    # write to one that was freed, since torch.compile clears all when it records graphs of its own. Without the second,
    # one would hold memory of the pool after the recording is forgotten. There is no public function.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with Capture() as capture:
            yield capture
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class Capture:
    """A context that records the kernels launched in it as graphs, with collectives between them.

    The graphs share one memory pool. This is safe because they are only replayed in this order, so the results of one
    graph stay where the following ones read them.
    """

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.collectives: list[Collective] = []
        self._stream = torch.cuda.Stream()
        self._open: torch.cuda.graph | None = None

    def __enter__(self) -> Capture:
        graph = torch.cuda.CUDAGraph()
        pool = self.graphs[0].pool() if self.graphs else None
        # With "thread_local" other threads may use the GPU during the recording.
        capture = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
        capture.__enter__()
        self._open = capture
        self.graphs.append(graph)
        return self

    def __exit__(self, *error: object) -> None:
        capture, self._open = self._open, None
        if capture is None:  # the capture could not begin
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # if a computation begins with a collective
            capture.__exit__(*error)

    def interrupt(self, collective: Collective | None = None) -> None:
        """Ends a graph, before the collective, and begins the next."""
        self.__exit__(None, None, None)
        if collective is not None:
            self.collectives.append(collective)
        self.__enter__()
