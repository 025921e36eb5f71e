"""Keeping the card beside a model up to date while it trains, so that every push to the Hub carries it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from ..training.arguments import InfCLTrainingArguments
from .card import model_card, write_eval_results
from .curves import plot_curves
from .record import TrainingRecord

CURVES_FILE = "curves.png"


class CardCallback(TrainerCallback):
    """Writes the record, the curves, the results and the card into ``output_dir``.

    They are written after each evaluation, before each push to the Hub and at the end of the training, by the process
    that saves the model.

    Args:
        describe: ``describe(args, state)`` gives the record of the run so far.
    """

    def __init__(self, describe: Callable[[InfCLTrainingArguments, TrainerState], TrainingRecord]) -> None:
        self._describe = describe

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.write(args, state)

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.write(args, state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.write(args, state)

    def write(self, args: Any, state: TrainerState) -> None:
        """Write everything now, if this process saves the model."""
        if state.is_world_process_zero and state.global_step > 0:
            folder = Path(args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            record = self._describe(args, state)
            record.save(folder)
            write_publication(record, folder, state)


def write_publication(record: TrainingRecord, folder: str | Path, state: TrainerState) -> None:
    """Write the curves (where matplotlib is installed), the results and the card of a record into the folder."""
    curves = None
    drawable = importlib.util.find_spec("matplotlib") is not None
    if drawable and any("loss" in entry for entry in state.log_history):
        curves = CURVES_FILE
        plot_curves(state.log_history, Path(folder, curves))
    write_eval_results(record, folder)
    model_card(record, curves=curves).save(Path(folder, "README.md"))
