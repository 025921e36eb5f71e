"""Both losses for batches of pairs (image i, text i), optionally with additional negative texts."""

from collections.abc import Callable
from dataclasses import replace

import torch

from .. import kernels
from .batch import Batch, Blocks, IdOrder, Terms, number_ids
from .strategies import Side, Strategy


def evaluate(strategy: Strategy, batch: Batch, loss: Callable[[Strategy, Batch], Terms]) -> Terms:
    """The `Terms` of a batch of pairs. ``loss`` is `softmax` or `sigmoid`."""
    if batch.ids_x is None:
        return loss(strategy, batch)
    (ids_of_batch,) = strategy.gather(Side((batch.ids_x,), batch.counts.images))
    order = IdOrder(number_ids(batch.ids_x, ids_of_batch.sort().values))
    terms = loss(strategy, replace(batch, x=order.sort(batch.x), y=order.sort(batch.y), ids_x=order.ids))
    return terms._replace(grad_x=order.restore(terms.grad_x), grad_y=order.restore(terms.grad_y))


def softmax(strategy: Strategy, batch: Batch) -> Terms:
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


def sigmoid(strategy: Strategy, batch: Batch) -> Terms:
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
