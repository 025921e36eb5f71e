"""What the parts of a training have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from ..encoders.dual_encoder import DualEncoder
from ..options.arguments import InfCLTrainingArguments
from .extensions import Extension
from .terms import Start


@dataclass(frozen=True)
class Context:
    """The model of a training or of an evaluation, its arguments, where it computes, its loss and its data."""

    encoder: DualEncoder  # unwrapped
    accelerator: Accelerator
    args: InfCLTrainingArguments
    equal_ids: str  # "exclude" or "positive"; see `InfCLTrainingArguments`
    prepare_inputs: Callable[[dict[str, Any]], dict[str, Any]]  # moves a batch to the device and normalises its images
    # The weights that the model had before the training, if it is to stay near them; of adapters those that they adapt.
    start: Start | None = None
    data: Any = None  # the training set
    collator: Any = None  # the data collator
    extensions: Sequence[Extension] = ()  # of the step, beside those that the arguments ask for
    rows: int | None = None  # of the training set, without old pairs; None for a stream

    @property
    def objective(self) -> str:
        """``"softmax"`` or ``"sigmoid"``: the argument, or else the objective that the model was designed for."""
        return self.args.objective or self.encoder.objective
