"""The exact contrastive loss of a batch spread over processes.

Contract of `contrastive_loss`: the returned number is the loss of the global batch, the same on every process, and its
gradient is the gradient of the sum of the returned losses over the processes. So the mean over processes that DDP and
FSDP take yields, for every parameter, the gradient of one process that holds the whole batch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import kernels
from ..processes import Processes
from . import cuda_graphs
from .strategies import STRATEGIES, RingStrategy, select_strategy

OBJECTIVES = ("softmax", "sigmoid")
SMALL_BATCH = 8192  # up to here on an H200 a recording is worth its memory
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def contrastive_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None = None,
    *,
    objective: str = "softmax",
    strategy: str = "ring",
    backend: str = "auto",
    pair_ids: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The contrastive loss of the global batch, with the b pairs of every process in it.

    With B = world_size · b and the logits z_ij = logit_scale · x_i·y_j + logit_bias of all B images and B texts, which
    are never stored: `hf_infcl.reference.contrastive_loss` on the concatenated embeddings.

    The gradient is that of the sum of the returned losses over the processes, so that DDP's and FSDP's mean over the
    processes gives every parameter the gradient of one process holding the whole batch. The embeddings have to come
    out of the wrapped model's forward.

    One process on a GPU replays the kernels of up to 8,192 pairs as a CUDA graph from the third call with the same
    shapes on, since launching them takes longer than running them. The last two such graphs keep their memory, 170 MiB
    for 8,192 pairs of 512 dimensions; where that is not to be had, nothing is replayed.

    Args:
        image_embeds: [b, D] fp32, bf16, fp16 (or fp64 with the torch backend); b is equal on all processes. Pass
            L2-normalised rows for CLIP and SigLIP; nothing here assumes it.
        text_embeds: [b, D], same dtype and device.
        logit_scale: multiplier of the cosines (already exponentiated), one element, equal on all processes.
        logit_bias: one element or None (0). Softmax does not depend on it: its gradient is then zero, not None.
        objective: ``"softmax"`` (InfoNCE, CLIP) or ``"sigmoid"`` (SigLIP).
        strategy: how the processes share the work; the result is the same. ``"ring"`` (Inf-CL): texts travel around,
            memory O(b·D) per process besides a constant; up to 256 MiB of texts and gradients in all are gathered
            instead, as by ``"disco"``, which takes fewer launches. ``"disco"`` (DisCo-CLIP), ``"local"`` (OpenCLIP's
            local loss with gradients through the gather) and ``"gather"`` (CLIP) need O(B·D): `hf_infcl.strategies`.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``; auto is triton on GPUs where that can run.
        pair_ids: [b] int64. Pairs with equal ids are the same image or caption and never each other's negatives: the
            cell drops out of both denominators (softmax), or out of the sum (sigmoid).
        process_group: the processes that share the batch; None is the default group, or this process alone where
            torch.distributed is not initialised.

    Returns:
        The loss, an fp32 scalar (fp64 for fp64 inputs), the same on every process.

    Raises:
        ValueError: on every process alike, if shapes, dtypes or devices do not fit, differ between processes, or the
            scale or bias is not finite. (On a single GPU, where reading the scale would stall the stream, a non-finite
            tensor gives a NaN loss instead.)
        RuntimeError: another process failed and said so (`hf_infcl.processes.Processes.agree`).
    """
    return _loss(
        image_embeds,
        text_embeds,
        logit_scale,
        logit_bias,
        _Options(objective, strategy, backend),
        pair_ids,
        Processes(process_group),
    )


def local_contrastive_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None = None,
    *,
    objective: str = "softmax",
    backend: str = "auto",
    pair_ids: Tensor | None = None,
) -> Tensor:
    """`contrastive_loss` of what this process holds, whatever others do: no communication at all."""
    options = _Options(objective, "ring", backend)
    return _loss(image_embeds, text_embeds, logit_scale, logit_bias, options, pair_ids, Processes(alone=True))


@dataclass(frozen=True)
class _Options:
    objective: str
    strategy: str
    backend: str

    def problem(self) -> str:
        """Which option is none, or an empty string."""
        for name, known in (("objective", OBJECTIVES), ("strategy", STRATEGIES), ("backend", kernels.BACKENDS)):
            if getattr(self, name) not in known:
                return f"{name} must be one of {', '.join(map(repr, known))}, got {getattr(self, name)!r}."
        return ""


def _loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float | None,
    options: _Options,
    pair_ids: Tensor | None,
    processes: Processes,
) -> Tensor:
    _check(x, y, scale, bias, options, pair_ids, processes)
    dtype = kernels.torch_backend.accumulate_dtype(x)
    # Scalars live on the features' device, so that no backend has to wait for their values.
    scale, bias = _scalar(scale, dtype, x.device), _scalar(0.0 if bias is None else bias, dtype, x.device)
    strategy = select_strategy(options.strategy, processes, options.backend, y)
    # Within a Function grad mode is always off, and its needs_input_grad does not ask for it.
    wanted = tuple(torch.is_grad_enabled() and t.requires_grad for t in (x, y, scale, bias))
    with torch.autocast(x.device.type, enabled=False):
        return _Loss.apply(x, y, scale, bias, pair_ids, strategy, options.objective, wanted)


def _scalar(value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, dtype).reshape(())
    value = value if torch.compiler.is_compiling() else float(value)  # numpy's numbers and arrays without dimensions
    return torch.full((), value, dtype=dtype, device=device)  # unlike a copy from the host allowed in CUDA graphs


class _Loss(torch.autograd.Function):
    """The loss and, while its statistics are at hand, its gradients: the backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        bias: Tensor,
        ids: Tensor | None,
        strategy: RingStrategy,
        objective: str,
        wanted: tuple[bool, ...],
    ) -> Tensor:
        evaluate = functools.partial(_evaluate, strategy, objective, wanted)
        if _is_small(strategy, x):
            evaluate = functools.partial(
                cuda_graphs.run, (type(strategy), strategy.backend, objective, wanted), evaluate
            )
        loss, *gradients = evaluate(x, y, scale, bias, ids)
        assert loss is not None
        ctx.save_for_backward(*gradients)
        ctx.processes, ctx.dtype = strategy.processes, x.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        products_x, products_y, factors = ctx.saved_tensors
        want_x, want_y, want_scale, want_bias = ctx.needs_input_grad[:4]
        of_products, of_scale, of_bias = (ctx.processes.sum(grad) * factors).unbind()
        return (
            _scaled(products_x, of_products, ctx.dtype) if want_x else None,
            _scaled(products_y, of_products, ctx.dtype) if want_y else None,
            of_scale if want_scale else None,
            of_bias if want_bias else None,
            None,
            None,
            None,
            None,
        )


def _is_small(strategy: RingStrategy, x: Tensor) -> bool:
    """Whether launching kernels takes longer than the kernels, and nothing but kernels is launched."""
    return (
        not torch.compiler.is_compiling()
        and x.is_cuda
        and len(x) <= SMALL_BATCH
        and strategy.processes.world_size == 1
        and kernels.select(strategy.backend, x) is not kernels.torch_backend
    )


def _evaluate(
    strategy: RingStrategy,
    objective: str,
    wanted: tuple[bool, ...],
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    ids: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The loss; the products C·Y and Cᵀ·X; and factors [3] from the gradient of the loss to those of the inputs.

    The factors are of the products, of scale, and of bias: dX = s·G·Y and dY = s·Gᵀ·X, where G is C up to a constant.
    Because z is bilinear the scale needs no pass of its own: Σ_ij G_ij x_i·y_j = Σ_i x_i·(G·Y)_i. Each process returns
    its own images' share of the scale's and the bias's gradient.
    """
    want_x, want_y, want_scale, _ = wanted
    total, of_bias, products_x, products_y = getattr(strategy, objective)(
        x, y, scale, bias, ids, want_x or (want_scale and not want_y), want_y
    )
    count = len(x) * strategy.processes.world_size * (2 if objective == "softmax" else 1)
    loss = strategy.processes.sum(total) / count
    if not any(wanted):
        return loss, None, None, None
    of_scale = torch.zeros_like(scale)
    if want_scale:
        rows, sums = (x, products_x) if products_x is not None else (y, products_y)
        of_scale = (rows * sums).sum()
    return loss, products_x, products_y, torch.stack((scale, of_scale, of_bias)) / count


def _scaled(products: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor · products in the dtype, without a copy in between."""
    return torch.mul(products, factor, out=torch.empty_like(products, dtype=dtype))


def _check(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float | None,
    options: _Options,
    pair_ids: Tensor | None,
    processes: Processes,
) -> None:
    """Raises the same ValueError on every process if any process's inputs are unusable or do not fit the others'."""
    alone = processes.world_size == 1
    problem = options.problem() or _problem(x, y, scale, bias, pair_ids, options.backend, alone)
    if alone:
        if problem:
            raise ValueError(problem)
        return
    # One small all-gather in the good case; texts are exchanged only when there is something to say.
    signature = [0.0] * 12
    if not problem:
        gradients = [torch.is_grad_enabled() and isinstance(t, Tensor) and t.requires_grad for t in (x, y, scale, bias)]
        signature = [
            1,
            *x.shape,
            _DTYPES.index(x.dtype),
            x.device.type == "cpu",
            _number(scale),
            bias is None,
            0 if bias is None else _number(bias),
            OBJECTIVES.index(options.objective),
            list(STRATEGIES).index(options.strategy),
            pair_ids is not None,
            sum(g << i for i, g in enumerate(gradients)),
        ]
    signatures = processes.agree(signature)
    if not problem and all(other == signatures[0] for other in signatures):
        return
    texts = processes.gather_text(problem or _describe(x, y, scale, bias, options, pair_ids))
    listing = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
    raise ValueError(
        "contrastive_loss needs embeddings of one shape and dtype, one logit_scale and logit_bias, and the same "
        "options on every process. Train on full batches only (drop_last) and with the same model everywhere. "
        f"Seen:\n{listing}"
    )


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _problem(
    x: Any,
    y: Any,
    scale: Any,
    bias: Any,
    pair_ids: Any,
    backend: str,
    alone: bool,
) -> str:
    """What is wrong with one process's inputs, or an empty string."""
    for name, value in (("image_embeds", x), ("text_embeds", y)):
        if not isinstance(value, Tensor):
            return (
                f"{name} must be a tensor, [b, D], got a {type(value).__name__}. Of what a model of transformers "
                "returns, pass the embeddings: image_embeds and text_embeds, or a tower's pooler_output."
            )
    if x.ndim != 2 or y.shape != x.shape or not x.numel():
        return (
            f"image_embeds and text_embeds must both be [b, D] with b, D >= 1, got {list(x.shape)} and {list(y.shape)}."
        )
    if x.dtype != y.dtype or x.dtype not in _DTYPES:
        return f"image_embeds and text_embeds must share a floating dtype, got {x.dtype} and {y.dtype}."
    if not torch.compiler.is_compiling() and (obstacle := kernels.obstacle(backend, x.device, x.dtype)):
        return obstacle
    if x.device != y.device:
        return f"image_embeds and text_embeds must be on one device, got {x.device} and {y.device}."
    for name, value in (("logit_scale", scale), ("logit_bias", bias)):
        if value is None and name == "logit_bias":
            continue
        if isinstance(value, Tensor) and value.numel() != 1:
            return f"{name} must have one element, got shape {list(value.shape)}."
        # On a GPU reading a value stalls the stream, and a compiled graph cannot do it.
        known = not alone or x.device.type == "cpu" or not isinstance(value, Tensor)
        if torch.compiler.is_compiling() or not known:
            continue
        try:
            finite = math.isfinite(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, OverflowError):
            return f"{name} must be a number or a tensor of one element, got a {type(value).__name__}."
        if not finite:
            return f"{name} must be finite, got {_number(value)}."
    if pair_ids is not None:
        if not isinstance(pair_ids, Tensor):
            return f"pair_ids must be a tensor, [b] int64, got a {type(pair_ids).__name__}."
        if pair_ids.shape != x.shape[:1] or pair_ids.dtype != torch.int64:
            return f"pair_ids must be [b] = [{len(x)}] int64, got {list(pair_ids.shape)} {pair_ids.dtype}."
        if pair_ids.device != x.device:
            return f"pair_ids must be on the embeddings' device {x.device}, got {pair_ids.device}."
    return ""


def _describe(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float | None,
    options: _Options,
    pair_ids: Tensor | None,
) -> str:
    bias_text = "None" if bias is None else f"{_number(bias):g}"
    gradients = [
        name
        for name, t in (("images", x), ("texts", y), ("logit_scale", scale), ("logit_bias", bias))
        if isinstance(t, Tensor) and t.requires_grad
    ]
    return (
        f"embeddings {list(x.shape)} {x.dtype} on {x.device.type}, logit_scale {_number(scale):.9g}, logit_bias "
        f"{bias_text}, {options.objective}, {options.strategy}, {'with' if pair_ids is not None else 'no'} pair_ids, "
        f"gradients for {', '.join(gradients) or 'nothing'}"
    )
