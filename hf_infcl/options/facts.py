"""Reads what is declared of the options of a training: its own, and those of transformers.TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from .declaring import Facts, facts_of
from .theirs import facts_of_theirs


def facts_by_name(kind: Any) -> dict[str, Facts]:
    """The facts of each field of a dataclass of options, or of an instance of one."""
    return {one.name: facts_of(one) or facts_of_theirs(one.name) for one in fields(kind)}


def check_values(args: Any) -> None:
    """Raises a ValueError if an option has a value that it may not have, or lacks another one that it needs."""
    facts_of_all = facts_by_name(args)
    for declared in fields(args):
        name, facts, value = declared.name, facts_of_all[declared.name], getattr(args, declared.name)
        is_default = declared.default is not MISSING and value == declared.default
        if facts.choices and not is_default:
            choices = facts.choices() if callable(facts.choices) else facts.choices
            if value not in choices:
                known = [*([declared.default] if declared.default not in choices else []), *choices]
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        if facts.within is not None and not (value is None and declared.default is None):
            facts.within.check(name, value)
        if facts.needs and not is_default:
            needed, _, wanted = facts.needs.partition("=")
            found = getattr(args, needed)
            if (str(found) != wanted) if wanted else not found:
                raise ValueError(f"{name}={value} has no effect without {facts.needs}. Pass both or none.")


def rows_of_card(args: Any) -> Mapping[str, str]:
    """The rows of a model card about options that are set: each option's row, and its value in words."""
    rows = {}
    for name, facts in facts_by_name(args).items():
        value = getattr(args, name)
        if facts.card and value is not None:
            between = " " if name.endswith("_schedule") else " and "
            rows[facts.card] = between.join(map(str, value)) if isinstance(value, list) else f"{value:g}"
    return rows
