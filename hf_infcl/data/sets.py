"""Sets of data by their names, which may state more: ``my/tables?split=validation&caption_column=title``."""

import glob
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import datasets
from transformers.utils import logging

from ..files.text import lacks_column
from .images import find_column
from .labelled import ZeroShotDataset, names_by_label, read_lines, with_class_labels
from .pairs import ImageTextDataset
from .tables import Table

logger = logging.get_logger(__name__)

_TABLE = ("name", "split", "image_column")
_PAIRS = (*_TABLE, "caption_column", "pair_id_column")
_CLASSES = ("label_column", "class_names", "templates")

# What a set may state, by its role: the option that names it. "data" stands before the options of `infcl embed`.
STATED = {
    "dataset": (*_PAIRS, "negative_caption_column", "weight", "label_column", "class_names"),
    "replay_dataset": (*_PAIRS, "streaming"),
    "eval_dataset": _PAIRS,
    "zero_shot_dataset": (*_TABLE, *_CLASSES),
    "guard_dataset": (*_PAIRS, *_CLASSES),
    "data": (*_TABLE, "caption_column"),
}
# What holds for the sets of a command that do not state it themselves.
DEFAULTS: Mapping[str, Any] = {
    "image_column": "image",
    "caption_column": "caption",
    "pair_id_column": None,
    "label_column": "label",
    "templates": ["a photo of a {}."],
}
# Facts that are no texts: the name of such a value in messages, how it is written, and how it is read.
_KINDS: Mapping[str, tuple[str, str, Callable[[str], Any]]] = {
    "weight": ("a number", r"\d*\.?\d+([eE][-+]?\d+)?", float),
    "streaming": ("true or false", r"(?i:true|false)", lambda text: text.lower() == "true"),
}


@dataclass(frozen=True)
class SetSpec:
    """A set of data: where it is, what it is for, and what it states about how it is read."""

    path: str  # a Hub id, a folder or shards
    role: str = "eval_dataset"  # a key of `STATED`
    split: str | None = None
    name: str | None = None  # of its configuration
    columns: Mapping[str, str] = field(default_factory=dict)  # by the options that name columns
    class_names: list[str] | None = None
    templates: list[str] | None = None
    streaming: bool = False
    weight: float | None = None

    @classmethod
    def read(cls, role: str, value: "str | Mapping[str, object] | SetSpec") -> "SetSpec":
        """The set that an option names, as a text with its facts behind a question mark, or as a mapping with its path.

        A question mark stays part of the name where such a file exists, where no ``fact=`` follows it, as in the
        pattern ``0000?.tar``, and in a URL, unless all that follows can be stated: ``https://a/b.tar?token=c`` does.

        Raises:
            ValueError: no fact follows the name of a folder; a fact is unknown or stated twice, or its value is no such
                thing; a mapping has no path.
        """
        if isinstance(value, SetSpec):
            return value
        known = STATED[role]
        if isinstance(value, Mapping):
            facts = dict(value)
            path = facts.pop("path", None)
            if not isinstance(path, str) or not path:
                raise ValueError(f"--{role} is a mapping without a path. Write path: my/tables, and its facts below.")
        else:
            path, facts = _parted(value, known)
        if unknown := ", ".join(sorted(facts.keys() - set(known))):
            raise ValueError(f"--{role} {path}: {unknown} is unknown. A set here can have {', '.join(sorted(known))}.")
        stated = {name: _fact(f"--{role} {path}: {name}", name, fact) for name, fact in facts.items()}
        columns = {name: stated.pop(name) for name in facts if name.endswith("_column")}
        return cls(path, role, columns=columns, **stated)

    def __str__(self) -> str:
        return f"--{self.role} {self.path}" if self.role != "data" else f"DATA {self.path}"

    @contextmanager
    def named(self) -> Iterator[None]:
        """Names the set in a ValueError."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from error

    def wanted(self, defaults: Mapping[str, Any], **found: str) -> dict[str, Any]:
        """The columns of its pairs: ``found``, or those that it states, or those of the command.

        If the ids of the command are the captions, so are those of the set.
        """
        columns = {name: self.columns.get(name, defaults[name]) for name in ("image_column", "caption_column")} | found
        of_captions = defaults["pair_id_column"] == defaults["caption_column"]
        ids = columns["caption_column"] if of_captions else defaults["pair_id_column"]
        return columns | {"pair_id_column": self.columns.get("pair_id_column", ids)}

    def rows(self, defaults: Mapping[str, Any], trained: Collection[tuple[str, str]] = ()) -> datasets.Dataset:
        """Its table; without a split the one to evaluate, which must not be among the ``trained`` (path, split).

        With ``chooses`` among the defaults, the evaluation chooses the model.
        """
        table, chooses = Table(self.path, self.name), bool(defaults.get("chooses"))
        split = self.split or table.split_to_evaluate(chooses=chooses)
        if chooses and self.split is None and split == "test":
            logger.warning_once(
                f"{self} has no split 'validation', so the split 'test' chooses the model: its results are too good. "
                "Choose on other rows, such as '?split=test[:50%]'."
            )
        if self.split is None and (self.path, split) in trained:
            raise ValueError(f"Its only split, {split!r}, is trained on. Name another set, or the split if meant.")
        return table.load(split, self.wanted(defaults)["image_column"])

    def column(self, rows: datasets.Dataset, option: str, defaults: Mapping[str, Any]) -> str:
        """The column that it states, or else that of the command, or else the only one of a usual name."""
        kind = option.removesuffix("_column")
        column = self.columns.get(option) or find_column(kind, rows.features, defaults[option])
        if column not in rows.column_names:
            cure = f"Name the right one with --{option}, or behind the name of this set: '?{option}=NAME'."
            raise ValueError(f"It {lacks_column(column, rows.column_names)} {cure}")
        return column

    def pairs(self, rows: datasets.Dataset, defaults: Mapping[str, Any], **options: Any) -> ImageTextDataset:
        """Its rows as pairs, without the ids of the command if it has none of them."""
        names = "image_column", "caption_column"
        columns = self.wanted(defaults, **{name: self.column(rows, name, defaults) for name in names})
        if columns["pair_id_column"] not in rows.column_names and "pair_id_column" not in self.columns:
            columns["pair_id_column"] = None
        return ImageTextDataset(rows, **columns, **options)

    def classes(self, rows: datasets.Dataset, defaults: Mapping[str, Any]) -> ZeroShotDataset:
        """Its rows as labelled images."""
        columns = {name: self.column(rows, name, defaults) for name in ("image_column", "label_column")}
        class_names = None
        if self.class_names is not None:
            rows = with_class_labels(rows, columns["label_column"])
            known = getattr(rows.features[columns["label_column"]], "names", None)
            class_names = names_by_label(read_lines(self.class_names), known)
        templates = read_lines(self.templates or defaults["templates"])
        return ZeroShotDataset(rows, **columns, class_names=class_names, templates=templates)

    def evaluated(
        self,
        defaults: Mapping[str, Any] = DEFAULTS,
        *,
        trained: Collection[tuple[str, str]] = (),
        select: Callable[[datasets.Dataset], datasets.Dataset] | None = None,
    ) -> ImageTextDataset | ZeroShotDataset:
        """The set as an evaluation takes it: pairs, or labelled images if it has classes but no captions.

        Args:
            defaults: what holds where it states nothing, as `DEFAULTS`.
            trained: as for `rows`.
            select: takes the rows to evaluate out of all; by default, all are evaluated.
        """
        with self.named():
            rows = self.rows(defaults, trained)
            rows = rows if select is None else select(rows)
            is_classes = self.role == "zero_shot_dataset"
            if self.role == "guard_dataset":
                captions = find_column("caption", rows.features, self.wanted(defaults)["caption_column"])
                labels = find_column("label", rows.features, defaults["label_column"])
                states_classes = bool(self.class_names or self.templates or "label_column" in self.columns)
                is_classes = states_classes or (captions not in rows.column_names and labels in rows.column_names)
            opened = self.classes(rows, defaults) if is_classes else self.pairs(rows, defaults, all_captions=True)
        opened.name, opened.source = str(self), self.path
        return opened


def read_sets(role: str, names: Any) -> list[SetSpec]:
    """The sets that an option names: one, several or none."""
    several = names if isinstance(names, list) else [] if names is None else [names]
    return [SetSpec.read(role, one) for one in several]


def _parted(value: str, known: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    path, _, words = value.rpartition("?")
    if not path or os.path.exists(value):
        return value, {}
    if not re.match(r"\w+=", words):
        if os.path.isdir(path) and not glob.glob(value):
            raise ValueError(f"{value!r} states {words!r} behind the folder {path}. Write FACT=VALUE: '?split=test'.")
        return value, {}
    stated = [(name, fact) for name, _, fact in (word.partition("=") for word in words.split("&"))]
    facts = dict(stated)
    if "://" in value and not value.startswith("hf://") and not facts.keys() <= set(known):
        return value, {}
    if len(facts) < len(stated):
        names = ", ".join(name for name in facts if sum(name == other for other, _ in stated) > 1)
        raise ValueError(f"{value!r} states {names} more than once. State each fact once; a split may be train+test.")
    return path, facts


def _fact(place: str, name: str, value: object) -> Any:
    """The value of a fact, which is text in a name."""
    if name in ("class_names", "templates"):
        value = value if isinstance(value, list) else [value]
        if all(isinstance(one, str) and one for one in value):
            return value
    kind, pattern, read = _KINDS.get(name, ("a text", r"(?s:.+)", str))
    if not isinstance(value, (list, Mapping)) and re.fullmatch(pattern, str(value)):
        return read(str(value))
    raise ValueError(f"{place} must be {kind}, got {value!r}.")
