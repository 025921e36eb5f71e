"""Where a training begins or goes on: its plan, its course over samples, and what Trainer's loop counts."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerState
from transformers.trainer_utils import has_length

from ..checkpoints.record import RunRecord
from ..options.arguments import InfCLTrainingArguments
from ..options.batch_schedule import BatchSchedule, Course, EqualBatches
from .batch_plan import BEGIN, BatchPlan, Position
from .replay import Replayed, is_own
from .shares import replay_share
from .training_loader import TrainingLoader


def make_plan(args: InfCLTrainingArguments, data: object, record: RunRecord | None = None) -> BatchPlan:
    """The global batches of a training, from where it begins or goes on.

    Args:
        data: its training set, or the number of its pairs. Nothing is known of the passes over a stream of another
            class than `ImageTextStream`.

    Raises:
        ValueError: as `BatchPlan`; or the batch grows, and neither the data nor the training (``max_steps``) has a
            length.
    """
    schedule, rows, steps, at = BatchSchedule.of_arguments(args), _rows_of_pass(data), args.max_steps, BEGIN
    share = replay_share(args.replay_share) if isinstance(data, Replayed) else 0.0
    if args.global_batch_schedule is not None:
        if rows is None and steps < 1:
            raise ValueError(
                "global_batch_schedule needs max_steps for data without a length, whose shares it divides."
            )
        if record is not None:
            trained = (record.stream or [{}])[0].get("rows", record.rows)  # with replay, of the new pairs
            at = Position(record.step, record.samples_seen, record.epoch, record.windows, trained)
    else:
        new = args.global_batch_size - round(args.global_batch_size * share)
        windows = sys.maxsize if rows is None else rows // new
        if record is not None:
            at = resumed_position(record, windows, new)
        if steps < 1 and rows is not None:
            steps = math.ceil(args.num_train_epochs * windows)
    if args.ignore_data_skip:
        at = replace(at, windows=0, rows=0)
    return BatchPlan(
        schedule,
        rows,
        epochs=args.num_train_epochs,
        max_steps=steps,
        micro_batch=args.per_device_train_batch_size,
        processes=args.world_size,
        at=at,
        replay_share=share,
    )


def _rows_of_pass(data: object) -> int | None:
    """The rows of a pass over a training set, with replay over its new pairs; None if it is not known."""
    if isinstance(data, int):
        return data
    new = data.datasets[0] if isinstance(data, Replayed) else data
    return len(new) if is_own(new) and has_length(new) else None


def resumed_position(record: RunRecord, windows: int, batch: int) -> Position:
    """Where a training with equal global batches goes on: where a pass has no window left, with the next one.

    ``windows`` are those of a pass, and ``batch`` are the pairs of each that are rows of it.
    """
    if record.windows >= windows:
        return Position(record.step, record.samples_seen, record.epoch + 1)
    return Position(record.step, record.samples_seen, record.epoch, record.windows, record.windows * batch)


def make_course(args: InfCLTrainingArguments, state: TrainerState, plan: BatchPlan | None) -> Course:
    """The samples of the steps of a training, those before it was resumed included: of its plan if the batch grows."""
    if plan is not None and plan.grows:
        return plan
    return EqualBatches(args.global_batch_size, state.max_steps)


def loop_values(
    args: InfCLTrainingArguments,
    loader: DataLoader,
    plan: BatchPlan,
    record: RunRecord | None,
    values: tuple[Any, ...],
) -> tuple[Position | None, tuple[Any, ...]]:
    """Where a training begins, and Trainer's initial values, computed from full windows and trained samples only.

    Args:
        plan: of its global batches. Where they grow, each is one batch for Trainer's loop.
        values: what `Trainer.set_initial_training_values` returns.

    Returns:
        The position, whose rows are all pairs of the pass, old ones included, and the values. For a new training the
        position is None.
    """
    epochs, windows, examples, _, batch, micro_batches, steps = values
    accumulation, is_sized = args.gradient_accumulation_steps, has_length(loader)
    is_training_loader = isinstance(loader, TrainingLoader)
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if is_sized and is_stream:
        windows = max(1, len(loader) // accumulation)
        micro_batches = windows * accumulation
        epochs = sys.maxsize  # the length may be a guess, so that max_steps takes more passes
        if args.max_steps < 0:
            steps = math.ceil(args.num_train_epochs * windows)
    # ---- Where it goes on ----
    begin, at = None, plan.first()
    if not is_training_loader and record is not None:  # with a whole window
        at = resumed_position(record, windows if is_sized else sys.maxsize, batch)
        begin = replace(at, windows=0, rows=0) if args.ignore_data_skip else at
    elif record is not None:
        begin = replace(at, rows=0 if args.ignore_data_skip or at.epoch > record.epoch else record.rows)
    elif plan.grows:  # also after the checkpoint of another trainer
        begin = at
    # ---- What is left ----
    if is_training_loader and plan.grows:
        windows = max(1, plan.windows(at.epoch))
        return begin, (plan.epochs, windows, examples, plan.samples, args.global_batch_size, windows, plan.steps)
    if is_training_loader:
        steps = plan.steps
        epochs = plan.epochs if is_sized and not is_stream else epochs
    return begin, (epochs, windows, examples, steps * batch, batch, micro_batches, steps)
