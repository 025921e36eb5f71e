"""What an `InfCLTrainer` can be constructed from, and what it makes of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ..checkpoints.lock import check_writable
from ..checkpoints.model_files import check_formats
from ..data import ContrastiveCollator, ImageTextDataset, ImageTextStream, ZeroShotDataset
from ..data.collator import DataCollator
from ..data.transforms import set_image_size
from ..encoders.dual_encoder import DualEncoder
from ..encoders.model_types import fit_tokenizer
from ..loading.loaders import check_data_seed, check_selectable, set_sizes
from ..loading.replay import Replayed
from ..loading.wrapped import all_parts, check_has_rows, most_captions
from ..options.arguments import InfCLTrainingArguments
from ..options.contrastive import RATES
from ..windows.extensions import check_extensions

_OF_OPTIMIZER = (*RATES, "no_decay_parameters", "optimizer")


def checked_arguments(
    model: nn.Module | None, args: object, data_collator: DataCollator | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Refuses what an `InfCLTrainer` cannot train, before Trainer's constructor fails with a less clear error.

    Args:
        model: the model; None if ``model_init`` creates it.
        kwargs: the remaining arguments of Trainer's constructor, and ``replay_dataset``.

    Returns:
        The remaining arguments of Trainer's constructor, with the collator's processor, so that it is saved beside the
        model, and with new and old pairs as one training set.

    Raises:
        ValueError: the model is not a dual encoder; ``args`` has another class; several GPUs are visible without a
            launcher; ``args.world_size`` is not the number of processes; ``compute_loss_func`` is passed; a dataset of
            images has neither a processor nor a collator; ``equal_ids="exclude"`` is set for a training set that draws
            several captions per image; ``output_dir`` is not writable; ``extensions`` is not a list of extensions.
    """
    if kwargs.get("processing_class") is None and isinstance(data_collator, ContrastiveCollator):
        kwargs = {**kwargs, "processing_class": data_collator.processor}  # so that it is saved beside the model
    if not isinstance(args, InfCLTrainingArguments):
        raise ValueError(f"InfCLTrainer needs InfCLTrainingArguments, got {type(args).__name__}.")
    check_extensions(kwargs.get("extensions", ()))
    if "teacher" in kwargs:
        raise ValueError(
            "A teacher does not run beside the student: its embeddings of the training set are stored. Name it in the "
            "arguments, InfCLTrainingArguments(teacher=...), which embeds the set once, or teacher_embeddings=..., a "
            "folder of `infcl embed`."
        )
    kwargs = _with_replay(args, kwargs)
    _check_processes(args)
    if model is not None:
        DualEncoder(model)  # raises an error for any other model
    if kwargs.get("compute_loss_func") is not None:
        raise ValueError(
            "InfCLTrainer computes the loss itself and would never call compute_loss_func. Do not pass it."
        )
    optimizer, _ = kwargs.get("optimizers") or (None, None)
    set_options = [name for name in _OF_OPTIMIZER if getattr(args, name) is not None]
    if set_options and (optimizer is not None or kwargs.get("optimizer_cls_and_kwargs") is not None):
        raise ValueError(
            f"{', '.join(set_options)} apply only to an optimizer that the trainer creates, but an optimizer was "
            "passed. Set its learning rates directly and leave these options out."
        )
    _check_data(args, data_collator, kwargs)
    check_formats(model, args, kwargs.get("processing_class"))
    if args.should_save:
        check_writable(str(args.output_dir))
    return kwargs


def _check_processes(args: InfCLTrainingArguments) -> None:
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process, for which Trainer uses nn.DataParallel; its replicas "
            "cannot share a contrastive batch. Start one process per GPU with `accelerate launch` or `torchrun`, or "
            "show this process one GPU with CUDA_VISIBLE_DEVICES=0."
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != args.world_size:
        raise ValueError(
            f"{dist.get_world_size()} processes were started, but each would train on its own, because "
            f"args.world_size is {args.world_size}. On CPUs pass use_cpu=True."
        )


def _check_data(args: InfCLTrainingArguments, data_collator: DataCollator | None, kwargs: Mapping[str, object]) -> None:
    pairs, evaluated = kwargs.get("train_dataset"), kwargs.get("eval_dataset")
    sets = list(evaluated.values()) if isinstance(evaluated, Mapping) else [evaluated]
    unprepared = (ImageTextDataset, ImageTextStream, ZeroShotDataset)
    needs_processor = any(isinstance(part, unprepared) for data in [pairs, *sets] for part in all_parts(data))
    if data_collator is None and kwargs.get("processing_class") is None and needs_processor:
        raise ValueError(
            "Images and captions must be prepared for the model: pass "
            "processing_class=AutoProcessor.from_pretrained(...), or a data_collator."
        )
    if args.equal_ids == "exclude" and (most := most_captions(pairs)) > 1:
        raise ValueError(
            f"The training set draws {most} captions per image, which are all positives of their image, but equal_ids "
            "is 'exclude'. Pass equal_ids='positive' or omit it, or draw one caption per image."
        )
    check_data_seed(pairs, args.data_seed)
    if pairs is not None:
        check_selectable(pairs, args)
    for dataset in sets:
        check_has_rows(dataset)


def check_overrides(kind: type, base: type) -> None:
    """Raises a ValueError if a subclass ``kind`` of ``base`` overrides a method that is never called."""
    names = "training_step", "compute_loss", "_get_train_sampler"
    overrides = {name: getattr(kind, name) is not getattr(base, name) for name in names}
    if overrides["compute_loss"] and not overrides["training_step"]:
        raise ValueError(
            f"InfCLTrainer computes the loss of a window itself and would never call {kind.__name__}.compute_loss. "
            "Override training_step to change the training, or use transformers.Trainer."
        )
    if overrides["_get_train_sampler"]:
        raise ValueError(
            f"InfCLTrainer draws the rows of a global batch itself and would never call {kind.__name__}."
            "_get_train_sampler. Override get_train_dataloader, or choose a train_sampling_strategy."
        )


def make_collator(
    model: nn.Module | None,
    processor: Any,
    data_collator: DataCollator | None,
    default: DataCollator,
    args: InfCLTrainingArguments,
) -> DataCollator:
    """The collator that was passed, or one over the processor, or the default; sets its sizes and the processor's."""
    collator, image_size = default if data_collator is None else data_collator, args.image_size
    if data_collator is None and processor is not None:
        collator = ContrastiveCollator.for_model(processor, getattr(model, "config", None), uint8=True)
    elif isinstance(collator, ContrastiveCollator):
        fit_tokenizer(collator.processor.tokenizer, getattr(model, "config", None))
    set_sizes(collator, args)
    if image_size is not None and hasattr(processor, "image_processor"):
        set_image_size(processor.image_processor, image_size)
    return collator


def _with_replay(args: InfCLTrainingArguments, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Trainer's constructor with new and old pairs as one training set.

    Raises:
        ValueError: as `Replayed`; there is a share of old pairs, but no old pairs, or old pairs only.
    """
    old = kwargs.pop("replay_dataset", None)
    if old is None:
        if args.replay_share is not None:
            raise ValueError("replay_share had no effect without old pairs. Pass a replay_dataset.")
        return kwargs
    if kwargs.get("train_dataset") is None:
        raise ValueError("A replay_dataset is mixed into a train_dataset, which is missing. Pass both.")
    return {**kwargs, "train_dataset": Replayed(kwargs["train_dataset"], old, args)}
