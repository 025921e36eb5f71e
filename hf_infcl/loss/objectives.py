"""The objectives: both losses, for pairs and for several positives, and what options, cards and tests read about each.

In a batch of pairs, text i belongs to image i, and there may be negative texts. With ids of images and of texts, equal
ids are positives: an image or text may have several, one or none.

`hf_infcl.loss.reference` defines these losses; with several positives the softmax loss is UniCL's (arXiv 2204.03610).
Consider a row i with K_i >= 1 positives, and the differences d_ij = z_ij - r_i from a pivot r_i, the logit of some cell
in the row. With

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


def evaluate(strategy: Strategy, batch: Batch, objective: str) -> Terms:
    """The `Terms` of a batch of pairs or, if it has ids of texts, of several positives."""
    if batch.ids_y is None:
        return _of_pairs(strategy, batch, OBJECTIVES[objective].of_pairs)
    return _of_several_positives(strategy, batch, OBJECTIVES[objective].of_several_positives)


# ---- Pairs ----


def _of_pairs(strategy: Strategy, batch: Batch, loss: Callable[..., Terms]) -> Terms:
    if batch.ids_x is None:
        return loss(strategy, batch)
    (ids_of_batch,) = strategy.gather(Side((batch.ids_x,), batch.counts.images))
    order = IdOrder(number_ids(batch.ids_x, ids_of_batch.sort().values))
    terms = loss(strategy, replace(batch, x=order.sort(batch.x), y=order.sort(batch.y), ids_x=order.ids))
    return terms._replace(grad_x=order.restore(terms.grad_x), grad_y=order.restore(terms.grad_y))


def softmax_of_pairs(strategy: Strategy, batch: Batch) -> Terms:
    """The InfoNCE loss. C is 2B times its derivative by the logits, B times if it is one-way, and its sum is 0."""
    scale, ids, backend, one_way = batch.scale, batch.ids_x, strategy.backend, batch.one_way
    wanted, (pairs, _, negative_texts) = batch.wanted, batch.counts
    blocks = Blocks(scale, batch.bias, backend, paired=True)
    of_negatives = replace(blocks, paired=False)

    # ---- The log-odds of the negatives against the positive of each row and column ----
    positive = kernels.positive_logits(batch.x, batch.y, scale, backend)
    x, y = Side((batch.x, positive, ids), pairs), strategy.columns(Side((batch.y, positive, ids), pairs))
    texts, positive_y, ids_y = y.rows
    (odds_x,), of_columns = strategy.statistics(blocks.softmax_statistics, x, y, want_y=not one_way)
    # Texts without a cross entropy are certain to find their images.
    odds_y = torch.full_like(positive_y, -torch.inf) if one_way else of_columns[0]
    if batch.negatives is not None:
        # The statistics of these columns are not read, so any pivot works; one close to the others is faster.
        near = positive.mean().expand(len(batch.negatives))
        x, negatives = Side((batch.x, positive, None), pairs), Side((batch.negatives, near, None), negative_texts)
        negatives = strategy.columns(negatives)
        (odds,), _ = strategy.statistics(of_negatives.softmax_statistics, x, negatives, want_y=False)
        odds_x = torch.logaddexp(odds_x, odds)

    # ---- The cross entropies ----
    own_odds_y = strategy.of_this_process(odds_y, pairs)
    loss, lse_x, lse_y, coefficient_of_both = kernels.softmax_losses(
        positive, odds_x, own_odds_y, positive_y, odds_y, backend
    )
    divisor = (1.0 if one_way else 2.0) * sum(pairs)
    if not any(wanted[:-1]):  # that of the bias is 0
        return Terms(loss, divisor)

    # ---- The gradients of the embeddings and the scale ----
    def sides(losses_x: bool = True, losses_y: bool = True) -> tuple[Side, Side]:
        """Both sides, with the cross entropies of the images, of the texts or of both."""
        coefficient = coefficient_of_both
        if not (losses_x and losses_y):
            coefficient = -torch.sigmoid(odds_x if losses_x else own_odds_y)
        # The coefficients exp(z - lse) of the side without cross entropies are 0.
        image_lse = lse_x if losses_x else torch.full_like(lse_x, torch.inf)
        text_lse = lse_y if losses_y else torch.full_like(lse_y, torch.inf)
        coefficient_y = coefficient if strategy.transposes else None  # the kernels only read the rows' coefficients
        rows, columns = (batch.x, image_lse, None, coefficient, ids), (texts, text_lse, None, coefficient_y, ids_y)
        return Side(rows, pairs), Side(columns, pairs)

    if one_way:
        from_pairs = strategy.gradients(blocks.softmax_gradients, *sides(losses_y=False), wanted.x, wanted.y)
    else:
        from_pairs = strategy.softmax_gradients(blocks.softmax_gradients, sides, wanted.x, wanted.y)
    if batch.negatives is None:
        return Terms(loss, divisor, from_pairs.scalars[0], None, from_pairs.x, from_pairs.y)
    features = negatives.rows[0]
    no_loss = lse_y.new_full((len(features),), torch.inf)
    x = Side((batch.x, lse_x, None, None, None), pairs)
    negatives = Side((features, no_loss, None, None, None), negative_texts)
    from_negatives = strategy.gradients(of_negatives.softmax_gradients, x, negatives, wanted.x, wanted.negatives)
    (grad_scale,), grad_x, _ = from_pairs.plus(from_negatives._replace(y=None))
    return Terms(loss, divisor, grad_scale, None, grad_x, from_pairs.y, from_negatives.y)


def sigmoid_of_pairs(strategy: Strategy, batch: Batch) -> Terms:
    """The sigmoid loss. C is B times its derivative; terms and coefficients come from one pass over the logits."""
    wanted, (pairs, _, negative_texts) = batch.wanted, batch.counts
    blocks = Blocks(batch.scale, batch.bias, strategy.backend, paired=True)
    x, y = Side((batch.x, batch.ids_x), pairs), strategy.columns(Side((batch.y, batch.ids_x), pairs))
    from_pairs = strategy.gradients(blocks.sigmoid, x, y, wanted.x, wanted.y)
    (loss, grad_bias, grad_scale), grad_x, grad_y = from_pairs
    grad_negatives = None
    if batch.negatives is not None:
        x, negatives = Side((batch.x, None), pairs), strategy.columns(Side((batch.negatives, None), negative_texts))
        block = replace(blocks, paired=False).sigmoid
        from_negatives = strategy.gradients(block, x, negatives, wanted.x, wanted.negatives)
        (loss, grad_bias, grad_scale), grad_x, _ = from_pairs.plus(from_negatives._replace(y=None))
        grad_negatives = from_negatives.y
    return Terms(loss, float(sum(pairs)), grad_scale, grad_bias, grad_x, grad_y, grad_negatives)


# ---- Several positives ----


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


def _of_several_positives(strategy: Strategy, batch: Batch, loss: Callable[..., Terms]) -> Terms:
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


def softmax_of_several_positives(strategy: Strategy, x: _Anchors, y: _Anchors, batch: Batch) -> Terms:
    """The softmax loss. C is 2·min(n', m') times its derivative, and its sum is 0."""
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

    def sides(losses_x: bool = True, losses_y: bool = True) -> tuple[Side, Side]:
        """Both sides. Where cross entropies do not count, the log-sum-exp is infinite and the share 0."""
        of_x, of_y = (relative_x, share_x), (relative_y, share_y)
        if not losses_x:
            of_x = torch.full_like(relative_x, torch.inf), torch.zeros_like(share_x)
        if not losses_y:
            of_y = torch.full_like(relative_y, torch.inf), torch.zeros_like(share_y)
        return x.side(pivot_x, *of_x), y.side(pivot_y, *of_y)

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


def sigmoid_of_several_positives(strategy: Strategy, x: _Anchors, y: _Anchors, batch: Batch) -> Terms:
    """The sigmoid loss, also from one pass over the logits. C is 2 / (1/n' + 1/m') times its derivative."""
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


# ---- The table ----


@dataclass(frozen=True)
class Objective:
    """A loss of a batch. `hf_infcl.loss.reference.DEFINITIONS` has its definition under the same name.

    Attributes:
        of_pairs: computes it for pairs.
        of_several_positives: computes it for several positives.
        products: the matrix products of B × B × D in the loss and its gradient.
        passes: how often the texts travel around a ring of processes.
        largest_scale: the default of ``max_logit_scale`` in a training; None means no limit.
        words: its name in a model card.
    """

    of_pairs: Callable[..., Terms]
    of_several_positives: Callable[..., Terms]
    products: int
    passes: int
    largest_scale: float | None
    words: str


OBJECTIVES: dict[str, Objective] = {
    "softmax": Objective(
        of_pairs=softmax_of_pairs,
        of_several_positives=softmax_of_several_positives,
        products=4,
        passes=2,
        largest_scale=100.0,  # CLIP's rule (arXiv 2103.00020, section 2.5)
        words="softmax (InfoNCE, as CLIP)",
    ),
    "sigmoid": Objective(
        of_pairs=sigmoid_of_pairs,
        of_several_positives=sigmoid_of_several_positives,
        products=3,
        passes=1,
        largest_scale=None,
        words="sigmoid (as SigLIP)",
    ),
}
