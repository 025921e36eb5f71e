"""Prints which parameters an optimizer updates, and how."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...training.trainer import InfCLTrainer


class GroupsTold(TrainerCallback):
    """Prints the parameter groups of the trainer's optimizer before the first step."""

    def __init__(self, trainer: InfCLTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and (table := self._trainer.optimization.table_of_groups):
            print(table)
