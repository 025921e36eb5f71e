"""The end of a training: by a signal, and its last metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from transformers import TrainerState

from ..checkpoints.saving import Checkpoints
from ..processes.preemption import Preempted, end_early


def saved_early(
    number: int, state: TrainerState, checkpoints: Checkpoints, *, trained: bool, saves: Iterable[Callable[[], object]]
) -> Preempted:
    """The end of a training by a signal, for which it saves a checkpoint, if it has trained any step; collective.

    ``saves`` save a checkpoint of the last step, and tell the callbacks of it.
    """
    step = state.global_step
    for save in saves if trained and checkpoints.saved_step != step else ():
        save()
    saved = checkpoints.saved_step == step
    return end_early(number, step, trained=trained, saved=saved, tells=state.is_world_process_zero)


def measured_last(state: TrainerState, datasets: Iterable[str]) -> dict[str, float]:
    """The metrics of all datasets if they were measured after the last step; otherwise nothing.

    Measuring them again after the training would take time, and MLflow and trackio would start a new run for it.
    """
    entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
    metrics = {name: value for entry in entries for name, value in entry.items() if name.startswith(("eval_", "epoch"))}
    complete = all(any(name.startswith(f"eval_{dataset}_") for name in metrics) for dataset in datasets)
    return metrics if complete else {}
