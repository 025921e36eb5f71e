"""Keeps the card beside a model up to date while it trains, so that every push to the Hub includes it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from .cards import model_card, write_eval_results
from .facts import TrainingFacts
from .pictures import PICTURES_FILE, plot_curves

CURVES_FILE = "curves.png"

logger = logging.get_logger(__name__)


class CardCallback(TrainerCallback):
    """Writes the facts, the curves, the results and the card into ``output_dir``.

    The main process writes them after each evaluation and each checkpoint, before each push to the Hub, at the end of
    the training and after `InfCLTrainer.save_model`, so that it may also be added after the training. If they cannot be
    written, for example because the disk is full, the error is logged and the training continues.

    Args:
        describe: returns the facts of the run so far; `training_facts` with its arguments.

    Attributes:
        first_step: the step at which this training began: 0, or the step of the checkpoint from which it resumed.
            Nothing is written before a step has been trained, because the folder still describes the previous run.
    """

    def __init__(self, describe: Callable[[], TrainingFacts]) -> None:
        self._describe = describe
        self._written = 0, 0  # the step and the number of log entries that the card tells of
        self.first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.first_step = state.global_step
        self._written = 0, 0  # an earlier training may have ended at the same step

    def _update(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if (state.global_step, len(state.log_history)) == self._written:
            return
        try:
            self.write(args, state)
        except OSError as error:
            logger.error(f"The card of step {state.global_step} could not be written to {args.output_dir}: {error}")

    on_evaluate = on_push_begin = on_save = on_train_end = on_model_saved = _update

    def write(self, args: TrainingArguments, state: TrainerState) -> None:
        """Writes all files for the current state, if this is the main process and a step has been trained."""
        if state.is_world_process_zero and state.global_step > self.first_step:
            folder = Path(str(args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            facts = self._describe()
            facts.save(folder)
            write_publication(facts, folder, state)
            self._written = state.global_step, len(state.log_history)


def write_publication(facts: TrainingFacts, folder: str | Path, state: TrainerState) -> None:
    """Writes the results, the card and the curves of a run into the folder.

    The curves are drawn if matplotlib is installed and a training loss was logged. Otherwise the card shows the curves
    that are already in the folder. It also shows a picture of `PicturesCallback` if there is one.
    """
    picture = Path(folder, CURVES_FILE)
    if importlib.util.find_spec("matplotlib") is not None and any("loss" in entry for entry in state.log_history):
        plot_curves(state.log_history, picture)
    write_eval_results(facts, folder)
    card = model_card(
        facts,
        curves=CURVES_FILE if picture.is_file() else None,
        pictures=PICTURES_FILE if Path(folder, PICTURES_FILE).is_file() else None,
    )
    card.save(Path(folder, "README.md"))
