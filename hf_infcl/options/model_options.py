"""The options of the commands that name a model and its adapters; read without torch."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar

from .declaring import command_option


@dataclass
class ModelOptions:
    _argument_group_name: ClassVar[str] = "Model"

    model: str = command_option(
        "The model: a Hub id, a folder or a .pt, of transformers or of OpenCLIP. "
        "Adapters come with their model, and a training continues them. Required.",
        default=MISSING,
    )
    open_clip_model: str | None = command_option(
        "For a .pt: OpenCLIP's name of the model, such as ViT-B-32, or its config as JSON.",
    )
    tokenizer: str | None = command_option(
        "Another tokenizer than the model's own: a Hub id or a folder. It is saved with the model. A .pt "
        "has none, and gets CLIP's from the Hub without this option.",
    )


@dataclass
class MeasuredModelOptions(ModelOptions):
    model: list[str] = command_option(  # type: ignore[assignment]  # several in place of one
        "The model, or several to compare: Hub ids, folders or a .pt, of transformers or of OpenCLIP. Adapters come "
        "with their model. Required.",
        default=MISSING,
    )


@dataclass
class TrainedModelOptions(ModelOptions):
    new_weights: list[str] | None = command_option(
        "Weights or modules that the checkpoint may lack, such as visual_projection. They are drawn from --seed. A "
        "checkpoint that lacks others is refused."
    )


@dataclass
class LoraOptions:
    _argument_group_name: ClassVar[str] = "LoRA adapters (package peft)"

    lora_rank: int | None = command_option(
        "Train LoRA adapters of this rank instead of the weights. Their alpha is twice the rank.",
    )
    lora_targets: list[str] = command_option(
        "Names of the layers that get adapters, such as q_proj v_proj.", default=["all-linear"]
    )
    lora_logit_scale: bool = command_option(
        "Train logit_scale and logit_bias beside new adapters. They are then in the adapter's file.", default=False
    )
    lora_merge: bool = command_option(
        "At the end, merge the adapters into the weights. The whole model is saved and pushed instead.", default=False
    )
