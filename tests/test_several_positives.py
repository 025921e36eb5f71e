"""`contrastive_loss` with ids of images and texts, and with negative texts: losses and gradients as defined."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.numerics import LargestTensor, relative_error
from helpers.processes import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_infcl import contrastive_loss, kernels
from hf_infcl.kernels import torch_backend
from hf_infcl.loss import reference
from hf_infcl.loss.strategies import STRATEGIES

WIDTH = 24


def embeddings(rows: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, WIDTH, generator=g, dtype=torch.float64), dim=-1).to(dtype)


def run(arguments: dict[str, Any], scale: float, bias: float, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradients by all floating-point arguments."""
    loss_of = options.pop("loss_of", contrastive_loss)
    dtype = arguments["image_embeds"].dtype
    scalars = {"logit_scale": torch.tensor(scale, dtype=dtype), "logit_bias": torch.tensor(bias, dtype=dtype)}
    leaves = {
        name: t.clone().requires_grad_()
        for name, t in (arguments | scalars).items()
        if t is not None and t.is_floating_point()
    }
    loss = loss_of(**(arguments | leaves), **options)
    loss.backward()
    return loss.detach(), {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaves.items()}


def batch(kind: str, world_size: int, n: int, dtype: torch.dtype = torch.float64) -> list[dict[str, Any]]:
    """The arguments of each rank. Equal ids are scattered over the ranks."""
    pairs = kind.startswith("pairs")
    m = [n if pairs else 2 * n + 3 * (rank % 2) for rank in range(world_size)]  # unequal with several ranks
    if kind == "few texts":
        m = [1 + rank % 2 for rank in range(world_size)]
    h = [(rank + 1) % 3 for rank in range(world_size)]  # 1, 2, 0, 1
    g = torch.Generator().manual_seed(3)
    # Some images and some texts have no positive, some one, some many.
    image_ids = torch.randint(-3, 2 * n, (n * world_size,), generator=g) * 10**15
    text_ids = torch.randint(-3, 2 * n, (sum(m),), generator=g) * 10**15
    text_ids[0] = image_ids[-1]  # at least one positive, on another rank
    whole: dict[str, tuple[Tensor, list[int]]] = {
        "image_embeds": (embeddings(n * world_size, 0, dtype), [n] * world_size),
        "text_embeds": (embeddings(sum(m), 1, dtype), m),
    }
    if "with pair_ids" in kind:
        whole["pair_ids"] = (torch.arange(n * world_size) // 2 * 3 % 7, [n] * world_size)
    if not pairs:
        whole |= {"image_ids": (image_ids, [n] * world_size), "text_ids": (text_ids, m)}
    if "negatives" in kind:
        whole["negative_texts"] = (embeddings(sum(h), 2, dtype), h)
    parts = {name: t.split(counts) for name, (t, counts) in whole.items()}
    return [{name: part[rank] for name, part in parts.items()} for rank in range(world_size)]


def rank_contract(rank: int, world_size: int, cases: list[tuple]) -> None:
    """Like `rank_contract` of test_contrastive.py: the mean gradient over the ranks is that of the whole batch."""
    for kind, objective, strategy, n, scale, dtype in cases:
        arguments = batch(kind, world_size, n, dtype)
        whole = {name: torch.cat([part[name] for part in arguments]) for name in arguments[0]}
        whole = {name: t.double() if t.is_floating_point() else t for name, t in whole.items()}
        bias = -3.0
        truth, expected = run(whole, scale, bias, objective=objective, loss_of=reference.contrastive_loss)
        loss, gradients = run(arguments[rank], scale, bias, objective=objective, strategy=strategy)
        where = (kind, objective, strategy, n, scale, dtype, rank, world_size)
        tolerance = (1e-5 if dtype == torch.float32 else 1e-13) * max(1, scale / 10)
        assert relative_error(loss, truth) < tolerance, where
        for name, gradient in gradients.items():
            exact = expected[name]
            if gradient.ndim:
                before = sum(len(part[name]) for part in arguments[:rank])
                error = gradient.double() / world_size - exact[before : before + len(gradient)]
                assert error.norm() <= tolerance * exact.norm() + 1e-300, (where, name)
            else:
                mean = gradient.clone()
                if world_size > 1:
                    dist.all_reduce(mean)
                assert abs(mean / world_size - exact) <= 2 * tolerance * max(1, abs(exact)), (where, name)


KINDS = ("ids", "few texts", "ids and negatives", "pairs and negatives", "pairs and negatives with pair_ids")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_loss_and_gradients_are_those_of_the_definition(ranks, world_size):
    cases = [
        (kind, objective, strategy, n, scale, dtype)
        for kind, n, scale, dtype in (
            *((kind, 5, 50.0, torch.float64) for kind in KINDS),
            *(("ids and negatives", n, 20.0, dtype) for n, dtype in ((1, torch.float64), (5, torch.float32))),
        )
        for objective in ("softmax", "sigmoid")
        for strategy in STRATEGIES
    ]
    ranks.run(rank_contract, world_size, cases, always_ring=True)


@settings(max_examples=100, deadline=None)
@given(
    objective=st.sampled_from(["softmax", "sigmoid"]),
    n=st.integers(1, 30),
    m=st.integers(1, 40),
    h=st.integers(0, 5),
    different=st.integers(1, 40),
    scale=st.one_of(st.just(0.0), st.floats(1e-3, 1e4)),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    tile=st.sampled_from([16, 300, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_any_ids_within_the_rounding_of_the_logits(objective, n, m, h, different, scale, dtype, tile, seed):
    g = torch.Generator().manual_seed(seed)
    image_ids, text_ids = (torch.randint(0, different, (rows,), generator=g) for rows in (n, m))
    text_ids[0] = image_ids[0]
    arguments = {
        "image_embeds": embeddings(n, seed, dtype),
        "text_embeds": embeddings(m, seed + 1, dtype),
        "negative_texts": embeddings(h, seed + 2, dtype),
    }
    exact = {name: t.double() for name, t in arguments.items()}
    ids = {"image_ids": image_ids, "text_ids": text_ids}
    truth, expected = run(exact | ids, scale, -2.0, objective=objective, loss_of=reference.contrastive_loss)
    size, torch_backend.TILE_ELEMENTS = torch_backend.TILE_ELEMENTS, tile
    try:
        loss, gradients = run(arguments | ids, scale, -2.0, objective=objective)
    finally:
        torch_backend.TILE_ELEMENTS = size
    delta = torch.finfo(dtype).eps * (10 + 10 * scale)  # the error of a logit
    # The derivative of a coefficient by a logit is at most the coefficient, and the weight of a column at most 1/m'.
    of_features = delta * scale * 2
    assert abs(loss - truth) <= delta * 4 + 4 * torch.finfo(dtype).eps * truth  # the loss itself is rounded
    for name, gradient in gradients.items():
        error = (gradient.double() - expected[name]).norm()
        bound = {"logit_scale": 8 * delta, "logit_bias": 8 * delta * max(n, m)}.get(name, 4 * of_features)
        assert error <= bound + 1e-30, name


@pytest.mark.parametrize("distance", [5.0, 25.0, 60.0])
@pytest.mark.parametrize("form", ["ids", "negatives"])
def test_a_tiny_loss_keeps_its_digits(distance, form):
    """Orthonormal features: every negative lies `distance` below the single positive, so the loss is log1p(k e^-d)."""
    x, order = torch.eye(16), torch.randperm(16, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(16)
    y, further = x, x[:0]
    options: dict[str, Any] = {"image_ids": ids, "text_ids": ids[order]} if form == "ids" else {}
    if form == "ids":
        y = x[order]
    else:  # four texts have no image: an image has 11 negatives among the pairs and four others
        x, y, further = x[:12], x[:12], x[12:]
        options = {"negative_texts": further}
    arguments = {"image_embeds": x, "text_embeds": y, **options}
    loss, gradients = run(arguments, distance, 0.0)
    small = torch.tensor(-distance, dtype=torch.float64).exp()
    rows, columns = (torch.log1p(k * small) for k in (len(y) + len(further) - 1, len(x) - 1))
    assert relative_error(loss, (rows + columns) / 2) < 1e-5
    # The derivative of log1p(k e^-d) by the scale, which equals all distances d.
    of_scale = sum(-k * small / (1 + k * small) for k in (len(y) + len(further) - 1, len(x) - 1)) / 2
    assert relative_error(gradients["logit_scale"], of_scale) < 1e-5


@on_ranks(2, always_ring=True)
def test_a_tiny_loss_keeps_its_digits_where_the_positives_are_on_other_processes(rank, world_size):
    ids = torch.arange(8) + 8 * rank
    other = (ids + 8) % 16
    x, y = torch.eye(16)[ids], torch.eye(16)[other]
    for strategy, distance in itertools.product(STRATEGIES, (5.0, 25.0, 60.0)):
        loss = contrastive_loss(x, y, distance, image_ids=ids, text_ids=other, strategy=strategy)
        truth = torch.log1p(15 * torch.tensor(-distance, dtype=torch.float64).exp())
        assert relative_error(loss, truth) < 2e-5


def test_without_a_positive_the_loss_is_not_finite():
    x, y, ids = embeddings(3, 0), embeddings(4, 1), torch.arange(4)
    for objective in ("softmax", "sigmoid"):
        options = {"objective": objective, "image_ids": ids[:3] + 9, "text_ids": ids}
        assert not contrastive_loss(x, y, 10.0, **options).isfinite()
        assert not reference.contrastive_loss(x, y, 10.0, **options).isfinite()


def test_pairs_as_ids_are_pairs():
    x, y = embeddings(9, 0), embeddings(9, 1)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    pairs = {"image_embeds": x, "text_embeds": y}
    as_ids = {"image_embeds": x, "text_embeds": y[order], "image_ids": torch.arange(9) * 7, "text_ids": order * 7}
    for objective in ("softmax", "sigmoid"):
        loss, gradients = run(pairs, 30.0, -4.0, objective=objective)
        same, others = run(as_ids, 30.0, -4.0, objective=objective)
        torch.testing.assert_close(same, loss)
        others["text_embeds"] = torch.empty_like(y).index_copy(0, order, others["text_embeds"])
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient)


@pytest.mark.parametrize(
    ("kernel", "objective", "kind"),
    [
        ("softmax_statistics", "softmax", "pairs with pair_ids"),
        ("softmax_gradients", "softmax", "pairs with pair_ids"),
        ("sigmoid_block", "sigmoid", "pairs with pair_ids"),
        ("softmax_statistics", "softmax", "ids and negatives"),
        ("softmax_gradients", "softmax", "ids and negatives"),
        ("sigmoid_block", "sigmoid", "ids and negatives"),
    ],
)
def test_kernels_get_rows_and_columns_in_the_order_of_their_ids(monkeypatch, kernel, objective, kind):
    """Equal ids then meet in few tiles, and other tiles need not compare ids."""
    compute, seen = getattr(kernels, kernel), []

    def watched(*args: Any, **options: Any) -> Any:
        seen.extend(t for t in args if isinstance(t, Tensor) and t.dtype == torch.int32)
        return compute(*args, **options)

    monkeypatch.setattr(kernels, kernel, watched)
    (arguments,) = batch(kind, 1, 20)
    assert all((arguments[name].diff() < 0).any() for name in arguments if name.endswith("ids"))
    run(arguments, 9.0, -1.0, objective=objective)
    assert len(seen) == 2
    assert all((ids.diff() >= 0).all() and len(ids) >= 20 for ids in seen)


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_no_negative_texts_at_all_have_an_empty_gradient(objective):
    x, y, ids = embeddings(5, 0), embeddings(5, 1), torch.arange(5)
    none = embeddings(0, 2).requires_grad_()
    for options in ({}, {"image_ids": ids, "text_ids": ids}):
        loss = contrastive_loss(x, y, 9.0, objective=objective, negative_texts=none, **options)
        assert loss == contrastive_loss(x, y, 9.0, objective=objective, **options)
        (gradient,) = torch.autograd.grad(loss, none)
        assert gradient.shape == none.shape


@on_ranks(2, always_ring=True)
def test_only_wanted_gradients(rank, world_size):
    for kind, objective, strategy in itertools.product(
        ("ids and negatives", "pairs and negatives"), ("softmax", "sigmoid"), STRATEGIES
    ):
        arguments = batch(kind, world_size, 4)[rank]
        options = {"objective": objective, "strategy": strategy}
        loss, expected = run(arguments, 9.0, -1.0, **options)
        names = ("image_embeds", "text_embeds", "negative_texts")
        for wanted in itertools.product((False, True), repeat=3):
            inputs = {
                name: arguments[name].clone().requires_grad_(want) for name, want in zip(names, wanted, strict=True)
            }
            seen = contrastive_loss(**(arguments | inputs), logit_scale=9.0, logit_bias=-1.0, **options)
            torch.testing.assert_close(seen.detach(), loss)
            assert seen.requires_grad == any(wanted)
            if any(wanted):
                seen.backward()
            for name, want in zip(names, wanted, strict=True):
                assert (inputs[name].grad is not None) == want
                if want:
                    torch.testing.assert_close(inputs[name].grad, expected[name])


def rank_memory(rank: int, world_size: int) -> int:
    x, y, z = embeddings(32, rank), embeddings(32 - rank % 2, rank), embeddings(4, rank)
    leaves = [t.requires_grad_() for t in (x, y, z)]
    ids = torch.arange(32)
    with mock.patch.object(torch_backend, "TILE_ELEMENTS", 64), LargestTensor() as seen:
        options = {"image_ids": ids, "text_ids": ids[: len(y)], "negative_texts": z}
        contrastive_loss(*leaves[:2], 10.0, **options).backward()
    return seen.elements


def test_memory_per_process_does_not_grow_with_the_ring(ranks):
    for world_size in (1, 2, 4):
        elements = ranks.run(rank_memory, world_size, always_ring=True)
        assert max(elements) == 36 * WIDTH, "O(b·D), never O(B·D)"
