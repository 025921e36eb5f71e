"""Prepares a dual encoder for its training: freezing, the temperature, and warnings about the model's state."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers.utils import logging

from ..checkpoints.model_files import saves_shards
from ..encoders.adapters import beside_adapters, has_adapters
from ..encoders.dual_encoder import DualEncoder
from ..encoders.fused_layers import can_fuse, fuse_layers
from ..encoders.image_size import resize_images
from ..encoders.in_bf16 import compute_in_bf16
from ..encoders.patch_dropout import check_patches
from ..encoders.sharding import check_in_bf16, check_wrapper, is_sharded, prepare_for_fsdp
from ..options.arguments import InfCLTrainingArguments
from ..options.combinations import CHECKPOINTING
from ..windows.terms import Start

logger = logging.get_logger(__name__)


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
    _check_options_of_wrapper(args, accelerator)
    dual_encoder = DualEncoder(model)
    dual_encoder.freeze(args.freeze)
    if args.freeze_layers is not None:
        dual_encoder.freeze_layers(args.freeze_layers)
    if args.image_size is not None:
        resize_images(dual_encoder, args.image_size)
    if args.patch_dropout:
        check_patches(dual_encoder)
    _check_dimensions(dual_encoder, args)
    if is_sharded(accelerator):
        prepare_for_fsdp(dual_encoder)
    _check_adapters(model, accelerator)
    scale, *bias = dual_encoder.temperature_parameters
    if args.objective == "sigmoid" and not bias:
        raise ValueError(
            f"{type(dual_encoder.base).__name__} has no logit_bias, without which the sigmoid loss of a large "
            "batch starts far from where it can train. Train a SiglipModel or Siglip2Model, keep "
            "objective='softmax', or add SigLIP's start to the model before: model.logit_bias = "
            "torch.nn.Parameter(torch.full((1,), -10.0)) and model.logit_scale.data.fill_(math.log(10)). What is "
            "saved then holds a logit_bias that from_pretrained of this class leaves out."
        )
    if not scale.requires_grad and any(p.requires_grad for p in model.parameters()):
        value = dual_encoder.scale_and_bias()[0].item()
        logger.warning(
            f"{dual_encoder.temperature_name} is frozen, so logit_scale stays {value:.4g}, as with all that "
            "peft does not adapt. To train it beside new adapters, pass --lora_logit_scale (in Python, call "
            f"model.{dual_encoder.temperature_name}.requires_grad_(True)). The adapter's file then holds it, too."
        )
    half = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.float16, torch.bfloat16}
    in_fp32 = is_sharded(accelerator) and accelerator.mixed_precision != "no"
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
    fuse_layers(model, wanted=can_fuse(args.device, args.backend) and not args.torch_compile)
    keeps = bool(args.keep_features)
    # The files of adapters lack the weights that they belong to. Of a sharded model, this process may not have them.
    adapted = has_adapters(model) and not is_sharded(accelerator)
    start = Start(model, accelerator, keeps=keeps) if keeps or adapted else None
    compute_in_bf16(model, wanted=args.bf16_activations)
    return start


def _check_dimensions(dual_encoder: DualEncoder, args: InfCLTrainingArguments) -> None:
    """Raises a ValueError if the embeddings cannot be cut as the options say; the model's config then names these."""
    if args.matryoshka_dims is None and args.dims is None:
        return
    width = dual_encoder.width()
    if args.dims is not None and args.dims > width:
        raise ValueError(
            f"dims={args.dims} is more than the {width} dimensions of the embeddings. Choose at most {width}, or leave "
            "it out for all of them."
        )
    if too_large := [dims for dims in args.matryoshka_dims or () if dims >= width]:
        raise ValueError(
            f"matryoshka_dims={args.matryoshka_dims} must be less than the {width} dimensions of the embeddings, which "
            f"are trained in any case. Leave {', '.join(map(str, too_large))} out."
        )
    if args.matryoshka_dims and hasattr(dual_encoder.base, "config"):
        dual_encoder.base.config.matryoshka_dims = list(args.matryoshka_dims)


def _check_adapters(model: nn.Module, accelerator: Accelerator) -> None:
    """Raises a ValueError if checkpoints would lack trained parameters beside the adapters of peft."""
    if saves_shards(accelerator) and (names := list(beside_adapters(model))):
        raise ValueError(
            "With the state_dict_type SHARDED_STATE_DICT, accelerate saves the adapters of peft only, but these "
            f"parameters train as well: {', '.join(names)}. Set state_dict_type to FULL_STATE_DICT."
        )


def _check_options_of_wrapper(args: InfCLTrainingArguments, accelerator: Accelerator) -> None:
    """Raises a ValueError for options that do not work with the wrapper of the model."""
    fsdp = is_sharded(accelerator)
    if args.bf16_activations:
        check_in_bf16(accelerator, [name for name in CHECKPOINTING if getattr(args, name, False)])
    if args.optimizer == "muon" and fsdp and isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError(
            "optimizer='muon' would orthogonalise the parameters that FSDP offloads on the CPU, which takes "
            "minutes per step. Turn FSDP's offloading of parameters off, or leave optimizer out."
        )
