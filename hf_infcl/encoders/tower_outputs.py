"""Outputs of towers that are kept instead of being computed again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling


@contextlib.contextmanager
def remembered(tower: nn.Module, outputs: dict[str, Any], name: str) -> Iterator[None]:
    """Within the context the tower stores its output in ``outputs``, or returns the stored one without computing."""
    forward = tower.forward

    def first(*args: Any, **kwargs: Any) -> Any:
        full = forward(*args, **kwargs)
        # The models read the pooled vector or the first position; a window of whole sequences would be large.
        first_position = full.last_hidden_state[:, :1].clone()
        outputs[name] = BaseModelOutputWithPooling(first_position, full.get("pooler_output"))
        return full

    with _forward_of(tower, (lambda *args, **kwargs: outputs[name]) if name in outputs else first):
        yield


class PlaceholderText:
    """The text tower's output for a placeholder, which stands in for the texts of micro-batches that have none.

    A model's forward needs at least one text. Its embedding is dropped, so its values do not matter, and the tower has
    to run only once. But they have to be finite: in the backward they are multiplied by gradients of 0.

    Args:
        tower: the text tower.
        projection: the module that takes its output, if any.
    """

    def __init__(self, tower: nn.Module, projection: nn.Module | None) -> None:
        self._tower, self._projection = tower, projection
        self._output: dict[str, Any] = {}
        self._kind: Any = None  # dtype and device of the tower that returned it
        # The same function for all forwards, because a compiled model would be compiled again for another one.
        self._forward = lambda *args, **kwargs: BaseModelOutputWithPooling(**self._output)

    def known(self) -> bool:
        """Whether the output is there, in the tower's dtype and on its device."""
        return self._kind == self._kind_of_tower()

    def learn(self, model: nn.Module, forward: Callable[[], Any]) -> None:
        """Keeps the output, unless it is not finite.

        Args:
            model: the whole model. It is in evaluation mode meanwhile: the forward draws no random numbers.
            forward: calls the model on any images and one text.
        """
        outputs: dict[str, Any] = {}
        # A compiled forward could not store the output.
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.no_grad(), _evaluation_mode(model), remembered(self._tower, outputs, "text"):
            forward()
        if all(value.isfinite().all() for value in outputs["text"].values()):
            self._output, self._kind = dict(outputs["text"]), self._kind_of_tower()

    @contextlib.contextmanager
    def instead_of_tower(self) -> Iterator[None]:
        """Within the context the tower returns the output, and computes nothing."""
        # In training mode, a batch norm in the projection would count the placeholder, or fail on a single row.
        with _forward_of(self._tower, self._forward), _evaluation_mode(self._projection):
            yield

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


@contextlib.contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the context the module has another forward."""
    own, overridden = module.forward, "forward" in vars(module)
    module.forward = forward
    try:
        yield
    finally:
        if overridden:
            module.forward = own
        else:
            del module.forward  # restores the method of the class
