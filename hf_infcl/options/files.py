"""Reads the options in a YAML or JSON file, without torch."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

FILES = (".yaml", ".yml", ".json")  # the endings of a file of options
REFUSED = Path(__file__).with_name("refusals.yaml")  # options that exclude each other
OF_THEIRS = Path(__file__).with_name("transformers_facts.yaml")  # which of transformers' options decide what is trained
PEERS = Path(__file__).with_name("elsewhere.yaml")  # names of options in other programs
# The files of options that the package holds, by the names of --recipe.
RECIPES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))}


class _Loader(yaml.SafeLoader):
    """Plain values as in YAML 1.2: `no` and dates are text, 1e-6 is a number, unlike in PyYAML's YAML 1.1."""

    yaml_implicit_resolvers: ClassVar[dict[str | None, Any]] = {}


for _kind, _pattern in {
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^({_pattern})$"), None)


def options_in(path: Path) -> dict[str, tuple[Any, Any]]:
    """The options of a file by name: each as a Python value, and again with its scalars as the text in the file.

    Raises:
        ValueError: there is no such file, or it does not map names to values. No message holds a part of the file.
    """
    if not path.exists():
        raise ValueError(f"There is no file {str(path)!r} to read options from.")
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(content)
            texts = json.loads(content, parse_int=str, parse_float=str, parse_constant=str)
        else:
            values = yaml.load(content, Loader=_Loader)
            texts = yaml.load(content, Loader=yaml.BaseLoader)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: line {error.lineno}: {error.msg}.") from None
    except yaml.MarkedYAMLError as error:  # its text has an excerpt of the file, which might be a token
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ValueError(f"{path} is not YAML: line {line}: {error.problem}.") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # PyYAML raises them
        raise ValueError(f"{path} cannot be read: {type(error).__name__}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must map names of options to values, but it holds a {type(values).__name__}.")
    if not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must map names of options to values; some of its keys are not text.")
    return {key: (values[key], texts[key]) for key in values}
