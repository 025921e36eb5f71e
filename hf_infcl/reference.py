"""The truth that every test compares with: both objectives written down as their definition, O(B²) memory.

Plain differentiable torch without tricks, for any floating dtype; use float64 to judge others. One process holds the
whole batch.
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
    """The contrastive loss of one batch held by one process.

    With the logits z_ij = logit_scale · x_i·y_j + logit_bias over a batch of B pairs:

    - ``"softmax"`` (InfoNCE; CLIP, arXiv 2103.00020): the mean over both directions of the cross entropy of each row
      and each column of z against its own pair.
    - ``"sigmoid"`` (SigLIP, arXiv 2303.15343, eq. 1): -1/B Σ_ij log σ(t_ij z_ij), t = +1 on the diagonal, -1 off it.

    Args:
        image_embeds: [B, D] floating.
        text_embeds: [B, D] floating.
        logit_scale: multiplier of the cosines (already exponentiated), one element.
        logit_bias: one element; None is 0.
        objective: ``"softmax"`` or ``"sigmoid"``.
        pair_ids: [B] int64. Off the diagonal, a cell whose row and column carry the same id is no negative: it drops
            out of both denominators (softmax) and out of the sum (sigmoid).

    Returns:
        The loss, a scalar of the inputs' dtype.
    """
    logits = logit_scale * image_embeds @ text_embeds.t()
    if logit_bias is not None:
        logits = logits + logit_bias
    batch = len(logits)
    own = torch.eye(batch, dtype=torch.bool, device=logits.device)
    excluded = torch.zeros_like(own) if pair_ids is None else (pair_ids[:, None] == pair_ids[None, :]) & ~own
    if objective == "softmax":
        logits = logits.masked_fill(excluded, -torch.inf)
        target = torch.arange(batch, device=logits.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    if objective == "sigmoid":
        losses = -F.logsigmoid(torch.where(own, logits, -logits))
        return losses.masked_fill(excluded, 0).sum() / batch
    raise ValueError(f"objective must be 'softmax' or 'sigmoid', got {objective!r}.")
