"""Counts memory and operations of a micro-batch without weights or a GPU, or measures one.

A count runs on torch's fake tensors, which have no content, as if on a CPU: its autocast and its fused attention keep
as many bytes as those of a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import flop_registry
from transformers import AutoModel, PretrainedConfig

from ...conversion.models import load_config
from ...encoders.dual_encoder import DualEncoder
from ...encoders.fused_layers import can_fuse, fuse_layers
from ...encoders.image_size import config_for_images
from ...encoders.in_bf16 import is_in_bf16, rounded, rounded_parameters
from ...optimizers.groups import BY_MUON, roles
from .costs import EFFECTS, Counts, Tower, Work

MOST_TOKENS = 77  # the length of captions, even for text towers that accept longer texts
Args = Sequence[object]
Kwargs = Mapping[str, object]
_ATEN = torch.ops.aten
# By operator. That of a CPU's attention has the formula of a GPU's.
_FLOPS = flop_registry | {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}


def count(config: PretrainedConfig, pairs: int, *, autocast: bool = True, **options: Any) -> Counts:
    """Counts a micro-batch of the model that a config describes, as it trains with these options, see `micro_batch`.

    Without ``autocast``, which stands for ``bf16=True``, it computes in fp32.

    Raises:
        ValueError: the model is not a dual encoder, cannot train with the options, or its forward needs the content of
            tensors.
    """
    encoder, inputs = micro_batch(config, pairs, torch.device("meta"), **options)
    model = encoder.model
    try:
        dim, peak, image, text = _run(encoder, inputs, autocast=autocast)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"A {type(model).__name__} cannot be counted without its weights: {type(error).__name__}: {error}"
        ) from error
    parameters = dict(model.named_parameters())
    return Counts(
        parameters=sum(p.numel() for p in parameters.values()),
        trained=sum(p.numel() for p in parameters.values() if p.requires_grad),
        by_muon=sum(parameters[name].numel() for name, role in roles(model).items() if role.name in BY_MUON),
        dim=dim,
        pixels=inputs["pixel_values"][0].numel(),
        objective=encoder.objective,
        image=image,
        text=text,
        peak=peak,
        teachers=tuple(_count_teacher(name, pairs) for name in options.get("teacher") or ()),
    )


def _run(encoder: DualEncoder, inputs: Mapping[str, Tensor], *, autocast: bool) -> tuple[int, int, Tower, Tower]:
    """Runs a micro-batch. Returns the dimensions of its embeddings, the most bytes in use, and both towers."""
    model = encoder.model
    with FakeTensorMode(allow_non_fake_inputs=True):  # the model is on the meta device
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)  # as in every micro-batch except the first
        batch = {name: torch.empty_like(one, device="cpu") for name, one in inputs.items()}
        precision: AbstractContextManager[object] = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        if is_in_bf16(model):
            batch, precision = {name: rounded(one) for name, one in batch.items()}, rounded_parameters(model)
        with _FusedAttention(), _Operations() as seen:
            with precision:
                embeds = [encoder.encode_images(batch)]
                of_images = seen.work
                embeds.append(encoder.encode_texts(batch, checked=True))
            dim, towers = embeds[0].shape[1], []
            for forward in (seen.work - of_images, of_images):  # backward through the last one first
                work, live, last = seen.work, seen.live, embeds.pop()
                if last.requires_grad:
                    last.sum().backward()
                    del last
                    towers.append(Tower(live - seen.live, forward, forward, seen.work - work))
                else:
                    towers.append(Tower(forward=forward))
    text, image = towers
    return dim, seen.peak, image, text


@cache
def _count_teacher(name: str, pairs: int) -> Counts:
    try:
        return count(load_config(name), pairs)
    except ValueError as error:
        raise ValueError(f"The teacher {name} cannot be planned. {error}") from error


def measure(
    config: PretrainedConfig, rows: int, device: torch.device, *, autocast: bool = True, **options: object
) -> tuple[float, int]:
    """Runs a micro-batch forward and backward, after others that are not measured; arguments as for `count`.

    Returns:
        The seconds, and the peak GPU memory in bytes including the weights and their gradients (0 on a CPU).

    Raises:
        ValueError: there is no GPU, or it has too little memory.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--measure needs a GPU, or --use_cpu. Omit it to predict from the config alone.")
    encoder, batch = micro_batch(config, rows, device, **options)

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            embeds = encoder.embed(encoder.model, batch)
        torch.stack([e.float().sum() for e in embeds if e.requires_grad]).sum().backward()

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    if on_gpu := device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        seconds = timer.timeit(1).mean
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"A micro-batch of {rows} does not fit into this machine's {torch.cuda.get_device_name(device)}. Omit "
            "--measure, or plan with the --gpu_memory of this GPU."
        ) from error
    return seconds, torch.cuda.max_memory_allocated(device) if on_gpu else 0


def micro_batch(
    config: PretrainedConfig, rows: int, device: torch.device, **options: Any
) -> tuple[DualEncoder, dict[str, Tensor]]:
    """A model and a micro-batch of its last steps: black images, and captions of full length of token 0.

    The model has random weights in fp32. It is prepared as for a training on a GPU with these options: those that
    change a model in `EFFECTS`, ``image_size``, ``max_text_tokens`` and ``torch_compile``. Others are ignored.
    """
    config = config_for_images(config, options.get("image_size"))
    vision = config.vision_config
    if not hasattr(vision, "image_size"):
        raise ValueError(
            f"Models of type {config.model_type} have no image size, so no micro-batch can be planned. Train for a few "
            "steps instead: the log shows the peak memory and the images per second."
        )
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    longest = getattr(config.text_config, "max_position_embeddings", MOST_TOKENS)
    tokens = min(longest, options.get("max_text_tokens") or MOST_TOKENS)
    with device:
        encoder = DualEncoder(AutoModel.from_config(config, dtype=torch.float32).train())
        inputs = {
            "pixel_values": torch.zeros(rows, getattr(vision, "num_channels", 3), height, width),
            "input_ids": torch.zeros(rows, tokens, dtype=torch.long),
            "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
        }
    encoder.freeze(None)  # what no embedding depends on
    for name, effect in EFFECTS.items():
        value = None if name == "patch_dropout" and options.get("full_tokens_last") else options.get(name)
        if effect.model is not None and value is not None and value is not False:
            effect.model(encoder, value)
    fuses = device.type == "meta" or can_fuse(device)  # a plan is for a GPU
    fuse_layers(encoder.model, wanted=fuses and not options.get("torch_compile"))
    encoder.eval_frozen_parts()
    return encoder, inputs


class _FusedAttention(TorchFunctionMode):
    """Computes attention without dropout: with it, a CPU would not fuse attention, as a GPU does."""

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        changes = {"dropout_p": 0.0} if function is F.scaled_dot_product_attention else {}
        return function(*args, **{**(kwargs or {}), **changes})


class _Operations(TorchDispatchMode):
    """Counts operations, and follows the bytes of the tensors that they create while these are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.live, self.peak = Work(), 0, 0

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if function is _ATEN._local_scalar_dense.default:
            return True  # the models ask whether all tokens are to be attended to
        out = function(*args, **kwargs)
        created = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        known = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for storage in (one.untyped_storage() for one in created):
            if storage._cdata not in known:
                known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        if created and not function.is_view:
            flops = _FLOPS.get(function._overloadpacket)
            self.work += Work(float(flops(*args, **kwargs, out_val=out)) if flops else 0.0, 1)
        return out

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes
