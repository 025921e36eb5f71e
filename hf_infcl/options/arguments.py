"""The arguments of `InfCLTrainer`: those of TrainingArguments, and a few that contrastive training adds.

They also say how a global batch is divided among processes and micro-batches."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.training_args import _convert_str_dict

from ..evaluation.metrics import METRICS, metric_named
from ..files.text import counted
from ..processes.signals import ended_with_launcher
from .combinations import SCHEDULES_BY_METRIC, check_combinations, check_processes
from .contrastive import DIVISION, SEARCHED, ContrastiveOptions, muon_settings
from .facts import check_values

UNTRIED = 32  # the most pairs of a micro-batch where the memory is not known, as on a CPU
_LEAST = 0.25  # of the pairs that fit: with smaller micro-batches a device is far from its rate


def divide_global_batch(args: Any, size: int, micro_batch: int | None, accumulation: int | None) -> None:
    """Sets the micro-batch and the accumulation of a training so that they make up its ``global_batch_size``.

    Args:
        args: `InfCLTrainingArguments`, whose processes are set up.
        size: ``global_batch_size`` as the user passed it.
        micro_batch, accumulation: their values where they are decided already; otherwise None.

    Raises:
        ValueError: the global batch cannot be divided so.
    """
    factors = [(name, n) for name, n in zip(DIVISION, (micro_batch, accumulation), strict=True) if n is not None]
    least = math.prod([args.world_size, *(n for _, n in factors)])
    words = " × ".join([f"{name}={n}" for name, n in factors] + [counted(args.world_size, "process")])
    if len(factors) == 2 and least != size:
        raise ValueError(
            f"global_batch_size={size:,}, but {words} is {least:,}. Leave one of them out, or pass "
            f"global_batch_size={least:,}."
        )
    if size % least:  # none gives way: without the number, one of its factors would make up another, small batch
        raise ValueError(
            f"global_batch_size={size:,} is no multiple of {words}, which is {least:,}. Choose "
            f"{_near(size, least)}, or {f'leave {factors[0][0]} out' if factors else 'other processes'}."
        )
    rows = size // args.world_size
    micro_batch = micro_batch or (rows // accumulation if accumulation else _untried(args))
    args.per_device_train_batch_size, args.gradient_accumulation_steps = micro_batch, rows // micro_batch


def _untried(args: Any) -> int:
    """The micro-batch that nobody has tried: the last word on a CPU, and until the first step on a GPU."""
    if args.device.type == "cpu":
        return largest_micro_batch(args, possible_micro_batches(args), UNTRIED)
    return max((n for n in possible_micro_batches(args) if n <= UNTRIED), default=1)


def possible_micro_batches(args: Any) -> list[int]:
    """The micro-batches that divide the global batch of a training equally, in rising order."""
    rows, left = divmod(args.global_batch_size, args.world_size)
    pairs = ((n, rows // n) for n in range(1, math.isqrt(rows) + 1) if rows % n == 0 and not left)
    return sorted({divisor for pair in pairs for divisor in pair})


def largest_micro_batch(args: Any, possible: Sequence[int], most: int) -> int:
    """The largest of `possible_micro_batches` with at most this many pairs.

    Raises:
        ValueError: it is much smaller than ``most``; the message names global batches that can be divided.
    """
    fits = [n for n in possible if n <= most]
    if fits and (fits[-1] >= _LEAST * most or fits[-1] == possible[-1]):
        return fits[-1]
    size, step = args.global_batch_size, args.world_size * max(1, most // 2)
    raise ValueError(
        f"global_batch_size={size:,} on {counted(args.world_size, 'process')} cannot be divided into micro-batches "
        f"that are nearly as large as fits, which is {most} pairs here: the largest that divides it has "
        f"{fits[-1] if fits else 'none'}. Choose {_near(size, step)}, or give per_device_train_batch_size."
    )


def _near(size: int, step: int) -> str:
    """The multiples of a number of pairs below and above a size."""
    return " or ".join(f"{near:,}" for near in dict.fromkeys([size // step * step, -(-size // step) * step]) if near)


@dataclass(repr=False)  # the method of TrainingArguments hides the token
class InfCLTrainingArguments(ContrastiveOptions, TrainingArguments):  # type: ignore[misc]  # None for torch_compile
    """`transformers.TrainingArguments` for exact contrastive training.

    One contrastive batch, the global batch, has ``global_batch_size`` pairs, by default
    ``per_device_train_batch_size × gradient_accumulation_steps × world_size``.
    The micro-batch of ``per_device_train_batch_size`` pairs determines the activation memory. More accumulation steps
    take more time, but additional memory only for embeddings and inputs. With several captions per image, or negative
    captions, these numbers count images, and the text tower processes all texts of a micro-batch at once.

    The docstring of `hf_infcl.options.contrastive.ContrastiveOptions` describes the fields; the guide,
    hf_infcl/trainer/README.md, names all by topic.

    Defaults that differ from TrainingArguments: ``remove_unused_columns`` and ``logging_nan_inf_filter`` are off;
    ``ddp_find_unused_parameters=None`` means False; ``ddp_broadcast_buffers=None`` means False for models without batch
    norms; ``greater_is_better=None`` means what the table of metrics says.

    Attributes:
        passed: ``per_device_train_batch_size``, ``gradient_accumulation_steps``, ``texts_at_once`` and
            ``retain_graphs`` as the user passed them, or None. The options themselves change to the values that the
            search chooses.
        chosen: the values that the search of the micro-batch chose for the last training, by the names of the options.
        largest_micro_batch: the most pairs of a micro-batch, once a step has run out of memory.

    Raises:
        ValueError: an option has an unknown value, or would make the gradient of a window inexact.
    """

    # Without annotations they are no options.
    largest_micro_batch = cast("int | None", None)
    _global_batch_size = cast("int | None", None)  # as the user passed it

    def __post_init__(self) -> None:
        for name in self._VALID_DICT_FIELDS:
            setattr(self, name, _dict_of_json(name, getattr(self, name)))
        micro_batch, accumulation = self.per_device_train_batch_size, self.gradient_accumulation_steps
        self.per_device_train_batch_size = 8 if micro_batch is None else micro_batch  # the default of TrainingArguments
        self.gradient_accumulation_steps = 1 if accumulation is None else accumulation
        searched = [None if (value := getattr(self, name)) is None else str(value) for name in SEARCHED]
        self.texts_at_once, self.retain_graphs = ("auto" if value is None else value for value in searched)
        self.passed = (micro_batch, accumulation, *searched)
        self.check(divided=self._global_batch_size is None)  # the number of processes is not known yet
        self.chosen: dict[str, Any] = {}
        if self.greater_is_better is None and (measured := metric_named(self.metric_for_best_model or "")) is not None:
            self.greater_is_better = METRICS[measured].greater_is_better
        with ended_with_launcher():
            if self.use_cpu:
                # On CPUs, TrainingArguments would create the group without the timeout. It reuses an existing group.
                PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))
            try:
                super().__post_init__()
            except (OSError, TypeError) as error:  # of a file that one of these names, or of a key in it
                if not (names := [name for name in self._VALID_DICT_FIELDS if getattr(self, name)]):
                    raise
                raise ValueError(f"{' or '.join(names)}: {error}") from error
        if self.lr_scheduler_type in SCHEDULES_BY_METRIC:
            # Otherwise they would take a metric that rises, such as an accuracy, for one that gets worse.
            mode = "max" if self.greater_is_better else "min"
            self.lr_scheduler_kwargs = {"mode": mode, **cast(dict, self.lr_scheduler_kwargs or {})}
        if self._global_batch_size is not None:
            divide_global_batch(self, self._global_batch_size, micro_batch, accumulation)
            self.check()
        check_processes(self)
        accelerator: Any = self.accelerator_config
        if self.dataloader_pin_memory:
            accelerator.non_blocking = True  # the host prepares the next batch while the last one is computed
        if self.ddp_find_unused_parameters is None:
            # Every window uses every trained parameter; searching for unused ones costs time and copies.
            self.ddp_find_unused_parameters = False

    def check(self, *, divided: bool = True) -> None:
        """Raises a ValueError for values that InfCLTrainer cannot train with.

        Construction calls it; `InfCLTrainer` calls it again after a hyperparameter search has changed values.

        Args:
            divided: whether ``global_batch_size`` has been divided into micro-batches, which some checks need.
        """
        check_values(self)
        for name, least in (("retain_graphs", 0), ("texts_at_once", 1)):
            value = str(getattr(self, name))
            if value != "auto" and not (value.isdecimal() and int(value) >= least):
                raise ValueError(f"{name} must be 'auto' or an integer of at least {least}, got {value!r}.")
            setattr(self, name, value)
        widths = self.matryoshka_dims or [1]
        if min(widths) < 1 or sorted(set(widths)) != widths:
            raise ValueError(f"matryoshka_dims must be whole numbers from 1 on that rise, got {widths}.")
        check_combinations(self, divided=divided)
        if self.optimizer is not None:
            muon_settings(self.optim_args)  # raises for what Muon does not take
        if divided and self._global_batch_size is not None:
            factors = self.per_device_train_batch_size, self.gradient_accumulation_steps
            divide_global_batch(self, self._global_batch_size, *factors)

    def __getstate__(self) -> dict[str, Any]:
        """Without ``hub_token``, because Trainer writes a pickle of the arguments beside every model."""
        return {**vars(self), "hub_token": None}

    @property
    def device(self) -> torch.device:
        """The device of this process, without an index if it is a CPU."""
        device: torch.device = super().device
        # transformers before 5.18 loads the optimizer's state to this device, which torch cannot do for "cpu:0".
        return torch.device("cpu") if device.type == "cpu" else device

    @property  # type: ignore[misc]  # in place of the field's value
    def global_batch_size(self) -> int:
        """The number of pairs in one contrastive batch, that is in one optimizer step."""
        if self._global_batch_size is not None or not hasattr(self, "distributed_state"):
            return cast(int, self._global_batch_size)  # None while the processes are not set up
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @global_batch_size.setter
    def global_batch_size(self, pairs: int | None) -> None:
        self._global_batch_size = pairs

    @property
    def divides_by_itself(self) -> bool:
        """Whether nobody has chosen the micro-batch, so that it may be what fits into memory."""
        return self._global_batch_size is not None and self.passed[:2] == (None, None)

    @property
    def texts_together(self) -> int:
        """``texts_at_once`` as a number; 1 while it is still to be chosen."""
        return 1 if self.texts_at_once in (None, "auto") else int(self.texts_at_once)

    @property
    def seed_of_data(self) -> int:
        """The seed by which the rows of the training set are shuffled."""
        return self.seed if self.data_seed is None else self.data_seed


def _dict_of_json(name: str, value: Any) -> Any:
    """The value of an option that may be a JSON object as text, or for some options the name of a file.

    TrainingArguments reads it later than the checks of this package look at it.
    """
    if not isinstance(value, str) or not (name.endswith("_kwargs") or value.lstrip().startswith("{")):
        return value
    try:
        return _convert_str_dict(dict(json.loads(value)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a JSON object such as '{{\"key\": 1}}', got {value!r}: {error}") from error
