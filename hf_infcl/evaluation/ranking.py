"""The rank of a query's best-placed positive among all candidates, and the checks of the embeddings that are ranked.

All metrics of this package are computed from such ranks. Scores are computed tile by tile, so the full score matrix
never exists: apart from float copies of the embeddings, memory is a few tensors of `max(TILE_NUMEL, number of
candidates)` elements.

Ties: among candidates with equal scores, the one with the lower index comes first. CLIP_benchmark uses `torch.topk`,
which leaves the order of ties open; ours is one of the orders that `torch.topk` may return, and it depends neither on
the device nor on the tiles. Without ties, the results are equal. A collapsed model, for which all candidates tie, gets
the score of chance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Scores held at a time (2**22 fp32 values are 16 MiB); a single row of candidates is held even if it is longer.
TILE_NUMEL = 2**22


NOT_FINITE = -1  # the rank of a query that is not finite


def positive_ranks(
    queries: Tensor, candidates: Tensor, query_ids: Tensor, candidate_ids: Tensor, copies: Tensor | None = None
) -> Tensor:
    """The rank of each query's best-placed positive by dot products, [Q] int32: 0 is the top, K means there is none.

    The result is on the device, which may still work. The rank of a query that is not finite is `NOT_FINITE`.

    Args:
        queries: [Q, D].
        candidates: [K, D]; with `copies` [U, D].
        query_ids: [Q] int64. A candidate with an equal id is a positive of the query.
        candidate_ids: [K] int64.
        copies: [K] int64, the row of `candidates` that each of the K candidates is a copy of, so that copies tie
            exactly; by default candidate k is row k.
    """
    num_candidates = len(candidate_ids)
    order = torch.arange(num_candidates, device=candidates.device)
    rows = max(1, TILE_NUMEL // num_candidates)
    ranks = []
    for query, ids in zip(queries.split(rows), query_ids.split(rows), strict=True):
        scores = query @ candidates.T  # [rows, K]
        if copies is not None:
            scores = scores[:, copies]  # from [rows, U]
        positive = ids[:, None] == candidate_ids
        # max takes the first of equal values. Without a positive `best` is -inf and all candidates are ahead of it.
        best, place = scores.masked_fill(~positive, -math.inf).max(dim=1, keepdim=True)
        ahead = (scores > best) | ((scores == best) & (order < place))
        ranked = ahead.sum(dim=1, dtype=torch.int32)  # on a CPU ten times as fast as the default, int64
        ranks.append(ranked.masked_fill(best[:, 0].isnan(), NOT_FINITE))
    return torch.cat(ranks)


def checked_embeds(name: str, embeds: Tensor, like: Tensor | None = None) -> Tensor:
    """`embeds` as a finite [rows, D] tensor in fp32 or fp64, or a ValueError; `like` determines device and D."""
    if embeds.ndim != 2 or 0 in embeds.shape or not embeds.is_floating_point():
        raise ValueError(
            f"{name} must be a floating point tensor [rows, D] with at least one row, "
            f"got shape {tuple(embeds.shape)} of {embeds.dtype}."
        )
    if like is not None and (embeds.shape[1] != like.shape[1] or embeds.device != like.device):
        raise ValueError(
            f"{name} must agree with image_embeds in D and device, got D={embeds.shape[1]} on {embeds.device} "
            f"against D={like.shape[1]} on {like.device}."
        )
    checked_finite(name, embeds.isfinite().all(dim=1))
    if like is not None:
        return embeds.to(like.dtype)
    return embeds if embeds.dtype == torch.float64 else embeds.float()


def checked_finite(name: str, finite: Tensor) -> None:
    """A ValueError unless all rows are `finite`, a bool tensor [rows]."""
    if not finite.all():
        raise ValueError(
            f"{name} must be finite, but NaN or infinity stand in {int((~finite).sum())} of {len(finite)} rows, "
            f"the first of them row {int((~finite).nonzero()[0])}."
        )


def checked_index(name: str, index: Tensor, length: int, upper: int, device: torch.device) -> Tensor:
    """`index` as an int64 tensor [length] of values in [0, upper) on `device`, or a ValueError."""
    index = checked_integers(name, index, length, device)
    if index.min() < 0 or index.max() >= upper:
        raise ValueError(f"{name} must lie in [0, {upper}), got values from {int(index.min())} to {int(index.max())}.")
    return index


def checked_integers(name: str, integers: Tensor, length: int, device: torch.device) -> Tensor:
    """`integers` as an int64 tensor [length] on `device`, or a ValueError."""
    if integers.shape != (length,) or integers.is_floating_point() or integers.dtype == torch.bool:
        raise ValueError(
            f"{name} must be an integer tensor of shape {(length,)}, "
            f"got shape {tuple(integers.shape)} of {integers.dtype}."
        )
    return integers.to(device, torch.int64)
