"""The attributes of an `InfCLTrainer` that cards and reports read; this package does not import its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import EvalPrediction, TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler

from ...loading.batch_plan import BatchPlan
from ...loading.notices import CaptionNotices
from ...options.arguments import InfCLTrainingArguments
from ...windows.setup import Setup

if TYPE_CHECKING:
    from ...training.optimization import Optimization
    from ...training.resuming import Resumption


class Trained(Protocol):
    """The trainer of a run; its class says what the attributes are."""

    args: InfCLTrainingArguments
    state: TrainerState
    model: Any
    accelerator: Any
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    optimization: Optimization
    resumption: Resumption
    caption_notices: CaptionNotices
    callback_handler: CallbackHandler
    train_dataset: Any
    eval_dataset: Any
    compute_metrics: Callable[[EvalPrediction], dict[Any, Any]] | None

    @property
    def hub_model_id(self) -> str | None: ...

    @property
    def setup(self) -> Setup: ...

    @property
    def batch_plan(self) -> BatchPlan: ...

    @property
    def steps_trained(self) -> int: ...

    @property
    def samples_seen(self) -> int: ...

    def add_callback(self, callback: TrainerCallback) -> None: ...

    def remove_callback(self, callback: type[TrainerCallback]) -> None: ...
