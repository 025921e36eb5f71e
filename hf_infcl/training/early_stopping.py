"""Ends a training whose metric no longer improves."""

from __future__ import annotations

from typing import Any

from transformers import EarlyStoppingCallback

from ..options.metric_sums import key_of, value_of


class EarlyStopping(EarlyStoppingCallback):
    """transformers' EarlyStoppingCallback, for metrics of several evaluation sets and for resumed trainings.

    Trainer calls it once for each evaluation set. It waits until all terms of ``metric_for_best_model`` are measured.
    A resumed training continues its count of evaluations without improvement.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        super().__init__(early_stopping_patience, early_stopping_threshold)
        self._measured: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        saved = state.stateful_callbacks.get(type(self).__name__, {}) if state.global_step else {}
        count = saved.get("attributes", {}).get("early_stopping_patience_counter", 0)
        self.early_stopping_patience_counter = count

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self._measured |= metrics
        value = value_of(args.metric_for_best_model, self._measured)
        if value is not None:
            self._measured = {}
            super().on_evaluate(args, state, control, {key_of(args.metric_for_best_model): value}, **kwargs)
