"""`infcl train --dry_run`: the first steps of a training, which write nothing, and what they say of all of it."""

import atexit
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..card.telling import quieten
from ..files.text import counted
from ..loss.strategies import machines_of
from ..options.arguments import InfCLTrainingArguments
from ..processes.collectives import Processes
from ..trainer.trainer import InfCLTrainer
from .launched import leave, tell

STEPS = 3  # the first one also starts the workers, and chooses kernels or compiles them
_GIB = 2**30


def write_nothing(args: InfCLTrainingArguments) -> None:
    """Lets a training save, evaluate and push nothing; its ``output_dir`` becomes one that ends with the process.

    It logs every step, into Trainer's state alone.
    """
    args.output_dir = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, args.output_dir, ignore_errors=True)
    args.save_strategy, args.eval_strategy = SaveStrategy.NO, IntervalStrategy.NO
    args.logging_strategy, args.logging_steps = IntervalStrategy.STEPS, 1
    args.eval_on_start = args.load_best_model_at_end = args.push_to_hub = False
    args.metric_for_best_model = args.early_stopping_patience = None
    args.report_to = []


def dry_run(trainer: InfCLTrainer) -> None:
    """Trains the first steps and prints memory, speed and the time of the whole training; collective."""
    quieten(trainer)
    trainer.add_callback(_FirstSteps())
    trainer.train()
    device = trainer.args.device
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident()
    memory = max(peak for (peak,) in Processes().agree([used]))
    tell(trainer, *lines_of_steps(trainer, memory))
    leave(trainer)


class _FirstSteps(TrainerCallback):
    """Ends a training after its first steps."""

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        control.should_training_stop |= state.global_step == STEPS


def lines_of_steps(trainer: InfCLTrainer, memory: float) -> Iterator[str]:
    """The report on a training by the logs of its first steps; its processes use at most so many bytes each."""
    state, args = trainer.state, trainer.args
    logs = [entry for entry in state.log_history if "samples_per_second" in entry]
    # Without the first one, if there are others, and without that after which it is known how many graphs fit.
    warm_up = 2 if args.device.type == "cuda" and args.retain_graphs == "auto" else 1
    logs = logs[warm_up:] or logs[-1:]
    seconds = [args.global_batch_size / entry["samples_per_second"] for entry in logs]
    waits = [of_step * entry.get("data_wait", 0.0) for of_step, entry in zip(seconds, logs, strict=True)]
    step, wait = sum(seconds) / len(logs), sum(waits) / len(logs)
    yield f"Dry run: {counted(state.global_step, 'step')} of {state.max_steps:,}. Nothing was written."
    of = "on each process"
    if args.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(args.device)
        of = f"of the {gpu.total_memory / _GIB:.1f} on each {gpu.name}"
    yield f"Memory: {memory / _GIB:.2f} GiB at the peak, {of}."
    shares = [entry["train_mfu"] for entry in logs if "train_mfu" in entry]
    of_peak = f", with {sum(shares) / len(shares):.0%} of the chip's peak" if shares else ""
    yield (
        f"Speed: {args.global_batch_size / step:,.1f} images a second; a step of {args.global_batch_size:,} pairs "
        f"takes {step:.3g} s, of which it waits {wait:.2g} s for data{of_peak}."
    )
    if args.world_size > 1 and (exchange := machines_of(Processes(), args.device).chosen) is not None:
        yield f"Loss: {exchange}; on H100s it is predicted to take {exchange.seconds:.2g} s of a step."
    whole = timedelta(seconds=round(step * state.max_steps))
    yield f"The whole training takes {whole}, with equally fast loading, and without evaluations and checkpoints."


def _resident() -> int:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
