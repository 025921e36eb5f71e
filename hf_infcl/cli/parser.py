"""Reads the options of a command from the command line; a file or a recipe gives other defaults.

Mistakes are told in one line, once.

Nothing here imports torch, so that ``--help`` and mistakes are answered at once.
"""

import argparse
import copy
import difflib
import itertools
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, make_dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, NoReturn, Union, cast, get_args, get_origin, get_type_hints

import transformers
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from ..files.text import without_secrets
from ..options.commands import DataOptions
from ..options.contrastive import ContrastiveOptions, of_transformers, release_of_file
from ..options.declaring import FILES, RECIPES, check_values, documented, holds, options_in, table_of_package


def print_error(command: str, message: str, *, below: bool = False) -> None:
    """Prints an error as one line, only on the first launched process that calls this.

    That process prints before it ends. The launcher then ends the other processes, whether they had the error or not.
    With ``below``, a new line begins before, because a progress bar may stand in the present one.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch.distributed import TCPStore  # here, because importing torch takes seconds

        # This is the launcher's store. The processes need not have joined a group yet.
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if store.add(f"infcl/{attempt}/{message}", 1) > 1:
            return
    line = f"{command}: error: {' '.join(without_secrets(message).split())}"
    print(f"\n{line}" if below else line, file=sys.stderr, flush=True)


def missing_package(error: Exception) -> str | None:
    """A sentence if a library needs a package that is not installed; Trainer's trackers raise a RuntimeError then."""
    is_missing = isinstance(error, (ImportError, RuntimeError)) and "install" in str(error)
    if is_missing or isinstance(error, ModuleNotFoundError):
        return f"An option needs a package that is not installed: {error}"
    return None


def about_words(left: Sequence[str], words: Sequence[str], positionals: Mapping[str, str]) -> str:
    """Says what the ``left`` words of a command line could have been, which belong to no option.

    ``positionals`` says what the words mean that stand before the options, by their names.
    """
    before = next((i for i, word in enumerate(words) if word == left[0] and not words[i - 1].startswith("--")), 0)
    option = next((word for word in reversed(words[:before]) if word.startswith("--")), "=")
    start = f"{' '.join(map(repr, left))} belong{'s' if len(left) == 1 else ''} to no option"
    if positionals:
        meanings = " ".join(f"{name}: {meaning}" for name, meaning in positionals.items())
        return f"{start}. Before the options stand {meanings}"
    if "=" in option:  # of a file, or none
        return f"{start}. Every value follows its option: --NAME VALUE."
    return f"{start}: {option} takes one value.{instead_of_several(option)}"


def instead_of_several(option: str) -> str:
    """Advice for an option that takes one value and got several, as the end of a message; empty without any."""
    if option.endswith("eval_dataset"):
        return " Measure each set with `infcl evaluate`, or name the others of a training as --guard_dataset."
    joined = "rows.map(lambda row: {'captions': [row['a'], row['b']]})"
    return f" Join several columns into one of lists: {joined} in Python." if option.endswith("caption_column") else ""


# The options here that replace those of other programs, by their names there.
ELSEWHERE = {name: ours for ours, names in table_of_package("elsewhere").items() for name in names.split()}
# What was an option, by the end of its name, and now stands behind the name of each set.
_OF_SETS = re.compile(r"(eval|zero_shot|guard|replay)_(split|image_column|caption_column|streaming)")

MOST_CHOICES = 11  # of an option that the short help lists

# Options of the machine that computes, with values that any machine has.
OF_COMPUTING = {"use_cpu": True, "torch_compile": False, "tf32": None, "fsdp": None, "ddp_backend": None}

# An option of the command line, another one of the file, and the condition under which transformers ignores the first.
_IGNORED = (
    ("num_train_epochs", "max_steps", "max_steps>0"),
    *((f"{kind}_steps", f"{kind}_strategy", f"{kind}_strategy!=steps") for kind in ("save", "eval", "logging")),
    *(("torch_compile", f"torch_compile_{name}", "torch_compile=False") for name in ("mode", "backend")),
    ("gradient_checkpointing", "activation_checkpointing", "gradient_checkpointing=False"),
)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows one spelling of an option, and its default unless that is None or False or the text tells it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_said = action.default is None or action.default is False or "default" in str(action.help)
        return action.help if is_said else super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if action.nargs in ("?", 0):  # a switch, which also takes true or false
            return action.option_strings[-1] if action.dest == "help" else action.option_strings[0]
        kinds: dict[Any, str] = {int: "N", float: "X", Path: "FILE"}
        value = action.metavar or kinds.get(action.type, "NAME" if action.choices else "TEXT")
        return f"{action.option_strings[0]} {value}{' ...' if action.nargs == '+' else ''}"


class Parser(HfArgumentParser):
    """Reads the options of a command, which is a subclass whose docstring is its help; suggests names for typos.

    Attributes:
        reads: dataclasses of options; those of the training follow them.
        shown: the names of the options of the training that ``--help`` lists beside those of the dataclasses, or by
            their headings those of all that it lists; ``--help all`` lists every one. Empty for a command without
            options of a training.
        positionals: the words before the options, which the docstring describes.
        optional: which of these, and of the required options of the dataclasses, the command can do without.
        typed, given: the names of the options on the command line, and of those there or in a file; known after `read`.
        chosen: what `intervals` has chosen for a training; known after `build`.
    """

    reads: ClassVar[tuple[type, ...]] = ()
    shown: ClassVar[Mapping[str, str] | str] = ""
    positionals: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        description, helps = documented(type(self))
        self.command = type(self).__name__.lower()
        self._recipes = DataOptions in self.reads  # whether --recipe may name one of `RECIPES`, as in a training
        names = {name: f"[{name.upper()}]" if name in self.optional else name.upper() for name in self.positionals}
        self._meanings = {shown: helps.get(name, "") for name, shown in names.items()}
        self._of_training = (ContrastiveOptions, of_transformers()) if self.shown else ()
        self._kinds: dict[str, set[Any]] = {}  # of values that each option takes, such as list and NoneType
        file = ["[FILE.yaml or FILE.json]"] if self.shown else []
        super().__init__(
            cast(Any, (*self.reads, *self._of_training)),
            prog=f"infcl {self.command}",
            usage=" ".join(["%(prog)s", *file, *self._meanings, "[--NAME VALUE ...]"]),
            description=description,
            formatter_class=partial(Help, max_help_position=34),
            allow_abbrev=False,
            add_help=False,
        )
        every: Any = {"nargs": "?", "choices": ["all"], "default": argparse.SUPPRESS}
        self.add_argument("-h", "--help", help="--help all describes every option.", **every)
        for name in self.positionals:
            number = "?" if name in self.optional else None
            self.add_argument(name, nargs=number, metavar=name.upper(), help=helps.get(name))
        if self._recipes:
            of_recipes = "Take the options of a recipe of the package as defaults. Each file in hf_infcl/recipes says "
            self.add_argument("--recipe", choices=RECIPES, help=f"{of_recipes}what it is for.")
        for action in self._actions:
            if isinstance(action, argparse._StoreFalseAction):  # --no_NAME, which is --NAME false
                action.help = argparse.SUPPRESS
            elif action.choices and action.dest != "help":
                action.help = f"{action.help} {_among(action)}"
            if action.type is string_to_bool and action.nargs is None:
                action.nargs, action.const = "?", True  # HfArgumentParser makes no switch of `bool | None`

    def shorten(self) -> None:
        """Makes the help list the options that are shown, each with the first sentence of its description."""
        known = {action.dest: action for action in reversed(self._actions)}
        if isinstance(self.shown, Mapping):
            del self._action_groups[2:]  # the first two are those of the help and of --recipe
            for heading, names in self.shown.items():
                self.add_argument_group(heading)._group_actions += [known[name] for name in names.split()]
            hidden = self._kinds.keys() - set(" ".join(self.shown.values()).split())
        else:
            hidden = {f.name for declared in self._of_training for f in fields(declared)} - set(self.shown.split())
        for action in self._actions:
            if action.dest in hidden:
                action.help = argparse.SUPPRESS
            elif action.help and action.dest != "help":
                first = re.split(r"(?<=[.]) (?=[A-Z0-9`'-])", action.help, maxsplit=1)[0]
                choices = list(map(str, action.choices or ()))
                few = len(choices) <= MOST_CHOICES and not all(choice in first for choice in choices)
                action.help = f"{first} {_among(action)}" if few else first
        self.epilog = (
            f"`{self.prog} --help all` describes these options further, and {len(hidden & known.keys())} others. In a "
            "file, they are keys with the same names. A set may state how it is read, behind its name: "
            "'my/tables?split=validation&caption_column=title'."
        )

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line, which only one of several processes prints."""
        print_error(self.prog, message)
        sys.exit(2)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Returns all options: those of the command line, and of a YAML or JSON file, its first word or a --recipe."""
        self.words = list(words)
        if {"-h", "--help"} & set(self.words):
            if self.shown and self.words[-1] != "all":
                self.shorten()
            print(self.format_help(), end="")  # print_help ignores a closed pipe
            self.exit()
        self._file = ""  # the name of the file of options
        values: dict[str, Any] = {}
        try:
            file, words = self._file_and_words(self.words)
            if file is not None:
                self._file, values = file.name, self._read_file(file)
            self.typed = {self._known(_name(word)) for word in words if re.match("--(?!help(=|$))[^-]", word)}
            self.given = values.keys() | self.typed
        except (OSError, ValueError) as error:
            self.error(str(error))
        for action in self._actions:
            action.required = action.required and action.dest not in {*self.optional, *values}
        namespace = argparse.Namespace(**values)
        # Words before all options are told first: argparse would only ask for what is required.
        first = [] if self._meanings else list(itertools.takewhile(lambda word: not word.startswith("-"), words))
        if left := first or self.parse_known_args(words, namespace)[1]:
            self.error(about_words(left, words, self._meanings))
        for option, other, condition in _IGNORED:
            if option in self.typed and self.file_of(other) and holds(namespace, condition):
                self.error(
                    f"--{option} has no effect with {other}={getattr(namespace, other)} of {self._file}. Pass "
                    f"--{other} as well."
                )
        return namespace

    def file_of(self, name: str) -> str:
        """The name of the file that sets an option which the command line does not; empty if none does."""
        return self._file if name in self.given - self.typed else ""

    def keep_only(self, namespace: argparse.Namespace, kept: Collection[str], of_file: Collection[str]) -> None:
        """Sets the options of the training to their defaults, but for some of the command line, and of the file."""
        for name in (f.name for kind in self._of_training for f in fields(kind)):
            if name not in kept or (self.file_of(name) and name not in of_file):
                setattr(namespace, name, self.get_default(name))

    def build(self, namespace: argparse.Namespace) -> tuple[Any, ...]:
        """The dataclasses, then InfCLTrainingArguments; an option that one of them refuses ends the program.

        In a training, `intervals` chooses the options that the user has not set. `infcl check` computes nothing, so
        options that only concern the machine that computes have no effect there.
        """
        try:
            return self._built(namespace)
        except (OSError, TypeError, ValueError) as error:  # a TypeError of a mapping such as accelerator_config
            named = [name for name in sorted(self.given - self.typed) if re.search(rf"\b{name}\b", str(error))]
            self.error(f"{error} {self._file} sets {', '.join(named)}." if named else str(error))
        except (ImportError, RuntimeError) as error:
            if (message := missing_package(error)) is None:
                raise
            self.error(message)

    def _built(self, namespace: argparse.Namespace) -> tuple[Any, ...]:
        from ..data.sets import STATED, read_sets
        from ..options.arguments import InfCLTrainingArguments, check_command
        from ..trainer.optimization import check_optimizer_options
        from .defaults import check_best_metric, intervals, read_alpha

        for role in STATED:
            read_sets(role, getattr(namespace, role, None))
        is_training = self.command in ("check", "train")
        self.chosen = intervals(namespace, self.given) if is_training else {}
        values = vars(namespace) | self.chosen
        if is_training:
            check_best_metric(argparse.Namespace(**values))
        values |= OF_COMPUTING if self.command == "check" else {}
        taken = {one.name for one in fields(InfCLTrainingArguments) if one.init}
        of_file = {one.name for one in fields(of_transformers())}
        if lacking := self.given & of_file - taken:
            raise ValueError(f"transformers {transformers.__version__} has no option {', '.join(sorted(lacking))}.")
        built = [kind(**{f.name: values[f.name] for f in fields(kind) if f.init}) for kind in self.reads]
        built.append(InfCLTrainingArguments(**{name: values[name] for name in taken & values.keys()}))
        for options in built[:-1]:
            check_values(options)
        merged = argparse.Namespace(**{name: value for options in built for name, value in vars(options).items()})
        check_command(self.command, merged)
        if is_training:
            read_alpha("average_with_start", merged)
            if self.command == "train" and merged.optimizer is None:
                check_optimizer_options(built[-1], transformers.Trainer.get_optimizer_cls_and_kwargs)
        return tuple(built)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        super()._add_dataclass_arguments(dtype)
        hints = get_type_hints(dtype)
        for name in (one.name for one in fields(dtype) if one.init):
            is_union = get_origin(hints[name]) in (Union, UnionType)
            several = get_args(hints[name]) if is_union else (hints[name],)
            self._kinds[name] = {get_origin(kind) or kind for kind in several}

    def _add_new_ones(self) -> None:
        """Adds the options that another release of transformers has beside those of the file."""
        types = get_type_hints(transformers.TrainingArguments)
        new = [one for one in fields(transformers.TrainingArguments) if one.init and one.name not in self._kinds]
        declared = [(one.name, types[one.name], copy.copy(one)) for one in new]
        self._add_dataclass_arguments(make_dataclass("NewOptions", declared))

    def _file_and_words(self, words: list[str]) -> tuple[Path | None, list[str]]:
        """The file of options that the first word or --recipe names, or None, and the other words."""
        of_recipe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        of_recipe.add_argument("--recipe", nargs="?", const="")
        named, rest = of_recipe.parse_known_args(words) if self._recipes else (argparse.Namespace(recipe=None), words)
        file = Path(rest[0]) if self.shown and rest and rest[0].endswith(FILES) else None
        if named.recipe is None:
            return file, words if file is None else words[1:]
        if named.recipe not in RECIPES:
            raise ValueError(
                f"There is no recipe {named.recipe!r}. The recipes are {', '.join(RECIPES)}. A file of your own is the "
                "first word of the command, without --recipe."
            )
        if file is not None:
            raise ValueError(
                f"--recipe {named.recipe} and {file} are both files of options, and a command takes one. Write the "
                "options of the other on the command line."
            )
        return RECIPES[named.recipe], ["--recipe", named.recipe, *rest]

    def _known(self, name: str) -> str:
        if self.shown and name not in self._kinds and transformers.__version__ != release_of_file():
            self._add_new_ones()
        if name in self._kinds:
            return name
        plain = name.removeprefix("no_")
        if f"--{name}" in self._option_string_actions:  # the negative form of an option that is on by default
            return plain
        if moved := _OF_SETS.fullmatch(name):
            raise ValueError(
                f"There is no option --{name}. Write it behind the name of the set: --{moved[1]}_dataset "
                f"'NAME?{moved[2]}={'true' if moved[2] == 'streaming' else 'VALUE'}'."
            )
        if bool in self._kinds.get(plain, ()):
            raise ValueError(f"There is no option --{name}. Write --{plain} false.")
        known = self._kinds.keys() - {"auto_find_batch_size"}  # which is refused
        # Options that have all words of the name, or one that is spelt alike.
        similar = sorted(one for one in known if set(name.split("_")) <= set(one.split("_")))
        if not 0 < len(similar) < 5:
            similar = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {' or '.join(f'--{k}' for k in similar)}?" if similar else "--help all lists all options."
        ours = ELSEWHERE.get(name, "")
        if not ours.startswith("--"):
            hint = ours or hint
        elif ours.removeprefix("--").split()[0].strip(",") in self._kinds:
            hint = f"Did you mean {ours}?"
        if self._meanings:
            hint += f" Before the options stand {' '.join(self._meanings)}."
        raise ValueError(f"There is no option --{name}. {hint}")

    def _read_file(self, path: Path) -> dict[str, Any]:
        """The values of the options of a file: what the command line would make of its texts, lists and mappings."""
        values: dict[str, Any] = {}
        actions = {action.dest: action for action in reversed(self._actions)}
        for key, (value, text) in options_in(path).items():
            key = _name(key)
            name = self._known(key)
            if name != key or name not in self._kinds:
                instead = f" Write {name}: false." if name in self._kinds else ""
                raise ValueError(f"{path}: {key} only works on the command line.{instead}")
            kinds = self._kinds[name]
            items = value if isinstance(value, list) and list in kinds else [value]
            if value is None and NoneType not in kinds:
                raise ValueError(f"{path}: {name} must have a value. Omit the line to use the default.")
            if name.endswith("dataset") and isinstance(value, (dict, list) if list in kinds else dict):
                values[name] = [text] if list in kinds and not isinstance(text, list) else text
            elif value is None or (isinstance(value, dict) and dict in kinds):
                values[name] = value
            elif any(one is None or isinstance(one, (dict, list)) for one in items):
                seen = "list" if isinstance(value, list) else "mapping"
                what = "a list of single values" if items is value else f"a single value, not a {seen}"
                more = instead_of_several(name) if seen == "list" else ""
                raise ValueError(f"{path}: {name} must be {what}.{more}")
            else:
                texts = text if items is value else [text if str in kinds else value]
                try:
                    read = [self._get_value(actions[name], str(one)) for one in texts]
                    for one in read:
                        self._check_value(actions[name], one)
                    values[name] = read if items is value or actions[name].nargs == "+" else read[0]
                except argparse.ArgumentError as error:
                    raise ValueError(f"{path}: {error}") from None
        return values


def _among(action: argparse.Action) -> str:
    return f"One of {', '.join(map(str, action.choices or ()))}."


def _name(word: str) -> str:
    return word.removeprefix("--").partition("=")[0].replace("-", "_")
