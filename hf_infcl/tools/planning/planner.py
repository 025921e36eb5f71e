"""Plans a training: keeps the options that were set, chooses the fastest values of the rest, and plans its stages."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from ...encoders.image_size import check_sizes_of_config, config_for_images
from ...loading.shares import replay_share
from ...options.arguments import InfCLTrainingArguments
from ...options.batch_schedule import BatchSchedule, divided_batch
from ...options.declared import training_options
from ...options.facts import changed_options
from ...options.image_sizes import ImageSizes
from .costs import GPUS, USABLE, Choice
from .counting import Counts, Setting, count, measure
from .prediction import GIB, best, choices, memory, seconds

# The options that a plan chooses unless the user sets them, and the attributes of `Choice` that hold them.
CHOSEN = {
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "retain_graphs": "retain",
    "offload_inputs": "offload",
    "gradient_checkpointing": "checkpointing",
    "activation_checkpointing": "checkpointing",
    "torch_compile": "compiled",
}
FACTORS = tuple(CHOSEN)[:2]
CURES = (
    "Lower --global_batch, or --per_device_train_batch_size with more --gradient_accumulation_steps; freeze a tower, "
    "shard the weights with --fsdp, or use more GPUs or GPUs with more memory."
)
SMALL = 32  # below this micro-batch gradient checkpointing is considered
Options = argparse.Namespace | InfCLTrainingArguments


@dataclass(frozen=True)
class PlannedStage:
    """Steps of one global batch whose images have equally many tokens.

    Attributes:
        share: of the samples of the training.
        choice: the composition of the batch.
        seconds: of a step.
        words: what is different from the last stage.
    """

    share: float
    choice: Choice
    seconds: float
    words: str


def count_training(
    config: PretrainedConfig, options: Options, *, image_size: int | None = None, **changes: Any
) -> Counts:
    """Counts a training in its last steps, which need the most memory.

    Args:
        config: of the model.
        options: of the training.
        image_size: of other steps.
        changes: the attributes of their `Setting` that differ.
    """
    setting = replace(_last_setting(options), **changes)
    return count(config_for_images(config, image_size or options.image_size), setting)


def _last_setting(options: Options) -> Setting:
    """The setting of the micro-batches in the last steps of a training."""
    return Setting(
        freeze=options.freeze,
        freeze_layers=options.freeze_layers,
        patch_dropout=None if options.full_tokens_last else options.patch_dropout,
        text_tokens=options.max_text_tokens,
        bf16_activations=options.bf16_activations,
    )


def planned_options(options: Options) -> dict[str, Any]:
    """The options of a training that `Choice.options` holds."""
    found = changed_options(options, lambda facts: facts.plans, training_options())
    if (texts := found.pop("texts_at_once", "auto")) not in ("auto", "1"):
        found["texts_at_once"] = int(texts)
    return {name: value for name, value in found.items() if name not in (*CHOSEN, "global_batch_size")}


class Planner:
    """The plan of a training.

    Args:
        options: of `infcl plan`, which include all options of the training.
        given: the names of the options that the user has set.
        config: of the model.

    Attributes:
        choice: the composition of the global batch; of the last one, if it grows.
        counts: of the model in the last steps.
        old: the pairs of the global batch that are replayed.
        stages: of the training, the last steps last.

    Raises:
        ValueError: the options contradict each other, or nothing fits into memory.
    """

    def __init__(self, options: argparse.Namespace, given: Collection[str], config: PretrainedConfig) -> None:
        self.options, self._config = options, config
        self.gpu = GPUS[options.gpu]
        self.memory_gib: float = options.gpu_memory or self.gpu.memory_gib
        self.decided = {attribute: getattr(options, name) for name, attribute in CHOSEN.items() if name in given}
        if (retain := self.decided.pop("retain", "auto")) != "auto":
            self.decided["retain"] = max(1, int(retain))
        words = options.global_batch_schedule
        self.growth = None if words is None else BatchSchedule.of(words)
        batch = self._given_batch() if self.growth is None else self._last_batch(self.growth)
        asked = bool(self.decided.get("checkpointing"))
        self._counts = {asked: count_training(config, options, checkpointing=asked)}
        found = self.find(batch)
        wanted = min(SMALL, batch // options.gpus, self.decided.get("micro_batch", SMALL))
        if "checkpointing" not in self.decided and (found is None or found[1].micro_batch < wanted):
            self._counts[True] = count_training(config, options, checkpointing=True)
            found = self.find(batch)
        if found is None:
            raise ValueError(self._why_nothing_fits(batch // options.gpus))
        self.choice = found[1]
        self.counts = self._counts[self.choice.checkpointing]
        share = replay_share(options.replay_share)
        self.old = round(batch * share) if options.replay_dataset else 0
        self.stages = self._stages()

    def find(self, batch: int, *, compiled: bool | None = None) -> tuple[float, Choice] | None:
        """The best choice for a global batch, with the seconds of its last steps; None if nothing fits."""
        decided = self.decided | {"compiled": self.options.torch_compile if compiled is None else compiled}
        decided["options"] = planned_options(self.options)
        setting: dict[str, Any] = {"gpus": self.options.gpus, "gpu": self.gpu, "memory_gib": self.memory_gib}
        return best(choices(self._counts, global_batch=batch, decided=decided, **setting))

    def measure(self) -> tuple[float, int]:
        """`measure` of a micro-batch of the choice, on this machine's GPU."""
        config = config_for_images(self._config, self.options.image_size)
        setting = replace(_last_setting(self.options), checkpointing=self.choice.checkpointing)
        return measure(config, self.choice.micro_batch, torch.device("cuda"), setting)

    def _given_batch(self) -> int:
        """The global batch that the user asks for, or the product of its factors."""
        batch: int | None = self.options.global_batch
        factors = {"gpus": self.options.gpus}
        factors |= {name: self.decided[CHOSEN[name]] for name in FACTORS if CHOSEN[name] in self.decided}
        words, least = " × ".join(f"--{name} {factor}" for name, factor in factors.items()), math.prod(factors.values())
        if batch is None and len(factors) < 3:
            raise ValueError(f"Give --global_batch, or both --{' and --'.join(FACTORS)}, whose product it is.")
        if batch is None:
            return least
        if len(factors) == 3 and batch != least:
            raise ValueError(f"{words} is {least:,}, but --global_batch is {batch:,}. Omit one of them.")
        if len(factors) == 2 and batch % least:
            near = max(least, round(batch / least) * least)
            raise ValueError(
                f"--global_batch {batch:,} is no multiple of {words}, which is {least:,}. Choose {near:,}."
            )
        return batch

    def _last_batch(self, growth: BatchSchedule) -> int:
        """The last global batch of a schedule, which needs the most memory."""
        last = growth.sizes[-1]
        if self.options.global_batch not in (None, last):
            raise ValueError(
                f"--global_batch is {self.options.global_batch:,}, but --global_batch_schedule ends with {last:,}. "
                "Omit one of them."
            )
        if self.decided.pop("accumulation", 1) > 1:
            raise ValueError("--gradient_accumulation_steps follows from --global_batch_schedule. Omit it.")
        if "micro_batch" in self.decided:
            self.decided["micro_batch"] = min(self.decided["micro_batch"], last // self.options.gpus)
        return last

    def _why_nothing_fits(self, rows: int) -> str:
        size = self.decided.get("micro_batch") or rows // self.decided.get("accumulation", rows)
        way = {"offload": True, "checkpointing": True, **self.decided, "options": planned_options(self.options)}
        way |= {"micro_batch": size, "accumulation": rows // size, "compiled": self.options.torch_compile}
        parts = memory(self._counts[way["checkpointing"]], Choice(self.options.gpus, **way))
        what = "Not even micro-batches of one pair fit" if size == 1 else f"Micro-batches of {size:,} pairs do not fit"
        return f"{what} into {USABLE:.0%} of {self.memory_gib:g} GiB. In GiB, they take {parts.words}. {CURES}"

    def _stages(self) -> list[PlannedStage]:
        """Divides the training by ``global_batch_schedule``, ``image_size_schedule`` and ``full_tokens_last``."""
        options, found = self.options, []
        sizes = ImageSizes((options.image_size,), ())
        if options.image_size_schedule is not None:
            sizes = ImageSizes.of(options.image_size_schedule)
            check_sizes_of_config(self._config.vision_config, sizes.sizes)
        growth = self.growth or BatchSchedule((self.choice.global_batch,), ())
        whole_from = 1 - (options.full_tokens_last or 0.0)
        for begin, end in itertools.pairwise(sorted({0.0, *growth.ends, *sizes.ends, whole_from, 1.0})):
            batch, size = (known.sizes[sum(begin >= ended for ended in known.ends)] for known in (growth, sizes))
            share = options.patch_dropout if begin < whole_from else None
            words = [f"images of {size} pixels"] if len(sizes.sizes) > 1 else []
            if options.full_tokens_last and share:
                words.append("fewer patches")
            way = self.choice
            if self.growth is not None:
                micro_batch, accumulation = divided_batch(batch, way.micro_batch, way.gpus)
                way = replace(way, micro_batch=micro_batch, accumulation=accumulation)
            changes = {"image_size": size, "patch_dropout": share, "checkpointing": way.checkpointing}
            counts = self.counts if not words else count_training(self._config, options, **changes)
            time = sum(seconds(counts, way, self.gpu).values())
            found.append(PlannedStage(end - begin, way, time, " and ".join(words)))
        return found


def check_memory(config: PretrainedConfig, args: InfCLTrainingArguments, gpu_bytes: float) -> str | None:
    """Compares the predicted memory of a training with the memory of its GPU, before the training begins.

    Trainings that shard the weights (FSDP, DeepSpeed), read the image features from a cache, or find out by themselves
    what fits (``global_batch_size``) are not predicted.

    Returns:
        A warning if the training probably does not fit, or if its memory cannot be predicted.

    Raises:
        ValueError: it cannot fit: weights, their gradients, half of a micro-batch's activations and the window's images
            in uint8 alone exceed the memory of the GPU.
    """
    if args.fsdp or args.deepspeed or args.cache_features or args.divides_by_itself:
        return None
    choice = make_choice(args)
    try:
        counts = count_training(config, args, checkpointing=choice.checkpointing, autocast=args.bf16 or args.fp16)
        parts = memory(counts, choice)
    except ValueError as error:
        return f"The memory of the training was not predicted. {error}"
    if parts.total <= USABLE * gpu_bytes:
        return None
    # Short captions need fewer activations than the longest ones, which were counted.
    least = 4.0 * (counts.parameters + counts.trained) + 0.5 * memory(counts, replace(choice, retain=1)).activations
    cure = ""
    if not args.offload_inputs:
        least += counts.pixels * choice.rows
        cure = "--offload_inputs keeps the images in host memory. "
    message = (
        f"The training needs about {parts.total / GIB:.1f} GiB per GPU, which has {gpu_bytes / GIB:.1f}: "
        f"{parts.words}. --global_batch_size {args.global_batch_size} in place of both sizes finds micro-batches that "
        f"fit, with the same result. {cure}`infcl plan` names options that fit."
    )
    if least > gpu_bytes:
        raise ValueError(message)
    return message


def make_choice(args: InfCLTrainingArguments) -> Choice:
    """The composition of the global batch of a training; of its last one, which is the largest."""
    return Choice(
        args.world_size,
        *divided_batch(args.global_batch_size, args.per_device_train_batch_size, args.world_size),
        retain=1 if args.retain_graphs in (None, "auto") else int(args.retain_graphs),
        offload=args.offload_inputs,
        checkpointing=bool(args.gradient_checkpointing),
        compiled=args.torch_compile,
        options=planned_options(args),
    )
