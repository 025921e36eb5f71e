"""The contrastive losses of a block of images and texts, computed without ever storing the logits.

Four operators of `torch.library`, which know nothing of autograd and torch.distributed. Each is computed by one of two
modules, the `Backend` that its argument ``backend`` selects: `torch_backend` in plain torch on any device, or
`triton_backend`, whose kernels `triton_kernels` explains.

Common words: a *block* is m images against n texts, x [m, D] and y [n, D], with the logits z_ij = scale · x_i·y_j
(+ bias). scale and bias are 0-dim tensors on the features' device, so that nothing waits for their values.
``diagonal`` says where the block's positives lie: image i belongs to text i + diagonal; None: the block has no
positives. ``ids_x`` [m] and ``ids_y`` [n] are int64, both or neither: a cell with equal ids that is not a positive is
excluded, as if it were not there. Scalars, vectors and gradients are fp32 (fp64 for fp64 features).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from . import torch_backend

BACKENDS = ("auto", "triton", "torch")

_logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A module that computes the operators of this package; the functions below explain them."""

    def positive_logits(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor: ...

    def softmax_statistics(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        positive_x: Tensor,
        positive_y: Tensor,
        ids_x: Tensor | None = None,
        ids_y: Tensor | None = None,
        diagonal: int | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def softmax_gradients(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        lse_x: Tensor,
        lse_y: Tensor,
        positive_coefficient: Tensor | None,
        ids_x: Tensor | None = None,
        ids_y: Tensor | None = None,
        diagonal: int | None = None,
        grad_x: Tensor | None = None,
        grad_y: Tensor | None = None,
    ) -> Tensor: ...

    def sigmoid_block(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        bias: Tensor,
        ids_x: Tensor | None = None,
        ids_y: Tensor | None = None,
        diagonal: int | None = None,
        grad_x: Tensor | None = None,
        grad_y: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


# ---- Which backend ----


def obstacle(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why ``backend`` cannot compute features of this dtype on this device, as a sentence; empty if it can."""
    reason = _obstacle_to_triton(device, dtype) if backend == "triton" else ""
    return reason and f'backend="triton" cannot run here: {reason}. Use "auto" or "torch".'


def select(backend: str, x: Tensor) -> Backend:
    """The module that computes blocks of features like ``x``.

    ``"auto"`` is ``"triton"`` on GPUs where that can run, and ``"torch"`` elsewhere; the choice and its reason are
    logged once.

    Raises:
        ValueError: ``"triton"`` was asked for and cannot run.
    """
    if problem := obstacle(backend, x.device, x.dtype):
        raise ValueError(problem)
    if backend == "triton" or (backend == "auto" and _auto_is_triton(x.device, x.dtype)):
        from . import triton_backend

        return triton_backend
    return torch_backend


@functools.lru_cache
def _auto_is_triton(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cpu":
        _logger.info('backend="auto": torch on the CPU.')
        return False
    if reason := _obstacle_to_triton(device, dtype):
        _logger.warning('backend="auto": torch on %s, which is slower than triton: %s.', device, reason)
        return False
    _logger.info('backend="auto": triton on %s.', device)
    return True


@functools.lru_cache
def _obstacle_to_triton(device: torch.device, dtype: torch.dtype) -> str:
    """Why Triton's kernels cannot run, as a clause; empty if they can."""
    if dtype == torch.float64:
        return "its kernels compute in float32, and the features are float64"
    try:
        from . import triton_tiling
    except ImportError as error:
        return f"the package triton (3.6 or newer) cannot be imported ({error})"
    if triton_tiling.INTERPRETED:
        return ""
    if device.type != "cuda":
        return f"it needs a CUDA or ROCm GPU, and the features are on {device}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        return f"it needs compute capability 8.0 (Ampere) or higher, and {device} has {capability}"
    return ""


# ---- The operators ----


def positive_logits(x: Tensor, y: Tensor, scale: Tensor, *, backend: str = "auto") -> Tensor:
    """scale · x_i·y_i, [m], by the same product as the tiles'.

    The same arithmetic matters: the statistics hold differences to these, and a product that rounds otherwise shifts a
    small loss by percents.
    """
    return torch.ops.hf_infcl.positive_logits(x, y, scale, backend)


def softmax_statistics(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    positive_x: Tensor,
    positive_y: Tensor,
    ids_x: Tensor | None = None,
    ids_y: Tensor | None = None,
    diagonal: int | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The log-odds of the block's negatives against the positive of each row and of each column.

    Rows: log Σ_j exp(z_ij - positive_x_i), columns: log Σ_i exp(z_ij - positive_y_j), over the negatives alone, both
    from one tile of logits. Log-odds of blocks combine by `torch.logaddexp`; the cross entropy of a row is softplus of
    its log-odds, which keeps its digits however small it gets.

    Args:
        positive_x: [m], the logit of each image's positive, wherever in the batch that is; positive_y: [n] likewise.

    Returns:
        ([m], [n]); -inf where there is no negative.
    """
    return torch.ops.hf_infcl.softmax_statistics(x, y, scale, positive_x, positive_y, ids_x, ids_y, diagonal, backend)


def softmax_gradients(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    lse_x: Tensor,
    lse_y: Tensor,
    positive_coefficient: Tensor | None,
    ids_x: Tensor | None = None,
    ids_y: Tensor | None = None,
    diagonal: int | None = None,
    *,
    grad_x: Tensor | None,
    grad_y: Tensor | None,
    backend: str = "auto",
) -> Tensor:
    """Adds the products of the block's coefficients: ``grad_x += C·y`` and ``grad_y += Cᵀ·x`` (None: not wanted).

    C_ij = exp(z_ij - lse_x_i) + exp(z_ij - lse_y_j) for negatives, positive_coefficient_i for positives, 0 for excluded
    cells. With the global log-sum-exps, C is 2B times the derivative of the symmetric InfoNCE by z.

    Args:
        lse_x: [m] log-sum-exp of each image's logits over the whole batch; lse_y: [n] of each text's.
        positive_coefficient: [m], used where ``diagonal`` is given.
        grad_x: [m, D], grad_y: [n, D].

    Returns:
        Σ_ij C_ij x_i·y_j, a scalar: the derivative by scale. Unlike the products it is computed from C in fp32.
    """
    return torch.ops.hf_infcl.softmax_gradients(
        x, y, scale, lse_x, lse_y, positive_coefficient, ids_x, ids_y, diagonal, grad_x, grad_y, backend
    )


def sigmoid_block(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    ids_x: Tensor | None = None,
    ids_y: Tensor | None = None,
    diagonal: int | None = None,
    *,
    grad_x: Tensor | None,
    grad_y: Tensor | None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's sigmoid loss and, from the same tiles, its gradients.

    With C_ij = -t_ij σ(-t_ij z_ij), B times the derivative of the loss by z: ``grad_x += C·y``, ``grad_y += Cᵀ·x``
    (None: not wanted).

    Returns:
        (-Σ_ij log σ(t_ij z_ij), Σ_ij C_ij, Σ_ij C_ij x_i·y_j), scalars: the loss, its derivatives by bias and by scale.
        Unlike the products they are computed from C in fp32.
    """
    return torch.ops.hf_infcl.sigmoid_block(x, y, scale, bias, ids_x, ids_y, diagonal, grad_x, grad_y, backend)


def _register(signature: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines an operator.

    Not by `torch.library.custom_op`, which takes 0.1 ms a call: longer than the kernels of a small batch.
    """
    name = signature[: signature.index("(")]
    torch.library.define(f"hf_infcl::{name}", signature[len(name) :])
    torch.library.impl(f"hf_infcl::{name}", "default", compute)
    torch.library.register_fake(f"hf_infcl::{name}", fake)


_register(
    "positive_logits(Tensor x, Tensor y, Tensor scale, str backend) -> Tensor",
    lambda x, *operands: select(operands[-1], x).positive_logits(x, *operands[:-1]),
    lambda x, y, scale, backend: scale.new_empty(len(x)),
)
_register(
    "softmax_statistics(Tensor x, Tensor y, Tensor scale, Tensor positive_x, Tensor positive_y, Tensor? ids_x, "
    "Tensor? ids_y, int? diagonal, str backend) -> (Tensor, Tensor)",
    lambda x, *operands: select(operands[-1], x).softmax_statistics(x, *operands[:-1]),
    lambda x, y, scale, positive_x, positive_y, *rest: (torch.empty_like(positive_x), torch.empty_like(positive_y)),
)
_register(
    "softmax_gradients(Tensor x, Tensor y, Tensor scale, Tensor lse_x, Tensor lse_y, Tensor? positive_coefficient, "
    "Tensor? ids_x, Tensor? ids_y, int? diagonal, Tensor(a!)? grad_x, Tensor(b!)? grad_y, str backend) -> Tensor",
    lambda x, *operands: select(operands[-1], x).softmax_gradients(x, *operands[:-1]),
    lambda x, y, scale, *rest: torch.empty_like(scale),
)
_register(
    "sigmoid_block(Tensor x, Tensor y, Tensor scale, Tensor bias, Tensor? ids_x, Tensor? ids_y, int? diagonal, "
    "Tensor(a!)? grad_x, Tensor(b!)? grad_y, str backend) -> (Tensor, Tensor, Tensor)",
    lambda x, *operands: select(operands[-1], x).sigmoid_block(x, *operands[:-1]),
    lambda x, y, scale, *rest: (torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(scale)),
)
