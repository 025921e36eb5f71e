"""The words of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from ...options.batch_options import DIVISION
from .costs import GIB, LEFT_OUT, USABLE, WORKER_RATE, Choice
from .planner import OF_CHOICE, Planner
from .prediction import memory, seconds

MOST_WORKERS = 24  # of a GPU: hosts rarely have more cores for each
TOO_FEW_STEPS = 100  # for a schedule; fine-tuning 128 steps of 512 pairs has learned (scripts/real_pairs)


def report(planner: Planner, epochs: float, *, has_adapters: bool) -> Iterator[str]:
    """The lines of a plan.

    Args:
        planner: the plan.
        epochs: the length of the training, unless ``max_steps`` is.
        has_adapters: whether the model is one with adapters.
    """
    options, choice, counts, name = planner.options, planner.choice, planner.counts, planner.gpu.name
    batch, pairs, stages = choice.global_batch, options.dataset_size, planner.stages
    trained = "all" if counts.trained == counts.parameters else f"{counts.trained / 1e6:.1f} million"
    yield (
        f"{options.model}: {counts.parameters / 1e6:.1f} million parameters, {trained} of them trained; embeddings of "
        f"{counts.dim} dimensions; {counts.objective} loss."
    )
    of_known, is_timed = options.gpu_memory is None, options.measure or not options.use_cpu
    rates = "" if of_known or options.use_cpu else f" Times are predicted with the rates of an {name}."
    yield (
        f"A global batch of {batch:,} pairs on {choice.gpus} × {name if of_known else 'GPU'} with "
        f"{planner.memory_gib:g} GiB is {choice.rows:,} per GPU.{rates}"
    )
    if options.use_cpu:
        how = "" if is_timed else ", and no time is predicted. --measure times a micro-batch on this machine"
        yield f"With --use_cpu the memory below is still that of a GPU in bf16{how}."
    if left_out := [*_left_out(planner), *(["the adapters of the model"] if has_adapters else [])]:
        yield (
            f"The prediction leaves out {' and '.join(left_out)}: it is of bf16, AdamW or Muon, whole weights on every "
            "GPU and the ring."
        )
    if planner.old:
        yield (
            f"Replay: {planner.old:,} of the {batch:,} pairs are old, {batch - planner.old:,} new. Both take the same "
            "memory and time. An epoch ends with the new ones."
        )
    # The steps for each pair of the set, to which the old pairs of a batch do not belong.
    each = [stage.share / stage.choice.global_batch / (1 - planner.old / batch) for stage in stages]
    per_epoch = None if pairs is None else math.floor(pairs * sum(each) + 1e-6)
    if per_epoch == 0:
        yield (
            f"The training set of {pairs:,} pairs is smaller than one global batch, which training refuses. Lower "
            "--global_batch."
        )
    command, whole = (_command(planner, choice, divided=divided) for divided in (False, True))
    yield f"\nChoose  {_words(command)}"
    if (extras := {name: value for name, value in whole.items() if name not in command}) and not options.use_cpu:
        yield "  Before the first step this finds what fits. To skip that search and take what is planned below, add"
        yield f"  {_words(extras)}"
    yield "\nMemory per GPU at the peak of a step, GiB"
    parts = memory(counts, choice)
    gradients = ", gradients and DDP's buckets" if choice.gpus > 1 else " and gradients"
    graphs = "1 micro-batch" if choice.kept == 1 else f"{choice.kept} micro-batches, whose graphs are kept"
    images = "two micro-batches, the others in host memory" if choice.offload_inputs else "the window"
    for size, what in (
        (parts.weights, f"weights{gradients}"),
        (parts.optimizer, "optimizer"),
        (parts.activations, f"activations of {graphs}"),
        (parts.images, f"images of {images}"),
        (parts.features, "features of the window"),
        (parts.loss, "loss" if parts.loss else "loss (its peak is below that of the backward)"),
        (parts.total, f"in all, of {USABLE * planner.memory_gib:.1f} usable"),
    ):
        yield f"  {size / GIB:7.2f}  {what}"
    if planner.measured is not None:
        yield f"\n{_measured(planner, *planner.measured)}"
    mean = sum(n * stage.seconds for n, stage in zip(each, stages, strict=True)) / sum(each)
    if is_timed:
        yield from _times(planner)
    if len(stages) > 1:
        yield "The training has stages; the memory above is that of the last one."
        for stage in stages:
            way, words = stage.choice, f", {stage.words}" if stage.words else ""
            rate = f"{way.global_batch / stage.seconds:,.0f} per second"
            time = f": {duration(stage.seconds)}, {rate}" if is_timed else ""
            division = f"{way.gradient_accumulation_steps} × {way.per_device_train_batch_size} per GPU"
            yield f"  {stage.share:.0%} of the samples: {way.global_batch:,} pairs, {division}{words}{time}"
        if is_timed:
            yield f"  The mean of all steps is {duration(mean)}."
    if per_epoch == 0:
        return

    def length(steps: int, joint: str) -> str:
        return f"{joint}{duration(steps * mean)}" if is_timed else ""

    steps = options.max_steps if options.max_steps > 0 else math.ceil((per_epoch or 0) * epochs)  # as Trainer counts
    if per_epoch is not None:
        yield f"An epoch of {pairs:,} pairs takes {number(per_epoch, 'step')}{length(per_epoch, ' and ')}."
    if options.max_steps > 0 and is_timed:
        yield f"  --max_steps {steps} takes {duration(steps * mean)}."
    elif per_epoch is not None and epochs != 1:
        yield f"  {epochs:g} epochs take {number(steps, 'step')}{length(steps, ' and ')}."
    if 0 < steps < TOO_FEW_STEPS:
        yield "  This is too few steps for a learning rate schedule: lower --global_batch or train longer."


def _command(planner: Planner, choice: Choice, *, divided: bool) -> dict[str, object]:
    """The options of `infcl train`: those that have to be written, or all that the choice consists of."""
    options, words = planner.options, {name: getattr(choice, name) for name in OF_CHOICE}
    if not (divided or planner.is_divided):
        words = {"global_batch_size": choice.global_batch, **words, **dict.fromkeys(DIVISION)}
    words |= {"use_cpu": options.use_cpu, "bf16": options.bf16 or not options.use_cpu, **choice.options}
    search_results = {"texts_at_once": choice.options.get("texts_at_once", 1), "retain_graphs": choice.retain_graphs}
    for name, value in search_results.items():
        is_decided = getattr(options, name) not in (None, "auto") or (divided and name in planner.searched)
        words[name] = value if is_decided else None
    if "global_batch_schedule" in words:  # from which they follow
        words |= {"global_batch_size": None, "gradient_accumulation_steps": None}
    if choice.dealt < 2:
        del words["texts_at_once"]  # refused, since it has no effect
    return {name: value for name, value in words.items() if value not in (None, False)}


def _words(options: Mapping[str, object]) -> str:
    texts = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in options.items()}
    return " ".join(f"--{name}{'' if value is True else f' {value}'}" for name, value in texts.items())


def _left_out(planner: Planner) -> Iterator[str]:
    """The options that the user has set and whose effect the prediction leaves out."""
    for name, values in LEFT_OUT.items():
        value = getattr(planner.options, name)
        if (value in values) if values else value:
            yield f"--{name} {value}"


def _measured(planner: Planner, time: float, peak: int) -> str:
    """One micro-batch, measured on this machine without compilation, beside its prediction for the GPU."""
    words = f"a micro-batch of {planner.single.rows} takes {duration(time)} forward and backward without torch.compile"
    if planner.options.use_cpu:
        return f"Measured on the CPU of this machine: {words}. The times are scaled to it."
    parts, predicted = memory(planner.counts, planner.single), seconds(planner.counts, planner.single, planner.gpu)
    return (
        f"Measured on {torch.cuda.get_device_name()}: {words} and {peak / GIB:.2f} GiB with weights and gradients. "
        f"Predicted for {planner.gpu.name} are {duration(sum(predicted.values()))} and "
        f"{(parts.weights + parts.activations + parts.images) / GIB:.2f} GiB. The times are scaled to it."
    )


def _times(planner: Planner) -> Iterator[str]:
    times, compiled = planner.times(planner.choice), planner.choice.torch_compile
    phases = ", ".join(f"{phase} {duration(time)}" for phase, time in times.items() if time)
    yield f"\nTime of a step: {duration(sum(times.values()))} ({phases})."
    other = planner.find(compiled=not compiled)
    if other is not None:
        time, words = sum(planner.times(other).values()), _words(_command(planner, other, divided=False))
        yield f"  {'Without' if compiled else 'With'} --torch_compile it is {duration(time)}: {words}"
    if compiled or other is not None:
        yield "  With --torch_compile the first step takes tens of seconds longer, because the model is compiled."
    rate = max(stage.choice.rows / stage.seconds for stage in planner.stages)
    workers = math.ceil(rate / WORKER_RATE)
    so = f"{number(workers, 'worker')} per GPU keep{'s' if workers == 1 else ''} up"
    if workers > MOST_WORKERS:
        so = f"data limit the rate even with {MOST_WORKERS} per GPU: store smaller images, or see --min_side"
    yield (
        f"  Each GPU trains up to {rate:,.0f} images per second. A worker (--dataloader_num_workers) loads about "
        f"{WORKER_RATE} JPEGs of 500 × 375, so {so}."
    )


def number(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
