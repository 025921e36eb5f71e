"""Everything that depends on a model class: embeddings, the temperature, the objective, what is frozen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Model types of transformers whose logits are a scaled product of one image vector and one text vector.
SOFTMAX_MODELS = (
    "aimv2",
    "align",
    "altclip",
    "blip",
    "chinese_clip",
    "clip",
    "clipseg",
    "groupvit",
    "metaclip_2",
    "owlvit",
    "vision-text-dual-encoder",
)
SIGMOID_MODELS = ("siglip", "siglip2")

IMAGE_INPUTS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


class DualEncoder:
    """A view of a transformers model as two towers, a logit_scale and perhaps a logit_bias.

    Args:
        model: a dual encoder of transformers, unwrapped (no DDP around it; PEFT adapters inside are fine).

    Raises:
        ValueError: the model is not a dual encoder that this package knows, or its class heads one tower only.

    Attributes:
        objective: the objective that the model was made for, ``"softmax"`` or ``"sigmoid"``.
    """

    def __init__(self, model: nn.Module) -> None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind not in SOFTMAX_MODELS + SIGMOID_MODELS or not hasattr(model, "get_image_features"):
            raise ValueError(
                f"{type(model).__name__} (model_type {kind!r}) is not a dual encoder that contrastive training can "
                "split into image and text embeddings. Use the full model (such as CLIPModel) of one of the types "
                f"{', '.join(SOFTMAX_MODELS + SIGMOID_MODELS)}."
            )
        self.model: Any = model
        self.objective = "sigmoid" if kind in SIGMOID_MODELS else "softmax"
        # ALIGN divides by a temperature; the others multiply by the exponential of a logarithm.
        self._divides = kind == "align"
        self._ceiling = getattr(model, "max_log_logit_scale", None)  # AIMv2 clamps within its forward

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The temperature's parameter and, where there is one, the bias's."""
        scale = self.model.temperature if self._divides else self.model.logit_scale
        bias = getattr(self.model, "logit_bias", None)
        return (scale,) if bias is None else (scale, bias)

    def scale_and_bias(self, parameters: Iterable[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """logit_scale, the multiplier, and logit_bias or None, from the model's `parameters` or copies of them."""
        scale, *bias = self.parameters if parameters is None else parameters
        if self._divides:
            scale = 1 / scale
        elif self._ceiling is not None:
            scale = scale.clamp(0.0, self._ceiling).exp()
        else:
            scale = scale.exp()
        return scale, bias[0] if bias else None

    @torch.no_grad()
    def clamp_logit_scale(self, maximum: float) -> None:
        """Keeps the multiplier within [1, maximum]: CLIP's rule (arXiv 2103.00020, section 2.5)."""
        scale = self.parameters[0]
        if self._divides:
            scale.clamp_(1 / maximum, 1)
        else:
            scale.clamp_(0, math.log(maximum))

    @torch.no_grad()
    def initialise_sigmoid(self) -> bool:
        """Sets SigLIP's starting point, scale 10 and bias -10 (arXiv 2303.15343, section 3.3), where both are still 0.

        A SigLIP built from a config has zeros there. Returns whether it changed anything.
        """
        if self.objective != "sigmoid" or any(bool(p != 0) for p in self.parameters):
            return False
        scale, bias = self.parameters
        scale.fill_(math.log(10))
        bias.fill_(-10)
        return True

    def embed(self, forward: Callable[..., Any], batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """L2-normalised image and text embeddings, [images, D] and [texts, D], through the whole model's forward.

        ``forward`` is the model as wrapped for training: what goes around it misses autocast and DDP's gradient
        synchronisation.
        """
        outputs = forward(**_select(batch, IMAGE_INPUTS + TEXT_INPUTS), return_dict=True)
        return outputs.image_embeds, outputs.text_embeds

    def encode_images(self, batch: Mapping[str, Any]) -> Tensor:
        """L2-normalised image embeddings [images, D], for evaluation."""
        return self._normalised(self.model.get_image_features(**_select(batch, IMAGE_INPUTS)))

    def encode_texts(self, batch: Mapping[str, Any]) -> Tensor:
        """L2-normalised text embeddings [texts, D], for evaluation."""
        return self._normalised(self.model.get_text_features(**_select(batch, TEXT_INPUTS)))

    @staticmethod
    def _normalised(features: Any) -> Tensor:
        return F.normalize(features if isinstance(features, Tensor) else features.pooler_output, dim=-1)

    def batch_norms(self) -> list[str]:
        """Names of the trained layers that normalise over the micro-batch, which no window can make exact."""
        return [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and any(p.requires_grad for p in module.parameters())
        ]


def _select(batch: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: batch[name] for name in names if name in batch}
