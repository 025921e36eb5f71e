"""Ends a training whose metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from ..options.metric_sums import key_of, value_of


class EarlyStopping(EarlyStoppingCallback):
    """transformers' EarlyStoppingCallback, for metrics of several evaluation sets and for resumed trainings.

    Trainer calls it once for each evaluation set. It waits until all terms of ``metric_for_best_model`` are measured.
    A resumed training continues its count of evaluations without improvement, and does not count that of
    ``eval_on_start``, as if it had not been interrupted.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        super().__init__(early_stopping_patience, early_stopping_threshold)
        self._measured: dict[str, float] = {}
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.early_stopping_patience_counter = _count(state)
        self._first_step = state.global_step

    def on_epoch_begin(self, *_: object, **kwargs: object) -> None:
        self._first_step = -1  # a resumed training may repeat the evaluation of its first step

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if state.global_step == self._first_step:
            return
        self._measured |= metrics or {}
        metric = str(args.metric_for_best_model)
        value = value_of(metric, self._measured)
        if value is not None:
            self._measured = {}
            super().on_evaluate(args, state, control, {key_of(metric): value}, **kwargs)


def _count(state: TrainerState) -> int:
    """The evaluations without improvement before the training was resumed."""
    kept: Any = state.stateful_callbacks
    saved = kept.get(EarlyStopping.__name__, {}) if state.global_step else {}
    count: int = saved.get("attributes", {}).get("early_stopping_patience_counter", 0)
    return count


def why_complete(state: TrainerState, max_steps: int, patience: int | None) -> str:
    """Why a resumed training has no step left; empty if it has one."""
    if state.global_step >= max_steps:
        return f"the run has {max_steps} steps"
    if patience is not None and _count(state) >= patience:
        return f"early_stopping_patience={patience} ended the run there; raise it to train on"
    return ""
