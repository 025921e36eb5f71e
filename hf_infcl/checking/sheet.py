"""A contact sheet: pictures of a data set, and those with which something is wrong."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from .findings import Finding
from .looking import SIDE
from .set_facts import SetFacts

COLUMNS, SAMPLED, FAULTY = 8, 16, 8  # pictures in a line, of the set, and of a finding
_GAP, _LINE, _TITLE = 12, 12, 28  # pixels
_CELL = SIDE + _GAP, SIDE + 3 * _LINE + _GAP  # with three lines of caption


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
                rows.append((f"{facts.name}: {finding.kind.replace('_', ' ')}", shown))
    heights = [_TITLE + -(-len(shown) // COLUMNS) * _CELL[1] for _, shown in rows]
    sheet = Image.new("RGB", (COLUMNS * _CELL[0] + _GAP, sum(heights) + _GAP), "white")
    top = _GAP
    for (title, shown), height in zip(rows, heights, strict=True):
        _draw_row(sheet, top, title, shown)
        top += height
    return sheet


def _draw_row(sheet: Image.Image, top: int, title: str, shown: list[tuple[bytes, str]]) -> None:
    pen = ImageDraw.Draw(sheet)
    large: Any = ImageFont.load_default(size=14)
    small: Any = ImageFont.load_default(size=10)
    pen.text((_GAP, top), textwrap.shorten(title, 110, placeholder=" ..."), "black", large)
    for number, (thumbnail, caption) in enumerate(shown):
        row, column = divmod(number, COLUMNS)
        left, above = _GAP + column * _CELL[0], top + _TITLE + row * _CELL[1]
        sheet.paste(Image.open(io.BytesIO(thumbnail)), (left, above))
        lines = textwrap.wrap(textwrap.shorten(caption, 54, placeholder=" ...") or "", 18)[:3]
        pen.multiline_text((left, above + SIDE + 1), "\n".join(lines), "#444444", small, spacing=2)
