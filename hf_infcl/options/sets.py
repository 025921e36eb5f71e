"""The names of data sets, which may say how the set is read: ``my/tables?split=validation&caption_column=title``."""

from __future__ import annotations

import argparse
import glob
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

_TABLE = ("name", "split", "image_column")
_PAIRS = (*_TABLE, "caption_column", "pair_id_column")
_CLASSES = ("label_column", "class_names", "templates")

# What a set may say of itself, by the option that names it; "data" stands before the options of `infcl embed`.
FACTS_OF_SETS = {
    "dataset": (*_PAIRS, "negative_caption_column", "weight", "label_column", "class_names"),
    "replay_dataset": (*_PAIRS, "streaming"),
    "eval_dataset": _PAIRS,
    "zero_shot_dataset": (*_TABLE, *_CLASSES),
    "guard_dataset": (*_PAIRS, *_CLASSES),
    "data": (*_TABLE, "caption_column"),
}


class SetName(str):
    """The name of a set without its facts: a Hub id, a folder or shards.

    Attributes:
        facts: what the name says about the set, such as its ``split``, by the keys of `FACTS_OF_SETS`.
    """

    facts: Mapping[str, Any]


def set_named(option: str, value: str | Mapping[str, object]) -> SetName:
    """The set that an option names, as a text with its facts behind a question mark, or as a mapping with its path.

    A question mark stays part of the name where such a file exists, where no ``fact=`` follows it, as in the pattern
    ``0000?.tar``, and in a URL, unless all that follows are known facts: ``https://a/b.tar?token=c`` has none.

    Raises:
        ValueError: no fact follows the name of a folder; a fact is unknown or stated twice, or its value is no such
            thing; a mapping has no path.
    """
    known = FACTS_OF_SETS[option]
    if isinstance(value, Mapping):
        facts = dict(value)
        path = facts.pop("path", None)
        if not isinstance(path, str) or not path:
            raise ValueError(
                f"--{option} is a mapping without a path. Write the set as path: my/tables, its facts below."
            )
    else:
        path, facts = _parted(value, known)
    if unknown := facts.keys() - set(known):
        raise ValueError(f"--{option} {path}: {_listed(unknown)} is unknown. A set here can have {_listed(known)}.")
    set_name = SetName(path)
    set_name.facts = {name: _read(f"--{option} {path}: {name}", name, fact) for name, fact in facts.items()}
    return set_name


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


def _read(place: str, name: str, value: object) -> Any:
    """The value of a fact, which is text in any file or command."""
    if name in ("class_names", "templates"):
        value = value if isinstance(value, list) else [value]
        if all(isinstance(one, str) and one for one in value):
            return value
    elif isinstance(value, str) and value:
        if name == "weight" and re.fullmatch(r"\d*\.?\d+([eE][-+]?\d+)?", value):
            return float(value)
        if name == "streaming" and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if name not in ("weight", "streaming"):
            return value
    kind = {"weight": "a number", "streaming": "true or false"}.get(name, "a text")
    raise ValueError(f"{place} must be {kind}, got {value!r}.")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def read_sets(namespace: argparse.Namespace) -> None:
    """Puts `SetName` in place of the texts and mappings that name sets among all options of a command."""
    for option in FACTS_OF_SETS:
        value = getattr(namespace, option, None)
        if value is not None:
            read = [set_named(option, one) for one in (value if isinstance(value, list) else [value])]
            setattr(namespace, option, read if isinstance(value, list) else read[0])


def facts_of(source: str, **defaults: object) -> dict[str, Any]:
    """The facts that the name of a set states; ``defaults``, where it states none."""
    return defaults | dict(getattr(source, "facts", {}))
