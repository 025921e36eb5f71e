"""How an option is declared: once, with all that checks, helps, resumes, plans, cards and guides have to know of it.

Nothing here imports torch, so that the help and mistakes on the command line are answered at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, field
from numbers import Integral, Real
from typing import Any

_FACTS = "facts"  # the key of an option's `Facts` in the metadata of its field


class ExclusiveOptionsError(ValueError):
    """An option contradicts another one, or has no effect because of it.

    Attributes:
        options: their names. If some are set by a file and others on the command line, the first one of the file gives
            way.
    """

    def __init__(self, message: str, *options: str) -> None:
        super().__init__(message)
        self.options = options


@dataclass(frozen=True)
class Range:
    """The numbers that an option may be."""

    kind: type
    words: str
    holds: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        """Raises a ValueError if the value of an option is no such number."""
        if not (isinstance(value, self.kind) and self.holds(value)):
            raise ValueError(f"{name} must be {self.words}, got {value!r}.")


FROM_1 = Range(Integral, "a whole number of at least 1", lambda value: value >= 1)
FROM_0 = Range(Integral, "a whole number of at least 0", lambda value: value >= 0)
FINITE = Range(Real, "a finite number of at least 0", lambda value: 0 <= value < math.inf)
SHARE = Range(Real, "a number of at least 0 and less than 1", lambda value: 0 <= value < 1)
NUMBER = Range(Real, "a number", lambda value: True)


@dataclass(frozen=True)
class Facts:
    """What the package has to know of an option, besides its type, default and help.

    Attributes:
        decides: whether it decides what is trained, so that a resume with another value is a change.
        one_machine: whether machines of one training may set it differently.
        plans: whether `infcl plan` reads it.
        choices: the values that it may have, besides its default, or a function that returns them where importing
            them takes long; empty for any.
        within: the numbers that it may be, besides None where that is the default.
        needs: another option without which it has no effect, as ``name`` or ``name=value``.
        card: its row in a model card, where it has another value than its default; after a colon the words of the row,
            with {} for the value. Empty for none.
    """

    decides: bool
    one_machine: bool = False
    plans: bool = False
    choices: Collection[str] | Callable[[], Collection[str]] = ()
    within: Range | None = None
    needs: str = ""
    card: str = ""


class _Metadata(dict[str, Any]):
    """The metadata of a field, which HfArgumentParser copies into the arguments of argparse: without the facts."""

    def __init__(self, facts: Facts, help: str) -> None:
        super().__init__(help=help)
        self._facts = facts

    def __missing__(self, key: str) -> Facts:
        if key != _FACTS:
            raise KeyError(key)
        return self._facts


def option(default: Any = None, *, help: str, decides: bool, **facts: Any) -> Any:
    """The field of an option in a dataclass.

    Args:
        default: its default; a list is copied for each instance.
        help: what it does, of which the short help shows the first sentence.
        decides, facts: see `Facts`.
    """
    metadata = _Metadata(Facts(decides, **facts), help)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def facts_of(declared: Field[Any]) -> Facts | None:
    """The facts of a field; None if it is not declared by `option`."""
    try:
        found: Facts = declared.metadata[_FACTS]
    except KeyError:
        return None
    return found
