"""The words of a plan."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from ...options.batch_options import DIVISION
from .costs import LEFT_OUT, USABLE, Choice
from .planner import CHOSEN, Planner
from .prediction import GIB, memory, seconds

WORKER_RATE = 540  # images per second of one worker of the data loader, from scripts/benchmarks/results/data.csv
MOST_WORKERS = 24  # of a GPU: hosts rarely have more cores for each
TOO_FEW_STEPS = 100  # for a schedule; fine-tuning 128 steps of 512 pairs has learned (scripts/real_pairs)


def report(planner: Planner, epochs: float, *, has_adapters: bool) -> Iterator[str]:
    """The lines of a plan.

    Args:
        planner: the plan.
        epochs: the length of the training, unless ``max_steps`` is.
        has_adapters: whether the model is one with adapters.
    """
    options, choice, counts, gpu = planner.options, planner.choice, planner.counts, planner.gpu
    batch, times = choice.global_batch, seconds(counts, choice, gpu)
    trained = "all" if counts.trained == counts.parameters else f"{counts.trained / 1e6:.1f} million"
    rates = "" if options.gpu_memory is None else f" Times are predicted with the rates of an {gpu.name}."
    name = gpu.name if options.gpu_memory is None else "GPU"
    yield (
        f"{options.model}: {counts.parameters / 1e6:.1f} million parameters, {trained} of them trained; embeddings of "
        f"{counts.dim} dimensions; {counts.objective} loss."
    )
    yield (
        f"A global batch of {batch:,} pairs on {choice.gpus} × {name} with {planner.memory_gib:g} GiB is "
        f"{choice.rows:,} per GPU.{rates}"
    )
    left_out = [*_left_out(options), *(["the adapters of the model"] if has_adapters else [])]
    if left_out:
        yield (
            f"The prediction leaves out {' and '.join(left_out)}: it is of bf16, AdamW or Muon, whole weights on every "
            "GPU and the ring."
        )
    if planner.old:
        yield (
            f"Replay: {planner.old:,} of the {batch:,} pairs are old, {batch - planner.old:,} new. Both take the same "
            "memory and time. An epoch ends with the new ones."
        )
    yield f"\nChoose  {command_words(choice)}"
    if not ({"micro_batch", "accumulation"} & planner.decided.keys() or options.fsdp or options.deepspeed):
        simplest = replace(choice, retain=planner.decided.get("retain", 1))
        pairs = "" if planner.growth is not None else f"--global_batch_size {batch} "
        yield f"Simplest  {pairs}{command_words(simplest, DIVISION)}  (finds what fits before the first step)"
    yield "\nMemory per GPU at the peak of a step, GiB"
    parts = memory(counts, choice)
    graphs = "1 micro-batch" if choice.kept == 1 else f"{choice.kept} micro-batches, whose graphs are kept"
    gradients = ", gradients and DDP's buckets" if choice.gpus > 1 else " and gradients"
    where = "two micro-batches, the others in host memory" if choice.offload else "the window"
    for size, what in (
        (parts.weights, f"weights{gradients}"),
        (parts.optimizer, "optimizer"),
        (parts.activations, f"activations of {graphs}"),
        (parts.images, f"images of {where}"),
        (parts.features, "features of the window"),
        (parts.loss, "loss" if parts.loss else "loss (its peak is below that of the backward)"),
        (parts.total, f"in all, of {USABLE * planner.memory_gib:.1f} usable"),
    ):
        yield f"  {size / GIB:7.2f}  {what}"
    phases = ", ".join(f"{phase} {duration(time)}" for phase, time in times.items() if time)
    yield f"\nTime of a step: {duration(sum(times.values()))} ({phases})."
    other = planner.find(batch, compiled=not choice.compiled)
    if other is not None:
        how = "Without" if choice.compiled else "With"
        yield f"  {how} --torch_compile it is {duration(other[0])}: choose {command_words(other[1])}"
    if choice.compiled or other is not None:
        yield "  With --torch_compile the first step takes tens of seconds longer, because the model is compiled."
    rate = max(stage.choice.rows / stage.seconds for stage in planner.stages)
    workers = math.ceil(rate / WORKER_RATE)
    yield (
        f"  Each GPU trains up to {rate:,.0f} images per second. A worker (--dataloader_num_workers) loads about "
        f"{WORKER_RATE} JPEGs of 500 × 375, so "
        + (
            f"{number(workers, 'worker')} per GPU keep up."
            if workers <= MOST_WORKERS
            else f"data limit the rate even with {MOST_WORKERS} per GPU: store smaller images, or see --min_side."
        )
    )
    if options.measure:
        yield _measured(planner)
    yield from _length(planner, epochs)


def command_words(choice: Choice, without: Collection[str] = ()) -> str:
    """The options of `infcl train`, but for some."""
    words = {name: getattr(choice, attribute) for name, attribute in CHOSEN.items() if name not in without}
    del words["activation_checkpointing"]  # the newer name of the other
    words |= {"retain_graphs": choice.retain if choice.retain > 1 else None, "bf16": True, **choice.options}
    if "global_batch_schedule" in words:
        words.pop("gradient_accumulation_steps", None)  # follows from it
    if choice.dealt < 2:
        words.pop("texts_at_once", None)  # refused, since it has no effect
    texts = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in words.items()}
    return " ".join(f"--{name}{'' if v is True else f' {v}'}" for name, v in texts.items() if v not in (None, False))


def _left_out(options: argparse.Namespace) -> Iterator[str]:
    """The options that the user has set and whose effect the prediction leaves out."""
    for name, values in LEFT_OUT.items():
        value = getattr(options, name)
        if (value in values) if values else value:
            yield f"--{name} {value}"


def _measured(planner: Planner) -> str:
    """One micro-batch, measured on this machine's GPU without compilation, beside its prediction."""
    choice, (measured, peak) = planner.choice, planner.measure()
    single = replace(choice, gpus=1, accumulation=1, offload=False, compiled=False, options={})
    times, parts = seconds(planner.counts, single, planner.gpu), memory(planner.counts, single)
    return (
        f"Measured on {torch.cuda.get_device_name()}: a micro-batch of {choice.micro_batch} takes {duration(measured)} "
        f"forward and backward without torch.compile and {peak / GIB:.2f} GiB with weights and gradients. Predicted "
        f"for {planner.gpu.name} are {duration(times['first pass'] + times['second pass'])} and "
        f"{(parts.weights + parts.activations + parts.images) / GIB:.2f} GiB."
    )


def _length(planner: Planner, epochs: float) -> Iterator[str]:
    """The stages, the length of the training, and whether it has enough steps: a rule of thumb."""
    pairs, max_steps, stages = planner.options.dataset_size, planner.options.max_steps, planner.stages
    new = 1 - planner.old / planner.choice.global_batch  # share of a batch; old pairs come in addition to the set
    each = [stage.share / stage.choice.global_batch for stage in stages]  # steps for a pair of the batches
    steps_per_pair = sum(each) / new
    if len(stages) > 1:
        yield "The training has stages; the memory above is that of the last one."
    for stage in stages if len(stages) > 1 else ():
        way, words = stage.choice, f", {stage.words}" if stage.words else ""
        yield (
            f"  {stage.share:.0%} of the samples: {way.global_batch:,} pairs, {way.accumulation} × {way.micro_batch} "
            f"per GPU{words}: {duration(stage.seconds)}, {way.global_batch / stage.seconds:,.0f} per second"
        )
    mean = sum(n * stage.seconds for n, stage in zip(each, stages, strict=True)) / sum(each)
    if len(stages) > 1:
        yield f"  The mean of all steps is {duration(mean)}."
    per_epoch = 0 if pairs is None else math.floor(pairs * steps_per_pair + 1e-6)
    if pairs is not None and per_epoch == 0:
        yield (
            f"The training set of {pairs:,} pairs is smaller than one global batch, which training refuses. Lower "
            "--global_batch."
        )
        return
    steps = max_steps if max_steps > 0 else math.ceil(per_epoch * epochs)  # as Trainer counts them
    if pairs is not None:
        yield f"An epoch of {pairs:,} pairs takes {number(per_epoch, 'step')} and {duration(per_epoch * mean)}."
    if max_steps > 0 or (pairs is not None and epochs != 1):
        what = f"--max_steps {steps} takes" if max_steps > 0 else f"{epochs:g} epochs take {number(steps, 'step')} and"
        yield f"  {what} {duration(steps * mean)}."
    if 0 < steps < TOO_FEW_STEPS:
        yield "  This is too few steps for a learning rate schedule: lower --global_batch or train longer."


def number(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
