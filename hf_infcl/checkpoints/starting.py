"""The model that a training of `infcl train` starts from, with the adapters that train, and the one that it leaves."""

from __future__ import annotations

from pathlib import Path

from ..conversion.models import Loaded, load
from ..conversion.pretrained import base_of_adapters
from ..encoders.adapters import has_adapters, merge_adapters, with_adapters
from ..encoders.dual_encoder import DualEncoder
from ..encoders.image_size import resize_images
from ..options.arguments import InfCLTrainingArguments
from ..options.commands import LoraOptions, TrainedModelOptions


def model_to_train(options: TrainedModelOptions, lora: LoraOptions, args: InfCLTrainingArguments) -> Loaded:
    """Loads the model of a training with its adapters, or with new ones if they are asked for.

    Whatever is new is drawn from ``args.seed``, alike on all processes.

    Raises:
        ValueError: the model cannot be loaded, or its adapters and the options do not go together.
    """
    loaded = load(
        options.model,
        options.open_clip_model,
        merges=False,
        new_weights=options.new_weights or (),
        seed=args.seed,
        tokenizer=options.tokenizer,
    )
    has_own, rank = has_adapters(loaded.model), lora.lora_rank
    if lora.lora_merge and rank is None and not has_own:
        raise ValueError(
            "--lora_merge merges the adapters of --lora_rank, which is not given, or those of the model, which has "
            "none. Pass --lora_rank as well, or omit --lora_merge."
        )
    if lora.lora_logit_scale and rank is None:
        raise ValueError("--lora_logit_scale is for new adapters. Pass --lora_rank as well, or omit it.")
    if has_own and rank is not None:
        raise ValueError(
            f"{options.model} holds adapters, and --lora_rank {rank} would add new ones. To train those that it holds, "
            "omit --lora_rank, or the recipe that sets it. To train new ones, merge the others into their model first: "
            f"infcl convert {options.model} MERGED, and then --model MERGED."
        )
    if options.new_weights and (has_own or rank is not None):
        raise ValueError(
            f"--new_weights {' '.join(options.new_weights)} would stay as they are drawn, because only adapters train, "
            "and the adapter's file would not hold them. Train the whole model first, without adapters."
        )
    if loaded.conversion and rank is not None and not lora.lora_merge:
        raise ValueError(
            f"--lora_rank would save an adapter of {options.model}, which peft cannot load, since it is in OpenCLIP's "
            "format. Write it in the other format first with `infcl convert`, or pass --lora_merge."
        )
    if rank is not None:
        size, merged = args.image_size, lora.lora_merge
        adapted = with_adapters(loaded.model, rank, lora.lora_targets, size, seed=args.seed, merged=merged)
        if lora.lora_logit_scale:
            for parameter in DualEncoder(adapted).temperature_parameters:
                parameter.requires_grad_(True)
        return loaded._replace(model=adapted)
    if has_own and lora.lora_merge and args.image_size is not None:
        resize_images(DualEncoder(loaded.model.get_base_model()), args.image_size)
    return loaded


def merge_into_start(options: TrainedModelOptions, args: InfCLTrainingArguments) -> None:
    """Replaces the adapters in ``output_dir`` by the whole model."""
    start = options.model if options.open_clip_model else base_of_adapters(options.model) or options.model
    whole = load(start, options.open_clip_model, tokenizer=options.tokenizer)
    merge_adapters(Path(str(args.output_dir)), whole.model, args.image_size)
