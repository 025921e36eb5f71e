"""Image-text pairs and labelled images from `datasets`, and the collator that feeds them to a model's processor."""

from __future__ import annotations

import hashlib
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import datasets
    from PIL import Image
    from transformers import ProcessorMixin

# With on_bad_sample="skip": so many bad rows in succession mean a broken dataset, not a few broken files.
_MAX_TRIES = 100

# transformers gives a tokenizer without a stated limit a model_max_length of 1e30.
_NO_LIMIT = 10**6


def load_pairs(source: str, *, split: str, name: str | None = None) -> datasets.Dataset:
    """Load one split of a dataset.

    Args:
        source: a folder written by `save_to_disk`; or anything that `datasets.load_dataset` takes: a Hub id, or a local
            folder, such as an imagefolder (images beside a `metadata.csv` or `metadata.jsonl` with a `file_name`
            column).
        split: name of the split, for instance "train". `load_dataset` sources also take slices, "train[:10%]".
        name: configuration of the dataset, where it has several.

    Raises:
        ValueError: nothing to load at `source`, or no such split or configuration (the message names those there are).
    """
    import datasets
    from huggingface_hub.errors import HFValidationError

    saved = (datasets.config.DATASET_STATE_JSON_FILENAME, datasets.config.DATASETDICT_JSON_FILENAME)
    if not any((Path(source) / file).is_file() for file in saved):
        try:
            return datasets.load_dataset(source, name, split=split)
        except (FileNotFoundError, ConnectionError, HFValidationError) as error:
            raise ValueError(f"no dataset at {source!r}, neither as a local folder nor on the Hub: {error}") from error
        except ValueError as error:  # no such split or configuration; metadata whose columns change their type
            raise ValueError(f"{source!r}, split {split!r}: {error}") from error

    loaded = datasets.load_from_disk(source)
    if isinstance(loaded, datasets.Dataset):
        # A dataset saved by itself may not know what split it was.
        loaded = datasets.DatasetDict({str(loaded.split or split): loaded})
    if split not in loaded:
        raise ValueError(f"{source!r} has no split {split!r}; its splits are {list(loaded)}")
    return loaded[split]


class _BadSampleError(ValueError):
    pass


class _ImageDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of a `datasets.Dataset` whose images are decoded one by one, so that a bad file harms no other row."""

    def __init__(self, dataset: datasets.Dataset, image_column: str, columns: Sequence[str]) -> None:
        import datasets

        if isinstance(dataset, datasets.DatasetDict):
            raise ValueError(f"dataset is a DatasetDict; pass one of its splits: {list(dataset)}")
        if not isinstance(dataset, datasets.Dataset):
            raise ValueError(f"dataset must be a datasets.Dataset, got {type(dataset).__name__}")
        columns = list(dict.fromkeys([image_column, *columns]))
        if missing := [column for column in columns if column not in dataset.column_names]:
            raise ValueError(f"no column {missing} in the dataset; its columns are {dataset.column_names}")
        if len(dataset) == 0:
            raise ValueError("the dataset has no rows")
        if dataset.format["type"] == "custom":
            raise ValueError(
                "the dataset has a transform, which would see undecoded images: call reset_format() and transform the "
                "items in a dataset around this one"
            )
        feature = dataset.features[image_column]
        if not (isinstance(feature, datasets.Image) or _is_value(feature, "string", "large_string", "binary")):
            raise ValueError(f"image_column {image_column!r} must hold images, paths or encoded images, not {feature}")
        rows = dataset.with_format(None).select_columns(columns)
        self._rows = rows.cast_column(image_column, datasets.Image(decode=False))
        self._columns = dataset.column_names
        self._image_column = image_column

    def __len__(self) -> int:
        return len(self._rows)

    def _image(self, row: int, value: dict[str, Any] | None) -> Image.Image:
        try:
            return _decode_rgb(value)
        except Exception as error:  # whatever a decoder raises: OSError, SyntaxError, struct.error, ...
            raise self._bad_sample(row, f"column {self._image_column!r}: {type(error).__name__}: {error}") from error

    def _bad_sample(self, row: int, cause: str) -> _BadSampleError:
        return _BadSampleError(
            f"row {row} of the dataset with columns {self._columns} is bad: {cause}. "
            'Mend or drop it; in training, on_bad_sample="skip" puts another row in its place'
        )


class ImageTextDataset(_ImageDataset):
    """Image-caption pairs, one per row of a `datasets.Dataset`.

    Item i is a dict of
        image: RGB `PIL.Image.Image`. Transparency is dropped, as in CLIP's own preprocessing.
        caption: list of str; one caption, or all of them with `all_captions`.
        pair_id: int64; items of equal id are the same thing, never each other's negatives. Absent unless asked for.
        skipped: int, the bad rows passed over for this item. Only with `on_bad_sample="skip"`.

    A row is bad if its image is missing or cannot be decoded, if it has no caption but white space, or no pair id.

    Whatever is drawn at random depends on (seed, epoch, row) alone: it is the same for any number of workers and
    processes, and after a resume.

    Args:
        dataset: a map-style `datasets.Dataset` without a transform.
        image_column: images; or paths (strings) or encoded images (binary).
        caption_column: strings, or lists of strings of which one is drawn anew each epoch.
        pair_id_column: rows of equal value here are never each other's negatives: integers; strings, such as urls; or
            the caption column, for captions that read the same (`caption_pair_id` of the item's first).
        all_captions: give all captions of a row, for evaluation.
        seed: of the captions drawn and of the rows that replace bad ones.
        on_bad_sample: "raise" a ValueError that names the row, or "skip": put another row, drawn at random, in its
            place. That row may already be in the same window. So items then always carry a pair id (the row number,
            unless asked for otherwise), and a repeated row is not its own negative.

    Raises:
        ValueError: at construction for a wrong dataset, column, column type or option; on access for a bad row.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        *,
        image_column: str = "image",
        caption_column: str = "caption",
        pair_id_column: str | None = None,
        all_captions: bool = False,
        seed: int = 0,
        on_bad_sample: Literal["raise", "skip"] = "raise",
    ) -> None:
        if on_bad_sample not in ("raise", "skip"):
            raise ValueError(f'on_bad_sample must be "raise" or "skip", got {on_bad_sample!r}')
        if on_bad_sample == "skip" and all_captions:
            raise ValueError(
                'on_bad_sample="skip" would count replacements twice in an evaluation (all_captions=True): '
                "drop the bad rows from the dataset instead"
            )
        super().__init__(dataset, image_column, [caption_column] + ([pair_id_column] if pair_id_column else []))

        captions = dataset.features[caption_column]
        if not (_is_string(captions) or _is_string(getattr(captions, "feature", None))):
            raise ValueError(f"caption_column {caption_column!r} must hold strings or lists of strings, not {captions}")
        if pair_id_column and pair_id_column != caption_column:
            ids = dataset.features[pair_id_column]
            if not (_is_integer(ids) or _is_string(ids)):
                raise ValueError(f"pair_id_column {pair_id_column!r} must hold integers or strings, not {ids}")
        self._caption_column = caption_column
        self._pair_id_column = pair_id_column
        self._all_captions = all_captions
        self._seed = seed
        self._on_bad_sample = on_bad_sample
        # Shared memory, so that workers which outlive an epoch (persistent_workers) see the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose which captions are drawn; call it in every process before its iteration over the epoch starts."""
        self._epoch.fill_(epoch)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self._on_bad_sample == "raise":
            return self._sample(row)
        candidate, replacements = row, self._random(row, "replacement")
        for skipped in range(_MAX_TRIES):
            try:
                return {**self._sample(candidate), "skipped": skipped}
            except _BadSampleError as error:  # noqa: PERF203
                last = error
                candidate = replacements.randrange(len(self))
        raise ValueError(f"{_MAX_TRIES} rows drawn one after another were all bad; the last: {last}") from last

    def _sample(self, row: int) -> dict[str, Any]:
        value = self._rows[row]
        captions = value[self._caption_column]
        captions = [captions] if isinstance(captions, str) else captions or []
        captions = [caption for caption in captions if caption and not caption.isspace()]
        if not captions:
            raise self._bad_sample(row, f"column {self._caption_column!r}: no caption")
        if not self._all_captions:
            captions = [self._random(row, "caption").choice(captions)]
        item = {"image": self._image(row, value[self._image_column]), "caption": captions}

        if self._pair_id_column == self._caption_column:
            item["pair_id"] = caption_pair_id(captions[0])
        elif self._pair_id_column:
            pair_id = value[self._pair_id_column]
            if pair_id is None:
                raise self._bad_sample(row, f"column {self._pair_id_column!r}: no pair id")
            item["pair_id"] = _hash(pair_id) if isinstance(pair_id, str) else _as_int64(pair_id)
        elif self._on_bad_sample == "skip":
            item["pair_id"] = row
        return item

    def _random(self, row: int, purpose: str) -> random.Random:
        return random.Random(f"{self._seed} {self._epoch.item()} {row} {purpose}")  # hashed with SHA-512


class ZeroShotDataset(_ImageDataset):
    """Labelled images for zero-shot classification, and the prompts that describe the classes.

    Item i is a dict of
        image: RGB `PIL.Image.Image`.
        label: int, index into `class_names`.

    Args:
        dataset: a map-style `datasets.Dataset` without a transform.
        image_column: images; or paths (strings) or encoded images (binary).
        label_column: a `ClassLabel` column, or integers.
        class_names: one name per class, equal names allowed; by default those of the `ClassLabel`.
        templates: prompts with one "{}" each, where the class name goes.

    Raises:
        ValueError: at construction for a wrong dataset, column, column type, template, or labels without a name; on
            access for a bad image, which is never skipped here, because it would change what is measured.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        *,
        image_column: str = "image",
        label_column: str = "label",
        class_names: Sequence[str] | None = None,
        templates: Sequence[str] = ("a photo of a {}.",),
    ) -> None:
        super().__init__(dataset, image_column, [label_column])
        feature = dataset.features[label_column]
        if not _is_integer(feature):
            raise ValueError(
                f"label_column {label_column!r} must hold integers, not {feature}; "
                f"class_encode_column({label_column!r}) turns strings into a ClassLabel"
            )
        if class_names is None:
            class_names = getattr(feature, "names", None)
        if not class_names or isinstance(class_names, str):
            raise ValueError(
                f"class_names must list the names of the classes, got {class_names!r}; "
                f"it may be left out only if label_column {label_column!r} is a ClassLabel, and it is {feature}"
            )
        if not templates or isinstance(templates, str) or any(template.count("{}") != 1 for template in templates):
            raise ValueError(f'templates must be a sequence of prompts with one "{{}}" each, got {templates!r}')
        labels = self._rows.select_columns([label_column]).unique(label_column)
        if unnamed := [label for label in labels if label is None or not 0 <= label < len(class_names)]:
            raise ValueError(
                f"label_column {label_column!r} holds {unnamed[:10]}, but there are {len(class_names)} class names"
            )
        self._label_column = label_column
        self.class_names = list(class_names)
        self.templates = tuple(templates)

    def __getitem__(self, row: int) -> dict[str, Any]:
        value = self._rows[row]
        return {"image": self._image(row, value[self._image_column]), "label": value[self._label_column]}

    def prompts(self) -> list[str]:
        """The prompts of class 0, one per template, then those of class 1, ..."""
        return [template.replace("{}", name) for name in self.class_names for template in self.templates]


class ContrastiveCollator:
    """Turns items of `ImageTextDataset` or `ZeroShotDataset` into the tensors of a batch.

    Captions are truncated, and padded to the longest of the batch; but to a fixed length for a model that reads its
    padding like text. SigLIP does: it was trained without an attention mask, and pools the last position whatever it
    holds. Such are taken to be the processors named Siglip* and any tokenizer that gives no attention mask.

    Args:
        processor: has an `image_processor` and a `tokenizer`, as `CLIPProcessor`, `SiglipProcessor` and the like do.
        max_length: tokens per caption, including special ones; by default the tokenizer's `model_max_length`.
        fixed_length: pad every caption to `max_length`; by default as said above. `InfCLTrainer` sets it by the model.

    Raises:
        ValueError: the processor lacks a part, or no maximum length is known.
    """

    def __init__(
        self, processor: ProcessorMixin, max_length: int | None = None, fixed_length: bool | None = None
    ) -> None:
        if missing := [part for part in ("image_processor", "tokenizer") if getattr(processor, part, None) is None]:
            raise ValueError(f"the processor, a {type(processor).__name__}, has no {' and no '.join(missing)}")
        self.processor = processor
        if max_length is None:
            max_length = processor.tokenizer.model_max_length
            if max_length > _NO_LIMIT:
                raise ValueError(
                    f"the tokenizer, a {type(processor.tokenizer).__name__}, states no model_max_length: "
                    "pass max_length, at most the text model's max_position_embeddings"
                )
        self.max_length = max_length
        if fixed_length is None:
            fixed_length = (
                type(processor).__name__.startswith("Siglip")
                or "attention_mask" not in processor.tokenizer.model_input_names
            )
        self._padding = "max_length" if fixed_length else "longest"

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate b items with n captions in all.

        Returns:
            What the image processor gives, `pixel_values` [b, 3, H, W] float in most cases; and for image-text items
            what the tokenizer gives, `input_ids` [n, L] int64 and so on. Then, all int64:
            pair_ids [b]: if the items carry one.
            skipped [b]: if the items carry it.
            caption_image [n]: the row of the batch that each caption belongs to. Absent if every item has one caption.
            labels [b]: for zero-shot items, which have no captions.
        """
        images = [item["image"] for item in items]
        batch = dict(self.processor.image_processor(images=images, return_tensors="pt"))
        if "caption" in items[0]:
            if any(not isinstance(item["caption"], list) for item in items):
                raise ValueError(
                    "Each item needs a list of captions, as ImageTextDataset gives it, but the first has "
                    f"{items[0]['caption']!r}. Wrap the rows: ImageTextDataset(dataset)."
                )
            batch |= self.tokenize([caption for item in items for caption in item["caption"]])
            counts = torch.tensor([len(item["caption"]) for item in items])
            if (counts != 1).any():
                batch["caption_image"] = torch.arange(len(items)).repeat_interleave(counts)
        for key, name in (("pair_id", "pair_ids"), ("skipped", "skipped"), ("label", "labels")):
            if key in items[0]:
                batch[name] = torch.tensor([item[key] for item in items])
        return batch

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        """The tokenizer's tensors [n, L] for n texts: captions, or the prompts of a zero-shot classifier."""
        return dict(
            self.processor.tokenizer(
                texts, padding=self._padding, truncation=True, max_length=self.max_length, return_tensors="pt"
            )
        )


def caption_pair_id(caption: str) -> int:
    """An int64 that is equal for captions that read the same, and for no others (but for hash collisions).

    The text is brought to Unicode NFKC, case is folded and runs of white space become one space. The first 8 bytes of
    its BLAKE2b make the id: the same in every process, and among 10 million captions two collide with odds of 3e-6.
    """
    return _hash(" ".join(unicodedata.normalize("NFKC", caption).casefold().split()))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _as_int64(value: int) -> int:
    """One to one: int64 stays, the upper half of uint64 becomes negative."""
    return (value + 2**63) % 2**64 - 2**63


def _decode_rgb(value: dict[str, Any] | None) -> Image.Image:
    """The image of an undecoded `datasets.Image` value, upright and in RGB with 8 bits."""
    import datasets
    from PIL import Image

    if value is None:
        raise ValueError("no image")
    image = datasets.Image().decode_example(value)
    if image.mode.startswith("I"):  # 16-bit grey, which PIL clips to 255; take the high byte, as it does for colour
        image = Image.fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))
    elif "transparency" in image.info:  # a palette: PIL warns unless it goes by way of RGBA
        image = image.convert("RGBA")
    return image.convert("RGB")


def _is_value(feature: Any, *dtypes: str) -> bool:
    import datasets

    return isinstance(feature, datasets.Value) and feature.dtype in dtypes


def _is_string(feature: Any) -> bool:
    return _is_value(feature, "string", "large_string")


def _is_integer(feature: Any) -> bool:
    """Including ClassLabel."""
    return getattr(feature, "dtype", "").startswith(("int", "uint"))
