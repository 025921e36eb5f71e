"""What one pair looks like to a training: its image, its captions, and the time that they take."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ...data import ContrastiveCollator, caption_pair_id
from ...data.images import BadSampleError, size_of_file
from ...data.labelled import NUMBER
from ...data.pairs import as_pair_id, usable_captions
from ...encoders.pooling import Pooling, Reading
from ...refusals import check_tokens
from ...shards.names import IMAGE_EXTENSIONS
from .copies import Print, is_one_colour, make_print

SIDE = 96  # pixels of a thumbnail
_IMAGE_FILE = re.compile(rf"\.({'|'.join(sorted(IMAGE_EXTENSIONS))})$", re.IGNORECASE)
# A byte-level tokenizer splits a script that it was not trained on into nearly single bytes. Text that it knows has 3
# to 5 bytes in a token, in any script.
_FEW_BYTES = 2.0
_FEW_LETTERS = 4  # of a caption too short to judge its script
_MANY_UNKNOWN = 0.2  # the share of unknown tokens from which a caption is not understood


class Caption(NamedTuple):
    """A caption as the model reads it."""

    text: str  # shortened
    id: int  # equal for captions that read the same, see `caption_pair_id`
    seen: int  # equal for captions of which the model reads the same tokens
    tokens: int  # their number, including special ones
    nbytes: int  # in UTF-8
    rest: str  # what the model does not read because it exceeds the limit
    is_foreign: bool  # whether the tokenizer does not know the script
    is_file_name: bool  # of its image, or of any
    is_number: bool  # such as the index of a class
    reading: Reading | None = None  # if the model takes its embedding before its end


@dataclass(frozen=True)
class Look:
    """What one pair, or labelled image, looks like."""

    name: str  # the number of its row, or its shard and its name there
    problem: str = ""  # why a training cannot use it; empty if it can
    label: str = ""  # the name of its class; empty for a pair
    captions: tuple[Caption, ...] = ()  # all usable ones
    is_captionless: bool = False  # whether a pair has none
    pair_id: int | None = None  # if the training gives it one
    size: tuple[int, int] | None = None  # width and height in pixels; None if the image cannot be decoded
    nbytes: int = 0  # of the encoded image
    seconds: float = 0.0  # to read and decode it and to prepare it for the model
    is_one_colour: bool = False  # see `copies.is_one_colour`
    print: Print | None = None  # None if the image has one colour or cannot be decoded
    thumbnail: bytes = b""  # a JPEG


class Looker:
    """Looks at pairs, with the collator of the training, which prepares images and knows the tokenizer.

    ``vocabulary`` is as for `check_tokens`, ``pooling`` the token at which the text tower takes an embedding, if known.
    """

    def __init__(
        self, collator: ContrastiveCollator, vocabulary: int | None = None, pooling: Pooling | None = None
    ) -> None:
        self._collator, self._vocabulary, self.pooling = collator, vocabulary, pooling

    def look(self, name: str, values: dict[str, Any], item: Callable[[], dict[str, Any]]) -> Look:
        """Looks at one pair.

        Args:
            name: as in `Look`.
            values: ``image``, undecoded as bytes or a mapping with ``bytes`` and ``path``; ``file``, the name of its
                file or of its sample; ``caption``, one or a list, or ``label``, the name of its class.
            item: reads, decodes and returns the item of the training, as `ImageTextDataset` does.

        Raises:
            ValueError: the tokenizer gives a token that the model does not have.
        """
        file = os.path.basename(str(values.get("file") or ""))
        known = Look(name, label=str(values.get("label", "")))
        texts: list[str] | None = None
        with suppress(ValueError):  # of a value that is no text, which the item tells
            texts = usable_captions(values["caption"]) if "caption" in values else None
        if texts is not None:
            captions = tuple(self.caption(text, file) for text in texts)
            known = replace(known, captions=captions, is_captionless=not captions)
        began = time.perf_counter()
        try:
            made = item()
        except BadSampleError as error:
            return replace(known, problem=error.cause or str(error))
        image = made["image"]
        self._collator([{"image": image}])
        seconds = time.perf_counter() - began
        one_colour = is_one_colour(image)
        return replace(
            known,
            pair_id=made.get("pair_id"),
            size=(image.shape[1], image.shape[0]),
            nbytes=_size(values["image"]),
            seconds=seconds,
            is_one_colour=one_colour,
            print=None if one_colour else make_print(image),
            thumbnail=thumbnail(image),
        )

    def caption(self, text: str, file: str = "") -> Caption:
        """Looks at one caption of the image in a file."""
        ids = self._collator.token_ids(text)
        if self._vocabulary is not None:
            check_tokens(torch.tensor([ids]), self._vocabulary)
        tokenizer = self._collator.processor.tokenizer
        plain = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        # The end token of CLIP is its unknown one as well.
        unknown = plain.count(tokenizer.unk_token_id) / max(1, len(plain))
        nbytes, (read, cut) = len(text.encode()), self._divided(ids)
        few = nbytes <= _FEW_BYTES * len(plain) and _is_of_other_letters(text)
        return Caption(
            text=text if len(text) <= 200 else f"{text[:199]}…",
            id=caption_pair_id(text),
            seen=as_pair_id(" ".join(map(str, read))),
            tokens=len(ids),
            nbytes=nbytes,
            rest=tokenizer.decode(cut).strip() if cut else "",
            is_foreign=few or unknown >= _MANY_UNKNOWN,
            is_file_name=_is_file_name(text, file),
            is_number=NUMBER.fullmatch(text.strip()) is not None,
            reading=None if self.pooling is None or not ids else self.pooling.reading(read, len(read) - 1),
        )

    def _divided(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """The tokens of a caption that the model reads, and those that it does not. An end token is always read."""
        limit = self._collator.max_length
        if len(ids) <= limit:
            return ids, []
        ends = int(ids[-1] in self._collator.processor.tokenizer.all_special_ids)
        return ids[: limit - ends] + ids[len(ids) - ends :], ids[limit - ends : len(ids) - ends]


def thumbnail(pixels: np.ndarray) -> bytes:
    """A JPEG of at most SIDE × SIDE pixels of an image, uint8 [H, W, 3]; tiny ones are enlarged, to be seen."""
    times = max(1, SIDE // max(pixels.shape[:2]))
    image = Image.fromarray(pixels.repeat(times, 0).repeat(times, 1))
    image.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    file = io.BytesIO()
    image.save(file, "jpeg", quality=80)
    return file.getvalue()


def _size(image: object) -> int:
    """The bytes of an encoded image; 0 if they lie elsewhere."""
    if isinstance(image, bytes):
        return len(image)
    if not isinstance(image, dict):
        return 0
    if image["bytes"] is not None:
        return len(image["bytes"])
    return size_of_file(image["path"]) or 0


def _is_of_other_letters(text: str) -> bool:
    letters = [letter for letter in text if letter.isalpha()]
    return len(letters) >= _FEW_LETTERS and sum(letter.isascii() for letter in letters) < len(letters) / 2


def _is_file_name(text: str, file: str) -> bool:
    """Whether a text ends like an image file, or is one word and the name of this file."""
    text = text.strip()
    return bool(_IMAGE_FILE.search(text)) or (" " not in text and text in (file, os.path.splitext(file)[0]))
