"""What can be wrong with a single pair."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PretrainedConfig

from ...data import ContrastiveCollator
from .looking import Look

USUAL_SIDE = 224  # of the images of a model whose config does not tell
HUGE = 16_000_000  # pixels from which decoding takes much longer than a model needs: a large photograph has as many


class Limits(NamedTuple):
    """What a model reads."""

    side: int  # the pixels of a side of its images
    tokens: int  # of a caption, with the special ones
    more_positions: str = ""  # how it could read more, see `ContrastiveCollator.more_positions`

    @property
    def tiny(self) -> int:
        """A shorter side of fewer pixels is enlarged more than four times, and shows next to nothing."""
        return self.side // 4


def make_limits(config: PretrainedConfig, collator: ContrastiveCollator) -> Limits:
    """What a model reads."""
    side = getattr(config.vision_config, "image_size", USUAL_SIDE)
    shorter = min(side) if isinstance(side, (list, tuple)) else side
    return Limits(shorter, collator.max_length, collator.more_positions)


@dataclass(frozen=True)
class Fault:
    """A fault of single pairs."""

    words: str  # what such pairs do, for `str.format` with the `Limits`; it follows their number
    spoils: float  # the share of the pairs above which they spoil a training
    cure: str  # a sentence


FAULTS = {
    "broken": Fault("cannot be read", 0.0, "Repair or drop them."),
    "captionless": Fault("have no caption with a visible character", 0.0, "Drop them."),
    "tiny": Fault("have a tiny image, whose shorter side has fewer than {limits.tiny} pixels", 0.1, "Drop them."),
    "huge": Fault(
        f"have a huge image, of more than {HUGE // 10**6} million pixels",
        math.inf,
        "Decode JPEGs smaller, or scale them once.",
    ),
    "one_colour": Fault("have an image of a single colour", 0.1, "Drop them: such files stand for missing images."),
    "cut": Fault(
        "have a caption of more than {limits.tokens} tokens, which the model does not read to its end",
        0.5,
        "Shorten them, or take a model with a higher limit.",
    ),
    "foreign": Fault(
        "have a caption in a script that the tokenizer does not know", 0.1, "Drop them, or take a multilingual model."
    ),
    "file_name": Fault("have the name of a file as their caption", 0.1, "Name the column of the captions."),
    "number": Fault("have a number as their caption", 0.1, "Replace numbers of classes by their names."),
}


def find_faults(look: Look, limits: Limits) -> Iterator[tuple[str, str]]:
    """(fault, what it consists in) for each fault of a pair."""
    if look.problem:
        yield ("captionless" if look.is_captionless else "broken"), look.problem
    if look.size is not None:
        width, height = look.size
        if min(width, height) < limits.tiny:
            yield "tiny", f"{width} × {height}"
        if width * height > HUGE:
            yield "huge", f"{width} × {height}"
        if look.is_one_colour:
            yield "one_colour", f"{width} × {height}"
    for caption in look.captions:
        if caption.rest:
            yield "cut", f"without {caption.rest!r}"
        if caption.is_foreign:
            yield "foreign", repr(caption.text)
        if caption.is_file_name:
            yield "file_name", repr(caption.text)
        elif caption.is_number:
            yield "number", repr(caption.text)
