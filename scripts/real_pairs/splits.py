"""Splits by concept, and the check that no near-duplicate of a training picture is evaluated on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

# Two pictures are near-duplicates if their outlines and their colours both agree.
MAX_BITS = 12  # of the 128 bits of `outline`
MAX_COLOUR = 0.06  # root mean square difference of `colours`, in [0, 1]


def split_of(concept: str, seed: int = 0) -> str:
    """The split that a concept belongs to: "train" (85%), "validation" (5%) or "test" (10%).

    It depends on the concept's own text alone, so that another source adds to the splits without moving a concept.
    """
    draw = int.from_bytes(hashlib.sha256(f"{seed} {concept}".encode()).digest()[:8], "big") / 2**64
    return "test" if draw < 0.1 else "validation" if draw < 0.15 else "train"


def outline(image: Image.Image) -> np.ndarray:
    """A difference hash (dHash), bool [128]: whether brightness grows from each cell of a grid to the next one.

    64 bits compare neighbours in rows of a 9×8 grid, and 64 in columns of an 8×9 grid.
    """
    grey = image.convert("L")
    rows = np.asarray(grey.resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    columns = np.asarray(grey.resize((8, 9), Image.Resampling.BOX), dtype=np.int16)
    return np.concatenate([(np.diff(rows, axis=1) > 0).ravel(), (np.diff(columns, axis=0) > 0).ravel()])


def colours(image: Image.Image) -> np.ndarray:
    """The mean colours of an 8×8 grid, float32 [192] in [0, 1]."""
    return np.asarray(image.convert("RGB").resize((8, 8), Image.Resampling.BOX), dtype=np.float32).ravel() / 255


class Looks(NamedTuple):
    """The features of an image in which near-duplicates agree."""

    outline: np.ndarray
    colours: np.ndarray

    @classmethod
    def of(cls, image: Image.Image) -> Looks:
        return cls(outline(image), colours(image))


class Seen:
    """Pictures, and which others are near-duplicates of one of them."""

    def __init__(self, pictures: Sequence[Looks], room: int) -> None:
        """Args: pictures: those that are there already; room: how many `add` may add."""
        self._count, total = 0, len(pictures) + room
        self._bits = np.zeros((2, total), dtype=np.uint64)  # one row for each half of the outline
        self._shades = np.zeros((total, 192), dtype=np.float32)
        for picture in pictures:
            self.add(picture)

    def has(self, picture: Looks) -> bool:
        first, second = self._bits[:, : self._count]
        halves = _halves(picture)
        bits = np.bitwise_count(first ^ halves[0]) + np.bitwise_count(second ^ halves[1])
        near = np.flatnonzero(bits <= MAX_BITS)
        difference = ((self._shades[near] - picture.colours) ** 2).mean(axis=1) ** 0.5
        return bool((difference <= MAX_COLOUR).any())

    def add(self, picture: Looks) -> None:
        self._bits[:, self._count], self._shades[self._count] = _halves(picture), picture.colours
        self._count += 1


def _halves(picture: Looks) -> np.ndarray:
    return np.packbits(picture.outline).view(np.uint64)


def near_duplicates(pictures: Sequence[Looks], others: Sequence[Looks], *, of_each_other: bool = False) -> np.ndarray:
    """For each picture whether it looks like one of the others or, if asked, like an earlier one that does not."""
    seen, found = Seen(others, room=len(pictures)), []
    for picture in pictures:
        found.append(seen.has(picture))
        if of_each_other and not found[-1]:
            seen.add(picture)
    return np.array(found, dtype=bool)
