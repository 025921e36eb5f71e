"""Both losses by their definitions, with the whole matrix of logits in memory: the reference for every test.

This is plain differentiable torch for one process that holds the whole batch, in any floating dtype. Comparisons should
use float64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def contrastive_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None = None,
    *,
    objective: str = "softmax",
    pair_ids: Tensor | None = None,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    negative_texts: Tensor | None = None,
    directions: str = "both",
) -> Tensor:
    """The contrastive loss of a batch of n images and m texts.

    The logits are z_ij = logit_scale · x_i·y_j + logit_bias. A cell (i, j) is positive if image i and text j belong
    together: on the diagonal or, if ids are given, wherever image_ids_i = text_ids_j. Let n' be the number of images
    that have a positive, and m' the number of such texts. Images and texts without a positive have no loss of their
    own and only serve as negatives.

    - ``"softmax"`` (InfoNCE; CLIP, arXiv 2103.00020; with ids UniCL, arXiv 2204.03610): the cross entropy of a row of z
      is the mean of -log softmax(z_i)_j over its positives j; likewise for a column. The loss is half the mean over the
      n' rows plus half the mean over the m' columns.
    - ``"sigmoid"`` (SigLIP, arXiv 2303.15343, eq. 1): -½(1/n' + 1/m') Σ_ij log σ(t_ij z_ij) with t = +1 for positives
      and -1 for all other cells. For B pairs the factor ½(1/n' + 1/m') is 1/B.

    Args:
        image_embeds: [n, D] floating.
        text_embeds: [m, D] floating; n = m unless ids are given.
        logit_scale: one element, the multiplier of the cosines (already exponentiated).
        logit_bias: one element; None means 0.
        objective: ``"softmax"`` or ``"sigmoid"``.
        pair_ids: [n] int64. Off the diagonal, a cell whose row and column have equal ids is not a negative: it is left
            out of both denominators (softmax) or out of the sum (sigmoid).
        image_ids: [n] int64, text_ids: [m] int64. Give both or neither, and not together with pair_ids.
        negative_texts: [h, D], further columns without a positive: hard negatives (NegCLIP, arXiv 2210.01936).

        directions: ``"both"``, or ``"image_to_text"``: of the softmax loss, the mean over the rows alone.

    Returns:
        The loss, a scalar in the dtype of the embeddings. It is not finite if no cell is positive.

    Raises:
        ValueError: the objective is unknown.
    """
    n, m = len(image_embeds), len(text_embeds)
    if image_ids is not None and text_ids is not None:
        positive = image_ids[:, None] == text_ids[None, :]
    else:
        positive = torch.eye(n, m, dtype=torch.bool, device=image_embeds.device)
    excluded = torch.zeros_like(positive) if pair_ids is None else (pair_ids[:, None] == pair_ids[None, :]) & ~positive
    if negative_texts is not None:
        text_embeds = torch.cat((text_embeds, negative_texts))
        positive, excluded = (F.pad(cells, (0, len(negative_texts))) for cells in (positive, excluded))
    logits = logit_scale * image_embeds @ text_embeds.t()
    if logit_bias is not None:
        logits = logits + logit_bias
    if objective not in DEFINITIONS:
        raise ValueError(f"objective must be one of {', '.join(map(repr, DEFINITIONS))}, got {objective!r}.")
    if directions == "image_to_text":
        return _cross_entropy(logits.masked_fill(excluded, -torch.inf), positive)
    return DEFINITIONS[objective](logits, positive, excluded)


def _softmax(logits: Tensor, positive: Tensor, excluded: Tensor) -> Tensor:
    logits = logits.masked_fill(excluded, -torch.inf)
    return (_cross_entropy(logits, positive) + _cross_entropy(logits.t(), positive.t())) / 2


def _sigmoid(logits: Tensor, positive: Tensor, excluded: Tensor) -> Tensor:
    losses = -F.logsigmoid(torch.where(positive, logits, -logits))
    images, texts = (positive.any(dim).sum().to(losses.dtype) for dim in (1, 0))
    return losses.masked_fill(excluded, 0).sum() * (1 / images + 1 / texts) / 2


# Each maps the logits, which cells are positive and which are excluded, all [n, m], to the loss.
DEFINITIONS = {"softmax": _softmax, "sigmoid": _sigmoid}


def _cross_entropy(logits: Tensor, positive: Tensor) -> Tensor:
    """The mean, over all rows with positives, of the row's mean of -log softmax over its positives."""
    log_probabilities = F.log_softmax(logits, 1).masked_fill(~positive, 0)
    positives = positive.sum(1)
    return (-log_probabilities.sum(1) / positives.clamp_min(1))[positives > 0].mean()
