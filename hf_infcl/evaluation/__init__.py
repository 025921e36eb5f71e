"""Zero-shot classification and image-text retrieval from embeddings."""

from .retrieval import retrieval_metrics, zero_shot_classifier, zero_shot_metrics

__all__ = ["retrieval_metrics", "zero_shot_classifier", "zero_shot_metrics"]
