"""Image-text retrieval from embeddings. The functions take tensors and return a dict of floats.

The results equal those of CLIP_benchmark (https://github.com/LAION-AI/CLIP_benchmark), so they can be compared with
published ones. `hf_infcl.evaluation.ranking` explains how ties are resolved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .metrics import CEILING, KS, Choices, PairRanks, measured, recalls
from .ranking import checked_embeds, checked_index, checked_integers, positive_ranks


@torch.no_grad()
def retrieval_metrics(
    image_embeds: Tensor,
    text_embeds: Tensor,
    text_image: Tensor,
    *,
    ks: Sequence[int] | None = None,
    caption_ids: Tensor | None = None,
) -> dict[str, float]:
    """The metrics, mainly recall@k, of finding images by their captions and captions by their image.

    A query scores 1 if any of its positives is among its k most similar candidates, else 0. In image retrieval, every
    caption queries the images; in text retrieval, every image queries all captions. If k exceeds the number of
    candidates, all of them count as found. An image without a caption is a candidate like any other; as a query, it
    scores 0.

    If a caption belongs to several images, no model can reach a recall of 1, because equal captions have equal
    embeddings and their images cannot all rank first. With `caption_ids`, the result also contains the highest recalls
    that any model can reach.

    Args:
        image_embeds: [N, D] float; normalised here.
        text_embeds: [M, D] float, any number of captions per image in any order; normalised here.
        text_image: [M] integer in [0, N): the image that each caption belongs to.
        ks: the values of k, each at least 1, of the wanted recalls; by default all metrics of pairs, with the recalls
            at 1, 5 and 10.
        caption_ids: [M] integer, equal for equal captions. Equal captions all use the embedding of the first one, so
            they tie exactly. Their own embeddings may differ by rounding.

    Returns:
        Fractions: `image_retrieval_recall@k` and `text_retrieval_recall@k` for each k; and, if `caption_ids` show that
        a caption belongs to several images, `image_retrieval_recall@k_ceiling` and `text_retrieval_recall@k_ceiling`.

    Raises:
        ValueError: wrong shape or dtype, NaN or infinity, indices out of range, no k or one below 1.
    """
    if ks is not None and (not ks or min(ks) < 1):
        raise ValueError(f"ks must name at least one k, and each must be at least 1, got {tuple(ks)}.")
    ranks = pair_ranks(image_embeds, text_embeds, text_image, caption_ids)
    metrics = measured(ranks) if ks is None else {key: m.measure(ranks) for key, m in recalls(ks).items() if m.measure}
    if caption_ids is None:
        return metrics
    return metrics | recall_ceilings(caption_ids, ranks.text_image, len(image_embeds), KS if ks is None else ks)


@torch.no_grad()
def pair_ranks(
    image_embeds: Tensor, text_embeds: Tensor, text_image: Tensor, caption_ids: Tensor | None = None
) -> PairRanks:
    """The ranks of all pairs in both directions; arguments and errors as for `retrieval_metrics`."""
    image_embeds = checked_embeds("image_embeds", image_embeds)
    text_embeds = checked_embeds("text_embeds", text_embeds, like=image_embeds)
    device = image_embeds.device
    text_image = checked_index("text_image", text_image, len(text_embeds), len(image_embeds), device)
    images, texts = F.normalize(image_embeds, dim=-1), F.normalize(text_embeds, dim=-1)
    queries, copies = texts, None
    if caption_ids is not None:
        caption_ids = checked_integers("caption_ids", caption_ids, len(texts), device)
        different, copies = caption_ids.unique(return_inverse=True)
        order = torch.arange(len(texts), device=device)
        first = torch.full_like(different, len(texts)).scatter_reduce_(0, copies, order, "amin")
        texts = texts[first]  # [U, D]
        queries = texts[copies]
    image_index = torch.arange(len(images), device=device)
    by_captions = positive_ranks(queries, images, text_image, image_index)
    by_images = positive_ranks(images, texts, image_index, text_image, copies)
    return PairRanks(by_captions.cpu(), by_images.cpu(), text_image.cpu())


@torch.no_grad()
def choices(image_embeds: Tensor, text_embeds: Tensor, text_image: Tensor, right: int = 1) -> Choices:
    """The choice of each image: is it more similar to each of its right captions than to each of its wrong ones?

    This is the measure of SugarCrepe (Hsieh et al. 2023, arXiv 2306.14610) and, with two right captions, the image-text
    measure of SugarCrepe++ (Dumpala et al. 2024, arXiv 2406.11171). A tie counts as wrong.

    Args:
        image_embeds: [N, D] float; normalised here.
        text_embeds: [M, D] float, the captions of each image, of which the first are right; normalised here.
        text_image: [M] integer in [0, N), in ascending order: the image that each caption belongs to.
        right: the number of right captions of each image.

    Raises:
        ValueError: wrong shape or dtype, NaN or infinity, indices out of range, an image without a wrong caption.
    """
    image_embeds = checked_embeds("image_embeds", image_embeds)
    text_embeds = checked_embeds("text_embeds", text_embeds, like=image_embeds)
    text_image = checked_index("text_image", text_image, len(text_embeds), len(image_embeds), image_embeds.device)
    counts = text_image.bincount(minlength=len(image_embeds))
    if counts.min() <= right or (text_image.diff() < 0).any():
        raise ValueError(
            f"text_image must be in ascending order, with at least {right + 1} captions for each image, but image "
            f"{int(counts.argmin())} has {int(counts.min())}."
        )
    images, texts = F.normalize(image_embeds, dim=-1), F.normalize(text_embeds, dim=-1)
    cosines = (images[text_image] * texts).sum(-1)  # [M]
    first = counts.cumsum(0) - counts
    of_right = torch.arange(len(cosines), device=cosines.device) - first[text_image] < right
    least_right, best_wrong = (
        cosines.new_full((len(images),), worst).scatter_reduce_(0, text_image, cosines.masked_fill(~kept, worst), how)
        for kept, worst, how in ((of_right, torch.inf, "amin"), (~of_right, -torch.inf, "amax"))
    )
    return Choices((least_right > best_wrong).cpu())


def recall_ceilings(caption_ids: Tensor, text_image: Tensor, num_images: int, ks: Sequence[int]) -> dict[str, float]:
    """The highest recalls that a model can reach, given which captions are equal.

    Image retrieval: all queries with the same caption get the same k images, at best the k images to which the caption
    belongs most often. Text retrieval: equal captions tie and are ranked by index, so each caption of an image ranks
    behind the equal captions with lower indices. The best caption of an image is the one with the fewest of these.

    Args:
        caption_ids: [M] int64, equal for equal captions.
        text_image: [M] int64 in [0, num_images).

    Returns:
        `image_retrieval_recall@k_ceiling` and `text_retrieval_recall@k_ceiling` for each k, in [0, 1]; nothing if no
        caption belongs to several images.
    """
    caption_ids, text_image = caption_ids.cpu(), text_image.cpu()
    pairs, counts = torch.stack([caption_ids, text_image], dim=1).unique(dim=0, return_counts=True)  # [P, 2], [P]
    if len(pairs) == len(caption_ids.unique()):
        return {}
    by_count = counts.argsort(descending=True)
    image_places, image_counts = _places_within_groups(pairs[by_count, 0]), counts[by_count]
    text_places = torch.full((num_images,), len(caption_ids))
    text_places.scatter_reduce_(0, text_image, _places_within_groups(caption_ids), "amin")
    ceilings = {}
    for k in ks:
        hits = int(image_counts[image_places < k].sum())
        ceilings[f"image_retrieval_recall@{k}{CEILING}"] = hits / len(caption_ids)
        within = text_places < min(k, len(caption_ids))
        ceilings[f"text_retrieval_recall@{k}{CEILING}"] = int(within.sum()) / num_images
    return ceilings


def _places_within_groups(groups: Tensor) -> Tensor:
    """For each element of [n] int64, the number of elements before it that have the same value."""
    order = groups.argsort(stable=True)
    _, sizes = groups.unique(return_counts=True)  # in sorted order
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    places = torch.empty_like(groups)
    places[order] = torch.arange(len(groups)) - starts
    return places
