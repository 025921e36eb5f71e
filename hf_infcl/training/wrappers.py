"""Adapts DDP, FSDP2 and DeepSpeed so that a window of several micro-batches has one loss and one exact gradient.

`check_wrapper` and `prepare_for_wrapper` are called before a model is wrapped; `wrapper_of` returns the adaptation for
a wrapped model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import accelerate
from accelerate import Accelerator
from accelerate.utils import DistributedType, compare_versions, is_compiled_module
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from .dual_encoder import DualEncoder

FSDP_SINCE = "1.14"  # with older releases of accelerate plain tensors meet sharded ones in the backward of FSDP2

# ---- Before the model is wrapped ----


def check_wrapper(accelerator: Accelerator) -> None:
    """Raises a ValueError for wrappers under which the gradients have not been verified."""
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "InfCLTrainer's gradients have been verified under FSDP version 2, not 1. Version 2 is the default of "
            "--fsdp from transformers 5.10 on. Before that, use accelerate launch --config_file "
            "scripts/configs/fsdp2.yaml instead of --fsdp."
        )
    if accelerator.distributed_type == DistributedType.FSDP and compare_versions("accelerate", "<", FSDP_SINCE):
        raise ValueError(
            f"InfCLTrainer needs accelerate {FSDP_SINCE} or newer under FSDP, but {accelerate.__version__} is "
            "installed. Upgrade it, or train with DDP."
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage = accelerator.state.deepspeed_plugin.zero_stage
        if stage not in (1, 2):
            raise ValueError(
                f"InfCLTrainer's gradients have been verified under DeepSpeed's ZeRO stages 1 and 2, not {stage}. "
                "Use one of them, --fsdp to shard the parameters, or no DeepSpeed config to shard nothing."
            )


def prepare_for_wrapper(encoder: DualEncoder, kind: DistributedType) -> None:
    """Changes parameters and modules that the wrapper does not support.

    FSDP2 and DeepSpeed do not support scalar parameters, so the temperature becomes a vector of one element;
    `stock_shapes` undoes this in saved states. accelerate shards the modules in ``_no_split_modules`` and also the
    module that ``get_input_embeddings`` returns, so modules of embeddings are removed from that list; they would be
    sharded twice. CLIP does not implement ``get_input_embeddings`` and gets one that returns None.

    Raises:
        ValueError: under FSDP2 only the temperature trains.
    """
    if kind == DistributedType.FSDP:
        temperature = set(encoder.temperature_parameters)
        if not any(p.requires_grad for p in encoder.model.parameters() if p not in temperature):
            raise ValueError(
                "No embedding depends on a trained parameter, but FSDP exchanges gradients only after a backward "
                "through the model. Train a tower or a projection, or train only logit_scale without FSDP."
            )
        base = encoder.base
        names = getattr(base, "_no_split_modules", None) or ()
        base._no_split_modules = [name for name in names if not name.endswith("Embeddings")]
        try:
            base.get_input_embeddings()
        except NotImplementedError:
            base.get_input_embeddings = lambda: None
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        encoder.make_temperature_a_vector()


def stock_shapes(encoder: DualEncoder, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with the shapes that ``from_pretrained`` of transformers expects, after `prepare_for_wrapper`."""
    shape = encoder.stock_temperature_shape
    return {
        key: value.reshape(shape) if key.rpartition(".")[2] == encoder.temperature_name else value
        for key, value in state_dict.items()
    }


@contextlib.contextmanager
def fsdp_tower_methods(encoder: DualEncoder) -> Iterator[None]:
    """A context in which FSDP2 gathers the parameters for the methods of the two towers, as for forward.

    Outside of the context, the methods must be those of the class: CLIP's forward calls them, and FSDP2 would release
    the parameters of the whole model after the first call.
    """
    sharded = isinstance(encoder.model, FSDPModule)
    if not sharded:
        yield
        return
    names = ("get_image_features", "get_text_features")
    for name in names:
        register_fsdp_forward_method(encoder.model, name)
    try:
        yield
    finally:
        for name in names:
            delattr(encoder.model, name)


# ---- While the wrapped model trains ----


def without_compiler(model: Any) -> Any:
    """The module from which `torch.compile` created ``model``, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` compiles the model or a part of it."""
    return is_compiled_module(model) or any(module._compiled_call_impl for module in model.modules())


class Wrapper:
    """A model without a wrapper. A subclass for each wrapper overrides the methods that it needs.

    Args:
        model: the model as the training loop calls it.

    Attributes:
        model: the same, without `torch.compile` around it.
        synchronises: whether the last backward of a window exchanges gradients.
        backward_options: keyword arguments for `Accelerator.backward`.
    """

    synchronises = False
    backward_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, model: nn.Module) -> None:
        self.model = without_compiler(model)

    def begin_training(self, encoder: DualEncoder, broadcast_buffers: bool | None) -> None:
        """Called before the first window. ``broadcast_buffers`` is ``args.ddp_broadcast_buffers``."""

    def most_graphs(self, micro_batches: int) -> int:
        """The maximum number of graphs that a window of this many micro-batches can keep from its first pass.

        A wrapper prepares the exchange of gradients in the preceding forward, so the last micro-batch must be encoded
        in the second pass, unless it is the only one.
        """
        return max(1, micro_batches - 1) if self.synchronises else micro_batches

    def begin_window(self) -> None:
        """Called before the first forward of a window."""

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """A context for a micro-batch's forward and backward; gradients are exchanged for the ``last`` of a window."""
        return contextlib.nullcontext()

    def check_gradients(self) -> None:
        """Called after the first window.

        Raises:
            ValueError: trained parameters got no gradient although the wrapper waits for one.
        """

    def clamp_logit_scale(self, encoder: DualEncoder, maximum: float) -> None:
        """Clamps logit_scale, see `DualEncoder.clamp_logit_scale`; called after an optimizer step."""
        encoder.clamp_logit_scale(maximum)


class DDP(Wrapper):
    """A model in `torch.nn.parallel.DistributedDataParallel`."""

    synchronises = True

    def begin_training(self, encoder: DualEncoder, broadcast_buffers: bool | None) -> None:
        if broadcast_buffers is None:
            # Buffers that never change need no exchange, and a process that fails before it would block the others.
            self.model.broadcast_buffers = bool(encoder.batch_norms())

    def begin_window(self) -> None:
        # DDP would run both of these collectives in the next forward. A process that fails before that forward would
        # leave the others waiting there. The first one only has an effect once, after the first backward. The second
        # one must come before the state of the buffers is saved.
        self.model.reducer._rebuild_buckets()
        if self.model.will_sync_module_buffers():
            self.model._sync_buffers()

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        # Trainer has entered accelerate's no_sync, which does nothing for a launched group of one process.
        return contextlib.nullcontext() if last else self.model.no_sync()

    def check_gradients(self) -> None:
        if self.model.find_unused_parameters or self.model.static_graph:
            return
        named = self.model.module.named_parameters()
        if unused := [name for name, p in named if p.requires_grad and p.grad is None]:
            names = ", ".join(unused[:10]) + (" ..." if unused[10:] else "")
            raise ValueError(
                f"No embedding depends on {names}, but DDP waits for their gradients and does not average the others "
                "until it has them. Freeze unused parameters (requires_grad_(False)), or pass "
                "ddp_find_unused_parameters=True."
            )


class FSDP2(Wrapper):
    """A model sharded by `torch.distributed.fsdp.fully_shard`, for which Trainer enters accelerate's no_sync."""

    synchronises = True


class DeepSpeed(Wrapper):
    """A model in DeepSpeed's engine, ZeRO stage 1 or 2."""

    synchronises = True
    backward_options: ClassVar[Mapping[str, Any]] = {"scale_wrt_gas": False}  # or it divides by the accumulation steps

    def clamp_logit_scale(self, encoder: DualEncoder, maximum: float) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        super().clamp_logit_scale(encoder, maximum)
        # The optimizer overwrites the parameter with its own copy in fp32.
        if (copy := safe_get_full_fp32_param(encoder.temperature_parameters[0])) is not None:
            encoder.clamp_logit_scale(maximum, copy)
            safe_set_full_fp32_param(encoder.temperature_parameters[0], copy)


def wrapper_of(model: nn.Module, kind: DistributedType) -> Wrapper:
    """The `Wrapper` for ``model`` as the training loop calls it. ``kind`` is accelerate's."""
    if kind == DistributedType.FSDP:
        return FSDP2(model)
    if kind == DistributedType.DEEPSPEED:
        return DeepSpeed(model)
    if isinstance(without_compiler(model), DistributedDataParallel):
        return DDP(model)
    return Wrapper(model)
