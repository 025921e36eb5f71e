"""The end of a training: by a signal, its last metrics, and a disk that is full when its results are written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoints.saving import Checkpoints
from ..processes.preemption import Preempted, end_early


@contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Removes partly written results if the disk is full, and says what to do.

    Raises:
        ValueError: the disk is full, or the user's share of it.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # A SafetensorError has no number, only the text of the operating system.
        if not any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT)):
            raise
        for path in (*folder.glob("*_results.json"), folder / TRAINER_STATE_NAME):
            path.unlink(missing_ok=True)
        raise ValueError(
            f"The results could not be written into {folder} ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are "
            f"free there): {error}. Free some space, and run the same command with --resume_from_checkpoint auto, "
            "which continues from the last checkpoint and writes the results."
        ) from error


def saved_early(
    number: int, state: TrainerState, checkpoints: Checkpoints, *, trained: bool, saves: Iterable[Callable[[], Any]]
) -> Preempted:
    """The end of a training by a signal, for which it saves a checkpoint; collective.

    Args:
        number: the signal's.
        state: Trainer's.
        checkpoints: those of the training.
        trained: whether it has trained any step.
        saves: save a checkpoint of the last step, and tell the callbacks of it.
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
