"""Outputs of towers that are kept instead of being computed again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling


@contextlib.contextmanager
def remembered(tower: nn.Module, outputs: dict[str, Any], name: str) -> Iterator[None]:
    """Within the context the tower stores its output in ``outputs``, or returns the stored one without computing."""
    forward, overridden = tower.forward, "forward" in vars(tower)

    def first(*args: Any, **kwargs: Any) -> Any:
        full = forward(*args, **kwargs)
        # The models read the pooled vector or the first position; a window of whole sequences would be large.
        first_position = full.last_hidden_state[:, :1].clone()
        outputs[name] = BaseModelOutputWithPooling(first_position, full.get("pooler_output"))
        return full

    tower.forward = (lambda *args, **kwargs: outputs[name]) if name in outputs else first
    try:
        yield
    finally:
        if overridden:
            tower.forward = forward
        else:
            del tower.forward  # restores the method of the class


class OneText:
    """The text tower's output for a text that stands for none, so that the tower runs for it only once.

    No embedding depends on its values. But the gradient of no rows is 0 times them, so they have to be finite.
    """

    def __init__(self) -> None:
        self._output: Any = None
        self._kind: Any = None  # dtype and device of the tower that returned it

    @contextlib.contextmanager
    def instead_of(self, tower: nn.Module) -> Iterator[None]:
        """Within the context the tower returns the output without computing, once it is there."""
        parameter = next(tower.parameters())
        kind = parameter.dtype, parameter.device
        outputs: dict[str, Any] = {}
        if self._kind == kind:  # a forward writes the projection into the output that it gets
            outputs["text"] = type(self._output)(**self._output)
        # The second pass may not run the tower, so it must not draw random numbers in the first one.
        trained = [module for module in tower.modules() if module.training]
        tower.eval()
        try:
            with remembered(tower, outputs, "text"):
                yield
        finally:
            for module in trained:
                module.training = True
        if self._kind != kind and all(value.isfinite().all() for value in outputs["text"].values()):
            values = {name: value.detach() for name, value in outputs["text"].items()}
            self._output, self._kind = type(outputs["text"])(**values), kind
