"""Other losses for comparison with this package's, from other libraries or written in plain torch.

All take image_embeds and text_embeds [b, D], logit_scale and logit_bias, and return a loss. In plain torch the logits
have the features' dtype; under autocast, cross_entropy would convert them to fp32 and double their memory.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_infcl.processes.collectives import Processes

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# ---- One process ----


def vanilla(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, objective: str) -> Tensor:
    """The loss in its shortest form, with logits in the features' dtype."""
    logits = scale.to(x.dtype) * x @ y.t()
    if objective == "sigmoid":
        return F.softplus(
            torch.where(torch.eye(len(x), dtype=torch.bool, device=x.device), -1, 1) * (logits + bias)
        ).sum() / len(x)
    target = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def checkpointed(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, objective: str, rows: int = 4096) -> Tensor:
    """The loss with less memory, in chunks of rows that are recomputed in the backward."""

    def direction(a: Tensor, b: Tensor, start: int) -> Tensor:
        logits = scale.to(a.dtype) * a @ b.t()
        target = torch.arange(start, start + len(a), device=a.device)
        if objective == "sigmoid":
            logits = logits + bias
            own = logits.gather(1, target[:, None])
            return F.softplus(logits).sum() - F.softplus(own).sum() + F.softplus(-own).sum()
        return F.cross_entropy(logits, target, reduction="sum") / 2

    pairs = ((x, y), (y, x)) if objective == "softmax" else ((x, y),)
    terms = [
        checkpoint(direction, a[start : start + rows], b, start, use_reentrant=False)
        for a, b in pairs
        for start in range(0, len(a), rows)
    ]
    return torch.stack(terms).sum() / len(x)


def inf_cl(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    loss = importlib.import_module("inf_cl").cal_flash_loss  # one process's tiles
    x, y = x.float(), y.float()
    return (loss(x, y, scale=scale).mean() + loss(y, x, scale=scale).mean()) / 2


def cut_cross_entropy(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    loss = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    target = torch.arange(len(x), device=x.device)
    return (loss((scale * x).to(x.dtype), y, target) + loss((scale * y).to(y.dtype), x, target)) / 2


def torch_linear_cross_entropy(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    target = torch.arange(len(x), device=x.device)
    loss: Any = getattr(F, "linear_cross_entropy")  # noqa: B009 (from torch 2.12 on)
    return (loss((scale * x).to(x.dtype), y, target) + loss((scale * y).to(y.dtype), x, target)) / 2


def siglip_kernel(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, backend: str = "auto") -> Tensor:
    """The sigmoid loss in chunks of cuBLAS products and a Triton epilogue; it takes the logarithm of the scale."""
    return importlib.import_module("siglip_kernel").fused_siglip_loss(x, y, scale.log(), bias, backend=backend)


def siglip_kernel_plus(
    x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, image_ids: Tensor, text_ids: Tensor
) -> Tensor:
    """SigLIP+: equal ids are positives. Each of K positives in a row weighs 1 / (2K), plus the same for its column."""
    loss = importlib.import_module("siglip_kernel").fused_siglip_plus_loss
    return loss(x, y, scale.log(), bias, image_ids, text_ids, num_groups=len(x))


def open_clip(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, objective: str) -> Tensor:
    losses = importlib.import_module("open_clip.loss")
    if objective == "sigmoid":
        return losses.SigLipLoss()(x, y, scale.to(x.dtype), bias.to(x.dtype))
    return losses.ClipLoss()(x, y, scale.to(x.dtype))


# ---- Several processes, softmax. Gradients add up to world_size times that of the global mean, as DDP expects. ----

# At its peak each holds four matrices of the size of its logits: for both directions the logits, and their log-softmax
# or its gradient.
MATRICES = 4


class _Gather(torch.autograd.Function):
    """[W·b, D] from [b, D] of every process. The backward sums the gradients of a process's rows over all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, all_reduce: bool) -> Tensor:
        ctx.all_reduce = all_reduce
        return Processes().gather(x).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        processes = Processes()
        if not ctx.all_reduce:
            return processes.scatter_sum(grad), None
        return processes.sum(grad.contiguous()).view(processes.world_size, -1, grad.shape[1])[processes.rank], None


def clip(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """CLIP: every process gathers all features and computes all B×B logits."""
    return vanilla(_Gather.apply(x, False), _Gather.apply(y, False), scale, bias, objective="softmax")


def open_clip_local(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, all_reduce: bool = False) -> Tensor:
    """OpenCLIP's --local-loss --gather-with-grad: b×B logits of local images and all texts, and b×B the other way."""
    target = torch.arange(len(x), device=x.device) + Processes().rank * len(x)

    def direction(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(scale.to(a.dtype) * a @ _Gather.apply(b, all_reduce).t(), target)

    return (direction(x, y) + direction(y, x)) / 2


def disco(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """DisCo-CLIP as in its authors' code: the same two b×B, with an all-reduce of the gradients of all embeddings."""
    return open_clip_local(x, y, scale, bias, all_reduce=True)


def inf_cl_ring(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """inf_cl's tiles in its ring, once for each direction. It computes in fp32 and needs a group, even if of one."""
    loss = importlib.import_module("inf_cl").cal_inf_loss
    x, y = x.float(), y.float()
    return (loss(x, y, scale=scale) + loss(y, x, scale=scale)) / 2


def siglip_kernel_ring(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """siglip-kernel's ring of texts, whose backward sends their gradients around in the reverse direction."""
    processes = Processes()
    ring = importlib.import_module("siglip_kernel.distributed").DistributedSigLIPLoss
    return ring(strategy="ring", rank=processes.rank, world_size=processes.world_size)(x, y, scale, bias)


def siglip_kernel_plus_ring(
    x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, image_ids: Tensor, text_ids: Tensor
) -> Tensor:
    """SigLIP+ in siglip-kernel's ring. Its module has the logarithm of the scale and the bias as parameters."""
    processes = Processes()
    ring = importlib.import_module("siglip_kernel.distributed").DistributedSigLIPPlusLoss
    groups = processes.world_size * len(x)
    module = ring(num_groups=groups, rank=processes.rank, world_size=processes.world_size)
    module.logit_scale, module.logit_bias = (torch.nn.Parameter(value.detach()) for value in (scale.log(), bias))
    return module((x, y), image_ids, text_ids)["total_loss"]
