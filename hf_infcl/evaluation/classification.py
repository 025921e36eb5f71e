"""Zero-shot classification from embeddings. The functions take tensors and return tensors or a dict of floats.

The results equal those of CLIP_benchmark (https://github.com/LAION-AI/CLIP_benchmark), so they can be compared with
published ones. `hf_infcl.evaluation.ranking` explains how ties are resolved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .metrics import ClassRanks, LabelScores, measured
from .ranking import NOT_FINITE, checked_embeds, checked_finite, checked_index, positive_ranks


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
        labels = checked_index("labels", labels, len(image_embeds), len(classifier), labels.device)
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
    """The ranks or scores of a whole set from the `class_places` of its batches.

    Args:
        labels: [N] integer in [0, num_classes), or [N, C] of 0 and 1, on the device of the places.

    Raises:
        ValueError: an embedding was not finite, or a label is none of these.
    """
    if places.ndim == 1:
        checked_finite("image_embeds", places != NOT_FINITE)
        labels = checked_index("labels", labels, len(places), num_classes, labels.device)
        return ClassRanks(places.cpu(), labels.cpu(), num_classes)
    checked_finite("image_embeds", places.isfinite().all(dim=1))
    if labels.shape != places.shape or not ((labels == 0) | (labels == 1)).all():
        raise ValueError(
            f"labels [N, C] must hold 0 or 1 for each of {len(places)} images and {places.shape[1]} classes, got "
            f"shape {tuple(labels.shape)} with values from {labels.min()} to {labels.max()}."
        )
    return LabelScores(places, labels.bool())
