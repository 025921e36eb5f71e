"""Random cases for `contrastive_loss`: each is drawn from a seed; its loss and gradients are compared with float64."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hf_infcl import contrastive_loss
from hf_infcl.kernels import torch_backend
from hf_infcl.loss import OBJECTIVES, STRATEGIES, reference

from . import extended
from .numerics import features

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
KINDS = ("normalised", "unnormalised", "duplicates", "adversarial", "zeros", "orthonormal")
LAYOUTS = ("contiguous", "transposed", "columns of a wider tensor", "every other row", "unaligned", "one row expanded")
EMBEDDINGS, SCALARS = ("image_embeds", "text_embeds", "negative_texts"), ("logit_scale", "logit_bias")
PAIR_IDS = (None, None, "few", "all equal", "all different")
# How texts belong to images. None: text i belongs to image i. The others pass image_ids and text_ids.
BELONGING = (None, None, None, "an image each", "captions", "labels", "some", "one")
TILES = ("TILE_ELEMENTS", "TILE_ELEMENTS_GPU")
NUMBERS = ("small", "equal in their lower 32 bits", "extreme")

# Triton compiles its kernels again for every multiple of 64 dimensions (fp32: of 8), so GPUs use only two ranges.
GPU_DIMENSIONS = {"float32": ((1, 16), (33, 40))}
GPU_DIMENSIONS |= dict.fromkeys(("bfloat16", "float16"), ((1, 128), (449, 512))) | {"float64": ((1, 300), (1, 1200))}


@dataclass(frozen=True)
class Case:
    """The arguments of one call on all processes, drawn from a seed."""

    seed: int
    device: str
    images: tuple[int, ...]  # the number on each process, as for the texts
    texts: tuple[int, ...]
    negative_texts: tuple[int, ...] | None
    d: int
    dtype: str
    objective: str
    strategy: str
    backend: str
    kind: str
    layouts: tuple[str, str, str]  # of the EMBEDDINGS
    scale: float
    bias: float | None
    scalars: str  # "numbers", "0-dim", "vector"
    pair_ids: str | None
    belonging: str | None
    numbers: str  # the kind of numbers that ids are
    wanted: tuple[str, ...]  # the arguments whose gradients are computed
    weight: float
    calls: int  # the number of calls with these shapes; from the third on a GPU replays a CUDA graph
    tile_elements: int  # TILE_ELEMENTS of the torch backend

    @classmethod
    def draw(cls, seed: int, world_size: int, device: str) -> Case:
        r = random.Random(seed)
        on_gpu = device == "cuda"
        dtype = r.choice(["float32", *DTYPES])
        least, most = r.choice(GPU_DIMENSIONS[dtype]) if on_gpu else (1, 70)
        scalars = r.choice(("numbers", "0-dim", "vector"))
        belonging = r.choice(BELONGING)

        def rows() -> int:
            return round(math.exp(r.uniform(0, math.log(1500 if on_gpu else 40))))

        images = (rows(),) * world_size
        texts = images if belonging is None else tuple(rows() for _ in images)
        negative_texts = r.choice((None, None, tuple(rows() - 1 for _ in images)))
        given = {*EMBEDDINGS} - ({"negative_texts"} if negative_texts is None else set())
        given |= set() if scalars == "numbers" else {*SCALARS}
        return cls(
            seed=seed,
            device=device,
            images=images,
            texts=texts,
            negative_texts=negative_texts,
            d=r.randint(least, most),
            dtype=dtype,
            objective=r.choice(list(OBJECTIVES)),
            strategy=r.choice(list(STRATEGIES)),
            backend=r.choice(("auto", "auto", "torch")),
            kind=r.choice(KINDS),
            layouts=(r.choice(LAYOUTS), r.choice(LAYOUTS), r.choice(LAYOUTS)),
            # fp16 cannot hold the gradients of larger scales.
            scale=r.choice((0.0, 1.0, 100.0, math.exp(r.uniform(-7, math.log(500 if dtype == "float16" else 1e4))))),
            bias=r.choice((None, 0.0, -10.0, r.uniform(-20, 20))),
            scalars=scalars,
            pair_ids=r.choice(PAIR_IDS) if belonging is None else None,
            belonging=belonging,
            numbers=r.choice(NUMBERS),
            wanted=tuple(name for name in (*EMBEDDINGS, *SCALARS) if r.random() < 0.7 and name in given),
            weight=r.choice((1.0, 1.0, 3.0, -0.5)),
            calls=r.choice((1, 1, 1, 1, 5)) if on_gpu else 1,
            tile_elements=r.choice((1 << 14, 1 << 24) if on_gpu else (16, 300, 1 << 20)),
        )

    def kernels(self) -> tuple[Any, ...]:
        """A key that is equal for cases with the same compiled kernels, except for the alignment of vectors."""
        long = self.d > GPU_DIMENSIONS[self.dtype][0][1]
        ids = self.pair_ids is not None, self.belonging is not None
        return self.dtype, self.objective, self.backend == "torch", long, *ids

    def arguments(self) -> dict[str, Tensor]:
        """The embeddings and ids of the whole batch; embeddings [rows, D] in the case's dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        n, m, h = sum(self.images), sum(self.texts), sum(self.negative_texts or ())
        likeness = self._likeness(n, m, generator)
        last = max(n, int(likeness.max()) + 1)
        x, y = self._features(last + h)
        embeddings = dict(zip(EMBEDDINGS, (x[:n], y[likeness], y[last:]), strict=True))
        if self.negative_texts is None:
            del embeddings["negative_texts"]
        for name, layout in zip(EMBEDDINGS, self.layouts, strict=True):
            if name in embeddings and layout == "one row expanded":
                embeddings[name] = embeddings[name][:1].expand(len(embeddings[name]), -1)
        ids = {}
        if self.pair_ids is not None:
            ids["pair_ids"] = {
                "few": torch.randint(0, max(1, n // 2), (n,), generator=generator),
                "all equal": torch.zeros(n, dtype=torch.int64),
                "all different": torch.randperm(n, generator=generator),
            }[self.pair_ids]
        elif self.belonging is not None:
            ids = {"image_ids": torch.arange(n), "text_ids": likeness}
            if self.belonging == "labels":
                classes = int(torch.randint(1, n + 1, (), generator=generator))
                ids = {name: numbers % classes for name, numbers in ids.items()}
        numbered = {name: self._number(numbers) for name, numbers in ids.items()}
        of_dtype = {name: t.to(DTYPES[self.dtype]) for name, t in embeddings.items()}
        return {name: t.to(self.device) for name, t in (of_dtype | numbered).items()}

    def _likeness(self, n: int, m: int, generator: torch.Generator) -> Tensor:
        """[m]: for each text, the index of the image that it resembles; n or more for none."""
        if self.belonging is None:
            return torch.arange(n)
        if self.belonging == "an image each":
            return torch.randperm(max(n, m), generator=generator)[:m]
        likeness = {
            "captions": torch.randint(0, n, (m,), generator=generator),
            "labels": torch.randint(0, n, (m,), generator=generator),
            "some": torch.randint(0, 2 * max(n, m), (m,), generator=generator),
            "one": torch.arange(n, n + m),
        }[self.belonging]
        likeness[0] = n - 1  # an image of the last process: without any positive the loss would not be finite
        return likeness

    def _features(self, rows: int) -> tuple[Tensor, Tensor]:
        """fp32 images [rows, D], and texts that resemble them."""
        x, y = features(rows, self.d, self.seed)
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
        elif self.kind == "orthonormal":  # a loss near zero if the scale is large
            x = y = torch.eye(self.d).repeat(-(-len(x) // self.d), 1)[: len(x)]
        return x, y

    def _number(self, ids: Tensor) -> Tensor:
        """int64 ids that are equal wherever the given ones are equal."""
        if self.numbers == "extreme":
            return torch.where(ids % 2 == 0, -(2**63) + ids, 2**63 - 1 - ids)
        return ids << 33 if self.numbers == "equal in their lower 32 bits" else ids - 2

    def part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """The rows of one process; scalars are returned unchanged."""
        images, texts = dict.fromkeys(("image_embeds", "image_ids", "pair_ids"), self.images), self.texts
        counts = {**images, "text_embeds": texts, "text_ids": texts, "negative_texts": self.negative_texts or ()}
        return whole.split(counts[name])[rank] if name in counts else whole


class Error(NamedTuple):
    """The norm of the error of the loss or of one gradient; infinite if any element is not finite."""

    name: str
    ours: float
    of_rounding: float  # the largest error that rounding can explain
    of_plain_torch: float  # the error of plain torch on the same inputs in the same dtype

    def is_failure(self) -> bool:
        return self.ours > self.of_rounding and self.ours > self.of_plain_torch


@dataclass
class Findings:
    """The results of some cases."""

    cases: int = 0
    failures: list[str] = field(default_factory=list)
    beyond_rounding: int = 0  # errors that exceed the estimate of rounding but not the error of plain torch
    ratios: list[float] = field(default_factory=list)  # our error over plain torch's, where neither is zero

    def add(self, other: Findings) -> None:
        self.cases += other.cases
        self.failures += other.failures
        self.beyond_rounding += other.beyond_rounding
        self.ratios += other.ratios


def lay_out(t: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout, surrounded by NaN."""
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
    """The errors of the loss and of the wanted gradients, for this process's rows and for the scalars."""
    arguments, world_size = case.arguments(), len(case.images)
    loss, gradients = _ours(case, {name: case.part(name, t, rank) for name, t in arguments.items()})
    truth, exact = exact_results(case, arguments)
    plain_loss, plain = plain_results(case, arguments, DTYPES[case.dtype])
    allowed_loss, allowed = _rounding(case, arguments)
    compared = {"loss": (_less(loss, truth), allowed_loss, _less(plain_loss, truth))}
    for name, gradient in gradients.items():
        value = gradient.double() / world_size  # the loss is summed over the processes
        if name in SCALARS and world_size > 1:  # the mean over the processes, as DDP forms it
            dist.all_reduce(value)
        bound, usual, *true = (case.part(name, t, rank) for t in (allowed[name], plain[name], *exact[name]))
        compared[name] = _less(value.reshape(usual.shape), true), bound, _less(usual, true)
    # All norms are copied from the device at once, since each copy may wait for the queued kernels of other processes.
    norms = torch.stack([torch.linalg.vector_norm(t) for tensors in compared.values() for t in tensors])
    finite = [norm if math.isfinite(norm) else math.inf for norm in norms.tolist()]
    return [Error(name, *finite[3 * place : 3 * place + 3]) for place, name in enumerate(compared)]


def _ours(case: Case, arguments: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    dtype = torch.float64 if case.dtype == "float64" else torch.float32

    def scalar(name: str, value: float | None) -> Any:
        wanted = name in case.wanted
        if value is None and not wanted:
            return None
        if case.scalars == "numbers":
            return value
        value = 0.0 if value is None else value
        shape = (1,) if case.scalars == "vector" else ()
        return torch.full(shape, value, dtype=dtype, device=case.device, requires_grad=wanted)

    for call in reversed(range(case.calls)):
        leaves = {
            name: lay_out(arguments[name] * 0.5**call, layout).detach().requires_grad_(name in case.wanted)
            for name, layout in zip(EMBEDDINGS, case.layouts, strict=True)
            if name in arguments
        }
        leaves |= {"logit_scale": scalar("logit_scale", case.scale), "logit_bias": scalar("logit_bias", case.bias)}
        with mock.patch.multiple(torch_backend, **dict.fromkeys(TILES, case.tile_elements)):
            loss = contrastive_loss(
                **(arguments | leaves), objective=case.objective, strategy=case.strategy, backend=case.backend
            )
    gradients: dict[str, Tensor] = {}
    if case.wanted:
        inputs = [leaves[name] for name in case.wanted]
        gradients = dict(zip(case.wanted, torch.autograd.grad(case.weight * loss, inputs), strict=True))
    assert loss.dtype == dtype
    assert loss.shape == ()
    for name, gradient in gradients.items():
        assert gradient.dtype == leaves[name].dtype
        assert gradient.shape == leaves[name].shape
    return loss.detach(), gradients


def _less(value: Tensor, exact: Sequence[Tensor]) -> Tensor:
    """The value minus the sum of float64 tensors, of which the first is the largest."""
    return functools.reduce(torch.sub, exact, value.double())


def exact_results(case: Case, arguments: dict[str, Tensor]) -> tuple[Sequence[Tensor], dict[str, Sequence[Tensor]]]:
    """The loss and its gradients in higher precision than the case's dtype, each as float64 tensors to be added up."""
    if case.dtype != "float64":
        loss, gradients = plain_results(case, arguments, torch.float64)
        return [loss], {name: [gradient] for name, gradient in gradients.items()}
    exact_loss, exact = extended.loss_and_gradients(arguments, case.scale, case.bias or 0.0, case.objective)
    device = arguments["image_embeds"].device
    weighted = {name: extended.parts(case.weight * gradient, device) for name, gradient in exact.items()}
    return extended.parts(exact_loss, device), weighted


def plain_results(case: Case, arguments: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the whole batch and its gradients in plain torch. Scalars are not rounded to less than fp32."""
    scalars = torch.promote_types(dtype, torch.float32)
    leaves = {name: arguments[name].to(dtype) for name in EMBEDDINGS if name in arguments}
    for name, value in zip(SCALARS, (case.scale, case.bias or 0.0), strict=True):
        leaves[name] = _exact_scalar(case, value).to(scalars)
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    loss = reference.contrastive_loss(**(arguments | leaves), objective=case.objective)
    gradients = torch.autograd.grad(case.weight * loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, gradients, strict=True))


def _exact_scalar(case: Case, value: float) -> Tensor:
    """The number that the loss received, in float64: a tensor of fp32 has already rounded it."""
    rounded = case.dtype != "float64" and case.scalars != "numbers"
    exact = torch.tensor(value, dtype=torch.float64, device=case.device)
    return exact.float().double() if rounded else exact


def _rounding(case: Case, arguments: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The errors that rounding alone can cause, of the loss and of each gradient, elementwise.

    A logit is a sum of D products, and each product and each partial sum is rounded. Its error is proportional to its
    largest possible size, |scale|·|x|·|y|, and grows with the square root of D. The exponentials of differences of
    logits are then off by a factor. In half precision the coefficients are rounded again for the product with the
    features, and the gradients are rounded to their dtype, in which small numbers become zero. The float64 reference
    rounds as well, so fewer digits can be compared of a loss below 1e-12.
    """
    dtype = DTYPES[case.dtype]
    eps = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    half = torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
    vanishing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps if half else 0.0
    x = arguments["image_embeds"].double()
    y = torch.cat([arguments[name].double() for name in EMBEDDINGS[1:] if name in arguments])
    texts = len(arguments["text_embeds"])
    scale, bias = _exact_scalar(case, case.scale), _exact_scalar(case, case.bias or 0.0)
    size = scale * x.norm(dim=1).max() * y.norm(dim=1).max() + bias.abs() + 4
    factor = torch.expm1(eps * (case.d**0.5 / 2 + 4) * size) + eps * (max(len(x), len(y)) ** 0.5 + 8)
    of_reference = 2.0**-51 * size

    logits = (scale * x @ y.t() + bias).requires_grad_()
    identity = torch.eye(len(y), dtype=torch.float64, device=x.device)
    ids = {name: t for name, t in arguments.items() if name.endswith("ids")}
    loss = reference.contrastive_loss(
        *(logits, identity[:texts], 1.0), objective=case.objective, negative_texts=identity[texts:], **ids
    )
    coefficients = torch.autograd.grad(loss, logits)[0].abs()
    fewest = len(x)  # the number of images or of texts that have a positive, whichever is smaller
    if case.belonging is not None:
        positive = ids["image_ids"][:, None] == ids["text_ids"][None, :]
        fewest = min(int(positive.any(dim).sum()) for dim in (0, 1))
        if case.objective == "softmax":
            rows = _parts(logits.detach(), F.pad(positive, (0, len(y) - texts)))
            columns = _parts(logits.detach()[:, :texts].t(), positive.t()).t()
            coefficients = (rows + F.pad(columns, (0, len(y) - texts))) / 2
    coefficients = coefficients * abs(case.weight)
    inexact = factor * coefficients + of_reference * abs(case.weight) / fewest
    rounded = inexact + half * coefficients
    # Coefficients in half precision are at least `fewest` times the derivative; the smallest of them become zero.
    lost_x, lost_y = (vanishing * abs(case.weight) * t.abs().sum(0, keepdim=True) / fewest for t in (y, x))
    least = vanishing + 1e-30
    of_texts = scale * (rounded.t() @ x.abs() + lost_y) + least
    return (
        factor * loss.detach() + of_reference,
        {
            "image_embeds": scale * (rounded @ y.abs() + lost_x) + least,
            "text_embeds": of_texts[:texts],
            "negative_texts": of_texts[texts:],
            "logit_scale": (inexact * (x.abs() @ y.abs().t())).sum() + 1e-30,
            "logit_bias": inexact.sum() + 1e-30,
        },
    )


def _parts(logits: Tensor, positive: Tensor) -> Tensor:
    """The coefficients of the rows' cross entropies, enlarged where cancellation loses digits of several positives.

    The coefficient of one of K positives is its probability minus 1/K. Both are rounded, however close they are. With
    K = 1 the coefficient is the sum of the other probabilities, which has full relative precision.
    """
    positives = positive.sum(1, keepdim=True)
    probabilities, shares = logits.softmax(1), positive / positives.clamp_min(1)
    parts = torch.where(positives == 1, (probabilities - shares).abs(), probabilities + shares)
    return torch.where(positives > 0, parts, 0) / (positives > 0).sum()
