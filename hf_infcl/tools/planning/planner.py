"""Plans a training: keeps the options that were set, finds the rest as the training would, and plans its stages."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from ...encoders.image_size import check_sizes_of_config
from ...micro_batches.search import Trial, find_graphs, find_micro_batch, find_texts_at_once
from ...options.arguments import InfCLTrainingArguments
from ...options.batch_division import divide_global_batch, possible_micro_batches
from ...options.batch_options import DIVISION, SEARCHED
from ...options.batch_schedule import BatchSchedule, divided_batch
from ...options.combinations import CHECKPOINTING
from ...options.declared import training_options
from ...options.facts import changed_options
from ...options.image_sizes import ImageSizes
from .costs import EFFECTS, GIB, GPUS, USABLE, Choice, Cost, Counts, seconds, step_cost
from .counting import count, measure

CHECKPOINTED = "gradient_checkpointing"
SMALL = 32  # below this micro-batch, inputs are offloaded or activations checkpointed if that allows a larger one


class PlannedStage(NamedTuple):
    """Steps of one global batch whose images have equally many tokens."""

    share: float  # of the samples of the training
    choice: Choice
    seconds: float  # of a step
    words: str  # the size of its images, if that changes, and whether they have fewer patches


def make_choice(args: Any) -> Choice:
    """The composition of the global batch of a training; of its last one, which is the largest.

    ``args`` are `InfCLTrainingArguments`, or an object with their options, ``world_size`` and ``global_batch_size``.
    """
    kept = EFFECTS.keys() - {*CHECKPOINTING, *DIVISION, "global_batch_size"}
    options = {name: value for name, value in changed_options(args, training_options()).items() if name in kept}
    for name in SEARCHED:
        if options.pop(name, None) not in (None, "auto"):
            options[name] = max(1, int(getattr(args, name)))
    if any(getattr(args, name, False) for name in CHECKPOINTING):
        options[CHECKPOINTED] = True
    division = divided_batch(args.global_batch_size, args.per_device_train_batch_size, args.world_size)
    return Choice(args.world_size, *division, options)


def search(
    cost_of: Callable[[Choice], Cost], start: Choice, sizes: Sequence[int], usable: float, searched: Collection[str]
) -> Choice | None:
    """Searches as a training does, but predicts memory instead of trying; None if nothing fits.

    Args:
        cost_of: a step of a choice.
        start: has the rows of the window, and all that is not searched.
        sizes: the micro-batches to choose from, in rising order.
        usable: bytes of a GPU.
        searched: those of `SEARCHED` that nobody has decided.
    """

    def choice(trial: Trial) -> Choice:
        found = dict(zip(SEARCHED, (trial.texts, trial.graphs), strict=True))
        options = start.options | {name: found[name] for name in searched}
        return Choice(start.gpus, trial.micro_batch, start.rows // trial.micro_batch, options)

    def attempt(trial: Trial) -> tuple[int, int]:
        cost = cost_of(choice(trial))
        if cost.total > usable:
            raise torch.OutOfMemoryError
        return int(cost.total - cost.weights - cost.optimizer), int(usable - cost.total)

    trial = Trial(sizes[0], *(start.options.get(name, 1) for name in SEARCHED))
    if len(sizes) > 1:
        trial = replace(trial, micro_batch=find_micro_batch(attempt, trial, sizes, start.rows, int) or sizes[0])
    most = choice(trial).dealt
    if "texts_at_once" in searched:
        compiled = start.options.get("torch_compile", False)
        trial = replace(trial, texts=find_texts_at_once(attempt, trial, most, int, compiled=compiled))
    if "retain_graphs" in searched and most > 1:
        trial = replace(trial, graphs=find_graphs(attempt, trial, most, int))
    return choice(trial) if cost_of(choice(trial)).total <= usable else None


class Planner:
    """The plan of a training, from the options of `infcl plan`, the names of those that the user has set, and a config.

    Attributes:
        searched: those of `SEARCHED` that the training finds.
        is_divided: whether the user decides about micro-batches, as is necessary where the training does not try them.
        choice: the composition of the global batch; of the last one, if it grows.
        measured: seconds and peak bytes of a micro-batch on this machine; None without ``--measure``.
        pace: these seconds in relation to the predicted ones.
        stages: of the training, the last steps last.

    Raises:
        ValueError: the options contradict each other, or nothing fits into memory.
    """

    def __init__(self, options: argparse.Namespace, user_options: Collection[str], config: PretrainedConfig) -> None:
        self.options, self._config, self.gpu = options, config, GPUS[options.gpu]
        self.memory_gib: float = options.gpu_memory or self.gpu.memory_gib
        sharded = bool(options.fsdp)
        self.is_divided = sharded or any(name in user_options for name in DIVISION)
        self._divide(*(getattr(options, name) if name in user_options else None for name in DIVISION))
        start = self._start.options
        tries: Sequence[str] = () if sharded or options.use_cpu else SEARCHED
        self.searched = [name for name in tries if name not in start]
        offload = ["offload_inputs" in start] if "offload_inputs" in user_options else [False, True]
        # A training refuses to checkpoint with bf16_activations.
        is_decided = options.bf16_activations or {*CHECKPOINTING} & {*user_options}
        checkpoint = [CHECKPOINTED in start] if is_decided else [False, True]
        self._ways = [{CHECKPOINTED: one, "offload_inputs": other} for one in checkpoint for other in offload]
        self._count = functools.cache(lambda pairs, **changes: count(config, pairs, **start | changes))
        choice = self.find(compiled=options.torch_compile)
        if choice is None:
            raise ValueError(self._why_nothing_fits())
        self.choice, self.measured, self.pace = choice, None, 1.0
        if options.measure:
            autocast, device = options.bf16 or not options.use_cpu, torch.device("cpu" if options.use_cpu else "cuda")
            self.measured = measure(config, self.single.rows, device, autocast=autocast, **choice.options)
            self.pace = self.measured[0] / sum(self.times(self.single).values())
        self.stages = list(self._stages())

    @property
    def single(self) -> Choice:
        """One micro-batch, as ``--measure`` runs it."""
        options = {CHECKPOINTED: self.choice.options[CHECKPOINTED]}
        return Choice(1, self.choice.per_device_train_batch_size, 1, options)

    @property
    def images_per_second(self) -> float:
        """The most that one GPU trains, in the fastest stage."""
        return max(stage.choice.rows / stage.seconds for stage in self.stages)

    def counts(self, choice: Choice, **changes: Any) -> Counts:
        """The model and a micro-batch of the choice, in the last stage or with changed options."""
        same = {name: choice.options.get(name, False) for name in (CHECKPOINTED, "torch_compile")}
        return self._count(choice.per_device_train_batch_size, **same, **changes)

    def cost(self, choice: Choice) -> Cost:
        """What a step of the last stage takes."""
        return step_cost(self.counts(choice), choice)

    def times(self, choice: Choice, **changes: Any) -> dict[str, float]:
        """`seconds` of a step, of the last stage or with changed options; as on this machine, if that was measured."""
        times = seconds(step_cost(self.counts(choice, **changes), choice), choice, self.gpu)
        return {phase: self.pace * time for phase, time in times.items()}

    def find(self, *, compiled: bool) -> Choice | None:
        """The first way to micro-batches that are not small, or that to the largest ones; None if nothing fits."""
        best, usable = None, USABLE * self.memory_gib * GIB
        for way in self._ways:
            start = replace(self._start, options={**self._start.options, **way, "torch_compile": compiled})
            choice = search(self.cost, start, self._sizes, usable, self.searched)
            if choice and (best is None or choice.per_device_train_batch_size > best.per_device_train_batch_size):
                best = choice
            if best and best.per_device_train_batch_size >= min(SMALL, self._sizes[-1]):
                break
        return best

    def _divide(self, micro_batch: int | None, accumulation: int | None) -> None:
        """Decides the global batch, and the micro-batches to choose from."""
        options, size = self.options, self.options.global_batch
        if size is None and options.global_batch_schedule is None:
            if micro_batch is None or accumulation is None:
                raise ValueError(f"Give --global_batch, or both --{' and --'.join(DIVISION)}, whose product it is.")
            size = options.gpus * micro_batch * accumulation
        args = argparse.Namespace(**vars(options))  # as far as the division of a training reads them
        args.world_size, args.global_batch_size = options.gpus, size
        args.device = torch.device("cpu" if options.use_cpu else "cuda")
        self._growth = BatchSchedule.of_arguments(args)
        args.global_batch_size = self._growth.sizes[-1]
        divide_global_batch(args, size or args.global_batch_size, micro_batch, accumulation)
        self._start = make_choice(args)
        is_decided = micro_batch or accumulation or options.use_cpu
        single = [self._start.per_device_train_batch_size]
        self._sizes = single if is_decided else possible_micro_batches(args, exceeds=True)

    def _why_nothing_fits(self) -> str:
        start, size = self._start, self._sizes[0]
        least = Choice(start.gpus, size, start.rows // size, start.options | self._ways[-1])
        what = "Not even micro-batches of one pair fit" if size == 1 else f"Micro-batches of {size:,} pairs do not fit"
        return (
            f"{what} into {USABLE:.0%} of {self.memory_gib:g} GiB. In GiB, they take {self.cost(least).words}. Lower "
            "--global_batch, or --per_device_train_batch_size with more --gradient_accumulation_steps; freeze a tower, "
            "shard the weights with --fsdp, or use more GPUs or GPUs with more memory."
        )

    def _stages(self) -> Iterator[PlannedStage]:
        """Divides the training by ``global_batch_schedule``, ``image_size_schedule`` and ``full_tokens_last``."""
        options, way, growth = self.options, self.choice, self._growth
        sizes = ImageSizes((options.image_size,), ())
        if options.image_size_schedule is not None:
            sizes = ImageSizes.of(options.image_size_schedule)
            check_sizes_of_config(self._config.vision_config, sizes.sizes)
        whole_from = 1 - (options.full_tokens_last or 0.0)
        for begin, end in itertools.pairwise(sorted({0.0, *growth.ends, *sizes.ends, whole_from, 1.0})):
            batch, size = (known.sizes[sum(begin >= ended for ended in known.ends)] for known in (growth, sizes))
            choice = Choice(way.gpus, *divided_batch(batch, way.per_device_train_batch_size, way.gpus), way.options)
            changes: dict[str, Any] = {} if options.image_size_schedule is None else {"image_size": size}
            words = f", images of {size} pixels" * bool(changes)
            if options.full_tokens_last and begin < whole_from:
                changes |= {"full_tokens_last": None}
                words += ", fewer patches" * bool(options.patch_dropout)
            yield PlannedStage(end - begin, choice, sum(self.times(choice, **changes).values()), words)


def check_memory(config: PretrainedConfig, args: InfCLTrainingArguments, gpu_bytes: float) -> str | None:
    """Compares the predicted memory of a training with the memory of its GPU, before the training begins.

    Trainings that shard the weights (FSDP), read the image features from a cache, or find out by themselves
    what fits (``global_batch_size``) are not predicted.

    Returns:
        A warning if the training probably does not fit, or if its memory cannot be predicted.

    Raises:
        ValueError: it would take twice the memory of the GPU, which no shorter captions than were counted make up for.
    """
    if args.fsdp or args.cache_features or args.divides_by_itself:
        return None
    choice = make_choice(args)
    try:
        autocast = args.bf16 or args.fp16
        counts = count(config, choice.per_device_train_batch_size, autocast=autocast, **choice.options)
    except ValueError as error:
        return f"The memory of the training was not predicted. {error}"
    cost = step_cost(counts, choice)
    if cost.total <= USABLE * gpu_bytes:
        return None
    cure = "" if args.offload_inputs else "--offload_inputs keeps the images in host memory. "
    message = (
        f"The training needs about {cost.total / GIB:.1f} GiB per GPU, which has {gpu_bytes / GIB:.1f}: "
        f"{cost.words}. --global_batch_size {args.global_batch_size} in place of both sizes finds micro-batches that "
        f"fit, with the same result. {cure}`infcl plan` names options that fit."
    )
    if cost.total > 2 * gpu_bytes:
        raise ValueError(message)
    return message
