"""The torch backend against the fp64 reference, on any input."""

import importlib
import inspect
import math

import pytest
import torch
from helpers.numerics import LargestTensor, features, relative_error, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_infcl import contrastive_loss, kernels
from hf_infcl.kernels import torch_backend
from hf_infcl.kernels.torch_backend import Block, BlockGradients, CoefficientVectors
from hf_infcl.loss import reference

KINDS = ("normalised", "unnormalised", "duplicates", "adversarial", "zeros")


def draw_features(kind: str, b: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = features(b, d, seed)
    if kind == "unnormalised":
        x, y = 7 * x, 0.3 * y
    elif kind == "duplicates":
        x[:] = x[0].clone()
        y[b // 2 :] = y[0].clone()
    elif kind == "adversarial":  # each positive at cosine -1, and the row's worst negative at +1
        y = -x
        y[b // 2 :] = x[: b - b // 2]
    elif kind == "zeros":
        x[::2] = 0
    return x, y


@settings(max_examples=150, deadline=None)
@given(
    objective=st.sampled_from(["softmax", "sigmoid"]),
    kind=st.sampled_from(KINDS),
    b=st.integers(1, 70),
    d=st.integers(1, 40),
    scale=st.one_of(st.just(0.0), st.floats(1e-3, 1e4)),
    bias=st.floats(-20, 20),
    with_ids=st.booleans(),
    tile=st.sampled_from([16, 300, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_any_input_within_the_rounding_of_its_logits(objective, kind, b, d, scale, bias, with_ids, tile, seed):
    x, y = draw_features(kind, b, d, seed)
    ids = torch.randint(0, max(1, b // 2), (b,), generator=torch.Generator().manual_seed(seed)) if with_ids else None
    options = {"objective": objective, "pair_ids": ids}
    truth, expected = run(reference.contrastive_loss, x, y, scale, bias, torch.float64, **options)
    size, torch_backend.TILE_ELEMENTS = torch_backend.TILE_ELEMENTS, tile
    try:
        loss, gradients = run(contrastive_loss, x, y, scale, bias, torch.float32, **options)
    finally:
        torch_backend.TILE_ELEMENTS = size

    # fp32 logits are off by delta, and exponentials of their differences by a factor of at most exp(2 delta).
    largest = x.norm(dim=1).max() * y.norm(dim=1).max()
    delta = 2**-24 * ((d + 8) * scale * largest.item() + abs(bias) + 30)
    factor = math.expm1(4 * delta) + 2**-20
    assert torch.isfinite(loss)
    assert all(g.isfinite().all() for g in gradients)
    assert abs(loss.item() - truth.item()) <= factor * truth.item() + 1e-30

    def magnitude(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:  # of the terms of each gradient, added up
        z = (scale * x.double() @ y.double().t() + bias).requires_grad_()
        coefficients = _coefficients(z, objective, ids).abs()
        return scale * coefficients @ b.double().abs(), scale * coefficients.t() @ a.double().abs()

    sums_x, sums_y = magnitude(x, y)
    for gradient, exact, sums in zip(gradients[:2], expected[:2], (sums_x, sums_y), strict=True):
        assert (gradient - exact).norm() <= factor * sums.norm() + 1e-30
    terms = (x.double().abs() * sums_x).sum() / scale if scale else expected[2].abs() + b
    assert abs(gradients[2] - expected[2]) <= factor * terms + 1e-30
    if objective == "softmax":
        assert gradients[3] == 0
    else:
        assert abs(gradients[3] - expected[3]) <= factor * b + 1e-30


def _coefficients(logits: Tensor, objective: str, ids: Tensor | None) -> Tensor:
    """The derivative of the loss by the logits."""
    identity = torch.eye(len(logits), dtype=torch.float64)
    loss = reference.contrastive_loss(logits, identity, 1.0, objective=objective, pair_ids=ids)
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_vanilla(objective, dtype):
    x, y = features(1000, 40, dtype=dtype)
    truth, expected = run(reference.contrastive_loss, x, y, 100.0, -10.0, torch.float64, objective=objective)
    vanilla_loss, vanilla = run(reference.contrastive_loss, x, y, 100.0, -10.0, dtype, objective=objective)
    loss, gradients = run(contrastive_loss, x, y, 100.0, -10.0, dtype, objective=objective)
    assert loss.dtype == torch.float32
    assert relative_error(loss, truth) <= min(2e-5, relative_error(vanilla_loss, truth))
    for gradient, other, exact in zip(gradients[:3], vanilla[:3], expected[:3], strict=True):
        assert gradient.dtype == dtype
        assert relative_error(gradient, exact) <= min(3e-3, relative_error(other, exact))


@pytest.mark.parametrize("distance", [5.0, 20.0, 25.0])
def test_a_tiny_loss_keeps_its_digits(distance):
    # Orthonormal pairs: every negative lies `distance` below its positive. At 25 the loss is 2e-10.
    x = torch.eye(16)
    truth, expected = run(reference.contrastive_loss, x, x, distance, 0.0, torch.float64)
    loss, gradients = run(contrastive_loss, x, x, distance, 0.0, torch.float32)
    assert relative_error(loss, truth) < 2e-6
    for gradient, exact in zip(gradients[:3], expected[:3], strict=True):
        assert relative_error(gradient, exact) < 5e-6


@pytest.mark.parametrize("ids", [False, True])
def test_the_sum_over_many_tiles_keeps_its_digits(ids, monkeypatch):
    monkeypatch.setattr(torch_backend, "TILE_ELEMENTS", 16)
    x, y = features(256, 8)
    options = dict.fromkeys(("image_ids", "text_ids"), torch.arange(256)) if ids else {}
    for scale in (0.0, 1.0):  # at 0 all terms are equal, and all roundings go in the same direction
        truth, expected = run(reference.contrastive_loss, x, y, scale, -1.0, torch.float64, objective="sigmoid")
        loss, gradients = run(contrastive_loss, x, y, scale, -1.0, torch.float32, objective="sigmoid", **options)
        assert relative_error(loss, truth) < 1e-6
        assert relative_error(gradients[2], expected[2]) < 5e-6
        assert relative_error(gradients[3], expected[3]) < 1e-6


def test_gradcheck():
    x, y = features(5, 3, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, y, torch.tensor(3.0).double(), torch.tensor(-1.0).double())]
    ids = torch.tensor([0, 1, 0, 2, 3])
    for objective in ("softmax", "sigmoid"):
        assert torch.autograd.gradcheck(
            lambda *args, o=objective: contrastive_loss(*args, objective=o, pair_ids=ids), leaves
        )


@pytest.mark.parametrize("diagonal", [None, 0, 3, -2, 40])
@pytest.mark.parametrize("tile", [1, 12, 1 << 20])
def test_rectangular_blocks_and_their_diagonal(diagonal, tile, monkeypatch):
    monkeypatch.setattr(torch_backend, "TILE_ELEMENTS", tile)
    m, n, d, scale = 7, 11, 5, torch.tensor(4.0, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, d, generator=g, dtype=torch.float64) for rows in (m, n))
    anchor_x, anchor_y, own = (torch.randn(k, generator=g, dtype=torch.float64) for k in (m, n, m))
    logits = scale * x @ y.t()
    positive = torch.zeros(m, n, dtype=torch.bool)
    for i in range(m):
        if diagonal is not None and 0 <= i + diagonal < n:
            positive[i, i + diagonal] = True
    negatives = logits.masked_fill(positive, -math.inf)
    (odds_x,), (odds_y,) = kernels.softmax_statistics(x, y, scale, anchor_x, anchor_y, diagonal=diagonal)
    torch.testing.assert_close(odds_x, torch.logsumexp(negatives - anchor_x[:, None], 1))
    torch.testing.assert_close(odds_y, torch.logsumexp(negatives - anchor_y[None], 0))

    coefficients = torch.exp(logits - anchor_x[:, None]) + torch.exp(logits - anchor_y[None])
    coefficients = torch.where(positive, own[:, None], coefficients)
    grad_x, grad_y = (torch.full((rows, d), math.nan, dtype=torch.float64) for rows in (m, n))
    for times, accumulate in ((1, False), (2, True)):
        of_scale = kernels.softmax_gradients(
            *(x, y, scale, anchor_x, anchor_y, None, None, own, None),
            **{"diagonal": diagonal, "grad_x": grad_x, "grad_y": grad_y, "accumulate": accumulate},
        )
        torch.testing.assert_close(of_scale, (coefficients * (x @ y.t())).sum())
        torch.testing.assert_close(grad_x, times * coefficients @ y)
        torch.testing.assert_close(grad_y, times * coefficients.t() @ x)

    sign = torch.where(positive, -1.0, 1.0).double()
    loss, of_bias, of_scale = kernels.sigmoid_block(x, y, scale, scale * 0 - 2, diagonal=diagonal, grad_y=grad_y)
    expected = sign * torch.sigmoid(sign * (logits - 2))
    torch.testing.assert_close(loss, torch.nn.functional.softplus(sign * (logits - 2)).sum())
    torch.testing.assert_close(of_bias, expected.sum())
    torch.testing.assert_close(of_scale, (expected * (x @ y.t())).sum())
    torch.testing.assert_close(grad_y, expected.t() @ x)


@pytest.mark.parametrize("tile", [1, 12, 1 << 20])
def test_blocks_with_several_positives(tile, monkeypatch):
    monkeypatch.setattr(torch_backend, "TILE_ELEMENTS", tile)
    m, n, d, scale = 7, 11, 5, torch.tensor(4.0, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, d, generator=g, dtype=torch.float64) for rows in (m, n))
    drawn = [torch.randn(rows, generator=g, dtype=torch.float64) for rows in (m, m, n, n)]
    pivot_x, relative_x, pivot_y, relative_y = drawn
    ids_x = torch.tensor([0, 1, 1, 2, 3, 4, 9], dtype=torch.int32)
    ids_y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 5, 5, 6], dtype=torch.int32)
    share_x = torch.tensor([0.3, 0.5, 0.5, 0.5, -0.2, 0.0, 0.0], dtype=torch.float64)  # row 4 has a single positive
    share_y = torch.tensor([-0.1, -1e-37, -0.3, 0.5, 0.5, -0.6, -0.7, -0.8, 0, 0, 0], dtype=torch.float64)
    relative_x[5:], relative_y[8:] = math.inf, math.inf  # without a loss of their own
    logits = scale * x @ y.t()
    positive = ids_x[:, None] == ids_y[None]

    block = (x, y, scale, pivot_x, pivot_y, ids_x, ids_y)
    of_rows, of_columns = kernels.softmax_statistics(*block, equal_are_positive=True)
    for relative, dim, seen in (
        (logits - pivot_x[:, None], 1, of_rows),
        (logits - pivot_y[None], 0, of_columns),
    ):
        torch.testing.assert_close(seen[0], torch.logsumexp(relative.masked_fill(positive, -math.inf), dim))
        torch.testing.assert_close(seen[1], torch.logsumexp(relative.masked_fill(~positive, -math.inf), dim))
        torch.testing.assert_close(seen[2], relative.masked_fill(~positive, 0).sum(dim))

    coefficients = torch.zeros_like(logits)
    for i in range(m):
        for j in range(n):
            row = math.exp(logits[i, j] - pivot_x[i] - relative_x[i])
            column = math.exp(logits[i, j] - pivot_y[j] - relative_y[j])
            if positive[i, j]:
                row = share_x[i] if share_x[i] < 0 else row - share_x[i]
                column = share_y[j] if share_y[j] < 0 else column - share_y[j]
            coefficients[i, j] = row + column
    grad_x, grad_y = (torch.ones(rows, d, dtype=torch.float64) for rows in (m, n))
    vectors = (pivot_x, pivot_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y)
    outputs = {"grad_x": grad_x, "grad_y": grad_y, "accumulate": True}
    of_scale = kernels.softmax_gradients(*(x, y, scale, *vectors), equal_are_positive=True, **outputs)
    torch.testing.assert_close(of_scale, (coefficients * (x @ y.t())).sum())
    torch.testing.assert_close(grad_x, 1 + coefficients @ y)
    torch.testing.assert_close(grad_y, 1 + coefficients.t() @ x)

    sign = torch.where(positive, -1.0, 1.0).double()
    block = (x, y, scale, scale * 0 - 2, ids_x, ids_y)
    loss, of_bias, of_scale = kernels.sigmoid_block(*block, equal_are_positive=True, grad_x=grad_x)
    expected = sign * torch.sigmoid(sign * (logits - 2))
    torch.testing.assert_close(loss, torch.nn.functional.softplus(sign * (logits - 2)).sum())
    torch.testing.assert_close(of_bias, expected.sum())
    torch.testing.assert_close(of_scale, (expected * (x @ y.t())).sum())
    torch.testing.assert_close(grad_x, expected @ y)


@pytest.mark.parametrize("name", ["torch_backend", "triton_backend"])
def test_a_backend_has_the_operators_with_the_parameters_and_results_that_are_declared(name):
    if name == "triton_backend":
        pytest.importorskip("triton")
    backend = importlib.import_module(f"hf_infcl.kernels.{name}")
    operators = {k: v for k, v in vars(kernels).items() if isinstance(v, type(torch.ops.aten.add.Tensor))}
    assert len(operators) == 5
    for operator, overload in operators.items():
        declared, own = inspect.signature(overload), inspect.signature(getattr(backend, operator))
        together = {"block": Block, "vectors": CoefficientVectors, "gradients": BlockGradients}
        expected = {name: field for name, field in declared.parameters.items() if name != "backend"}
        for name, parameter in own.parameters.items():
            fields = [parameter]
            if name in together:
                assert parameter.annotation is together[name], operator
                fields = list(inspect.signature(together[name]).parameters.values())
            for field in fields:
                assert field == expected.pop(field.name), operator
        assert not expected, operator
        assert own.return_annotation == declared.return_annotation
        assert "Args:" in overload.__doc__ or "Returns:" in overload.__doc__ or operator == "positive_logits"


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_memory_grows_linearly(objective):
    largest = {}
    for b in (2048, 4096, 8192):
        x, y = (t.requires_grad_() for t in features(b, 4))
        with LargestTensor() as seen:
            contrastive_loss(x, y, 10.0, 0.0, objective=objective).backward()
        largest[b] = seen.elements
    # No tensor is larger than a tile (the features are smaller here), while b² grows sixteenfold, to 64 tiles.
    assert all(elements <= torch_backend.TILE_ELEMENTS for elements in largest.values()), largest
    assert 64 * torch_backend.TILE_ELEMENTS <= 8192**2
