"""How an option is declared: once, with all that checks, helps, resumes, cards and guides have to know of it.

Nothing here imports torch, so that the help and mistakes on the command line are answered at once.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from fnmatch import fnmatch
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

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
    # Its row in a model card, where it has another value than its default; after a colon the words of the row, with {}
    # for the value. Empty for none.
    card: str = ""


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
        facts: see `Facts`. What machines may set differently decides nothing.
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
