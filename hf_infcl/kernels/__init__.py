"""The contrastive losses of a block of images and texts, computed without ever storing the logits.

These are operators of `torch.library` that know nothing of autograd or torch.distributed. Each is declared once, below:
its schema is inferred from the signature, and the body, which only tracing runs, gives the shapes and dtypes of the
results. The function of the same name in another module computes it, with a `Block` for the first parameters and
`BlockGradients` for the outputs. The argument ``backend`` selects that module: `torch_backend`, in plain torch on any
device, or `triton_backend`, which launches Triton kernels.

Terms: a *block* is m images against n texts, x [m, D] and y [n, D], with the logits z_ij = scale · x_i·y_j (+ bias).
scale and bias are 0-dim tensors on the device of the features, so that the host never waits for their values. Scalars,
vectors and gradients are fp32 (fp64 for fp64 features). ``ids_x`` [m] and ``ids_y`` [n] are int32, in any order. The
kernels are faster if rows and columns are sorted by id, because few tiles then contain equal ids.

The operators of *pairs* take ``diagonal``, the position of the positives in the block: image i belongs to text
i + diagonal. None means that the block has no positives. Ids are given for both sides or for neither. A cell with equal
ids that is not a positive is excluded from all sums.

The operators of *several positives*, whose names begin with ``multi_positive``, and `sigmoid_block` with
``equal_are_positive`` take ids for both sides. Cells with equal ids are positives, all others are negatives.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import torch_backend
from .torch_backend import Block, BlockGradients

BACKENDS = ("auto", "triton", "torch")

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger(__name__)


# ---- Which backend ----


def obstacle(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """A message that says why ``backend`` cannot compute features of this dtype on this device; empty if it can."""
    reason = _obstacle_to_triton(device, dtype) if backend == "triton" else ""
    return reason and f'backend="triton" cannot run here: {reason}. Use "auto" or "torch".'


def select(backend: str, x: Tensor) -> ModuleType:
    """The module that computes blocks of features like ``x``.

    ``"auto"`` is ``"triton"`` on GPUs that can run it and ``"torch"`` elsewhere. The choice and its reason are logged
    once.

    Raises:
        ValueError: ``backend`` is ``"triton"``, which cannot run.
    """
    return _selected(backend, x.device, x.dtype)


@functools.lru_cache
def _selected(backend: str, device: torch.device, dtype: torch.dtype) -> ModuleType:
    if problem := obstacle(backend, device, dtype):
        raise ValueError(problem)
    if backend == "triton" or (backend == "auto" and _auto_is_triton(device, dtype)):
        from . import triton_backend

        return triton_backend
    return torch_backend


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
    """The reason why the Triton kernels cannot run, as a clause; empty if they can."""
    if dtype == torch.float64:
        return "its kernels compute in float32, and the features are float64"
    try:
        from . import triton_tiles
    except ImportError as error:
        return f"the package triton (3.6 or newer) cannot be imported ({error})"
    if triton_tiles.INTERPRETED:
        return ""
    if device.type != "cuda":
        return f"it needs a CUDA or ROCm GPU, and the features are on {device}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        return f"it needs compute capability 8.0 (Ampere) or higher, and {device} has {capability}"
    return ""


# ---- The operators ----


def _operator(declaration: Callable[P, R]) -> Callable[P, R]:
    """Defines the operator of this name, documented and called like the declaration.

    It does not use `torch.library.custom_op`, whose overhead of 0.1 ms per call exceeds the kernel time of a small
    batch.
    """
    name, signature = declaration.__name__, inspect.signature(declaration)
    names = list(signature.parameters)
    written = [output for output in ("grad_x", "grad_y") if output in names]
    defaults = tuple(parameter.default for parameter in signature.parameters.values())
    # The places of the parameters that form a `Block`, of those that form `BlockGradients`, and of the others.
    of_block, of_gradients = ([names.index(n) for n in kind._fields if n in names] for kind in (Block, BlockGradients))
    others = [place for place in range(len(names) - 1) if place not in (*of_block, *of_gradients)]

    def compute(*given: Any) -> Any:
        if len(given) < len(defaults):  # torch leaves out last arguments that equal their defaults
            given += defaults[len(given) :]
        x, y, backend = given[0], given[1], given[-1]
        # No kernel can be launched for an empty block. len(x) would take ten times as long as x.numel().
        module = select(backend, x) if x.numel() and y.numel() else torch_backend
        block = [Block(*[given[place] for place in of_block])] if of_block else []
        gradients = [BlockGradients(*[given[place] for place in of_gradients])] if of_gradients else []
        return getattr(module, name)(*block, *[given[place] for place in others], *gradients)

    torch.library.define(f"hf_infcl::{name}", torch.library.infer_schema(declaration, mutates_args=written))
    torch.library.impl(f"hf_infcl::{name}", "default", compute)
    torch.library.register_fake(f"hf_infcl::{name}", declaration)
    operator: Any = getattr(torch.ops.hf_infcl, name).default
    operator.__doc__, operator.__signature__ = declaration.__doc__, signature
    return operator


@_operator
def positive_logits(x: Tensor, y: Tensor, scale: Tensor, backend: str = "auto") -> Tensor:
    """scale · x_i·y_i, [m], computed by the same product as the tiles.

    The statistics are differences from these logits. A product that rounds differently would change a small loss by
    several percent.
    """
    return scale.new_empty(len(x))


@_operator
def softmax_statistics(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    positive_x: Tensor,
    positive_y: Tensor,
    ids_x: Tensor | None = None,
    ids_y: Tensor | None = None,
    diagonal: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The log-odds of the block's negatives against the positive of each row and of each column.

    These are log Σ_j exp(z_ij - positive_x_i) for row i and log Σ_i exp(z_ij - positive_y_j) for column j, with sums
    over the negatives alone, and both from the same tiles of logits. The log-odds of several blocks are combined with
    `torch.logaddexp`. The cross entropy of a row is the softplus of its log-odds, which has full relative precision
    however small it is.

    Args:
        positive_x: [m], the logit of each image's positive, which may lie in another block; positive_y: [n] likewise.

    Returns:
        The log-odds of the rows, [m], and of the columns, [n]; -inf where there is no negative.
    """
    return torch.empty_like(positive_x), torch.empty_like(positive_y)


@_operator
def softmax_losses(
    positive: Tensor,
    odds_x: Tensor,
    odds_y: Tensor,
    positive_of_columns: Tensor,
    odds_of_columns: Tensor,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cross entropies of b pairs, and the vectors that `softmax_gradients` takes.

    Args:
        positive: [b], the logits of the pairs.
        odds_x: [b], the log-odds of their images against the negatives of the whole batch (`softmax_statistics`).
        odds_y: [b], the log-odds of their texts.
        positive_of_columns: [n], the positives of the columns of a block.
        odds_of_columns: [n], the log-odds of these columns.

    Returns:
        The sum of the cross entropies of the b images and b texts, a scalar; the log-sum-exps of the images, [b], and
        of the columns, [n]; and the coefficients of the positives, [b].
    """
    lse_x, lse_y = torch.empty_like(positive), torch.empty_like(positive_of_columns)
    return positive.new_empty(()), lse_x, lse_y, torch.empty_like(positive)


@_operator
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
    grad_x: Tensor | None = None,
    grad_y: Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Computes the products of the block's coefficients: ``grad_x = C·y`` and ``grad_y = Cᵀ·x``.

    C_ij is exp(z_ij - lse_x_i) + exp(z_ij - lse_y_j) for negatives, positive_coefficient_i for positives, and 0 for
    excluded cells. With the log-sum-exps of the whole batch of B pairs, C is 2B times the derivative of the symmetric
    InfoNCE loss by z.

    Args:
        lse_x: [m], the log-sum-exp of each image's logits over the whole batch; lse_y: [n], that of each text's logits.
        positive_coefficient: [m], used if ``diagonal`` is given.
        grad_x: [m, D], an output; None if it is not needed. grad_y: [n, D] likewise.
        accumulate: add to the contents of grad_x and grad_y instead of replacing them.

    Returns:
        Σ_ij C_ij x_i·y_j, a scalar: the derivative by scale. Unlike the products it is computed from C in fp32.
    """
    return torch.empty_like(scale)


@_operator
def sigmoid_block(
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
    equal_are_positive: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the sigmoid loss of a block and, from the same tiles, ``grad_x = C·y`` and ``grad_y = Cᵀ·x``.

    C_ij = -t_ij σ(-t_ij z_ij) is B times the derivative of the loss by z.

    Args:
        grad_x: [m, D], an output; None if it is not needed. grad_y: [n, D] likewise.
        accumulate: add to the contents of grad_x and grad_y instead of replacing them.
        equal_are_positive: cells with equal ids are positives, as in the operators of several positives, instead of
            excluded; not together with ``diagonal``.

    Returns:
        (-Σ_ij log σ(t_ij z_ij), Σ_ij C_ij, Σ_ij C_ij x_i·y_j), scalars: the loss and its derivatives by bias and by
        scale. Unlike the products they are computed from C in fp32.
    """
    return torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(scale)


@_operator
def multi_positive_statistics(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    pivot_x: Tensor,
    pivot_y: Tensor,
    ids_x: Tensor,
    ids_y: Tensor,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The statistics of each row and each column of a block for the softmax loss with several positives.

    With d_ij = z_ij - pivot_x_i, the statistics of row i are

    - negatives: log Σ_j exp(d_ij) over the columns with a different id; -inf if there are none,
    - positives: log Σ_j exp(d_ij) over the columns with the same id; -inf if there are none,
    - distance: Σ_j d_ij over the columns with the same id, a plain sum; 0 if there are none.

    The statistics of column j are defined likewise, with z_ij - pivot_y_j and sums over i. To combine those of
    several blocks, use `torch.logaddexp` for negatives and positives, and addition for the distance.

    Args:
        pivot_x: [m], one logit of each image, preferably that of a positive computed by `positive_logits`.
            No result overflows, whichever logits are chosen. If all terms of a sum lie 87 or more below the pivot,
            the result may be -inf; such a sum is negligible beside the term of the pivot.
        pivot_y: [n] likewise for the texts.

    Returns:
        Negatives, positives and distance of the rows, each [m], and of the columns, each [n].
    """
    x_1, x_2, x_3 = (torch.empty_like(pivot_x) for _ in range(3))
    y_1, y_2, y_3 = (torch.empty_like(pivot_y) for _ in range(3))
    return x_1, x_2, x_3, y_1, y_2, y_3


@_operator
def multi_positive_gradients(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    pivot_x: Tensor,
    pivot_y: Tensor,
    relative_x: Tensor,
    relative_y: Tensor,
    share_x: Tensor,
    share_y: Tensor,
    ids_x: Tensor,
    ids_y: Tensor,
    grad_x: Tensor | None = None,
    grad_y: Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Computes the products of the block's coefficients: ``grad_x = C·y`` and ``grad_y = Cᵀ·x``.

    C_ij is the sum of a row term and a column term. With e = exp((z_ij - pivot_x_i) - relative_x_i), the row term
    is

    - e for negatives,
    - e - share_x_i for positives of a row with share_x_i >= 0,
    - share_x_i itself for positives of a row with share_x_i < 0. Such a row has a single positive, for which the
      difference would lose the digits of a small gradient.

    The column term is defined likewise. All terms are at most 1 in magnitude. A row without a loss of its own has
    relative_x_i = +inf and share_x_i = 0.

    Args:
        pivot_x: [m], as in `multi_positive_statistics`; pivot_y: [n] likewise.
        relative_x: [m], the log-sum-exp of each image's logits over the whole batch, minus its pivot and minus the
            logarithm of its weight; relative_y: [n] likewise. Pivots and relatives are separate arguments, because
            their sum is large and would lose digits in rounding.
        share_x: [m], share_y: [n].
        grad_x: [m, D], an output; None if it is not needed. grad_y: [n, D] likewise.
        accumulate: add to the contents of grad_x and grad_y instead of replacing them.

    Returns:
        Σ_ij C_ij x_i·y_j, a scalar: the derivative by scale. Unlike the products it is computed from C in fp32.
    """
    return torch.empty_like(scale)
