"""Both losses for images and texts whose equal ids are positives: an image or text may have several, one or none.

`hf_infcl.loss.reference` defines these losses; the softmax loss is UniCL's (arXiv 2204.03610). Consider a row i with
K_i >= 1 positives, and the differences d_ij = z_ij - r_i from a pivot r_i, the logit of some cell in the row. With

    N = log Σ_negatives exp(d_ij), P = log Σ_positives exp(d_ij), Z = Σ_positives d_ij,

the cross entropy of the row is log(exp(N) + exp(P)) - Z / K_i. The N, P and Z of several blocks can be combined, so no
block needs to know where all positives are. With a single positive P equals Z, and the cross entropy is
softplus(N - Z), as for pairs, which has full relative precision however small it is; a computed P would differ from Z
by rounding. With several positives the cross entropy is at least log K_i.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from .batch import Batch, Blocks, IdOrder, Terms, number_ids
from .strategies import Side, Statistics, Strategy


@dataclass(frozen=True)
class _Anchors:
    """The images of this process, or its texts and negative texts, in the order of their ids."""

    features: Tensor  # [b, D]
    ids: Tensor  # [b] int32; -1 for negative texts
    positives: Tensor  # [b], the number of positives of each in the global batch
    with_positive: Tensor  # scalar, the number of images, or of texts, of the global batch that have a positive
    counts: tuple[int, ...]
    wanted: bool  # whether the gradient of the features is wanted

    def side(self, *vectors: Tensor) -> Side:
        return Side((self.features, *vectors, self.ids), self.counts)

    def as_columns(self, strategy: Strategy, *vectors: Tensor) -> tuple[Any, ...]:
        """These anchors and vectors with one element per anchor, in the form of `Strategy.columns`."""
        side = strategy.columns(Side((self.features, self.ids, self.positives, *vectors), self.counts))
        features, ids, positives, *vectors_of_columns = side.rows
        return replace(self, features=features, ids=ids, positives=positives), *vectors_of_columns


def evaluate(strategy: Strategy, batch: Batch, loss: Callable[..., Terms]) -> Terms:
    """The `Terms` of a batch with ids of images and of texts. ``loss`` is `softmax` or `sigmoid`."""
    assert batch.ids_x is not None
    assert batch.ids_y is not None
    ids_of_images, ids_of_texts = strategy.gather(
        Side((batch.ids_x,), batch.counts.images), Side((batch.ids_y,), batch.counts.texts)
    )
    known = torch.cat((ids_of_images, ids_of_texts)).sort().values
    # Numbers are in the same order as the ids.
    ids_of_images, ids_of_texts = (number_ids(ids.sort().values, known) for ids in (ids_of_images, ids_of_texts))
    ids_x, ids_y = number_ids(batch.ids_x, known), number_ids(batch.ids_y, known)
    y, counts_y = batch.y, batch.counts.texts
    if batch.negatives is not None:
        y, ids_y = torch.cat((y, batch.negatives)), F.pad(ids_y, (0, len(batch.negatives)), value=-1)
        counts_y = tuple(m + h for m, h in zip(counts_y, batch.counts.negative_texts, strict=True))

    def anchors(features: Tensor, order: IdOrder, same: Tensor, opposite: Tensor, *others: Any) -> _Anchors:
        positives = _occurrences(order.ids, opposite).to(batch.scale.dtype)
        with_positive = _occurrences(same, opposite).count_nonzero().to(batch.scale.dtype)
        return _Anchors(order.sort(features), order.ids, positives, with_positive, *others)

    order_x, order_y = IdOrder(ids_x), IdOrder(ids_y)
    wanted = batch.wanted
    images = anchors(batch.x, order_x, ids_of_images, ids_of_texts, batch.counts.images, wanted.x)
    texts = anchors(y, order_y, ids_of_texts, ids_of_images, counts_y, wanted.y or wanted.negatives)
    if sum(texts.counts) <= sum(images.counts):
        terms = loss(strategy, images, texts, batch)
        grad_x, grad_y = terms.grad_x, terms.grad_y
    else:  # the smaller side is sent between processes; the loss is symmetric
        terms = loss(strategy, texts, images, batch)
        grad_y, grad_x = terms.grad_x, terms.grad_y
    del images, texts, y  # frees the sorted copies before the gradients are copied into the order of the arguments
    grad_texts = order_y.restore(grad_y)
    return terms._replace(
        grad_x=order_x.restore(grad_x),
        grad_y=None if grad_texts is None else grad_texts[: len(batch.y)],
        grad_negatives=None if grad_texts is None else grad_texts[len(batch.y) :],
    )


def softmax(strategy: Strategy, x: _Anchors, y: _Anchors, batch: Batch) -> Terms:
    """C is 2·min(n', m') times the derivative of the loss, and its sum is 0."""
    scale, backend = batch.scale, strategy.backend
    blocks = Blocks(scale, batch.bias, backend, equal_are_positive=True)
    pivot_x, pivot_y = _pivot(x, y, scale, backend), _pivot(y, x, scale, backend)
    y, pivot_y = y.as_columns(strategy, pivot_y)
    stats_x, stats_y = strategy.statistics(blocks.softmax_statistics, x.side(pivot_x), y.side(pivot_y))  # N, P and Z
    fewest = torch.minimum(x.with_positive, y.with_positive)
    weight_x, weight_y = fewest / x.with_positive, fewest / y.with_positive
    losses_x, relative_x, share_x = _cross_entropies(stats_x, x.positives, weight_x)
    losses_y, relative_y, share_y = _cross_entropies(stats_y, y.positives, weight_y)
    loss = weight_x * losses_x.sum() + weight_y * strategy.of_this_process(losses_y, y.counts).sum()
    divisor = 2 * fewest
    if not any(batch.wanted):
        return Terms(loss, divisor)

    def side(anchors: _Anchors, pivot: Tensor, relative: Tensor, share: Tensor, losses: bool) -> Side:
        """The side of some anchors. If their losses do not count, their log-sum-exp is infinite and their share 0."""
        if not losses:
            relative, share = torch.full_like(relative, torch.inf), torch.zeros_like(share)
        return anchors.side(pivot, relative, share)

    def sides(losses_x: bool = True, losses_y: bool = True) -> tuple[Side, Side]:
        return (
            side(x, pivot_x, relative_x, share_x, losses_x),
            side(y, pivot_y, relative_y, share_y, losses_y),
        )

    (grad_scale,), grad_x, grad_y = strategy.softmax_gradients(blocks.softmax_gradients, sides, x.wanted, y.wanted)
    return Terms(loss, divisor, grad_scale, None, grad_x, grad_y)


def _cross_entropies(statistics: Statistics, positives: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cross entropies of anchors, and two arguments of `kernels.softmax_gradients`.

    Args:
        statistics: N, P and Z of each anchor over the global batch.
        positives: the number of positives of each anchor.
        weight: scalar, at most 1.

    Returns:
        The cross entropies without the weight, 0 for anchors without a positive; ``relative``; and ``share``.
    """
    negative, positive, distance = statistics
    single, any_positive = positives == 1, positives > 0
    positive = torch.where(single, distance, positive)
    odds = negative - positive
    # Above its threshold F.softplus returns its input. With the default of 20, fp64 would lose six digits.
    cross_entropy_of_single = F.softplus(odds, threshold=40)
    relative = torch.logaddexp(negative, positive)
    cross_entropies = torch.where(single, cross_entropy_of_single, relative - distance / positives)
    smallest = torch.finfo(odds.dtype).tiny  # a negative share marks a single positive, so it must not be zero
    share_of_single = (-weight * torch.sigmoid(odds)).clamp_max(-smallest)
    share = torch.where(single, share_of_single, weight / positives)
    return (
        torch.where(any_positive, cross_entropies, 0),
        torch.where(any_positive, relative - weight.log(), torch.inf),
        torch.where(any_positive, share, 0),
    )


def sigmoid(strategy: Strategy, x: _Anchors, y: _Anchors, batch: Batch) -> Terms:
    """C is 2 / (1/n' + 1/m') times the derivative. Terms and coefficients come from one pass over the logits."""
    blocks = Blocks(batch.scale, batch.bias, strategy.backend, equal_are_positive=True)
    (y,) = y.as_columns(strategy)
    sums, grad_x, grad_y = strategy.gradients(blocks.sigmoid, x.side(), y.side(), x.wanted, y.wanted)
    loss, grad_bias, grad_scale = sums
    divisor = 2 / (1 / x.with_positive + 1 / y.with_positive)
    return Terms(loss, divisor, grad_scale, grad_bias, grad_x, grad_y)


def _pivot(x: _Anchors, y: _Anchors, scale: Tensor, backend: str) -> Tensor:
    """[b]: for each x the logit with a positive on this process, or with another y if it has none there.

    Relative to a positive, negatives that underflow are negligible. Relative to a negative N >= 0, so positives that
    underflow are negligible.
    """
    partner = torch.searchsorted(y.ids, x.ids).clamp_max(len(y.ids) - 1)
    return kernels.positive_logits(x.features, y.features[partner], scale, backend)


def _occurrences(ids: Tensor, sorted_ids: Tensor) -> Tensor:
    """The number of times that each of the ids occurs among ``sorted_ids``."""
    return torch.searchsorted(sorted_ids, ids, right=True) - torch.searchsorted(sorted_ids, ids)
