"""What one pair looks like to a training, and what can be wrong with it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from ...data import ContrastiveCollator, caption_pair_id
from ...data.images import BadSampleError
from ...data.labelled import NUMBER
from ...data.pairs import usable_captions
from ...encoders.pooling import Pooling, SameEmbeddings
from ...evaluation import caption_ids
from ...refusals import check_tokens
from ...shards.names import IMAGE_EXTENSIONS
from .copies import ImageHash, image_hash, is_one_colour

USUAL_SIDE = 224  # of the images of a model whose config does not tell
HUGE = 16_000_000  # pixels from which decoding takes much longer than a model needs: a large photograph has as many
_IMAGE_FILE = re.compile(rf"\.({'|'.join(sorted(IMAGE_EXTENSIONS))})$", re.IGNORECASE)
# A byte-level tokenizer splits a script that it was not trained on into nearly single bytes. Text that it knows has 3
# to 5 bytes in a token, in any script.
_FEW_BYTES = 2.0
_FEW_LETTERS = 4  # of a caption too short to judge its script
_MANY_UNKNOWN = 0.2  # the share of unknown tokens from which a caption is not understood


class Fault(NamedTuple):
    """A fault of single pairs."""

    words: str  # what such pairs do, for `str.format` with the `Inspector`; it follows their number
    spoils: float  # the share of the pairs above which they spoil a training
    cure: str  # a sentence


FAULTS = {
    "broken": Fault("cannot be read", 0.0, "Repair or drop them."),
    "captionless": Fault("have no caption with a visible character", 0.0, "Drop them."),
    "tiny": Fault("have a tiny image, whose shorter side has fewer than {inspector.tiny} pixels", 0.1, "Drop them."),
    "huge": Fault("have a huge image, which takes long to decode", math.inf, "Scale them once."),
    "one_colour": Fault("have an image of a single colour", 0.1, "Drop them: such files stand for missing images."),
    "cut": Fault(
        "have a caption of more than {inspector.tokens} tokens, which the model does not read to its end",
        0.5,
        "Shorten them, or take a model with a higher limit.{inspector.more_positions}",
    ),
    "foreign": Fault("have a caption in a script that the tokenizer does not know", 0.1, "Take a multilingual model."),
    "file_name": Fault("have the name of a file as their caption", 0.1, "Name the column of the captions."),
    "number": Fault("have a number as their caption", 0.1, "Replace numbers of classes by their names."),
}


class Caption(NamedTuple):
    """A caption as the model reads it."""

    text: str  # shortened
    id: int  # equal for captions that read the same, see `caption_pair_id`
    seen: int  # equal for captions of which the model reads the same tokens


@dataclass(slots=True)
class Inspected:
    """What one pair, or labelled image, looks like."""

    name: str  # the number of its row, or its shard and its name there
    faults: dict[str, str] = field(default_factory=dict)  # by their names, what they consist in
    captions: list[Caption] = field(default_factory=list)  # all usable ones
    pair_id: int | None = None  # if the training gives it one
    hash: ImageHash | None = None  # None if the image has one colour or cannot be decoded


class Inspector:
    """Looks at pairs, with the collator of the training, which knows the tokenizer, and the config of the model.

    With ``before_training`` it leaves captions that get one embedding to the trainer, which checks those that it reads.
    """

    def __init__(
        self, collator: ContrastiveCollator, config: PretrainedConfig, *, before_training: bool = False
    ) -> None:
        self._collator, self._vocabulary = collator, getattr(config.text_config, "vocab_size", None)
        side = getattr(config.vision_config, "image_size", USUAL_SIDE)
        self.side: int = min(side) if isinstance(side, (list, tuple)) else side  # of the images that the model reads
        self.tiny = self.side // 4  # a shorter side is enlarged more than four times, and shows next to nothing
        self.tokens, self.more_positions = collator.max_length, collator.more_positions
        self._same_embeddings = SameEmbeddings(None if before_training else Pooling.of_config(config.text_config))

    def inspect(self, name: str, values: dict[str, Any], item: Callable[[], dict[str, Any]]) -> Inspected:
        """Looks at one pair.

        Args:
            name: as in `Inspected`.
            values: ``file``, the name of its image file or of its sample, and for a pair ``caption``, one or a list.
            item: reads, decodes and returns the item of the training, as `ImageTextDataset` does.

        Raises:
            ValueError: the tokenizer gives a token that the model does not have, or two captions get one embedding.
        """
        pair, file = Inspected(name), os.path.basename(str(values.get("file") or ""))
        texts: list[str] | None = None
        with suppress(ValueError):  # of a value that is no text, which the item tells
            texts = usable_captions(values["caption"]) if "caption" in values else None
        pair.captions = [self.caption(text, file, pair.faults) for text in texts or ()]
        try:
            made = item()
        except BadSampleError as error:
            pair.faults["captionless" if texts == [] else "broken"] = error.cause or str(error)
            return pair
        height, width, _ = made["image"].shape
        is_plain = is_one_colour(made["image"])
        pair.hash, pair.pair_id = None if is_plain else image_hash(made["image"]), made.get("pair_id")
        faults = {"tiny": min(width, height) < self.tiny, "huge": width * height > HUGE, "one_colour": is_plain}
        pair.faults |= {fault: f"{width} × {height}" for fault, holds in faults.items() if holds}
        return pair

    def caption(self, text: str, file: str, faults: dict[str, str]) -> Caption:
        """Looks at one caption of the image in a file, and adds what is wrong with it to the faults."""
        tokenizer, ids = self._collator.processor.tokenizer, self._collator.token_ids(text)
        if self._vocabulary is not None:
            check_tokens(torch.tensor([ids]), self._vocabulary)
        plain = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        # The end token of CLIP is its unknown one as well.
        unknown = plain.count(tokenizer.unk_token_id) / max(1, len(plain))
        letters, bare = [letter for letter in text if letter.isalpha()], text.strip()
        is_of_others = len(letters) >= _FEW_LETTERS and sum(one.isascii() for one in letters) < len(letters) / 2
        is_file = bool(_IMAGE_FILE.search(bare)) or (" " not in bare and bare in (file, os.path.splitext(file)[0]))
        shown = text if len(text) <= 200 else f"{text[:199]}…"
        found = {
            "foreign": unknown >= _MANY_UNKNOWN or (is_of_others and len(text.encode()) <= _FEW_BYTES * len(plain)),
            "file_name": is_file,
            "number": not is_file and NUMBER.fullmatch(bare) is not None,
        }
        if len(ids) > self.tokens:
            faults.setdefault("cut", f"{len(ids):,} tokens")
        for fault in (fault for fault, holds in found.items() if holds):
            faults.setdefault(fault, repr(shown))
        tokens = self._collator.tokenize([text])
        read = tokens["input_ids"], tokens.get("attention_mask")
        self._same_embeddings.check(*read)
        seen = caption_ids(*read)  # as an evaluation has them
        return Caption(shown, caption_pair_id(text), int(seen))
