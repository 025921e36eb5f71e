"""Zero-shot classification, image-text retrieval and the choice of captions from embeddings."""

from .captions import caption_ids, group_by_image, image_of_captions
from .classification import zero_shot_classifier, zero_shot_metrics
from .metrics import METRICS
from .retrieval import choice_metrics, retrieval_metrics

__all__ = [
    "METRICS",
    "caption_ids",
    "choice_metrics",
    "group_by_image",
    "image_of_captions",
    "retrieval_metrics",
    "zero_shot_classifier",
    "zero_shot_metrics",
]
