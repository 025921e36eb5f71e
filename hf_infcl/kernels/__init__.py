"""The contrastive losses of a block of images and texts, computed without ever storing the logits.

These are operators of `torch.library` that know nothing of autograd or torch.distributed. Each is declared once, below,
and its body, which only tracing runs, gives the shapes and dtypes of the results. The function of the same name and
parameters in another module computes it. The argument ``backend`` selects that module: `torch_backend`, in plain torch
on any device, or `triton_backend`, which launches Triton kernels.

An operator itself takes the fields of a `Block`, of `CoefficientVectors` and of `BlockGradients` one by one, in the
order of the declaration, but those with a default last: x, y and scale, the vectors, ids_x, ids_y, diagonal,
equal_are_positive, grad_x, grad_y, accumulate, and backend.

Terms: a *block* is m images against n texts, x [m, D] and y [n, D], with the logits z_ij = scale · x_i·y_j (+ bias).
scale and bias are 0-dim tensors on the device of the features, so that the host never waits for their values. Scalars,
vectors and gradients are fp32 (fp64 for fp64 features). ``ids_x`` [m] and ``ids_y`` [n] are int32, in any order. The
kernels are faster if rows and columns are sorted by id, because few tiles then contain equal ids.

``diagonal`` is the position of the positives in the block: image i belongs to text i + diagonal. None means that there
are no such positives. Ids are given for both sides or for neither. A cell with equal ids that is not a positive is
excluded from all sums. With ``equal_are_positive`` it is a positive instead, so that a row or column may have several
of them, and there is no diagonal. All other cells are negatives.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from operator import itemgetter
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import torch_backend
from .torch_backend import Block, BlockGradients, CoefficientVectors

BACKENDS = ("auto", "triton", "torch")

R = TypeVar("R")

_logger = logging.getLogger(__name__)


# ---- Which backend ----


def obstacle(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """A message that says why ``backend`` cannot compute features of this dtype on this device; empty if it can."""
    reason = _obstacle_to_triton(device, dtype) if backend == "triton" else ""
    return reason and f'backend="triton" cannot run here: {reason}. Use "auto" or "torch".'


@functools.lru_cache
def select(backend: str, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The module that computes blocks of features of this dtype on this device.

    ``"auto"`` is ``"triton"`` on GPUs that can run it and ``"torch"`` elsewhere. The choice and its reason are logged
    once.

    Raises:
        ValueError: ``backend`` is ``"triton"``, which cannot run.
    """
    if problem := obstacle(backend, device, dtype):
        raise ValueError(problem)
    if backend == "auto" and device.type == "cpu":
        _logger.info('backend="auto": torch on the CPU.')
        backend = "torch"
    elif backend == "auto" and (reason := _obstacle_to_triton(device, dtype)):
        _logger.warning('backend="auto": torch on %s, which is slower than triton: %s.', device, reason)
        backend = "torch"
    elif backend == "auto":
        _logger.info('backend="auto": triton on %s.', device)
    if backend == "torch":
        return torch_backend
    from . import triton_backend

    return triton_backend


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


def _operator(declaration: Callable[..., R]) -> Callable[..., R]:
    """Defines the operator of this name, documented like the declaration.

    It does not use `torch.library.custom_op`, whose overhead of 0.1 ms per call exceeds the kernel time of a small
    batch.
    """
    name, signature = declaration.__name__, inspect.signature(declaration)
    together = (Block, CoefficientVectors, BlockGradients)
    # For each parameter of the declaration its kind and its fields, or None and itself.
    parts = [
        (kind, list(inspect.signature(kind).parameters.values())) if kind in together else (None, [parameter])
        for parameter in signature.parameters.values()
        for kind in (parameter.annotation,)
    ]
    fields = sorted((p for _, part in parts for p in part), key=lambda p: p.default is not p.empty)
    names, defaults = [p.name for p in fields], tuple(p.default for p in fields)
    readers = [(kind, itemgetter(*(names.index(p.name) for p in part))) for kind, part in parts]

    def declared(given: tuple[Any, ...]) -> list[Any]:
        """The arguments of the declaration."""
        if len(given) < len(defaults):  # torch leaves out last arguments that equal their defaults
            given += defaults[len(given) :]
        return [read(given) if kind is None else kind(*read(given)) for kind, read in readers]

    def compute(*given: Any) -> Any:
        *arguments, backend = declared(given)
        x, y = given[0], given[1]
        # No kernel can be launched for an empty block. len(x) would take ten times as long as x.numel().
        module = select(backend, x.device, x.dtype) if x.numel() and y.numel() else torch_backend
        with torch.cuda.device_of(x):  # Triton launches kernels on the current device
            return getattr(module, name)(*arguments)

    def trace(*given: Any) -> Any:
        return declaration(*declared(given))

    prototype: Any = trace
    prototype.__signature__ = signature.replace(parameters=fields)
    written = [output for output in ("grad_x", "grad_y") if output in names]
    torch.library.define(f"hf_infcl::{name}", torch.library.infer_schema(prototype, mutates_args=written))
    torch.library.impl(f"hf_infcl::{name}", "default", compute)
    torch.library.register_fake(f"hf_infcl::{name}", trace)
    operator: Any = getattr(torch.ops.hf_infcl, name).default
    operator.__doc__, operator.__signature__ = declaration.__doc__, prototype.__signature__
    return operator


@_operator
def positive_logits(x: Tensor, y: Tensor, scale: Tensor, backend: str = "auto") -> Tensor:
    """scale · x_i·y_i, [m], computed by the same product as the tiles.

    The statistics are differences from these logits. A product that rounds differently would change a small loss by
    several percent.
    """
    return scale.new_empty(len(x))


@_operator
def softmax_statistics(block: Block, pivot_x: Tensor, pivot_y: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The statistics of each row and of each column of a block for the softmax loss, from the same tiles of logits.

    With d_ij = z_ij - pivot_x_i, those of row i are

    - negatives: log Σ_j exp(d_ij) over the negatives; -inf if there are none.

    and with ``equal_are_positive`` also

    - positives: log Σ_j exp(d_ij) over the positives; -inf if there are none,
    - distance: Σ_j d_ij over the positives, a plain sum; 0 if there are none.

    The statistics of column j are defined likewise, with z_ij - pivot_y_j and sums over i. To combine those of
    several blocks, use `torch.logaddexp` for negatives and positives, and addition for the distance.

    Where the pivot is the logit of the only positive, the negatives are log-odds, and the cross entropy is their
    softplus, which has full relative precision however small it is.

    Args:
        pivot_x: [m], one logit of each image, that of its only positive or preferably that of one of several, computed
            by `positive_logits`. The positive may lie in another block. No result overflows, whichever logits are
            chosen. If all terms of a sum lie 87 or more below the pivot, the result may be -inf; such a sum is
            negligible beside the term of the pivot.
        pivot_y: [n] likewise for the texts.

    Returns:
        The statistics of the rows, [1, m], and of the columns, [1, n]; with ``equal_are_positive``, [3, m] and [3, n].
    """
    count = 3 if block.equal_are_positive else 1
    return pivot_x.new_empty(count, len(pivot_x)), pivot_y.new_empty(count, len(pivot_y))


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
        odds_x: [b], the log-odds of the whole batch's negatives against their images' positives (`softmax_statistics`).
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
    block: Block, vectors: CoefficientVectors, gradients: BlockGradients, backend: str = "auto"
) -> Tensor:
    """Computes the products of the block's coefficients: ``grad_x = C·y`` and ``grad_y = Cᵀ·x``.

    C_ij of a negative is the sum of a row term, e = exp((z_ij - pivot_x_i) - relative_x_i), and of a column term, which
    is defined likewise. C_ij of a positive on the diagonal is share_x_i, that of an excluded cell 0. With
    ``equal_are_positive`` the row term of a positive is

    - e - share_x_i in a row with share_x_i >= 0,
    - share_x_i itself in a row with share_x_i < 0. Such a row has a single positive, for which the difference would
      lose the digits of a small gradient,

    and the column term likewise. All terms are at most 1 in magnitude. With the log-sum-exps of the whole batch of B
    pairs as pivots, C is 2B times the derivative of the symmetric InfoNCE loss by z.

    Returns:
        Σ_ij C_ij x_i·y_j, a scalar: the derivative by scale. Unlike the products it is computed from C in fp32.
    """
    return torch.empty_like(block.scale)


@_operator
def sigmoid_block(
    block: Block, bias: Tensor, gradients: BlockGradients, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the sigmoid loss of a block and, from the same tiles, ``grad_x = C·y`` and ``grad_y = Cᵀ·x``.

    C_ij = -t_ij σ(-t_ij z_ij) is B times the derivative of the loss by z.

    Returns:
        (-Σ_ij log σ(t_ij z_ij), Σ_ij C_ij, Σ_ij C_ij x_i·y_j), scalars: the loss and its derivatives by bias and by
        scale. Unlike the products they are computed from C in fp32.
    """
    return torch.empty_like(bias), torch.empty_like(bias), torch.empty_like(bias)
