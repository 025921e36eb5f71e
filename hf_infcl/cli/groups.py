"""Prints which parameters an optimizer updates, and how."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..optimizers import table_of_groups


class GroupsTold(TrainerCallback):
    """Prints the groups of a `MuonAdamW` before the first step."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero:
            print(table_of_groups(optimizer.param_groups))
