"""A contact sheet: pictures of a data set, and those with which something is wrong."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from PIL import Image, ImageDraw

from ..scoring.sheet import letters_of, lines_of
from .findings import Finding
from .looking import SIDE
from .set_facts import SetFacts

COLUMNS, SAMPLED, FAULTY = 8, 16, 8  # pictures in a line, of the set, and of a finding
_GAP, _LINE, _TITLE = 12, 12, 28  # pixels
_LETTERS = 18  # in a line of a caption


def draw_sheet(sets: Sequence[tuple[SetFacts, Sequence[Finding]]]) -> Image.Image:
    """Pictures of each set, spread evenly over it, and then those of each finding.

    Copies stand beside each other. Images that cannot be decoded have no picture.
    """
    rows: list[tuple[str, list[tuple[bytes, str]]]] = []
    for facts, findings in sets:
        every = list(facts.thumbnails.values())
        rows.append((facts.name, every[:: -(-len(every) // SAMPLED) or 1]))
        for finding in findings:
            shown = [facts.thumbnails[name] for name in finding.rows if name in facts.thumbnails][:FAULTY]
            if shown:
                what = re.split("[:.] ", finding.text, maxsplit=1)[0]  # without examples and what to do
                rows.append((f"{facts.name}: {what}", shown))
    return draw_rows(rows)


def draw_rows(rows: Sequence[tuple[str, Sequence[tuple[bytes, str | Sequence[str]]]]], lines: int = 3) -> Image.Image:
    """Titled rows of pictures: for each its `thumbnail` and one or several texts, each of at most so many lines."""
    wrapped = [[_wrapped(texts, lines) for _, texts in shown] for _, shown in rows]
    cells = [SIDE + _LINE * max(map(len, texts)) + _GAP for texts in wrapped]  # heights
    heights = [_TITLE + -(-len(texts) // COLUMNS) * cell for texts, cell in zip(wrapped, cells, strict=True)]
    sheet = Image.new("RGB", (COLUMNS * (SIDE + _GAP) + _GAP, sum(heights) + _GAP), "white")
    pen, large, small = ImageDraw.Draw(sheet), letters_of(13), letters_of(9)
    top = _GAP
    for (title, shown), texts, cell, height in zip(rows, wrapped, cells, heights, strict=True):
        pen.text((_GAP, top), "".join(lines_of(title, 110, 1)), "black", large)
        for number, ((thumbnail, _), text) in enumerate(zip(shown, texts, strict=True)):
            row, column = divmod(number, COLUMNS)
            left, above = _GAP + column * (SIDE + _GAP), top + _TITLE + row * cell
            sheet.paste(Image.open(io.BytesIO(thumbnail)), (left, above))
            pen.multiline_text((left, above + SIDE + 1), "\n".join(text), "#444444", small, spacing=2)
        top += height
    return sheet


def _wrapped(texts: str | Sequence[str], lines: int) -> list[str]:
    each = (texts,) if isinstance(texts, str) else texts
    return [line for text in each for line in lines_of(text, _LETTERS, lines)]
