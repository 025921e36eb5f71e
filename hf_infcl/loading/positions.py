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


def make_plan(
    args: InfCLTrainingArguments, data: object, record: RunRecord | None = None, *, changed: bool = False
) -> BatchPlan:
    """The global batches of a training, from where it begins or goes on.

    Args:
        data: its training set, or the number of its pairs. Nothing is known of the passes over a stream of another
            class than `ImageTextStream`.
        changed: whether it was ever resumed with changes. Then what is left of ``num_train_epochs`` is trained, and
            otherwise all steps of the whole training.

    Raises:
        ValueError: as `BatchPlan`; or the batch grows, and neither the data nor the training (``max_steps``) has a
            length; or the checkpoint of a batch that grows does not say its step.
    """
    schedule, rows, steps, at = BatchSchedule.of_arguments(args), _rows_of_pass(data), args.max_steps, BEGIN
    share = replay_share(args.replay_share) if isinstance(data, Replayed) else 0.0
    if args.global_batch_schedule is not None:
        if rows is None and steps < 1:
            raise ValueError(
                "global_batch_schedule needs max_steps for data without a length, whose shares it divides."
            )
        if record is not None:
            at = _position_of_growing(record)
    else:
        new = args.global_batch_size - round(args.global_batch_size * share)
        windows = sys.maxsize if rows is None else rows // new
        if record is not None:
            at = resumed_position(record, new, windows, rows, _trained_rows(record))
        if steps < 1 and rows is not None:
            steps = math.ceil(args.num_train_epochs * windows)
            if record is not None and record.step is not None and changed:
                steps = record.step + max(0, steps - at.epoch * windows - at.windows)
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


def _trained_rows(record: RunRecord) -> int:
    """How many rows of the pass under way were trained; with replay, how many new pairs."""
    state, batch = (record.stream or [{}])[0], record.run.global_batch_size
    if "parts" not in state:
        return record.rows_of_epoch
    share = replay_share(record.run.options.get("replay_share"))
    rows: int = state.get("rows", record.rows_of_epoch * (batch - round(batch * share)) // batch)
    return rows


def _position_of_growing(record: RunRecord) -> Position:
    if record.step is None:
        raise ValueError(
            "The checkpoint was written by a version of hf_infcl that did not record its step, from which "
            "global_batch_schedule goes on. Resume without it, or start a new run from the checkpoint's model."
        )
    return Position(record.step, record.samples_seen, record.epoch, record.windows, _trained_rows(record))


def resumed_position(
    record: RunRecord, batch: int, windows: int, pairs: int | None, rows: int | None = None
) -> Position:
    """Where a training with equal global batches goes on, after parts of it whose batches may have had other sizes.

    A pass over the data ends where no further global batch fits in.

    Args:
        pairs: of a pass, if reading can go on with any of them; None if it goes on with a whole window.
        rows: how many rows of the pass under way were trained, if not as many as the record says.

    Returns:
        The position, whose ``windows`` are those that Trainer's loop counts as trained: what they lack of a whole pass
        is left of this one.
    """
    rows = record.rows_of_epoch if rows is None else rows
    trained = -(-rows // batch) if pairs is None else pairs // batch - max(0, pairs - rows) // batch
    if trained >= windows:
        return Position(record.step or 0, record.samples_seen, record.epoch + 1)
    rows = rows if pairs is not None else trained * batch
    return Position(record.step or 0, record.samples_seen, record.epoch, trained, rows)


def make_course(
    args: InfCLTrainingArguments, state: TrainerState, record: RunRecord | None, plan: BatchPlan | None
) -> Course:
    """The samples of the steps of a training, those before it was resumed included: of its plan if the batch grows."""
    earlier = 0 if record is None else record.samples_seen
    if plan is not None and plan.grows:
        return plan
    return EqualBatches(args.global_batch_size, state.max_steps, state.global_step, earlier)


def loop_values(
    args: InfCLTrainingArguments,
    loader: DataLoader,
    plan: BatchPlan,
    record: RunRecord | None,
    values: tuple[Any, ...],
    *,
    changed: bool,
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
        at = resumed_position(record, batch, windows if is_sized else sys.maxsize, None)
        begin = replace(at, windows=0, rows=0) if args.ignore_data_skip else at
    elif record is not None:
        begin = replace(at, rows=0 if args.ignore_data_skip or at.epoch > record.epoch else record.rows_of_epoch)
    elif plan.grows:  # also after the checkpoint of another trainer
        begin = at
    # ---- What is left ----
    if is_training_loader and plan.grows:
        windows = max(1, plan.windows(at.epoch))
        return begin, (plan.epochs, windows, examples, plan.samples, args.global_batch_size, windows, plan.steps)
    if is_training_loader:
        steps = plan.steps
        epochs = plan.epochs if is_sized and not is_stream else epochs
    elif is_sized and record is not None and record.step is not None and changed:
        if args.max_steps < 1:
            steps = record.step + max(0, steps - at.epoch * windows - at.windows)
        if not is_stream:
            epochs = at.epoch + math.ceil((at.windows + steps - record.step) / windows)
    if not is_sized and record is not None and record.step is not None:
        windows = max(windows, at.windows + steps - record.step)  # of the only pass
        micro_batches = windows * accumulation
    return begin, (epochs, windows, examples, steps * batch, batch, micro_batches, steps)
