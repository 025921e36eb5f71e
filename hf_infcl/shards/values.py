"""Values that cannot be used, and what messages say of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# The column of what is wrong with a row of a table, for each of its columns that is; of None, if it is the whole row.
ERRORS = "__errors__"
ON_BAD_SAMPLE = ("raise", "skip")


def json_object(content: bytes) -> dict[str, Any]:
    """The fields of an object; raises a ValueError for any other JSON, and for what is none."""
    fields = json.loads(content)
    if not isinstance(fields, dict):
        raise ValueError(f"its .json holds a {type(fields).__name__}, not an object")
    return fields


def is_unicode(text: str) -> bool:
    """Whether a text is valid Unicode, which halves of surrogate pairs are not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def counted(count: int, word: str) -> str:
    """A number with what it counts, whose plural ends in s: "1 step", "2,000 steps", "2 processes"."""
    ending = "" if count == 1 else "es" if word.endswith(("s", "ch")) else "s"
    return f"{count:,} {word}{ending}"


def listed(names: Sequence[str], most: int = 10) -> str:
    """The first of many names for a message."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {counted(more, 'other')}" if more > 0 else "")


def in_brackets(names: Sequence[str], most: int = 10) -> str:
    """The first of many names for a message, as a list of texts is shown."""
    return f"[{listed([*map(shortened, names)], most)}]"


def shortened(value: object) -> str:
    """How a message shows a value, a text in quotes."""
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= 80 else f"{text[:80]}..."
    return repr(text) if isinstance(value, str) else text


def describe_cause(error: Exception) -> str:
    """What a message about a bad sample says of an error that it has met."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
