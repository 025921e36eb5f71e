"""Reads options without torch, whose import takes seconds: those in a file, and what those of a training declare.

Names, types, defaults and helps of transformers.TrainingArguments are in a file, which
``python tests/helpers/theirs.py`` writes. A name that the installed release has and the file lacks is accepted, see
`hf_infcl.cli.parser`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, make_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal  # noqa: F401  # types in the file are Literal

import yaml

from .contrastive import ContrastiveOptions
from .declaring import FINITE, FROM_0, FROM_1, SHARE, Facts, Range, declared_facts, field_of, holds, spelled

FILES = (".yaml", ".yml", ".json")  # the endings of a file of options
# The files of options that the package holds, by the names of --recipe.
RECIPES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))}


class _Loader(yaml.SafeLoader):
    """Plain values as in YAML 1.2: `no` and dates are text, 1e-6 is a number, unlike in PyYAML's YAML 1.1."""

    yaml_implicit_resolvers: ClassVar[dict[str | None, Any]] = {}


for _kind, _pattern in {
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^({_pattern})$"), None)


def options_in(path: Path) -> dict[str, tuple[Any, Any]]:
    """The options of a file by name: each as a Python value, and again with its scalars as the text in the file.

    Raises:
        ValueError: there is no such file, or it does not map names to values. No message holds a part of the file.
    """
    if not path.exists():
        raise ValueError(f"There is no file {str(path)!r} to read options from.")
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(content)
            texts = json.loads(content, parse_int=str, parse_float=str, parse_constant=str)
        else:
            values = yaml.load(content, Loader=_Loader)
            texts = yaml.load(content, Loader=yaml.BaseLoader)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: line {error.lineno}: {error.msg}.") from None
    except yaml.MarkedYAMLError as error:  # its text has an excerpt of the file, which might be a token
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ValueError(f"{path} is not YAML: line {line}: {error.problem}.") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # PyYAML raises them
        raise ValueError(f"{path} cannot be read: {type(error).__name__}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must map names of options to values, but it holds a {type(values).__name__}.")
    if not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must map names of options to values; some of its keys are not text.")
    return {key: (values[key], texts[key]) for key in values}


def table_of_package(name: str) -> dict[str, Any]:
    """A table beside this module: elsewhere, refusals or transformers_facts."""
    return {key: value for key, (value, _) in options_in(Path(__file__).with_name(f"{name}.yaml")).items()}


LARGEST = 2**40  # of pairs, steps or whatever a whole number counts


def facts_by_name(kind: Any) -> dict[str, Facts]:
    """The facts of each field of a dataclass of options, or of an instance of one."""
    return {one.name: declared_facts(kind).get(one.name) or facts_of_theirs(one.name) for one in fields(kind)}


def check_values(options: Any) -> None:
    """Raises a ValueError if an option has a value that it may not have, or no effect without another one.

    A single value of an option that takes a list becomes a list of one.
    """
    facts_of_all, declared = facts_by_name(options), declared_facts(options)
    for one in fields(options):
        name, facts, value = one.name, facts_of_all[one.name], getattr(options, one.name)
        if value is not None and name in declared and (items := re.match(r"list\[(\w+)\]", str(one.type))):
            values = list(value) if isinstance(value, (list, tuple)) else [value]
            kind, words = {"int": (Integral, "whole numbers"), "float": (Real, "numbers")}.get(items[1], (object, ""))
            if not all(isinstance(item, kind) for item in values):
                raise ValueError(f"{name} must be a list of {words}, got {value!r}.")
            setattr(options, name, value := values)
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


def values_of_card(args: Any) -> Iterator[tuple[str, str, Any]]:
    """(name, row, value) of each option that is not its default and has a row in a model card."""
    facts = facts_by_name(args)
    for one in fields(args):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if facts[one.name].card and (value := getattr(args, one.name)) != default:
            yield one.name, facts[one.name].card, value


FILE = Path(__file__).with_name("transformers_options.json")

_BEGINNINGS = {kind: tuple(names.split()) for kind, names in table_of_package("transformers_facts").items()}
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
SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # whose learning rate depends on an evaluation's metric
WITHOUT_WARM_UP = ("constant", *SCHEDULES_BY_METRIC)  # schedules that ignore warmup_steps
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
