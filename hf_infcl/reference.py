"""Both losses written as their definitions, with the B×B logits in memory. Every test compares with them.

Plain differentiable torch for one process that holds the whole batch, in any floating dtype. Compare in float64.
"""

from __future__ import annotations

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
) -> Tensor:
    """The contrastive loss of a batch of B pairs.

    With the logits z_ij = logit_scale · x_i·y_j + logit_bias:

    - ``"softmax"`` (InfoNCE; CLIP, arXiv 2103.00020): the mean of two cross entropies, of the rows of z and of its
      columns, each with the diagonal as the target.
    - ``"sigmoid"`` (SigLIP, arXiv 2303.15343, eq. 1): -1/B Σ_ij log σ(t_ij z_ij), t = +1 on the diagonal, -1 off it.

    Args:
        image_embeds: [B, D] floating.
        text_embeds: [B, D] floating.
        logit_scale: one element, the multiplier of the cosines (already exponentiated).
        logit_bias: one element; None is 0.
        objective: ``"softmax"`` or ``"sigmoid"``.
        pair_ids: [B] int64. Off the diagonal, a cell whose row and column have equal ids is no negative: it drops out
            of both denominators (softmax) or out of the sum (sigmoid).

    Returns:
        The loss, a scalar in the dtype of the embeddings.

    Raises:
        ValueError: the objective is unknown.
    """
    logits = logit_scale * image_embeds @ text_embeds.t()
    if logit_bias is not None:
        logits = logits + logit_bias
    batch = len(logits)
    positive = torch.eye(batch, dtype=torch.bool, device=logits.device)
    excluded = torch.zeros_like(positive) if pair_ids is None else (pair_ids[:, None] == pair_ids[None, :]) & ~positive
    if objective == "softmax":
        logits = logits.masked_fill(excluded, -torch.inf)
        target = torch.arange(batch, device=logits.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    if objective == "sigmoid":
        losses = -F.logsigmoid(torch.where(positive, logits, -logits))
        return losses.masked_fill(excluded, 0).sum() / batch
    raise ValueError(f"objective must be 'softmax' or 'sigmoid', got {objective!r}.")
