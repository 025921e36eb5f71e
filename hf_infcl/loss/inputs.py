"""The arguments of `contrastive_loss`, and the checks that reject unusable arguments on all processes alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..processes.collectives import Processes
from .batch import RowCounts, Wanted
from .objectives import OBJECTIVES
from .strategies import STRATEGIES

DIRECTIONS = ("both", "image_to_text")
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
    image_ids: Tensor | None
    text_ids: Tensor | None
    negative_texts: Tensor | None
    directions: str = DIRECTIONS[0]

    def check(self, processes: Processes) -> RowCounts:
        """Checks the arguments and returns the numbers of rows on all processes.

        Raises:
            ValueError: on every process alike, if the inputs of one process are unusable or differ from another's.
        """
        problem = self._problem()
        if processes.world_size == 1:
            if problem:
                raise ValueError(problem)
            return RowCounts(*((count,) for count in self._counts()))
        # Usable inputs cost one small all-gather. Texts are exchanged only for an error message.
        counts = [0, 0, 0] if problem else self._counts()
        numbers = processes.agree([*counts, *([] if problem else self._signature())])
        signatures = [signature for _, _, _, *signature in numbers]
        if not problem and all(signature == signatures[0] for signature in signatures):
            return RowCounts(*(tuple(map(int, column)) for column in zip(*(row[:3] for row in numbers), strict=True)))
        raise self._error_of_all(processes, problem)

    def compare(self, processes: Processes, scalars: list[list[float]]) -> None:
        """Rejects scalars that `check` has not read, if they are not finite or differ between the processes.

        Args:
            scalars: logit_scale and logit_bias of every process.

        Raises:
            ValueError: on every process alike.
        """
        if all(values == scalars[0] and all(map(math.isfinite, values)) for values in scalars):
            return
        problem = _not_finite("logit_scale", self.logit_scale) or (
            _not_finite("logit_bias", self.logit_bias) if self.logit_bias is not None else ""
        )
        raise self._error_of_all(processes, problem)

    def _error_of_all(self, processes: Processes, problem: str) -> ValueError:
        """The error that every process raises. For each process it lists the inputs, or why they are unusable."""
        texts = processes.gather_objects(problem or self._description())
        listing = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        return ValueError(
            "contrastive_loss needs the same width and dtype of embeddings, the same logit_scale and logit_bias, and "
            "the same arguments and options on every process. Train with the same model everywhere. "
            f"The processes passed:\n{listing}"
        )

    def wanted(self) -> Wanted:
        """Whether image_embeds, text_embeds, negative_texts, logit_scale and logit_bias need a gradient."""
        arguments = (self.image_embeds, self.text_embeds, self.negative_texts, self.logit_scale, self.logit_bias)
        return Wanted(*(torch.is_grad_enabled() and isinstance(a, Tensor) and a.requires_grad for a in arguments))

    def _counts(self) -> list[int]:
        return [len(t) if t is not None else 0 for t in (self.image_embeds, self.text_embeds, self.negative_texts)]

    def _problem(self) -> str:
        """The first thing that is wrong with the arguments of this process, as a sentence; empty if nothing is."""
        return (
            _unknown_option("objective", self.objective, OBJECTIVES)
            or _unknown_option("strategy", self.strategy, STRATEGIES)
            or _unknown_option("backend", self.backend, kernels.BACKENDS)
            or _unknown_option("directions", self.directions, DIRECTIONS)
            or _not_embeddings("image_embeds", self.image_embeds)
            or _not_embeddings("text_embeds", self.text_embeds)
            or self._contradiction()
            or self._unfit_embeddings()
            or (self.negative_texts is not None and self._unfit_negatives())
            or self._unfit_scalar("logit_scale", self.logit_scale)
            or (self.logit_bias is not None and self._unfit_scalar("logit_bias", self.logit_bias))
            or self._unfit_ids("pair_ids", self.pair_ids, self.image_embeds)
            or self._unfit_ids("image_ids", self.image_ids, self.image_embeds)
            or self._unfit_ids("text_ids", self.text_ids, self.text_embeds)
            or ""
        )

    def _contradiction(self) -> str:
        if self.directions != "both" and (self.objective != "softmax" or self.image_ids is not None):
            return (
                f"directions={self.directions!r} is for the softmax loss of pairs: leave out image_ids and text_ids, "
                f"and choose objective='softmax', got {self.objective!r}."
            )
        names = [name for name in ("image_ids", "text_ids") if getattr(self, name) is not None]
        if len(names) == 1:
            return f"image_ids and text_ids must be passed together, got only {names[0]}."
        if names and self.pair_ids is not None:
            return (
                "pair_ids exclude cells with equal ids, whereas image_ids and text_ids make them positives: pass one "
                "or the other, not both."
            )
        return ""

    def _unfit_embeddings(self) -> str:
        x, y = self.image_embeds, self.text_embeds
        shapes = f"{list(x.shape)} and {list(y.shape)}"
        if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or not x.numel() or not y.numel():
            return f"image_embeds must be [n, D] and text_embeds [m, D] with n, m, D >= 1, got {shapes}."
        if len(x) != len(y) and self.text_ids is None:
            return (
                f"Pairs need one text for each image, got {shapes}. Pass image_ids and text_ids to say which texts "
                "belong to which images, or the texts that belong to none as negative_texts."
            )
        if x.dtype != y.dtype or x.dtype not in _DTYPES:
            return f"image_embeds and text_embeds must share a floating dtype, got {x.dtype} and {y.dtype}."
        if not torch.compiler.is_compiling() and (obstacle := kernels.obstacle(self.backend, x.device, x.dtype)):
            return obstacle
        if x.device != y.device:
            return f"image_embeds and text_embeds must be on one device, got {x.device} and {y.device}."
        return ""

    def _unfit_negatives(self) -> str:
        y, negatives = self.text_embeds, self.negative_texts
        if problem := _not_embeddings("negative_texts", negatives):
            return problem
        assert negatives is not None
        if negatives.ndim != 2 or negatives.shape[1] != y.shape[1]:
            return f"negative_texts must be [h, D] = [h, {y.shape[1]}], got {list(negatives.shape)}."
        if negatives.dtype != y.dtype or negatives.device != y.device:
            return (
                f"negative_texts must have the texts' dtype and device, {y.dtype} on {y.device}, got "
                f"{negatives.dtype} on {negatives.device}."
            )
        return ""

    def scalars_are_read(self) -> bool:
        """Whether `check` reads the scalars. Reading those of a GPU would wait for its queued kernels."""
        return self.image_embeds.device.type == "cpu"

    def _unfit_scalar(self, name: str, value: object) -> str:
        if isinstance(value, Tensor):
            if value.numel() != 1:
                return f"{name} must have one element, got shape {list(value.shape)}."
            if not self.scalars_are_read():
                return ""
        return _not_finite(name, value)

    def _unfit_ids(self, name: str, ids: object, rows: Tensor) -> str:
        if ids is None:
            return ""
        if not isinstance(ids, Tensor):
            return f"{name} must be a tensor, [{len(rows)}] int64, got a {type(ids).__name__}."
        if ids.shape != rows.shape[:1] or ids.dtype != torch.int64:
            return f"{name} must be [{len(rows)}] int64, got {list(ids.shape)} {ids.dtype}."
        if ids.device != rows.device:
            return f"{name} must be on the embeddings' device {rows.device}, got {ids.device}."
        return ""

    def _signature(self) -> list[float]:
        """Numbers that must be equal on all processes. The first, 1, says that the arguments are usable."""
        return [
            1,
            self.image_embeds.shape[1],
            _DTYPES.index(self.image_embeds.dtype),
            self.image_embeds.device.type == "cpu",
            _number(self.logit_scale) if self.scalars_are_read() else 0,
            self.logit_bias is not None,
            _number(self.logit_bias) if self.logit_bias is not None and self.scalars_are_read() else 0,
            list(OBJECTIVES).index(self.objective),
            list(STRATEGIES).index(self.strategy),
            DIRECTIONS.index(self.directions),
            _bits(t is not None for t in (self.pair_ids, self.text_ids, self.negative_texts)),
            _bits(self.wanted()),
        ]

    def _description(self) -> str:
        """The arguments in words, for a message that compares those of several processes."""
        bias = "None" if self.logit_bias is None else f"{_number(self.logit_bias):g}"
        names = ("image_embeds", "text_embeds", "negative_texts", "logit_scale", "logit_bias")
        gradients = [name for name, want in zip(names, self.wanted(), strict=True) if want]
        ids = [name for name in ("pair_ids", "image_ids", "text_ids") if getattr(self, name) is not None]
        shapes = f"{list(self.image_embeds.shape)} and {list(self.text_embeds.shape)}"
        if self.negative_texts is not None:
            shapes += f" with negative_texts {list(self.negative_texts.shape)}"
        return (
            f"embeddings {shapes} {self.image_embeds.dtype} on {self.image_embeds.device.type}, "
            f"logit_scale {_number(self.logit_scale):.9g}, logit_bias {bias}, {self.objective}, {self.strategy}, "
            f"directions {self.directions}, "
            f"{' and '.join(ids) or 'no ids'}, gradients for {', '.join(gradients) or 'nothing'}"
        )


def _unknown_option(name: str, value: object, known: Collection[str]) -> str:
    return "" if value in known else f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}."


def _not_embeddings(name: str, value: object) -> str:
    if isinstance(value, Tensor):
        return ""
    return (
        f"{name} must be a tensor, [b, D], got a {type(value).__name__}. From the output of a transformers model pass "
        "image_embeds and text_embeds, or the pooler_output of a tower."
    )


def _not_finite(name: str, value: Any) -> str:
    """Why a scalar is not a finite number, as a sentence; empty if it is one."""
    if torch.compiler.is_compiling():  # a compiled graph cannot read a value
        return ""
    try:
        finite = math.isfinite(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError):
        return f"{name} must be a number or a tensor of one element, got a {type(value).__name__}."
    return "" if finite else f"{name} must be finite, got {float(value)}."


def _number(value: Tensor | float) -> float:
    """The value without its gradient, which torch would warn about."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def _bits(flags: Iterable[bool]) -> int:
    return sum(flag << bit for bit, flag in enumerate(flags))
