"""The results that a training leaves in its output folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from ...checkpoints.average_search import Averaged, described
from ...data import ImageTextDataset, ZeroShotDataset
from ...options.arguments import InfCLTrainingArguments
from ...training.ending import measured_last
from ...training.trainer import InfCLTrainer
from ...training.with_start import AverageWithStart, checkpoint_of_end
from ..publishing import write_averages
from ..publishing.settings import precision
from .datasets import what_was_measured


def save_results(
    trainer: InfCLTrainer,
    metrics: dict[str, float],
    eval_datasets: Mapping[str, ImageTextDataset | ZeroShotDataset],
    average: AverageWithStart | None = None,
    start: str = "",
) -> Averaged | None:
    """Writes the model, the metrics of the training and of the final evaluation, and the trainer's state; collective.

    Args:
        average: finds the average whose weights are to be saved; None to save those of the training.
        start: Hub id or folder of the checkpoint that the training started from.

    Returns:
        The average that was saved, if one was asked for.
    """
    if trainer.steps_trained > 0:  # otherwise the run before has trained to the end, and ended before its results
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
        others = trainer.args.load_best_model_at_end or average is not None  # weights than those of the last step
        measured = {} if others else measured_last(trainer.state, eval_datasets)
        measured = measured or trainer.evaluate()
        trainer.save_metrics(
            "eval", measured | what_was_measured(eval_datasets) | {"eval_precision": precision(trainer)}
        )
    trainer.save_state()
    return found


def tell_places(args: InfCLTrainingArguments, hub_model_id: str | None) -> None:
    """Prints where the results are."""
    if importlib.util.find_spec("matplotlib") is None:
        print(
            "The curves were not drawn, because matplotlib is not installed. After `pip install matplotlib`, "
            f"`infcl card {args.output_dir}` draws them."
        )
    pushed = f" and on the Hub as {hub_model_id}" if hub_model_id else ""
    print(f"The model, its card (README.md) and its results (*.json) are in {args.output_dir}{pushed}.")
