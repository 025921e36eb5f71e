"""Terms of the loss beside the contrastive one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..passes.grad_cache import Features
from .extensions import LossTerm
from .start import Start


class KeptFeatures(LossTerm):
    """Holds the embeddings near those of the model before the training (``keep_features``).

    Args:
        start: the frozen copy of the model.
        weight: β, the weight of the squared distance.
    """

    name = "keep_features"

    def __init__(self, start: Start, weight: float) -> None:
        self._start, self._weight = start, weight

    def reference(self, inputs: Mapping[str, Any], frozen_outputs: Mapping[str, Any]) -> Features:
        if "start_images" in inputs:  # of ``cache_features``
            return inputs["start_images"], inputs["start_texts"]
        return self._start.embed(inputs, frozen_outputs)

    def value(self, features: Features, references: Features) -> Tensor:
        return self._weight * squared_distance(features, references)


def squared_distance(features: Features, references: Features) -> Tensor:
    """Σ‖f − f₀‖² over the normalised embeddings of both towers, divided by the number of images; a scalar in fp32.

    With equal numbers of images on all processes, the mean over processes is that of the global batch.

    Args:
        features, references: image and text embeddings of this process, [images, D] and [texts, D].
    """
    distances = [(f.float() - f0.float()).square().sum() for f, f0 in zip(features, references, strict=True)]
    return torch.stack(distances).sum() / len(features[0])
