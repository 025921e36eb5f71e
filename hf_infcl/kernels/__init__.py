"""The contrastive losses of a block of images and texts, computed without ever storing the logits.

Operators of `torch.library`, which know nothing of autograd and torch.distributed. Each is computed by one of two
modules, the `Backend` that its argument ``backend`` selects: `torch_backend` in plain torch on any device, or
`triton_backend`, which launches Triton's kernels.

Common words: a *block* is m images against n texts, x [m, D] and y [n, D], with the logits z_ij = scale · x_i·y_j
(+ bias). scale and bias are 0-dim tensors on the features' device, so that nothing waits for their values. Scalars,
vectors and gradients are fp32 (fp64 for fp64 features). ``ids_x`` [m] and ``ids_y`` [n] are int32, in any order; the
kernels are faster where rows and columns are sorted by them, because only few tiles then hold equal ids.

The operators of *pairs* take ``diagonal``, which says where the block's positives lie: image i belongs to text
i + diagonal; None: the block has no positives. Ids are given for both sides or for neither: a cell with equal ids that
is not a positive is excluded, as if it were not there.

The operators of *several positives*, whose names begin with ``multi_positive``, take ids for both sides: cells with
equal ids are positives, all others are negatives.
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

    def softmax_losses(
        self, positive: Tensor, odds_x: Tensor, odds_y: Tensor, positive_of_columns: Tensor, odds_of_columns: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

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
        accumulate: bool = False,
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
        accumulate: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def multi_positive_statistics(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        reference_x: Tensor,
        reference_y: Tensor,
        ids_x: Tensor,
        ids_y: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...

    def multi_positive_gradients(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        reference_x: Tensor,
        reference_y: Tensor,
        relative_x: Tensor,
        relative_y: Tensor,
        share_x: Tensor,
        share_y: Tensor,
        ids_x: Tensor,
        ids_y: Tensor,
        grad_x: Tensor | None = None,
        grad_y: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor: ...

    def multi_positive_sigmoid(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        bias: Tensor,
        ids_x: Tensor,
        ids_y: Tensor,
        grad_x: Tensor | None = None,
        grad_y: Tensor | None = None,
        accumulate: bool = False,
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
    """scale · x_i·y_i, [m], computed by the same product as the tiles.

    The statistics are differences to these logits. A product that rounds otherwise would shift a small loss by
    percents.
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


def softmax_losses(
    positive: Tensor,
    odds_x: Tensor,
    odds_y: Tensor,
    positive_of_columns: Tensor,
    odds_of_columns: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cross entropies of b pairs, and the vectors that `softmax_gradients` takes.

    Args:
        positive: [b], the logits of the pairs; odds_x: [b], the log-odds of their images against the negatives of the
            whole batch; odds_y: [b], those of their texts.
        positive_of_columns: [n], the positives of a block's columns; odds_of_columns: [n], their log-odds.

    Returns:
        The sum of the cross entropies of the 2b images and texts, a scalar; the log-sum-exps of the images, [b], and of
        the columns, [n]; and the coefficients of the positives, [b].
    """
    return torch.ops.hf_infcl.softmax_losses(positive, odds_x, odds_y, positive_of_columns, odds_of_columns, backend)


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
    accumulate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The products of the block's coefficients: ``grad_x = C·y`` and ``grad_y = Cᵀ·x`` (None: not wanted).

    C_ij = exp(z_ij - lse_x_i) + exp(z_ij - lse_y_j) for negatives, positive_coefficient_i for positives, 0 for excluded
    cells. With the global log-sum-exps, C is 2B times the derivative of the symmetric InfoNCE by z.

    Args:
        lse_x: [m] log-sum-exp of each image's logits over the whole batch; lse_y: [n] of each text's.
        positive_coefficient: [m], used where ``diagonal`` is given.
        grad_x: [m, D], grad_y: [n, D].
        accumulate: add to what they hold instead of replacing it.

    Returns:
        Σ_ij C_ij x_i·y_j, a scalar: the derivative by scale. Unlike the products it is computed from C in fp32.
    """
    return torch.ops.hf_infcl.softmax_gradients(
        x, y, scale, lse_x, lse_y, positive_coefficient, ids_x, ids_y, diagonal, grad_x, grad_y, accumulate, backend
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
    accumulate: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's sigmoid loss and, from the same tiles, its gradients.

    With C_ij = -t_ij σ(-t_ij z_ij), B times the derivative of the loss by z: ``grad_x = C·y``, ``grad_y = Cᵀ·x``
    (None: not wanted). With ``accumulate`` these are added to what grad_x and grad_y hold.

    Returns:
        (-Σ_ij log σ(t_ij z_ij), Σ_ij C_ij, Σ_ij C_ij x_i·y_j), scalars: the loss, its derivatives by bias and by scale.
        Unlike the products they are computed from C in fp32.
    """
    return torch.ops.hf_infcl.sigmoid_block(
        x, y, scale, bias, ids_x, ids_y, diagonal, grad_x, grad_y, accumulate, backend
    )


def multi_positive_statistics(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    reference_x: Tensor,
    reference_y: Tensor,
    ids_x: Tensor,
    ids_y: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The statistics of each row and each column of a block for the softmax loss with several positives.

    With d_ij = z_ij - reference_x_i, the statistics of row i are

    - the negatives' log Σ_j exp(d_ij), over the columns with other ids; -inf if there is none,
    - the positives' log Σ_j exp(d_ij), over the columns with the same id; -inf if there is none,
    - the positives' distance Σ_j d_ij, a plain sum; 0 if there is none,

    and those of the columns likewise with z_ij - reference_y_j and sums over i. The statistics of blocks combine by
    `torch.logaddexp`, `torch.logaddexp` and addition.

    Args:
        reference_x: [m], one logit of each image, preferably with a positive and computed by `positive_logits`;
            reference_y: [n] likewise. No result overflows, whichever logits these are. A sum of terms that all lie 87
            or more below the reference may be -inf: beside the term of the reference it does not matter.

    Returns:
        Negatives, positives and distance of the rows, each [m], and of the columns, each [n].
    """
    return torch.ops.hf_infcl.multi_positive_statistics(x, y, scale, reference_x, reference_y, ids_x, ids_y, backend)


def multi_positive_gradients(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    reference_x: Tensor,
    reference_y: Tensor,
    relative_x: Tensor,
    relative_y: Tensor,
    share_x: Tensor,
    share_y: Tensor,
    ids_x: Tensor,
    ids_y: Tensor,
    *,
    grad_x: Tensor | None,
    grad_y: Tensor | None,
    accumulate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The products of the block's coefficients: ``grad_x = C·y`` and ``grad_y = Cᵀ·x`` (None: not wanted).

    C_ij is a term of the row plus a term of the column. With e = exp((z_ij - reference_x_i) - relative_x_i), that of
    the row is

    - e for negatives,
    - e - share_x_i for positives of a row with share_x_i >= 0,
    - share_x_i itself for positives of a row with share_x_i < 0, which has a single positive: the difference would
      lose the digits of a small gradient;

    that of the column likewise. All terms are at most 1 in magnitude. A row without a loss of its own has
    relative_x_i = +inf and share_x_i = 0.

    Args:
        reference_x: [m], as in `multi_positive_statistics`; reference_y: [n] likewise.
        relative_x: [m], the log-sum-exp of each image's logits over the whole batch, less its reference and less the
            logarithm of its weight; relative_y: [n] likewise. Reference and relative are apart, because the rounding of
            their sum would be that of a large number.
        share_x: [m], share_y: [n].
        grad_x: [m, D], grad_y: [n, D].
        accumulate: add to what they hold instead of replacing it.

    Returns:
        Σ_ij C_ij x_i·y_j, a scalar: the derivative by scale. Unlike the products it is computed from C in fp32.
    """
    return torch.ops.hf_infcl.multi_positive_gradients(
        *(x, y, scale, reference_x, reference_y, relative_x, relative_y, share_x, share_y, ids_x, ids_y),
        *(grad_x, grad_y, accumulate, backend),
    )


def multi_positive_sigmoid(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    ids_x: Tensor,
    ids_y: Tensor,
    *,
    grad_x: Tensor | None,
    grad_y: Tensor | None,
    accumulate: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """As `sigmoid_block`, with t = +1 for all cells with equal ids and -1 for all others."""
    return torch.ops.hf_infcl.multi_positive_sigmoid(
        x, y, scale, bias, ids_x, ids_y, grad_x, grad_y, accumulate, backend
    )


def _module(backend: str, x: Tensor, y: Tensor) -> Backend:
    """The module that `select` gives, but plain torch for an empty block, for which no kernel can be launched."""
    return select(backend, x) if len(x) and len(y) else torch_backend


def _register(signature: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines an operator.

    `torch.library.custom_op` is not used, because it takes 0.1 ms a call, longer than the kernels of a small batch.
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
    lambda x, y, *operands: _module(operands[-1], x, y).softmax_statistics(x, y, *operands[:-1]),
    lambda x, y, scale, positive_x, positive_y, *rest: (torch.empty_like(positive_x), torch.empty_like(positive_y)),
)
_register(
    "softmax_losses(Tensor positive, Tensor odds_x, Tensor odds_y, Tensor positive_of_columns, "
    "Tensor odds_of_columns, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda positive, *operands: select(operands[-1], positive).softmax_losses(positive, *operands[:-1]),
    lambda positive, odds_x, odds_y, positive_of_columns, *rest: (
        *(positive.new_empty(()), torch.empty_like(positive)),
        *(torch.empty_like(positive_of_columns), torch.empty_like(positive)),
    ),
)
_register(
    "softmax_gradients(Tensor x, Tensor y, Tensor scale, Tensor lse_x, Tensor lse_y, Tensor? positive_coefficient, "
    "Tensor? ids_x, Tensor? ids_y, int? diagonal, Tensor(a!)? grad_x, Tensor(b!)? grad_y, bool accumulate, "
    "str backend) -> Tensor",
    lambda x, y, *operands: _module(operands[-1], x, y).softmax_gradients(x, y, *operands[:-1]),
    lambda x, y, scale, *rest: torch.empty_like(scale),
)
_register(
    "sigmoid_block(Tensor x, Tensor y, Tensor scale, Tensor bias, Tensor? ids_x, Tensor? ids_y, int? diagonal, "
    "Tensor(a!)? grad_x, Tensor(b!)? grad_y, bool accumulate, str backend) -> (Tensor, Tensor, Tensor)",
    lambda x, y, *operands: _module(operands[-1], x, y).sigmoid_block(x, y, *operands[:-1]),
    lambda x, y, scale, *rest: (torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(scale)),
)
_register(
    "multi_positive_statistics(Tensor x, Tensor y, Tensor scale, Tensor reference_x, Tensor reference_y, Tensor ids_x, "
    "Tensor ids_y, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda x, y, *operands: _module(operands[-1], x, y).multi_positive_statistics(x, y, *operands[:-1]),
    lambda x, y, scale, reference_x, reference_y, *rest: (
        *(torch.empty_like(reference_x) for _ in range(3)),
        *(torch.empty_like(reference_y) for _ in range(3)),
    ),
)
_register(
    "multi_positive_gradients(Tensor x, Tensor y, Tensor scale, Tensor reference_x, Tensor reference_y, "
    "Tensor relative_x, Tensor relative_y, Tensor share_x, Tensor share_y, Tensor ids_x, Tensor ids_y, "
    "Tensor(a!)? grad_x, Tensor(b!)? grad_y, bool accumulate, str backend) -> Tensor",
    lambda x, y, *operands: _module(operands[-1], x, y).multi_positive_gradients(x, y, *operands[:-1]),
    lambda x, y, scale, *rest: torch.empty_like(scale),
)
_register(
    "multi_positive_sigmoid(Tensor x, Tensor y, Tensor scale, Tensor bias, Tensor ids_x, Tensor ids_y, "
    "Tensor(a!)? grad_x, Tensor(b!)? grad_y, bool accumulate, str backend) -> (Tensor, Tensor, Tensor)",
    lambda x, y, *operands: _module(operands[-1], x, y).multi_positive_sigmoid(x, y, *operands[:-1]),
    lambda x, y, scale, *rest: (torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(scale)),
)
