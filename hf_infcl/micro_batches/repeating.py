"""Repeats a step that runs out of memory with fewer graphs or smaller micro-batches, before anything was updated."""

from __future__ import annotations

import traceback
from contextlib import suppress

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..encoders.sharding import is_sharded
from ..options.batch_division import possible_micro_batches
from ..processes.collectives import OtherRankFailedError, alone
from ..windows.setup import Context
from ..windows.step import WindowStep
from ..windows.window import Window
from .finding import Trial, Trials, largest_that_fits, memory_is_known, of_use, release_memory, undoing

logger = logging.get_logger(__name__)


def run_repeating(step: WindowStep, model: nn.Module, window: Window, number: int) -> Tensor:
    """Runs the step of a window, repeats it as long as memory runs out, and returns the loss; collective.

    Each time it keeps one graph fewer or, if it keeps only one, has halved micro-batches.

    Args:
        step: has the arguments, of which ``largest_micro_batch`` becomes what fits.
        number: the optimizer steps that were trained.

    Raises:
        torch.OutOfMemoryError: the step cannot be repeated; see `WindowStep.may_repeat`.
    """
    args = step.context.args
    while True:
        largest = max(window.sizes[0])
        # As before the step, if it is repeated.
        undo = undoing(model, step.extensions) if window.loaded else None
        try:
            loss = step.run(model, window, number)
            window.loaded.clear()
            return loss
        except torch.OutOfMemoryError as error:
            if not (step.may_repeat and _may_take_less(step, window)):
                traceback.clear_frames(error.__traceback__)  # which hold memory
                _advise(step.context, number, window)
                raise
        except OtherRankFailedError as error:  # which all other processes have heard of as well
            lacks_memory = torch.OutOfMemoryError.__name__ in str(error)
            if not (step.repeats and _may_take_less(step, window) and lacks_memory):
                raise
        # ---- The errors, which hold memory, are gone ----
        assert undo is not None
        undo()
        if (graphs := step.graphs.kept) > 1:
            step.graphs.keep_fewer()
            if args.retain_graphs != "auto":  # which is measured anew where graphs take another amount of memory
                args.retain_graphs = args.chosen["retain_graphs"] = str(graphs - 1)
            had, now, rounding = f"{graphs} graphs kept", graphs - 1, ""
        else:
            args.largest_micro_batch = -(-largest // 2)
            had, now, rounding = f"micro-batches of {largest} pairs", args.largest_micro_batch, "rounding and "
        window.divide(args.largest_micro_batch)
        release_memory()
        if args.process_index == 0:
            logger.warning(
                f"The step after step {number} ran out of memory with {had}. It is repeated with {now}, as are the "
                f"following ones; the result stays the same but for {rounding}dropout masks."
            )


def _may_take_less(step: WindowStep, window: Window) -> bool:
    """Whether the step can keep fewer graphs, or have smaller micro-batches."""
    return bool(window.loaded) and (step.graphs.kept > 1 or max(window.sizes[0]) > 1)


def _advise(context: Context, number: int, window: Window) -> None:
    """Says what to do about a step that ran out of memory and is not repeated."""
    args = context.args
    if window.loaded:
        what = (
            "A part of it was being exchanged among the processes or selected, so it is not repeated. Resume from the "
            f"last checkpoint with per_device_train_batch_size={max(1, args.per_device_train_batch_size // 2)}."
        )
    else:
        sizes = "per_device_train_batch_size and gradient_accumulation_steps"
        what = (
            f"Pass global_batch_size={args.global_batch_size} in place of {sizes}: it finds the micro-batch that fits, "
            "and repeats such a step with smaller ones."
        )
        if fits := _fitting(context, window):
            accumulation = args.global_batch_size // args.world_size // fits
            what = f"{fits} and {accumulation} would fit as {sizes}, with the same result. {what}"
    logger.error(f"The step after step {number} ran out of memory. {what}")


def _fitting(context: Context, window: Window) -> int:
    """The most pairs of a smaller micro-batch that fits on this process; 0 if none does, or it cannot be tried."""
    args = context.args
    batch = next((one for one in window.batches if "pixel_values" in one), None)  # others were released
    if batch is None or not memory_is_known(args.device) or is_sharded(context.accelerator):
        return 0
    release_memory()
    pairs = args.global_batch_size // args.world_size
    possible = [size for size in possible_micro_batches(args) if size < max(window.sizes[0])]
    with suppress(Exception):  # the error that is told is that of the step
        trials = Trials(context, batch)
        with alone():
            return largest_that_fits(trials, Trial(0), "micro_batch", of_use(possible, pairs))
    return 0
