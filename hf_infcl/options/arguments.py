"""The arguments of `InfCLTrainer`: those of TrainingArguments, and a few that contrastive training adds.

Refused are options that exclude each other, that would have no effect, that would make batches or metrics inexact, or
that InfCLTrainer does not support. The arguments also say how a global batch is divided among processes and
micro-batches.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin, parse_flag_from_env
from transformers import TrainingArguments
from transformers.training_args import _convert_str_dict

from ..evaluation.metrics import METRICS, metric_named
from ..files.text import counted
from ..processes.signals import ended_with_launcher
from .contrastive import DIVISION, SEARCHED, ContrastiveOptions, muon_settings
from .declaring import CHECKPOINTING, SCHEDULES_BY_METRIC, check_values, refuse, table_of_package

# By kind, the conditions that must not hold together, and why.
REFUSALS: dict[str, dict[str, str]] = table_of_package("refusals")
UNTRIED = 32  # the most pairs of a micro-batch where the memory is not known, as on a CPU
_LEAST = 0.25  # of the pairs that fit: with smaller micro-batches a device is far from its rate


def divide_global_batch(args: Any, micro_batch: int | None, accumulation: int | None) -> None:
    """Sets the micro-batch and the accumulation of a training so that they make up its ``global_batch_size``.

    Args:
        args: `InfCLTrainingArguments` with a ``global_batch_size``, whose processes are set up.
        micro_batch, accumulation: their values where they are decided already; otherwise None.

    Raises:
        ValueError: the global batch cannot be divided so.
    """
    size = args.global_batch_size
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
        self.check()
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
            divide_global_batch(self, micro_batch, accumulation)
            self.check()
        accelerator: Any = self.accelerator_config
        refuse(REFUSALS["unsupported_of_accelerate"], accelerator)
        if self.world_size > 1:
            refuse(REFUSALS["exclusive_among_processes"], self)
        if self.dataloader_pin_memory:
            accelerator.non_blocking = True  # the host prepares the next batch while the last one is computed
        if self.ddp_find_unused_parameters is None:
            # Every window uses every trained parameter; searching for unused ones costs time and copies.
            self.ddp_find_unused_parameters = False

    def check(self) -> None:
        """Raises a ValueError for values that InfCLTrainer cannot train with.

        Construction calls it; `InfCLTrainer` calls it again after a hyperparameter search has changed values.
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
        _check_support(self)
        if self.max_steps <= 0 and not 0 < self.num_train_epochs < math.inf:
            raise ValueError(
                "num_train_epochs or max_steps must be more than 0, otherwise nothing is trained, got "
                f"{self.num_train_epochs} and {self.max_steps}."
            )
        for kind in ("save", "eval", "logging"):
            interval = getattr(self, f"{kind}_steps")
            if getattr(self, f"{kind}_strategy") == "steps" and interval is not None and not interval > 0:
                raise ValueError(f"{kind}_steps must be more than 0 with {kind}_strategy='steps', got {interval}.")
        refuse(REFUSALS["exclusive"], self)
        _check_cache_folder(self)
        for name in CHECKPOINTING:
            if getattr(self, name, False):
                settings = {"use_reentrant": False} | (getattr(self, f"{name}_kwargs") or {})
                if settings["use_reentrant"] and self.freeze_layers is not None:
                    raise ValueError(
                        f"{name}_kwargs with use_reentrant=True loses the gradient of the layers above those that "
                        f"freeze_layers={self.freeze_layers} freezes. Set use_reentrant to False."
                    )
                setattr(self, f"{name}_kwargs", settings)  # the default of some releases of transformers is True
        knows_processes = hasattr(self, "distributed_state")  # by whose number ``global_batch_size`` is divided
        if self._global_batch_size is None or knows_processes:
            refuse(REFUSALS["exclusive_in_steps"], self)
            _check_graphs(self)
        if self.optimizer is not None:
            muon_settings(self.optim_args)  # raises for what Muon does not take
        if self._global_batch_size is not None and knows_processes:
            divide_global_batch(self, self.per_device_train_batch_size, self.gradient_accumulation_steps)

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


# ---- What cannot be trained ----


def check_command(command: str, options: Any) -> None:
    """As `InfCLTrainingArguments.check`, for all options of a command of `infcl`."""
    refuse(REFUSALS.get(f"of_{command}", {}), options)
    if command not in ("check", "train"):
        return
    if len(options.dataset or ()) > 1 and not options.streaming:
        raise ValueError("Only shards that are read with --streaming can have several --dataset.")
    if command == "train" and options.streaming and options.max_steps <= 0 and options.samples_per_epoch is None:
        raise ValueError("A stream has no length. Pass --max_steps or --samples_per_epoch.")
    if options.replay_share and not options.replay_dataset:
        raise ValueError("--replay_share has no effect without --replay_dataset: add it or drop --replay_share.")
    refuse(REFUSALS["exclusive_in_trainings"], options)


def _check_support(args: Any) -> None:
    """Raises a ValueError for options of TrainingArguments that InfCLTrainer does not support."""
    # The variable is set by `accelerate launch` with a config of DeepSpeed.
    if args.deepspeed is not None or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "InfCLTrainer does not train under DeepSpeed. To shard the parameters, use FSDP2 (--fsdp, or accelerate "
            "launch --config_file scripts/configs/fsdp2.yaml) instead of its config."
        )
    refuse(REFUSALS["unsupported"], args)
    if "transformers" not in args.save_formats or set(args.save_formats) - {"transformers", "open_clip"}:
        raise ValueError(
            "save_formats must be transformers, or transformers and open_clip, got "
            f"{' '.join(args.save_formats) or 'nothing'}: a training resumes from transformers' files."
        )
    if unknown := set(args.include_for_metrics) - {"inputs"}:
        raise ValueError(
            f"include_for_metrics may have 'inputs' only, got {', '.join(map(repr, sorted(unknown)))}: batches "
            "have no losses, and metrics of the whole set include its loss anyway."
        )
    if args.leave_out not in (None, "noisy"):
        raise ValueError(
            f"leave_out must be 'noisy', got {str(args.leave_out)!r}. To train without a share of the pairs, score "
            "them with `infcl score`, and pass its ledger as `--exclude _ledger.parquet:5%`."
        )


def _check_cache_folder(args: Any) -> None:
    """Raises a ValueError if a push of ``output_dir`` would upload the cached features."""
    if args.cache_features is None or args.output_dir is None:
        return
    output, cache = Path(args.output_dir).resolve(), Path(args.cache_features).resolve()
    # A push leaves out what begins with an underscore.
    if cache == output or (output in cache.parents and not cache.relative_to(output).parts[0].startswith("_")):
        raise ValueError(
            f"cache_features {args.cache_features} is inside output_dir {args.output_dir}, so a push to the Hub "
            f"would upload the features. Choose a folder outside, or {Path(args.output_dir, '_features')}."
        )


def _check_graphs(args: Any) -> None:
    """Raises a ValueError if CUDA graphs would be replayed among the micro-batches of a step."""
    # accelerate completes the plugin from the variables that `accelerate launch` sets.
    compiler = TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    replays = compiler.backend == DynamoBackend.CUDAGRAPHS or compiler.mode in ("reduce-overhead", "max-autotune")
    if replays and args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"torch_compile_mode={compiler.mode!r} with the backend {compiler.backend.value.lower()!r} replays "
            "CUDA graphs, and a replay overwrites the outputs of the one before, but the loss needs those of all "
            f"{args.gradient_accumulation_steps} micro-batches of a step. Choose 'default' or "
            "'max-autotune-no-cudagraphs', or one micro-batch per step (gradient_accumulation_steps=1)."
        )
