"""A model between two checkpoints, for `infcl average`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from transformers.utils import find_adapter_config_file

from ..conversion.folders import explained
from ..conversion.models import load
from ..conversion.pretrained import base_of_adapters, with_trained_adapter
from .average_weights import adapters_of_zero, interpolated, running_statistics


class BetweenCheckpoints:
    """A model whose weights move between the start and the end of a fine-tuning.

    Args:
        start: the checkpoint before it.
        end: the checkpoint after it, or its LoRA adapter, whose model is the start. If the start has an adapter as
            well, both are merged into their models.
        path: one of `hf_infcl.checkpoints.average_weights.PATHS`.

    Attributes:
        model, processor: as loaded; `move` changes the weights of the model in place.

    Raises:
        ValueError: a checkpoint cannot be loaded; the two are not the same model; an adapter holds more than LoRA's
            factors.
    """

    def __init__(self, start: str, end: str, path: str) -> None:
        self._path = path
        base, processor, _ = load(start)
        with explained(end):
            has_adapters = find_adapter_config_file(end) is not None
        if not has_adapters or base_of_adapters(start) is not None:
            self.model, self.processor, _ = load(end)
            self._start, self._end = base.state_dict(), _copied(self.model.state_dict())
            self._set: Callable[[dict[str, Tensor]], Any] = self.model.load_state_dict
        else:
            self.model, self.processor = with_trained_adapter(base, end).requires_grad_(False), processor
            import peft  # it is installed, as there is an adapter

            self._end = _copied(peft.get_peft_model_state_dict(self.model, save_embedding_layers=False))
            self._start = adapters_of_zero(self._end)
            self._set = partial(peft.set_peft_model_state_dict, self.model)
        interpolated(self._start, self._end, 1.0, path)  # raises here rather than after the first evaluation

    def move(self, alpha: float) -> None:
        """Gives the model the weights at ``alpha``."""
        self._set(interpolated(self._start, self._end, alpha, self._path))

    @property
    def batch_norms(self) -> int:
        """The number of batch norms with running statistics."""
        return len(running_statistics(self._end)) // 2


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}
