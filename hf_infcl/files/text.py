"""Words of messages and cards: values, differences and names, and URLs without their user names, passwords and keys."""

import re
import unicodedata
from collections.abc import Callable, Container, Mapping, Sequence

# The column of what is wrong with a row of a table, for each of its columns that is; of None, if it is the whole row.
ERRORS = "__errors__"
ON_BAD_SAMPLE = ("raise", "skip")


def is_unicode(text: str) -> bool:
    """Whether a text is valid Unicode, which halves of surrogate pairs are not."""
    return text == text.encode(errors="replace").decode()


def written_otherwise(name: str, is_there: Callable[[str], bool]) -> str:
    """A phrase if there is the name in another Unicode normalisation, which looks the same."""
    others = {unicodedata.normalize(form, name) for form in ("NFC", "NFD")} - {name}
    other = next(filter(is_there, others), None)
    return f", but there is {other!r}, the same name in another Unicode normalisation: rename one" if other else ""


def counted(count: int, word: str) -> str:
    """A number with what it counts, whose plural ends in s: "1 step", "2,000 steps", "2 processes"."""
    return f"{count:,} {word}" + ("" if count == 1 else "es" if word.endswith(("s", "ch")) else "s")


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Lines of the cells of a table, with two spaces between columns; those in ``right`` have numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [f"{'>' if n in right else '<'}{width}" for n, width in enumerate(widths)]
    return ["  ".join(f"{cell:{side}}" for cell, side in zip(row, sides, strict=True)).rstrip() for row in rows]


def was_and_is(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """A phrase about each value that differs between two mappings, of the names that both have; empty if none does."""
    different = (name for name, value in now.items() if before.get(name, value) != value)
    return ", ".join(f"{name} was {before[name]!r} and is {now[name]!r}" for name in different)


def listed(names: Sequence[str], most: int = 10) -> str:
    """The first of many names for a message."""
    return ", ".join(names[:most]) + (f" and {counted(len(names) - most, 'other')}" if len(names) > most else "")


def in_brackets(names: Sequence[str], most: int = 10) -> str:
    """The first of many names for a message, as a list of texts is shown."""
    return f"[{listed([*map(shortened, names)], most)}]"


def joined(parts: Sequence[str]) -> str:
    """The parts in a sentence: "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def lacks_column(column: str, names: Sequence[str]) -> str:
    """The part of a message that says that a table lacks a column, and which it has."""
    alike = written_otherwise(column, names.__contains__)
    return f"has no column {column!r}{alike}. Its columns are {in_brackets(names, 30)}."


def shortened(value: object) -> str:
    """How a message shows a value, a text in quotes."""
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= 80 else f"{text[:80]}..."
    return repr(text) if isinstance(value, str) else text


# Control characters, and those that turn the direction of the text after them.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONGEST = 200  # characters of a name that Markdown shows


def one_line(text: str) -> str:
    """The text without line breaks and control characters."""
    return " ".join(_CONTROL.sub(" ", text).split())


def code(text: str) -> str:
    """The text in code style, enclosed in more backticks than it contains in a row, as CommonMark requires."""
    text = one_line(text)
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def describe_cause(error: Exception) -> str:
    """The text of an error within a message, without the full stop at its end."""
    return (str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}").rstrip(". \n")


_HIDDEN = "***"


def without_secrets(text: str) -> str:
    """The text with ``***`` for the user, the password and the query of every URL in it.

    Of ``s3://KEY:SECRET@bucket/shards?token=1``, ``s3://***@bucket/shards?***`` is left. The keys of object stores may
    contain slashes, so if anything but a port follows a colon, all up to the last ``@`` is hidden.
    """
    return re.sub(r'([A-Za-z][\w+.-]*://)([^\s"<>]+)', _public, text)


def _public(url: re.Match[str]) -> str:
    scheme, rest = url.groups()
    rest, asked, _ = rest.partition("?")
    host = rest.partition("/")[0]
    of_user = "@" in host or (":" in host and not host.rpartition(":")[2].isdigit())
    if of_user and "@" in rest:
        rest = f"{_HIDDEN}@{rest.rpartition('@')[2]}"
    return scheme + rest + (f"?{_HIDDEN}" if asked else "")


class Url(str):
    """A path or URL whose ``repr``, which messages show, hides user, password and query, as that of `httpx.URL` does.

    Everything that opens the file gets the whole text.
    """

    def __repr__(self) -> str:
        return repr(without_secrets(str(self)))
