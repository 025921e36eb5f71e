"""OpenCLIP's files beside those of transformers, in whatever a training saves: ``save_formats``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn
from transformers import ProcessorMixin

from ..conversion import open_clip_config, save_open_clip
from ..encoders.adapters import has_adapters
from ..encoders.dual_encoder import DualEncoder
from ..options.arguments import InfCLTrainingArguments


def check_formats(model: nn.Module | None, args: InfCLTrainingArguments, processor: ProcessorMixin | None) -> None:
    """Refuses formats in which the model could not be saved later.

    Args:
        model: the model; None if ``model_init`` creates it.
        args: the arguments of the training.
        processor: the processor that is saved beside the model, or None.

    Raises:
        ValueError: OpenCLIP has no such model, or would prepare its inputs otherwise.
    """
    if "open_clip" not in args.save_formats:
        return
    if model is None or processor is None:
        raise ValueError(
            f"save_formats has open_clip, which needs the {'model, not model_init' if model is None else 'processor'}"
            ": OpenCLIP's config holds sizes of the model, and how its images and captions are prepared."
        )
    if has_adapters(model):
        raise ValueError(
            "save_formats has open_clip, and OpenCLIP loads no adapters. Train with the format transformers, merge the "
            "adapters (--lora_merge), and write the other format with `infcl convert FOLDER FOLDER --to open_clip`."
        )
    open_clip_config(model.config, processor)


def save_other_formats(
    folder: str | Path,
    encoder: DualEncoder,
    args: InfCLTrainingArguments,
    processor: ProcessorMixin | None,
    state_dict: Mapping[str, Tensor] | None,
    repository: str | None,
) -> None:
    """Writes the formats of ``save_formats`` beside the files of transformers; see `save_open_clip`."""
    if "open_clip" in args.save_formats:
        save_open_clip(folder, encoder.base, processor, repository=repository or ".", state_dict=state_dict)
