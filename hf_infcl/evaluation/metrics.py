"""The table of metrics. Evaluations, options, cards and curves read from it what they have to know about each."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

KS = (1, 5, 10)  # of the recalls
CEILING = "_ceiling"  # ends the name of the highest value of a recall that any model can reach
LOW, HIGH = "_low", "_high"  # end the names of the bounds of a metric's 95% interval
CHANGE = "score_change"  # begins the names of the bounds of what the score has changed since before a training
LOSS, FRACTION = "evaluation loss (nats)", "fraction correct"  # axes of curves


class PairRanks(NamedTuple):
    """The ranks in a set of N images with M captions, on the CPU; 0 is the top."""

    images: Tensor  # [M] int32, the rank of each caption's image among all images
    texts: Tensor  # [N] int32, the rank of each image's best-placed caption among all captions; M if it has none
    text_image: Tensor  # [M] int64, the image of each caption


class ClassRanks(NamedTuple):
    """The ranks in a set of N images of C classes, on the CPU; 0 is the top."""

    classes: Tensor  # [N] int32, the rank of each image's class among all classes
    labels: Tensor  # [N] int64, the class of each image
    num_classes: int  # C


class Hits(NamedTuple):
    """The right answers of each of N images, of which a metric is the share; tensors on the CPU."""

    right: Tensor  # [N] integer, the queries of each image that are answered right
    queries: Tensor  # [N] integer, all queries of each image: 1, or the number of its captions
    groups: Tensor | None = None  # [N] int64, for the mean of the shares of several groups of images, such as classes

    def share(self) -> float:
        """The value of the metric."""
        size = len(self.right)
        return float(self.shares(np.arange(size), np.ones((1, size)))[0])

    def shares(self, images: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The value of the metric [resamples], with weights [resamples, n] of the images of these n numbers."""
        groups = np.zeros(len(images)) if self.groups is None else self.groups.numpy()[images]
        order = np.argsort(groups, kind="stable")
        starts = np.unique(groups[order], return_index=True)[1]
        each = ((weights * part.numpy()[images])[:, order] for part in (self.right, self.queries))
        right, queries = (np.add.reduceat(part, starts, axis=1) for part in each)
        shares = right / np.maximum(1, queries)
        return shares.sum(axis=1) / np.maximum(1, (queries > 0).sum(axis=1))  # of the groups that were drawn


class LabelScores(NamedTuple):
    """The scores of N images for C classes, of which an image may have several."""

    scores: Tensor  # [N, C] float
    labels: Tensor  # [N, C] bool, whether the image is of the class


Found = PairRanks | ClassRanks | LabelScores | Hits  # what is measured on a set of each kind; of choices, `Hits`


@dataclass(frozen=True)
class Metric:
    """What is measured on a set of one kind.

    The kind of a set is ``"pairs"``; ``"classes"`` for zero-shot classification, or ``"labels"`` if an image may be of
    several classes; ``"choices"`` between a right caption and wrong ones.
    """

    kind: str
    # From the ranks or scores on a set, its value, or the `Hits` whose share it is and from which it has an interval;
    # None for the trainer's loss.
    measure: Callable[[Any], float | Hits] | None
    words: str  # its name in a model card
    hub_type: str  # the kind of metric as the Hub names it
    axis: str | None = None  # the axis of the curves on which it is drawn; None if it is not
    greater_is_better: bool = True  # whether the best model has the largest value
    least_classes: int = 1  # the number of classes under which it is undefined


def image_hits(k: int, ranks: PairRanks) -> Hits:
    num_images = len(ranks.texts)
    images_hit = ranks.text_image[ranks.images < min(k, num_images)]
    counts = (torch.bincount(images, minlength=num_images) for images in (images_hit, ranks.text_image))
    return Hits(*counts)


def text_hits(k: int, ranks: PairRanks) -> Hits:
    return of_one_query(ranks.texts < min(k, len(ranks.images)))


def class_hits(k: int, ranks: ClassRanks) -> Hits:
    return of_one_query(ranks.classes < k)


def per_class_hits(ranks: ClassRanks) -> Hits:
    return class_hits(1, ranks)._replace(groups=ranks.labels)


def choice_hits(chosen: Hits) -> Hits:
    return chosen


def of_one_query(right: Tensor) -> Hits:
    """The hits of N images, each of which is one query; ``right`` [N] bool says whether it was answered right."""
    return Hits(right, torch.ones(len(right), dtype=torch.int64))


def mean_average_precision(label_scores: LabelScores) -> float:
    """The mean over the classes of the mean precision at the images of the class, 0 for a class without images.

    Among images with equal scores, the one with the lower index comes first.
    """
    order = label_scores.scores.argsort(dim=0, descending=True, stable=True)
    truth = label_scores.labels.gather(0, order)  # [N, C]
    places = torch.arange(1, len(truth) + 1, dtype=torch.float64, device=truth.device)
    precision = truth.cumsum(0) / places[:, None]
    return ((precision * truth).sum(0) / truth.sum(0).clamp(min=1)).mean().item()


def recalls(ks: Sequence[int]) -> dict[str, Metric]:
    """The recalls of retrieval at each k."""
    return {
        f"{way}_retrieval_recall@{k}": Metric(
            "pairs", partial(hits, k), f"{way} retrieval recall@{k}", "recall", axis=FRACTION if k == 1 else None
        )
        for k in ks
        for way, hits in (("image", image_hits), ("text", text_hits))
    }


# The first metric of a kind chooses the best checkpoint if the user names none.
METRICS: dict[str, Metric] = {
    "loss": Metric(
        "pairs", None, "contrastive loss of the whole set as one batch", "loss", LOSS, greater_is_better=False
    ),
    **recalls(KS),
    "acc1": Metric("classes", partial(class_hits, 1), "top-1 accuracy", "accuracy", axis=FRACTION),
    "acc5": Metric("classes", partial(class_hits, 5), "top-5 accuracy", "accuracy", least_classes=5),
    "mean_per_class_recall": Metric("classes", per_class_hits, "mean per class recall", "recall"),
    "mean_average_precision": Metric(
        "labels", mean_average_precision, "mean average precision", "mean_average_precision", axis=FRACTION
    ),
    "text_acc": Metric("choices", choice_hits, "right captions preferred to wrong ones", "accuracy", axis=FRACTION),
}

# The metrics whose mean is the score of a set, by its kind.
SCORES = {
    "pairs": ("image_retrieval_recall@1", "text_retrieval_recall@1"),
    "classes": ("acc1",),
    "labels": ("mean_average_precision",),
    "choices": ("text_acc",),
}


def score(metrics: Mapping[str, float], prefix: str = "") -> float:
    """The score of one set by the table `SCORES`, such as the top-1 accuracy of classes.

    The names of its ``metrics`` begin with the prefix, such as "eval_pairs_".

    Raises:
        ValueError: neither was measured on the set.
    """
    if (value := score_if_measured(metrics, prefix)) is None:
        raise ValueError(f"Neither recall@1 nor acc1 was measured with the prefix {prefix!r}, but {sorted(metrics)}.")
    return value


def score_if_measured(metrics: Mapping[str, float], prefix: str = "", end: str = "") -> float | None:
    """The `score`, or with ``end`` the mean of these bounds of its parts; None if they were not measured."""
    values = [metrics[prefix + name + end] for name in parts_of_score(metrics, prefix, end)]
    return sum(values) / len(values) if values else None


def parts_of_score(names: Container[str], prefix: str = "", end: str = "") -> tuple[str, ...]:
    """The metrics whose mean is the score of a set for which these names were measured; none without a score."""
    return next((parts for parts in SCORES.values() if all(prefix + one + end in names for one in parts)), ())


def metrics_of_kind(kind: str, num_classes: int | None = None) -> dict[str, Metric]:
    """The metrics of a kind by name, without those that so few classes leave undefined."""
    return {
        name: metric
        for name, metric in METRICS.items()
        if metric.kind == kind and (num_classes is None or num_classes >= metric.least_classes)
    }


def measured(ranks: Found, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
    """The values of these metrics of a set by name, by default of all that are defined for it, without the loss."""
    values = _values(ranks, metrics).items()
    return {name: value.share() if isinstance(value, Hits) else value for name, value in values}


def count_hits(ranks: Found) -> dict[str, Hits]:
    """The hits of each image, for all metrics that are shares of hits; nothing for `LabelScores`."""
    return {name: hits for name, hits in _values(ranks).items() if isinstance(hits, Hits)}


def _values(ranks: Found, metrics: Mapping[str, Metric] | None = None) -> dict[str, float | Hits]:
    if metrics is None:
        kinds = {PairRanks: "pairs", ClassRanks: "classes", LabelScores: "labels", Hits: "choices"}
        metrics = metrics_of_kind(kinds[type(ranks)], getattr(ranks, "num_classes", None))
    return {name: metric.measure(ranks) for name, metric in metrics.items() if metric.measure is not None}


def metric_named(logged: str) -> str | None:
    """The metric of a logged name such as ``eval_pairs_loss``; None if the table has none of this name."""
    return max((name for name in METRICS if f"_{logged}".endswith(f"_{name}")), key=len, default=None)
