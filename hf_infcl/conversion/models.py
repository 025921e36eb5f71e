"""Loads the model of a name, in either format, or explains briefly why that is impossible."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModel, AutoProcessor, PretrainedConfig

from .converting import config_of_open_clip, load_open_clip
from .explaining import explained
from .folders import is_of_open_clip

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A model and its processor, and sentences about the conversion of a model in OpenCLIP's format."""

    model: Any
    processor: Any
    conversion: Sequence[str] = ()


def load(checkpoint: str, open_clip_model: str | None = None) -> Loaded:
    """Loads the model and the processor. The model is in fp32 for the optimizer, whatever dtype its checkpoint has.

    Args:
        checkpoint: a folder or a Hub id, also of OpenCLIP, or a .pt of OpenCLIP's training.
        open_clip_model: see `load_open_clip`.

    Raises:
        ValueError: they cannot be loaded.
    """
    if open_clip_model is not None or is_of_open_clip(checkpoint):
        told: list[str] = []
        model, processor = load_open_clip(checkpoint, open_clip_model=open_clip_model, tell=told.append)
        return Loaded(model.float(), processor, told)
    with explained(checkpoint):
        model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
        return Loaded(model, AutoProcessor.from_pretrained(checkpoint))


def load_readers(checkpoint: str, open_clip_model: str | None = None) -> tuple[PretrainedConfig, Any]:
    """The model's config and its processor; takes and raises what `load` does, and needs no weights of transformers."""
    if open_clip_model is not None or is_of_open_clip(checkpoint):
        loaded = load(checkpoint, open_clip_model)
        return loaded.model.config, loaded.processor
    with explained(checkpoint, needed="config.json"):
        return AutoConfig.from_pretrained(checkpoint), AutoProcessor.from_pretrained(checkpoint)


def load_config(checkpoint: str, open_clip_model: str | None = None) -> PretrainedConfig:
    """The model's config; takes and raises what `load` does."""
    if open_clip_model is not None or is_of_open_clip(checkpoint):
        return config_of_open_clip(checkpoint, open_clip_model=open_clip_model)
    with explained(checkpoint, needed="config.json"):
        return AutoConfig.from_pretrained(checkpoint)


def stated_licence(checkpoint: str) -> str | None:
    """The licence in a model's card, in its folder or on the Hub; None if none is stated or the card cannot be read."""
    path = Path(checkpoint, "README.md")
    if not path.is_file() and os.path.exists(checkpoint):
        return None
    try:
        card = ModelCard.load(path if path.is_file() else checkpoint)
    except Exception as error:  # of the Hub's client, of its HTTP library or of YAML
        logger.warning(
            "No licence of %s is stated in the model card, because its own could not be read: %s", checkpoint, error
        )
        return None
    stated = getattr(card.data, "license", None)
    return ", ".join(stated) if isinstance(stated, list) else stated
