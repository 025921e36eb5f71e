"""The words of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from . import prediction
from .counting import Counts
from .measuring import measure
from .periods import Period, mean_seconds
from .prediction import GIB, GPU, USABLE, Choice, hiding_bandwidth, is_gathered, link_bytes, memory

_FURTHER = (
    *("freeze", "freeze_layers", "image_size", "image_size_schedule", "patch_dropout", "full_tokens_last"),
    *("global_batch_schedule", "max_text_tokens", "keep_features", "keep_weights", "ema_decay", "ema_device"),
    *("matryoshka_dims", "teacher_embeddings"),
)
TOO_FEW_STEPS = 100  # for a schedule; fine-tuning 128 steps of 512 pairs has learned (scripts/real_pairs)
NEARBY = 0.02  # a batch that differs by this share may be proposed instead


def better_batch(
    choice: Choice, seconds: float, find: Callable[[int], tuple[float, Choice] | None], kept: Mapping[str, Any]
) -> list[str]:
    """A line that names a global batch nearby whose pairs take much less time, if there is one.

    A batch without a factor of a fitting size, such as a prime number, leaves only tiny micro-batches.

    Args:
        find: the choice for another global batch, with its seconds.
    """
    if "micro_batch" in kept or "accumulation" in kept:
        return []
    units = [choice.gpus * size for size in (8, 16, 32, 64, 128, 256)]
    near = {max(1, round(choice.global_batch / unit)) * unit for unit in units}
    close = [batch for batch in near if abs(batch - choice.global_batch) <= NEARBY * choice.global_batch]
    times = {batch: found[0] for batch in close if (found := find(batch)) is not None}
    if not times:
        return []
    per_pair = {batch: time / batch for batch, time in times.items()}
    fast = [batch for batch in times if per_pair[batch] <= 1.1 * min(per_pair.values())]
    batch = min(fast, key=lambda batch: abs(batch - choice.global_batch))
    if per_pair[batch] > 0.8 * seconds / choice.global_batch:
        return []
    return [
        f"  {choice.rows:,} pairs per GPU divide badly into micro-batches. --global_batch {batch} takes "
        f"{duration(times[batch])} per step instead of {duration(seconds)}."
    ]


def why_nothing_fits(counts: Counts, least: Choice, memory_gib: float) -> str:
    """Sentences that list the parts of the memory of the smallest choice, and a remedy."""
    parts = memory(counts, least)
    weights, features = parts.weights + parts.optimizer, parts.features + parts.loss
    if least.micro_batch > 1 and parts.activations > weights + features:
        cure = "Lower --per_device_train_batch_size and raise --gradient_accumulation_steps by the same factor."
    elif weights > features:
        cure = "Use GPUs with more memory, freeze a tower, or shard the weights with --fsdp."
    else:
        cure = "Lower --global_batch, or use more GPUs or GPUs with more memory."
    pairs = least.micro_batch
    size = "Not even micro-batches of one pair fit" if pairs == 1 else f"Micro-batches of {pairs:,} pairs do not fit"
    return (
        f"{size} into {USABLE:.0%} of {memory_gib:g} GiB: weights and optimizer take {weights / GIB:.1f} GiB, "
        f"features and loss of {least.rows:,} pairs {features / GIB:.1f}, all together {parts.total / GIB:.1f}. {cure}"
    )


def not_predicted(options: Any, has_adapters: bool) -> list[str]:
    """A line that names the given options whose effect the prediction leaves out, if there are any."""
    others = {
        "strategy": options.strategy != "ring" and options.gpus > 1,
        "backend": options.backend == "torch",
        "lora_rank": options.lora_rank is not None,
        "cache_features": options.cache_features is not None,
        "ema_device": options.ema_device is not None,
        "fsdp": bool(options.fsdp),
        "deepspeed": bool(options.deepspeed),
        "fp16": options.fp16,
    }
    names = [f"--{name} {getattr(options, name)}" for name, changed in others.items() if changed]
    names += ["the adapters of the model"] if has_adapters else []
    if not names:
        return []
    return [
        f"The prediction leaves out {' and '.join(names)}: it is of bf16, AdamW or Muon, whole weights on "
        "every GPU and the ring."
    ]


def words_of_further(options: Any) -> str:
    """The given options of a training that a `Choice` leaves to the user, as words of a command."""
    given = {name: getattr(options, name) for name in _FURTHER}
    words = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in given.items()}
    return "".join(f" --{name} {value}" for name, value in words.items() if value is not None)


def lines_of_earlier_steps(periods: Sequence[Period], choice: Choice, gpu: GPU) -> list[str]:
    """A line with the seconds of the steps before the last ones, with fewer patches or smaller images, and the mean."""
    told = [f"{one.words}, it is {duration(one.seconds(choice, gpu))}" for one in periods[:-1]]
    if not told:
        return []
    mean = duration(mean_seconds(periods, choice, gpu))
    return [f"  Before the last steps, with {'; with '.join(told)}; the mean is {mean}."]


def measured_line(config: PretrainedConfig, frozen: Mapping[str, Any], choice: Choice, counts: Counts, gpu: GPU) -> str:
    """One micro-batch of the choice, measured on this machine's GPU without compilation, beside its prediction."""
    measured, peak = measure(
        config, choice.micro_batch, torch.device("cuda"), **frozen, checkpointing=choice.checkpointing
    )
    single = replace(choice, gpus=1, accumulation=1, offload=False, compiled=False)
    times = prediction.seconds(counts, single, gpu)
    parts = memory(counts, single)
    return (
        f"Measured on {torch.cuda.get_device_name()}: a micro-batch of {choice.micro_batch} takes {duration(measured)} "
        f"forward and backward without torch.compile and {peak / GIB:.2f} GiB with weights and gradients. Predicted "
        f"for {gpu.name} are {duration(times['first pass'] + times['second pass'])} and "
        f"{(parts.weights + parts.activations + parts.images) / GIB:.2f} GiB."
    )


def memory_lines(counts: Counts, choice: Choice, memory_gib: float) -> list[str]:
    parts = memory(counts, choice)
    retain = min(choice.retain, choice.accumulation)
    gradients = ", gradients and DDP's buckets" if choice.gpus > 1 else " and gradients"
    graphs = "1 micro-batch" if retain == 1 else f"{retain} micro-batches, whose graphs are kept"
    where = "two micro-batches, the others in host memory" if choice.offload else "the window"
    named = {
        f"weights{gradients}": parts.weights,
        "optimizer": parts.optimizer,
        f"activations of {graphs}": parts.activations,
        f"images of {where}": parts.images,
        "features of the window": parts.features,
        "loss" if parts.loss else "loss (its peak is below that of the backward)": parts.loss,
    }
    lines = [f"  {size / GIB:7.2f}  {name}" for name, size in named.items()]
    total = f"  {parts.total / GIB:7.2f}  in all, of {USABLE * memory_gib:.1f} usable"
    return ["Memory per GPU at the peak of a step, GiB", *lines, total]


def link_lines(counts: Counts, choice: Choice, gpu: GPU) -> list[str]:
    """The bytes that each GPU sends in a step, and whether the computation of the loss hides their transfer."""
    sent = link_bytes(counts, choice)
    if is_gathered(counts.dim, choice):
        seconds = (sent["texts"] + sent["gradients of the texts"]) / 100e9
        hidden = (
            "The texts and their gradients are few enough to be exchanged at once. No computation hides this exchange, "
            f"which takes {duration(seconds)} at 100 GB/s."
        )
    else:
        rate = hiding_bandwidth(choice, gpu) / 1e9
        hidden = (
            "The texts and their gradients travel around a ring. The computation of the loss hides these transfers if "
            f"each GPU sends {rate:.1f} GB/s or more in each direction."
        )
    return [
        f"Each GPU sends {sum(sent.values()) / GIB:.2f} GiB per step: "
        + ", ".join(f"{name} {size / GIB:.2f}" for name, size in sent.items())
        + ".",
        f"  {hidden}",
        "  DDP sends the gradients of the weights during the last backward of the step.",
    ]


def replay_lines(old: int, choice: Choice) -> list[str]:
    """A line about the old pairs of a global batch, if there are any."""
    if old == 0:
        return []
    return [
        f"Replay: {old:,} of the {choice.global_batch:,} pairs are old, {choice.global_batch - old:,} new. Both take "
        "the same memory and time. An epoch ends with the new ones."
    ]


def step_lines(pairs: int, epochs: float, max_steps: int, choice: Choice, seconds: float, old: int = 0) -> list[str]:
    """The length of the training, and whether it has enough steps: a rule of thumb.

    Args:
        pairs: the pairs of the training set, without those that are replayed.
        max_steps: the length in steps, which replaces that in epochs if it is more than 0.
        seconds: of a step, the mean of the training.
        old: the replayed pairs of a global batch.
    """
    per_epoch = pairs // (choice.global_batch - old)
    if per_epoch == 0:
        return [
            f"The training set of {pairs:,} pairs is smaller than one global batch, which training refuses. Lower "
            "--global_batch."
        ]
    steps = max_steps if max_steps > 0 else math.ceil(per_epoch * epochs)  # as Trainer counts them
    if steps < TOO_FEW_STEPS:
        verdict = "This is too few steps for a learning rate schedule: lower --global_batch or train longer."
    elif steps < 1000:
        verdict = "This number of steps is enough for fine-tuning, but small for training from scratch."
    else:
        verdict = "This is a common number of steps."
    training = ""
    if max_steps > 0:
        training = f"; --max_steps {steps} takes {duration(steps * seconds)}"
    elif epochs != 1:
        training = f"; {epochs:g} epochs take {number(steps, 'step')} and {duration(steps * seconds)}"
    return [
        f"An epoch of {pairs:,} pairs takes {number(per_epoch, 'step')} and {duration(per_epoch * seconds)}{training}.",
        f"  {verdict}",
    ]


def stage_lines(
    stages: Sequence[tuple[int, int, int, int]], periods: Sequence[Period], choice: Choice, gpu: GPU
) -> list[str]:
    """For each size of a global batch that grows its division, its time, and its share of the training.

    Args:
        stages: as `BatchPlan.stages`; 0 steps if the length of the training is not known.
        periods: of the training.
        choice, gpu: of the last stage.
    """
    lines, times, before = ["The global batch grows; the memory above is that of the last one."], [], 0
    samples = sum(size * steps for size, _, _, steps in stages)
    for size, micro_batch, accumulation, steps in stages:
        divided = replace(choice, micro_batch=micro_batch, accumulation=accumulation)
        if steps:
            step = mean_seconds(periods, divided, gpu, before / samples, (before + steps * size) / samples)
        else:
            step = periods[-1].seconds(divided, gpu)
        before += steps * size
        times.append(steps * step)
        length = f"; {number(steps, 'step')}, {duration(times[-1])}" if steps else ""
        lines.append(
            f"  {size:,} pairs, {accumulation} × {micro_batch} per GPU: {duration(step)}, {size / step:,.0f} per second"
            f"{length}"
        )
    if all(times):
        whole = number(sum(steps for *_, steps in stages), "step")
        lines.append(f"  In all {whole} and {duration(sum(times))}.")
    return lines


def number(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
