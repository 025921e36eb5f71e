"""The options of the commands that name a model and its adapters; read without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class ModelOptions:
    _argument_group_name: ClassVar[str] = "Model"

    model: str = field(
        metadata={
            "help": "The model: a Hub id, a folder or a .pt, of transformers or of OpenCLIP. "
            "Adapters come with their model, and a training continues them. Required."
        }
    )
    open_clip_model: str | None = field(
        default=None,
        metadata={"help": "For a .pt: OpenCLIP's name of the model, such as ViT-B-32, or its config as JSON."},
    )


@dataclass
class TrainedModelOptions(ModelOptions):
    new_weights: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of weights or modules that may be new. If the checkpoint lacks others, or these in any "
            "other command, it is refused. New ones, such as visual_projection, are drawn from --seed."
        },
    )


@dataclass
class LoraOptions:
    _argument_group_name: ClassVar[str] = "LoRA adapters (package peft)"

    lora_rank: int | None = field(
        default=None,
        metadata={"help": "Train adapters of this rank instead of the weights; their alpha is twice the rank."},
    )
    lora_targets: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of the layers that get adapters, such as q_proj v_proj."},
    )
    lora_logit_scale: bool = field(
        default=False,
        metadata={"help": "Train logit_scale and logit_bias beside new adapters. They are then in the adapter's file."},
    )
    lora_merge: bool = field(
        default=False,
        metadata={
            "help": "At the end, merge the adapters into the weights. The whole model is saved and pushed instead."
        },
    )
