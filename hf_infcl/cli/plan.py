"""`infcl plan`: predicts memory and time of a training from the model's config alone."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from .. import planning
from ..encoders.dual_encoder import TOWERS
from ..options.arguments import InfCLTrainingArguments
from ..options.combinations import CHECKPOINTING
from ..planning import GIB, GPU, GPUS, Choice, Counts
from .launched import mistakes_in_one_line
from .models import load_config
from .parser import Parser

WORKER_RATE = 540  # images per second of one worker of the data loader, from scripts/benchmarks/results/data.csv
FACTORS = ("per_device_train_batch_size", "gradient_accumulation_steps")
NEARBY = 0.02  # a batch that differs by this share may be proposed instead
SMALL = 32  # below this micro-batch gradient checkpointing is considered


def plan(parser: Parser, namespace: argparse.Namespace, given: set[str]) -> None:
    """Prints the memory, the time and the options of a training."""
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        print("\n".join(report(namespace, given)))


def report(options: argparse.Namespace, given: Collection[str]) -> list[str]:
    """The lines of the plan.

    Args:
        options: those of `infcl plan`, among them all options of a training.
        given: the names of those that the user has set.

    Raises:
        ValueError: an option makes no sense, or nothing fits.
    """
    check_options(options)
    gpu = GPUS[options.gpu]
    memory_gib = options.gpu_memory or gpu.memory_gib
    kept = kept_choices(options, given)
    global_batch = global_batch_of(options, kept)
    config = load_config(options.model, options.open_clip_model)
    counts: dict[bool, Counts] = {}

    def find(batch: int, *, compiled: bool) -> tuple[float, Choice] | None:
        setting: dict[str, Any] = {"gpus": options.gpus, "global_batch": batch, "gpu": gpu, "memory_gib": memory_gib}
        return planning.best(planning.choices(counts, decided=kept, compiled=compiled, **setting))

    asked = kept.get("checkpointing", False)
    frozen: dict[str, Any] = {"freeze": options.freeze, "freeze_layers": options.freeze_layers}
    counts[asked] = planning.count(config, **frozen, checkpointing=asked)
    found = find(global_batch, compiled=options.torch_compile)
    wanted = min(SMALL, global_batch // options.gpus, kept.get("micro_batch", SMALL))
    if "checkpointing" not in kept and (found is None or found[1].micro_batch < wanted):
        counts[True] = planning.count(config, **frozen, checkpointing=True)
        found = find(global_batch, compiled=options.torch_compile)
    if found is None:
        rows = global_batch // options.gpus
        size = kept.get("micro_batch") or rows // kept.get("accumulation", rows)
        least = {"retain": 1, "offload": True, "checkpointing": True} | kept
        least |= {"micro_batch": size, "accumulation": rows // size, "compiled": options.torch_compile}
        raise ValueError(why_nothing_fits(counts[least["checkpointing"]], Choice(options.gpus, **least), memory_gib))
    choice = found[1]
    of_model = counts[choice.checkpointing]
    if options.plot is not None:
        draw(options.plot, of_model, choice, gpu, memory_gib)
    times = planning.seconds(of_model, choice, gpu)
    step = sum(times.values())
    trained = "all" if of_model.trained == of_model.parameters else f"{of_model.trained / 1e6:.1f} million"
    rates = "" if options.gpu_memory is None else f" Times are predicted with the rates of an {gpu.name}."
    name = gpu.name if options.gpu_memory is None else "GPU"
    further = frozen | {name: getattr(options, name) for name in ("keep_features", "keep_weights")}
    freeze = "".join(f" --{name} {value}" for name, value in further.items() if value is not None)
    lines = [
        f"{options.model}: {of_model.parameters / 1e6:.1f} million parameters, {trained} of them trained; embeddings "
        f"of {of_model.dim} dimensions; {of_model.objective} loss.",
        f"A global batch of {choice.global_batch:,} pairs on {choice.gpus} × {name} with {memory_gib:g} GiB is "
        f"{choice.rows:,} per GPU.{rates}",
        *not_predicted(options),
        "",
        f"Choose  {choice.options}{freeze}",
        *better_batch(choice, step, lambda batch: find(batch, compiled=options.torch_compile), kept),
        "",
        *memory_lines(of_model, choice, memory_gib),
        "",
        f"Time of a step: {_duration(step)} ({', '.join(f'{name} {_duration(t)}' for name, t in times.items())}).",
    ]
    other = find(global_batch, compiled=not options.torch_compile)
    if other is not None:
        how = "Without" if options.torch_compile else "With"
        lines.append(f"  {how} --torch_compile it is {_duration(other[0])}: choose {other[1].options}{freeze}")
    if options.torch_compile or other is not None:
        lines.append(
            "  With --torch_compile the first step takes tens of seconds longer, because the model is compiled."
        )
    rate = choice.rows / step
    workers = math.ceil(rate / WORKER_RATE)
    lines.append(
        f"  Each GPU trains {rate:,.0f} images per second. Loading them takes about {_number(workers, 'worker')} per "
        "GPU (--dataloader_num_workers, with JPEGs of 500 × 375)."
    )
    if choice.gpus > 1:
        lines += link_lines(of_model, choice, gpu)
    if options.measure:
        lines.append(measured_line(config, frozen, choice, of_model, gpu))
    epochs = options.num_train_epochs if "num_train_epochs" in given and "epochs" not in given else options.epochs
    if options.dataset_size is not None:
        lines += step_lines(options.dataset_size, epochs, options.max_steps, choice, step)
    return lines


def check_options(options: argparse.Namespace) -> None:
    """Raises a ValueError if an option has a value with which nothing can be planned."""
    numbers = ("global_batch", "gpus", "gpu_memory", "dataset_size", "epochs", "num_train_epochs")
    if options.freeze_layers is not None and options.freeze_layers < 0:
        raise ValueError(f"--freeze_layers must be at least 0, got {options.freeze_layers}.")
    for name in (*numbers, "per_device_train_batch_size", "gradient_accumulation_steps"):
        if (value := getattr(options, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} must be more than 0, got {value}.")
    if options.gpu not in GPUS:
        raise ValueError(
            f"--gpu must be {' or '.join(GPUS)}, whose rates were measured, got {options.gpu!r}. For another GPU give "
            "its --gpu_memory. The predicted memory is then correct, and the times are those of --gpu."
        )
    if options.freeze not in (None, *TOWERS):
        raise ValueError(f"--freeze must be {' or '.join(TOWERS)}, got {options.freeze!r}.")
    if options.retain_graphs != "auto" and not options.retain_graphs.isdecimal():
        raise ValueError(f"--retain_graphs must be 'auto' or an integer of at least 0, got {options.retain_graphs!r}.")
    if options.measure and not torch.cuda.is_available():
        raise ValueError("--measure needs a GPU. Omit it to predict from the config alone.")


def kept_choices(options: argparse.Namespace, given: Collection[str]) -> dict[str, Any]:
    """The attributes of `Choice` that the given options of the training decide."""
    kept = {
        "per_device_train_batch_size": ("micro_batch", options.per_device_train_batch_size),
        "gradient_accumulation_steps": ("accumulation", options.gradient_accumulation_steps),
        "offload_inputs": ("offload", options.offload_inputs),
        **{name: ("checkpointing", bool(getattr(options, name))) for name in CHECKPOINTING if name in options},
    }
    found = {attribute: value for name, (attribute, value) in kept.items() if name in given}
    if "retain_graphs" in given and options.retain_graphs != "auto":
        found["retain"] = max(1, int(options.retain_graphs))
    if options.optimizer == "muon":
        found["muon"] = True
    found |= {name: True for name in ("keep_features", "keep_weights") if getattr(options, name)}
    return found


def global_batch_of(options: argparse.Namespace, kept: Mapping[str, Any]) -> int:
    """The global batch that is given, or the product of its factors.

    Raises:
        ValueError: neither is given, or they contradict each other.
    """
    factors = kept.get("micro_batch"), kept.get("accumulation")
    least = options.gpus * (factors[0] or 1) * (factors[1] or 1)
    words = " × ".join(
        [f"--gpus {options.gpus}"]
        + [f"--{name} {getattr(options, name)}" for name, value in zip(FACTORS, factors, strict=True) if value]
    )
    if options.global_batch is None:
        if None in factors:
            raise ValueError(f"Give --global_batch, or both --{' and --'.join(FACTORS)}, whose product it is.")
        return int(least)
    if None not in factors and options.global_batch != least:
        raise ValueError(f"{words} is {least:,}, but --global_batch is {options.global_batch:,}. Omit one of them.")
    if any(factors) and options.global_batch % least:
        near = max(least, round(options.global_batch / least) * least)
        raise ValueError(
            f"--global_batch {options.global_batch:,} is no multiple of {words}, which is {least:,}. Choose {near:,}."
        )
    return int(options.global_batch)


def not_predicted(options: argparse.Namespace) -> list[str]:
    """A line that names the given options whose effect the prediction leaves out, if there are any."""
    others = {
        "strategy": options.strategy != "ring" and options.gpus > 1,
        "backend": options.backend == "torch",
        "lora_rank": options.lora_rank is not None,
        "cache_features": options.cache_features is not None,
        "fsdp": bool(options.fsdp),
        "deepspeed": bool(options.deepspeed),
        "fp16": options.fp16,
    }
    names = [f"--{name} {getattr(options, name)}" for name, changed in others.items() if changed]
    if not names:
        return []
    return [
        f"The prediction leaves out {' and '.join(names)}: it is of bf16, AdamW or Muon, whole weights on "
        "every GPU and the ring."
    ]


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
        f"{_duration(times[batch])} per step instead of {_duration(seconds)}."
    ]


def why_nothing_fits(counts: Counts, least: Choice, memory_gib: float) -> str:
    """Sentences that list the parts of the memory of the smallest choice, and a remedy."""
    parts = planning.memory(counts, least)
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
        f"{size} into {planning.USABLE:.0%} of {memory_gib:g} GiB: weights and optimizer take {weights / GIB:.1f} GiB, "
        f"features and loss of {least.rows:,} pairs {features / GIB:.1f}, all together {parts.total / GIB:.1f}. {cure}"
    )


def measured_line(config: PretrainedConfig, frozen: Mapping[str, Any], choice: Choice, counts: Counts, gpu: GPU) -> str:
    """One micro-batch of the choice, measured on this machine's GPU without compilation, beside its prediction."""
    seconds, peak = planning.measure(
        config, choice.micro_batch, torch.device("cuda"), **frozen, checkpointing=choice.checkpointing
    )
    single = replace(choice, gpus=1, accumulation=1, offload=False, compiled=False)
    times = planning.seconds(counts, single, gpu)
    parts = planning.memory(counts, single)
    return (
        f"Measured on {torch.cuda.get_device_name()}: a micro-batch of {choice.micro_batch} takes {_duration(seconds)} "
        f"forward and backward without torch.compile and {peak / GIB:.2f} GiB with weights and gradients. Predicted "
        f"for {gpu.name} are {_duration(times['first pass'] + times['second pass'])} and "
        f"{(parts.weights + parts.activations + parts.images) / GIB:.2f} GiB."
    )


def check_memory(config: PretrainedConfig, args: InfCLTrainingArguments, gpu_bytes: float) -> str | None:
    """Compares the predicted memory of a training with that of its GPU, before the training begins.

    Trainings that shard the weights (FSDP, DeepSpeed) or read the image features from a cache are not predicted.

    Returns:
        A warning if the training probably does not fit, or if its memory cannot be predicted.

    Raises:
        ValueError: it cannot fit: weights, their gradients, half of a micro-batch's activations and the window's images
            in uint8 alone exceed the memory of the GPU.
    """
    if args.fsdp or args.deepspeed or args.cache_features:
        return None
    checkpointing = bool(args.gradient_checkpointing)
    try:
        counts = planning.count(
            config,
            freeze=args.freeze,
            freeze_layers=args.freeze_layers,
            checkpointing=checkpointing,
            autocast=args.bf16 or args.fp16,
        )
    except ValueError as error:
        return f"The memory of the training was not predicted. {error}"
    choice = choice_of(args)
    parts = planning.memory(counts, choice)
    if parts.total <= planning.USABLE * gpu_bytes:
        return None
    # Short captions need fewer activations than the longest ones, which were counted.
    least = 4.0 * (counts.parameters + counts.trained)
    least += 0.5 * planning.memory(counts, replace(choice, retain=1)).activations
    cure = ""
    if not args.offload_inputs:
        least += counts.pixels * choice.rows
        cure = "--offload_inputs keeps the images in host memory. "
    message = (
        f"The training needs about {parts.total / GIB:.1f} GiB per GPU, which has {gpu_bytes / GIB:.1f}: weights and "
        f"gradients {parts.weights / GIB:.1f}, optimizer {parts.optimizer / GIB:.1f}, activations "
        f"{parts.activations / GIB:.1f}, images {parts.images / GIB:.1f}, features and loss "
        f"{(parts.features + parts.loss) / GIB:.1f}. Lower --per_device_train_batch_size and raise "
        f"--gradient_accumulation_steps by the same factor, which gives the same result. {cure}`infcl plan` names "
        "options that fit."
    )
    if least > gpu_bytes:
        raise ValueError(message)
    return message


def choice_of(args: InfCLTrainingArguments) -> Choice:
    """The composition of the global batch of a training."""
    return Choice(
        args.world_size,
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        retain=int(args.retain_graphs) if args.retain_graphs.isdecimal() else 1,
        offload=args.offload_inputs,
        compiled=args.torch_compile,
        checkpointing=bool(args.gradient_checkpointing),
        muon=args.optimizer == "muon",
        keep_features=bool(args.keep_features),
        keep_weights=bool(args.keep_weights),
    )


def memory_lines(counts: Counts, choice: Choice, memory_gib: float) -> list[str]:
    parts = planning.memory(counts, choice)
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
    total = f"  {parts.total / GIB:7.2f}  in all, of {planning.USABLE * memory_gib:.1f} usable"
    return ["Memory per GPU at the peak of a step, GiB", *lines, total]


def link_lines(counts: Counts, choice: Choice, gpu: GPU) -> list[str]:
    """The bytes that each GPU sends in a step, and whether the computation of the loss hides their transfer."""
    sent = planning.link_bytes(counts, choice)
    if planning.is_gathered(counts.dim, choice):
        seconds = (sent["texts"] + sent["gradients of the texts"]) / 100e9
        hidden = (
            "The texts and their gradients are few enough to be exchanged at once. No computation hides this exchange, "
            f"which takes {_duration(seconds)} at 100 GB/s."
        )
    else:
        rate = planning.hiding_bandwidth(choice, gpu) / 1e9
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


def step_lines(pairs: int, epochs: float, max_steps: int, choice: Choice, seconds: float) -> list[str]:
    """The length of the training, and whether it has enough steps: a rule of thumb.

    Args:
        max_steps: the length in steps, which replaces that in epochs if it is more than 0.
    """
    per_epoch = pairs // choice.global_batch
    if per_epoch == 0:
        return [
            f"The training set of {pairs:,} pairs is smaller than one global batch, which training refuses. Lower "
            "--global_batch."
        ]
    steps = max_steps if max_steps > 0 else math.ceil(per_epoch * epochs)  # as Trainer counts them
    if steps < 100:
        verdict = "This is too few steps for a learning rate schedule: lower --global_batch or train longer."
    elif steps < 1000:
        verdict = "This number of steps is enough for fine-tuning, but small for training from scratch."
    else:
        verdict = "This is a common number of steps."
    training = ""
    if max_steps > 0:
        training = f"; --max_steps {steps} takes {_duration(steps * seconds)}"
    elif epochs != 1:
        training = f"; {epochs:g} epochs take {_number(steps, 'step')} and {_duration(steps * seconds)}"
    return [
        f"An epoch of {pairs:,} pairs takes {_number(per_epoch, 'step')} and "
        f"{_duration(per_epoch * seconds)}{training}.",
        f"  {verdict}",
    ]


def draw(path: Path, counts: Counts, choice: Choice, gpu: GPU, memory_gib: float) -> None:
    """Memory and time against the global batch, with the micro-batch of a choice."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib.") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    windows = [2**power for power in range(max(12, choice.accumulation.bit_length() + 1))]
    batches = [choice.micro_batch * choice.gpus * window for window in windows]
    label = "the plan" if choice.retain == 1 else f"the plan, which keeps {choice.retain} graphs"
    for offload, name in ((False, "images on the GPU"), (True, "offload_inputs")):
        ways = [replace(choice, accumulation=window, retain=1, offload=offload) for window in windows]
        left.plot(
            batches, [planning.memory(counts, way).total / GIB for way in ways], "--" if offload else "-", label=name
        )
    left.axhline(planning.USABLE * memory_gib, color="0.5", lw=1, label=f"usable of {memory_gib:g} GiB")
    left.plot(choice.global_batch, planning.memory(counts, choice).total / GIB, "o", color="black", label=label)
    left.set(title="Memory per GPU", ylabel="GiB at the peak of a step", ylim=(0, 2 * memory_gib))
    for compiled in (False, True):
        ways = [replace(choice, accumulation=window, retain=1, compiled=compiled) for window in windows]
        times = [sum(planning.seconds(counts, way, gpu).values()) for way in ways]
        right.plot(batches, times, "--" if compiled else "-", label="torch.compile" if compiled else "eager")
    time = sum(planning.seconds(counts, choice, gpu).values())
    right.plot(choice.global_batch, time, "o", color="black", label=label)
    right.set(title=f"Time of a step on {choice.gpus} × {gpu.name}", ylabel="seconds", yscale="log")
    for axis in (left, right):
        axis.set(xscale="log", xlabel=f"global batch, micro-batches of {choice.micro_batch}")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)


def _number(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
