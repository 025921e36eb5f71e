"""A dual encoder of any two modules, and outputs of towers that are kept instead of being computed again."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput


def return_dict_for(module: nn.Module) -> dict[str, bool]:
    """``return_dict=True`` for a module of transformers, or of one's own that names it; nothing for others."""
    of_transformers = type(module).__module__.startswith("transformers.")
    takes = of_transformers or "return_dict" in inspect.signature(module.forward).parameters
    return {"return_dict": True} if takes else {}


def part_of(output: object, name: str) -> Any:
    """A part of a module's output, which may be a dict; None if it is not there."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def pooled(output: object, module: nn.Module, what: str, *, of_transformers: bool = False) -> Tensor:
    """One vector for each input, [n, H]: the output of a tower, or its ``pooler_output``.

    Args:
        what: its name for the error.
        of_transformers: whether only outputs of transformers are taken, because a forward will get the vectors in one.

    Raises:
        ValueError: it is neither.
    """
    features = output if isinstance(output, Tensor) else part_of(output, "pooler_output")
    is_right = isinstance(features, Tensor) and features.ndim == 2
    if not is_right or (of_transformers and not isinstance(output, ModelOutput)):
        every = "a tensor [inputs, features], or pooler_output of an object or a dict"
        forms = "pooler_output of an output of transformers" if of_transformers else every
        raise ValueError(
            f"The {what}, a {type(module).__name__}, must return one vector for each input, as {forms}, got "
            f"{_described(output)}."
        )
    return features


def embeds_of(output: object, model: nn.Module) -> tuple[Tensor, Tensor]:
    """``image_embeds`` and ``text_embeds`` of a model's output.

    Raises:
        ValueError: it has not both.
    """
    images, texts = part_of(output, "image_embeds"), part_of(output, "text_embeds")
    if images is None or texts is None:
        raise ValueError(
            f"The forward of a {type(model).__name__} must return image_embeds and text_embeds, as attributes of an "
            f"object or in a dict, got {_described(output)}."
        )
    return images, texts


def _described(output: object) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {list(output.shape)}"
    return f"a {type(output).__name__}{f' with {list(output)}' if isinstance(output, Mapping) else ''}"


@contextlib.contextmanager
def remembered(tower: nn.Module, outputs: dict[str, object], name: str) -> Iterator[None]:
    """Within the context a frozen tower stores its output in ``outputs``, or returns the stored one.

    Whatever hooks of checkpointing or of peft do to its embeddings, its output gets no graph.
    """
    forward = tower.forward

    def first(*args: object, **kwargs: object) -> Any:
        with torch.no_grad():
            full = forward(*args, **kwargs)
        if part_of(full, "last_hidden_state") is None:  # of one's own
            outputs[name] = full
            return full
        # The models read the pooled vector or the first position; a window of whole sequences would be large.
        first_position = full.last_hidden_state[:, :1].clone()
        outputs[name] = BaseModelOutputWithPooling(first_position, part_of(full, "pooler_output"))
        return full

    with patch.object(tower, "forward", (lambda *args, **kwargs: outputs[name]) if name in outputs else first):
        yield


class PlaceholderText:
    """The text tower's output for a placeholder, which stands in for the texts of micro-batches that have none.

    A model's forward needs at least one text. Its embedding is dropped, so its values do not matter, and the tower has
    to run only once. But they have to be finite: in the backward they are multiplied by gradients of 0.
    """

    def __init__(self, tower: nn.Module, projection: nn.Module | None) -> None:
        self._tower, self._projection = tower, projection
        self._output: Any = None
        self._kind: Any = None  # dtype and device of the tower that returned it
        # The same function for all forwards, because a compiled model would be compiled again for another one.
        self._forward = self._again

    def known(self) -> bool:
        """Whether the output is there, in the tower's dtype and on its device."""
        return self._kind == self._kind_of_tower()

    def learn(self, model: nn.Module, forward: Callable[[], object]) -> None:
        """Keeps the output, unless it is not finite. ``forward`` calls the model on any images and one text.

        The model is in evaluation mode meanwhile: the forward draws no random numbers.
        """
        outputs: dict[str, Any] = {}
        # A compiled forward could not store the output.
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.no_grad(), _evaluation_mode(model), remembered(self._tower, outputs, "text"):
            forward()
        output = outputs["text"]
        values = output.values() if isinstance(output, Mapping) else [output]
        if all(value.isfinite().all() for value in values if isinstance(value, Tensor)):
            self._output = dict(output) if isinstance(output, BaseModelOutputWithPooling) else output
            self._kind = self._kind_of_tower()

    @contextlib.contextmanager
    def instead_of_tower(self) -> Iterator[None]:
        """Within the context the tower returns the output, and computes nothing."""
        # In training mode, a batch norm in the projection would count the placeholder, or fail on a single row.
        with patch.object(self._tower, "forward", self._forward), _evaluation_mode(self._projection):
            yield

    def _again(self, *args: object, **kwargs: object) -> Any:
        of_transformers = type(self._output) is dict and "last_hidden_state" in self._output
        return BaseModelOutputWithPooling(**self._output) if of_transformers else self._output

    def _kind_of_tower(self) -> Any:
        parameter = next(self._tower.parameters())
        return parameter.dtype, parameter.device


@contextlib.contextmanager
def _evaluation_mode(module: nn.Module | None) -> Iterator[None]:
    """Within the context the module, if there is one, is in evaluation mode with all its parts."""
    trained = [] if module is None else [part for part in module.modules() if part.training]
    for part in trained:
        part.training = False
    try:
        yield
    finally:
        for part in trained:
            part.training = True


class _Tower(nn.Module):
    """A module whose output is that of a tower of transformers: one vector for each input."""

    def __init__(self, module: nn.Module, what: str) -> None:
        super().__init__()
        self.module, self._what = module, what

    def forward(
        self, pixel_values: Tensor | None = None, return_dict: bool = True, **texts: Tensor
    ) -> BaseModelOutputWithPooling:
        output = self.module(**texts) if pixel_values is None else self.module(pixel_values)
        features = pooled(output, self.module, self._what)
        return BaseModelOutputWithPooling(features[:, None], features)


@dataclass
class Embeddings(ModelOutput):
    """The output of `TwoTowers`. It is a dataclass because `torch.compile` loses the fields of a plain ModelOutput."""

    image_embeds: Tensor | None = None  # [images, D], of length 1
    text_embeds: Tensor | None = None  # [texts, D], of length 1


class TwoTowers(nn.Module):
    """A dual encoder of any two modules, which `InfCLTrainer` trains like those of transformers.

    Saved models hold its state dict, as model.safetensors; build the same modules to load it.

    Args:
        image_tower: called with images [images, 3, H, W] alone. It returns features [images, H1], or an object, such as
            an output of transformers, or a dict with them as ``pooler_output``.
        text_tower: called with ``input_ids`` and ``attention_mask`` [texts, L], and whatever else the tokenizer
            returns. It returns features [texts, H2], or such an output.
        image_projection, text_projection: from these features to the embeddings, which need the same dimension; by
            default the features are the embeddings.
        scale: the initial multiplier of the cosines. ``logit_scale`` is its logarithm.
        bias: the initial ``logit_bias``, with which the objective is sigmoid; None for softmax.

    Raises:
        ValueError: when it is called, a tower returns something else.
    """

    def __init__(
        self,
        image_tower: nn.Module,
        text_tower: nn.Module,
        image_projection: nn.Module | None = None,
        text_projection: nn.Module | None = None,
        *,
        scale: float = 1 / 0.07,
        bias: float | None = None,
    ) -> None:
        super().__init__()
        self.vision_model, self.text_model = _Tower(image_tower, "image tower"), _Tower(text_tower, "text tower")
        self.visual_projection = nn.Identity() if image_projection is None else image_projection
        self.text_projection = nn.Identity() if text_projection is None else text_projection
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(float(bias)))

    def get_image_features(self, **inputs: Tensor) -> Tensor:
        """Embeddings [images, D], not normalised."""
        features: Tensor = self.visual_projection(self.vision_model(**inputs).pooler_output)
        return features

    def get_text_features(self, **inputs: Tensor) -> Tensor:
        """Embeddings [texts, D], not normalised."""
        features: Tensor = self.text_projection(self.text_model(**inputs).pooler_output)
        return features

    def forward(self, pixel_values: Tensor, return_dict: bool = True, **texts: Any) -> Embeddings:
        """The embeddings of images and texts."""
        images, captions = self.get_image_features(pixel_values=pixel_values), self.get_text_features(**texts)
        return Embeddings(F.normalize(images, dim=-1), F.normalize(captions, dim=-1))
