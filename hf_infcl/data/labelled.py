"""Labelled images and the prompts that describe their classes, for zero-shot classification."""

from __future__ import annotations

import logging
import re
import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.text import ERRORS, in_brackets
from ..shards.readers import is_integer, is_string
from .images import ImageDataset, usual_column

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
        known_names: the names in the `ClassLabel`, for example of folders; None without a `ClassLabel`.

    Args:
        dataset: a map-style `datasets.Dataset` without a transform.
        image_column: as in `ImageTextDataset`.
        label_column: a `ClassLabel` column, integers, or names of classes; or lists with 0 or 1 for each class. Where
            there is no column "label", the default is the only `ClassLabel` column, or else "cls".
        class_names: one name per class in the order of the labels; names may repeat. By default, the names of the
            `ClassLabel`; a warning says if these are numbers.
        templates: prompts, each with one ``{c}`` (or ``{}``) for the class name.

    Raises:
        ValueError: at construction, for a wrong dataset, column, column type or template, for labels without a name,
            for another number of names than the `ClassLabel` has, or its names in another order; on access, for a bad
            image. Bad images are never skipped here, because that would change what is measured.
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
        label_column = usual_column("label", label_column, dataset)
        dataset = with_class_labels(dataset, label_column)
        image_column = usual_column("image", image_column, dataset)
        super().__init__(dataset, {"image_column": image_column, "label_column": label_column})
        feature = dataset.features[label_column]
        several = is_integer(getattr(feature, "feature", None))
        known = getattr(feature, "names", None)
        given: Any = known if class_names is None else class_names
        names = _listed(given)
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"class_names must list the names of the classes, got {given!r}. It can only be omitted if the "
                f"label_column {label_column!r} is a ClassLabel, but it is {feature}."
            )
        self.class_names = names
        if known is not None:
            _check_names(self.class_names, known, label_column)
        self.templates = tuple(_with_braces(templates))
        if class_names is None and all(map(NUMBER.fullmatch, names)):
            logger.warning(
                f"The names of the {len(names)} classes are numbers, so that the prompts say "
                f"{self.templates[0].replace('{}', names[0])!r}. Unless the images show numbers, give the classes "
                "their names with class_names (--class_names, which also takes a file)."
            )
        if ERRORS in self.table.column_names:  # a row without a label cannot be measured
            for row, value in enumerate(self.table.select_columns([label_column, ERRORS])):
                self._check_errors(row, value)
        self.kind = "labels" if several else "classes"
        if several:
            for row, of_row in enumerate(self.table.select_columns([label_column])[label_column]):
                if len(of_row) != len(names) or not {0, 1}.issuperset(of_row):
                    raise ValueError(
                        f"The label_column {label_column!r} must hold 0 or 1 for each of the {len(names)} class "
                        f"names, but row {row} holds {of_row[:30]}."
                    )
        else:
            _check_labels(self.table, label_column, len(names))
        self._label_column, self.known_names = label_column, known

    def __getitem__(self, row: int) -> dict[str, Any]:
        value, encoded = self._read(row)
        return {"image": self._decoded(row, encoded), "label": value[self._label_column]}

    def prompts(self) -> list[str]:
        """The prompts of class 0, one per template, then those of class 1, ..."""
        return [template.replace("{}", name) for name in self.class_names for template in self.templates]

    def sample_captions(self, count: int) -> list[list[str]]:
        """Up to ``count`` of the prompts, as captions of one image each."""
        return [[prompt] for prompt in self.prompts()[:count]]


def captions_of_classes(
    dataset: datasets.Dataset,
    templates: Sequence[str],
    *,
    label_column: str = "label",
    class_names: Sequence[str] | None = None,
) -> datasets.Dataset:
    """Labelled images as image-text pairs: the rows with a further column ``caption`` of lists of strings.

    An `ImageTextDataset` draws one caption of the list per epoch. Pass it ``pair_id_column=label_column`` as well, so
    that images of one class are not each other's negatives.

    Args:
        dataset: a map-style `datasets.Dataset`, for example of a folder with one folder for each class.
        templates: captions with one ``{c}`` (or ``{}``) each for the name of the class: "a photo of a {c}".
        label_column: a `ClassLabel` column, integers, or names of classes.
        class_names: one per class, matched as by `names_by_label`; by default the names in the `ClassLabel`.

    Raises:
        ValueError: a template is wrong, a label has no name, or there is a column ``caption`` already.
    """
    import datasets as library

    if "caption" in dataset.column_names:
        raise ValueError("There is a column 'caption' already. Leave caption_templates out, or rename that column.")
    plain = _with_braces(templates)
    if label_column not in dataset.column_names:
        raise ValueError(
            f"Captions of classes need a column of labels, and there is no {label_column!r}, only "
            f"{dataset.column_names}. Leave caption_templates out of a set that has captions, or name the labels with "
            "label_column. The prompts of an evaluation are templates."
        )
    dataset = with_class_labels(dataset, label_column)
    feature = dataset.features[label_column]
    if not (names := names_by_label(class_names, getattr(feature, "names", None))):
        raise ValueError(f"The column {label_column!r} is {feature}, without names of classes. Give class_names.")
    _check_labels(dataset, label_column, len(names))
    labels = dataset.select_columns([label_column])
    captions = [[template.replace("{}", name) for template in plain] for name in names]
    made = labels.map(lambda label: {"caption": captions[label]}, input_columns=[label_column])
    return library.concatenate_datasets([dataset, made.select_columns(["caption"])], axis=1)


def _check_labels(dataset: datasets.Dataset, label_column: str, names: int) -> None:
    """Raises a ValueError if a label is missing, or has no name."""
    labels = dataset.select_columns([label_column]).unique(label_column)
    if unnamed := [label for label in labels if label is None or not 0 <= label < names]:
        raise ValueError(f"The label_column {label_column!r} holds {unnamed[:10]}, but there are {names} class names.")


def with_class_labels(dataset: Any, label_column: str) -> Any:
    """The dataset; if the column holds names of classes, it becomes a `ClassLabel` of these in alphabetical order."""
    import datasets

    if not is_string((getattr(dataset, "features", None) or {}).get(label_column)):
        return dataset
    labels = dataset.select_columns([label_column]).class_encode_column(label_column)  # alone, which copies no images
    others = dataset.remove_columns([label_column])
    return datasets.concatenate_datasets([others, labels], split=dataset.split, axis=1)


def read_lines(values: Sequence[str]) -> list[str]:
    """The values, or the lines of the text file that a single value names.

    Raises:
        ValueError: the value looks like a text file, and there is none.
    """
    if len(values) == 1 and Path(values[0]).is_file():
        lines = Path(values[0]).read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip()]
    if len(values) == 1 and values[0].endswith(".txt"):
        raise ValueError(f"There is no file {values[0]!r} in the working folder {Path.cwd()}.")
    return list(values)


def names_by_label(names: Sequence[str] | None, known: Sequence[str] | None) -> list[str]:
    """The names of classes in the order of their labels, or those that the dataset knows if none are given.

    If they are the names that the dataset knows, they are matched by name; case, spaces, "_" and "-" do not count.
    Otherwise the i-th name belongs to label i. If the names in the dataset are numbers, with or without a letter before
    them, and sorted as text as folders are (1, 10, 2), it belongs to the i-th number instead.

    Raises:
        ValueError: there is another number of names.
    """
    if names is None or known is None:
        return [*(names or known or ())]
    _check_number(names, known)
    place = {_as_read(name): i for i, name in enumerate(names)}
    if {*map(_as_read, known)} == place.keys() and len(place) == len(names):
        return [names[place[_as_read(name)]] for name in known]
    order = list(range(len(known)))
    if all(map(NUMBER.fullmatch, known)) and list(known) == sorted(known):
        order.sort(key=lambda label: int(known[label].lstrip(string.ascii_letters)))
    return [name for _, name in sorted(zip(order, names, strict=True))]


def _listed(value: object) -> list[Any]:
    """The values of anything that has an order, and nothing of anything else, such as a single text."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, Mapping, Set)) else []


def _with_braces(templates: Sequence[str]) -> list[str]:
    """The templates with "{}" for the name of the class, for which "{c}" may also stand."""
    plain = [one.replace("{c}", "{}") if isinstance(one, str) else "" for one in _listed(templates)]
    if not plain or any(template.count("{}") != 1 for template in plain):
        raise ValueError(f"templates must be a list of texts with one {{c}} each for the class, got {templates!r}.")
    return plain


def _as_read(name: str) -> str:
    return " ".join(re.split(r"[\s_-]+", unicodedata.normalize("NFC", name).casefold().strip()))


def _check_number(names: Sequence[str], known: Sequence[str]) -> None:
    if len(names) != len(known):
        raise ValueError(
            f"There are {len(names)} class_names {in_brackets(names)} for the {len(known)} classes of the dataset "
            f"{in_brackets(known)}. Name each of them, in their order."
        )


def _check_names(names: Sequence[str], known: Sequence[str], label_column: str) -> None:
    """Raises a ValueError for another number of names than are known, or for a known name at another place."""
    _check_number(names, known)
    places = {_as_read(name): i for i, name in enumerate(known)}
    wrong = [name for i, name in enumerate(names) if places.get(_as_read(name), i) != i]
    if wrong and len(places) == len(known):
        raise ValueError(
            f"class_names has names of the label_column {label_column!r} in another order: {in_brackets(names)} "
            f"instead of {in_brackets(known)}, for example {wrong[0]!r}. Label i means the i-th name."
        )
