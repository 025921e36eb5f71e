"""Loads the model of a name, in either format, or explains briefly why that is impossible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModel, AutoProcessor, PretrainedConfig

from .converting import config_of_open_clip, load_open_clip
from .folders import is_of_open_clip


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
    with _explained(checkpoint):
        model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
        return Loaded(model, AutoProcessor.from_pretrained(checkpoint))


def load_readers(checkpoint: str, open_clip_model: str | None = None) -> tuple[PretrainedConfig, Any]:
    """The model's config and its processor; takes and raises what `load` does, and needs no weights of transformers."""
    if open_clip_model is not None or is_of_open_clip(checkpoint):
        loaded = load(checkpoint, open_clip_model)
        return loaded.model.config, loaded.processor
    with _explained(checkpoint, needed="config.json"):
        return AutoConfig.from_pretrained(checkpoint), AutoProcessor.from_pretrained(checkpoint)


def load_config(checkpoint: str, open_clip_model: str | None = None) -> PretrainedConfig:
    """The model's config; takes and raises what `load` does."""
    if open_clip_model is not None or is_of_open_clip(checkpoint):
        return config_of_open_clip(checkpoint, open_clip_model=open_clip_model)
    with _explained(checkpoint, needed="config.json"):
        return AutoConfig.from_pretrained(checkpoint)


@contextmanager
def _explained(checkpoint: str, *, needed: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file makes the libraries raise exceptions of any class
        raise ValueError(_explanation(checkpoint, error, needed)) from error


def _explanation(checkpoint: str, error: BaseException, needed: str) -> str:
    causes: list[type[BaseException]] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(type(cause))
        cause = cause.__cause__ or cause.__context__
    reason = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
    if Path(checkpoint).exists():
        return f"{checkpoint!r} does not hold a model that can be loaded with its config and its processor: {reason}"
    tried = f"There is no folder {checkpoint!r}"
    if HFValidationError in causes:
        return f"{tried}, and the name is not the id of a model on the Hub, such as openai/clip-vit-base-patch32."
    if LocalEntryNotFoundError in causes:
        words = " ".join(filter(None, [checkpoint, needed]))
        return (
            f"{tried}, no model of this name was downloaded before, and the Hub could not be reached. Check the name. "
            f"Without a network, run `hf download {words}` on a machine that has one, and pass "
            f"{'the folder of the printed file' if needed else 'the printed folder'}."
        )
    if RepositoryNotFoundError in causes:
        return (
            f"{tried}, and the Hub has no model of this name that you may read. Check the name. If the model is "
            "private, log in with `hf auth login`."
        )
    return f"The model {checkpoint!r} cannot be loaded: {reason}"
