"""Zero-shot classification, retrieval and the choice of captions from embeddings, and the layout of their batches.

All metrics but that of choices are computed from ranks: that of a query's best-placed positive among all candidates.
Scores are computed tile by tile, so the full score matrix never exists: apart from float copies of the embeddings,
memory is a few tensors of `max(TILE_NUMEL, number of candidates)` elements. The captions of a set form one tensor
[M, ...] in the order of their images, together with the number of captions of each image [N].

The results equal those of CLIP_benchmark (https://github.com/LAION-AI/CLIP_benchmark), so they can be compared with
published ones. Ties: among candidates with equal scores, the one with the lower index comes first. CLIP_benchmark uses
`torch.topk`, which leaves the order of ties open; ours is one of the orders that `torch.topk` may return, and it
depends neither on the device nor on the tiles. A collapsed model, for which all candidates tie, gets the score of
chance.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .metrics import CEILING, KS, ClassRanks, Hits, LabelScores, PairRanks, measured, of_one_query, recalls

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


def checked_integers(name: str, values: Tensor, length: int, device: torch.device, below: int | None = None) -> Tensor:
    """`values` as an int64 tensor [length] on `device`, or a ValueError; with `below`, of values in [0, below)."""
    if values.shape != (length,) or values.is_floating_point() or values.dtype == torch.bool:
        raise ValueError(
            f"{name} must be an integer tensor of shape {(length,)}, got shape {tuple(values.shape)} of {values.dtype}."
        )
    if below is not None and (values.min() < 0 or values.max() >= below):
        raise ValueError(f"{name} must lie in [0, {below}), got values from {values.min()} to {values.max()}.")
    return values.to(device, torch.int64)


_ON_HOST = "texts_on_host"


def group_by_image(caption_image: Tensor | None, num_captions: int, num_images: int) -> tuple[Tensor, Tensor]:
    """Sorts the captions of a batch by their images, and leaves negative captions out.

    Args:
        caption_image: [num_captions] integer in [0, num_images), the image that each caption belongs to, in any order,
            or -1 for a negative caption, which has none; None if every image has one caption, in their order.

    Returns:
        The indices [m] int64 of the captions that belong to an image, sorted by image and stable within one; and the
        number of captions of each image [num_images] int64, at least 1.

    Raises:
        ValueError: wrong shape, dtype or values; an image without a caption.
    """
    if caption_image is None:
        if num_captions != num_images:
            raise ValueError(
                f"A batch has {num_captions} captions for {num_images} images. The data collator must return "
                "caption_image [captions], the image that each caption belongs to."
            )
        caption_image = torch.arange(num_captions)
    negative = caption_image == -1
    checked_integers("caption_image", caption_image.masked_fill(negative, 0), num_captions, negative.device, num_images)
    counts = torch.bincount(caption_image[~negative], minlength=num_images)
    if (counts == 0).any():
        raise ValueError(
            f"Image {int((counts == 0).nonzero()[0])} of a batch has no caption. Every image needs one: drop the "
            "others from the dataset."
        )
    return caption_image.argsort(stable=True)[int(negative.sum()) :], counts


def image_of_captions(counts: Tensor) -> Tensor:
    """The image [M] that each caption belongs to, from the number of captions of each image [N]."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def caption_ids(input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """A 64-bit hash of the tokens [n, L] of each caption, [n] int64, on their device and the same in every process.

    ``attention_mask`` [n, L] is 0 where the tokens are padding, which does not count; None if all tokens count.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = zip(input_ids.cpu().numpy(), mask.cpu().numpy().astype(bool), strict=True)
    digests = [hashlib.blake2b(row[kept].tobytes(), digest_size=8).digest() for row, kept in rows]
    ids = [int.from_bytes(digest, "big", signed=True) for digest in digests]
    return torch.tensor(ids, dtype=torch.int64, device=input_ids.device)


def with_texts_on_host(collate: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    """The batch of a data collator; one of pairs also has its tokens and ids in an object that stays in host memory.

    `taken_apart` reads them there without waiting for the forwards that the device has queued before.
    """
    batch = collate(items)
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return batch
    small = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim < 3}
    return {**batch, _ON_HOST: SimpleNamespace(tensors=small)}  # what is in an object is not moved to the device


def taken_apart(batch: Any) -> tuple[Any, Any]:
    """The batch of `with_texts_on_host` as its collator has returned it, and its small tensors in host memory.

    Both are the batch itself if another collator has made it.
    """
    if not isinstance(batch, Mapping) or _ON_HOST not in batch:
        return batch, batch
    return {name: value for name, value in batch.items() if name != _ON_HOST}, batch[_ON_HOST].tensors


def distinct(prompts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Each prompt once, and the place of each of ``prompts`` among them.

    Classes with equal prompts tie exactly if these are encoded once: the embeddings of two batches differ by rounding.
    """
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    return list(places), [places[prompt] for prompt in prompts]


@torch.no_grad()
def zero_shot_classifier(text_embeds: Tensor, num_templates: int) -> Tensor:
    """One weight vector per class: the normalised mean of the class's normalised prompt embeddings.

    This is the prompt ensembling of CLIP (Radford et al. 2021, arXiv 2103.00020, section 3.1.4).

    Args:
        text_embeds: [C * num_templates, D] float, class-major: the prompts of class 0, then those of class 1, ...

    Returns:
        [C, D], unit rows; fp32, or fp64 for fp64 input.

    Raises:
        ValueError: wrong shape or dtype, NaN or infinity, a number of rows that is not a multiple of `num_templates`.
    """
    text_embeds = checked_embeds("text_embeds", text_embeds)
    if num_templates < 1 or len(text_embeds) % num_templates:
        raise ValueError(
            f"The {len(text_embeds)} rows of text_embeds cannot be divided into classes of num_templates="
            f"{num_templates} prompts each."
        )
    per_class = F.normalize(text_embeds, dim=-1).unflatten(0, (-1, num_templates))  # [C, T, D]
    return F.normalize(per_class.mean(dim=1), dim=-1)


@torch.no_grad()
def zero_shot_metrics(image_embeds: Tensor, classifier: Tensor, labels: Tensor) -> dict[str, float]:
    """The metrics of choosing, for each image, the class whose weight vector is most similar to it.

    Args:
        image_embeds: [N, D] float; normalised here.
        classifier: [C, D] float, used unchanged (see `zero_shot_classifier`). Classes with equal names stay separate.
        labels: [N] integer in [0, C); or [N, C] of 0 and 1, if an image may be of several classes.

    Returns:
        Fractions: `acc1`; `acc5`, only for five or more classes, because it is undefined for fewer; and
        `mean_per_class_recall`, the balanced accuracy: the mean of the recalls of the classes that occur in `labels`.
        If an image may be of several classes, only `mean_average_precision`.

    Raises:
        ValueError: wrong shape or dtype, NaN or infinity, labels out of range.
    """
    image_embeds = checked_embeds("image_embeds", image_embeds)
    classifier = checked_embeds("classifier", classifier, like=image_embeds)
    labels = labels.to(image_embeds.device)
    if labels.ndim != 2:
        labels = checked_integers("labels", labels, len(image_embeds), labels.device, len(classifier))
    return measured(checked_classes(class_places(image_embeds, classifier, labels), labels, len(classifier)))


@torch.no_grad()
def class_places(image_embeds: Tensor, classifier: Tensor, labels: Tensor) -> Tensor:
    """What `checked_classes` needs of a batch, still on the device, which a check would wait for.

    Returns:
        [n] int32, the rank of each image's class; or of labels [n, C], the scores of all classes [n, C].
    """
    images = F.normalize(image_embeds, dim=-1)
    if labels.ndim == 2:
        return images @ classifier.T
    return positive_ranks(images, classifier, labels, torch.arange(len(classifier), device=classifier.device))


def checked_classes(places: Tensor, labels: Tensor, num_classes: int) -> ClassRanks | LabelScores:
    """The ranks or scores of a whole set from the `class_places` of its batches, and labels on the same device.

    A ValueError says that an embedding was not finite, or labels are neither [N] in [0, num_classes) nor [N, C] of 0
    and 1.
    """
    if places.ndim == 1:
        checked_finite("image_embeds", places != NOT_FINITE)
        labels = checked_integers("labels", labels, len(places), labels.device, num_classes)
        return ClassRanks(places.cpu(), labels.cpu(), num_classes)
    checked_finite("image_embeds", places.isfinite().all(dim=1))
    if labels.shape != places.shape or not ((labels == 0) | (labels == 1)).all():
        raise ValueError(
            f"labels [N, C] must hold 0 or 1 for each of {len(places)} images and {places.shape[1]} classes, got "
            f"shape {tuple(labels.shape)} with values from {labels.min()} to {labels.max()}."
        )
    return LabelScores(places, labels.bool())


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
    metrics = measured(ranks, None if ks is None else recalls(ks))
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
    text_image = checked_integers("text_image", text_image, len(text_embeds), device, len(image_embeds))
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
def choices(image_embeds: Tensor, text_embeds: Tensor, text_image: Tensor, right: int = 1) -> Hits:
    """The choice of each image, right if it is more similar to each of its right captions than to all wrong ones.

    This is the measure of SugarCrepe (Hsieh et al. 2023, arXiv 2306.14610) and, with two right captions, the image-text
    measure of SugarCrepe++ (Dumpala et al. 2024, arXiv 2406.11171). A tie counts as wrong.

    Args:
        image_embeds, text_embeds, text_image: as for `retrieval_metrics`, with the captions in the order of the images.
        right: the number of right captions of each image, which are its first.

    Raises:
        ValueError: also for an image without a wrong caption.
    """
    image_embeds = checked_embeds("image_embeds", image_embeds)
    text_embeds = checked_embeds("text_embeds", text_embeds, like=image_embeds)
    text_image = checked_integers("text_image", text_image, len(text_embeds), image_embeds.device, len(image_embeds))
    counts = text_image.bincount(minlength=len(image_embeds))
    if counts.min() <= right or (text_image.diff() < 0).any():
        raise ValueError(
            f"text_image must be in ascending order, with at least {right + 1} captions for each image, but image "
            f"{int(counts.argmin())} has {int(counts.min())}."
        )
    images, texts = F.normalize(image_embeds, dim=-1), F.normalize(text_embeds, dim=-1)
    cosines = (images[text_image] * texts).sum(-1)  # [M]
    of_images = cosines.cpu().split(counts.tolist())
    return of_one_query(torch.stack([own[:right].min() > own[right:].max() for own in of_images]))


def recall_ceilings(caption_ids: Tensor, text_image: Tensor, num_images: int, ks: Sequence[int]) -> dict[str, float]:
    """The highest recalls that a model can reach, given which captions are equal.

    Image retrieval: all queries with the same caption get the same k images, at best the k images to which the caption
    belongs most often. Text retrieval: equal captions tie and are ranked by index, so each caption of an image ranks
    behind the equal captions with lower indices. The best caption of an image is the one with the fewest of these.

    Args:
        caption_ids: [M] int64, equal for equal captions.
        text_image: [M] int64 in [0, num_images).

    Returns:
        Both recalls at each k in [0, 1], whose names end with `CEILING`; nothing if no caption belongs to several
        images.
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
        of_images, of_texts = image_counts[image_places < k].sum(), (text_places < min(k, len(caption_ids))).sum()
        ceilings[f"image_retrieval_recall@{k}{CEILING}"] = int(of_images) / len(caption_ids)
        ceilings[f"text_retrieval_recall@{k}{CEILING}"] = int(of_texts) / num_images
    return ceilings


def _places_within_groups(groups: Tensor) -> Tensor:
    """For each element of [n] int64, the number of elements before it that have the same value."""
    order = groups.argsort(stable=True)
    _, sizes = groups.unique(return_counts=True)  # in sorted order
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return torch.empty_like(groups).scatter_(0, order, torch.arange(len(groups)) - starts)
