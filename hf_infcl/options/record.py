"""The record in every checkpoint: the run that wrote it, its progress, and the options that decide about the training.

Options that only decide where or how fast something is computed, how often it is logged, saved or evaluated, or what
happens after an error, are left out: they may change from one part of a run to the next.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models.adapters import has_adapters
from .arguments import InfCLTrainingArguments
from .declaring import WITHOUT_WARM_UP, facts_by_name

RECORD_NAME = "infcl_run.json"


@dataclass(frozen=True)
class RunRecord:
    """The content of a file in every checkpoint: the run that wrote it, and its progress."""

    # What stays the same from the first step of a run to its last, as JSON values (see `resuming.make_run`). The number
    # of processes, the micro-batch and the strategy change neither the windows nor, but for rounding, the weights.
    run: dict[str, Any]
    # The global batches of the data before the one that is trained next: the steps, and those that epochs have left out
    # because they were ended early. None for streams of other classes than `ImageTextStream`.
    position: int | None = None
    skipped_samples: int | None = None  # bad samples that the data has skipped; None if it does not count them
    processes: int = 1  # that wrote the checkpoint, each with its random state
    only_model: bool = False  # whether it was written with ``save_only_model``, so that no run can resume from it
    # The position in an `ImageTextStream`, or in new and old pairs, that each process has reached; None for other data.
    stream: list[dict[str, Any]] | None = None
    skipped_windows: int = 0  # not trained because their numbers were not finite
    skipped_in_a_row: int = 0  # windows skipped just before the checkpoint because of numbers not finite
    last_loss: float = 0.0  # of the last window that was trained
    optimizer: dict[str, Any] = field(default_factory=dict)  # its options and those of its schedule
    micro_batches: dict[str, Any] | None = None  # how the global batch was divided, and on which devices
    compiled: str | None = None  # what was compiled; None if it was not decided
    loss_since_log: tuple[float, int] | None = None  # the sum of the losses since the last log, and the step of that

    def write(self, checkpoint: str | Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        Path(checkpoint, RECORD_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, checkpoint: str | Path) -> "RunRecord | None":
        """The record of a checkpoint; None if it has none because another Trainer wrote it.

        Raises:
            ValueError: the file is damaged, or another version of this package wrote it; the message names it.
        """
        path = Path(checkpoint, RECORD_NAME)
        if not path.is_file():
            return None
        try:
            content = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}. Resume from another checkpoint.") from error
        try:
            return cls(**content)
        except TypeError as error:
            raise ValueError(
                f"{path} is of another version of hf_infcl, whose checkpoints cannot be resumed. Start anew from its "
                f"weights: --model {checkpoint}"
            ) from error


# Options that decide what is trained, but are compared in another form, here or in `resuming.make_run`.
_IN_ANOTHER_FORM = set(
    "bf16 bf16_full_eval fp16 fp16_opt_level fp16_full_eval max_steps num_train_epochs warmup_ratio objective "
    "equal_ids train_sampling_strategy data_seed".split()
)
# Schedules whose learning rate does not depend on the number of steps of the run.
_ENDLESS = (*WITHOUT_WARM_UP, "constant_with_warmup", "inverse_sqrt")
# In the groups of an optimizer: how it computes.
_EXECUTION = ("params", "initial_lr", "fused", "foreach", "capturable", "differentiable")
# In the state of a schedule: follows from the optimizer.
_OF_OPTIMIZER = ("base_lrs", "_last_lr", "lr_lambdas")

# In a model's config: where it comes from, or how it computes.
_OF_ORIGIN = ("_", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "inference_mode")


def options_of_arguments(args: InfCLTrainingArguments, mixed_precision: str) -> dict[str, Any]:
    """The decisive arguments, and ``mixed_precision``, which the launcher can set as well, as JSON values."""
    decisive = {name for name, facts in facts_by_name(args).items() if facts.decides} - _IN_ANOTHER_FORM
    options = {name: value for name, value in args.to_dict().items() if name in decisive}
    options["optim"] = options["optim"].removesuffix("_fused")  # of the same state
    options["mixed_precision"] = mixed_precision
    length = f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    is_endless = args.lr_scheduler_type in _ENDLESS and not 0 < args.warmup_steps < 1
    options["schedule_length"] = None if is_endless else length
    return as_json(options)


def options_of_data(parts: Sequence[Any], collator: Any) -> dict[str, Any]:
    """The options of the training set's parts that have a property ``options``, and of the collator, as JSON values."""
    described = [part.options for part in parts if isinstance(getattr(part, "options", None), Mapping)]
    options: dict[str, Any] = {"collator": getattr(collator, "__qualname__", type(collator).__qualname__)}
    for number, of_part in enumerate(described, 1):
        place = f"dataset {number}" if len(described) > 1 else "dataset"
        options |= {f"{place}: {name}": value for name, value in of_part.items()}
    if isinstance(getattr(collator, "options", None), Mapping):
        options |= {f"collator: {name}": value for name, value in collator.options.items()}
    return as_json(options)


def options_of_model(model: nn.Module) -> dict[str, Any]:
    """The leaves of the config of a model, and of its adapters of peft, as JSON values."""
    config: Any = getattr(model, "config", None)
    options = dict(_leaves("config", config.to_dict())) if hasattr(config, "to_dict") else {}
    adapters: Any = getattr(model, "peft_config", {}) if has_adapters(model) else {}
    for name, adapter in adapters.items():
        kept = {key: value for key, value in adapter.to_dict().items() if "base_model" not in key}
        options |= _leaves(f"adapter {name}", kept)
    return as_json(options)


def _leaves(place: str, config: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and "model_type" in value:  # the config of a tower
            yield from _leaves(f"{place}.{name}", value)
        elif not str(name).startswith(_OF_ORIGIN) and not str(name).endswith("_token_id"):
            yield f"{place}.{name}", value


def as_json(value: object) -> Any:
    """A value as it is read from a JSON file. Functions and other objects are replaced by their names."""

    def replaced(value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.item()
        if isinstance(value, (set, frozenset)):
            return sorted(value, key=str)
        named = value if callable(value) and hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"

    return json.loads(json.dumps(value, default=replaced))


def options_of_optimizer(optimizer: object) -> dict[str, Any]:
    """The class and the options of an optimizer before its first step, as JSON values; accelerate's wrapper is removed.

    Some optimizers keep their progress beside the options in the same groups, which is the same for two new ones.
    """
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
    options: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(groups):
        place = "" if len(groups) == 1 else f" of parameter group {number}"
        options["lr" + place] = group.get("initial_lr", group.get("lr"))
        options |= {name + place: value for name, value in group.items() if name not in ("lr", *_EXECUTION)}
    return as_json(options)


def options_of_schedule(schedule: Any) -> dict[str, Any]:
    """The class and the options of a new schedule of the learning rate, as JSON values."""
    state = schedule.state_dict() if hasattr(schedule, "state_dict") else {}
    options = {f"{name} of the schedule": value for name, value in state.items() if name not in _OF_OPTIMIZER}
    return as_json({"schedule": type(schedule).__name__, **options})
