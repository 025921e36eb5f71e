"""`infcl plan`: predicts memory and time of a training from the model's config alone."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection
from typing import Any

import torch

from ...conversion.models import load_config
from ...conversion.pretrained import base_of_adapters
from ...data.text_positions import text_positions
from ...encoders.image_size import config_for_images
from ...loading.replay import DEFAULT_SHARE
from ...options.batch_schedule import BatchSchedule
from ...options.declared import training_options
from ...options.facts import check_values
from .. import planning
from ..planning import GPUS, Choice, Counts
from ..planning.asked import global_batch_of, kept_choices, last_batch_of, stages_of_plan
from ..planning.periods import mean_seconds, periods_of
from ..planning.picture import draw
from ..planning.report import (
    better_batch,
    duration,
    lines_of_earlier_steps,
    link_lines,
    measured_line,
    memory_lines,
    not_predicted,
    number,
    replay_lines,
    stage_lines,
    step_lines,
    why_nothing_fits,
    words_of_further,
)
from .launched import mistakes_in_one_line
from .parser import Parser

WORKER_RATE = 540  # images per second of one worker of the data loader, from scripts/benchmarks/results/data.csv
SMALL = 32  # below this micro-batch gradient checkpointing is considered


def plan(parser: Parser, namespace: argparse.Namespace, given: set[str]) -> None:
    """Prints the memory, the time and the options of a training."""
    asked, namespace.texts_at_once = namespace.texts_at_once, "auto"  # whose windows the plan may have to choose
    namespace.global_batch = namespace.global_batch or namespace.global_batch_size
    namespace.global_batch_size = None  # which is of --gpus, not of this process
    parser.build(namespace, given, computes=False)
    namespace.texts_at_once = asked
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
    schedule = None if options.global_batch_schedule is None else BatchSchedule.of(options.global_batch_schedule)
    global_batch = global_batch_of(options, kept) if schedule is None else last_batch_of(schedule, options, kept)
    config = config_for_images(load_config(options.model, options.open_clip_model), options.image_size)
    longest, tokens = text_positions(config), options.max_text_tokens
    if tokens is not None and longest is not None and tokens > longest:
        raise ValueError(f"max_text_tokens must be less than the {longest} tokens of the model, got {tokens}.")
    counts: dict[bool, Counts] = {}

    def find(batch: int, *, compiled: bool) -> tuple[float, Choice] | None:
        setting: dict[str, Any] = {"gpus": options.gpus, "global_batch": batch, "gpu": gpu, "memory_gib": memory_gib}
        return planning.best(planning.choices(counts, decided=kept, compiled=compiled, **setting))

    asked = kept.get("checkpointing", False)
    frozen: dict[str, Any] = {"freeze": options.freeze, "freeze_layers": options.freeze_layers}
    frozen |= {"text_tokens": tokens}
    counted = frozen | {"patch_dropout": None if options.full_tokens_last else options.patch_dropout}
    counts[asked] = planning.count(config, **counted, checkpointing=asked)
    found = find(global_batch, compiled=options.torch_compile)
    wanted = min(SMALL, global_batch // options.gpus, kept.get("micro_batch", SMALL))
    if "checkpointing" not in kept and (found is None or found[1].micro_batch < wanted):
        counts[True] = planning.count(config, **counted, checkpointing=True)
        found = find(global_batch, compiled=options.torch_compile)
    if found is None:
        rows = global_batch // options.gpus
        size = kept.get("micro_batch") or rows // kept.get("accumulation", rows)
        least = {"retain": 1, "offload": True, "checkpointing": True} | kept
        least |= {"micro_batch": size, "accumulation": rows // size, "compiled": options.torch_compile}
        raise ValueError(why_nothing_fits(counts[least["checkpointing"]], Choice(options.gpus, **least), memory_gib))
    choice = found[1]
    old = old_pairs(options, choice)
    of_model = counts[choice.checkpointing]
    if options.plot is not None:
        draw(options.plot, of_model, choice, gpu, memory_gib)
    times = planning.seconds(of_model, choice, gpu)
    step = sum(times.values())
    trained = "all" if of_model.trained == of_model.parameters else f"{of_model.trained / 1e6:.1f} million"
    rates = "" if options.gpu_memory is None else f" Times are predicted with the rates of an {gpu.name}."
    name = gpu.name if options.gpu_memory is None else "GPU"
    further = words_of_further(options)
    better: list[str] = []
    if schedule is None:
        better = better_batch(choice, step, lambda batch: find(batch, compiled=options.torch_compile), kept)

    def words_of(choice: Choice) -> str:
        derived = f" --gradient_accumulation_steps {choice.accumulation}"
        return choice.options if schedule is None else choice.options.replace(derived, "")

    lines = [
        f"{options.model}: {of_model.parameters / 1e6:.1f} million parameters, {trained} of them trained; embeddings "
        f"of {of_model.dim} dimensions; {of_model.objective} loss.",
        f"A global batch of {choice.global_batch:,} pairs on {choice.gpus} × {name} with {memory_gib:g} GiB is "
        f"{choice.rows:,} per GPU.{rates}",
        *not_predicted(options, base_of_adapters(options.model) is not None),
        *replay_lines(old, choice),
        "",
        f"Choose  {words_of(choice)}{further}",
        *better,
        *found_by_itself(choice, schedule, kept),
        "",
        *memory_lines(of_model, choice, memory_gib),
        "",
        f"Time of a step: {duration(step)} ({', '.join(f'{name} {duration(t)}' for name, t in times.items())}).",
    ]
    periods = periods_of(options, config, frozen, checkpointing=choice.checkpointing, last=of_model)
    lines += lines_of_earlier_steps(periods, choice, gpu)
    other = find(global_batch, compiled=not options.torch_compile)
    if other is not None:
        how = "Without" if options.torch_compile else "With"
        lines.append(f"  {how} --torch_compile it is {duration(other[0])}: choose {words_of(other[1])}{further}")
    if options.torch_compile or other is not None:
        lines.append(
            "  With --torch_compile the first step takes tens of seconds longer, because the model is compiled."
        )
    rate = choice.rows / min(period.seconds(choice, gpu) for period in periods)
    workers, up_to = math.ceil(rate / WORKER_RATE), "up to " if len(periods) > 1 else ""
    lines.append(
        f"  Each GPU trains {up_to}{rate:,.0f} images per second. Loading them takes about {number(workers, 'worker')} "
        "per GPU (--dataloader_num_workers, with JPEGs of 500 × 375)."
    )
    if choice.gpus > 1:
        lines += link_lines(of_model, choice, gpu)
    if options.measure:
        lines.append(measured_line(config, counted, choice, of_model, gpu))
    epochs = options.num_train_epochs if "num_train_epochs" in given and "epochs" not in given else options.epochs
    if schedule is not None:
        stages = stages_of_plan(schedule, options, choice, epochs)
        return lines + stage_lines(stages, periods, choice, gpu)
    if options.dataset_size is not None:
        mean = mean_seconds(periods, choice, gpu)
        lines += step_lines(options.dataset_size, epochs, options.max_steps, choice, mean, old)
    return lines


def found_by_itself(choice: Choice, schedule: BatchSchedule | None, kept: Collection[str]) -> list[str]:
    """A line about the one option that stands for the division of the batch, unless a part of that is given."""
    if schedule is not None or not {"micro_batch", "accumulation"}.isdisjoint(kept):
        return []
    return [f"  --global_batch_size {choice.global_batch} in place of these sizes finds them before the first step."]


def check_options(options: argparse.Namespace) -> None:
    """Raises a ValueError if an option of the plan has a value with which nothing can be planned."""
    check_values(options, training_options(), lambda facts: facts.plans)
    for name in ("global_batch", "gpus", "gpu_memory", "dataset_size", "epochs"):
        if (value := getattr(options, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} must be more than 0, got {value}.")
    if options.gpu not in GPUS:
        raise ValueError(
            f"--gpu must be {' or '.join(GPUS)}, whose rates were measured, got {options.gpu!r}. For another GPU give "
            "its --gpu_memory. The predicted memory is then correct, and the times are those of --gpu."
        )
    if options.measure and not torch.cuda.is_available():
        raise ValueError("--measure needs a GPU. Omit it to predict from the config alone.")


def old_pairs(options: argparse.Namespace, choice: Choice) -> int:
    """The old pairs of a global batch, if the training replays some."""
    share = DEFAULT_SHARE if options.replay_share is None else options.replay_share
    return round(choice.global_batch * share) if options.replay_dataset else 0
