"""Reads what the options of a training declare: those of this package, and transformers.TrainingArguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

from .declaring import ExclusiveOptionsError, Facts, declared_facts
from .theirs import facts_of_theirs


def facts_by_name(kind: Any) -> dict[str, Facts]:
    """The facts of each field of a dataclass of options, or of an instance of one."""
    return {one.name: declared_facts(one) or facts_of_theirs(one.name) for one in fields(kind)}


def check_values(
    options: Any, declared: type[Any] | None = None, chosen: Callable[[Facts], bool] = lambda facts: True
) -> None:
    """Raises a ValueError if an option has a value that it may not have, or lacks another one that it needs.

    The options are those of ``declared``, a dataclass, or else of the class of ``options``.
    """
    facts_of_all = facts_by_name(options if declared is None else declared)
    for one in fields(options if declared is None else declared):
        name, facts = one.name, facts_of_all[one.name]
        if not chosen(facts):
            continue
        value = getattr(options, name)
        is_default = one.default is not MISSING and value == one.default
        if facts.choices and not is_default:
            choices = facts.choices() if callable(facts.choices) else facts.choices
            if value not in choices:
                known = [*([one.default] if one.default not in choices else []), *choices]
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        if facts.within is not None and not (value is None and one.default is None):
            facts.within.check(name, value)
        if facts.needs and not is_default:
            needed, _, wanted = facts.needs.partition("=")
            needed_value = getattr(options, needed)
            if (str(needed_value) != wanted) if wanted else not needed_value:
                message = f"{name}={value} has no effect without {facts.needs}. Pass both or none."
                raise ExclusiveOptionsError(message, name, needed)


def changed_options(
    options: Any, chosen: Callable[[Facts], object], declared: type[Any] | None = None
) -> dict[str, Any]:
    """The values of those chosen options that do not have their default, by name; arguments as in `check_values`."""
    by = options if declared is None else declared
    facts, changed = facts_by_name(by), {}
    for one in fields(by):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if chosen(facts[one.name]) and (value := getattr(options, one.name)) != default:
            changed[one.name] = value
    return changed


def values_of_card(args: Any) -> Iterator[tuple[str, str, Any]]:
    """(name, row, value) of each option that is set and has a row in a model card."""
    facts = facts_by_name(args)
    for name, value in changed_options(args, lambda of_one: of_one.card).items():
        yield name, facts[name].card, value
