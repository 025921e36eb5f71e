"""Layers of towers: which of the first are frozen, forwards in bf16, and fused layers.

Forwards in bf16 of a model whose weights are fp32 are what ``bf16_activations`` does in place of autocast. Each reads
copies of the weights that are rounded to bf16. The casts are a part of its graph, so a backward adds its gradient to
that of the weights themselves in fp32, micro-batch by micro-batch. The optimizer, clipping, averages, checkpoints and
the processes' exchange thus see the same tensors as under autocast.

Fused layers take fewer passes over memory than those of transformers, and keep fewer tensors for their backward. An
eager step of a ViT-B/16 spends two fifths of its time on operators that read and write activations and compute next to
nothing. Two changes, which leave the mathematics alone, save half of that:

- QuickGELU, the activation of OpenAI's CLIP models, is one kernel instead of three, and in the backward one instead of
  five; its input alone is kept.
- Under autocast a layer norm returns fp32, which the projections to queries, keys and values round and keep one by one.
  Here it is rounded once.

Parameters, their names and what is saved stay as they are. `torch.compile` fuses operators by itself.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import QuickGELUActivation

from .model_types import MODEL_TYPES

_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.")  # the outermost numbered module of a parameter


def depths(names: Iterable[str]) -> tuple[dict[str, int], int]:
    """The depth of each parameter of a tower, and the number of layers of the tower.

    The layers are the numbered modules (``layers.0.``, ``blocks.1.``) of which there are most; in a GroupViT they are
    its stages. The parameters of layer l of L, counted from 1, have the depth l. What comes before the layers, such as
    embeddings, has the depth 0, and what comes after them, such as the last norm and the pooling, L + 1.

    Args:
        names: of the parameters, in the order of their modules.
    """
    names = list(names)
    layers = _layers(names)
    count = max(layers.values(), default=0)
    depth_of: dict[str, int] = {}
    is_before = bool(layers)
    for name in names:
        is_before &= name not in layers
        depth_of[name] = 0 if is_before else layers.get(name, count + 1)
    return depth_of, count


def _layers(names: Iterable[str]) -> dict[str, int]:
    """The number of its layer, from 1, by the name of each parameter in one."""
    numbered: dict[str, dict[str, int]] = defaultdict(dict)
    for name in names:
        if match := _NUMBERED.match(name):
            numbered[match[1]][name] = int(match[2]) + 1
    return max(numbered.values(), key=lambda layers: len(set(layers.values())), default={})


def frozen_begin(tower: nn.Module) -> Iterator[nn.Module]:
    """The largest modules up to the last of the frozen first layers of a tower; none if its first layer trains."""
    if any(p.requires_grad for p in itertools.islice(tower.parameters(), 1)):
        return  # the usual case
    depth_of, layers = depths(dict(tower.named_parameters()))
    first_trained = min((depth_of[n] for n, p in tower.named_parameters() if p.requires_grad), default=layers + 1)
    if first_trained < 2:
        return
    waiting = dict(tower.named_children())
    while waiting:
        name, module = waiting.popitem()
        depths_within = [depth for n, depth in depth_of.items() if n.startswith(f"{name}.")]
        if depths_within and max(depths_within) < first_trained:
            yield module
        elif depths_within and min(depths_within) < first_trained:
            waiting |= {f"{name}.{child}": part for child, part in module.named_children()}


_WANTED = "infcl_computes_in_bf16"  # an attribute of a model
_IN_FP32 = ("logit_scale", "logit_bias", "temperature")


def is_in_bf16(model: nn.Module) -> bool:
    """Whether the forward of a model, unwrapped, computes in bf16."""
    return getattr(model, _WANTED, False)


@contextmanager
def errors_in_bf16(model: nn.Module) -> Iterator[None]:
    """Within the context, a forward in bf16 that computes a part in fp32 nevertheless raises a ValueError."""
    try:
        yield
    except RuntimeError as error:
        if not is_in_bf16(model) or "dtype" not in str(error):
            raise
        raise ValueError(
            f"A {type(model).__name__} cannot be trained with bf16_activations: its forward computes a part in fp32 "
            f"also if its weights are in bf16 ({error}). Leave that option out; bf16 alone works."
        ) from error


def compute_in_bf16(model: nn.Module, *, wanted: bool) -> None:
    """Lets the forward of a model compute in bf16 from now on, or again in the precision of its inputs and weights.

    Inputs and parameters of floating point, PEFT's among them, are rounded to bf16 in every forward, also within
    autocast. Two kinds are not: the temperature, whose gradient comes from the loss, and what batch norms read beside
    their running statistics. Methods other than ``forward``, such as ``get_image_features``, do not change.
    """
    if wanted and not hasattr(model, _WANTED):
        # Bound to the model, so that a deep copy of the model has a forward of its own.
        model.forward = MethodType(_in_bf16(model.forward), model)
    if wanted or hasattr(model, _WANTED):
        setattr(model, _WANTED, wanted)


def _in_bf16(forward: Any) -> Any:
    bound = hasattr(forward, "__func__")
    original = forward.__func__ if bound else forward

    @functools.wraps(original)
    def in_bf16(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = (self, *args) if bound else args
        if not is_in_bf16(self):
            return original(*first, **kwargs)
        inputs = {name: rounded(value) for name, value in kwargs.items()}
        device = next(self.parameters()).device.type
        with rounded_parameters(self), torch.autocast(device, enabled=False):
            return original(*first, **inputs)

    return in_bf16


def rounded(value: object) -> Any:
    """A tensor of floating point in bf16; all else as it is."""
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def rounded_parameters(model: nn.Module) -> Iterator[None]:
    """Within the context, modules have rounded parameters, with a graph to the parameters themselves."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        if not isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point() and name not in _IN_FP32
    ]
    try:
        for module, name, parameter in places:
            module._parameters[name] = parameter.to(torch.bfloat16)  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def can_fuse(device: torch.device, backend: str = "auto") -> bool:
    """Whether the kernels run on a device: on AMD's GPUs, and on Nvidia's since Ampere, wherever there is Triton.

    The ``backend`` "torch", as of the loss, leaves them out: Triton may be installed and yet unable to compile.
    """
    if device.type != "cuda" or backend == "torch" or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def fuse_layers(model: nn.Module, *, wanted: bool = True) -> None:
    """Replaces the classes of all layers of a model that can be fused, if that is wanted; fused ones stay."""
    for module in model.modules() if wanted else ():
        if type(module) is QuickGELUActivation:
            module.__class__ = QuickGELU
        norm = getattr(module, "layer_norm1", None)
        if type(norm) is nn.LayerNorm and _normalises_first(module):
            norm.__class__ = RoundedLayerNorm


def _normalises_first(layer: nn.Module) -> bool:
    """Whether nothing but its attention reads the output of a layer's first norm, as in dual encoders of transformers.

    Others add that output to what the attention returns, and rounding would reach the sums of their residual stream.
    """
    path = type(layer).__module__.split(".")
    of_dual_encoder = path[:2] == ["transformers", "models"] and path[2] in MODEL_TYPES
    return of_dual_encoder and type(layer).__name__.endswith(("EncoderLayer", "VisionLayer"))


class RoundedLayerNorm(nn.LayerNorm):
    """A layer norm that computes in fp32 under autocast, like any other, and returns the dtype of autocast."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        device = input.device.type
        return output.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else output


class QuickGELU(QuickGELUActivation):
    """x·σ(1.702x) of a tensor of any shape, in its dtype."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or input.dtype == torch.float64:
            return super().forward(input)
        return _QuickGELU.apply(input)


class _QuickGELU(torch.autograd.Function):
    """Computes on a GPU by `triton_quick_gelu`; elsewhere it keeps as many bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if x.is_cuda:
            from . import triton_quick_gelu

            return triton_quick_gelu.forward(x.contiguous())
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # by create_graph=True: only operators have a derivative
            gate = torch.sigmoid(1.702 * x)
            return grad * gate * (1 + 1.702 * x * (1 - gate))
        if x.is_cuda:
            from . import triton_quick_gelu

            return triton_quick_gelu.backward(x.contiguous(), grad.contiguous())
        gate = torch.sigmoid(1.702 * x)
        return (1 - gate).mul_(1.702 * x).add_(1).mul_(gate).mul_(grad)
