"""The words of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from ...loading.shares import replay_share
from ...options.batch_options import DIVISION
from ...options.declaring import spelled
from ...shards.values import counted
from .answers import TOO_FEW_STEPS
from .costs import DECODED, GIB, LEFT_OUT, MEMORY, USABLE, Choice
from .planner import Planner


def report(planner: Planner, epochs: float, *, has_adapters: bool) -> Iterator[str]:
    """The lines of a plan; ``epochs`` are the length of the training, unless ``max_steps`` is.

    Raises:
        ValueError: the training set is smaller than one global batch.
    """
    options, choice = planner.options, planner.choice
    old = round(choice.global_batch * replay_share(options.replay_share)) if options.replay_dataset else 0
    yield from _premises(planner, old, has_adapters=has_adapters)
    yield f"\nChoose  {_words(planner, choice)}"
    division = f"{choice.gradient_accumulation_steps} × {choice.per_device_train_batch_size} pairs"
    yield f"  Micro-batches: {division}, texts of {choice.texts_at_once} encoded at once, graphs of {choice.kept} kept"
    if planner.searched and (found := _found(planner)):
        yield f"  A training finds them before its first step. To fix them, add {_written(found)}"
    cost = planner.cost(choice)
    unit, parts = ("GiB", GIB) if cost.total >= GIB else ("MiB", GIB / 1024)  # a small model's would be zeros
    yield f"\nMemory per GPU at the peak of a step, {unit}"
    for name in MEMORY:
        yield f"  {getattr(cost, name) / parts:7.2f}  {name}{' and gradients' * (name == 'weights')}"
    yield f"  {cost.total / parts:7.2f}  in all, of {USABLE * planner.memory_gib:.1f} GiB usable"
    if is_timed := options.measure or not options.use_cpu:
        yield from _times(planner)
    # The steps for each pair of the set, to which the old pairs of a batch do not belong.
    each = [one.share / one.choice.global_batch / (1 - old / choice.global_batch) for one in planner.stages]
    mean = sum(n * stage.seconds for n, stage in zip(each, planner.stages, strict=True)) / sum(each)
    if len(each) > 1:
        yield "The training has stages; the memory above is that of the last one."
        for stage in planner.stages:
            time = f": {duration(stage.seconds)}" * is_timed
            yield f"  {stage.share:.0%} of the samples: {stage.choice.global_batch:,} pairs{stage.words}{time}"
        if is_timed:
            yield f"  The mean of all steps is {duration(mean)}."

    def length(steps: int) -> str:
        return f"{counted(steps, 'step')}{f' and {duration(steps * mean)}' * is_timed}."

    pairs, steps = options.dataset_size, options.max_steps
    if pairs is not None:
        per_epoch = math.floor(pairs * sum(each) + 1e-6)
        if per_epoch == 0:
            raise ValueError(
                f"The training set of {pairs:,} pairs is smaller than one global batch, which training refuses. Lower "
                "--global_batch."
            )
        yield f"An epoch of {pairs:,} pairs takes {length(per_epoch)}"
        if steps <= 0:
            steps = math.ceil(per_epoch * epochs)  # as Trainer counts
            if epochs != 1:
                yield f"  {epochs:g} epochs take {length(steps)}"
    if options.max_steps > 0:
        yield f"  --max_steps takes {length(steps)}"
    elif pairs is None:
        what = "time" if is_timed else "steps"
        yield f"With --dataset_size, the number of its pairs, a plan also tells the {what} of an epoch."
    if 0 < steps < TOO_FEW_STEPS:
        few = f"Fewer than {TOO_FEW_STEPS} steps are too few for a learning rate schedule"
        yield f"  {few}: lower --global_batch, or train for longer."


def _premises(planner: Planner, old: int, *, has_adapters: bool) -> Iterator[str]:
    """What is planned, for which GPUs, and what the prediction leaves out."""
    options, choice, gpu = planner.options, planner.choice, planner.gpu.name
    counts = planner.counts(choice)
    trained = "all" if counts.trained == counts.parameters else f"{counts.trained / 1e6:.1f} million"
    yield (
        f"{options.model}: {counts.parameters / 1e6:.1f} million parameters, {trained} of them trained; embeddings of "
        f"{counts.dim} dimensions; {counts.objective} loss."
    )
    name = f"{'GPU' if options.gpu_memory else gpu} with {planner.memory_gib:g} GiB"
    batch = f"A global batch of {choice.global_batch:,} pairs"
    if options.use_cpu:
        how = "" if options.measure else ", and no time is predicted. --measure times a micro-batch on this machine"
        yield f"{batch} is {choice.rows:,} per process."
        yield f"With --use_cpu the memory below is still that of one {name}, in bf16{how}."
    else:
        rates = f" Times are predicted with the rates of an {gpu}." if options.gpu_memory else ""
        yield f"{batch} on {choice.gpus} × {name} is {choice.rows:,} per GPU.{rates}"
    left_out = [_written({name: value}) for name in LEFT_OUT if (value := getattr(options, name))]
    if left_out := [*left_out, *["the adapters of the model"] * has_adapters]:
        yield (
            f"The prediction leaves out {' and '.join(left_out)}: it is of bf16 and AdamW or Muon, with the whole "
            "weights on every GPU."
        )
    if old:
        yield (
            f"Replay: {old:,} of the {choice.global_batch:,} pairs are old, {choice.global_batch - old:,} new, with "
            "which an epoch ends."
        )


def _words(planner: Planner, choice: Choice) -> str:
    """The options of `infcl train` that it does not find by itself."""
    values = {name: getattr(choice, name) for name in DIVISION if planner.is_divided}
    values = values or {"global_batch_size": choice.global_batch}
    values |= {"use_cpu": planner.options.use_cpu, "bf16": planner.options.bf16 or not planner.options.use_cpu}
    values |= choice.options
    omitted = {*planner.searched, *_without_effect(choice)}
    if "global_batch_schedule" in values:  # from which they follow
        omitted |= {"global_batch_size", "gradient_accumulation_steps"}
    return _written({name: value for name, value in values.items() if name not in omitted and value is not False})


def _found(planner: Planner) -> dict[str, object]:
    """The options that a training finds, with the planned values."""
    choice, searched = planner.choice, set(planner.searched) - _without_effect(planner.choice)
    division = {} if planner.is_divided else {DIVISION[0]: choice.per_device_train_batch_size}
    return division | {name: value for name, value in choice.options.items() if name in searched}


def _without_effect(choice: Choice) -> set[str]:
    """The options that a training refuses, because it has too few micro-batches for them."""
    texts = {"texts_at_once"} if choice.dealt < 2 else set()
    return texts | ({"retain_graphs"} if choice.gradient_accumulation_steps == 1 else set())


def _written(options: Mapping[str, object]) -> str:
    """Options as they are written; of one that is True its name."""
    words = []
    for name, value in options.items():
        of_value = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(spelled, of_value)]
    return " ".join(words)


def _times(planner: Planner) -> Iterator[str]:
    """The time of a step of the last stage, what decides it, and the images that are to be loaded."""
    choice, on_cpu, compiled = planner.choice, planner.options.use_cpu, planner.options.torch_compile
    if planner.measured is not None:
        single, (time, peak), name, words = planner.single, planner.measured, "the CPU of this machine", ""
        if not on_cpu:
            cost, name = planner.cost(single), torch.cuda.get_device_name()
            words = (
                f" and {peak / GIB:.2f} GiB with weights and gradients. Predicted for {planner.gpu.name} are "
                f"{duration(time / planner.pace)} and {(cost.weights + cost.activations + cost.images) / GIB:.2f} GiB"
            )
        yield (
            f"\nMeasured on {name}: a micro-batch of {single.rows} takes {duration(time)} forward and backward without "
            f"torch.compile{words}. The times are scaled to it."
        )
    times = planner.times(choice)
    phases = ", ".join(f"{phase} {duration(time)}" for phase, time in times.items())
    yield f"\nTime of a step: {duration(sum(times.values()))} ({phases})."
    # The gain of compiling on a CPU is not known.
    if not on_cpu and (other := planner.find(compiled=not compiled)) is not None:
        time = sum(planner.times(other).values())
        yield f"  {'Without' if compiled else 'With'} --torch_compile it is {duration(time)}: {_words(planner, other)}"
    rate = planner.images_per_second
    yield (
        f"  {'This machine' if on_cpu else 'Each GPU'} trains up to {rate:,.0f} images per second. These times leave "
        f"out the loading, which takes about {counted(math.ceil(rate / DECODED), 'worker')} of {DECODED} images per "
        "second (one core, images of 54 kB: scripts/benchmarks/results/README.md#images-and-shards); `infcl check` "
        "measures yours."
    )


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.{2 if seconds < 10 else 1}f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
