"""Random patches of the images are left out in training, so that the image tower computes less."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .dual_encoder import TOWERS, DualEncoder

# The types of vision towers that attend to all tokens alike, whose output does not depend on where in the sequence a
# patch stands, and whose module ``embeddings`` returns the tokens of images with their positions.
WITH_PATCHES = (
    *("aimv2_vision_model", "altclip_vision_model", "blip_vision_model", "chinese_clip_vision_model"),
    *("clip_vision_model", "clipseg_vision_model", "dinov2", "groupvit_vision_model", "metaclip_2_vision_model"),
    *("owlv2_vision_model", "owlvit_vision_model", "siglip_vision_model", "tipsv2_vision_model", "vit"),
)


def check_patches(encoder: DualEncoder) -> None:
    """Raises a ValueError if the image tower has no patches to drop, or does not take a part of them."""
    tower = getattr(encoder.model, TOWERS["image"][0], None)
    kind = getattr(getattr(tower, "config", None), "model_type", None)
    if kind not in WITH_PATCHES:
        reason = "marks its patches with a mask" if kind == "siglip2_vision_model" else "is not known to take a part"
        raise ValueError(
            f"patch_dropout leaves patches of images out, and the image tower of {type(encoder.base).__name__} (type "
            f"{kind!r}) {reason}. Leave patch_dropout out, or train a tower of the types {', '.join(WITH_PATCHES)}."
        )


class PatchDropout:
    """Drops a random share of the patches of each image in the forwards of training (FLIP, arXiv 2212.00794).

    The tokens are dropped after the position embedding, and so are never part of the tower's layers. Class and register
    tokens stay. In evaluation mode nothing is dropped. The patches are drawn from torch's generator of the device, so
    that a forward with the random state of another one drops the same.

    Args:
        encoder: the model, whose image tower gets a hook.
        share: the share of the patches to drop, in [0, 1). Of n patches, round(n · (1 - share)) stay, at least one.

    Attributes:
        share: the same. It may be changed between two forwards.

    Raises:
        ValueError: see `check_patches`.
    """

    def __init__(self, encoder: DualEncoder, share: float) -> None:
        self.share = share
        check_patches(encoder)
        self._tower: Any = getattr(encoder.model, TOWERS["image"][0])
        embeddings = self._tower.embeddings
        registers = getattr(embeddings, "register_tokens", None)
        self._others = int(hasattr(embeddings, "class_embedding") or hasattr(embeddings, "cls_token"))
        self._others += 0 if registers is None else registers.shape[1]
        self._hook = embeddings.register_forward_hook(self._drop)

    def remove(self) -> None:
        """Restores the tower."""
        self._hook.remove()

    def _drop(self, module: nn.Module, inputs: Any, tokens: Tensor) -> Tensor | None:
        # Frozen embeddings are in evaluation mode below layers that train.
        if self.share == 0 or not self._tower.training:
            return None
        others, patches = tokens[:, : self._others], tokens[:, self._others :]
        images, count, width = patches.shape
        kept = max(1, round(count * (1 - self.share)))
        chosen = torch.rand(images, count, device=tokens.device).topk(kept, dim=1).indices
        return torch.cat([others, patches.gather(1, chosen[..., None].expand(-1, -1, width))], dim=1)
