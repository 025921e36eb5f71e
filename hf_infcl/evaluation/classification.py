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
from .ranking import Places, checked_embeds, checked_finite, checked_index, positive_places


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
    ranking = label_scores if labels.ndim == 2 else class_ranks
    return measured(ranking(image_embeds, classifier, labels))


@torch.no_grad()
def label_scores(image_embeds: Tensor, classifier: Tensor, labels: Tensor) -> LabelScores:
    """The score of each image for each class; arguments, labels being [N, C], and errors as for `zero_shot_metrics`."""
    image_embeds = checked_embeds("image_embeds", image_embeds)
    classifier = checked_embeds("classifier", classifier, like=image_embeds)
    return checked_scores(class_scores(image_embeds, classifier), labels)


@torch.no_grad()
def class_scores(image_embeds: Tensor, classifier: Tensor) -> Tensor:
    """The scores [N, C] of `label_scores` for one batch of many, unchecked: a check would wait for the batch."""
    return F.normalize(image_embeds, dim=-1) @ classifier.T


def checked_scores(scores: Tensor, labels: Tensor) -> LabelScores:
    """The scores [N, C] of a whole set from the `class_scores` of its batches, with the checks left out there.

    Raises:
        ValueError: an embedding was not finite, or labels [N, C] are not 0 or 1.
    """
    checked_finite("image_embeds", scores.isfinite().all(dim=1))
    if labels.shape != scores.shape or not ((labels == 0) | (labels == 1)).all():
        raise ValueError(
            f"labels [N, C] must hold 0 or 1 for each of {len(scores)} images and {scores.shape[1]} classes, got "
            f"shape {tuple(labels.shape)} with values from {labels.min()} to {labels.max()}."
        )
    return LabelScores(scores, labels.to(scores.device).bool())


@torch.no_grad()
def class_ranks(image_embeds: Tensor, classifier: Tensor, labels: Tensor) -> ClassRanks:
    """The rank of each image's class; arguments and errors as for `zero_shot_metrics`."""
    image_embeds = checked_embeds("image_embeds", image_embeds)
    classifier = checked_embeds("classifier", classifier, like=image_embeds)
    num_classes = len(classifier)
    labels = checked_index("labels", labels, len(image_embeds), num_classes, image_embeds.device)

    ranks, answers, gaps = (part.cpu() for part in class_places(image_embeds, classifier, labels))
    return ClassRanks(ranks, labels.cpu(), num_classes, answers, gaps)


@torch.no_grad()
def class_places(image_embeds: Tensor, classifier: Tensor, labels: Tensor) -> Places:
    """`class_ranks` of one batch of many, unchecked and still on the device: a check would wait for the batch."""
    classes = torch.arange(len(classifier), device=classifier.device)
    return positive_places(F.normalize(image_embeds, dim=-1), classifier, labels, classes)


def checked_ranks(places: Tensor, labels: Tensor, num_classes: int) -> ClassRanks:
    """The ranks of a whole set from the `class_places` of its batches, with the checks that were left out there.

    Args:
        places: [N, 3] fp32 on the CPU: rank, answer and gap of each image.
        labels: [N] integer in [0, num_classes), on the CPU.

    Raises:
        ValueError: an embedding was not finite, or a label is out of range.
    """
    ranks, answers, gaps = places.T
    checked_finite("image_embeds", ~gaps.isnan())
    labels = checked_index("labels", labels, len(places), num_classes, labels.device)
    return ClassRanks(ranks.int(), labels, num_classes, answers.long(), gaps)
