"""The arguments of `contrastive_loss`, and the checks that reject unusable arguments on all processes alike."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
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
    logit_bias: Tensor | float | None = None
    objective: str = "softmax"
    strategy: str = "ring"
    backend: str = "auto"
    pair_ids: Tensor | None = None
    image_ids: Tensor | None = None
    text_ids: Tensor | None = None
    negative_texts: Tensor | None = None
    directions: str = DIRECTIONS[0]

    def check(self, processes: Processes) -> RowCounts:
        """Checks the arguments and returns the numbers of rows on all processes.

        Raises:
            ValueError: on every process alike, if the inputs of one process are unusable or differ from another's.
        """
        problem = next(self._problems(), "")
        if processes.world_size == 1:
            if problem:
                raise ValueError(problem)
            return RowCounts(*((count,) for count in self._counts()))
        # Usable inputs cost one small all-gather. Texts are exchanged only for an error message.
        numbers = processes.agree([] if problem else [*self._counts(), *self._signature()])
        if not problem and all(row[3:] == numbers[0][3:] for row in numbers):
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
        problems = itertools.chain.from_iterable(_not_finite(*scalar) for scalar in self._scalars().items())
        raise self._error_of_all(processes, next(problems, ""))

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

    def _problems(self) -> Iterator[str]:
        """Sentences that say what is wrong with the arguments of this process. Checks rely on those before them."""
        known: dict[str, Collection[str]] = {"objective": OBJECTIVES, "strategy": STRATEGIES}
        for name, names in (known | {"backend": kernels.BACKENDS, "directions": DIRECTIONS}).items():
            if getattr(self, name) not in names:
                yield f"{name} must be one of {', '.join(map(repr, names))}, got {getattr(self, name)!r}."
        for name in ("image_embeds", "text_embeds", "negative_texts"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and (value is not None or name != "negative_texts"):
                yield (
                    f"{name} must be a tensor, [b, D], got a {type(value).__name__}. From the output of a transformers "
                    "model pass image_embeds and text_embeds, or the pooler_output of a tower."
                )
        yield from self._contradictions()
        yield from self._unfit_embeddings()
        for name, value in self._scalars().items():
            if isinstance(value, Tensor) and value.numel() != 1:
                yield f"{name} must have one element, got shape {list(value.shape)}."
            if not isinstance(value, Tensor) or self.scalars_are_read():
                yield from _not_finite(name, value)
        rows_of = {"pair_ids": self.image_embeds, "image_ids": self.image_embeds, "text_ids": self.text_embeds}
        for name, rows in rows_of.items():
            ids = getattr(self, name)
            if ids is None:
                continue
            if not isinstance(ids, Tensor):
                yield f"{name} must be a tensor, [{len(rows)}] int64, got a {type(ids).__name__}."
            if ids.shape != rows.shape[:1] or ids.dtype != torch.int64:
                yield f"{name} must be [{len(rows)}] int64, got {list(ids.shape)} {ids.dtype}."
            if ids.device != rows.device:
                yield f"{name} must be on the embeddings' device {rows.device}, got {ids.device}."

    def _contradictions(self) -> Iterator[str]:
        if self.directions != "both" and (self.objective != "softmax" or self.image_ids is not None):
            yield (
                f"directions={self.directions!r} is for the softmax loss of pairs: leave out image_ids and text_ids, "
                f"and choose objective='softmax', got {self.objective!r}."
            )
        names = [name for name in ("image_ids", "text_ids") if getattr(self, name) is not None]
        if len(names) == 1:
            yield f"image_ids and text_ids must be passed together, got only {names[0]}."
        if names and self.pair_ids is not None:
            yield (
                "pair_ids exclude cells with equal ids, whereas image_ids and text_ids make them positives: pass one "
                "or the other, not both."
            )

    def _unfit_embeddings(self) -> Iterator[str]:
        x, y, negatives = self.image_embeds, self.text_embeds, self.negative_texts
        shapes = f"{list(x.shape)} and {list(y.shape)}"
        if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or not x.numel() or not y.numel():
            yield f"image_embeds must be [n, D] and text_embeds [m, D] with n, m, D >= 1, got {shapes}."
        if len(x) != len(y) and self.text_ids is None:
            yield (
                f"Pairs need one text for each image, got {shapes}. Pass image_ids and text_ids to say which texts "
                "belong to which images, or the texts that belong to none as negative_texts."
            )
        if x.dtype != y.dtype or x.dtype not in _DTYPES:
            yield f"image_embeds and text_embeds must share a floating dtype, got {x.dtype} and {y.dtype}."
        if not torch.compiler.is_compiling() and (obstacle := kernels.obstacle(self.backend, x.device, x.dtype)):
            yield obstacle
        if x.device != y.device:
            yield f"image_embeds and text_embeds must be on one device, got {x.device} and {y.device}."
        if negatives is None:
            return
        if negatives.ndim != 2 or negatives.shape[1] != y.shape[1]:
            yield f"negative_texts must be [h, D] = [h, {y.shape[1]}], got {list(negatives.shape)}."
        if negatives.dtype != y.dtype or negatives.device != y.device:
            yield (
                f"negative_texts must have the texts' dtype and device, {y.dtype} on {y.device}, got "
                f"{negatives.dtype} on {negatives.device}."
            )

    def scalars_are_read(self) -> bool:
        """Whether `check` reads the scalars. Reading those of a GPU would wait for its queued kernels."""
        return self.image_embeds.device.type == "cpu"

    def _scalars(self) -> dict[str, Any]:
        """The scalars that were passed, by name."""
        bias = {} if self.logit_bias is None else {"logit_bias": self.logit_bias}
        return {"logit_scale": self.logit_scale, **bias}

    def _signature(self) -> list[float]:
        """Numbers that must be equal on all processes. The first, 1, says that the arguments are usable."""
        return [
            1,
            self.image_embeds.shape[1],
            _DTYPES.index(self.image_embeds.dtype),
            self.image_embeds.device.type == "cpu",
            self.logit_bias is not None,
            *(_number(scalar) if self.scalars_are_read() else 0 for scalar in self._scalars().values()),
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


def _not_finite(name: str, value: Any) -> Iterator[str]:
    """Why a scalar is not a finite number, as a sentence; nothing if it is one."""
    if torch.compiler.is_compiling():  # a compiled graph cannot read a value
        return
    try:
        if not math.isfinite(value.detach() if isinstance(value, Tensor) else value):
            yield f"{name} must be finite, got {float(value)}."
    except (TypeError, ValueError, OverflowError):
        yield f"{name} must be a number or a tensor of one element, got a {type(value).__name__}."


def _number(value: Tensor | float) -> float:
    """The value without its gradient, which torch would warn about."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def _bits(flags: Iterable[bool]) -> int:
    return sum(flag << bit for bit, flag in enumerate(flags))
