"""Zero-shot classification, image-text retrieval and the choice of captions from embeddings."""

from .bootstrap import Difference, bounds, differences, differences_by_class, hits_of, interval, resampled
from .captions import WithTextsOnHost, caption_ids, group_by_image, image_of_captions, taken_apart
from .classification import (
    checked_ranks,
    checked_scores,
    class_places,
    class_ranks,
    class_scores,
    label_scores,
    zero_shot_classifier,
    zero_shot_metrics,
)
from .metrics import METRICS, Choices, ClassRanks, Found, LabelScores, PairRanks, measured
from .retrieval import choice_metrics, choices, pair_ranks, recall_ceilings, retrieval_metrics

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
    "checked_ranks",
    "checked_scores",
    "choice_metrics",
    "choices",
    "class_places",
    "class_ranks",
    "class_scores",
    "differences",
    "differences_by_class",
    "group_by_image",
    "hits_of",
    "image_of_captions",
    "interval",
    "label_scores",
    "measured",
    "pair_ranks",
    "recall_ceilings",
    "resampled",
    "retrieval_metrics",
    "taken_apart",
    "zero_shot_classifier",
    "zero_shot_metrics",
]
