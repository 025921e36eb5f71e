"""The options that decide about a training, as recorded in its checkpoints, and their change when a run is resumed.

Options that only decide where or how fast something is computed, how often it is logged, saved or evaluated, or what
happens after an error, are left out: they may change from one part of a run to the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..data import ContrastiveCollator
from ..encoders.adapters import has_adapters
from ..options.arguments import InfCLTrainingArguments
from ..options.combinations import WITHOUT_WARM_UP
from ..options.facts import facts_by_name

# Options that decide what is trained, but are compared in another form: see `options_of_arguments` and `Run`.
_IN_ANOTHER_FORM = set(
    """
    bf16 bf16_full_eval fp16 fp16_opt_level fp16_full_eval max_steps num_train_epochs warmup_ratio objective equal_ids
    train_sampling_strategy data_seed
    """.split()
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


def options_of_data(parts: Sequence[Any], collator: object) -> dict[str, Any]:
    """The options of the training set's parts that have a property ``options``, and of the collator, as JSON values."""
    described = [part.options for part in parts if isinstance(getattr(part, "options", None), Mapping)]
    options: dict[str, Any] = {}
    for number, of_part in enumerate(described, 1):
        place = f"dataset {number}" if len(described) > 1 else "dataset"
        options |= {f"{place}: {name}": value for name, value in of_part.items()}
    options["collator"] = getattr(collator, "__qualname__", type(collator).__qualname__)
    if isinstance(collator, ContrastiveCollator):
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


# ---- Optimizer and schedule ----


class OptimizerOptions:
    """The options of a new optimizer and its schedule, whatever their classes.

    Some optimizers keep their progress beside the options in the same groups. Options are those values that differ
    between two new optimizers.

    Args:
        optimizer: an optimizer before its first step; accelerate's wrapper is removed.
        earlier: the options before an earlier training in this process. Those of the same objects are kept.

    Attributes:
        record: the options as JSON values, for a checkpoint.
    """

    def __init__(self, optimizer: object, scheduler: object = None, earlier: OptimizerOptions | None = None) -> None:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self._optimizer, self._scheduler = optimizer, scheduler
        self._groups: list[dict[str, Any]] = [
            {"lr": group.get("initial_lr", group.get("lr"))}
            | {name: value for name, value in group.items() if name not in ("lr", *_EXECUTION)}
            for group in getattr(optimizer, "param_groups", [])
        ]
        state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
        self._schedule = {name: value for name, value in state.items() if name not in _OF_OPTIMIZER}
        if earlier is not None and earlier._optimizer is optimizer:
            self._groups = earlier._groups
        if earlier is not None and earlier._scheduler is scheduler:
            self._schedule = earlier._schedule
        self.record: dict[str, Any] = {
            "optimizer": type(optimizer).__name__,
            "groups": as_json(self._groups),
            "scheduler": type(scheduler).__name__,
            "schedule": as_json(self._schedule),
        }

    def of_other_class(self, before: Mapping[str, object]) -> Iterator[str]:
        """Phrases about an optimizer or a schedule that cannot take over the state of another class."""
        for name in ("optimizer", "scheduler"):
            if name in before and before[name] != self.record[name]:
                yield f"{name} was {before[name]} and is {self.record[name]}"

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """A phrase about each option that differs from those of a `record`, with both values."""
        groups: dict[str, list[str]] = {}
        for number, name in self._changed_groups(before):
            old, new = before["groups"][number][name], self.record["groups"][number][name]
            groups.setdefault(f"{name} was {old!r} and is {new!r}", []).append(str(number))
        every = len(self._groups)
        of_groups = [
            phrase if len(numbers) == every else f"{phrase} for parameter group {' and '.join(numbers)}"
            for phrase, numbers in groups.items()
        ]
        schedule = [
            f"{name} of the schedule was {before['schedule'][name]!r} and is {self.record['schedule'][name]!r}"
            for name in self._changed_schedule(before)
        ]
        return of_groups + schedule

    def apply(self, before: Mapping[str, Any], optimizer: Any, scheduler: object) -> None:
        """Gives an optimizer and a schedule that were loaded from a checkpoint the options that differ from it.

        Their progress, such as moments and the number of steps, stays. The learning rate becomes that of the new
        schedule at the same step. ``before`` is the `record` of the checkpoint.
        """
        for name in self._changed_schedule(before):
            setattr(scheduler, name, self._schedule[name])
        for number, name in self._changed_groups(before):
            group, value = optimizer.param_groups[number], self._groups[number][name]
            if name != "lr":
                group[name] = value
                continue
            old = before["groups"][number]["lr"]
            _set_rate(group, group["lr"] * (float(value) / old) if old else value)
            group["initial_lr"] = value
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs[number] = value
        if isinstance(scheduler, LambdaLR):  # those of transformers: a function of the step
            restart_rates(scheduler)

    def _changed_groups(self, before: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
        for number, (old, new) in enumerate(zip(before.get("groups", []), self.record["groups"], strict=False)):
            yield from ((number, name) for name, value in new.items() if name in old and old[name] != value)

    def _changed_schedule(self, before: Mapping[str, Any]) -> list[str]:
        old = before.get("schedule", {})
        return [name for name, value in self.record["schedule"].items() if name in old and old[name] != value]


def restart_rates(schedule: LambdaLR) -> None:
    """Gives the groups of the optimizer the learning rates of a schedule at the step that it has reached."""
    groups = schedule.optimizer.param_groups
    for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        _set_rate(group, base * factor(schedule.last_epoch))
    schedule._last_lr = [group["lr"] for group in groups]


def _set_rate(group: dict[str, object], rate: float | torch.Tensor) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
