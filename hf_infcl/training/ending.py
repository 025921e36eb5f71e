"""The end of a training: by a signal, by a metric that no longer improves, and its last metrics."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable
from typing import Any

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from ..checkpoints.files import Checkpoints
from ..processes.preemption import Preempted
from ..shards.values import counted

logger = logging.getLogger(__name__)


def saved_early(
    number: int, state: TrainerState, checkpoints: Checkpoints, *, trained: bool, saves: Iterable[Callable[[], object]]
) -> Preempted:
    """The end of a training by a signal, for which it saves a checkpoint, if it has trained any step; collective.

    ``saves`` save a checkpoint of the last step, and tell the callbacks of it.
    """
    step = state.global_step
    for save in saves if trained and checkpoints.saved_step != step else ():
        save()
    if not trained:
        what = "Nothing was trained before that"
    elif checkpoints.saved_step == step:
        what = f"checkpoint-{step} is saved"
    else:
        what = "No checkpoint of it could be saved"
    if state.is_world_process_zero:
        logger.warning(
            f"{signal.Signals(number).name} has ended the training after step {step}. {what}. "
            "Resume with --resume_from_checkpoint auto (in Python, trainer.train(resume_from_checkpoint='auto'))."
        )
    return Preempted(128 + number)


def measured_last(state: TrainerState, datasets: Iterable[str]) -> dict[str, float]:
    """The metrics of all datasets if they were measured after the last step; otherwise nothing.

    Measuring them again after the training would take time, and MLflow and trackio would start a new run for it.
    """
    entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
    metrics = {name: value for entry in entries for name, value in entry.items() if name.startswith(("eval_", "epoch"))}
    complete = all(any(name.startswith(f"eval_{dataset}_") for name in metrics) for dataset in datasets)
    return metrics if complete else {}


class EarlyStopping(EarlyStoppingCallback):
    """transformers' callback, also for several evaluation sets, for each of which Trainer calls it, and after a resume.

    A resumed training continues its count of evaluations without improvement, and does not count that of
    ``eval_on_start``, as if it had not been interrupted. Trainer itself would restore the callback with the patience of
    the checkpoint (``restore_callback_states_from_checkpoint``), which may change.
    """

    _first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.early_stopping_patience_counter, self._first_step = _count(state), state.global_step

    def on_epoch_begin(self, *_: object, **kwargs: object) -> None:
        self._first_step = -1  # a resumed training may repeat the evaluation of its first step

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any = None,
        **kwargs: object,
    ) -> None:
        is_of_its_set = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}" in metrics
        if is_of_its_set and state.global_step != self._first_step:
            super().on_evaluate(args, state, control, metrics, **kwargs)


def _count(state: TrainerState) -> int:
    """The evaluations without improvement before the training was resumed."""
    kept: Any = state.stateful_callbacks
    saved = kept.get(EarlyStopping.__name__, {}) if state.global_step else {}
    return int(saved.get("attributes", {}).get("early_stopping_patience_counter", 0))


def why_complete(state: TrainerState, max_steps: int, patience: int | None) -> str:
    """Why a resumed training has no step left; empty if it has one."""
    if state.global_step >= max_steps:
        return f"the run has {counted(max_steps, 'step')}"
    if patience is not None and _count(state) >= patience:
        return f"early_stopping_patience={patience} ended the run there; raise it to train on"
    return ""
