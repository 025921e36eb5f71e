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


def draw_rows(rows: Sequence[tuple[str, Sequence[tuple[bytes, str]]]], lines: int = 3) -> Image.Image:
    """Titled rows of pictures: for each its `thumbnail` and its caption, of which so many lines are shown."""
    cell = SIDE + _GAP, SIDE + lines * _LINE + _GAP
    heights = [_TITLE + -(-len(shown) // COLUMNS) * cell[1] for _, shown in rows]
    sheet = Image.new("RGB", (COLUMNS * cell[0] + _GAP, sum(heights) + _GAP), "white")
    top = _GAP
    for (title, shown), height in zip(rows, heights, strict=True):
        _draw_row(sheet, top, title, shown, cell, lines)
        top += height
    return sheet


def _draw_row(
    sheet: Image.Image, top: int, title: str, shown: Sequence[tuple[bytes, str]], cell: tuple[int, int], lines: int
) -> None:
    pen = ImageDraw.Draw(sheet)
    large, small = letters_of(13), letters_of(9)
    pen.text((_GAP, top), "".join(lines_of(title, 110, 1)), "black", large)
    for number, (thumbnail, caption) in enumerate(shown):
        row, column = divmod(number, COLUMNS)
        left, above = _GAP + column * cell[0], top + _TITLE + row * cell[1]
        sheet.paste(Image.open(io.BytesIO(thumbnail)), (left, above))
        text = "\n".join(lines_of(caption, _LETTERS, lines))
        pen.multiline_text((left, above + SIDE + 1), text, "#444444", small, spacing=2)
