"""Random cases for `contrastive_loss`: each is drawn from a number, and its errors are held against float64."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_infcl import contrastive_loss, reference
from hf_infcl.loss.strategies import OBJECTIVES, STRATEGIES

from .numerics import features

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
KINDS = ("normalised", "unnormalised", "duplicates", "adversarial", "zeros", "orthonormal")
LAYOUTS = ("contiguous", "transposed", "columns of a wider tensor", "every other row", "unaligned", "one row expanded")
NAMES = ("image_embeds", "text_embeds", "logit_scale", "logit_bias")

# Triton compiles its kernels anew for other multiples of 64 dimensions (fp32: of 8), so that a GPU gets two ranges.
GPU_DIMENSIONS = {"float32": ((1, 16), (33, 40))}
GPU_DIMENSIONS |= dict.fromkeys(("bfloat16", "float16"), ((1, 128), (449, 512))) | {"float64": ((1, 300), (1, 1200))}


@dataclass(frozen=True)
class Case:
    """What is drawn from a seed; equal on all processes."""

    seed: int
    world_size: int
    device: str
    b: int
    d: int
    dtype: str
    objective: str
    strategy: str
    backend: str
    kind: str
    layouts: tuple[str, str]
    scale: float
    bias: float | None
    scalars: str  # "numbers", "0-dim", "vector"
    ids: str | None
    wanted: tuple[bool, bool, bool, bool]
    weight: float
    calls: int  # with the same shapes; from the third on a GPU replays them as a CUDA graph

    @classmethod
    def draw(cls, seed: int, world_size: int, device: str) -> Case:
        r = random.Random(seed)
        on_gpu = device == "cuda"
        dtype = r.choice(["float32", *DTYPES])
        least, most = r.choice(GPU_DIMENSIONS[dtype]) if on_gpu else (1, 70)
        largest = 1500 if on_gpu else 40
        scalars = r.choice(("numbers", "0-dim", "vector"))
        layouts = r.choice(LAYOUTS), r.choice(LAYOUTS)
        return cls(
            seed=seed,
            world_size=world_size,
            device=device,
            b=round(math.exp(r.uniform(0, math.log(largest)))),
            d=r.randint(least, most),
            dtype=dtype,
            objective=r.choice(OBJECTIVES),
            strategy=r.choice(list(STRATEGIES)),
            backend=r.choice(("auto", "auto", "torch")),
            kind=r.choice(KINDS),
            layouts=layouts,
            # fp16 cannot hold the gradients of larger scales.
            scale=r.choice((0.0, 1.0, 100.0, math.exp(r.uniform(-7, math.log(500 if dtype == "float16" else 1e4))))),
            bias=r.choice((None, 0.0, -10.0, r.uniform(-20, 20))),
            scalars=scalars,
            ids=r.choice((None, None, "few", "all equal", "all different", "extreme")),
            wanted=tuple(r.random() < 0.7 and (i < 2 or scalars != "numbers") for i in range(4)),
            weight=r.choice((1.0, 1.0, 3.0, -0.5)),
            calls=r.choice((1, 1, 1, 1, 5)) if on_gpu else 1,
        )

    def embeddings(self) -> tuple[Tensor, Tensor]:
        """The whole batch [B, D] in the case's dtype."""
        x, y = features(self.world_size * self.b, self.d, self.seed)
        if self.kind == "unnormalised":
            x, y = 7 * x, 0.3 * y
        elif self.kind == "duplicates":
            x[:] = x[0].clone()
            y[len(y) // 2 :] = y[0].clone()
        elif self.kind == "adversarial":  # each positive at cosine -1, and a negative at +1
            y = -x
            y[len(y) // 2 :] = x[: len(y) - len(y) // 2]
        elif self.kind == "zeros":
            x[::2] = 0
        elif self.kind == "orthonormal":  # a loss near zero, where the scale is large
            x = y = torch.eye(self.d).repeat(-(-len(x) // self.d), 1)[: len(x)]
        x, y = (
            t[:1].expand(len(t), -1) if layout == "one row expanded" else t
            for t, layout in zip((x, y), self.layouts, strict=True)
        )
        return x.to(self.device, DTYPES[self.dtype]), y.to(self.device, DTYPES[self.dtype])

    def pair_ids(self) -> Tensor | None:
        """[B] int64 of the whole batch."""
        rows = self.world_size * self.b
        generator = torch.Generator().manual_seed(self.seed)
        if self.ids is None:
            return None
        ids = {
            "few": torch.randint(-2, max(1, rows // 2), (rows,), generator=generator),
            "all equal": torch.full((rows,), -1),
            "all different": torch.randperm(rows, generator=generator) << 33,  # equal in their lower 32 bits
            "extreme": torch.tensor([-(2**63), 2**63 - 1, 0]).repeat(rows)[:rows],
        }[self.ids]
        return ids.to(self.device)


class Error(NamedTuple):
    """‖value - truth‖ of the loss or one of its gradients, infinite if a number is not finite."""

    name: str
    ours: float
    of_rounding: float  # what rounding alone may make of it
    of_plain_torch: float  # on the same inputs in the same dtype

    def is_failure(self) -> bool:
        return self.ours > self.of_rounding and self.ours > self.of_plain_torch


@dataclass
class Findings:
    """What came out of cases."""

    cases: int = 0
    failures: list[str] = field(default_factory=list)
    beyond_rounding: int = 0  # errors above the estimate of rounding, but not above plain torch's
    ratios: list[float] = field(default_factory=list)  # of our errors to plain torch's, where neither is zero

    def add(self, other: Findings) -> None:
        self.cases += other.cases
        self.failures += other.failures
        self.beyond_rounding += other.beyond_rounding
        self.ratios += other.ratios


def lay_out(t: Tensor, layout: str) -> Tensor:
    """The same numbers in other places of memory, with NaN around them."""
    rows, columns = t.shape
    if layout == "transposed":
        return t.t().contiguous().t()
    if layout == "columns of a wider tensor":
        wide = t.new_full((rows, columns + 5), torch.nan)
        wide[:, 3 : 3 + columns] = t
        return wide[:, 3 : 3 + columns]
    if layout == "every other row":
        long = t.new_full((2 * rows, columns), torch.nan)
        long[1::2] = t
        return long[1::2]
    if layout == "unaligned":
        flat = t.new_full((t.numel() + 1,), torch.nan)
        flat[1:] = t.reshape(-1)
        return flat[1:].view(rows, columns)
    if layout == "one row expanded":
        return t[:1].contiguous().expand(rows, columns)
    return t.contiguous()


def rank_cases(rank: int, world_size: int, device: str, seeds: Iterable[int]) -> Findings:
    """Computes the cases of these seeds with the other processes of the default group, if there are several."""
    findings = Findings()
    for seed in seeds:
        case = Case.draw(seed, world_size, device)
        try:
            errors = errors_of(case, rank)
        except Exception as error:
            raise AssertionError(f"rank {rank} raised in {case}") from error
        findings.cases += 1
        findings.failures += [f"rank {rank}: {error} in {case}" for error in errors if error.is_failure()]
        findings.beyond_rounding += sum(e.of_rounding < e.ours <= e.of_plain_torch for e in errors)
        findings.ratios += [e.ours / e.of_plain_torch for e in errors if e.ours and 0 < e.of_plain_torch < math.inf]
    return findings


def errors_of(case: Case, rank: int) -> list[Error]:
    """The errors of the loss and of the gradients that are wanted, of this process's pairs and of the scalars."""
    x, y, ids = *case.embeddings(), case.pair_ids()
    mine = slice(rank * case.b, (rank + 1) * case.b)
    loss, gradients = _ours(case, x[mine], y[mine], None if ids is None else ids[mine])
    truth, exact = _plain(case, x, y, ids, torch.float64)
    plain_loss, plain = _plain(case, x, y, ids, DTYPES[case.dtype])
    allowed_loss, allowed = _rounding(case, x, y, ids)
    errors = [Error("loss", *(_norm(t) for t in (loss.double() - truth, allowed_loss, plain_loss.double() - truth)))]
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        value, true, bound, usual = gradient.double(), exact[index], allowed[index], plain[index].double()
        if index < 2:  # of the sum of all processes' losses
            value = value / case.world_size
            true, bound, usual = true[mine], bound[mine], usual[mine]
        elif case.world_size > 1:  # the mean over the processes, as DDP forms it
            dist.all_reduce(value)
            value /= case.world_size
        value = value.reshape(true.shape)
        errors.append(Error(NAMES[index], *(_norm(t) for t in (value - true, bound, usual - true))))
    return errors


def _norm(t: Tensor) -> float:
    norm = torch.linalg.vector_norm(t).item()
    return norm if math.isfinite(norm) else math.inf


def _ours(case: Case, x: Tensor, y: Tensor, ids: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    dtype = torch.float64 if case.dtype == "float64" else torch.float32

    def scalar(value: float | None, wanted: bool) -> Any:
        if value is None and not wanted:
            return None
        if case.scalars == "numbers":
            return value
        value = 0.0 if value is None else value
        shape = (1,) if case.scalars == "vector" else ()
        return torch.full(shape, value, dtype=dtype, device=case.device, requires_grad=wanted)

    for call in reversed(range(case.calls)):
        leaves = [
            lay_out(t * 0.5**call, layout).detach().requires_grad_(wanted)
            for t, layout, wanted in zip((x, y), case.layouts, case.wanted[:2], strict=True)
        ]
        leaves += [scalar(case.scale, case.wanted[2]), scalar(case.bias, case.wanted[3])]
        loss = contrastive_loss(
            *leaves, objective=case.objective, strategy=case.strategy, backend=case.backend, pair_ids=ids
        )
    gradients: list[Tensor | None] = [None] * 4
    inputs = [leaf for leaf, wanted in zip(leaves, case.wanted, strict=True) if wanted]
    if inputs:
        found = iter(torch.autograd.grad(case.weight * loss, inputs))
        gradients = [next(found) if wanted else None for wanted in case.wanted]
    assert loss.dtype == dtype
    assert loss.shape == ()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert gradient is None or (gradient.dtype == leaf.dtype and gradient.shape == leaf.shape)
    return loss.detach(), gradients


def _plain(
    case: Case, x: Tensor, y: Tensor, ids: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss of the whole batch in plain torch and its gradients; the scalars are not rounded below fp32."""
    scalars = torch.promote_types(dtype, torch.float32)
    leaves = [t.to(dtype).detach().requires_grad_() for t in (x, y)]
    leaves += [_exact_scalar(case, v).to(scalars).requires_grad_() for v in (case.scale, case.bias or 0.0)]
    loss = reference.contrastive_loss(*leaves, objective=case.objective, pair_ids=ids)
    gradients = torch.autograd.grad(case.weight * loss, leaves)
    return loss.detach(), gradients


def _exact_scalar(case: Case, value: float) -> Tensor:
    """float64 of what the loss received: a tensor of fp32 has already rounded the number."""
    rounded = case.dtype != "float64" and case.scalars != "numbers"
    exact = torch.tensor(value, dtype=torch.float64, device=case.device)
    return exact.float().double() if rounded else exact


def _rounding(case: Case, x: Tensor, y: Tensor, ids: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The errors that rounding alone can make, of the loss and of each gradient, elementwise.

    A logit is the sum of D products, each of them and each sum rounded: it is off by some of its largest possible size,
    |scale|·|x|·|y|, growing with the square root of D. The exponentials of differences of logits are off by a factor.
    The coefficients of half precision are rounded once more for the product with the features, the gradients for their
    dtype, in which small numbers vanish. The float64 reference rounds as well, and so do not all digits of a loss below
    1e-12 count.
    """
    dtype = DTYPES[case.dtype]
    eps = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    half = torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
    vanishing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps if half else 0.0
    x, y, rows = x.double(), y.double(), len(x)
    scale, bias = _exact_scalar(case, case.scale), _exact_scalar(case, case.bias or 0.0)
    size = scale * x.norm(dim=1).max() * y.norm(dim=1).max() + bias.abs() + 4
    factor = torch.expm1(eps * (case.d**0.5 / 2 + 4) * size) + eps * (rows**0.5 + 8)
    of_reference = 2.0**-51 * size

    logits = (scale * x @ y.t() + bias).requires_grad_()
    identity = torch.eye(rows, dtype=torch.float64, device=x.device)
    loss = reference.contrastive_loss(logits, identity, 1.0, objective=case.objective, pair_ids=ids)
    coefficients = torch.autograd.grad(loss, logits)[0].abs() * abs(case.weight)
    inexact = factor * coefficients + of_reference * abs(case.weight) / rows
    rounded = inexact + half * coefficients
    # Coefficients of half precision are at least B times the derivative; the smallest of them vanish.
    lost_x, lost_y = (vanishing * abs(case.weight) * t.abs().mean(0, keepdim=True) for t in (y, x))
    least = vanishing + 1e-30
    return (
        factor * loss.detach() + of_reference,
        (
            scale * (rounded @ y.abs() + lost_x) + least,
            scale * (rounded.t() @ x.abs() + lost_y) + least,
            (inexact * (x.abs() @ y.abs().t())).sum() + 1e-30,
            inexact.sum() + 1e-30,
        ),
    )
