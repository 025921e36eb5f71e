"""Whether a training fits into the memory of its GPU."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from ...encoders.image_size import config_for_images
from ...options.arguments import InfCLTrainingArguments
from ...options.batch_schedule import divided_batch
from .counting import Counts, count
from .prediction import GIB, USABLE, Choice, memory


def check_memory(config: PretrainedConfig, args: InfCLTrainingArguments, gpu_bytes: float) -> str | None:
    """Compares the predicted memory of a training with that of its GPU, before the training begins.

    Trainings that shard the weights (FSDP, DeepSpeed), read the image features from a cache, or find out by themselves
    what fits (``global_batch_size``) are not predicted.

    Returns:
        A warning if the training probably does not fit, or if its memory cannot be predicted.

    Raises:
        ValueError: it cannot fit: weights, their gradients, half of a micro-batch's activations and the window's images
            in uint8 alone exceed the memory of the GPU.
    """
    if args.fsdp or args.deepspeed or args.cache_features or args.divides_by_itself:
        return None
    try:
        # The last steps need the most memory.
        counts = counts_of(config, args, patch_dropout=None if args.full_tokens_last else args.patch_dropout)
    except ValueError as error:
        return f"The memory of the training was not predicted. {error}"
    choice = choice_of(args)
    parts = memory(counts, choice)
    if parts.total <= USABLE * gpu_bytes:
        return None
    # Short captions need fewer activations than the longest ones, which were counted.
    least = 4.0 * (counts.parameters + counts.trained)
    least += 0.5 * memory(counts, replace(choice, retain=1)).activations
    cure = ""
    if not args.offload_inputs:
        least += counts.pixels * choice.rows
        cure = "--offload_inputs keeps the images in host memory. "
    message = (
        f"The training needs about {parts.total / GIB:.1f} GiB per GPU, which has {gpu_bytes / GIB:.1f}: weights and "
        f"gradients {parts.weights / GIB:.1f}, optimizer {parts.optimizer / GIB:.1f}, activations "
        f"{parts.activations / GIB:.1f}, images {parts.images / GIB:.1f}, features and loss "
        f"{(parts.features + parts.loss) / GIB:.1f}. Lower --per_device_train_batch_size and raise "
        f"--gradient_accumulation_steps by the same factor, which gives the same result. {cure}`infcl plan` names "
        "options that fit."
    )
    if least > gpu_bytes:
        raise ValueError(message)
    return message


def counts_of(config: PretrainedConfig, args: InfCLTrainingArguments, *, patch_dropout: float | None) -> Counts:
    """`count` of a training with these arguments, in those of its steps that leave out this share of the patches."""
    return count(
        config_for_images(config, args.image_size),
        freeze=args.freeze,
        freeze_layers=args.freeze_layers,
        patch_dropout=patch_dropout,
        text_tokens=args.max_text_tokens,
        checkpointing=bool(args.gradient_checkpointing),
        autocast=args.bf16 or args.fp16,
    )


def choice_of(args: InfCLTrainingArguments) -> Choice:
    """The composition of the global batch of a training; of its last one, which is the largest."""
    return Choice(
        args.world_size,
        *divided_batch(args.global_batch_size, args.per_device_train_batch_size, args.world_size),
        retain=int(args.retain_graphs) if args.retain_graphs.isdecimal() else 1,
        offload=args.offload_inputs,
        compiled=args.torch_compile,
        checkpointing=bool(args.gradient_checkpointing),
        muon=args.optimizer == "muon",
        keep_features=bool(args.keep_features),
        keep_weights=bool(args.keep_weights),
        ema=args.ema_decay is not None and args.ema_device is None,
        texts=args.texts_together,
        prefixes=tuple(args.matryoshka_dims or ()),
        stored=len(args.teacher_embeddings or ()),
    )
