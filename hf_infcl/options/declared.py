"""The options of a training without torch: those of this package, and TrainingArguments' read from their source.

Importing TrainingArguments takes seconds, because it imports torch. A mistyped option and ``--help`` need no more than
the names, types, defaults and help texts of the fields.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import typing
from copy import copy
from dataclasses import fields, make_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal

from .batch_options import BatchOptions
from .course_options import CourseOptions
from .declaring import Facts
from .facts import facts_by_name
from .keeping_options import KeepingOptions
from .loss_options import LossOptions
from .rate_options import RateOptions
from .selection_options import SelectionOptions
from .teacher_options import TeacherOptions
from .tower_options import TowerOptions

THEIRS = "transformers.training_args", "TrainingArguments"
# The parts of InfCLTrainingArguments, in the order of the help.
OURS = (
    LossOptions,
    BatchOptions,
    RateOptions,
    SelectionOptions,
    TowerOptions,
    TeacherOptions,
    KeepingOptions,
    CourseOptions,
)


@cache
def of_transformers() -> frozenset[str]:
    """The names of the options of transformers.TrainingArguments."""
    return frozenset(_fields(*THEIRS))


@cache
def training_options() -> type:
    """A dataclass with the fields of InfCLTrainingArguments, and without its methods.

    The type of `ParallelismConfig`, which no command line can express, is Any.
    """
    every = _fields(*THEIRS) | _ours()
    return make_dataclass("TrainingOptions", [(name, *declared) for name, declared in every.items()])


@cache
def facts_of_training() -> dict[str, Facts]:
    """What the package has to know of each option of a training, by its name."""
    return facts_by_name(training_options())


def _ours() -> dict[str, tuple[Any, Any]]:
    """(type, field) of the fields of `OURS`, by their names: options that are new, or differ in default or meaning."""
    kinds = {name: kind for part in OURS for name, kind in typing.get_type_hints(part).items()}
    return {one.name: (kinds[one.name], copy(one)) for part in OURS for one in fields(part)}


def _fields(module: str, name: str) -> dict[str, tuple[Any, Any]]:
    """(type, field) of the fields that a dataclass declares itself, by their names."""
    try:
        return fields_read(module, name)
    except Exception:  # a release that declares them as none has so far; importing the class takes longer
        real = getattr(importlib.import_module(module), name)
        kinds = typing.get_type_hints(real)
        return {f.name: (kinds[f.name], copy(f)) for f in fields(real) if f.name in inspect.get_annotations(real)}


def fields_read(module: str, name: str) -> dict[str, tuple[Any, Any]]:
    declared: dict[str, tuple[Any, Any]] = {}
    reader = _Reader(module)
    for node in _class(module, name).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            declared[node.target.id] = reader.type_of(node.annotation), reader.value(node.value)
        elif isinstance(node, (ast.Assign, ast.If)):
            # A default that depends on torch's release is assigned in a condition. Its last branch is for new ones.
            for inner in ast.walk(node):
                if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Constant):
                    reader.names[ast.unparse(inner.targets[0])] = inner.value.value
    return declared


class _Reader:
    """Evaluates the expressions by which a module declares the fields of a dataclass.

    Attributes:
        names: the values of names that are known already. Others are read from the module or imported when needed.
    """

    def __init__(self, module: str) -> None:
        self.names: dict[str, Any] = {"Literal": Literal}
        self._module = module

    def type_of(self, annotation: ast.expr) -> Any:
        """The type of an annotation."""
        for name in (node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)):
            if name not in self.names and not hasattr(builtins, name):
                members = [node for node in _class(self._module, name).body if isinstance(node, ast.Assign)]
                values = [(ast.unparse(node.targets[0]), ast.literal_eval(node.value)) for node in members]
                self.names[name] = Enum(name, values, type=str) if values else Any
        return self.value(annotation)

    def value(self, node: ast.expr) -> Any:
        """The value of an expression.

        It is evaluated node by node rather than by `eval`, so that a help never runs other code of the module.

        Raises:
            NotImplementedError: no declaration of a field has had an expression of this kind so far.
        """
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.Name(id=name):
                return self._value_of(name)
            case ast.UnaryOp():  # a negative number
                return ast.literal_eval(node)
            case ast.Attribute(value=owner, attr=name):
                return getattr(self.value(owner), name)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.value(left) | self.value(right)
            case ast.Subscript(value=generic, slice=index):
                return self.value(generic)[self.value(index)]
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.Dict(keys=keys, values=values):
                return {ast.literal_eval(key): self.value(v) for key, v in zip(keys, values, strict=True) if key}
            case ast.Lambda(body=body):  # a default that each instance has for itself
                return lambda: self.value(body)
            case ast.Call(func=function, args=[], keywords=options):
                arguments: dict[str, Any] = {}
                for option in options:
                    arguments |= {option.arg: self.value(option.value)} if option.arg else self.value(option.value)
                return self.value(function)(**arguments)
        raise NotImplementedError(f"{self._module} declares a field with {ast.unparse(node)}.")

    def _value_of(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        for node in _source(self._module).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return self.value(node.value)
            if (origin := _origin(node, name, self._module)) is not None:
                return getattr(importlib.import_module(origin), name)
        return getattr(builtins, name)


def _class(module: str, name: str) -> ast.ClassDef:
    """The class of this name in a module, or in the module of the same package that it is imported from.

    A class of another package has an empty body.
    """
    for node in _source(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
        if (origin := _origin(node, name, module)) and origin.startswith(module.partition(".")[0]):
            return _class(origin, name)
    return ast.ClassDef(name=name, bases=[], keywords=[], body=[], decorator_list=[])


def _origin(node: ast.stmt, name: str, module: str) -> str | None:
    """The module from which the statement imports the name, if it does."""
    if not isinstance(node, ast.ImportFrom) or all(alias.name != name for alias in node.names):
        return None
    return importlib.util.resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])


@cache
def _source(module: str) -> ast.Module:
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).parent.joinpath(*parts).with_suffix(".py").read_text(encoding="utf-8"))
