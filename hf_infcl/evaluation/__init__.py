"""Zero-shot classification, image-text retrieval and the choice of captions from embeddings."""

from .tasks import retrieval_metrics, zero_shot_classifier, zero_shot_metrics

__all__ = ["retrieval_metrics", "zero_shot_classifier", "zero_shot_metrics"]
