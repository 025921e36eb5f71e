"""Random patches of the images are left out in training, so that the image tower computes less."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .dual_encoder import DualEncoder
from .model_types import IMAGE_TOWERS, TOWERS


def check_patches(encoder: DualEncoder) -> None:
    """Raises a ValueError if the image tower has no patches to drop, or does not take a part of them."""
    tower = getattr(encoder.model, TOWERS["image"][0], None)
    kind = getattr(getattr(tower, "config", None), "model_type", None)
    if kind not in IMAGE_TOWERS:
        reason = "marks its patches with a mask" if kind == "siglip2_vision_model" else "is not known to take a part"
        raise ValueError(
            f"patch_dropout leaves patches of images out, and the image tower of {type(encoder.base).__name__} (type "
            f"{kind!r}) {reason}. Leave patch_dropout out, or train a tower of the types {', '.join(IMAGE_TOWERS)}."
        )


class PatchDropout:
    """Drops a random share of the patches of each image in the forwards of training (FLIP, arXiv 2212.00794).

    They are dropped after the position embedding, before the first layer. Class and register tokens stay. In evaluation
    mode nothing is dropped. The draw uses torch's generator of the device, so the second pass over a micro-batch, which
    has the random state of the first, drops the same patches. A hook of the image tower does it.

    Args:
        share: the share of the patches to drop, in [0, 1). Of n patches, round(n · (1 - share)) stay, at least one.

    Raises:
        ValueError: see `check_patches`.
    """

    def __init__(self, encoder: DualEncoder, share: float) -> None:
        self._share = share
        check_patches(encoder)
        self._tower: Any = getattr(encoder.model, TOWERS["image"][0])
        embeddings = self._tower.embeddings
        registers = getattr(embeddings, "register_tokens", None)
        self._prefix = int(hasattr(embeddings, "class_embedding") or hasattr(embeddings, "cls_token"))
        self._prefix += 0 if registers is None else registers.shape[1]
        self._hook = embeddings.register_forward_hook(self._drop)

    def remove(self) -> None:
        """Restores the tower."""
        self._hook.remove()

    def _drop(self, module: nn.Module, inputs: object, tokens: Tensor) -> Tensor | None:
        # The mode of the tower counts: frozen embeddings are in evaluation mode even below layers that train.
        if not self._tower.training:
            return None
        prefix, patches = tokens[:, : self._prefix], tokens[:, self._prefix :]
        images, count, width = patches.shape
        kept = max(1, round(count * (1 - self._share)))
        chosen = torch.rand(images, count, device=tokens.device).topk(kept, dim=1).indices
        return torch.cat([prefix, patches.gather(1, chosen[..., None].expand(-1, -1, width))], dim=1)
