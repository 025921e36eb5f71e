"""Values that cannot be used, what messages say of them, and texts that are cut and drawn."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from pathlib import Path
from typing import Any

from PIL import ImageFont

# The column of what is wrong with a row of a table, for each of its columns that is; of None, if it is the whole row.
ERRORS = "__errors__"


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


def shortened(value: object) -> str:
    """How a message shows a value."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def lines_of(text: str, letters: int, most: int) -> list[str]:
    """At most so many lines of a text, each of at most so many letters; "…" stands for the rest of a longer one."""
    lines = textwrap.wrap(text, letters)
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    if len(last) > letters - 2:  # at a space, which some languages do not write
        last = last[: letters - 2].rpartition(" ")[0] or last[: letters - 2]
    return [*lines[: most - 1], f"{last} …"]


def letters_of(size: int) -> Any:
    """The font of so many pixels that pictures of captions are drawn with.

    It comes with matplotlib, if that is installed: Pillow's own has neither accents nor other scripts.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return ImageFont.load_default(size=size)
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")), size)


def describe_cause(error: Exception) -> str:
    """What a message about a bad sample says of an error that it has met."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
