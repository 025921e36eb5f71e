"""Forwards in bf16 of a model whose weights are fp32: what ``bf16_activations`` does in place of autocast.

Each forward reads copies of the weights that are rounded to bf16. The casts are a part of its graph, so a backward adds
its gradient to that of the weights themselves in fp32, micro-batch by micro-batch. The optimizer, clipping, averages,
checkpoints and the processes' exchange thus see the same tensors as under autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

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
