"""Gradient caching over plain modules: no losses, no trainer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from hf_infcl.training.grad_cache import CachedWindow, RandomState


class Counting(nn.Module):
    """Two heads with dropout; counts its forwards and how many hold an autograd graph."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.drop = nn.Linear(4, 3), nn.Linear(4, 3), nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.forwards: list[bool] = []
        self.outputs: list[Tensor] = []
        self.following: list[Tensor | None] = []

    def forward(self, x: Tensor, following: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.following.append(following)
        self.forwards.append(torch.is_grad_enabled())
        out = self.drop(self.one(x)), self.drop(self.two(x))
        self.outputs.append(out[0].detach())
        return out


def loss(features: tuple[Tensor, ...], parameters: tuple[Tensor, ...]) -> Tensor:
    a, b = features
    return (parameters[0] * a @ b.t()).logsumexp(1).sum()  # depends on every row of the window at once


def windows(count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(5 + i, 4, generator=g) for i in range(count)]  # unequal rows are fine


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("retain", [1, 3, 9])
@pytest.mark.parametrize("keep_grad_mode", [False, True])
def test_gradient_of_the_whole_window(count, retain, keep_grad_mode):
    batches, model = windows(count), Counting(dropout=0.0)
    loss(tuple(torch.cat(c) for c in zip(*map(model, batches), strict=True)), (model.scale,)).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    options = {"retain": retain, "keep_grad_mode": keep_grad_mode}
    window = CachedWindow(model, batches, loss, parameters=lambda: (model.scale,), **options)
    for index in range(count):
        assert model.scale.grad is None, "the scale rides on the last micro-batch"
        window.surrogate(index).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("count", "retain"), [(1, 1), (4, 1), (4, 3), (4, 4)])
def test_forwards_are_as_few_as_can_be_and_announced(count, retain):
    model, batches = Counting(), windows(count)
    window = CachedWindow(model, batches, loss, parameters=lambda: (model.scale,), retain=retain)
    for index in range(count):
        window.surrogate(index)
    again = count - retain
    assert model.forwards == [True] * retain + [False] * again + [True] * again
    order = [*range(count), *range(retain, count)]
    expected = [batches[i] for i in order[1:]] + [None]
    assert all(seen is batch for seen, batch in zip(model.following, expected, strict=True))


@pytest.mark.parametrize("retain", [1, 2])
def test_dropout_draws_the_same_masks_in_both_passes_and_goes_on_afterwards(retain):
    model, batches = Counting(), windows(3)
    torch.manual_seed(3)
    window = CachedWindow(model, batches, loss, parameters=lambda: (model.scale,), retain=retain)
    after_first_pass = torch.get_rng_state()
    for index in range(3):
        window.surrogate(index)
    for first, second in zip(model.outputs[retain:3], model.outputs[3:], strict=True):
        assert torch.equal(first, second)
        assert (first == 0).any()
        assert (first != 0).any()
    assert torch.equal(torch.get_rng_state(), after_first_pass)
    # The masks do not depend on how many graphs are kept.
    torch.manual_seed(3)
    assert torch.equal(CachedWindow(model, batches, loss, parameters=lambda: (model.scale,)).loss, window.loss)


def test_what_requires_no_gradient_gets_none():
    model = Counting(dropout=0.0)
    model.one.requires_grad_(False)
    window = CachedWindow(model, windows(2), loss, parameters=lambda: (model.scale,))
    for index in range(2):
        window.surrogate(index).backward()
    assert model.one.weight.grad is None
    assert model.two.weight.grad is not None
    assert model.scale.grad is not None
    model.requires_grad_(False)
    window = CachedWindow(model, windows(2), loss, parameters=lambda: (model.scale,))
    assert window.surrogate(0) is None
    assert window.surrogate(1) is None
    assert torch.isfinite(window.loss)


def test_micro_batches_are_let_go_after_their_last_use():
    model = Counting()
    window = CachedWindow(model, windows(3), loss, parameters=lambda: (model.scale,))
    kept = [weakref.ref(b) for b in window._micro_batches if b is not None]
    model.following.clear()
    assert len(kept) == 2
    window.surrogate(0).backward()
    window.surrogate(1).backward()
    model.following.clear()
    gc.collect()
    assert [ref() is None for ref in kept] == [True, False]


def test_random_state_restores_after_an_error():
    state = RandomState()
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), state.replay():
        torch.rand(3).tolist()[0] / 0
    assert torch.equal(torch.get_rng_state(), before)
