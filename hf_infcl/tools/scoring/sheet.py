"""Draws the most suspicious pairs of a ledger, to be looked at."""

from __future__ import annotations

import importlib.util
import io
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .ledger import Ledger

SHOWN = 64  # pairs
_COLUMNS, _WIDTH, _SIDE, _HEIGHT = 4, 260, 120, 216  # pixels of a cell, and the longer side of its image
_LETTERS, _BESIDE = 36, 18  # in a line below and beside an image


def resized(image: np.ndarray, longer_side: int) -> Image.Image:
    """An image in uint8 [H, W, 3], enlarged or reduced to so many pixels of its longer side."""
    scale = longer_side / max(image.shape[:2])
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    return Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)


def small_jpeg(image: np.ndarray) -> bytes:
    """A JPEG of the size of a cell from an image in uint8 [H, W, 3]."""
    file = io.BytesIO()
    resized(image, _SIDE).save(file, "jpeg", quality=85)
    return file.getvalue()


def draw_suspicious(ledger: Ledger, pictures: Mapping[int, bytes]) -> Image.Image:
    """A cell for each of the `SHOWN` pairs with the lowest scores: its image and its caption.

    ``pictures`` are the `small_jpeg` of these pairs by their keys, as far as they are known.
    """
    places = ledger.most_suspicious(SHOWN)
    font = letters_of(11)
    rows = -(-len(places) // _COLUMNS)
    sheet = Image.new("RGB", (_COLUMNS * _WIDTH, max(1, rows) * _HEIGHT), "white")
    for number, place in enumerate(places):
        cell = Image.new("RGB", (_WIDTH, _HEIGHT), "white")  # beyond which no wide letters are drawn
        pen = ImageDraw.Draw(cell)
        key = int(ledger.key[place])
        if key in pictures:
            cell.paste(Image.open(io.BytesIO(pictures[key])), (8, 8))
        name = f"sample {ledger.sample[place]}" if ledger.sample else f"row {key}"
        facts = [f"score {ledger.score[place]:.2f}", f"wrong {ledger.p_wrong[place]:.0%}", *lines_of(name, _BESIDE, 5)]
        pen.text((_SIDE + 16, 8), "\n".join(facts), "#555555", font)
        pen.text((8, _SIDE + 14), "\n".join(lines_of(ledger.caption[place], _LETTERS, 4)), "black", font)
        sheet.paste(cell, (number % _COLUMNS * _WIDTH, number // _COLUMNS * _HEIGHT))
    return sheet


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
