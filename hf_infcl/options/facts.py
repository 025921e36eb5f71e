"""Reads what the options of a training declare: those of this package, and transformers.TrainingArguments.

The options of transformers.TrainingArguments without torch, whose import takes seconds.

Their names, types, defaults and helps are in a file, which ``python tests/helpers/theirs.py`` writes. A name that the
installed release has and the file lacks is accepted, see `hf_infcl.cli.parser`.
"""

import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, make_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol  # noqa: F401  # types in the file are Literal

from .contrastive import ContrastiveOptions
from .declaring import FINITE, FROM_0, FROM_1, SHARE, Facts, Range, declared_facts, field_of, holds, spelled
from .files import OF_THEIRS, options_in

LARGEST = 2**40  # of pairs, steps or whatever a whole number counts


class Options(Protocol):
    """A dataclass of options."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def facts_by_name(kind: Options | type[Options]) -> dict[str, Facts]:
    """The facts of each field of a dataclass of options, or of an instance of one."""
    return {one.name: declared_facts(kind).get(one.name) or facts_of_theirs(one.name) for one in fields(kind)}


def check_values(options: Options) -> None:
    """Raises a ValueError if an option has a value that it may not have, or no effect without another one.

    A single value of an option that takes a list becomes a list of one.
    """
    facts_of_all = facts_by_name(options)
    for one in fields(options):
        name, facts = one.name, facts_of_all[one.name]
        if name in declared_facts(options) and str(one.type).startswith("list["):
            _make_list(options, one)
        value = getattr(options, name)
        if isinstance(value, Integral) and int(value) >= LARGEST and not name.endswith("seed"):
            raise ValueError(f"{name} must be less than {LARGEST:,}, which no training counts up to, got {value:,}.")
        is_default = one.default is not MISSING and value == one.default
        choices = facts.choices() if callable(facts.choices) else facts.choices
        if not is_default and choices and value not in choices:
            known = dict.fromkeys([one.default, *choices])
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        within = None if value is None and one.default is None else facts.within
        if within is not None and not (isinstance(value, within.kind) and within.holds(value)):
            raise ValueError(f"{name} must be {within.words}, got {value!r}.")
        if facts.needs and not is_default and not any(holds(options, one) for one in facts.needs.split(" or ")):
            needed = facts.needs
            raise ValueError(f"{name}={spelled(value)} has no effect without {needed}: add {needed} or drop {name}.")


def _make_list(options: Options, declared: Field[Any]) -> None:
    """Makes a list of the value of an option whose type is one, such as ``list[str] | None``."""
    value, kind = getattr(options, declared.name), str(declared.type).removeprefix("list[").partition("]")[0]
    if value is None:
        return
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    number, words = {"int": (Integral, "whole numbers"), "float": (Real, "numbers")}.get(kind, (object, ""))
    if not all(isinstance(one, number) for one in values):
        raise ValueError(f"{declared.name} must be a list of {words}, got {value!r}.")
    setattr(options, declared.name, values)


def values_of_card(args: Options) -> Iterator[tuple[str, str, Any]]:
    """(name, row, value) of each option that is not its default and has a row in a model card."""
    facts = facts_by_name(args)
    for one in fields(args):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if facts[one.name].card and (value := getattr(args, one.name)) != default:
            yield one.name, facts[one.name].card, value


FILE = Path(__file__).with_name("transformers_options.json")

_BEGINNINGS = {kind: tuple(names.split()) for kind, (names, _) in options_in(OF_THEIRS).items()}
# torch would refuse other numbers only after the data are open, and without the option's name, or not at all.
_WITHIN = {
    "adam_beta1": SHARE,
    "adam_beta2": SHARE,
    "dataloader_num_workers": FROM_0,
    "max_steps": Range(Real, "more than 0, or -1 to train num_train_epochs", lambda value: value != 0),
    "dataloader_prefetch_factor": FROM_1,
    "ddp_timeout": Range(Real, "a number of at least 1", lambda value: value >= 1),
    "max_grad_norm": Range(Real, "a number of at least 0 (0 disables clipping)", lambda value: value >= 0),
    **dict.fromkeys(("adam_epsilon", "learning_rate", "warmup_steps", "weight_decay"), FINITE),
    **dict.fromkeys(("per_device_eval_batch_size", "save_total_limit"), FROM_1),
}
_CHOICES = {"train_sampling_strategy": ("random", "sequential")}  # a batch must not be selected by length
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # transformers before 5.23 has only the second


def facts_of_theirs(name: str) -> Facts:
    """The facts of an option of transformers.TrainingArguments."""
    one_machine = name.startswith(_BEGINNINGS["of_a_machine"])
    needs = name.removesuffix("_kwargs") if name.startswith(CHECKPOINTING) and name.endswith("_kwargs") else ""
    decides = not one_machine and not name.startswith(_BEGINNINGS["undecisive"])
    return Facts(decides, one_machine, _CHOICES.get(name, ()), _WITHIN.get(name), needs)


def release_of_file() -> str:
    """The release of transformers whose options the file has."""
    return str(json.loads(FILE.read_text(encoding="utf-8"))["release"])


@cache
def of_transformers() -> type:
    """A dataclass with the fields of transformers.TrainingArguments that this package does not declare itself."""
    ours = {one.name for one in fields(ContrastiveOptions)}
    declared: list[tuple[str, Any, Any]] = []
    for name, one in json.loads(FILE.read_text(encoding="utf-8"))["options"].items():
        kind, default = one.pop("type"), one.pop("default")
        declared += [(name, kind, field_of(default, one))] * (name not in ours)
    # The types are text, which is evaluated in this module.
    space = {"_argument_group_name": "The training (transformers.TrainingArguments)", "__module__": __name__}
    return make_dataclass("TheirOptions", declared, namespace=space)
