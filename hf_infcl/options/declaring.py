"""How an option is declared: once, with all that checks, helps, resumes, cards and guides have to know of it.

Also how options are read from files. Nothing here imports torch, so that the help and mistakes on the command line are
answered at once.
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from fnmatch import fnmatch
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import yaml

_T = TypeVar("_T")
_FACTS, _HEADING = "_facts", "_argument_group_name"  # HfArgumentParser reads the second


@dataclass(frozen=True)
class Range:
    """The numbers that an option may be."""

    kind: type
    words: str
    holds: Callable[[Any], bool]


FROM_1 = Range(Integral, "a whole number of at least 1", lambda value: value >= 1)
FROM_0 = Range(Integral, "a whole number of at least 0", lambda value: value >= 0)
FINITE = Range(Real, "a finite number of at least 0", lambda value: 0 <= value < math.inf)
FROM_2 = Range(Integral, "at least 2, because a pair is compared with others", lambda value: value >= 2)
MULTIPLIER = Range(Real, "a number of at least 1 (inf for no limit; not the logarithm)", lambda value: value >= 1)
FRACTION = Range(Real, "a number from 0 to 1", lambda value: 0 <= value <= 1)
PART = Range(Real, "a number of more than 0 and less than 1", lambda value: 0 < value < 1)
SHARE = Range(Real, "a number of at least 0 and less than 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True)
class Facts:
    """What the package has to know of an option, besides its type, default and help."""

    decides: bool = True  # whether it decides what is trained, so that a resume with another value is a change
    one_machine: bool = False  # whether machines of one training may set it differently
    # The values that it may have, besides its default; empty for any. A function asks a table whose import takes torch.
    choices: Collection[object] | Callable[[], Collection[object]] = ()
    within: Range | None = None  # the numbers that it may be, besides None where that is the default
    needs: str = ""  # a condition without which it has no effect, see `holds`, or several with " or " between them
    card: str = ""  # its row in a model card, where it has another value than its default; empty for none


def spelled(value: object) -> str:
    """The value of an option as on the command line."""
    value = getattr(value, "value", value)  # of a member of an Enum
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def holds(options: object, condition: str) -> bool:
    """Whether an option is set ("name"), has one of several values ("name=one|other*"), none of them, or a larger one.

    The latter two are "name!=one|other*" and "name>1". Older releases of transformers do not have all options.
    """
    name, sign, wanted = re.split("(!=|=|>|$)", condition, maxsplit=1)
    value = getattr(options, name, None)
    if sign == ">":
        return value is not None and value > float(wanted)
    is_one = any(fnmatch(spelled(value), one) for one in wanted.split("|"))
    return bool(value) if not sign else is_one == (sign == "=")


def refuse(rows: Mapping[str, str], options: object) -> None:
    """Raises a ValueError for the first row whose conditions all hold: what cannot be trained, and why."""
    for conditions, why in rows.items():
        if all(holds(options, condition) for condition in conditions.split()):
            names = [re.split("!=|=|>", condition)[0] for condition in conditions.split()]
            seen = " and ".join(f"{name}={spelled(getattr(options, name))}" for name in names)
            what = "exclude each other" if len(names) > 1 else "is not supported"
            raise ValueError(f"{seen} {what}: {why}. Omit {'one of them' if len(names) > 1 else 'it'}.")


def option(default: object = None, *, aliases: Sequence[str] = (), **facts: Any) -> Any:
    """The field of an option in a dataclass that is `described`.

    Args:
        default: its default; a list is copied for each instance. MISSING of `dataclasses` makes it required.
        aliases: further names of it on the command line, with their dashes.
        facts: see `Facts`. Options that machines may set differently decide nothing.
    """
    declared = Facts(**{"decides": not facts.get("one_machine"), **facts})
    return field_of(default, {"facts": declared, "aliases": [*aliases]})


def documented(kind: type) -> tuple[str, dict[str, str]]:
    """The text of a class's docstring and, by name, the texts below "Attributes:" or "Args:" in it, for argparse.

    Both are empty with ``python -OO``.
    """
    text, *parts = re.split(r"^ {4}(\w+): ", inspect.cleandoc(kind.__doc__ or ""), flags=re.MULTILINE)
    told = [" ".join(part.split()).replace("%", "%%") for part in (text, *parts)]  # argparse fills in %(default)s
    return re.sub(" (Attributes|Args):$", "", told[0]), dict(zip(told[1::2], told[2::2], strict=True))


if TYPE_CHECKING:
    from dataclasses import dataclass as described  # which is all that a type checker has to know
else:

    def described(kind: type[_T]) -> type[_T]:
        """Makes a dataclass of options of a class, whose docstring has their helps below "Attributes:".

        The first sentence of the docstring is the heading of these options in the help of a command; a short help shows
        the first sentence of each option's help. The `Facts` of all options are in an attribute of the class, since
        HfArgumentParser hands all metadata of a field to argparse.
        """
        text, helps = documented(kind)
        setattr(kind, _HEADING, text.partition(". ")[0].rstrip("."))
        every = dict(declared_facts(kind))
        for name in (name for name in kind.__annotations__ if not name.startswith("_")):
            declared = vars(kind).get(name, MISSING)
            declared = declared if isinstance(declared, Field) else option(declared)
            metadata = {"help": helps.get(name, ""), **declared.metadata}
            every[name] = metadata.pop("facts")
            declared.metadata = MappingProxyType(metadata)
            setattr(kind, name, declared)
        setattr(kind, _FACTS, every)
        return dataclass(kind)


def field_of(default: object, metadata: Mapping[str, Any]) -> Any:
    """A field of a dataclass; a list is copied for each instance."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def declared_facts(kind: object) -> Mapping[str, Facts]:
    """The facts of the options that a class, or the class of an object, has declared."""
    return getattr(kind, _FACTS, {})


# ---- Files of options ----

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


# ---- What is known of the options of a training, and checked ----

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
        items = re.match(r"list\[(\w+)\]", str(one.type)) if name in declared else None
        if items and value is not None:
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
