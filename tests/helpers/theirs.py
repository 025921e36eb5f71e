"""The options of transformers.TrainingArguments as `hf_infcl/options/transformers_options.json` has them.

Run it with the release that constraints.txt pins for the newest Python to write the file anew.
"""

import json
import typing
from dataclasses import MISSING, fields
from enum import Enum
from types import NoneType
from typing import Any

import transformers

from hf_infcl.options.contrastive import FILE

NOT_IN_WORDS = {"parallelism_config"}  # takes an object, which no command line can express


def content() -> str:
    """What the file should hold for the installed release."""
    kinds = typing.get_type_hints(transformers.TrainingArguments)
    options = {}
    for one in fields(transformers.TrainingArguments):
        if one.name in NOT_IN_WORDS:
            continue
        kind = kinds[one.name]
        default = one.default if one.default_factory is MISSING else one.default_factory()
        default = default.value if isinstance(default, Enum) else default
        options[one.name] = {"type": named(kind), "default": default, **one.metadata}
    every = {"release": transformers.__version__, "options": options}
    return json.dumps(every, indent=1, ensure_ascii=False, default=list) + "\n"


def named(kind: Any) -> str:
    """The type of an option in words that Python understands with `Literal`. The members of an enum become texts."""
    if (origin := typing.get_origin(kind)) in (list, dict):
        return "list[str]" if origin is list else "dict"
    if isinstance(kind, type) and issubclass(kind, Enum):
        kind = typing.Literal[tuple(member.value for member in kind)]
    if typing.get_origin(kind) is typing.Literal:
        return f"Literal[{', '.join(map(repr, typing.get_args(kind)))}]"
    if arguments := typing.get_args(kind):
        return " | ".join(map(named, arguments))
    return "None" if kind is NoneType else kind.__name__


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8")
