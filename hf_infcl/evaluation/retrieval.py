"""Zero-shot classification and image-text retrieval from embeddings: tensors in, a dict of floats out.

The numbers are those that CLIP_benchmark (https://github.com/LAION-AI/CLIP_benchmark) reports, so that they can be
compared with published ones. All three metrics come from one quantity: the rank, among all candidates, of a query's
best-placed positive. Ranks are counted tile by tile, so the full score matrix is never held: beyond float copies of
the embeddings, memory is a few tensors of `max(_TILE_NUMEL, number of candidates)` elements.

Ties: of candidates with equal scores the one with the lower index comes first. CLIP_benchmark uses `torch.topk`, which
leaves the order of ties open; this is one of the orders that it may give, and does not depend on the device or on the
tiles. Without ties the numbers are equal. A collapsed model, for which everything ties, gets the score of chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores held at a time (2**22 fp32 values are 16 MiB); a single row of candidates is held even if it is longer.
_TILE_NUMEL = 2**22


@torch.no_grad()
def zero_shot_classifier(text_embeds: Tensor, num_templates: int) -> Tensor:
    """One weight vector per class: the normalised mean of the class's normalised prompt embeddings.

    Prompt ensembling of CLIP (Radford et al. 2021, arXiv 2103.00020, section 3.1.4).

    Args:
        text_embeds: [C * num_templates, D] float, class-major: the prompts of class 0, then those of class 1, ...
        num_templates: prompts per class.

    Returns:
        [C, D], unit rows; fp32, or fp64 for fp64 input.

    Raises:
        ValueError: wrong shape or dtype, NaN or infinity, rows that are no multiple of `num_templates`.
    """
    text_embeds = _checked("text_embeds", text_embeds)
    if num_templates < 1 or len(text_embeds) % num_templates:
        raise ValueError(
            f"text_embeds holds {len(text_embeds)} rows, which cannot be split into classes of "
            f"num_templates={num_templates} prompts each"
        )
    per_class = F.normalize(text_embeds, dim=-1).unflatten(0, (-1, num_templates))  # [C, T, D]
    return F.normalize(per_class.mean(dim=1), dim=-1)


@torch.no_grad()
def zero_shot_metrics(image_embeds: Tensor, classifier: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy of picking, for each image, the class whose weight vector is most similar to it.

    Args:
        image_embeds: [N, D] float; normalised here.
        classifier: [C, D] float, taken as it is (see `zero_shot_classifier`). Classes of equal name stay apart.
        labels: [N] integer in [0, C).

    Returns:
        Fractions: `acc1`, `acc5` (NaN under five classes), and `mean_per_class_recall`, the balanced accuracy: the mean
        of the recalls of the classes that occur in `labels`.

    Raises:
        ValueError: wrong shape or dtype, NaN or infinity, labels out of range.
    """
    image_embeds = _checked("image_embeds", image_embeds)
    classifier = _checked("classifier", classifier, like=image_embeds)
    num_classes = len(classifier)
    labels = _checked_index("labels", labels, len(image_embeds), num_classes, image_embeds.device)

    classes = torch.arange(num_classes, device=labels.device)
    ranks = _positive_ranks(F.normalize(image_embeds, dim=-1), classifier, labels, classes)

    labels = labels.cpu()
    counts = torch.bincount(labels, minlength=num_classes)
    recalls = torch.bincount(labels[ranks == 0], minlength=num_classes).double() / counts
    return {
        "acc1": _fraction(ranks < 1),
        "acc5": _fraction(ranks < 5) if num_classes >= 5 else math.nan,
        "mean_per_class_recall": recalls[counts > 0].mean().item(),
    }


@torch.no_grad()
def retrieval_metrics(
    image_embeds: Tensor, text_embeds: Tensor, text_image: Tensor, *, ks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Recall@k of finding images by their captions and captions by their image.

    A query scores 1 if any of its positives is among its k most similar candidates, else 0. In image retrieval every
    caption queries the images; in text retrieval every image queries all captions. With k above the number of
    candidates all of them count as found. An image without a caption is a candidate like any other, and a text query
    that can only score 0.

    Args:
        image_embeds: [N, D] float; normalised here.
        text_embeds: [M, D] float, any number of captions per image in any order; normalised here.
        text_image: [M] integer in [0, N): the image that each caption belongs to.
        ks: the values of k, each at least 1.

    Returns:
        Fractions: `image_retrieval_recall@k` and `text_retrieval_recall@k` for each k.

    Raises:
        ValueError: wrong shape or dtype, NaN or infinity, indices out of range, no k or one below 1.
    """
    image_embeds = _checked("image_embeds", image_embeds)
    text_embeds = _checked("text_embeds", text_embeds, like=image_embeds)
    text_image = _checked_index("text_image", text_image, len(text_embeds), len(image_embeds), image_embeds.device)
    if not ks or min(ks) < 1:
        raise ValueError(f"ks must name one k or more, each at least 1; got {tuple(ks)}")

    images, texts = F.normalize(image_embeds, dim=-1), F.normalize(text_embeds, dim=-1)
    image_index = torch.arange(len(images), device=images.device)
    image_ranks = _positive_ranks(texts, images, text_image, image_index)
    text_ranks = _positive_ranks(images, texts, image_index, text_image)

    metrics = {}
    for k in ks:
        metrics[f"image_retrieval_recall@{k}"] = _fraction(image_ranks < min(k, len(images)))
        metrics[f"text_retrieval_recall@{k}"] = _fraction(text_ranks < min(k, len(texts)))
    return metrics


def _positive_ranks(queries: Tensor, candidates: Tensor, query_ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """Rank of each query's best-placed positive, 0 being the top; the number of candidates if it has no positive.

    queries [Q, D], candidates [K, D], query_ids [Q], candidate_ids [K] int64; equal ids make a positive. Returns [Q]
    int32 on the CPU.
    """
    num_candidates = len(candidates)
    order = torch.arange(num_candidates, device=candidates.device)
    rows = max(1, _TILE_NUMEL // num_candidates)
    ranks = []
    for query, ids in zip(queries.split(rows), query_ids.split(rows), strict=True):
        scores = query @ candidates.T  # [rows, K]
        positive = ids[:, None] == candidate_ids
        # max takes the first of equal values. Without a positive `best` is -inf and all candidates are ahead of it.
        best, place = scores.masked_fill(~positive, -math.inf).max(dim=1, keepdim=True)
        ahead = (scores > best) | ((scores == best) & (order < place))
        ranks.append(ahead.sum(dim=1, dtype=torch.int32))  # on a CPU ten times as fast as the default, int64
    return torch.cat(ranks).cpu()


def _fraction(hits: Tensor) -> float:
    return int(hits.sum()) / len(hits)


def _checked(name: str, embeds: Tensor, like: Tensor | None = None) -> Tensor:
    """`embeds` as a finite [rows, D] tensor in fp32 (fp64 stays), or a ValueError; `like` gives dtype, device and D."""
    if embeds.ndim != 2 or 0 in embeds.shape or not embeds.is_floating_point():
        raise ValueError(
            f"{name} must be a floating point tensor [rows, D] with at least one row; "
            f"got shape {tuple(embeds.shape)} of {embeds.dtype}"
        )
    if like is not None and (embeds.shape[1] != like.shape[1] or embeds.device != like.device):
        raise ValueError(
            f"{name} must agree with image_embeds in D and device; got D={embeds.shape[1]} on {embeds.device} "
            f"against D={like.shape[1]} on {like.device}"
        )
    finite = embeds.isfinite().all(dim=1)
    if not finite.all():
        raise ValueError(
            f"{name} holds NaN or infinity in {int((~finite).sum())} of {len(finite)} rows, "
            f"the first being row {int((~finite).nonzero()[0])}"
        )
    if like is not None:
        return embeds.to(like.dtype)
    return embeds if embeds.dtype == torch.float64 else embeds.float()


def _checked_index(name: str, index: Tensor, length: int, upper: int, device: torch.device) -> Tensor:
    """`index` as an int64 tensor [length] of values in [0, upper) on `device`, or a ValueError."""
    if index.shape != (length,) or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(
            f"{name} must be an integer tensor of shape {(length,)}; got shape {tuple(index.shape)} of {index.dtype}"
        )
    if index.min() < 0 or index.max() >= upper:
        raise ValueError(f"{name} must lie in [0, {upper}); got values from {int(index.min())} to {int(index.max())}")
    return index.to(device, torch.int64)
