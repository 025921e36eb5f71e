"""Reads what the options of a training declare: those of this package, and transformers.TrainingArguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol

from .declaring import Facts, declared_facts, holds, refuse, spelled
from .theirs import facts_of_theirs

LARGEST = 2**40  # of pairs, steps or whatever a whole number counts


class Options(Protocol):
    """A dataclass of options."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def facts_by_name(kind: Options | type[Options]) -> dict[str, Facts]:
    """The facts of each field of a dataclass of options, or of an instance of one."""
    return {one.name: declared_facts(kind).get(one.name) or facts_of_theirs(one.name) for one in fields(kind)}


def check_values(options: Options) -> None:
    """Raises a ValueError if an option has a value that it may not have, or that other options do not go with.

    A single value of an option that takes a list becomes a list of one.
    """
    facts_of_all = facts_by_name(options)
    for one in fields(options):
        name, facts = one.name, facts_of_all[one.name]
        if name in declared_facts(options) and str(one.type).startswith("list["):
            _make_list(options, one)
        value = getattr(options, name)
        if isinstance(value, Integral) and int(value) >= LARGEST and not name.endswith("seed"):
            raise ValueError(f"{name} must be less than {LARGEST:,}, which no training counts up to, got {value:,}.")
        is_default = one.default is not MISSING and value == one.default
        choices = facts.choices() if callable(facts.choices) and not is_default else facts.choices
        if not is_default and not callable(choices) and choices and value not in choices:
            known = dict.fromkeys([one.default, *choices])
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        if facts.within is not None and not (value is None and one.default is None):
            facts.within.check(name, value)
        if is_default:
            continue
        if facts.needs and not holds(options, facts.needs):
            needed = facts.needs
            raise ValueError(f"{name}={spelled(value)} has no effect without {needed}: add {needed} or drop {name}.")
        refuse([(f"{name} {excluded}", why) for excluded, why in facts.excludes.items()], options)


def _make_list(options: Options, declared: Field[Any]) -> None:
    """Makes a list of the value of an option whose type is one, such as ``list[str] | None``."""
    value, kind = getattr(options, declared.name), str(declared.type).removeprefix("list[").partition("]")[0]
    if value is None:
        return
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    number, words = {"int": (Integral, "whole numbers"), "float": (Real, "numbers")}.get(kind, (object, ""))
    if not all(isinstance(one, number) for one in values):
        raise ValueError(f"{declared.name} must be a list of {words}, got {value!r}.")
    setattr(options, declared.name, values)


def changed_options(options: object, declared: type[Options]) -> dict[str, Any]:
    """The values of those options of a dataclass that do not have their default, by name."""
    changed = {}
    for one in fields(declared):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if (value := getattr(options, one.name)) != default:
            changed[one.name] = value
    return changed


def values_of_card(args: Options) -> Iterator[tuple[str, str, Any]]:
    """(name, row, value) of each option that is set and has a row in a model card."""
    facts = facts_by_name(args)
    for name, value in changed_options(args, type(args)).items():
        if facts[name].card:
            yield name, facts[name].card, value
