"""Loads the model of a name, in either format, or explains briefly why that is impossible."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import ModelCard
from transformers import PretrainedConfig, ProcessorMixin

from ..hub import asks_hub_once
from .converting import load_open_clip
from .folders import is_of_open_clip, read_config
from .incoming import transformers_config
from .pretrained import base_of_adapters, load_pretrained, load_pretrained_config, load_processor
from .tokenizing import check_length, named_tokenizer

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A model and its processor, and sentences about the conversion of a model in OpenCLIP's format."""

    model: Any
    processor: Any
    conversion: Sequence[str] = ()


@asks_hub_once
def load(
    checkpoint: str,
    open_clip_model: str | None = None,
    *,
    merges: bool = True,
    new_weights: Sequence[str] = (),
    seed: int = 0,
    tokenizer: str | None = None,
) -> Loaded:
    """Loads the model and the processor. The model is in fp32 for the optimizer, whatever dtype its checkpoint has.

    Args:
        checkpoint: a folder or a Hub id, also of OpenCLIP or of adapters, or a .pt of OpenCLIP's training.
        open_clip_model: see `load_open_clip`.
        merges, new_weights, seed: see `load_pretrained`.
        tokenizer: the folder or the Hub id of a tokenizer that replaces that of the processor.

    Raises:
        ValueError: they cannot be loaded, or weights are missing.
    """
    if open_clip_model is None and not is_of_open_clip(checkpoint):
        options: dict[str, Any] = {"merges": merges, "new_weights": new_weights, "seed": seed}
        model, processor = load_pretrained(checkpoint, dtype=torch.float32, **options)
        _with_tokenizer(processor, tokenizer, model.config)
        return Loaded(model, processor)
    if new_weights:
        raise ValueError(f"--new_weights is for models in transformers' format, and {checkpoint!r} is not. Omit it.")
    told: list[str] = []
    model, processor = load_open_clip(
        checkpoint, open_clip_model=open_clip_model, tokenizer=tokenizer, tell=told.append
    )
    return Loaded(model.float(), processor, told)


def _with_tokenizer(processor: ProcessorMixin, tokenizer: str | None, config: PretrainedConfig) -> None:
    """Gives a processor another tokenizer, if one is named, with the limit of tokens that the old one had."""
    if tokenizer is None:
        return
    new, old = named_tokenizer(tokenizer), processor.tokenizer
    rows = getattr(config.text_config, "vocab_size", None)
    if rows is not None:
        check_length(new, rows, exact=False)
    new.model_max_length = min(new.model_max_length, old.model_max_length)
    processor.tokenizer = new


@asks_hub_once
def load_readers(
    checkpoint: str, open_clip_model: str | None = None, tokenizer: str | None = None
) -> tuple[PretrainedConfig, Any]:
    """The model's config and its processor; takes and raises what `load` does, and needs no weights of transformers."""
    if open_clip_model is not None or is_of_open_clip(checkpoint):
        loaded = load(checkpoint, open_clip_model, tokenizer=tokenizer)
        return loaded.model.config, loaded.processor
    base = base_of_adapters(checkpoint)
    config, processor = load_pretrained_config(checkpoint, base), load_processor(checkpoint, base)
    _with_tokenizer(processor, tokenizer, config)
    return config, processor


@asks_hub_once
def load_config(checkpoint: str, open_clip_model: str | None = None) -> PretrainedConfig:
    """The model's config; takes and raises what `load` does."""
    if open_clip_model is not None or is_of_open_clip(checkpoint):
        return transformers_config(read_config(checkpoint, open_clip_model)[0])
    return load_pretrained_config(checkpoint, base_of_adapters(checkpoint))


@asks_hub_once
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
    return licence_of(card.data)


def licence_of(data: object) -> str | None:
    """The licence, or several in one line, that the data of a card states; None if it states none."""
    stated = getattr(data, "license", None)
    return ", ".join(stated) if isinstance(stated, list) else stated
