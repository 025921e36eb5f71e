"""How processes share the B×B logits of a batch: which logits each process computes, and what they send each other.

Each of W processes holds the images x [b, D] and texts y [b, D] of b of the B = W·b pairs, its `Shard`. Every strategy
computes the same results for it, its `Terms`: a part of the loss and, up to a factor, the gradients of its images and
texts. Strategies differ in memory and traffic.

| strategy | logits of a process | communication | memory beside tiles |
|---|---|---|---|
| ring (Inf-CL, arXiv 2410.17243) | W blocks of b×b, one after another | texts and their gradients, around | O(b·D) |
| disco (DisCo-CLIP, arXiv 2304.08480) | one block of b×B | texts gathered, their gradients reduced | O(B·D) |
| local (OpenCLIP's local loss) | b×B for images, B×b for texts | both gathered, both gradients reduced | O(B·D) |
| gather (CLIP) | all B×B | both gathered, no gradients | O(B·D) |

`select_strategy` computes a ring of small texts as disco. The words block, diagonal and log-odds are explained in
`hf_infcl.kernels`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..processes import Processes
from .ring import Ring, RingReduction

GATHERED_BYTES = 256 << 20  # a ring gathers its texts up to this size, a constant, so that its memory stays O(b·D)


@dataclass(frozen=True)
class Shard:
    """This process's share of the global batch, and the parameters of the logits z_ij = scale · x_i·y_j + bias."""

    x: Tensor  # [b, D] images
    y: Tensor  # [b, D] texts
    scale: Tensor  # scalar, on the features' device
    bias: Tensor  # scalar
    ids: Tensor | None  # [b] int64: two pairs with equal ids are not each other's negatives


class Terms(NamedTuple):
    """The terms of the loss that this process computes, and the gradients that belong to its pairs, in fp32 or fp64.

    The loss is the sum of the terms of all processes divided by a constant: 2B for the softmax loss, B for the sigmoid
    loss. The coefficient C_ij is the derivative of the sum of all terms by the logit z_ij. Over all processes, the
    parts of a scalar's gradient add up to the derivative of that sum.
    """

    loss: Tensor  # scalar, the sum of this process's terms
    grad_scale: Tensor  # scalar, this process's part of Σ C_ij x_i·y_j
    grad_bias: Tensor  # scalar, this process's part of Σ C_ij
    grad_x: Tensor | None  # [b, D], C·Y for this process's images; None if not wanted
    grad_y: Tensor | None  # [b, D], Cᵀ·X for this process's texts; None if not wanted


class SoftmaxStatistics(NamedTuple):
    """Statistics of this process's images (x) and texts (y), each [b], that determine the softmax coefficients."""

    lse_x: Tensor  # the log-sum-exp of an image's logits over the global batch
    lse_y: Tensor  # the log-sum-exp of a text's logits
    positive_x: Tensor  # the part of a pair's coefficient that comes from the cross entropy of its image
    positive_y: Tensor  # the part that comes from the cross entropy of its text


class Reduction(Protocol):
    """Combines the parts that the processes compute for each other's texts."""

    def add(self, part: Tensor) -> None:
        """Takes this process's part for the block of texts at hand, in the order of the blocks."""

    def result(self) -> Tensor:
        """[b, ...]: the combination of all processes' parts for this process's texts."""


class Strategy(ABC):
    """Computes this process's `Terms`, together with the other processes, which have to make the same calls."""

    def __init__(self, processes: Processes, backend: str) -> None:
        self.processes, self.backend = processes, backend

    def softmax(self, shard: Shard, want_x: bool, want_y: bool, want_scale: bool) -> Terms:
        """The symmetric InfoNCE: C is 2B times the derivative of the loss, and its sum is 0."""
        positive = kernels.positive_logits(shard.x, shard.y, shard.scale, backend=self.backend)
        odds = torch.stack(self.softmax_log_odds(shard, positive))  # [2, b]
        # log(1 + exp(odds)) keeps its digits however small it gets. Above its threshold F.softplus returns its input;
        # at the default of 20 that would cost fp64 six of its digits.
        cross_entropies = F.softplus(odds, threshold=40)
        loss, zero = cross_entropies.sum(), torch.zeros_like(shard.scale)
        if not (want_x or want_y or want_scale):
            return Terms(loss, zero, zero, None, None)
        lse_x, lse_y = positive + cross_entropies
        statistics = SoftmaxStatistics(lse_x, lse_y, *-torch.sigmoid(odds))
        grad_scale, grad_x, grad_y = self.softmax_gradients(shard, statistics, want_x, want_y)
        return Terms(loss, grad_scale, zero, grad_x, grad_y)

    @abstractmethod
    def softmax_log_odds(self, shard: Shard, positive: Tensor) -> tuple[Tensor, Tensor]:
        """The log-odds of the negatives of this process's images and of its texts, each [b].

        Args:
            positive: [b], the logits of this process's pairs.
        """

    @abstractmethod
    def softmax_gradients(
        self, shard: Shard, statistics: SoftmaxStatistics, want_x: bool, want_y: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``grad_scale``, ``grad_x`` and ``grad_y`` of the `Terms`."""

    @abstractmethod
    def sigmoid(self, shard: Shard, want_x: bool, want_y: bool) -> Terms:
        """The sigmoid loss: C is B times its derivative. Terms and coefficients come from one pass over the logits."""

    def gather(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """[B, ...] of each [b, ...], in the order of the ranks; None stays None."""
        return tuple(None if t is None else self.processes.gather(t).flatten(0, 1) for t in tensors)

    def diagonal(self, shard: Shard) -> int:
        """Where this process's pairs lie among the B of all processes."""
        return self.processes.rank * len(shard.x)


class BlockwiseStrategy(Strategy):
    """Each process computes the logits of its images with all texts, in blocks of texts.

    The statistics and gradients that it computes for the texts of another process are reduced to that process. The
    softmax loss takes four products of matrices: one for the statistics, one that recomputes the logits, and two for
    the gradients. The sigmoid loss takes three.
    """

    @abstractmethod
    def blocks(self, *tensors: Tensor | None) -> Iterator[tuple[int | None, tuple[Any, ...]]]:
        """Blocks of all processes' texts, as (the ``diagonal`` of the block, the tensors of its texts).

        Args:
            tensors: [b, ...] of this process's texts, at least one; None stays None.
        """

    @abstractmethod
    def reduction(self, combine: Callable[..., Any]) -> Reduction:
        """The reduction of one part for each of the `blocks`, by `torch.add` or `torch.logaddexp`."""

    def softmax_log_odds(self, shard: Shard, positive: Tensor) -> tuple[Tensor, Tensor]:
        odds_x: Tensor | None = None
        odds_y = self.reduction(torch.logaddexp)
        for diagonal, (texts, text_positive, text_ids) in self.blocks(shard.y, positive, shard.ids):
            rows, columns = kernels.softmax_statistics(
                *(shard.x, texts, shard.scale, positive, text_positive, shard.ids, text_ids, diagonal),
                backend=self.backend,
            )
            odds_x = rows if odds_x is None else torch.logaddexp(odds_x, rows)
            odds_y.add(columns)
        assert odds_x is not None
        return odds_x, odds_y.result()

    def softmax_gradients(
        self, shard: Shard, statistics: SoftmaxStatistics, want_x: bool, want_y: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        lse_x, lse_y, positive_x, positive_y = statistics
        positive_coefficient = positive_x + positive_y
        parts_of_scale = []
        grad_x = _accumulator(shard.x, lse_x.dtype) if want_x else None
        grad_y = self.reduction(torch.add)
        for diagonal, (texts, text_lse, text_ids) in self.blocks(shard.y, lse_y, shard.ids):
            part = _accumulator(texts, lse_y.dtype) if want_y else None
            part_of_scale = kernels.softmax_gradients(
                *(shard.x, texts, shard.scale, lse_x, text_lse, positive_coefficient, shard.ids, text_ids, diagonal),
                grad_x=grad_x,
                grad_y=part,
                backend=self.backend,
            )
            parts_of_scale.append(part_of_scale)
            if part is not None:
                grad_y.add(part)
        return _total(parts_of_scale), grad_x, grad_y.result() if want_y else None

    def sigmoid(self, shard: Shard, want_x: bool, want_y: bool) -> Terms:
        parts = []  # of the loss, grad_bias and grad_scale
        grad_x = _accumulator(shard.x, shard.scale.dtype) if want_x else None
        grad_y = self.reduction(torch.add)
        for diagonal, (texts, text_ids) in self.blocks(shard.y, shard.ids):
            part = _accumulator(texts, shard.scale.dtype) if want_y else None
            block_scalars = kernels.sigmoid_block(
                *(shard.x, texts, shard.scale, shard.bias, shard.ids, text_ids, diagonal),
                grad_x=grad_x,
                grad_y=part,
                backend=self.backend,
            )
            parts.append(block_scalars)
            if part is not None:
                grad_y.add(part)
        loss, grad_bias, grad_scale = map(_total, zip(*parts, strict=True))
        return Terms(loss, grad_scale, grad_bias, grad_x, grad_y.result() if want_y else None)


class RingStrategy(BlockwiseStrategy):
    """Inf-CL: texts travel around a ring, one block at a time, in one ring for both directions of the loss.

    The statistics and gradients of a block travel along with it and return to its process complete. Transfers overlap
    the computation of the block at hand.
    """

    def __init__(self, processes: Processes, backend: str) -> None:
        super().__init__(processes, backend)
        self._ring = Ring(processes)

    def blocks(self, *tensors: Tensor | None) -> Iterator[tuple[int | None, tuple[Any, ...]]]:
        for source, held in self._ring.rotate(*tensors):
            yield (0 if source == self.processes.rank else None), held

    def reduction(self, combine: Callable[..., Any]) -> Reduction:
        return RingReduction(self._ring, combine)


class DiscoStrategy(BlockwiseStrategy):
    """DisCo-CLIP: all texts in one block. The gradients of images are complete at once; those of texts are reduced.

    The paper all-reduces the gradients of all embeddings; a reduce-scatter gives each process the rows of its own
    texts, all that it needs, at half the traffic.
    """

    def blocks(self, *tensors: Tensor | None) -> Iterator[tuple[int | None, tuple[Any, ...]]]:
        rows = next(len(t) for t in tensors if t is not None)
        yield self.processes.rank * rows, self.gather(*tensors)

    def reduction(self, combine: Callable[..., Any]) -> Reduction:
        scatter = {torch.add: self.processes.scatter_sum, torch.logaddexp: self.processes.scatter_logaddexp}
        return ScatterReduction(scatter[combine])


class ScatterReduction:
    """A `Reduction` of one part for the texts of all processes, [B, ...], by one reduce-scatter."""

    def __init__(self, scatter: Callable[[Tensor], Tensor]) -> None:
        self._scatter = scatter

    def add(self, part: Tensor) -> None:
        self._result = self._scatter(part)

    def result(self) -> Tensor:
        return self._result


class LocalStrategy(DiscoStrategy):
    """OpenCLIP's local loss with gradients through the gather, for softmax; the sigmoid loss is computed as disco.

    The cross entropies of this process's images come from its images and all texts, those of its texts from its texts
    and all images. So no statistics are exchanged, but each logit is computed twice.
    """

    def softmax_log_odds(self, shard: Shard, positive: Tensor) -> tuple[Tensor, Tensor]:
        def of_rows(rows: Tensor, columns: Tensor) -> Tensor:
            all_columns, column_positive, column_ids = self.gather(columns, positive, shard.ids)
            odds, _ = kernels.softmax_statistics(
                *(rows, all_columns, shard.scale, positive, column_positive, shard.ids, column_ids),
                self.diagonal(shard),
                backend=self.backend,
            )
            return odds

        return of_rows(shard.x, shard.y), of_rows(shard.y, shard.x)

    def softmax_gradients(
        self, shard: Shard, statistics: SoftmaxStatistics, want_x: bool, want_y: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        def of_cross_entropies(
            rows: Tensor, columns: Tensor, lse: Tensor, positive: Tensor, want_rows: bool, want_columns: bool
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            """The gradients of the rows' cross entropies by the scale, the rows and the columns."""
            all_columns, column_ids = self.gather(columns, shard.ids)
            # An infinite log-sum-exp leaves the columns' cross entropies out of the coefficients.
            no_columns = lse.new_full((len(all_columns),), torch.inf)
            grad_rows = _accumulator(rows, lse.dtype) if want_rows else None
            grad_columns = _accumulator(all_columns, lse.dtype) if want_columns else None
            grad_scale = kernels.softmax_gradients(
                *(rows, all_columns, shard.scale, lse, no_columns, positive, shard.ids, column_ids),
                self.diagonal(shard),
                grad_x=grad_rows,
                grad_y=grad_columns,
                backend=self.backend,
            )
            return grad_scale, grad_rows, None if grad_columns is None else self.processes.scatter_sum(grad_columns)

        lse_x, lse_y, positive_x, positive_y = statistics
        scale_of_images, x_of_images, y_of_images = of_cross_entropies(
            shard.x, shard.y, lse_x, positive_x, want_x, want_y
        )
        scale_of_texts, y_of_texts, x_of_texts = of_cross_entropies(shard.y, shard.x, lse_y, positive_y, want_y, want_x)
        return (
            scale_of_images + scale_of_texts,
            x_of_images + x_of_texts if x_of_images is not None and x_of_texts is not None else None,
            y_of_images + y_of_texts if y_of_images is not None and y_of_texts is not None else None,
        )


class GatherStrategy(Strategy):
    """CLIP: every process gathers all images and texts and computes the whole loss, so that no gradients travel.

    The gradients and the sigmoid loss take only the rows and columns of this process's images and texts.
    """

    def softmax_log_odds(self, shard: Shard, positive: Tensor) -> tuple[Tensor, Tensor]:
        images, texts, positives, ids = self.gather(shard.x, shard.y, positive, shard.ids)
        odds_x, odds_y = kernels.softmax_statistics(
            images, texts, shard.scale, positives, positives, ids, ids, 0, backend=self.backend
        )
        start = self.diagonal(shard)
        rows = slice(start, start + len(shard.x))
        return odds_x[rows], odds_y[rows]

    def softmax_gradients(
        self, shard: Shard, statistics: SoftmaxStatistics, want_x: bool, want_y: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        lse_x, lse_y, positive_x, positive_y = statistics
        positive_coefficient = positive_x + positive_y

        def of_rows(
            rows: Tensor, row_lse: Tensor, columns: Tensor, column_lse: Tensor, want: bool
        ) -> tuple[Tensor, Tensor | None]:
            """The part of the scale's gradient that comes from these rows, and the gradient of the rows."""
            all_columns, all_lse, column_ids = self.gather(columns, column_lse, shard.ids)
            grad = _accumulator(rows, row_lse.dtype) if want else None
            grad_scale = kernels.softmax_gradients(
                *(rows, all_columns, shard.scale, row_lse, all_lse, positive_coefficient, shard.ids, column_ids),
                self.diagonal(shard),
                grad_x=grad,
                grad_y=None,
                backend=self.backend,
            )
            return grad_scale, grad

        grad_x = grad_y = None
        if want_y:  # the images' and the texts' part of the scale's gradient both add up to the whole
            grad_scale, grad_y = of_rows(shard.y, lse_y, shard.x, lse_x, want=True)
        if want_x or not want_y:
            grad_scale, grad_x = of_rows(shard.x, lse_x, shard.y, lse_y, want_x)
        return grad_scale, grad_x, grad_y

    def sigmoid(self, shard: Shard, want_x: bool, want_y: bool) -> Terms:
        def of_rows(rows: Tensor, columns: Tensor, want: bool) -> Terms:
            all_columns, column_ids = self.gather(columns, shard.ids)
            grad = _accumulator(rows, shard.scale.dtype) if want else None
            loss, grad_bias, grad_scale = kernels.sigmoid_block(
                *(rows, all_columns, shard.scale, shard.bias, shard.ids, column_ids, self.diagonal(shard)),
                grad_x=grad,
                grad_y=None,
                backend=self.backend,
            )
            return Terms(loss, grad_scale, grad_bias, grad, None)

        terms = of_rows(shard.x, shard.y, want_x)
        return terms._replace(grad_y=of_rows(shard.y, shard.x, want=True).grad_x) if want_y else terms


OBJECTIVES = ("softmax", "sigmoid")
STRATEGIES: dict[str, type[Strategy]] = {
    "ring": RingStrategy,
    "disco": DiscoStrategy,
    "local": LocalStrategy,
    "gather": GatherStrategy,
}


def select_strategy(name: str, processes: Processes, backend: str, texts: Tensor) -> Strategy:
    """The strategy of this name; disco in place of a ring whose texts and gradients take up to `GATHERED_BYTES`.

    A small block takes longer to launch than to compute, and a ring of W processes launches W of them.
    """
    # Triton multiplies fp32 features as six parts in bf16, which it holds beside them: 4 + 6 · 2 bytes.
    feature_bytes = 16 if texts.dtype == torch.float32 else texts.element_size()
    gathered = processes.world_size * texts.numel() * (feature_bytes + 4)  # and gradients in fp32
    if name == "ring" and processes.world_size > 1 and gathered <= GATHERED_BYTES:
        name = "disco"
    return STRATEGIES[name](processes, backend)


def _total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of scalars, without a kernel if there is only one."""
    return functools.reduce(torch.add, parts)


def _accumulator(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros for the gradient of the features, in the dtype of the logits."""
    return torch.zeros(features.shape, dtype=dtype, device=features.device)
