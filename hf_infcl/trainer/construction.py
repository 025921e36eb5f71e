"""What an `InfCLTrainer` can be constructed from, and how it prepares its model."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import Dataset, IterableDataset
from transformers.utils import logging

from ..data import ContrastiveCollator, ImageTextDataset, ImageTextStream, ZeroShotDataset
from ..data.collator import DataCollator
from ..data.replay import Replayed
from ..data.store import all_parts, check_has_rows, most_captions
from ..data.transforms import set_image_size
from ..models.adapters import beside_adapters, has_adapters, resize_images
from ..models.dual_encoder import DualEncoder, check_patches
from ..models.layers import can_fuse, fuse_layers
from ..models.model_types import fit_tokenizer
from ..models.sharding import check_wrapper, prepare_for_fsdp
from ..options.arguments import REFUSALS, InfCLTrainingArguments
from ..processes.collectives import Processes
from ..processes.lock import check_writable
from ..step.extensions import check_extensions
from ..step.terms import Start
from .loaders import rows_of, set_sizes
from .model_files import check_formats, saves_shards
from .optimization import options_of_own_optimizer

logger = logging.get_logger(__name__)


# ---- The model ----


def prepare_model(model: Any, args: InfCLTrainingArguments, accelerator: Accelerator) -> Start | None:
    """Prepares a model before it is wrapped and its optimizer is created.

    Interpolates positions for images of another size, freezes the tower and the layers that ``args`` names and the
    parameters on which no embedding depends, gives parameters the shapes that the wrapper supports, fuses layers on a
    GPU, initialises the temperature of a new SigLIP, and warns about harmful settings.

    Returns:
        The weights as they are before the training, if ``args`` keeps the model near them.

    Raises:
        ValueError: the model is not a dual encoder; the wrapper is not supported, or does not support an option; a
            tower has fewer layers than ``args.freeze_layers``, no patches to drop or no other image size; the objective
            is sigmoid for a model without logit_bias; checkpoints would lack trained parameters beside the adapters of
            peft.
    """
    check_wrapper(accelerator)
    dual_encoder = DualEncoder(model)
    dual_encoder.freeze(args.freeze)
    if args.freeze_layers is not None:
        dual_encoder.freeze_layers(args.freeze_layers)
    resize_images(dual_encoder, args.image_size)
    if args.patch_dropout:
        check_patches(dual_encoder)
    _check_dimensions(dual_encoder, args)
    if accelerator.is_fsdp2:
        prepare_for_fsdp(dual_encoder)
        if args.optimizer == "muon" and isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            raise ValueError(
                "optimizer='muon' would orthogonalise the parameters that FSDP offloads on the CPU, which takes "
                "minutes per step. Turn FSDP's offloading of parameters off, or leave optimizer out."
            )
        if saves_shards(accelerator) and (names := list(beside_adapters(model))):
            raise ValueError(
                "With the state_dict_type SHARDED_STATE_DICT, accelerate saves the adapters of peft only, but these "
                f"parameters train as well: {', '.join(names)}. Set state_dict_type to FULL_STATE_DICT."
            )
    scale, *bias = dual_encoder.temperature_parameters
    if args.objective == "sigmoid" and not bias:
        raise ValueError(
            f"{type(dual_encoder.base).__name__} has no logit_bias, without which the sigmoid loss of a large batch "
            "starts far from where it can train. Train a Siglip(2)Model, keep objective='softmax', or add its start "
            "before: model.logit_bias = torch.nn.Parameter(torch.full((1,), -10.0)) and model.logit_scale.data.fill_("
            "math.log(10)). What is saved then has a logit_bias that from_pretrained of this class leaves out."
        )
    if not scale.requires_grad and any(p.requires_grad for p in model.parameters()):
        value = dual_encoder.scale_and_bias()[0].item()
        cure = ", as with all that peft does not adapt. To train it beside new adapters, pass --lora_logit_scale, or"
        logger.warning(
            f"{dual_encoder.kind.temperature} is frozen, so logit_scale stays {value:.4g}"
            f"{cure if has_adapters(model) else '. To train it,'} call model.{dual_encoder.kind.temperature}."
            "requires_grad_(True)."
        )
    half = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.float16, torch.bfloat16}
    in_fp32 = accelerator.is_fsdp2 and accelerator.mixed_precision != "no"
    if half and not in_fp32:  # for the optimizer
        logger.warning(
            f"The trained parameters are in {half.pop()}, whose rounding loses small updates. Load the model with "
            "from_pretrained(..., dtype=torch.float32); bf16=True still computes in bf16."
        )
    if dual_encoder.initialise_sigmoid():
        logger.warning("logit_scale and logit_bias were both 0 and are set to SigLIP's initial values, ln 10 and -10.")
    one_micro_batch = args.global_batch_size == args.per_device_train_batch_size
    if not one_micro_batch and (names := dual_encoder.batch_norms()):
        logger.warning(
            f"The batch norms {', '.join(names)} normalise over a micro-batch. The loss is that of the global "
            "batch, but the outputs of these layers depend on the size of the micro-batch."
        )
    fuse_layers(model, wanted=can_fuse(args.device, args.backend))
    keeps = bool(args.keep_features)
    # The files of adapters lack the weights that they belong to. Of a sharded model, this process may not have them.
    adapted = has_adapters(model) and not accelerator.is_fsdp2
    return Start(model, accelerator, keeps=keeps) if keeps or adapted else None


def _check_dimensions(dual_encoder: DualEncoder, args: InfCLTrainingArguments) -> None:
    """Raises a ValueError if the embeddings cannot be cut as the options say; the model's config then names these."""
    if args.matryoshka_dims is None and args.dims is None:
        return
    width = dual_encoder.width()
    if args.dims is not None and args.dims > width:
        raise ValueError(
            f"dims={args.dims} is more than the {width} dimensions of the embeddings. Choose at most {width}."
        )
    if too_large := [dims for dims in args.matryoshka_dims or () if dims >= width]:
        raise ValueError(
            f"matryoshka_dims={args.matryoshka_dims} must be less than the {width} dimensions of the embeddings, which "
            f"are trained in any case. Leave {', '.join(map(str, too_large))} out."
        )
    if args.matryoshka_dims and hasattr(dual_encoder.base, "config"):
        dual_encoder.base.config.matryoshka_dims = list(args.matryoshka_dims)


# ---- The other arguments ----


def check_arguments(
    model: nn.Module | None, args: object, data_collator: DataCollator | None, kwargs: dict[str, Any]
) -> None:
    """Refuses what an `InfCLTrainer` cannot train, before Trainer's constructor fails with a less clear error.

    Args:
        model: the model; None if ``model_init`` creates it.
        kwargs: the remaining arguments of Trainer's constructor. They get the collator's processor, so that it is saved
            beside the model, and new and old pairs (``replay_dataset``) as one training set.

    Raises:
        ValueError: the model is not a dual encoder; ``args`` has another class; several GPUs are visible without a
            launcher; ``args.world_size`` is not the number of processes; ``compute_loss_func`` or
            ``preprocess_logits_for_metrics`` is passed; a dataset of images has neither a processor nor a collator;
            ``equal_ids="exclude"`` is set for a training set that draws several captions per image; ``output_dir`` is
            not writable; ``extensions`` is not a list of extensions.
    """
    if kwargs.get("processing_class") is None and isinstance(data_collator, ContrastiveCollator):
        kwargs["processing_class"] = data_collator.processor
    if not isinstance(args, InfCLTrainingArguments):
        raise ValueError(f"InfCLTrainer needs InfCLTrainingArguments, got {type(args).__name__}.")
    check_extensions(kwargs.get("extensions", ()))
    for name, why in REFUSALS["arguments"].items():
        if kwargs.get(name) is not None:
            raise ValueError(why)
    if (old := kwargs.pop("replay_dataset", None)) is not None:
        if kwargs.get("train_dataset") is None:
            raise ValueError("A replay_dataset is mixed into a train_dataset, which is missing. Pass both.")
        kwargs["train_dataset"] = Replayed(kwargs["train_dataset"], old, args)
    elif args.replay_share is not None:
        raise ValueError("replay_share had no effect without old pairs. Pass a replay_dataset.")
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process, for which Trainer uses nn.DataParallel; its replicas "
            "cannot share a contrastive batch. Start one process per GPU with `accelerate launch` or `torchrun`, or "
            "show this process one GPU with CUDA_VISIBLE_DEVICES=0."
        )
    if (started := Processes().world_size) != args.world_size:
        raise ValueError(
            f"{started} processes were started, but each would train on its own, because "
            f"args.world_size is {args.world_size}. On CPUs pass use_cpu=True."
        )
    if model is not None:
        DualEncoder(model)  # raises an error for any other model
    optimizer, _ = kwargs.get("optimizers") or (None, None)
    set_options = options_of_own_optimizer(args)
    if set_options and (optimizer is not None or kwargs.get("optimizer_cls_and_kwargs") is not None):
        raise ValueError(
            f"{', '.join(set_options)} apply only to an optimizer that the trainer creates, but an optimizer was "
            "passed. Set its learning rates directly and leave these options out."
        )
    _check_data(args, data_collator, kwargs)
    check_formats(model, args, kwargs.get("processing_class"))
    if args.should_save:
        check_writable(str(args.output_dir))


def _check_data(args: InfCLTrainingArguments, data_collator: DataCollator | None, kwargs: Mapping[str, object]) -> None:
    pairs, evaluated = kwargs.get("train_dataset"), kwargs.get("eval_dataset")
    first = pairs[0] if isinstance(pairs, (list, tuple)) and pairs else None
    if isinstance(pairs, (str, Mapping)) or hasattr(pairs, "iloc") or isinstance(first, Dataset):
        one = "ImageTextDataset(load_pairs(folder, split='train'))"
        if isinstance(pairs, Mapping):
            one = f"train_dataset[{next(iter(pairs), 'train')!r}]"
        raise ValueError(
            f"train_dataset is a {type(pairs).__name__}. Pass one dataset, such as {one}, or a "
            "torch.utils.data.ConcatDataset of several."
        )
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
    for part in all_parts(pairs) if args.data_seed is not None else ():
        seed = part.seed if isinstance(part, ImageTextStream) else "its own"
        if isinstance(part, IterableDataset) and not isinstance(part, Replayed) and seed != args.data_seed:
            raise ValueError(
                f"data_seed={args.data_seed} would have no effect: the order of a {type(part).__name__} depends on its "
                f"own seed, which is {seed}. Omit it; pass the stream its seed: ImageTextStream(..., "
                f"seed={args.data_seed})."
            )
    if args.leave_out is not None and pairs is not None and rows_of(pairs) is None:
        raise ValueError(
            "leave_out='noisy' compares the scores of each row of a table from epoch to epoch, which a stream does not "
            "have. Score the stream with `infcl score`, and train without its wrong pairs (`--exclude`)."
        )
    for dataset in sets:
        check_has_rows(dataset)


def check_overrides(kind: Any, base: Any) -> None:
    """Raises a ValueError if a subclass ``kind`` of ``base`` overrides a method that is not called as Trainer does."""
    for name, does in REFUSALS["overrides"].items():
        of_step = name == "compute_loss" and kind.training_step is not base.training_step
        if getattr(kind, name, None) is not getattr(base, name, None) and not of_step:
            raise ValueError(f"InfCLTrainer {does.format(f'{kind.__name__}.{name}')}.")


def make_collator(trainer: Any, passed: DataCollator | None) -> DataCollator:
    """The collator that was passed, or one over the processor, or Trainer's; sets its sizes and the processor's."""
    collator: DataCollator = trainer.data_collator if passed is None else passed
    processor, args, config = trainer.processing_class, trainer.args, getattr(trainer.model, "config", None)
    if passed is None and processor is not None:
        collator = ContrastiveCollator.for_model(processor, config, uint8=True)
    if isinstance(collator, ContrastiveCollator):
        # A tokenizer that was passed, as by --tokenizer, may be a smaller one.
        fit_tokenizer(collator.processor.tokenizer, config, is_of_model=False)
    set_sizes(collator, args)
    if args.image_size is not None and hasattr(processor, "image_processor"):
        set_image_size(processor.image_processor, args.image_size)
    return collator
