"""Adapts a dual encoder to DDP and FSDP2 before they wrap it, and its saved state afterwards."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import accelerate
from accelerate import Accelerator
from accelerate.utils import DistributedType, compare_versions
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from ..processes.collectives import failures_announced
from .dual_encoder import DualEncoder

FSDP_SINCE = "1.14"  # with older releases of accelerate plain tensors meet sharded ones in the backward of FSDP2


def check_wrapper(accelerator: Accelerator) -> None:
    """Raises a ValueError for wrappers under which the gradients have not been verified or are wrong."""
    # Also from the variables that `accelerate launch` sets, and for a model that was split while it was loaded.
    mesh = getattr(accelerator, "parallelism_config", None)
    if mesh is not None and (copies := mesh.non_data_parallel_size) > 1:
        raise ValueError(
            f"parallelism_config has tp_size={mesh.tp_size}, cp_size={mesh.cp_size} and sp_size={mesh.sp_size}, which "
            f"give {copies} processes the same pairs. In the global batch each pair would be a negative of its own "
            "copies. Leave all three at 1; FSDP shards the parameters, and gradient_accumulation_steps bounds the "
            "activations."
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "InfCLTrainer's gradients have been verified under FSDP version 2, not 1. Version 2 is the default of "
            "--fsdp from transformers 5.10 on. Before that, use accelerate launch --config_file "
            "scripts/configs/fsdp2.yaml instead of --fsdp."
        )
    if accelerator.is_fsdp2 and compare_versions("accelerate", "<", FSDP_SINCE):
        raise ValueError(
            f"InfCLTrainer needs accelerate {FSDP_SINCE} or newer under FSDP, but {accelerate.__version__} is "
            "installed. Upgrade it, or train with DDP."
        )


def prepare_for_fsdp(encoder: DualEncoder) -> None:
    """Changes parameters and modules that FSDP2 does not support.

    It has no scalar parameters, so the temperature becomes a vector of one element;
    `stock_shapes` undoes this in saved states. accelerate shards the modules in ``_no_split_modules`` and also the
    module that ``get_input_embeddings`` returns, so modules of embeddings are removed from that list; they would be
    sharded twice. CLIP does not implement ``get_input_embeddings`` and gets one that returns None.

    Raises:
        ValueError: only the temperature trains, or the model is not of transformers.
    """
    if not isinstance(encoder.base, PreTrainedModel):
        raise ValueError(
            f"{type(encoder.base).__name__} is not a model of transformers, whose lists of layers FSDP shards by. "
            "Train it with DDP."
        )
    temperature = set(encoder.temperature_parameters)
    if not any(p.requires_grad for p in encoder.model.parameters() if p not in temperature):
        raise ValueError(
            "No embedding depends on a trained parameter, but FSDP exchanges gradients only after a backward through "
            "the model. Train a tower or a projection, or train only logit_scale without FSDP."
        )
    base: Any = encoder.base
    base._no_split_modules = [name for name in base._no_split_modules or () if not name.endswith("Embeddings")]
    try:
        base.get_input_embeddings()
    except NotImplementedError:
        base.get_input_embeddings = lambda: None
    if (scale := encoder.temperature_parameters[0]).ndim == 0:
        setattr(base, encoder.kind.temperature, nn.Parameter(scale.detach().reshape(1), scale.requires_grad))


def stock_shapes(encoder: DualEncoder, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with the shapes that ``from_pretrained`` of transformers expects, after `prepare_for_fsdp`."""
    shape = encoder.kind.temperature_shape
    return {
        key: value.reshape(shape) if key.rpartition(".")[2] == encoder.kind.temperature else value
        for key, value in state_dict.items()
    }


def reshard(model: nn.Module) -> None:
    """Releases the whole parameters that a forward under FSDP2 has left, before their parts are changed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def fsdp_tower_methods(encoder: DualEncoder) -> Iterator[None]:
    """A context in which FSDP2 gathers the parameters for the methods of the two towers, as for forward.

    Outside of the context, the methods must be those of the class: CLIP's forward calls them, and FSDP2 would release
    the parameters of the whole model after the first call. At its end the context releases what the last call has
    gathered: a step lists the parameters of the model before its first forward.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(reshard, encoder.model)
        for name in ("get_image_features", "get_text_features") if isinstance(encoder.model, FSDPModule) else ():
            register_fsdp_forward_method(encoder.model, name)
            stack.callback(delattr, encoder.model, name)
        yield


def failures_announced_unless_sharded(accelerator: Accelerator) -> contextlib.AbstractContextManager[None]:
    """Announces errors, except under FSDP, where the other processes may be waiting within the same forward."""
    return contextlib.nullcontext() if accelerator.is_fsdp2 else failures_announced()
