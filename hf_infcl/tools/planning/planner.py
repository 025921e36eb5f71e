"""Plans a training: keeps the options that were set, finds the rest as the training would, and plans its stages."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from ...encoders.image_size import check_sizes_of_config
from ...loading.shares import replay_share
from ...micro_batches.search import Trial, find_graphs, find_micro_batch, find_texts_at_once
from ...options.arguments import InfCLTrainingArguments
from ...options.batch_division import divide_global_batch, possible_micro_batches
from ...options.batch_options import DIVISION
from ...options.batch_schedule import BatchSchedule, divided_batch
from ...options.combinations import CHECKPOINTING
from ...options.declared import training_options
from ...options.facts import changed_options
from ...options.image_sizes import ImageSizes
from .costs import EFFECTS, GIB, GPUS, USABLE, Choice
from .counting import count, measure
from .counts import Counts
from .prediction import memory, seconds

SEARCHED = ("texts_at_once", "retain_graphs")  # what a training chooses after the micro-batch
SMALL = 32  # below this micro-batch, inputs are offloaded or activations checkpointed if that allows a larger one
Options = argparse.Namespace | InfCLTrainingArguments


class PlannedStage(NamedTuple):
    """Steps of one global batch whose images have equally many tokens."""

    share: float  # of the samples of the training
    choice: Choice
    seconds: float  # of a step
    words: str  # what is different from the last stage


def count_model(config: PretrainedConfig, options: Options, **changes: Any) -> Counts:
    """The counts of the last steps of a training, which need the most memory, with changes of its options."""
    return count(config, **(model_options(options) | changes))


def model_options(options: Options) -> dict[str, Any]:
    """The arguments of `count` for the last steps of a training."""
    names = [name for name, effect in EFFECTS.items() if effect.model is not None]
    arguments = {name: getattr(options, name) for name in (*names, "max_text_tokens", "image_size")}
    return arguments | ({"patch_dropout": None} if options.full_tokens_last else {})


def make_choice(args: Any) -> Choice:
    """The composition of the global batch of a training; of its last one, which is the largest.

    Args:
        args: `InfCLTrainingArguments`, or an object with its options, ``world_size`` and ``global_batch_size``.
    """
    planned = EFFECTS.keys() - {*CHECKPOINTING, "global_batch_size"}
    settings = {name: value for name, value in changed_options(args, training_options()).items() if name in planned}
    if (texts := settings.pop("texts_at_once", "auto")) not in ("auto", "1"):
        settings["texts_at_once"] = int(texts)
    return Choice(
        args.world_size,
        *divided_batch(args.global_batch_size, args.per_device_train_batch_size, args.world_size),
        retain_graphs=1 if args.retain_graphs in (None, "auto") else max(1, int(args.retain_graphs)),
        offload_inputs=args.offload_inputs,
        gradient_checkpointing=any(getattr(args, name, False) for name in CHECKPOINTING),
        torch_compile=args.torch_compile,
        options=settings,
    )


def search(
    counts: Counts, start: Choice, sizes: Sequence[int], usable: float, searched: Collection[str] = SEARCHED
) -> Choice | None:
    """Searches as a training does, but predicts memory instead of trying.

    Args:
        counts: of the model.
        start: has the rows of the window, and all that is not searched.
        sizes: the micro-batches to choose from, in rising order.
        usable: bytes of a GPU; None is returned if nothing fits into them.
        searched: those of `SEARCHED` that nobody has decided.
    """

    def choice(trial: Trial) -> Choice:
        texts = {"texts_at_once": trial.texts} if trial.texts > 1 else {}
        division = start.divided(trial.micro_batch, start.rows // trial.micro_batch)
        return replace(division, retain_graphs=trial.graphs, options={**start.options, **texts})

    def attempt(trial: Trial) -> tuple[int, int]:
        parts = memory(counts, choice(trial))
        if parts.total > usable:
            raise torch.OutOfMemoryError(parts.words)
        return int(parts.total - parts.weights - parts.optimizer), int(usable - parts.total)

    trial = Trial(sizes[0], start.options.get("texts_at_once", 1), start.retain_graphs)
    if len(sizes) > 1:
        trial = replace(trial, micro_batch=find_micro_batch(attempt, trial, sizes, start.rows, int) or sizes[0])
    most = start.rows // trial.micro_batch - (start.gpus > 1)
    if "texts_at_once" in searched:
        texts = find_texts_at_once(attempt, trial, most, int, compiled=start.torch_compile)
        trial = replace(trial, texts=texts)
    if "retain_graphs" in searched and most > 1:
        trial = replace(trial, graphs=find_graphs(attempt, trial, most, int))
    return choice(trial) if memory(counts, choice(trial)).total <= usable else None


class Planner:
    """The plan of a training.

    Args:
        options: of `infcl plan`, which include all options of the training.
        user_options: the names of the options that the user has set.
        config: of the model.

    Attributes:
        start: what is decided before anything is searched.
        searched: those of `SEARCHED` that the training finds.
        is_divided: whether the user decides about micro-batches, as is necessary where the training does not try them.
        choice: the composition of the global batch; of the last one, if it grows.
        counts: of the model in the last steps.
        old: the pairs of the global batch that are replayed.
        single: one micro-batch, as ``--measure`` runs it.
        measured: its seconds and peak bytes on this machine; None without ``--measure``.
        stages: of the training, the last steps last.

    Raises:
        ValueError: the options contradict each other, or nothing fits into memory.
    """

    def __init__(self, options: argparse.Namespace, user_options: Collection[str], config: PretrainedConfig) -> None:
        self.options, self._config, self.gpu = options, config, GPUS[options.gpu]
        self.memory_gib: float = options.gpu_memory or self.gpu.memory_gib
        sharded = bool(options.fsdp or options.deepspeed)
        self.is_divided = sharded or any(name in user_options for name in DIVISION)
        self._divide(*(getattr(options, name) if name in user_options else None for name in DIVISION))
        is_single = self.is_divided and self.start.gradient_accumulation_steps == 1 and len(self._growth.sizes) == 1
        tries: Sequence[str] = () if sharded or options.use_cpu or is_single else SEARCHED
        tries = tries if options.gradient_noise_steps is None else tries[1:]  # each micro-batch keeps its texts
        self.searched = [name for name in tries if getattr(options, name) in (None, "auto")]
        offload = [self.start.offload_inputs] if "offload_inputs" in user_options else [False, True]
        checkpoint = [self.start.gradient_checkpointing] if {*CHECKPOINTING} & {*user_options} else [False, True]
        self._ways = list(itertools.product(checkpoint, offload))
        self._counts = functools.cache(lambda way: count_model(config, options, gradient_checkpointing=way))
        choice = self.find(compiled=options.torch_compile)
        if choice is None:
            raise ValueError(self._why_nothing_fits())
        self.choice, self.counts = choice, self._counts(choice.gradient_checkpointing)
        self.old = round(choice.global_batch * replay_share(options.replay_share)) if options.replay_dataset else 0
        checkpointing, self._pace = choice.gradient_checkpointing, 1.0
        self.single = Choice(1, choice.per_device_train_batch_size, 1, gradient_checkpointing=checkpointing)
        self.measured: tuple[float, int] | None = None
        if options.measure:
            arguments = {"gradient_checkpointing": checkpointing, "autocast": options.bf16 or not options.use_cpu}
            device = torch.device("cpu" if options.use_cpu else "cuda")
            self.measured = measure(config, self.single.rows, device, **model_options(options), **arguments)
            self._pace = self.measured[0] / sum(self.times(self.single).values())
        self.stages = list(self._stages())

    def times(self, choice: Choice, counts: Counts | None = None) -> dict[str, float]:
        """`seconds` of a step in the last stage, or with other counts; as on this machine, if that was measured."""
        counts = counts or self._counts(choice.gradient_checkpointing)
        return {phase: self._pace * time for phase, time in seconds(counts, choice, self.gpu).items()}

    @property
    def images_per_second(self) -> float:
        """The most that one GPU trains, in the fastest stage."""
        return max(stage.choice.rows / stage.seconds for stage in self.stages)

    def find(self, *, compiled: bool) -> Choice | None:
        """The first way to micro-batches that are not small, or that to the largest ones; None if nothing fits."""
        choices: list[Choice] = []
        usable, least = USABLE * self.memory_gib * GIB, min(SMALL, self._sizes[-1])
        for checkpointing, offload in self._ways:
            start = replace(self.start, gradient_checkpointing=checkpointing, offload_inputs=offload)
            start = replace(start, torch_compile=compiled)
            choice = search(self._counts(checkpointing), start, self._sizes, usable, self.searched)
            choices += [] if choice is None else [choice]
            if choice is not None and choice.per_device_train_batch_size >= least:
                return choice
        return max(choices, key=lambda choice: choice.per_device_train_batch_size, default=None)

    def _divide(self, micro_batch: int | None, accumulation: int | None) -> None:
        """Decides the global batch, and the micro-batches to choose from."""
        options, size = self.options, self.options.global_batch
        if size is None and options.global_batch_schedule is None:
            if micro_batch is None or accumulation is None:
                raise ValueError(f"Give --global_batch, or both --{' and --'.join(DIVISION)}, whose product it is.")
            size = options.gpus * micro_batch * accumulation
        args = argparse.Namespace(**vars(options))  # as far as the division of a training reads them
        args.world_size, args.deepspeed, args.global_batch_size = options.gpus, None, size
        args.device = torch.device("cpu" if options.use_cpu else "cuda")
        self._growth = BatchSchedule.of_arguments(args)
        args.global_batch_size = self._growth.sizes[-1]
        divide_global_batch(args, size or args.global_batch_size, micro_batch, accumulation)
        for batch in self._growth.sizes:
            divided_batch(batch, args.per_device_train_batch_size, options.gpus)
        self.start = make_choice(args)
        is_decided = micro_batch or accumulation or options.use_cpu
        single = [self.start.per_device_train_batch_size]
        self._sizes = single if is_decided else possible_micro_batches(args, exceeds=True)

    def _why_nothing_fits(self) -> str:
        (checkpointing, offload), size = self._ways[-1], self._sizes[0]
        choice = replace(self.start, gradient_checkpointing=checkpointing, offload_inputs=offload)
        choice = choice.divided(size, choice.rows // size)
        what = "Not even micro-batches of one pair fit" if size == 1 else f"Micro-batches of {size:,} pairs do not fit"
        return (
            f"{what} into {USABLE:.0%} of {self.memory_gib:g} GiB. In GiB, they take "
            f"{memory(self._counts(checkpointing), choice).words}. Lower --global_batch, or "
            "--per_device_train_batch_size with more --gradient_accumulation_steps; freeze a tower, shard the weights "
            "with --fsdp, or use more GPUs or GPUs with more memory."
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
            share = options.patch_dropout if begin < whole_from else None
            words = [f"images of {size} pixels"] if len(sizes.sizes) > 1 else []
            words += ["fewer patches"] if options.full_tokens_last and share else []
            changes = {"image_size": size, "patch_dropout": share, "gradient_checkpointing": way.gradient_checkpointing}
            counts = count_model(self._config, options, **changes) if words else self.counts
            choice = way.divided(*divided_batch(batch, way.per_device_train_batch_size, way.gpus))
            yield PlannedStage(end - begin, choice, sum(self.times(choice, counts).values()), " and ".join(words))


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
    changes = {"gradient_checkpointing": choice.gradient_checkpointing, "autocast": args.bf16 or args.fp16}
    try:
        counts = count_model(config, args, **changes)
        parts = memory(counts, choice)
    except ValueError as error:
        return f"The memory of the training was not predicted. {error}"
    if parts.total <= USABLE * gpu_bytes:
        return None
    # Short captions need fewer activations than the longest ones, which were counted.
    least = 4.0 * (counts.parameters + counts.trained)
    least += 0.5 * memory(counts, replace(choice, retain_graphs=1)).activations
    least += 0 if args.offload_inputs else counts.pixels * choice.rows
    cure = "" if args.offload_inputs else "--offload_inputs keeps the images in host memory. "
    message = (
        f"The training needs about {parts.total / GIB:.1f} GiB per GPU, which has {gpu_bytes / GIB:.1f}: "
        f"{parts.words}. --global_batch_size {args.global_batch_size} in place of both sizes finds micro-batches that "
        f"fit, with the same result. {cure}`infcl plan` names options that fit."
    )
    if least > gpu_bytes:
        raise ValueError(message)
    return message
