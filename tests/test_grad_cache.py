"""Gradient caching with plain modules, without the losses and the trainer."""

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_infcl.step.grad_cache import CachedWindow, random_state_kept


class Counting(nn.Module):
    """Two heads with dropout, which record the micro-batch, the output and the autograd mode of each forward."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.drop = nn.Linear(4, 3), nn.Linear(4, 3), nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.forwards: list[tuple[int, bool]] = []  # (rows of the micro-batch, whether autograd was enabled)
        self.outputs: dict[int, list[Tensor]] = {}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.forwards.append((len(x), torch.is_grad_enabled()))
        out = self.drop(self.one(x)), self.drop(self.two(x))
        self.outputs.setdefault(len(x), []).append(out[0].detach())
        return out


def loss(features: tuple[Tensor, ...], parameters: tuple[Tensor, ...]) -> Tensor:
    a, b = features
    return (parameters[0] * a @ b.t()).logsumexp(1).sum()  # depends on every row of the window at once


def micro_batches(count: int) -> list[Tensor]:
    """Micro-batch i has 5 + i rows."""
    g = torch.Generator().manual_seed(1)
    return [torch.randn(5 + i, 4, generator=g) for i in range(count)]


def evaluated(model: Counting, batches: list[Tensor], **options: Any) -> CachedWindow:
    window = CachedWindow(model, batches, **options)
    features = window.encode()
    assert [len(f) for f in features] == [sum(map(len, batches))] * 2
    assert torch.equal(window.differentiate(loss, lambda: (model.scale,)), window.loss)
    return window


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("retain", [0, 1, 3, 9])
@pytest.mark.parametrize("keep_grad_mode", [False, True])
def test_gradient_of_the_whole_window(count, retain, keep_grad_mode):
    batches, model = micro_batches(count), Counting(dropout=0.0)
    loss(tuple(torch.cat(c) for c in zip(*map(model, batches), strict=True)), (model.scale,)).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    window = evaluated(model, batches, retain=retain, keep_grad_mode=keep_grad_mode)
    for index in range(count):
        assert model.scale.grad is None, "the scale's gradient is part of the last surrogate"
        window.surrogate(index).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "retain", "first_pass", "second_pass"),
    [(1, 1, [0], []), (4, 1, [1, 2, 3, 0], [1, 2, 3]), (4, 3, [3, 0, 1, 2], [3]), (4, 4, [0, 1, 2, 3], [])],
)
def test_forwards_are_as_few_as_can_be_and_kept_graphs_come_last(count, retain, first_pass, second_pass):
    model = Counting()
    window = evaluated(model, micro_batches(count), retain=retain)
    for index in range(count):
        window.surrogate(index)
    assert window.order == first_pass + second_pass
    assert [rows - 5 for rows, _ in model.forwards] == window.order
    again = count - retain
    assert [graph for _, graph in model.forwards] == [False] * again + [True] * retain + [True] * again


class Graph:
    """Lives as long as the tensors that autograd saved in one forward."""


@pytest.mark.parametrize("keep_grad_mode", [False, True])
@pytest.mark.parametrize("retain", [1, 2])
def test_no_more_graphs_exist_than_are_kept(retain, keep_grad_mode):
    alive: weakref.WeakSet[Graph] = weakref.WeakSet()
    seen: list[int] = []
    weight = torch.ones(1, requires_grad=True)

    def encode(x: Tensor) -> tuple[Tensor]:
        graph = Graph()

        def pack(tensor: Tensor) -> tuple[Graph, Tensor]:
            alive.add(graph)
            seen.append(len(alive))
            return graph, tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
            return (weight.sin() * x.sum(1),)

    options = {"retain": retain, "keep_grad_mode": keep_grad_mode}
    window = CachedWindow(encode, [torch.ones(5, 4) for _ in range(4)], **options)
    window.encode()
    assert len(alive) == retain
    window.differentiate(lambda features, _: features[0].square().sum())
    for index in range(4):
        window.surrogate(index).backward()
    assert max(seen) == retain


@pytest.mark.parametrize("retain", [1, 2, 3])
def test_dropout_draws_the_same_masks_in_both_passes_whatever_is_kept(retain):
    model, batches = Counting(), micro_batches(3)
    torch.manual_seed(3)
    window = evaluated(model, batches, retain=retain)
    after_first_pass = torch.get_rng_state()
    for index in range(3):
        window.surrogate(index)
    for outputs in model.outputs.values():
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        assert (outputs[0] == 0).any()
        assert (outputs[0] != 0).any()
    assert len({outputs[0].count_nonzero().item() for outputs in model.outputs.values()}) > 1
    assert torch.equal(torch.get_rng_state(), after_first_pass)
    torch.manual_seed(3)
    assert torch.equal(evaluated(model, batches).loss, window.loss)
    # The next window draws different masks.
    assert not torch.equal(evaluated(model, batches).loss, window.loss)


@pytest.mark.parametrize("retain", [1, 3])
def test_python_and_numpy_draw_the_same_numbers_in_both_passes(retain):
    drawn: dict[int, list[tuple[float, float]]] = {}

    def encode(batch: Tensor) -> tuple[Tensor]:
        drawn.setdefault(int(batch[0, 0]), []).append((random.random(), np.random.random()))  # noqa: NPY002
        return (batch * drawn[int(batch[0, 0])][-1][0],)

    before = random.getstate(), str(np.random.get_state())  # noqa: NPY002
    window = CachedWindow(encode, [torch.full((2, 3), float(i)).requires_grad_() for i in range(4)], retain=retain)
    window.encode()
    window.differentiate(lambda features, _: features[0].square().sum())
    for index in range(4):
        window.surrogate(index)
    assert [len(drawn[index]) for index in range(4)] == [1] * retain + [2] * (4 - retain)
    assert all(len(set(numbers)) == 1 for numbers in drawn.values())
    assert len(set(map(tuple, drawn.values()))) == 4
    assert (random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002


class Normalising(nn.Module):
    """A module whose running statistics depend on the order of the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.norm(self.linear(x)),)


@pytest.mark.parametrize("keep_grad_mode", [False, True])
@pytest.mark.parametrize("retain", [0, 1, 2, 4])
def test_buffers_are_those_of_one_forward_of_each_micro_batch_in_order(retain, keep_grad_mode):
    plain, cached, batches = Normalising(), Normalising(), micro_batches(4)
    options = {"retain": retain, "keep_grad_mode": keep_grad_mode}
    for _ in range(2):
        for batch in batches:
            plain(batch)
        window = CachedWindow(cached, batches, buffers=cached.buffers(), **options)
        window.encode()
        window.differentiate(lambda features, _: features[0].pow(3).sum())
        for index in range(4):
            window.surrogate(index).backward()
        for (name, expected), seen in zip(plain.named_buffers(), cached.buffers(), strict=True):
            assert torch.equal(seen, expected), name


def test_what_requires_no_gradient_gets_none():
    model = Counting(dropout=0.0)
    model.one.requires_grad_(False)
    window = evaluated(model, micro_batches(2))
    for index in range(2):
        window.surrogate(index).backward()
    assert model.one.weight.grad is None
    assert model.two.weight.grad is not None
    assert model.scale.grad is not None
    model.requires_grad_(False)
    window = evaluated(model, micro_batches(2))
    assert window.surrogate(0) is None
    assert window.surrogate(1) is None
    assert torch.isfinite(window.loss)


@pytest.mark.parametrize("retain", [1, 2])
def test_a_gradient_of_the_gradient_is_refused(retain):
    model = Counting()
    window = evaluated(model, micro_batches(2), retain=retain)
    for index in range(2):
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(window.surrogate(index), model.one.weight, create_graph=True)


def test_micro_batches_are_let_go_after_their_last_use():
    batches = micro_batches(3)
    kept = [weakref.ref(batch) for batch in batches]
    window = evaluated(Counting(), batches)
    del batches
    window.surrogate(0).backward()
    window.surrogate(1).backward()
    gc.collect()
    assert [ref() is None for ref in kept] == [True, True, False]


def test_random_generators_continue_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), random_state_kept(torch.device("cpu"), 7):
        torch.rand(3).tolist()[0] / 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("retain", [1, 2, 4])
@pytest.mark.parametrize("first", ["frozen", "trained"])
def test_micro_batches_of_a_frozen_and_of_a_trained_encoder(first, retain):
    """Which features require a gradient may differ: a frozen encoder of queries, and a trained one of documents."""
    torch.manual_seed(0)
    frozen, trained = nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 3)
    encoders = [frozen, trained] if first == "frozen" else [trained, frozen]
    batches = [(encoder, torch.randn(5, 4)) for encoder in encoders for _ in range(2)]

    def of_all(features: tuple[Tensor, ...], parameters: tuple[Tensor, ...] = ()) -> Tensor:
        one, two = features[0].split(10)
        return (one @ two.t()).logsumexp(1).sum()

    of_all((torch.cat([encoder(x) for encoder, x in batches]),)).backward()
    expected = [p.grad.clone() for p in trained.parameters()]
    trained.zero_grad()
    window = CachedWindow(lambda batch: (batch[0](batch[1]),), batches, retain=retain)
    window.encode()
    window.differentiate(of_all)
    for index in range(len(batches)):
        if (surrogate := window.surrogate(index)) is not None:
            surrogate.backward()
    for parameter, gradient in zip(trained.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
