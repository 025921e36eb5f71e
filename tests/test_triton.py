"""The Triton kernels compared with the reference, on a GPU or, with small sizes, interpreted on the CPU."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from helpers import graphs
from helpers.numerics import features, relative_error
from triton import language
from triton.runtime import interpreter

from hf_infcl import contrastive_loss, kernels
from hf_infcl.kernels import torch_backend
from hf_infcl.kernels import triton_backend as backend
from hf_infcl.kernels import triton_tiles as triton_operands
from hf_infcl.kernels import triton_tiles as triton_tiling
from hf_infcl.kernels.torch_backend import Block
from hf_infcl.loss import cuda_graphs, reference, strategies
from hf_infcl.models import triton_quick_gelu

DEVICE = "cpu" if triton_tiling.INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if triton_tiling.INTERPRETED else [torch.bfloat16])
# The unavoidable error of a product with rounded coefficients; for float32, the error that the parts leave.
FLOOR = {torch.float32: 5e-5, torch.float16: 4e-4, torch.bfloat16: 3e-3}
SEVERAL = 70 if triton_tiling.INTERPRETED else 150  # pairs of several tiles
OBJECTIVES = ["softmax", "sigmoid"]
NAMES = ("loss", "image gradient", "text gradient", "scale gradient", "bias gradient")

Results = tuple[Tensor, ...]


class PoisonedTorch:
    """torch with NaN in memory that has not been written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        out = torch.empty(*args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    @staticmethod
    def empty_like(*args: Any, **kwargs: Any) -> Tensor:
        out = torch.empty_like(*args, **kwargs)
        return out.fill_(torch.nan if out.is_floating_point() else -1)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backend, triton_operands, strategies):
        monkeypatch.setattr(module, "torch", PoisonedTorch())


@pytest.fixture(scope="module", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Lets the interpreter replace the functions of Triton's language once in each launch.

    By default it does so again for every call of a device function, which takes more time than the calls. It also
    computes where integers overflow, at which it looks only with `debug`, and lists all types to find that of numpy.
    """
    replace_all, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    of_numpy, options = interpreter._get_np_dtype, interpreter.interpreter_builder.options
    replaced: set[Any] = set()
    numpy_types: dict[str, Any] = {}

    @functools.cache
    def modules(function: Any) -> set[Any]:
        return {one for one in (language, language.core) if any(v is one for v in function.__globals__.values())}

    def replace_once(function: Any) -> Any:
        if modules(function) <= replaced:
            return None
        replaced.update(modules(function))
        return replace_all(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()  # the last launch has restored what it had replaced
        launch(self, *args, **kwargs)

    def numpy_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in numpy_types:
            numpy_types[name] = of_numpy(of)
        return numpy_types[name]

    assert not options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type)
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        yield


ON_HOPPER = DEVICE == "cuda" and backend.hopper_kernels(torch.device("cuda")) is not None


@pytest.fixture(autouse=True, params=["plain", "hopper"] if ON_HOPPER else ["plain"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU each test runs with the plain kernels and with Hopper's, regardless of its sizes."""
    monkeypatch.setattr(backend, "HOPPER_PAYS", 0 if request.param == "hopper" else 1 << 62)
    monkeypatch.setattr(backend, "HOPPER_SUMS_PAY", 0)


@pytest.fixture(autouse=True)
def _recorded_by_no_earlier_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "PATIENCE", 1 << 30)
    cuda_graphs.recording.cache_clear()


def run(loss: Callable[..., Tensor], x: Tensor, y: Tensor, scale: float, dtype: torch.dtype, **options: Any) -> Results:
    """The loss and its gradients by x, y, scale and bias."""
    x, y = (t.to(dtype).detach().requires_grad_() for t in (x, y))
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    s, b = (torch.tensor(v, dtype=kind, device=x.device, requires_grad=True) for v in (scale, -3.0))
    value = loss(x, y, s, b, **options)
    gradients = torch.autograd.grad(value, (x, y, s, b), allow_unused=True)
    return (value.detach(), *(torch.zeros_like(b) if g is None else g for g in gradients))


def check(x: Tensor, y: Tensor, scale: float = 100.0, *, objective: str = "softmax", **options: Any) -> Results:
    """Compares with float64. The error may be that of plain torch in the features' dtype, or the floor if larger."""
    options = {"objective": objective, **options}
    in_float64 = {k: v.double() if k == "negative_texts" else v for k, v in options.items()}
    truth = run(reference.contrastive_loss, x, y, scale, torch.float64, **in_float64)
    plain = run(reference.contrastive_loss, x, y, scale, x.dtype, **options)
    ours = run(contrastive_loss, x, y, scale, x.dtype, backend="triton", **options)
    for name, value, true, usual in zip(NAMES, ours, truth, plain, strict=True):
        if objective == "softmax" and name == "bias gradient":
            assert value == 0
        elif torch.linalg.vector_norm(true) < 1e-12:  # an error cannot be relative to it
            assert torch.linalg.vector_norm(value) < 1e-6, name
        else:
            # Logits of thousands are rounded to 1e-4 in float32.
            allowed = max(2e-5 if name == "loss" else FLOOR[x.dtype] * max(1, scale / 1e3), relative_error(usual, true))
            if name == "scale gradient" and scale > 0:  # a sum over pairs, whose terms may cancel
                addends = torch.linalg.vector_norm(x.double()) * torch.linalg.vector_norm(truth[1]) / scale
                allowed = max(
                    1e-5 * max(1, scale / 10) * max(1.0, (addends / true.abs()).item()), relative_error(usual, true)
                )
            assert relative_error(value, true) <= allowed, name
    return ours


def pairs(batch: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = features(batch, dim, seed, dtype)
    return x.to(DEVICE), y.to(DEVICE)


def halves(batch: int) -> Tensor:
    """Ids that make neighbours duplicates of each other."""
    return torch.arange(batch, device=DEVICE) // 2 - (1 << 40)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "dim"), [(1, 3), (7, 40), (67, 24)])
def test_parity(batch: int, dim: int, dtype: torch.dtype, objective: str) -> None:
    check(*pairs(batch, dim, dtype), objective=objective)
    check(*pairs(batch, dim, dtype, 1), objective=objective, pair_ids=halves(batch))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ids_of_images_and_texts(dtype: torch.dtype, objective: str) -> None:
    x, y = pairs(67, 24, dtype)
    ids = torch.arange(67, device=DEVICE) * 7 % 61  # in no order; some ids belong to two images
    text_ids = torch.cat((ids[:50], ids[:30])) - 5
    options = {"image_ids": ids, "text_ids": text_ids, "negative_texts": y[60:]}
    check(x, torch.cat((y[:50], -y[:30])), 20.0, objective=objective, **options)
    check(x, y, objective=objective, negative_texts=x[:5])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_direction(dtype: torch.dtype) -> None:
    x, y = pairs(67, 24, dtype)
    for options in ({}, {"pair_ids": halves(67)}, {"negative_texts": x[:5]}):
        check(x, y, 30.0, directions="image_to_text", **options)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "dim"), [(7, 40), (SEVERAL, 48)])
def test_without_descriptors(
    batch: int, dim: int, dtype: torch.dtype, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs before Hopper and AMD's GPUs read and write without descriptors."""
    monkeypatch.setattr(triton_tiling, "has_descriptors", lambda device: False)
    monkeypatch.setattr(backend, "HOPPER_PAYS", 1 << 62)
    check(*pairs(batch, dim, dtype), objective=objective)
    check(*pairs(batch, dim, dtype, 1), objective=objective, pair_ids=halves(batch))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_scales(scale: float, objective: str) -> None:
    x, y = pairs(40, 16)
    y[5] = y[6] = x[5]  # duplicates
    check(x, y, scale, objective=objective)
    check(3 * x, y, scale / 10, objective=objective)


@pytest.mark.parametrize("near_pays", [0, 1 << 60])
def test_both_forms_of_the_statistics(near_pays: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positives that lie near each other in all programs, or far apart in some programs."""
    monkeypatch.setattr(backend, "NEAR_PAYS", near_pays)
    x, y = pairs(100, 16, torch.float16)
    check(x, y, 20.0)
    check(x, y, 20.0, pair_ids=halves(100))
    y[70] = -x[70]
    y[71] = x[71]
    check(x, y, 60.0)


@pytest.mark.parametrize("near_pays", [0, 1 << 60])
def test_overflow_of_the_sums(near_pays: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negatives hundreds above the positive: sums overflow and are recomputed, only for the rows that need it."""
    monkeypatch.setattr(backend, "NEAR_PAYS", near_pays)
    x, y = pairs(70, 16, torch.float16)
    y[3], y[4] = -x[3], x[3]  # a row whose positive has cosine -1 and one of whose negatives has +1
    check(x, y, 200.0)
    check(x, y, 200.0, pair_ids=halves(70))
    check(x, -x, 100.0)


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overflow_of_sigmoids(dtype: torch.dtype, chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negatives too large for the fast launch: each alone, only several together, or by little; in some tiles only."""
    tile = triton_tiling.tiling_for(torch.device(DEVICE), 1).tile
    if chunks:
        monkeypatch.setattr(backend, "CHUNK_COLUMNS", 2 * tile)
        monkeypatch.setattr(backend, "WORKSPACE_BYTES", 1)
    for scale, copies in ((100.0, 1), (40.0, 4)):
        x, y = pairs(3 * tile, 16, dtype)
        y[tile + 5 :: 8][:copies] = x[3]
        check(x, y, scale, objective="sigmoid")
        check(x, y, scale, objective="sigmoid", pair_ids=halves(3 * tile))
    # Two of 2^63.15 share a denominator whose reciprocal is subnormal, which a GPU flushes to 0.
    torch.manual_seed(0)
    x, y = 0.05 * torch.randn(2, 3 * tile, 8, device=DEVICE).to(dtype)  # unequal, so that roundings do not add up
    x[:, 0], x[3], y[:, 0] = 0, 0, -1
    x[3, 0] = 1
    y[[tile + 5, tile + 5 + tile // 4], 0] = 1
    check(x, y, 46.77, objective="sigmoid")


def test_small_losses_keep_their_digits() -> None:
    x = torch.eye(64, device=DEVICE)
    loss = contrastive_loss(x, x, 25.0, backend="triton")
    expected = torch.log1p(63 * torch.exp(torch.tensor(-25.0, dtype=torch.float64)))
    assert relative_error(loss.cpu(), expected) < 1e-5
    bias = torch.tensor(-40.0, device=DEVICE)
    loss = contrastive_loss(x, x, 80.0, bias, objective="sigmoid", backend="triton")
    assert relative_error(loss.cpu(), 64 * torch.exp(torch.tensor(-40.0, dtype=torch.float64))) < 1e-5


@pytest.mark.parametrize(("objective", "scale"), [("softmax", 1.0), ("sigmoid", 10.0), ("sigmoid", 100.0)])
def test_scale_gradient_keeps_its_digits(objective: str, scale: float) -> None:
    """Nearly equal coefficients have equal rounding errors, which would not cancel like the terms of this gradient."""
    generator = torch.Generator().manual_seed(0)
    x, y = (0.1 * torch.nn.functional.normalize(torch.randn(100, 24, generator=generator)) for _ in range(2))
    for dtype in DTYPES:
        features = x.to(DEVICE, dtype), y.to(DEVICE, dtype)
        truth = run(reference.contrastive_loss, *features, scale, torch.float64, objective=objective)
        ours = run(contrastive_loss, *features, scale, dtype, objective=objective, backend="triton")
        assert relative_error(ours[3], truth[3]) < 1e-5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_not_a_number_stays(objective: str) -> None:
    x, y = pairs(40, 16)
    x[7, 3] = torch.nan
    assert contrastive_loss(x, y, 10.0, objective=objective, backend="triton").isnan()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_any_strides(objective: str) -> None:
    x, y = pairs(40, 24, torch.float16)
    wide = torch.randn(40, 33, device=DEVICE, dtype=torch.float16)
    wide[:, 1:25] = x
    check(wide[:, 1:25], y.t().contiguous().t(), objective=objective)
    check(x[:1].expand(40, 24), y, 10.0, objective=objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_small_workspace(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pairs(SEVERAL, 16, torch.float16)
    whole = check(x, y, objective=objective, pair_ids=halves(SEVERAL))
    monkeypatch.setattr(backend, "CHUNK_COLUMNS", 2 * triton_tiling.tiling_for(torch.device(DEVICE), 1).tile)
    monkeypatch.setattr(backend, "WORKSPACE_BYTES", 1)
    parts = check(x, y, objective=objective, pair_ids=halves(SEVERAL))
    for name, a, b in zip(NAMES[:3], whole, parts, strict=False):
        assert relative_error(a, b.double()) < 1e-3, name


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_deterministic(objective: str) -> None:
    x, y = pairs(70 if triton_tiling.INTERPRETED else 3000, 16, torch.float16)
    first, second = (check(x, y, objective=objective) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def _any_precision() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_any_precision")
@pytest.mark.parametrize(
    ("setting", "least", "limit"),
    [
        (functools.partial(torch.set_float32_matmul_precision, "highest"), 0, 5e-6),
        (functools.partial(torch.set_float32_matmul_precision, "high"), 5e-7, 5e-5),
        (functools.partial(setattr, torch.backends, "fp32_precision", "tf32"), 5e-7, 5e-5),  # as transformers sets it
        (functools.partial(setattr, torch.backends, "fp32_precision", "ieee"), 0, 5e-6),
    ],
)
def test_precision_of_float32(setting: Callable[[], None], least: float, limit: float) -> None:
    x, y = pairs(64, 32)
    truth = run(reference.contrastive_loss, x, y, 100.0, torch.float64)
    setting()
    ours = run(contrastive_loss, x, y, 100.0, torch.float32, backend="triton")
    assert least <= relative_error(ours[1], truth[1]) < limit


@pytest.mark.parametrize("module", [torch_backend, backend], ids=["torch", "triton"])
def test_softmax_losses_keep_their_digits(module: Any) -> None:
    """Odds from e^-60 to e^60. The rounding error of an exponent grows with the exponent."""
    odds_x, odds_y = torch.linspace(-60, 60, 5001, device=DEVICE), torch.linspace(60, -60, 7001, device=DEVICE)
    zeros = torch.zeros(7001, device=DEVICE)
    own = odds_y[1000:6001]  # not aligned, like a process's part of all columns
    loss, lse_x, lse_y, coefficient = module.softmax_losses(zeros[:5001], odds_x, own, zeros, odds_y)
    for lse, odds in ((lse_x, odds_x), (lse_y, odds_y)):
        expected = torch.nn.functional.softplus(odds.double(), threshold=100)
        assert ((lse / expected - 1).abs() <= 2e-7 * (2 + odds.abs())).all()
    expected = -torch.sigmoid(odds_x.double()) - torch.sigmoid(own.double())
    assert ((coefficient / expected - 1).abs() <= 2e-7 * (2 + odds_x.abs())).all()
    assert abs(loss.double() / torch.cat((lse_x, lse_y[1000:6001])).double().sum() - 1) <= 1e-6
    unusual = torch.tensor([-torch.inf, torch.inf], device=DEVICE)
    loss, lse_x, lse_y, coefficient = module.softmax_losses(zeros[:2], unusual, unusual, zeros[:2] + 3, unusual)
    assert [loss.item(), *lse_x.tolist(), *lse_y.tolist()] == [torch.inf, 0, torch.inf, 3, torch.inf]
    assert coefficient.tolist() == [0, -2]
    assert module.softmax_losses(*[zeros[:2]] * 2, unusual * torch.nan, *[zeros[:2]] * 2)[0].isnan()


@pytest.mark.parametrize("diagonal", [None, 0, 5, 40])
def test_rectangular_blocks(diagonal: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of strategies: m images and n texts, with positives off the main diagonal, in two launches each."""
    monkeypatch.setattr(backend, "NEAR_PAYS", 0)
    tile = triton_tiling.tiling_for(torch.device(DEVICE), 1).tile
    m, n = tile + 1, 3 * tile + 4
    x, y = pairs(n, 16, torch.float16)
    x = x[:m]
    scale, bias = torch.tensor(20.0, device=DEVICE), torch.tensor(-2.0, device=DEVICE)
    ids_x, ids_y = torch.arange(m, device=DEVICE) // 2, torch.arange(n, device=DEVICE) // 3
    generator = torch.Generator().manual_seed(0)
    positive_x, positive_y = (torch.randn(rows, generator=generator).to(DEVICE) for rows in (m, n))
    coefficients = positive_x.clamp(-2, 2)  # no loss has larger ones, and fp16 holds none beyond 4
    lse_x, lse_y = positive_x + 25, torch.full((n,), torch.inf, device=DEVICE)  # inf: columns without a share

    def of(module: str, dtype: torch.dtype) -> list[Tensor]:
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        a, b = x.to(dtype), y.to(dtype)
        s, c, px, py, lx, ly = (t.to(kind) for t in (scale, bias, positive_x, positive_y, lse_x, lse_y))
        block = (ids_x, ids_y, diagonal)
        out = [*kernels.softmax_statistics(a, b, s, px, py, *block, backend=module)]
        for own in (coefficients.to(kind), -coefficients.to(kind)):
            gradients = [torch.ones(rows, 16, dtype=kind, device=DEVICE) for rows in (m, n)]
            vectors = (lx, ly, None, None, own, None)
            of_scale = kernels.softmax_gradients(a, b, s, *vectors, *block, False, *gradients, True, module)
            out += [of_scale, *gradients]
        gradients = [torch.full((rows, 16), torch.nan, dtype=kind, device=DEVICE) for rows in (m, n)]
        return [*out, *kernels.sigmoid_block(a, b, s, c, *block, False, *gradients, backend=module), *gradients]

    for value, true in zip(of("triton", torch.float16), of("torch", torch.float64), strict=True):
        assert torch.equal(value.isfinite().cpu(), true.isfinite().cpu())
        assert relative_error(value[value.isfinite()], true[true.isfinite()]) < 1e-3


@pytest.mark.parametrize("scale", [20.0, 300.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_positives(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ids are positives: rows have one, several or none. At scale 300 sums overflow."""
    monkeypatch.setattr(backend, "NEAR_PAYS", 0)
    tile = triton_tiling.tiling_for(torch.device(DEVICE), 1).tile
    m, n, d = tile + 9, 4 * tile + 4, 16
    y, _ = pairs(n, d, dtype)
    ids_x = torch.arange(m, dtype=torch.int32, device=DEVICE)
    ids_y = (torch.arange(n, device=DEVICE) * m // (n - 20)).int()  # the last texts belong to no image
    ids_y[: n // 2] //= 2  # every other one of the first images has no text
    place = torch.searchsorted(ids_y, ids_x).clamp(max=n - 1)  # each row's first positive, or another text
    x = pairs(n, d, dtype)[1][place]
    multiplier = torch.tensor(scale, device=DEVICE)
    references = (
        kernels.positive_logits(x, y[place], multiplier, "triton"),
        kernels.positive_logits(y, x[ids_y.long().clamp(max=m - 1)], multiplier, "triton"),
    )
    equal = ids_x[:, None] == ids_y[None]

    def of(module: str, dtype: torch.dtype, vectors: tuple[Tensor, ...]) -> list[Tensor]:
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        s, b, *given = (t.to(kind) for t in (torch.tensor(scale), torch.tensor(-5.0), *vectors))
        block = x.to(dtype), y.to(dtype), s.to(DEVICE)
        if len(given) == 2:
            on = {"equal_are_positive": True, "backend": module}
            of_rows, of_columns = kernels.softmax_statistics(*block, *given, ids_x, ids_y, **on)
            return [*of_rows, *of_columns]
        gradients = [torch.full((rows, d), torch.nan, dtype=kind, device=DEVICE) for rows in (m, n)]
        of_x, of_y = gradients
        outputs = {"equal_are_positive": True, "grad_x": of_x, "grad_y": of_y, "backend": module}
        of_scale = kernels.softmax_gradients(*block, *given, ids_x, ids_y, **outputs)
        out = [of_scale, *gradients]
        gradients = [torch.full((rows, d), torch.nan, dtype=kind, device=DEVICE) for rows in (m, n)]
        of_x, of_y = gradients
        block = *block, b.to(DEVICE), ids_x, ids_y
        outputs |= {"grad_x": of_x, "grad_y": of_y}
        return [*out, *kernels.sigmoid_block(*block, **outputs), *gradients]

    true = of("torch", torch.float64, references)
    for value, expected in zip(of("triton", dtype, references), true, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=5e-7 * scale)  # the rounding of the logits

    relative, share = [], []
    for dim, (negatives, positives, _) in enumerate((true[:3], true[3:])):
        count = equal.sum(1 - dim)
        alone = -torch.sigmoid(negatives - positives).clamp(min=1e-37)
        relative.append(torch.logaddexp(negatives, positives).masked_fill(count == 0, torch.inf))
        share.append(torch.where(count == 1, alone, 1 / count).masked_fill(count == 0, 0))
    vectors = (*references, *relative, *share)
    for value, expected in zip(of("triton", dtype, vectors), of("torch", torch.float64, vectors), strict=True):
        assert relative_error(value, expected) < 2 * FLOOR[dtype]


@pytest.mark.parametrize("diagonal", [None, 0, 70])
def test_only_tiles_that_may_hold_equal_ids_compare_them(diagonal: int | None) -> None:
    tile = triton_tiling.tiling_for(torch.device(DEVICE), 1).tile
    m, n = 5 * tile + 3, 4 * tile - 1
    x = torch.zeros(m, 16, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(size, (size,), generator=generator).sort()[0].int().to(DEVICE) for size in (m, n)]
    equal = ids[0][:, None] == ids[1][None]
    if diagonal is not None:
        equal |= torch.arange(m, device=DEVICE)[:, None] + diagonal == torch.arange(n, device=DEVICE)
    seen = triton_operands.Operands.of(Block(x, x[:n], x[0, 0], *ids, diagonal)).overlaps
    assert seen is not None
    for block, (start, stop) in enumerate(seen.tolist()):
        (rows,) = equal[:, block * tile : (block + 1) * tile].any(1).nonzero(as_tuple=True)
        # A row may have an id that lies within the range of a column block's ids although no column has it.
        assert rows.min() // tile - 1 <= start <= rows.min() // tile
        assert rows.max() // tile + 1 <= stop <= rows.max() // tile + 2


@pytest.mark.parametrize("want", ["image", "text", "scale"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_some_gradients_only(objective: str, want: str) -> None:
    x, y = pairs(40, 16)
    leaves = {"image": x, "text": y, "scale": torch.tensor(10.0, device=DEVICE)}
    leaves[want].requires_grad_()
    (ours,) = torch.autograd.grad(
        contrastive_loss(*leaves.values(), objective=objective, backend="triton"), leaves[want]
    )
    (plain,) = torch.autograd.grad(reference.contrastive_loss(*leaves.values(), objective=objective), leaves[want])
    assert relative_error(ours, plain) < 1e-4


def test_autocast_changes_nothing() -> None:
    x, y = pairs(40, 16)
    expected = run(contrastive_loss, x, y, 30.0, torch.float32, backend="triton")
    with torch.autocast(DEVICE, torch.bfloat16):
        value = run(contrastive_loss, x, y, 30.0, torch.float32, backend="triton")
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(value[:4], expected[:4], strict=True))


def operators(name: str) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    x, y = pairs(20, 16)
    scale, vector, ids = torch.tensor(10.0, device=DEVICE), torch.randn(20, device=DEVICE), halves(20).int()
    zeros, pivots = torch.zeros(20, 16, device=DEVICE), (vector, vector)
    on, both = {"backend": name}, {"grad_x": zeros, "grad_y": zeros.clone(), "backend": name}
    return [
        (kernels.positive_logits, (x, y, scale), on),
        (kernels.softmax_statistics, (x, y, scale, *pivots, ids, ids, 0), on),
        (kernels.softmax_losses, (vector, vector, vector, vector, vector), on),
        (kernels.softmax_gradients, (x, y, scale, *pivots, None, None, vector, None, None, None, 0), both),
        (kernels.softmax_gradients, (x, y, scale, *pivots, *[None] * 4, ids, ids), {"grad_x": zeros, **on}),
        (kernels.sigmoid_block, (x, y, scale, scale, None, None, 0), both),
        (kernels.sigmoid_block, (x, y, scale, scale, ids, ids), {"grad_y": zeros, "equal_are_positive": True, **on}),
        (kernels.softmax_statistics, (x, y, scale, *pivots, ids, ids), {"equal_are_positive": True, **on}),
        (
            kernels.softmax_gradients,
            (x, y, scale, *[vector] * 6, ids, ids),
            {**both, "equal_are_positive": True, "accumulate": True},
        ),
    ]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_operators(name: str) -> None:
    for operator, arguments, options in operators(name):
        torch.library.opcheck(operator, arguments, options)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_compiled_without_a_graph_break(objective: str, name: str) -> None:
    def loss(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return 2 * contrastive_loss(3 * x, y, scale, bias, objective=objective, backend=name)

    x, y = pairs(40, 16)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager" if triton_tiling.INTERPRETED else "inductor")
    for a, b in zip(run(compiled, x, y, 5.0, x.dtype), run(loss, x, y, 5.0, x.dtype), strict=True):
        assert torch.equal(a, b) or relative_error(a, b) < 1e-5


def test_kernels_compile_for_every_kind_of_gpu() -> None:
    """Needs no GPU. The kernels fit into its shared memory and, on NVIDIA's GPUs, never load a single feature.

    Triton's cache keeps those whose source, options and compiler are the same as in the last run.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    # The smallest shared memory of compute capability 8.x, that of 8.6 and 8.9.
    available = {"cuda 80": 99 << 10, "cuda 90": 227 << 10, "hip gfx942": 64 << 10}
    output = subprocess.check_output([sys.executable, str(script), *available], env=environment, text=True)
    compiled = [line.split() for line in output.splitlines()]
    names = {f"triton_softmax.{name}" for name in ("positives", "softmax_sums", "log_odds", "softmax_losses")}
    names |= {"triton_softmax.softmax_coefficients", "triton_sigmoid.sigmoid_coefficients", "triton_tiles.id_overlaps"}
    names |= {"triton_quick_gelu._forward", "triton_quick_gelu._backward"}
    expected = {(target, name) for target in available for name in names}
    if backend.triton.__version__.startswith(backend.GLUON):
        on_hopper = ("softmax_sums", "softmax_coefficients", "sigmoid_coefficients")
        expected |= {("cuda 90", f"hopper_kernels.{name}") for name in on_hopper}
    assert {(f"{kind} {architecture}", name) for kind, architecture, name, *_ in compiled} == expected
    for kind, architecture, name, shared, narrow_loads in compiled:
        assert int(shared) <= available[f"{kind} {architecture}"], (kind, architecture, name)
        assert int(narrow_loads) == 0, (kind, architecture, name)


def forget_choice() -> None:
    """Forgets the choice of a backend, which is remembered for the life of a process."""
    for cache in (kernels._obstacle_to_triton, kernels.select):
        cache.cache_clear()


@pytest.fixture
def _fresh_choice() -> Iterator[None]:
    forget_choice()
    yield
    forget_choice()


@pytest.mark.usefixtures("_fresh_choice")
def test_where_triton_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (t.cpu() for t in pairs(8, 16))
    with pytest.raises(ValueError, match="float64"):
        contrastive_loss(x.double(), y.double(), 10.0, backend="triton")
    monkeypatch.setattr(triton_tiling, "INTERPRETED", False)
    forget_choice()
    with pytest.raises(ValueError, match="needs a CUDA or ROCm GPU, and the features are on cpu"):
        contrastive_loss(x, y, 10.0, backend="triton")


@pytest.mark.usefixtures("_fresh_choice")
def test_automatic_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    x, _ = pairs(8, 16)
    with caplog.at_level("INFO", "hf_infcl.kernels"):
        chosen = {kernels.select("auto", x.device, x.dtype) for _ in range(3)}
    assert chosen == {torch_backend if DEVICE == "cpu" else backend}
    assert len(caplog.records) == 1
    caplog.clear()
    assert kernels.select("auto", x.device, torch.float64) is torch_backend
    if DEVICE == "cuda":
        assert [record.levelname for record in caplog.records] == ["WARNING"]


LARGE = [
    (1000, 520, torch.bfloat16),
    (1000, 520, torch.float16),
    (2049, 1152, torch.bfloat16),
    (2049, 1152, torch.float32),
    (8191, 640, torch.bfloat16),
    (9000, 64, torch.float32),
]


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("batch", "dim", "dtype"), LARGE, ids=str)
def test_large(batch: int, dim: int, dtype: torch.dtype, objective: str) -> None:
    x, y = pairs(batch, dim, dtype, seed=batch)
    check(x, y, 60.0, objective=objective)
    check(x, y, 60.0, objective=objective, pair_ids=halves(batch))


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("enough_l2", [0, 1 << 40])
@pytest.mark.parametrize("dim", [64, 192, 320, 512, 576, 768, 1024, 1152])
def test_pairs_of_runs(dim: int, enough_l2: int, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pairs of runs per multiprocessor, some without a second run; all, some or no boxes of y are kept."""
    if ON_HOPPER:
        monkeypatch.setattr("hf_infcl.kernels.hopper_kernels.ENOUGH_L2", enough_l2)
    monkeypatch.setattr(backend, "LONGEST_OF_STATISTICS", 3)
    monkeypatch.setattr(backend, "LONGEST_OF_COEFFICIENTS", 3)
    check(*pairs(66 * 128 + 5, dim, torch.bfloat16), 60.0, objective=objective)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_overflow(dtype: torch.dtype) -> None:
    x, y = pairs(8192, 128, dtype)
    y[3], y[4] = -x[3], x[3]
    check(x, y, 200.0)


@pytest.fixture
def _memory_given_back() -> Iterator[None]:
    """Empties the allocator, which would keep 69 GiB while other workers test on the same GPU."""
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.usefixtures("_memory_given_back")
def test_more_elements_than_int32() -> None:
    m, n, d = (1 << 22) + 3, 200, 520
    x = torch.randn(m, d, device="cuda", dtype=torch.bfloat16) / d**0.5
    y = torch.randn(n, d, device="cuda", dtype=torch.bfloat16)
    scale, bias = torch.tensor(1.0, device="cuda"), torch.tensor(0.0, device="cuda")
    zeros = torch.zeros(m, device="cuda")
    (rows,), (columns,) = kernels.softmax_statistics(x, y, scale, zeros, zeros[:n], backend="triton")
    last = x[-300:].double() @ y.double().t()
    assert relative_error(rows[-300:], last.logsumexp(1)) < 1e-5
    assert relative_error(columns, torch.logsumexp(x.float() @ y.float().t(), 0)) < 1e-5
    gradient, of_y = torch.empty(m, d, device="cuda"), torch.empty(n, d, device="cuda")
    kernels.sigmoid_block(x, y, scale, bias, grad_x=gradient, grad_y=of_y, backend="triton")
    assert relative_error(gradient[-300:], last.sigmoid() @ y.double()) < 3e-3
    kernels.softmax_gradients(x, y, scale, rows, columns, *[None] * 4, grad_x=gradient, backend="triton")
    coefficients = (last - rows[-300:, None]).exp() + (last - columns).exp()
    assert relative_error(gradient[-300:], coefficients @ y.double()) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_never_waits_for_the_device(objective: str) -> None:
    x, y = pairs(7000, 64, torch.bfloat16)
    run(contrastive_loss, x, y, 30.0, x.dtype, objective=objective)
    x.requires_grad_()
    scale, bias = torch.tensor(30.0, device="cuda"), torch.tensor(-3.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        contrastive_loss(x, y, scale, bias, objective=objective, pair_ids=halves(7000)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_other_stream_and_device() -> None:
    x, y = pairs(3000, 64, torch.bfloat16)
    expected = run(contrastive_loss, x, y, 30.0, x.dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        value = run(contrastive_loss, x, y, 30.0, x.dtype)
    stream.synchronize()
    assert all(relative_error(a, b) < 1e-3 for a, b in zip(value[:4], expected[:4], strict=True))
    if torch.cuda.device_count() > 1:  # the current device remains the first
        value = run(contrastive_loss, x.to("cuda:1"), y.to("cuda:1"), 30.0, x.dtype)
        assert all(relative_error(a.to("cuda:0"), b) < 1e-3 for a, b in zip(value[:4], expected[:4], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_replays(objective: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay with other data gives the results of the computation, and later replays do not overwrite them."""
    batches = [pairs(1000, 72, dtype, seed=seed) for seed in range(5)]
    for ids in (None, halves(1000)):
        options = {"objective": objective, "backend": "triton", "pair_ids": ids}
        expected = [run(contrastive_loss, *batch, 10.0 + i, dtype, **options) for i, batch in enumerate(batches)]
        monkeypatch.setattr(cuda_graphs, "PATIENCE", 1)
        waiting = []
        for i, batch in enumerate(batches):
            leaves = [t.detach().requires_grad_() for t in batch]
            leaves += [torch.tensor(v, device="cuda", requires_grad=True) for v in (10.0 + i, -3.0)]
            waiting.append((contrastive_loss(*leaves, **options), leaves))
        for (loss, leaves), (value, *gradients) in zip(waiting, expected, strict=True):
            assert relative_error(loss.detach(), value) < 1e-5
            loss.backward()
            for leaf, gradient in zip(leaves, gradients, strict=True):
                assert relative_error(leaf.grad, gradient) < FLOOR[dtype]
        recording = cuda_graphs.recording.cache_info()
        assert recording.hits >= 4, "each batch would have a recording of its own"
        monkeypatch.setattr(cuda_graphs, "PATIENCE", 1 << 30)
        cuda_graphs.recording.cache_clear()


@pytest.mark.gpu
def test_a_forgotten_recording_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspaces of cuBLAS are large (tens of MiB), and torch keeps one for each stream."""
    x, y = pairs(4096, 512, torch.bfloat16)

    def call() -> None:
        leaves = [t.detach().requires_grad_() for t in (x, y)]
        contrastive_loss(*leaves, torch.tensor(30.0, device="cuda")).backward()

    with graphs.recordings() as made:
        call()
        before = torch.cuda.memory_allocated()
        monkeypatch.setattr(cuda_graphs, "PATIENCE", 1)
        call()
        assert made[0].graphs
        made.clear()
        cuda_graphs.forget_recordings()
        call()  # a workspace of this stream is there again, as before
        assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2047, 2048, 4100])
def test_quick_gelu_and_its_gradient(count: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(count)
    x, grad = ((3 * torch.randn(count, generator=g)).to(dtype) for _ in range(2))
    exact = x.double().requires_grad_()
    y = exact * torch.sigmoid(1.702 * exact)
    y.backward(grad.double())
    found = triton_quick_gelu.forward(x.to(DEVICE)), triton_quick_gelu.backward(x.to(DEVICE), grad.to(DEVICE))
    for value, expected in zip(found, (y, exact.grad), strict=True):
        assert value.dtype == dtype
        assert relative_error(value.cpu(), expected) < max(torch.finfo(dtype).eps, 1e-6)


@pytest.mark.gpu
def test_quick_gelu_of_more_elements_than_an_int32_counts() -> None:
    x = torch.full((2**31 + 5,), -1.0, device="cuda", dtype=torch.bfloat16)
    expected = torch.tensor(-1.0, dtype=torch.bfloat16) * torch.sigmoid(torch.tensor(-1.702))
    assert torch.equal(triton_quick_gelu.forward(x)[-5:].cpu(), expected.bfloat16().expand(5))


@pytest.mark.gpu
def test_replays_within_a_graph_and_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "PATIENCE", 1)
    x, y = pairs(4096, 512, torch.bfloat16)
    scale = torch.tensor(30.0, device="cuda")
    expected = contrastive_loss(x, y, scale)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        loss = contrastive_loss(x, y, scale)
    graph.replay()
    assert relative_error(loss, expected) < 1e-5

    leaves = x.requires_grad_(), y.requires_grad_(), scale
    first = torch.autograd.grad(contrastive_loss(*leaves), leaves[:2])
    monkeypatch.setattr(cuda_graphs.Recording, "record", _out_of_memory)
    for _ in range(3):
        again = torch.autograd.grad(contrastive_loss(*leaves), leaves[:2])
        assert all(relative_error(a, b) < 1e-3 for a, b in zip(again, first, strict=True))


def _out_of_memory(self: Any, exchange: Any, function: Any, tensors: Any) -> None:
    self._inputs = tensors
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
