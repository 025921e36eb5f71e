"""Recorded computations give the same results as direct ones, in one process and in several, and keep memory for two.

On CPUs a stand-in takes the place of CUDA. test_triton.py replays more cases on GPUs.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import graphs
from helpers.numerics import features, relative_error
from torch import Tensor

from hf_infcl import contrastive_loss
from hf_infcl.loss import contrastive, cuda_graphs
from hf_infcl.processes.collectives import Processes


def compute(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x @ y.t(), x.sum()


@pytest.fixture
def recordings() -> Iterator[list[Any]]:
    with graphs.on_a_cpu(), graphs.recordings() as made:
        yield made


def call(rows: int = 4, name: str = "compute") -> tuple[Tensor, tuple[Tensor, ...]]:
    x, y = torch.randn(2, rows, 3)
    return x @ y.t(), cuda_graphs.run(name, Processes(), compute, x, y)


def test_results_stay_when_a_later_call_replays(recordings):
    replay = mock.patch.object(graphs.Tape, "replay", autospec=True, side_effect=graphs.Tape.replay)
    with replay as replayed:
        results = [call() for _ in range(5)]
    for expected, (product, _) in results:
        torch.testing.assert_close(product, expected)
    assert len(recordings) == 1
    assert replayed.call_count == 5 - cuda_graphs.PATIENCE


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
    assert cuda_graphs.recording.cache_info().currsize == cuda_graphs.KEPT


def test_without_memory_for_a_recording_it_goes_on_without(recordings, monkeypatch, caplog):
    def out_of_memory(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(cuda_graphs.Recording, "record", out_of_memory)
    for _ in range(cuda_graphs.PATIENCE + 3):
        expected, (product, _) = call()
        torch.testing.assert_close(product, expected)
    assert not recordings[0].graphs
    assert caplog.text.count("no room") == 1


# ---- Among processes ----

PAIRS, PAIR_IDS, CAPTIONS, NEGATIVES = "pairs", "pair_ids", "several captions", "negative texts"
CASES = [
    ("softmax", "ring", PAIRS),
    ("softmax", "ring", CAPTIONS),
    ("softmax", "disco", NEGATIVES),
    ("softmax", "local", PAIRS),
    ("softmax", "gather", PAIR_IDS),
    ("sigmoid", "ring", PAIRS),
    ("sigmoid", "disco", PAIR_IDS),
]
SIZES = {"gloo": (6, 9), "nccl": (512, 768)}


def arguments(kind: str, rank: int, backend: str, b: int, seed: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Embeddings and scalars that require gradients, and options. On GPUs they are bf16, for the Triton kernels."""
    device, dtype = ("cpu", torch.float32) if backend == "gloo" else (f"cuda:{rank}", torch.bfloat16)
    x, y = features(b, 64, seed=10 * seed + rank, dtype=dtype)
    leaves = [t.to(device).requires_grad_() for t in (x, y, torch.tensor(20.0 + seed), torch.tensor(seed - 5.0))]
    ids = torch.arange(b, device=device)
    options: dict[str, Any] = {}
    if kind == PAIR_IDS:
        options["pair_ids"] = ids // 2
    if kind == CAPTIONS:
        options |= {"image_ids": ids // 2, "text_ids": ids // 2 + rank}
    if kind == NEGATIVES:
        options["negative_texts"] = y.flip(0)[: b - rank].to(device)
    return leaves, options


def rank_replays(rank: int, world_size: int, backend: str, cases: list[tuple] = CASES) -> None:
    """Batches of two sizes in turn, with an evaluation between them and every backward at the end, twice.

    The processes begin to record at different calls. In every other case one of them lacks the memory to record.
    """
    batches = [(seed, SIZES[backend][seed % 2]) for seed in range(7)]
    for number, (objective, strategy, kind) in enumerate(cases):

        def loss(seed: int, b: int) -> tuple[Tensor, list[Tensor]]:
            leaves, options = arguments(kind, rank, backend, b, seed)  # noqa: B023
            return contrastive_loss(*leaves, objective=objective, strategy=strategy, **options), leaves  # noqa: B023

        with mock.patch.object(contrastive, "launches_dominate", return_value=False):
            expected = [(value, torch.autograd.grad(value, leaves)) for value, leaves in (loss(*b) for b in batches)]
        records = rank == 0 or number % 2 == 0
        with ExitStack() as stack:
            if backend == "gloo":
                stack.enter_context(graphs.on_a_cpu())
                stack.enter_context(mock.patch.object(contrastive, "launches_dominate", return_value=True))
            made = stack.enter_context(graphs.recordings())
            stack.enter_context(mock.patch.object(cuda_graphs, "PATIENCE", rank % 2))
            if not records:
                no_room = torch.OutOfMemoryError("no room")
                stack.enter_context(mock.patch.object(cuda_graphs.Recording, "record", side_effect=no_room))
            waiting = []
            for batch in batches:
                waiting.append(loss(*batch))
                if batch == batches[3]:
                    with torch.no_grad():
                        value, _ = loss(*batch)
                    assert relative_error(value, waiting[-1][0].detach()) < 1e-5
        recorded = [recording for recording in made if recording.graphs]
        assert len(recorded) >= 2 * records
        assert all(len(recording.collectives) >= 2 for recording in recorded)
        for (value, leaves), (truth, gradients) in zip(waiting, expected, strict=True):
            assert relative_error(value.detach(), truth.detach()) < 1e-5
            for _ in range(2):
                again = torch.autograd.grad(value, leaves, retain_graph=True)
                for gradient, exact in zip(again, gradients, strict=True):
                    tolerance = 1e-6 if backend == "gloo" else 4e-3
                    assert relative_error(gradient, exact) < tolerance, (objective, strategy, kind)


def test_processes_exchange_between_the_graphs_of_a_replay(ranks, backend):
    ranks.run(rank_replays, 2, backend, backend=backend)


RINGS = [case for case in CASES if case[1] == "ring"]


@pytest.mark.parametrize(("world_size", "gathered"), [(2, 1), (4, 2)])
def test_rings_exchange_between_the_graphs_of_a_replay(ranks, backend, world_size, gathered):
    ranks.run(rank_replays, world_size, backend, RINGS, backend=backend, always_ring=gathered)
