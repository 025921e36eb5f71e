"""Finds, before the first step of a training, what its user has not chosen of the division of its global batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers.utils import logging

from ..checkpoints.record import RunRecord
from ..encoders.sharding import is_sharded
from ..options.arguments import InfCLTrainingArguments
from ..options.batch_division import largest_micro_batch, possible_micro_batches
from ..options.contrastive import DIVISION, SEARCHED
from ..passes.random_state import random_state_kept
from ..processes.collectives import Processes, announce_failure, failures_announced
from ..shards.values import counted
from ..windows.setup import Setup
from .search import ENOUGH, Trial, find_graphs, find_micro_batch, find_texts_at_once
from .trials import Trials, memory_is_known, release_memory

_FOUND = (*DIVISION, *SEARCHED, "largest_micro_batch")

logger = logging.get_logger(__name__)


def recorded(args: InfCLTrainingArguments) -> dict[str, Any]:
    """What a checkpoint says of the division of the global batch, so that a resumed run has the same; collective."""
    return {**{name: getattr(args, name) for name in _FOUND}, "asked": list(args.asked), "machines": _machines(args)}


def find_micro_batches(
    setup: Setup,
    record: RunRecord | None,
    batches_of: Callable[[], Iterable[Mapping[str, Tensor]]],
) -> int:
    """Sets ``texts_at_once``, ``retain_graphs``, accumulation and micro-batch, and returns the last; collective.

    Where a run resumes on the same machines, they are those of the checkpoint. Otherwise, values that the user has not
    set are found by trying, if the memory of the device is known and the model is not sharded. The micro-batch of a
    stream, which its order depends on, stays that of the checkpoint.

    Args:
        record: of the checkpoint that the training resumes from, if any.
        batches_of: returns an iterable of the batches of a training loader, of which one is read.

    Raises:
        ValueError: not even one pair fits, what fits does not divide the global batch, or the model is sharded and no
            micro-batch is given.
    """
    args = setup.args
    # Values that an earlier training of these arguments chose are chosen again; values that were set since then stay.
    texts, graphs = (
        (asked or "auto") if getattr(args, name) == args.found.get(name) else getattr(args, name)
        for name, asked in zip(_FOUND[2:4], args.asked[2:], strict=True)
    )
    args.texts_at_once, args.retain_graphs, args.largest_micro_batch, args.found = texts, graphs, None, {}
    if _resumed(args, record):
        return args.per_device_train_batch_size
    if is_sharded(setup.accelerator):
        _decide_untried(args)
        return args.per_device_train_batch_size
    kept = _kept_by_stream(setup, record)
    if not memory_is_known(args.device):
        return args.per_device_train_batch_size
    if not (args.divides_by_itself or args.gradient_accumulation_steps > 1):
        # A single micro-batch, which was given, is encoded once, with its own texts.
        args.texts_at_once, args.retain_graphs = (value.replace("auto", "1") for value in (texts, graphs))
        return args.per_device_train_batch_size
    if not (args.divides_by_itself or texts == "auto" or (graphs == "auto" and not args.torch_compile)):
        return args.per_device_train_batch_size
    # ---- Of each decision, all processes take what all of them can hold ----
    began, processes, pairs = time.perf_counter(), Processes(), args.global_batch_size // args.world_size

    def agree(number: int) -> int:
        return int(min(number for (number,) in processes.agree([number])))

    def attempt(trial: Trial) -> tuple[int, int]:
        try:
            return trials(trial)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            announce_failure(error)
            raise

    with failures_announced():
        batch = _first_batch(setup, batches_of)
    if not agree(batch is not None):  # which the training will say
        return args.per_device_train_batch_size
    with failures_announced():
        trials = Trials(setup, batch, pairs=pairs)
        trial = Trial(
            args.per_device_train_batch_size,
            1 if texts == "auto" else int(texts),
            1 if graphs == "auto" else max(1, int(graphs)),
        )
    if args.divides_by_itself and not kept:
        possible = possible_micro_batches(args)
        fits = find_micro_batch(attempt, trial, possible, pairs, agree)
        if fits == 0:
            raise ValueError(
                f"Not even micro-batches of {counted(possible[0], 'pair')} fit into the memory of every process. Pass "
                "gradient_checkpointing, offload_inputs or max_text_tokens, or train a smaller model."
            )
        following = next((n for n in possible if n > fits), fits)
        if fits < ENOUGH // 4 and following > 4 * fits:  # much more may fit than what divides the batch
            fits = max(fits, find_micro_batch(attempt, trial, [2**n for n in range(9) if 2**n <= pairs], pairs, agree))
        trial = replace(trial, micro_batch=largest_micro_batch(args, possible, fits))
        _divide(args, trial.micro_batch)
    count = -(-pairs // trial.micro_batch)
    if texts == "auto":
        most = count - processes.grouped if trials.pads else 1
        trial = replace(trial, texts=find_texts_at_once(attempt, trial, most, agree, compiled=args.torch_compile))
        args.texts_at_once = str(trial.texts)
    if graphs == "auto" and not args.torch_compile:  # a trial is not compiled, so `GraphBudget` measures those graphs
        # See `Wrapper.most_graphs`. In a group of one process accelerate wraps no model.
        most = max(1, count - 1) if processes.world_size > 1 else count
        args.retain_graphs = str(find_graphs(attempt, trial, most, agree) if most > 1 else 1)
    args.found = {name: getattr(args, name) for name in _FOUND}
    release_memory()
    if processes.rank == 0:
        logger.warning(f"{_described(args)}: found in {time.perf_counter() - began:.0f} s. To fix it: {_words(args)}")
    return args.per_device_train_batch_size


def _decide_untried(args: InfCLTrainingArguments) -> None:
    """Sets what was not given where nothing can be tried, because no process holds the whole model."""
    if args.divides_by_itself:
        raise ValueError(
            f"global_batch_size={args.global_batch_size:,} needs a per_device_train_batch_size under FSDP, "
            "where none is tried before the model is sharded. Give it; the accumulation follows."
        )
    if args.texts_at_once == "auto":
        args.texts_at_once = "1"
    if args.asked[3] is None:
        args.retain_graphs = "1"


def _first_batch(setup: Setup, batches_of: Callable[[], Iterable[Mapping[str, Tensor]]]) -> Any:
    """A batch of the training; None if there is none.

    A worker loads it where the training has workers: a generator of the dataset's own then stays where it was.
    """
    args: Any = setup.args
    one = {"dataloader_num_workers": min(1, args.dataloader_num_workers), "dataloader_persistent_workers": False}
    before = {name: getattr(args, name) for name in one}
    try:
        vars(args).update(one)
        with random_state_kept(args.device):
            return next(iter(batches_of()), None)
    finally:
        vars(args).update(before)


def _resumed(args: InfCLTrainingArguments, record: RunRecord | None) -> bool:
    """Takes the division of the checkpoint, if it is of the same options and machines; collective."""
    # Every process calls `_machines`, since all of them have the record or none.
    if record is None or (before := record.micro_batches) is None:
        return False
    asked, now = ([*values[:2], *(value or "auto" for value in values[2:])] for values in (before["asked"], args.asked))
    if asked != now or before["machines"] != _machines(args):
        return False
    args.found = {name: before[name] for name in _FOUND}
    vars(args).update(args.found)
    return True


def _kept_by_stream(setup: Setup, record: RunRecord | None) -> bool:
    """Takes the micro-batch of the checkpoint for a stream, if it divides the global batch on these processes."""
    args = setup.args
    if record is None or record.micro_batches is None or not isinstance(setup.data, IterableDataset):
        return False
    before = record.micro_batches[DIVISION[0]]
    if not args.divides_by_itself or before not in possible_micro_batches(args):
        return False
    _divide(args, before)
    return True


def _divide(args: InfCLTrainingArguments, micro_batch: int) -> None:
    args.per_device_train_batch_size = micro_batch
    args.gradient_accumulation_steps = args.global_batch_size // args.world_size // micro_batch


def _described(args: InfCLTrainingArguments) -> str:
    """The division of a global batch in words."""
    texts, graphs = args.texts_together, args.retain_graphs
    more = [f"the texts of {texts} micro-batches at once"] if texts > 1 else []
    more += [f"{graphs} graphs kept"] if graphs not in ("auto", "0", "1") else []
    factors = f"{args.per_device_train_batch_size} × {args.gradient_accumulation_steps} × {args.world_size}"
    return ", ".join([f"Global batch of {args.global_batch_size:,} pairs = {factors}", *more])


def _words(args: InfCLTrainingArguments) -> str:
    """The options that fix the division, as the command takes them."""
    return " ".join(f"--{name} {getattr(args, name)}" for name in _FOUND[:4])


def _machines(args: InfCLTrainingArguments) -> list[str]:
    """The device of each process, with its memory; collective."""
    description = args.device.type
    if description == "cuda":
        device = torch.cuda.get_device_properties(args.device)
        description = f"{device.name}, {device.total_memory} bytes"
    return Processes().gather_objects(description)
