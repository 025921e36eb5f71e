"""A stand-in for CUDA graphs on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_infcl.loss import cuda_graphs


class Tape(TorchDispatchMode):
    """Replaces `torch.cuda.CUDAGraph`: repeats its operations, from the same memory into the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if "empty" not in func.name():  # the replay of a graph allocates nothing
            self._operations.append((func, args, kwargs or {}, tree_leaves(results)))
        return results

    def replay(self) -> None:
        for func, args, kwargs, results in self._operations:
            for own, value in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(own, Tensor):
                    own.copy_(value)

    def pool(self) -> None:
        """Does nothing, because tapes keep their tensors anyway."""


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Makes `hf_infcl.loss.cuda_graphs` and `hf_infcl.step.recording` record tapes within the context."""
    stream = mock.Mock()
    stand_ins = {
        "CUDAGraph": Tape,
        "graph": lambda tape, **options: tape,
        "Stream": lambda: stream,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "device_of": lambda tensor: nullcontext(),
    }
    clearing = mock.patch.object(torch._C, "_cuda_clearCublasWorkspaces", create=True)
    with mock.patch.multiple(torch.cuda, **stand_ins), clearing:
        yield


@contextmanager
def recordings() -> Iterator[list[Any]]:
    """A list that receives all recordings that are made within the context, in order."""
    made: list[Any] = []

    class Noted(cuda_graphs.Recording):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    cuda_graphs.recording.cache_clear()
    with mock.patch.object(cuda_graphs, "Recording", Noted):
        yield made
    cuda_graphs.recording.cache_clear()
