"""A dual encoder of any two modules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from .tower_outputs import pooled


class _Tower(nn.Module):
    """A module whose output is that of a tower of transformers: one vector for each input."""

    def __init__(self, module: nn.Module, what: str) -> None:
        super().__init__()
        self.module, self._what = module, what

    def forward(
        self, pixel_values: Tensor | None = None, return_dict: bool = True, **texts: Tensor
    ) -> BaseModelOutputWithPooling:
        output = self.module(**texts) if pixel_values is None else self.module(pixel_values)
        features = pooled(output, self.module, self._what)
        return BaseModelOutputWithPooling(features[:, None], features)


@dataclass
class Embeddings(ModelOutput):
    """The output of `TwoTowers`. It is a dataclass because `torch.compile` loses the fields of a plain ModelOutput."""

    image_embeds: Tensor | None = None  # [images, D], of length 1
    text_embeds: Tensor | None = None  # [texts, D], of length 1


class TwoTowers(nn.Module):
    """A dual encoder of any two modules, which `InfCLTrainer` trains like those of transformers.

    Saved models hold its state dict, as model.safetensors; build the same modules to load it.

    Args:
        image_tower: called with images [images, 3, H, W] alone. It returns features [images, H1], or an object, such as
            an output of transformers, or a dict with them as ``pooler_output``.
        text_tower: called with ``input_ids`` and ``attention_mask`` [texts, L], and whatever else the tokenizer
            returns. It returns features [texts, H2], or such an output.
        image_projection, text_projection: from these features to the embeddings, which need the same dimension; by
            default the features are the embeddings.
        scale: the initial multiplier of the cosines. ``logit_scale`` is its logarithm.
        bias: the initial ``logit_bias``, with which the objective is sigmoid; None for softmax.

    Raises:
        ValueError: when it is called, a tower returns something else.
    """

    def __init__(
        self,
        image_tower: nn.Module,
        text_tower: nn.Module,
        image_projection: nn.Module | None = None,
        text_projection: nn.Module | None = None,
        *,
        scale: float = 1 / 0.07,
        bias: float | None = None,
    ) -> None:
        super().__init__()
        self.vision_model, self.text_model = _Tower(image_tower, "image tower"), _Tower(text_tower, "text tower")
        self.visual_projection = nn.Identity() if image_projection is None else image_projection
        self.text_projection = nn.Identity() if text_projection is None else text_projection
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(float(bias)))

    def get_image_features(self, **inputs: Tensor) -> Tensor:
        """Embeddings [images, D], not normalised."""
        features: Tensor = self.visual_projection(self.vision_model(**inputs).pooler_output)
        return features

    def get_text_features(self, **inputs: Tensor) -> Tensor:
        """Embeddings [texts, D], not normalised."""
        features: Tensor = self.text_projection(self.text_model(**inputs).pooler_output)
        return features

    def forward(self, pixel_values: Tensor, return_dict: bool = True, **texts: Any) -> Embeddings:
        """The embeddings of images and texts."""
        images, captions = self.get_image_features(pixel_values=pixel_values), self.get_text_features(**texts)
        return Embeddings(F.normalize(images, dim=-1), F.normalize(captions, dim=-1))
