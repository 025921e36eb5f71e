"""The Markdown of cards, in which the text of others is only shown: names of classes and data sets, prompts, licences.

Such text begins neither HTML, links or pictures, nor new lines, and leaves a table whole, whatever it holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

_LONGEST = 200  # characters of a name that are shown
# Control characters, and those that turn the direction of the text after them.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# What begins something in CommonMark, in HTML or as a link of GitHub.
_SPECIAL = re.compile(r"[\\`*\[\]<>#|!&~$@]|(?<!\w)_(?=\w)|:(?=//)|(?<=www)\.")


def one_line(text: str) -> str:
    return " ".join(_CONTROL.sub(" ", text).split())


def code(text: str) -> str:
    """The text in code style, enclosed in more backticks than it contains in a row, as CommonMark requires."""
    text = one_line(text)
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
    fence = "`"
    while fence in text:
        fence += "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def escaped(text: str) -> str:
    """The text among other words, with a backslash before what Markdown would read as more than text."""
    return _SPECIAL.sub(r"\\\g<0>", one_line(text))


def literal(value: str | Sequence[str]) -> str:
    """The value in Python, on one line and without backticks, so that no fence of code ends in it."""
    return json.dumps(value, ensure_ascii=False).replace("`", "\\u0060")


def joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def line(*, caller: Callable[[], str]) -> str:
    """One line of what a template encloses, which it may break anywhere."""
    return one_line(caller())


def cell(text: str) -> str:
    """The text in a cell of a table; pipes are escaped, also within code, as the tables of the Hub require."""
    # A pipe after an even number of backslashes would end the cell, since these escape each other.
    return re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", one_line(text))


def row(*cells: str, caller: Callable[[], str] | None = None) -> str:
    """A row of a table; what a template encloses is its last cell."""
    return f"| {' | '.join(map(cell, cells if caller is None else (*cells, caller())))} |"
