"""The table of metrics. Evaluations, options, cards and curves read from it what they have to know about each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ranking import fraction

KS = (1, 5, 10)  # of the recalls
CEILING = "_ceiling"  # ends the name of the highest value of a recall that any model can reach
LOSS, FRACTION = "evaluation loss (nats)", "fraction correct"  # axes of curves


class PairRanks(NamedTuple):
    """The ranks in a set of N images with M captions; 0 is the top.

    Attributes:
        images: [M] int32 on the CPU, among all images that of each caption's image.
        texts: [N] int32 on the CPU, among all captions that of each image's best-placed one; M without a caption.
    """

    images: Tensor
    texts: Tensor


class ClassRanks(NamedTuple):
    """The ranks in a set of N images of C classes; 0 is the top.

    Attributes:
        classes: [N] int32 on the CPU, among all classes that of each image's class.
        labels: [N] int64 on the CPU, the class of each image.
        num_classes: C.
    """

    classes: Tensor
    labels: Tensor
    num_classes: int


class LabelScores(NamedTuple):
    """The scores of N images for C classes, of which an image may have several.

    Attributes:
        scores: [N, C] float.
        labels: [N, C] bool, whether the image is of the class.
    """

    scores: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Metric:
    """What is measured on a set of one kind.

    Attributes:
        kind: of the set: ``"pairs"``; ``"classes"`` for zero-shot classification, or ``"labels"`` if an image may be of
            several classes; ``"choices"`` between a right caption and wrong ones.
        measure: computes it from `PairRanks`, `ClassRanks`, `LabelScores` or, for choices, from [N] bool, whether each
            image was matched; None for the loss, which the trainer computes.
        words: its name in a model card.
        hub_type: the kind of metric as the Hub names it.
        axis: the axis of the curves on which it is drawn; None if it is not.
        greater_is_better: whether the best model has the largest value.
        least_classes: the number of classes under which it is undefined.
    """

    kind: str
    measure: Callable[[Any], float] | None
    words: str
    hub_type: str
    axis: str | None = None
    greater_is_better: bool = True
    least_classes: int = 1


def image_recall(k: int, ranks: PairRanks) -> float:
    return fraction(ranks.images < min(k, len(ranks.texts)))


def text_recall(k: int, ranks: PairRanks) -> float:
    return fraction(ranks.texts < min(k, len(ranks.images)))


def accuracy(k: int, ranks: ClassRanks) -> float:
    return fraction(ranks.classes < k)


def mean_per_class_recall(ranks: ClassRanks) -> float:
    counts = torch.bincount(ranks.labels, minlength=ranks.num_classes)
    hits = torch.bincount(ranks.labels[ranks.classes == 0], minlength=ranks.num_classes)
    return (hits.double() / counts)[counts > 0].mean().item()


def mean_average_precision(found: LabelScores) -> float:
    """The mean over the classes of the mean precision at the images of the class, 0 for a class without images.

    Among images with equal scores, the one with the lower index comes first.
    """
    order = found.scores.argsort(dim=0, descending=True, stable=True)
    truth = found.labels.gather(0, order)  # [N, C]
    places = torch.arange(1, len(truth) + 1, dtype=torch.float64, device=truth.device)
    precision = truth.cumsum(0) / places[:, None]
    return ((precision * truth).sum(0) / truth.sum(0).clamp(min=1)).mean().item()


def recalls(ks: Sequence[int]) -> dict[str, Metric]:
    """The recalls of retrieval at each k."""
    return {
        f"{way}_retrieval_recall@{k}": Metric(
            kind="pairs",
            measure=partial(measure, k),
            words=f"{way} retrieval recall@{k}",
            hub_type="recall",
            axis=FRACTION if k == 1 else None,
        )
        for k in ks
        for way, measure in (("image", image_recall), ("text", text_recall))
    }


# The first metric of a kind chooses the best checkpoint if the user names none.
METRICS: dict[str, Metric] = {
    "loss": Metric(
        kind="pairs",
        measure=None,
        words="contrastive loss of the whole set as one batch",
        hub_type="loss",
        axis=LOSS,
        greater_is_better=False,
    ),
    **recalls(KS),
    "acc1": Metric("classes", partial(accuracy, 1), "top-1 accuracy", "accuracy", axis=FRACTION),
    "acc5": Metric("classes", partial(accuracy, 5), "top-5 accuracy", "accuracy", least_classes=5),
    "mean_per_class_recall": Metric("classes", mean_per_class_recall, "mean per class recall", "recall"),
    "mean_average_precision": Metric(
        "labels", mean_average_precision, "mean average precision", "mean_average_precision", axis=FRACTION
    ),
    "text_acc": Metric("choices", fraction, "right captions preferred to wrong ones", "accuracy", axis=FRACTION),
}


def metrics_of_kind(kind: str, num_classes: int | None = None) -> dict[str, Metric]:
    """The metrics of a kind by name, without those that so few classes leave undefined."""
    return {
        name: metric
        for name, metric in METRICS.items()
        if metric.kind == kind and (num_classes is None or num_classes >= metric.least_classes)
    }


def metric_named(name: str) -> Metric | None:
    """The metric of a logged name such as ``eval_pairs_loss``; None if the table has none of this name."""
    found = [known for known in METRICS if name == known or name.endswith(f"_{known}")]
    return METRICS[max(found, key=len)] if found else None
