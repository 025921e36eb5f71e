"""Image-text pairs: the rows of a dataset, and the items of one image and its captions that are made of them."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import math
import random
import re
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image

from ..files.text import ON_BAD_SAMPLE, is_unicode, shortened
from ..shards.readers import Columns, is_string
from .images import BadSampleError, ImageDataset, usual_column

if TYPE_CHECKING:
    import datasets

# The name of a preset, or a function that takes an RGB image and the sample's generator and returns an image.
Augmentation = str | Callable[[Image.Image, random.Random], Image.Image]

PRESETS = ("none", "crop", "flip_crop")

# The share of the image's area and the aspect ratio of a crop, as in OpenCLIP's training from scratch.
_AREA = 0.9, 1.0
_RATIO = 3 / 4, 4 / 3

# With on_bad_sample="skip", this many bad pairs in succession mean that the dataset is broken, not just a few files.
MAX_BAD = 100

Source = TypeVar("Source", bound="PairSource")
REPEATED = 0.01  # the share of repeated captions from which on they are worth a word


class PairSource:
    """What tables and streams of image-text pairs share: how an item is made of the values of a sample.

    Every random choice depends only on the seed, the epoch (the pass of a stream) and what names the sample.
    """

    image_column: Any  # a name; a stream may be without images or captions
    caption_column: Any
    all_captions = False
    # The number of this set among those that are combined, or None. With it, items have a ``place``: the number, and
    # that of the row or the names of shard and sample.
    set_number: int | None = None

    def _keep(
        self,
        columns: Columns,
        captions_per_image: int,
        seed: int,
        on_bad_sample: str,
        augmentation: Augmentation,
        min_side: int | None,
    ) -> None:
        """Keeps the options that decide about the items; raises a ValueError for one that is invalid."""
        if on_bad_sample not in ON_BAD_SAMPLE:
            raise ValueError(f'on_bad_sample must be "raise" or "skip", got {on_bad_sample!r}.')
        if not callable(augmentation) and augmentation not in PRESETS:
            raise ValueError(
                f"augmentation must be one of {', '.join(PRESETS)}, or a function of a PIL image and a random.Random, "
                f"got {augmentation!r}."
            )
        if min_side is not None and min_side < 1:
            raise ValueError(f"min_side must be at least 1 pixel, got {min_side}.")
        if not isinstance(captions_per_image, int) or captions_per_image < 1:
            raise ValueError(f"captions_per_image must be an integer of at least 1, got {captions_per_image!r}.")
        captions = {"caption_column": columns.caption, "negative_caption_column": columns.negative_caption}
        if both := [option for option, column in captions.items() if column and column == columns.image]:
            raise ValueError(f"image_column and {both[0]} are both {columns.image!r}. Name another column for one.")
        if columns.negative_caption and columns.negative_caption == columns.caption:
            raise ValueError(
                f"caption_column and negative_caption_column are both {columns.caption!r}, so every caption would be a "
                "negative of its own image. Name another column, or leave negative_caption_column out."
            )
        self.image_column, self.caption_column, self.negative_caption_column, self.pair_id_column = columns
        self.captions_per_image, self.seed, self.on_bad_sample = captions_per_image, seed, on_bad_sample
        self.augmentation, self.min_side = augmentation, min_side

    def _check_single(self) -> None:
        """Raises a ValueError if several captions are to be drawn from a column of single ones."""
        if self.captions_per_image > 1:
            raise ValueError(
                f"captions_per_image is {self.captions_per_image}, but the caption_column {self.caption_column!r} "
                "holds one string for each image. Name a column of lists of strings, or leave captions_per_image out."
            )

    def plain(self: Source) -> Source:
        """A copy that leaves images as they are, and raises an error for a bad pair."""
        changed = copy.copy(self)
        changed.augmentation, changed.on_bad_sample = "none", "raise"
        return changed

    @property
    def options(self) -> dict[str, Any]:
        """The options that decide about the items, for the record of a training."""
        names = "image_column caption_column pair_id_column on_bad_sample augmentation min_side seed all_captions"
        return {name: getattr(self, name) for name in names.split()}

    @property
    def optional_keys(self) -> set[str]:
        """The keys of its items that not all datasets give."""
        skips = self.on_bad_sample == "skip"
        given = {"pair_id": skips or self.pair_id_column, "skipped": skips}
        return {key for key, is_given in given.items() if is_given}

    def _all_but_image(
        self, values: Mapping[str, Any], sample: object, epoch: int, place: str, encoded: bytes | None
    ) -> dict[str, Any]:
        """An item without its image, whose file is ``encoded`` if it was read.

        A ValueError says that the sample has no caption or no pair id, or one that cannot be used.
        """
        value = values[self.caption_column]
        if not (captions := usable_captions(value)):
            begins_as_list = isinstance(value, str) and value.lstrip()[:1] == "["
            unread = f", as {shortened(value)} cannot be read" if begins_as_list else ""
            raise ValueError(f"it has no caption in column {self.caption_column!r}{unread}")
        drawn = captions
        if not self.all_captions:
            drawn = draw_captions(captions, self.captions_per_image, self._random(sample, "caption", epoch))
        item: dict[str, Any] = {"caption": drawn}
        if self.negative_caption_column:
            negatives = usable_captions(values[self.negative_caption_column])
            item["negative_captions"] = draw_captions(negatives, 1, self._random(sample, "negative caption", epoch))
        if self.pair_id_column == self.caption_column:
            item["pair_id"] = caption_pair_id(drawn[0])
        elif self.pair_id_column:
            if (pair_id := values[self.pair_id_column]) is None:
                raise ValueError(f"it has no pair id in column {self.pair_id_column!r}")
            item["pair_id"] = as_pair_id(pair_id)
        elif encoded is not None and "pair_id" in self.optional_keys:
            item["pair_id"] = content_pair_id(encoded, captions)
        if self.set_number is not None:
            item["place"] = (self.set_number, place)
        return item

    def _random(self, sample: object, purpose: str, epoch: int) -> random.Random:
        return random.Random(self._seed_for(sample, purpose, epoch))  # seeded with the SHA-512 of the text

    def _seed_for(self, sample: object, purpose: str, epoch: int) -> str:
        return f"{self.seed} {epoch} {sample} {purpose}"


def load_pairs(source: str, *, split: str, name: str | None = None, image_column: str = "image") -> datasets.Dataset:
    """Loads one split of a dataset.

    Args:
        source: a folder written by `save_to_disk`, or anything that `datasets.load_dataset` accepts: a Hub id, or a
            local file of a table or a tar, or a local folder, such as an imagefolder (images beside a `metadata.csv` or
            `metadata.jsonl` with a `file_name` column), a folder with a `train.csv` whose columns hold image paths and
            captions, separated by commas, tabs, semicolons or bars, or a folder of tar shards, whose JSON fields become
            columns.
        split: name of the split, for example "train", or slices such as "train[:10%]".
        name: configuration of the dataset, if it has several.
        image_column: the column of images; if there is no such column, the one of `find_column`, if any. Relative
            paths of images in parquet files are relative to the file, as in `ImageTextStream`, and become absolute
            here. Those in CSV and JSON files are relative to the working folder if there are such images, and else to
            the file.

    Raises:
        ValueError: there is nothing to load at `source`, or it is a URL or another file; it has no such
            split or configuration, in which case the message names the existing ones; or no image is where its relative
            path says.
    """
    from .tables import Table  # it needs `datasets`, without which this file can be imported

    return Table(source, name).load(split, image_column)


class ImageTextDataset(PairSource, ImageDataset):
    """Image-caption pairs, one per row of a `datasets.Dataset`.

    Item i is a dict of
        image: RGB, a uint8 array [H, W, 3], or the image that an ``augmentation`` function returned. Transparency is
            dropped, as in CLIP's own preprocessing.
        cropped: True, only with an augmentation that crops; the collator then skips the center crop.
        caption: list of str; one caption, up to `captions_per_image`, or all of them with `all_captions`.
        negative_captions: list of one str, or empty if the row has none; only with a `negative_caption_column`.
        pair_id: int64; items with the same id are never each other's negatives. Absent unless requested, or needed by
            `on_bad_sample="skip"`.
        skipped: int, the number of bad rows that this item replaces; only with `on_bad_sample="skip"`.

    A row is bad if its image is missing or cannot be decoded, if all its captions are empty, or if it has no pair id.

    Every random choice (caption, replacement, augmentation) depends only on (seed, epoch, row). It is the same for any
    number of workers and processes, and after a resume.

    Args:
        dataset: a map-style `datasets.Dataset` without a transform.
        image_column: a column of images, paths (strings) or encoded images (binary). Where there is no column "image",
            the default is the only one of images or, if there is none, with a usual name, such as "jpg".
        caption_column: a column of strings, or of lists of strings from which each epoch draws one. Where there is no
            column "caption", the default is the only one with a usual name, such as "text".
        captions_per_image: the number of different captions to draw from a list; a row with fewer returns all of them.
        negative_caption_column: a column of strings, or of lists of strings from which each epoch draws one, that
            describe the image almost correctly, such as captions with two words swapped. In training they are negatives
            of all images and belong to none (NegCLIP, arXiv 2210.01936).
        pair_id_column: rows with the same value in this column are never each other's negatives. It holds integers or
            strings such as urls. It can also be the image column, for rows of the same file or the same contents, or
            the caption column; captions that read the same then count as equal (see `caption_pair_id`; the first
            caption of the item counts).
        all_captions: return all captions of a row, for evaluation.
        seed: determines drawn captions, augmentation and the rows that replace bad ones; `infcl train` passes its seed.
        on_bad_sample: "raise" a ValueError that names the row, or "skip" the row: another row, drawn at random, takes
            its place. A `torch.utils.data.Subset` does not confine that draw, so select rows of the
            `datasets.Dataset` instead. The window may already contain the row, so items then always carry a pair id,
            and a repeated row is not its own negative. Unless `pair_id_column` is given, the id is `content_pair_id`,
            which also differs between the rows of several datasets.
        augmentation: ``"none"``; ``"crop"``, a random crop of 0.9 to 1 of the image's area, as in OpenCLIP's training
            from scratch; ``"flip_crop"``, which also flips half of the images; or a function of a `PIL.Image.Image` and
            a `random.Random` that returns an image. The function must draw only from that generator.
        min_side: decode JPEGs at 1/2, 1/4 or 1/8 of their size if both sides keep at least this many pixels. This is
            faster and changes the pixels by a few grey levels. By default, images are decoded at full size.

    Raises:
        ValueError: at construction, for a wrong dataset, column, column type or option; on access, for a bad row.
    """

    whole: ImageTextDataset | None = None  # with `numbers`, the table from which the rows were selected

    def __init__(
        self,
        dataset: datasets.Dataset,
        *,
        image_column: str = "image",
        caption_column: str = "caption",
        captions_per_image: int = 1,
        negative_caption_column: str | None = None,
        pair_id_column: str | None = None,
        all_captions: bool = False,
        seed: int = 0,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        augmentation: Augmentation = "none",
        min_side: int | None = None,
    ) -> None:
        image_column, named = usual_column("image", image_column, dataset), caption_column
        caption_column = usual_column("caption", named, dataset)
        pair_id_column = caption_column if pair_id_column == named else pair_id_column
        if all_captions:
            not_of_evaluations = {
                'with on_bad_sample="skip" would count other rows twice in place of bad ones': on_bad_sample == "skip",
                f"uses images unchanged, but augmentation is {augmentation!r}": augmentation != "none",
                "uses exactly the captions of each image, not captions_per_image": captions_per_image > 1,
                "uses exactly the captions of each image, not negative_caption_column": negative_caption_column,
            }
            if wrong := [what for what, is_set in not_of_evaluations.items() if is_set]:
                raise ValueError(f"An evaluation (all_captions=True) {wrong[0]}. Leave it out, or drop the bad rows.")
        columns = Columns(image_column, caption_column, negative_caption_column, pair_id_column)
        self._keep(columns, captions_per_image, seed, on_bad_sample, augmentation, min_side)
        super().__init__(dataset, {f"{kind}_column": column for kind, column in columns._asdict().items()})
        if is_string(dataset.features[caption_column]):
            self._check_single()
        self._texts = self.table.remove_columns(image_column)
        self.all_captions = all_captions
        self._or_skip = "" if all_captions else ', or pass on_bad_sample="skip" (--on_bad_sample skip in a command)'
        # Shared memory, so that workers which outlive an epoch (persistent_workers) see the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the drawn captions. Call it in every process before the epoch starts."""
        self._epoch.fill_(epoch)

    def sample_captions(self, count: int) -> list[list[str]]:
        """The usable captions of up to ``count`` rows, drawn at random but always the same, without their images."""
        rows = random.Random(0).sample(range(len(self)), min(count, len(self)))
        values = self._texts.select_columns([self.caption_column])[sorted(rows)][self.caption_column]
        return [usable_captions(value) for value in values]

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self.on_bad_sample == "raise":
            return self._sample(row)
        candidate, replacements = row, self._random(row, "replacement", int(self._epoch))
        for skipped in range(MAX_BAD):
            try:
                return {**self._sample(candidate), "skipped": skipped}
            except BadSampleError as error:  # noqa: PERF203
                last = error
                candidate = replacements.randrange(len(self))
        raise ValueError(f"All of {MAX_BAD} rows drawn one after another were bad. The last: {last}") from last

    def _sample(self, row: int) -> dict[str, Any]:
        value, encoded = self._read(row)
        item = self._text(row, value, encoded)
        image = self._decoded(row, encoded)
        return augment(image, self.augmentation, self._seed_for(row, "augmentation", int(self._epoch))) | item

    def without_image(self, row: int) -> dict[str, Any]:
        """The item of a row without its image, which is not read."""
        value = (self.table if self.pair_id_column == self.image_column else self._texts)[row]
        self._check_errors(row, value)
        return self._text(row, value)

    def _text(self, row: int, value: dict[str, Any], encoded: bytes | None = None) -> dict[str, Any]:
        if self.pair_id_column == self.image_column and (image := value[self.image_column]) is not None:
            value = {**value, self.image_column: image["path"] if image["bytes"] is None else image["bytes"]}
        try:
            return self._all_but_image(value, row, int(self._epoch), str(self.number(row)), encoded)
        except ValueError as error:
            raise self._bad_sample(row, str(error)) from error

    def content_fingerprint(self) -> str:
        """A fingerprint of the captions and pair ids of up to 64 rows, which tells datasets of equal length apart."""
        return _fingerprint(self._texts)

    def key_fingerprint(self) -> str:
        """A hash of the captions of some rows, which does not change with the other columns that are read."""
        return _fingerprint(self._texts.select_columns([self.caption_column]))


def _fingerprint(texts: datasets.Dataset) -> str:
    rows = range(0, len(texts), math.ceil(len(texts) / 64))
    return hashlib.sha256(repr([texts[row] for row in rows]).encode()).hexdigest()[:16]


def usable_captions(value: str | list[str | None] | None) -> list[str]:
    """The captions in a value of the caption column that have a visible character and are valid Unicode.

    Spaces, control characters and direction marks are not visible. JSON can contain halves of surrogate pairs, which no
    tokenizer accepts. A list of strings that a table holds as text is read as a list.

    Raises:
        ValueError: the value is neither a string nor a list of strings and Nones.
    """
    captions = _as_list(value) if isinstance(value, str) else [] if value is None else value
    if not isinstance(captions, list) or not all(isinstance(caption, (str, NoneType)) for caption in captions):
        raise ValueError(f"the caption {shortened(value)} is neither a string nor a list of strings")
    visible = [text for text in captions if text and any(one.isprintable() and one != " " for one in text)]
    return [*filter(is_unicode, visible)]


_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ONE = rf"(?:{_STRING}|None|nan)"
# As JSON, Python, pandas and numpy, whose lists have no commas, write a list or a tuple of strings.
_LIST = re.compile(rf"\[\s*(?:{_ONE}[\s,]*)+\]|\(\s*{_ONE}\s*,[\s,]*(?:{_ONE}[\s,]*)*\)", re.DOTALL)


def _as_list(text: str) -> list[Any]:
    """The list of strings that a text writes out, or else the text alone; [] for a list that cannot be read."""
    if (bare := text.strip())[:1] not in ("[", "("):
        return [text]
    with suppress(ValueError, RecursionError):
        captions = json.loads(bare)
        if isinstance(captions, list) and all(isinstance(caption, (str, NoneType)) for caption in captions):
            return captions
    with suppress(ValueError, SyntaxError):  # of an escape that Python does not know
        if _LIST.fullmatch(bare):
            return [ast.literal_eval(caption) for caption in re.findall(_STRING, bare, re.DOTALL)]
    return [] if re.fullmatch(r"""[\[\s]+['"].*['"][\]\s]+""", bare, re.DOTALL) else [text]


def draw_captions(captions: list[str], count: int, random: random.Random) -> list[str]:
    """Up to ``count`` captions at different places of the list, which may be empty."""
    if count == 1 and captions:
        return [random.choice(captions)]
    return random.sample(captions, min(count, len(captions)))


def as_pair_id(value: str | bytes | int) -> int:
    """Converts a value of the pair id column to an int64: strings and images by a hash, integers one to one.

    Raises:
        ValueError: the value is of another type, or the integer has more than 64 bits.
    """
    if isinstance(value, (str, bytes)):
        return _hash(value if isinstance(value, bytes) else value.encode())
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the pair id {shortened(value)} is neither an integer nor a string")
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"the pair id {value} does not fit into 64 bits")
    return (value + 2**63) % 2**64 - 2**63  # the upper half of uint64 becomes negative


def caption_pair_id(caption: str) -> int:
    """An int64 that is equal for captions that read the same and, except for hash collisions, differs for others.

    The text is normalised to Unicode NFKC, its case is folded and runs of white space become one space. The id is the
    first 8 bytes of its BLAKE2b hash. It is the same in every process; among 10 million captions, the probability of a
    collision is 3e-6.
    """
    return _hash(" ".join(unicodedata.normalize("NFKC", caption).casefold().split()).encode())


def content_pair_id(encoded: bytes, captions: list[str]) -> int:
    """An int64 that identifies an image together with its captions, in any dataset, file, process or machine.

    Only copies of the same image file with the same captions share an id, except for hash collisions (as in
    `caption_pair_id`). The number of a row or the name of a sample would repeat in another part of a training set.
    """
    return _hash(hashlib.blake2b(encoded).digest() + repr(captions).encode())


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def augment(image: np.ndarray, augmentation: Augmentation, seed: str) -> dict[str, Any]:
    """Augments one image, uint8 [H, W, 3], by an ``augmentation`` as in `ImageTextDataset`.

    Args:
        seed: the seed of this sample in this epoch. The augmentation depends only on the seed and the image's size.

    Returns:
        The entries of an item: ``image`` and, if a preset cropped it, ``cropped``, which is True.
    """
    if augmentation == "none":
        return {"image": image}
    rng = random.Random(seed)  # seeded with the SHA-512 of the text
    if callable(augmentation):
        return {"image": augmentation(Image.fromarray(image), rng)}
    top, left, height, width = _random_box(image.shape[0], image.shape[1], rng)
    image = image[top : top + height, left : left + width]
    if augmentation == "flip_crop" and rng.random() < 0.5:
        image = image[:, ::-1]
    return {"image": np.ascontiguousarray(image), "cropped": True}


def _random_box(height: int, width: int, rng: random.Random) -> tuple[int, int, int, int]:
    """Top, left, height and width of a crop that fits into the image."""
    for _ in range(10):
        area = height * width * rng.uniform(*_AREA)
        ratio = math.exp(rng.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w
    # The image is much wider or higher than the ratios allow: take the largest box in its center within the ratios.
    w, h = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
    return (height - h) // 2, (width - w) // 2, h, w
