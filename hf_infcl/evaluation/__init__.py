"""Zero-shot classification, image-text retrieval and the choice of captions from embeddings."""

from .bootstrap import Difference, bounds, count_hits, differences, interval, resampled
from .captions import WithTextsOnHost, caption_ids, group_by_image, image_of_captions, taken_apart
from .classification import checked_classes, class_places, distinct, zero_shot_classifier, zero_shot_metrics
from .metrics import METRICS, Choices, ClassRanks, Found, LabelScores, PairRanks, measured
from .retrieval import choices, pair_ranks, recall_ceilings, retrieval_metrics

__all__ = [
    "METRICS",
    "Choices",
    "ClassRanks",
    "Difference",
    "Found",
    "LabelScores",
    "PairRanks",
    "WithTextsOnHost",
    "bounds",
    "caption_ids",
    "checked_classes",
    "choices",
    "class_places",
    "count_hits",
    "differences",
    "distinct",
    "group_by_image",
    "image_of_captions",
    "interval",
    "measured",
    "pair_ranks",
    "recall_ceilings",
    "resampled",
    "retrieval_metrics",
    "taken_apart",
    "zero_shot_classifier",
    "zero_shot_metrics",
]
