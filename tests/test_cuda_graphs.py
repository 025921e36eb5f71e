"""What `cuda_graphs` keeps and when, with a stand-in for CUDA; test_triton.py has replays on GPUs."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_infcl.loss import cuda_graphs


class Recorded:
    """A CUDA graph that computes again from the same memory into the same memory."""

    def replay(self) -> None:
        for own, value in zip(self.recording._outputs, compute(*self.recording._inputs), strict=True):
            own.copy_(value)
        self.recording.replays += 1


def compute(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x @ y.t(), x.sum()


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that are made, in order."""
    made: list[Any] = []

    class Recording(cuda_graphs._Recording):
        def __init__(self) -> None:
            super().__init__()
            self.replays = 0
            made.append(self)

    @contextmanager
    def capture(graph: Recorded, **options: Any) -> Any:
        graph.recording = made[-1]
        yield

    monkeypatch.setattr(cuda_graphs, "_Recording", Recording)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    cuda_graphs._recording.cache_clear()
    yield made
    cuda_graphs._recording.cache_clear()


def call(rows: int = 4, name: str = "compute") -> tuple[Tensor, tuple[Tensor, ...]]:
    x, y = torch.randn(2, rows, 3)
    return x @ y.t(), cuda_graphs.run(name, compute, x, y)


def test_results_stay_when_a_later_call_replays(recordings):
    results = [call() for _ in range(5)]
    for expected, (product, _) in results:
        torch.testing.assert_close(product, expected)
    assert [recording.replays for recording in recordings] == [5 - cuda_graphs.PATIENCE]


def test_a_recording_is_of_one_computation_shape_and_mode(recordings):
    call(), call(rows=5), call(name="another")
    with torch.inference_mode():
        call()
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(recordings) == 5
    assert cuda_graphs._recording.cache_info().currsize == cuda_graphs.KEPT


def test_without_memory_for_a_recording_it_goes_on_without(recordings, monkeypatch, caplog):
    def out_of_memory(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(cuda_graphs._Recording, "_record", out_of_memory)
    for _ in range(cuda_graphs.PATIENCE + 3):
        expected, (product, _) = call()
        torch.testing.assert_close(product, expected)
    assert recordings[0].replays == 0
    assert caplog.text.count("no room") == 1
