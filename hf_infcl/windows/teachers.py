"""A teacher of `TeacherDistance` that is a model: it runs with the student."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..encoders.adapters import weight_fingerprint
from ..encoders.dual_encoder import IMAGE_INPUTS, DualEncoder
from ..encoders.fused_layers import can_fuse, fuse_layers
from ..passes.grad_cache import Features
from .setup import Setup
from .terms import OF_TEACHERS, Inputs


def teacher_prefix(number: int) -> str:
    """What the names of the tensors of a teacher begin with."""
    return f"{OF_TEACHERS}{number}_"


def teacher_words(name: str, licence: str | None) -> str:
    """A teacher for the model card: its Hub id or the last folder of its path, and its licence."""
    shown = os.path.basename(os.path.normpath(name)) if os.path.isabs(name) or os.path.exists(name) else name
    return f"{shown} ({f'licence {licence}' if licence else 'no licence stated'})"


class OnlineTeacher:
    """A `Teacher` that is a model: frozen, in evaluation mode, without a graph.

    It sees the student's images unless the batch has some for it, and all of their patches.

    Args:
        encoder: the model, on the device, which is frozen here.
        inputs: what a data collator adds to a batch for it: at least the texts, in the order of the collator.
        normalise: of uint8 images of its own; see `ContrastiveCollator.normalise`.
        licence: that is stated for the model; None if none is.
    """

    def __init__(
        self,
        encoder: DualEncoder,
        setup: Setup,
        inputs: Inputs,
        normalise: Callable[[Tensor], Tensor] | None,
        *,
        number: int,
        sides: Sequence[str],
        licence: str | None = None,
    ) -> None:
        encoder.model.requires_grad_(False).eval()
        fuse_layers(encoder.model, wanted=can_fuse(setup.args.device, setup.args.backend))
        self._encoder, self._accelerator, self._normalise = encoder, setup.accelerator, normalise
        self._prefix, self._sides = teacher_prefix(number), sides
        self.inputs, self.width = inputs, encoder.width()
        self.options: Mapping[str, Any] = {"weights": weight_fingerprint(encoder.model)}
        named = getattr(getattr(encoder.base, "config", None), "_name_or_path", "") or type(encoder.base).__name__
        self.words = teacher_words(named, licence)

    def embed(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, object]) -> Features:
        batch = self._batch(inputs)
        with torch.no_grad(), self._accelerator.autocast():
            embeddings = []
            if "image" in self._sides:
                if batch["pixel_values"].dtype == torch.uint8 and self._normalise is not None:
                    batch["pixel_values"] = self._normalise(batch["pixel_values"])
                embeddings.append(self._encoder.encode_images(batch))
            if "text" in self._sides:
                embeddings.append(self._encoder.encode_texts(batch, checked=True))
        # A division in bf16 leaves lengths of up to 0.3% more or less.
        return tuple(F.normalize(one.float(), dim=-1) for one in embeddings)

    def known(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        batch = self._batch(inputs)
        both = batch["pixel_values"], batch["input_ids"]
        images, texts = (torch.ones(len(rows), dtype=torch.bool, device=rows.device) for rows in both)
        return images, texts

    def _batch(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        batch = {name.removeprefix(self._prefix): v for name, v in inputs.items() if name.startswith(self._prefix)}
        shared = () if "pixel_values" in batch else IMAGE_INPUTS
        return {name: inputs[name] for name in shared if name in inputs} | batch
