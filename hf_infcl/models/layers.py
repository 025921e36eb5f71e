"""Layers of towers: which of the first are frozen, and fused layers.

Fused layers take fewer passes over memory than those of transformers, and keep fewer tensors for their backward. An
eager step of a ViT-B/16 spends two fifths of its time on operators that read and write activations and compute next to
nothing. These changes leave the mathematics alone:

- QuickGELU, the activation of OpenAI's CLIP models, is one kernel instead of three, and in the backward one instead of
  five; its input alone is kept.
- Under autocast a layer norm returns fp32, which every product that reads it rounds and keeps. The norms of a layer
  that only products read return what is rounded once.
- The patch embedding is a product. A convolution takes copies in other layouts.

Parameters, their names and what is saved stay as they are. Where layers are compiled, QuickGELU leaves its kernel to
the compiler.
"""

import importlib.util
import itertools
import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import QuickGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from .model_types import MODEL_TYPES

_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.")  # the outermost numbered module of a parameter


def depths(tower: nn.Module) -> tuple[dict[str, int], int]:
    """The depth of each parameter of a tower, by its name, and the number of layers of the tower.

    The layers are the numbered modules (``layers.0.``, ``blocks.1.``) of which there are most; in a GroupViT they are
    its stages. The parameters of layer l of L, counted from 1, have the depth l. What comes before the layers, such as
    embeddings, has the depth 0, and what comes after them, such as the last norm and the pooling, L + 1.
    """
    names = [name for name, _ in tower.named_parameters()]
    numbered: dict[str, dict[str, int]] = defaultdict(dict)
    for name in names:
        if match := _NUMBERED.match(name):
            numbered[match[1]][name] = int(match[2]) + 1
    layers = max(numbered.values(), key=lambda layers: len(set(layers.values())), default={})
    count = max(layers.values(), default=0)
    before = itertools.takewhile(lambda name: name not in layers, names) if layers else ()
    return dict.fromkeys(names, count + 1) | layers | dict.fromkeys(before, 0), count


def frozen_begin(tower: nn.Module) -> list[nn.Module]:
    """The modules of the frozen first layers of a tower and of what comes before these."""
    depth_of, layers = depths(tower)
    first_trained = min((depth_of[n] for n, p in tower.named_parameters() if p.requires_grad), default=layers + 1)
    if first_trained < 2:
        return []
    deepest: dict[str, int] = defaultdict(int)  # the depth of the last parameter of each module
    for name, depth in depth_of.items():
        while name := name.rpartition(".")[0]:
            deepest[name] = max(deepest[name], depth)
    return [tower.get_submodule(name) for name, depth in deepest.items() if depth < first_trained]


def layers_of(tower: nn.Module) -> list[nn.Module]:
    """The layers of a tower, as transformers marks them, without those within others."""
    found = [module for module in tower.modules() if isinstance(module, GradientCheckpointingLayer)]
    within = {part for layer in found for part in layer.modules() if part is not layer}
    return [layer for layer in found if layer not in within]


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
        if type(module) is nn.Conv2d and _is_product(module):
            module.__class__ = PatchProduct
        for norm in (getattr(module, "layer_norm1", None), getattr(module, "layer_norm2", None)):
            if type(norm) is nn.LayerNorm and _normalises_first(module):
                norm.__class__ = RoundedLayerNorm


def _normalises_first(layer: nn.Module) -> bool:
    """Whether only products of its attention and its MLP read a layer's norms, as in dual encoders of transformers.

    Others add what a norm returns to their residual stream, whose sums rounding would reach.
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


def _is_product(convolution: nn.Conv2d) -> bool:
    """Whether it reads patches next to each other, each with all its channels."""
    apart = convolution.stride == convolution.kernel_size != (1, 1) and convolution.padding in ((0, 0), "valid")
    return apart and convolution.dilation == (1, 1) and convolution.groups == 1


class PatchProduct(nn.Conv2d):
    """A convolution of patches next to each other: the same sums, in another order."""

    def forward(self, input: Tensor) -> Tensor:
        (height, width), (images, channels, rows, columns) = self.kernel_size, input.shape
        down, across = rows // height, columns // width  # what is left over at the edges is no patch
        patches = input[:, :, : down * height, : across * width].reshape(images, channels, down, height, across, width)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(images, down * across, -1)
        output = nn.functional.linear(patches, self.weight.flatten(1), self.bias)
        return output.transpose(1, 2).unflatten(2, (down, across))


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
        if x.is_cuda and not torch.is_grad_enabled():  # create_graph=True: only operators have a derivative
            from . import triton_quick_gelu

            return triton_quick_gelu.backward(x.contiguous(), grad.contiguous())
        gate = torch.sigmoid(1.702 * x)
        return grad * gate * (1 + 1.702 * x * (1 - gate))
