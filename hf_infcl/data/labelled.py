"""Labelled images and the prompts that describe their classes, for zero-shot classification."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..shards.values import ERRORS
from .images import ImageDataset, is_integer

if TYPE_CHECKING:
    import datasets


logger = logging.getLogger(__name__)

NUMBER = re.compile(r"[a-zA-Z]?\d+")  # "12", "n01440764"


class ZeroShotDataset(ImageDataset):
    """Labelled images for zero-shot classification, and the prompts that describe the classes.

    Item i is a dict of
        image: RGB, a uint8 array [H, W, 3].
        label: int, index into `class_names`; or, if an image may be of several classes, a list with 0 or 1 for each.

    Attributes:
        kind: the kind of its metrics, see `hf_infcl.evaluation.metrics.Metric`.

    Args:
        dataset: a map-style `datasets.Dataset` without a transform.
        image_column: a column of images, paths (strings) or encoded images (binary).
        label_column: a `ClassLabel` column, or integers; or lists with 0 or 1 for each class.
        class_names: one name per class in the order of the labels; names may repeat. By default, the names of the
            `ClassLabel`; a warning says if these are numbers.
        templates: prompts, each with one "{}" for the class name.

    Raises:
        ValueError: at construction, for a wrong dataset, column, column type or template, for labels without a name, or
            for the names of the `ClassLabel` in another order; on access, for a bad image. Bad images are never skipped
            here, because that would change what is measured.
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
        super().__init__(dataset, image_column, {"label_column": label_column})
        feature = dataset.features[label_column]
        several = is_integer(getattr(feature, "feature", None))
        if not (several or is_integer(feature)):
            raise ValueError(
                f"The label_column {label_column!r} must hold integers, not {feature}. "
                f"class_encode_column({label_column!r}) turns strings into a ClassLabel."
            )
        known = getattr(feature, "names", None)
        are_given = class_names is not None
        if not are_given:
            class_names = known
        if not class_names or isinstance(class_names, str):
            raise ValueError(
                f"class_names must list the names of the classes, got {class_names!r}. It can only be omitted if the "
                f"label_column {label_column!r} is a ClassLabel, but it is {feature}."
            )
        class_names = list(class_names)
        if known is not None and class_names != known and sorted(class_names) == sorted(known):
            raise ValueError(
                f"class_names has the names of the label_column {label_column!r} in another order: {class_names} "
                f"instead of {known}. Label i means the i-th name, so omit class_names or pass it in that order."
            )
        if not templates or isinstance(templates, str) or any(template.count("{}") != 1 for template in templates):
            raise ValueError(f'templates must be a sequence of prompts with one "{{}}" each, got {templates!r}.')
        if not are_given and all(map(NUMBER.fullmatch, class_names)):
            logger.warning(
                "The names of the %d classes are numbers, so that the prompts say %r. Unless the images show numbers, "
                "give the classes their names with class_names (--class_names, which also takes a file).",
                *(len(class_names), templates[0].replace("{}", class_names[0])),
            )
        if ERRORS in self._rows.column_names:  # a row without a label cannot be measured
            for row, value in enumerate(self._rows.select_columns([label_column, ERRORS])):
                self._check_errors(row, value)
        self.kind = "labels" if several else "classes"
        if several:
            for row, of_row in enumerate(self._rows.select_columns([label_column])[label_column]):
                if len(of_row) != len(class_names) or not {0, 1}.issuperset(of_row):
                    raise ValueError(
                        f"The label_column {label_column!r} must hold 0 or 1 for each of the {len(class_names)} class "
                        f"names, but row {row} holds {of_row[:30]}."
                    )
        labels = [] if several else self._rows.select_columns([label_column]).unique(label_column)
        if unnamed := [label for label in labels if label is None or not 0 <= label < len(class_names)]:
            raise ValueError(
                f"The label_column {label_column!r} holds {unnamed[:10]}, but there are {len(class_names)} class names."
            )
        self._label_column = label_column
        self.class_names = class_names
        self.templates = tuple(templates)

    def __getitem__(self, row: int) -> dict[str, Any]:
        value = self._rows[row]
        self._check_errors(row, value)
        return {"image": self._image(row, value[self._image_column]), "label": value[self._label_column]}

    def prompts(self) -> list[str]:
        """The prompts of class 0, one per template, then those of class 1, ..."""
        return [template.replace("{}", name) for name in self.class_names for template in self.templates]

    def sample_captions(self, count: int) -> list[list[str]]:
        """Up to ``count`` of the prompts, as captions of one image each."""
        return [[prompt] for prompt in self.prompts()[:count]]
