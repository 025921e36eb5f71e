"""The words of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from ...loading.shares import replay_share
from ...options.batch_options import DIVISION
from .answers import LEAST, TOO_FEW_STEPS, batch_of_enough_steps
from .costs import DECODED, GIB, LEFT_OUT, USABLE, Choice, host_limits, seconds, step_cost
from .planner import Planner

MUCH_WARMUP = 0.1  # share of the steps


def report(planner: Planner, epochs: float, *, has_adapters: bool) -> Iterator[str]:
    """The lines of a plan; ``epochs`` are the length of the training, unless ``max_steps`` is."""
    options, choice, pairs = planner.options, planner.choice, planner.options.dataset_size
    old = round(choice.global_batch * replay_share(options.replay_share)) if options.replay_dataset else 0
    yield from _premises(planner, old, has_adapters=has_adapters)
    # The steps for each pair of the set, to which the old pairs of a batch do not belong.
    each = [one.share / one.choice.global_batch / (1 - old / choice.global_batch) for one in planner.stages]
    per_epoch = None if pairs is None else math.floor(pairs * sum(each) + 1e-6)
    if per_epoch == 0:
        yield (
            f"The training set of {pairs:,} pairs is smaller than one global batch, which training refuses. Lower "
            "--global_batch."
        )
    written, found = _options(planner, choice)
    yield f"\nChoose  {_words(written)}"
    if found and not options.use_cpu:
        yield "  Before the first step this finds what fits. To skip that search and take what is planned below, add"
        yield f"  {_words(found)}"
    cost, graphs = step_cost(planner.counts, choice), f"{choice.kept} micro-batch{'es' * (choice.kept > 1)}"
    yield f"\nMemory per GPU at the peak of a step, GiB, with the graphs of {graphs}"
    for what, size in {**cost.memory, f"in all, of {USABLE * planner.memory_gib:.1f} usable": cost.total}.items():
        if size:  # without the loss, if the peak is in a backward
            yield f"  {size / GIB:7.2f}  {what}{' and gradients' if what == 'weights' else ''}"
    mean = sum(n * stage.seconds for n, stage in zip(each, planner.stages, strict=True)) / sum(each)
    is_timed = options.measure or not options.use_cpu
    if is_timed:
        yield from _times(planner)
    if len(planner.stages) > 1:
        yield "The training has stages; the memory above is that of the last one."
        for stage in planner.stages:
            way, words = stage.choice, f", {stage.words}" if stage.words else ""
            division = f"{way.gradient_accumulation_steps} × {way.per_device_train_batch_size} per GPU"
            rate = f": {duration(stage.seconds)}, {way.global_batch / stage.seconds:,.0f} per second" * is_timed
            yield f"  {stage.share:.0%} of the samples: {way.global_batch:,} pairs, {division}{words}{rate}"
        if is_timed:
            yield f"  The mean of all steps is {duration(mean)}."
    if per_epoch == 0:
        return
    steps = options.max_steps if options.max_steps > 0 else math.ceil((per_epoch or 0) * epochs)  # as Trainer counts
    if per_epoch is not None:
        time = f" and {duration(per_epoch * mean)}" * is_timed
        yield f"An epoch of {pairs:,} pairs takes {number(per_epoch, 'step')}{time}."
    if options.max_steps > 0 and is_timed:
        yield f"  --max_steps {steps} takes {duration(steps * mean)}."
    elif per_epoch is not None and epochs != 1:
        yield f"  {epochs:g} epochs take {number(steps, 'step')}{f' and {duration(steps * mean)}' * is_timed}."
    warmup = options.warmup_steps or 0
    if (share := warmup / max(1, steps) if warmup >= 1 else warmup) > MUCH_WARMUP and steps:
        tenth = f"a tenth of them is --warmup_steps {max(1, round(MUCH_WARMUP * steps))}"
        yield f"  The warm-up takes {share:.0%} of the steps; {tenth}."
    if 0 < steps < TOO_FEW_STEPS:
        yield f"  This is too few steps for a learning rate schedule: {_more_steps(planner, steps, epochs)}."
    if pairs is None and options.dataset and options.max_steps <= 0:
        what = "time" if is_timed else "steps"
        yield f"With --dataset_size, the number of its pairs, a plan also tells the {what} of an epoch."


def _more_steps(planner: Planner, steps: int, epochs: float) -> str:
    """What to write for `TOO_FEW_STEPS` steps."""
    if planner.options.max_steps > 0:
        return f"raise --max_steps to {TOO_FEW_STEPS} or more"
    longer = f"train for {math.ceil(epochs * TOO_FEW_STEPS / steps)} epochs or more"
    fewer, several = batch_of_enough_steps(planner.choice.global_batch * steps), len(planner.stages) > 1
    return longer if several or fewer < LEAST else f"lower --global_batch to {fewer:,}, or {longer}"


def _premises(planner: Planner, old: int, *, has_adapters: bool) -> Iterator[str]:
    """What is planned, for which GPUs, and what the prediction leaves out."""
    options, choice, counts, name = planner.options, planner.choice, planner.counts, planner.gpu.name
    trained = "all" if counts.trained == counts.parameters else f"{counts.trained / 1e6:.1f} million"
    yield (
        f"{options.model}: {counts.parameters / 1e6:.1f} million parameters, {trained} of them trained; embeddings of "
        f"{counts.dim} dimensions; {counts.objective} loss."
    )
    is_known = options.gpu_memory is None
    rates = "" if is_known or options.use_cpu else f" Times are predicted with the rates of an {name}."
    gpu = f"{name if is_known else 'GPU'} with {planner.memory_gib:g} GiB"
    where, each = ("", "process") if options.use_cpu else (f" on {choice.gpus} × {gpu}", "GPU")
    yield f"A global batch of {choice.global_batch:,} pairs{where} is {choice.rows:,} per {each}.{rates}"
    if options.use_cpu:
        how = "" if options.measure else ", and no time is predicted. --measure times a micro-batch on this machine"
        yield f"With --use_cpu the memory below is still that of one {gpu}, in bf16{how}."
    values = {name: getattr(options, name) for name in LEFT_OUT}
    left_out = [f"--{name} {value}" for name, value in values.items() if value and value in (LEFT_OUT[name] or [value])]
    if left_out := [*left_out, *["the adapters of the model"] * has_adapters]:
        yield (
            f"The prediction leaves out {' and '.join(left_out)}: it is of bf16, AdamW or Muon, whole weights on every "
            "GPU and the ring."
        )
    if old:
        yield (
            f"Replay: {old:,} of the {choice.global_batch:,} pairs are old, {choice.global_batch - old:,} new, with "
            "which an epoch ends."
        )


def _options(planner: Planner, choice: Choice) -> tuple[dict[str, object], dict[str, object]]:
    """The options of `infcl train` that have to be written, and those that it finds."""
    values = {"global_batch_size": choice.global_batch} | {name: getattr(choice, name) for name in DIVISION}
    values |= {"use_cpu": planner.options.use_cpu, "bf16": planner.options.bf16 or not planner.options.use_cpu}
    values |= choice.options
    unused = {"texts_at_once"} if choice.dealt < 2 else set()  # refused, since it has no effect
    unused |= {"retain_graphs"} if choice.gradient_accumulation_steps == 1 else set()
    unused |= {"global_batch_size"} if planner.is_divided else set()
    if "global_batch_schedule" in values:  # from which they follow
        unused |= {"global_batch_size", "gradient_accumulation_steps"}
    used = {name: value for name, value in values.items() if name not in unused and value is not False}
    found = {*planner.searched, *(() if planner.is_divided else DIVISION)}
    written = {name: value for name, value in used.items() if name not in found}
    return written, {name: value for name, value in used.items() if name in found}


def _words(options: Mapping[str, object]) -> str:
    texts = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in options.items()}
    return " ".join(f"--{name}{'' if value is True else f' {value}'}" for name, value in texts.items())


def _times(planner: Planner) -> Iterator[str]:
    on_cpu = planner.options.use_cpu  # where the gain of compiling is not known
    if planner.measured is not None:
        time, peak = planner.measured
        name, words = "the CPU of this machine", "."
        if not on_cpu:
            cost, name = step_cost(planner.counts, planner.single), torch.cuda.get_device_name()
            words = (
                f" and {peak / GIB:.2f} GiB with weights and gradients. Predicted for {planner.gpu.name} are "
                f"{duration(sum(seconds(cost, planner.single, planner.gpu).values()))} and "
                f"{(cost.weights + cost.activations + cost.images) / GIB:.2f} GiB."
            )
        yield (
            f"\nMeasured on {name}: a micro-batch of {planner.single.rows} takes {duration(time)} forward and backward "
            f"without torch.compile{words} The times are scaled to it."
        )
    times, compiled = planner.times(planner.choice), planner.options.torch_compile
    phases = ", ".join(f"{phase} {duration(time)}" for phase, time in times.items() if time)
    yield f"\nTime of a step: {duration(sum(times.values()))} ({phases})."
    if not on_cpu and (other := planner.find(compiled=not compiled)) is not None:
        time, words = sum(planner.times(other).values()), _words(_options(planner, other)[0])
        yield f"  {'Without' if compiled else 'With'} --torch_compile it is {duration(time)}: {words}"
    if not on_cpu and host_limits(step_cost(planner.counts, planner.choice), planner.choice, planner.gpu):
        yield "  The host's launches limit it, not the GPU: more pairs in a micro-batch take hardly longer."
    rate, device = planner.images_per_second, "This machine" if on_cpu else "Each GPU"
    workers = math.ceil(rate / DECODED)
    yield (
        f"  {device} trains up to {rate:,.0f} images per second. These times leave out the loading, which takes about "
        f"{number(workers, 'worker')} of {DECODED} images per second (one core, images of 54 kB: "
        "scripts/benchmarks/results/README.md#images-and-shards); `infcl check` measures yours."
    )


def number(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.{2 if seconds < 10 else 1}f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
