"""Both losses for batches of pairs (image i, text i), optionally with additional negative texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .. import kernels
from .batch import Batch, IdOrder, Terms, Wanted, number_ids
from .strategies import Gradients, GradientsBlock, Rows, Side, Statistics, Strategy


def evaluate(strategy: Strategy, batch: Batch, loss: Callable[..., Terms], wanted: Wanted) -> Terms:
    """The `Terms` of a batch of pairs. ``loss`` is `softmax` or `sigmoid`."""
    if batch.ids_x is None:
        return loss(strategy, batch, wanted)
    (ids_of_batch,) = strategy.gather(Side((batch.ids_x,), batch.counts.images))
    order = IdOrder(number_ids(batch.ids_x, ids_of_batch.sort().values))
    terms = loss(strategy, replace(batch, x=order.sort(batch.x), y=order.sort(batch.y), ids_x=order.ids), wanted)
    return terms._replace(grad_x=order.restore(terms.grad_x), grad_y=order.restore(terms.grad_y))


def softmax(strategy: Strategy, batch: Batch, wanted: Wanted) -> Terms:
    """The InfoNCE loss. C is 2B times its derivative by the logits, B times if it is one-way, and its sum is 0."""
    scale, ids, backend, (pairs, _, negative_texts) = batch.scale, batch.ids_x, strategy.backend, batch.counts

    def statistics(x: Rows, y: Rows, diagonal: int | None) -> tuple[Statistics, Statistics]:
        (images, positive_x, ids_x), (texts, positive_y, ids_y) = x, y
        odds_x, odds_y = kernels.softmax_statistics(
            *(images, texts, scale, positive_x, positive_y, ids_x, ids_y, diagonal, backend)
        )
        return (odds_x,), (odds_y,)

    def gradients(
        x: Rows, y: Rows, diagonal: int | None, grad_x: Tensor | None, grad_y: Tensor | None, accumulate: bool
    ) -> tuple[Tensor, ...]:
        (images, lse_x, positive_coefficient, ids_x), (texts, lse_y, _, ids_y) = x, y
        grad_scale = kernels.softmax_gradients(
            *(images, texts, scale, lse_x, lse_y, positive_coefficient, ids_x, ids_y, diagonal),
            *(grad_x, grad_y, accumulate, backend),
        )
        return (grad_scale,)

    # ---- The log-odds of the negatives against the positive of each row and column ----
    positive = kernels.positive_logits(batch.x, batch.y, scale, backend)
    x, y = Side((batch.x, positive, ids), pairs), strategy.columns(Side((batch.y, positive, ids), pairs))
    texts, positive_y, ids_y = y.rows
    (odds_x,), of_columns = strategy.statistics(statistics, (torch.logaddexp,), x, y, want_y=not batch.one_way)
    # Texts without a cross entropy are certain to find their images.
    odds_y = torch.full_like(positive_y, -torch.inf) if batch.one_way else of_columns[0]
    if batch.negatives is not None:
        # The statistics of these columns are not read, so any pivot works; one close to the others is faster.
        near = positive.mean().expand(len(batch.negatives))
        x, negatives = Side((batch.x, positive, None), pairs), Side((batch.negatives, near, None), negative_texts)
        negatives = strategy.columns(negatives)
        (odds,), _ = strategy.statistics(
            lambda x, y, _: statistics(x, y, None), (torch.logaddexp,), x, negatives, want_y=False
        )
        odds_x = torch.logaddexp(odds_x, odds)

    # ---- The cross entropies ----
    own_odds_y = strategy.of_this_process(odds_y, pairs)
    loss, lse_x, lse_y, coefficient_of_both = kernels.softmax_losses(
        positive, odds_x, own_odds_y, positive_y, odds_y, backend
    )
    divisor = (1.0 if batch.one_way else 2.0) * sum(pairs)
    if not any(wanted):
        return Terms(loss, divisor)
    zero = torch.zeros_like(scale)
    if not any(wanted[:-1]):
        return Terms(loss, divisor, zero, zero)

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
        return Side((batch.x, image_lse, coefficient, ids), pairs), Side((texts, text_lse, coefficient_y, ids_y), pairs)

    if batch.one_way:
        from_pairs = strategy.gradients(gradients, *sides(losses_y=False), wanted.x, wanted.y)
    else:
        from_pairs = strategy.softmax_gradients(gradients, sides, wanted.x, wanted.y)
    if batch.negatives is None:
        return Terms(loss, divisor, from_pairs.scalars[0], zero, from_pairs.x, from_pairs.y)
    features = negatives.rows[0]
    no_loss = lse_y.new_full((len(features),), torch.inf)
    x, negatives = Side((batch.x, lse_x, None, None), pairs), Side((features, no_loss, None, None), negative_texts)
    from_negatives = strategy.gradients(_without_positives(gradients), x, negatives, wanted.x, wanted.negatives)
    (grad_scale,), grad_x = _sum(from_pairs, from_negatives)
    return Terms(loss, divisor, grad_scale, zero, grad_x, from_pairs.y, from_negatives.y)


def sigmoid(strategy: Strategy, batch: Batch, wanted: Wanted) -> Terms:
    """The sigmoid loss. C is B times its derivative; terms and coefficients come from one pass over the logits."""
    pairs, _, negative_texts = batch.counts

    def gradients(
        x: Rows, y: Rows, diagonal: int | None, grad_x: Tensor | None, grad_y: Tensor | None, accumulate: bool
    ) -> tuple[Tensor, ...]:
        (images, ids_x), (texts, ids_y) = x, y
        return kernels.sigmoid_block(
            *(images, texts, batch.scale, batch.bias, ids_x, ids_y, diagonal, grad_x, grad_y, accumulate),
            backend=strategy.backend,
        )

    x, y = Side((batch.x, batch.ids_x), pairs), strategy.columns(Side((batch.y, batch.ids_x), pairs))
    from_pairs = strategy.gradients(gradients, x, y, wanted.x, wanted.y)
    (loss, grad_bias, grad_scale), grad_x, grad_y = from_pairs
    grad_negatives = None
    if batch.negatives is not None:
        x, negatives = Side((batch.x, None), pairs), strategy.columns(Side((batch.negatives, None), negative_texts))
        from_negatives = strategy.gradients(_without_positives(gradients), x, negatives, wanted.x, wanted.negatives)
        (loss, grad_bias, grad_scale), grad_x = _sum(from_pairs, from_negatives)
        grad_negatives = from_negatives.y
    return Terms(loss, float(sum(pairs)), grad_scale, grad_bias, grad_x, grad_y, grad_negatives)


def _without_positives(block: GradientsBlock) -> GradientsBlock:
    return lambda x, y, _, *gradients: block(x, y, None, *gradients)


def _sum(a: Gradients, b: Gradients) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Adds the scalars, and the gradients of the images, which are the rows of both."""
    scalars = tuple(s + t for s, t in zip(a.scalars, b.scalars, strict=True))
    return scalars, a.x + b.x if a.x is not None and b.x is not None else None
