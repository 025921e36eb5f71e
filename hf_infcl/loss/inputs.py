"""The arguments of `contrastive_loss` and the checks that refuse unusable ones on all processes alike."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..processes import Processes
from .strategies import OBJECTIVES, STRATEGIES

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Inputs:
    """The arguments of `contrastive_loss` as this process received them, not yet checked."""

    image_embeds: Tensor
    text_embeds: Tensor
    logit_scale: Tensor | float
    logit_bias: Tensor | float | None
    objective: str
    strategy: str
    backend: str
    pair_ids: Tensor | None

    def check(self, processes: Processes) -> None:
        """Raises the same ValueError on every process if the inputs of any are unusable or differ between them."""
        alone = processes.world_size == 1
        problem = self._problem(alone)
        if alone:
            if problem:
                raise ValueError(problem)
            return
        # Usable inputs cost one small all-gather. Texts are exchanged only for an error message.
        signatures = processes.agree([] if problem else self._signature())
        if not problem and all(signature == signatures[0] for signature in signatures):
            return
        texts = processes.gather_text(problem or self._description())
        listing = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise ValueError(
            "contrastive_loss needs embeddings of one shape and dtype, one logit_scale and logit_bias, and the same "
            "options on every process. Train on full batches only (drop_last) and with the same model everywhere. "
            f"The processes passed:\n{listing}"
        )

    def wanted(self) -> tuple[bool, ...]:
        """Whether image_embeds, text_embeds, logit_scale and logit_bias need a gradient."""
        arguments = (self.image_embeds, self.text_embeds, self.logit_scale, self.logit_bias)
        return tuple(torch.is_grad_enabled() and isinstance(a, Tensor) and a.requires_grad for a in arguments)

    def _problem(self, alone: bool) -> str:
        """The first thing that is wrong with the arguments of this process, as a sentence; empty if nothing is."""
        return (
            _unknown_option("objective", self.objective, OBJECTIVES)
            or _unknown_option("strategy", self.strategy, STRATEGIES)
            or _unknown_option("backend", self.backend, kernels.BACKENDS)
            or _not_embeddings("image_embeds", self.image_embeds)
            or _not_embeddings("text_embeds", self.text_embeds)
            or self._unfit_embeddings()
            or self._unfit_scalar("logit_scale", self.logit_scale, alone)
            or (self.logit_bias is not None and self._unfit_scalar("logit_bias", self.logit_bias, alone))
            or (self.pair_ids is not None and self._unfit_ids("pair_ids", self.pair_ids))
            or ""
        )

    def _unfit_embeddings(self) -> str:
        x, y = self.image_embeds, self.text_embeds
        if x.ndim != 2 or y.shape != x.shape or not x.numel():
            return (
                "image_embeds and text_embeds must both be [b, D] with b, D >= 1, got "
                f"{list(x.shape)} and {list(y.shape)}."
            )
        if x.dtype != y.dtype or x.dtype not in _DTYPES:
            return f"image_embeds and text_embeds must share a floating dtype, got {x.dtype} and {y.dtype}."
        if not torch.compiler.is_compiling() and (obstacle := kernels.obstacle(self.backend, x.device, x.dtype)):
            return obstacle
        if x.device != y.device:
            return f"image_embeds and text_embeds must be on one device, got {x.device} and {y.device}."
        return ""

    def _unfit_scalar(self, name: str, value: Any, alone: bool) -> str:
        if isinstance(value, Tensor):
            if value.numel() != 1:
                return f"{name} must have one element, got shape {list(value.shape)}."
            # Reading a value from a GPU stalls the stream, but several processes have to compare their values.
            if alone and self.image_embeds.device.type != "cpu":
                return ""
            value = value.detach()
        if torch.compiler.is_compiling():  # a compiled graph cannot read a value
            return ""
        try:
            finite = math.isfinite(value)
        except (TypeError, ValueError, OverflowError):
            return f"{name} must be a number or a tensor of one element, got a {type(value).__name__}."
        return "" if finite else f"{name} must be finite, got {float(value)}."

    def _unfit_ids(self, name: str, ids: Any) -> str:
        x = self.image_embeds
        if not isinstance(ids, Tensor):
            return f"{name} must be a tensor, [b] int64, got a {type(ids).__name__}."
        if ids.shape != x.shape[:1] or ids.dtype != torch.int64:
            return f"{name} must be [b] = [{len(x)}] int64, got {list(ids.shape)} {ids.dtype}."
        if ids.device != x.device:
            return f"{name} must be on the embeddings' device {x.device}, got {ids.device}."
        return ""

    def _signature(self) -> list[float]:
        """Numbers that have to be equal on all processes; the first says whether the arguments are usable."""
        return [
            1,
            *self.image_embeds.shape,
            _DTYPES.index(self.image_embeds.dtype),
            self.image_embeds.device.type == "cpu",
            _number(self.logit_scale),
            self.logit_bias is not None,
            0 if self.logit_bias is None else _number(self.logit_bias),
            OBJECTIVES.index(self.objective),
            list(STRATEGIES).index(self.strategy),
            self.pair_ids is not None,
            sum(want << bit for bit, want in enumerate(self.wanted())),
        ]

    def _description(self) -> str:
        """The arguments in words, for a message that compares those of several processes."""
        bias = "None" if self.logit_bias is None else f"{_number(self.logit_bias):g}"
        names = ("image_embeds", "text_embeds", "logit_scale", "logit_bias")
        gradients = [name for name, want in zip(names, self.wanted(), strict=True) if want]
        return (
            f"embeddings {list(self.image_embeds.shape)} {self.image_embeds.dtype} on {self.image_embeds.device.type}, "
            f"logit_scale {_number(self.logit_scale):.9g}, logit_bias {bias}, {self.objective}, {self.strategy}, "
            f"{'no' if self.pair_ids is None else 'with'} pair_ids, gradients for {', '.join(gradients) or 'nothing'}"
        )


def _unknown_option(name: str, value: Any, known: Collection[str]) -> str:
    return "" if value in known else f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}."


def _not_embeddings(name: str, value: Any) -> str:
    if isinstance(value, Tensor):
        return ""
    return (
        f"{name} must be a tensor, [b, D], got a {type(value).__name__}. Of a transformers model's output, pass "
        "image_embeds and text_embeds, or a tower's pooler_output."
    )


def _number(value: Tensor | float) -> float:
    """The value without its gradient, which torch would warn about."""
    return float(value.detach() if isinstance(value, Tensor) else value)
