"""`infcl train --dry_run`: the first steps of a training, which write nothing, and what they say of all of it."""

from __future__ import annotations

import atexit
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..card.telling import quieten
from ..files.text import counted
from ..models.counting import count_window, peak_of, shapes_of
from ..options.arguments import InfCLTrainingArguments
from ..processes.collectives import Processes
from ..trainer.trainer import InfCLTrainer
from .launched import leave, mistakes_in_one_line

STEPS = 3  # the first one also starts the workers, and chooses kernels or compiles them
_GIB = 2**30


def write_nothing(args: InfCLTrainingArguments) -> None:
    """Lets a training save, evaluate, log and push nothing; its ``output_dir`` becomes one that ends with the process.

    Raises:
        ValueError: its cache of features would have to be written first.
    """
    if args.cache_features is not None:
        raise ValueError(
            f"--dry_run writes nothing, but --cache_features {args.cache_features} is computed before the first step. "
            "Leave one of them out."
        )
    args.output_dir = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, args.output_dir, ignore_errors=True)
    args.save_strategy, args.eval_strategy, args.logging_strategy = SaveStrategy.NO, *[IntervalStrategy.NO] * 2
    args.eval_on_start = args.load_best_model_at_end = args.push_to_hub = False
    args.metric_for_best_model = args.early_stopping_patience = None
    args.report_to = []


def dry_run(trainer: InfCLTrainer, command: str) -> None:
    """Trains the first steps and prints memory, speed and the time of the whole training; collective."""
    quieten(trainer)
    steps = _FirstSteps(trainer)
    trainer.add_callback(steps)
    with mistakes_in_one_line(command, of_libraries=False):
        trainer.train()
    memory = max(peak for (peak,) in Processes().agree([steps.peak_memory]))
    if trainer.is_world_process_zero():
        print(*steps.lines(memory), sep="\n")
    leave(trainer)


class _FirstSteps(TrainerCallback):
    """Times the first steps of a training and then ends it.

    Attributes:
        peak_memory: bytes, of the GPU or, without one, of the process.
    """

    def __init__(self, trainer: InfCLTrainer) -> None:
        self._trainer, self._device = trainer, trainer.args.device
        self.peak_memory = 0
        self._ends: list[float] = []  # of the steps, after the begin of the training
        self._begins: list[float] = []  # of the steps, whose data were loaded before
        self._shapes: list[dict[str, Any]] = []  # of the micro-batches of the last step on this process

    def on_train_begin(self, *_: object, **kwargs: object) -> None:
        self._ends.append(time.perf_counter())

    def on_step_begin(self, *_: object, **kwargs: object) -> None:
        self._begins.append(time.perf_counter())
        self._shapes = shapes_of(self._trainer.training_data.window.batches)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if on_gpu := self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ends.append(time.perf_counter())
        used = torch.cuda.max_memory_allocated(self._device) if on_gpu else _resident()
        self.peak_memory = max(self.peak_memory, used)
        control.should_training_stop |= state.global_step == STEPS

    def lines(self, memory: float) -> Iterator[str]:
        """What the steps say of the training, whose processes use at most so many bytes each."""
        state, args = self._trainer.state, self._trainer.args
        seconds = [end - before for before, end in zip(self._ends, self._ends[1:], strict=False)]
        waits = [begin - before for before, begin in zip(self._ends, self._begins, strict=False)]
        # Without the first, if there are others, and without those after which it is known how many graphs fit.
        warm_up = 2 if self._device.type == "cuda" and args.retain_graphs == "auto" else 1
        later = slice(min(warm_up, len(seconds) - 1), None)
        step, wait = (sum(times[later]) / len(times[later]) for times in (seconds, waits))
        yield f"Dry run: {counted(state.global_step, 'step')} of {state.max_steps:,}. Nothing was written."
        of = "on each process"
        if self._device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self._device)
            of = f"of the {gpu.total_memory / _GIB:.1f} on each {gpu.name}"
        yield f"Memory: {memory / _GIB:.2f} GiB at the peak, {of}."
        yield (
            f"Speed: {args.global_batch_size / step:,.1f} images a second; a step of {args.global_batch_size:,} pairs "
            f"takes {step:.3g} s, of which it waits {wait:.2g} s for data{self._utilisation(step)}."
        )
        whole = timedelta(seconds=round(step * state.max_steps))
        yield f"The whole training takes {whole}, with equally fast loading, and without evaluations and checkpoints."

    def _utilisation(self, seconds: float) -> str:
        """The share of the chip's peak with which a step computes its products; empty if that is not known."""
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else ""
        with suppress(ValueError):  # a model that cannot be counted
            if peak := peak_of(name):
                share = count_window(self._trainer.dual_encoder, self._shapes) / seconds / peak
                return f", with {share:.0%} of the chip's {peak / 1e12:,.0f} TFLOP/s"
        return ""


def _resident() -> int:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
