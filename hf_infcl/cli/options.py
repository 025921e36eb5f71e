"""The options of the commands, read from the command line, or from a file and the options that follow it."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments

from .launched import is_missing_package, missing_package, tell


@dataclass
class ModelOptions:
    _argument_group_name: ClassVar[str] = "Model"

    model: str = field(metadata={"help": "Required. The model: a Hub id or a folder."})


@dataclass
class LoraOptions:
    _argument_group_name: ClassVar[str] = "LoRA adapters (package peft)"

    lora_rank: int | None = field(
        default=None,
        metadata={"help": "Train adapters of this rank instead of the weights; their alpha is twice the rank."},
    )
    lora_targets: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of the layers that get adapters, such as q_proj v_proj."},
    )
    lora_merge: bool = field(
        default=False,
        metadata={
            "help": "At the end, merge the adapters into the weights, and save and push the whole model instead."
        },
    )


@dataclass
class DataOptions:
    _argument_group_name: ClassVar[str] = "Training data"

    dataset: list[str] = field(
        metadata={
            "help": "Required. Image-text pairs to train on: a Hub id or a folder. With --streaming also shards, such "
            "as 'shards/{00000..00127}.tar', and more than one dataset."
        }
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Configuration of the training data, if it has several."}
    )
    split: str = field(default="train", metadata={"help": "Split of the training data."})
    on_bad_sample: str = field(
        default="raise", metadata={"help": "What to do with a broken image or an empty caption: 'raise' or 'skip'."}
    )
    augmentation: str = field(
        default="none",
        metadata={
            "help": "'none'; 'crop' for random crops of 0.9 to 1 of the image, as CLIP is trained from scratch; or "
            "'flip_crop', which also flips half of the images left to right."
        },
    )
    min_side: int | None = field(
        default=None,
        metadata={
            "help": "Decode JPEGs at 1/2, 1/4 or 1/8 of their size if both sides keep at least this many pixels. This "
            "is faster and changes the pixels slightly. By default, images are decoded at full size."
        },
    )
    streaming: bool = field(
        default=False,
        metadata={"help": "Read tar or parquet shards during the training, as a stream of unknown length."},
    )
    dataset_weights: list[float] | None = field(
        default=None,
        metadata={
            "help": "With --streaming: the proportions in which the samples of several datasets are mixed. By default, "
            "they are read as one set."
        },
    )
    samples_per_epoch: int | None = field(
        default=None,
        metadata={"help": "With --streaming: the number of pairs per epoch. Without it, pass --max_steps."},
    )
    captions_per_image: int = field(
        default=1,
        metadata={"help": "Number of captions drawn per epoch from an image's list; all of them are its positives."},
    )
    negative_caption_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of captions that are wrong for the image, strings or lists. Each epoch draws one, which is "
            "a negative of all images."
        },
    )
    shuffle_buffer: int = field(
        default=2048, metadata={"help": "With --streaming: the number of samples that each lane shuffles at a time."}
    )
    lanes: int | None = field(
        default=None,
        metadata={
            "help": "With --streaming: the number of lanes that read the shards. A run can resume with other numbers "
            "of processes and workers if their product divides it. Defaults to that product at the start."
        },
    )
    guard_dataset: list[str] | None = field(
        default=None,
        metadata={
            "help": "Image-text pairs on which the model should not get worse, Hub ids or folders. Their loss and "
            "recalls are measured before the training, at every evaluation and at the end, and are part of the card."
        },
    )
    guard_split: str = field(default="test", metadata={"help": "The split of each --guard_dataset."})
    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "Delete the checkpoints and results of an earlier run in output_dir before the training."},
    )


@dataclass
class ColumnOptions:
    _argument_group_name: ClassVar[str] = "Columns of the datasets"

    image_column: str = field(default="image", metadata={"help": "Column of images, paths or encoded images."})
    caption_column: str = field(default="caption", metadata={"help": "Column of captions: a string or a list of them."})
    pair_id_column: str | None = field(
        default=None,
        metadata={
            "help": "Rows with equal values in this column are never each other's negatives. It may be the column of "
            "captions."
        },
    )

    @property
    def of_pairs(self) -> dict[str, str | None]:
        return {column.name: getattr(self, column.name) for column in fields(self)}


@dataclass
class EvaluationOptions:
    _argument_group_name: ClassVar[str] = "Evaluation"

    eval_dataset: str | None = field(
        default=None, metadata={"help": "Image-text pairs to measure the loss and retrieval on: a Hub id or a folder."}
    )
    eval_split: str = field(default="test", metadata={"help": "Split of --eval_dataset."})
    zero_shot_dataset: str | None = field(
        default=None, metadata={"help": "Labelled images to measure zero-shot classification on: a Hub id or a folder."}
    )
    zero_shot_split: str = field(default="test", metadata={"help": "Split of --zero_shot_dataset."})
    eval_pictures: int = field(
        default=0,
        metadata={
            "help": "Number of images of --eval_dataset to draw with their best captions at each evaluation, into "
            "pictures.png in --output_dir, which is pushed with the model. 0 draws none."
        },
    )
    label_column: str = field(default="label", metadata={"help": "Column of class numbers in --zero_shot_dataset."})
    class_names: list[str] | None = field(
        default=None, metadata={"help": "Names of the classes, by number. By default those stored in the dataset."}
    )
    templates: list[str] = field(
        default_factory=lambda: ["a photo of a {}."], metadata={"help": "Prompts, with {} for the name of the class."}
    )

    def __post_init__(self) -> None:
        if self.eval_pictures < 0 or (self.eval_pictures and not self.eval_dataset):
            raise ValueError(
                f"eval_pictures must be at least 0. Above 0 it also needs --eval_dataset, whose images it draws. Got "
                f"{self.eval_pictures} and --eval_dataset {self.eval_dataset}."
            )


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None, whose meaning the help of the option explains."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(HfArgumentParser):
    """Reads dataclasses from words and files, lists the package's own options first, and suggests names for typos.

    Args:
        command: the command's name, for messages.
        description: the first line of the help.
        *options: dataclasses, with `InfCLTrainingArguments` as the last.
    """

    def __init__(self, command: str, description: str, *options: Any) -> None:
        super().__init__(
            options,
            prog=f"infcl {command}",
            usage="%(prog)s [FILE.yaml or FILE.json] [--NAME VALUE ...]",
            description=description,
            formatter_class=Help,
            allow_abbrev=False,
        )

    @cached_property
    def _of_training(self) -> tuple[Any, Any]:
        return (
            self.add_argument_group("Exact contrastive training (hf_infcl.InfCLTrainingArguments)"),
            self.add_argument_group("All other options of the training (transformers.TrainingArguments)"),
        )

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Adds an option. InfCLTrainingArguments defines no group for its options, so they go into one of two."""
        if names[0] == "-h":
            return super().add_argument(*names, **settings)
        ours, transformers = self._of_training
        theirs = {f.name for f in fields(TrainingArguments)}
        name = _name(names[0])
        group = transformers if theirs & {name, name.removeprefix("no_")} else ours
        return group.add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line, which only one of several processes prints."""
        tell(self.prog, message)
        sys.exit(2)

    def read(self, words: Sequence[str]) -> tuple[argparse.Namespace, set[str]]:
        """Reads the command line, whose first word may be a YAML or JSON file of options.

        Returns:
            All options, and the names of those that the user has set.
        """
        words = list(words)
        values: dict[str, Any] = {}
        given: set[str] = set()
        try:
            if words and words[0].endswith((".yaml", ".yml", ".json")):
                values, from_file = self._read_file(Path(words[0]))
                given |= values.keys()
                words = from_file + words[1:]
            given |= {self._known(_name(word)) for word in words if re.match("--(?!help$)[^-]", word)}
        except (OSError, ValueError) as error:
            self.error(str(error))
        for action in self._actions:
            if action.dest in values:
                action.required = False
        return self.parse_args(words, argparse.Namespace(**values)), given

    def build(self, namespace: argparse.Namespace) -> tuple[Any, ...]:
        """The dataclasses in their order; an option that one of them refuses ends the program."""
        try:
            return tuple(
                options(**{f.name: getattr(namespace, f.name) for f in fields(options) if f.init})
                for options in self.dataclass_types
            )
        except (OSError, TypeError, ValueError) as error:  # a TypeError of a mapping such as accelerator_config
            self.error(str(error))
        except (ImportError, RuntimeError) as error:
            if not is_missing_package(error):
                raise
            self.error(missing_package(error))

    @cached_property
    def _kinds(self) -> dict[str, Any]:
        """The annotated type of every option."""
        kinds: dict[str, Any] = {}
        for options in self.dataclass_types:
            hints = typing.get_type_hints(options)
            kinds |= {f.name: hints[f.name] for f in fields(options) if f.init}
        return kinds

    def _known(self, name: str) -> str:
        if name in self._kinds:
            return name
        plain = name.removeprefix("no_")
        if f"--{name}" in self._option_string_actions:  # the negative form of an option that is on by default
            return plain
        kind = self._kinds.get(plain)
        if bool in (kind, *typing.get_args(kind)):
            raise ValueError(f"There is no option --{name}. Write --{plain} false.")
        known = self._kinds.keys() - {"auto_find_batch_size"}  # which is refused
        similar = difflib.get_close_matches(name, known, n=1) or sorted(k for k in known if k.endswith(f"_{name}"))
        hint = f"Did you mean {' or '.join(f'--{k}' for k in similar)}?" if similar else "--help lists all options."
        raise ValueError(f"There is no option --{name}. {hint}")

    def _read_file(self, path: Path) -> tuple[dict[str, Any], list[str]]:
        """The options of a file: values that no command line can express, and command-line words for the others."""
        values: dict[str, Any] = {}
        words: list[str] = []
        for key, (value, text) in _load(path).items():
            name = self._known(key)
            if name != key:
                raise ValueError(f"{path}: {key} only works on the command line. Write {name}: false.")
            kind = self._kinds[name]
            choices = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, UnionType) else (kind,)
            lists = [choice for choice in choices if typing.get_origin(choice) is list]
            if value is None:
                if NoneType not in choices:
                    raise ValueError(f"{path}: {name} must have a value. Omit the line to use the default.")
                values[name] = None
            elif isinstance(value, dict):
                if dict not in [typing.get_origin(choice) or choice for choice in choices]:
                    raise ValueError(f"{path}: {name} must be a single value, not a mapping.")
                values[name] = value
            elif isinstance(value, list):
                if not lists or any(item is None or isinstance(item, (dict, list)) for item in value):
                    what = "a list of single values" if lists else "a single value, not a list"
                    raise ValueError(f"{path}: {name} must be {what}.")
                (item_kind,) = typing.get_args(lists[0])
                values[name] = [item_kind(item) for item in text]
            else:
                words.append(f"--{name}={text if str in choices else value}")
        return values, words


class _Loader(yaml.SafeLoader):
    """Plain values as in YAML 1.2: `no` and dates are text, 1e-6 is a number, unlike in PyYAML's YAML 1.1."""


_TAG = "tag:yaml.org,2002:"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag == _TAG + "null"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TAG + "bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(_TAG + "int", re.compile("^[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _TAG + "float",
    re.compile(r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+0123456789."),
)


def _load(path: Path) -> dict[str, tuple[Any, Any]]:
    """The options of a file by name: each as a Python value, and again with its scalars as the text in the file."""
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
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:  # PyYAML raises all these
        raise ValueError(f"{path} cannot be read: {type(error).__name__}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must map names of options to values, but it holds a {type(values).__name__}.")
    if not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must map names of options to values; some of its keys are not text.")
    return {_name(key): (values[key], texts[key]) for key in values}


def _name(word: str) -> str:
    return word.removeprefix("--").partition("=")[0].replace("-", "_")
