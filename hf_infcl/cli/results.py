"""The results that a training leaves in its output folder."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..averaging import Averaged, described
from ..options.arguments import InfCLTrainingArguments
from ..publishing import write_averages
from ..training.trainer import InfCLTrainer
from ..training.with_start import AverageWithStart, checkpoint_of_end
from .datasets import what_was_measured


def save_results(
    trainer: InfCLTrainer,
    metrics: dict[str, float],
    eval_datasets: Mapping[str, Any],
    average: AverageWithStart | None = None,
    start: str = "",
) -> Averaged | None:
    """Writes the model, the metrics of the training and of the final evaluation, and the trainer's state; collective.

    Args:
        trainer: after its training.
        metrics: of the training.
        eval_datasets: what is evaluated at the end.
        average: finds the average whose weights are to be saved; None to save those of the training.
        start: Hub id or folder of the checkpoint that the training started from.

    Returns:
        The average that was saved, if one was asked for.
    """
    if trainer.steps_trained > 0:  # otherwise the run before has trained to the end, and ended before its results
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
    trainer.save_model(_internal_call=True)  # without a push, which has to include the results
    found = None
    if average is not None:
        found = average.find()
        trainer.save_model(_internal_call=True)
        if trainer.is_world_process_zero():
            end, folder = checkpoint_of_end(trainer), Path(str(trainer.args.output_dir))
            write_averages(folder, found, start, str(end))
            print(*described(found), f"The average at alpha {found.alpha:g} is saved; the end is {end}.", sep="\n")
    if eval_datasets:
        others = (
            trainer.args.load_best_model_at_end or average is not None
        )  # the weights are not those of the last step
        measured = {} if others else measured_last(trainer.state, eval_datasets)
        measured = measured or trainer.evaluate()
        trainer.log_metrics("eval", measured)
        trainer.save_metrics("eval", measured | what_was_measured(eval_datasets))
    trainer.save_state()
    return found


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


def measured_last(state: TrainerState, datasets: Iterable[str]) -> dict[str, float]:
    """The metrics of all datasets if they were measured after the last step; otherwise nothing.

    Measuring them again after the training would take time, and MLflow and trackio would start a new run for it.
    """
    entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
    metrics = {name: value for entry in entries for name, value in entry.items() if name.startswith(("eval_", "epoch"))}
    complete = all(any(name.startswith(f"eval_{dataset}_") for name in metrics) for dataset in datasets)
    return metrics if complete else {}


def tell_places(args: InfCLTrainingArguments, hub_model_id: str | None) -> None:
    """Prints where the results are."""
    if importlib.util.find_spec("matplotlib") is None:
        print(
            "The curves were not drawn, because matplotlib is not installed. After `pip install matplotlib`, "
            f"`infcl card {args.output_dir}` draws them."
        )
    pushed = f" and on the Hub as {hub_model_id}" if hub_model_id else ""
    print(f"The model, its card (README.md) and its results (*.json) are in {args.output_dir}{pushed}.")
