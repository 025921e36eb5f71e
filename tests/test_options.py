"""Options are declared once: what is said of one in its field is what checks, helps, resumes and cards do."""

import re
from dataclasses import fields, make_dataclass
from types import SimpleNamespace

import pytest
import transformers
from helpers.trainers import arguments
from transformers import TrainingArguments

from hf_infcl import InfCLTrainingArguments
from hf_infcl.cli import commands
from hf_infcl.cli.parser import Parser
from hf_infcl.options import contrastive as theirs
from hf_infcl.options.arguments import REFUSALS, check_command
from hf_infcl.options.contrastive import ContrastiveOptions
from hf_infcl.options.declaring import (
    FINITE,
    FROM_1,
    Facts,
    check_values,
    declared_facts,
    described,
    facts_by_name,
    facts_of_theirs,
    option,
    refuse,
    values_of_card,
)
from hf_infcl.options.record import options_of_arguments

OURS = {one.name for one in fields(ContrastiveOptions)}  # the options that this package declares


@described
class Small:
    """Options as a new capability would declare them.

    Attributes:
        dose: How much. A dose of 0 is none.
        layers: How many, of which
            5% are few.
        side: Which.
        place: Where.
    """

    dose: float | None = option(card="dose of the teacher")
    layers: int = option(2, within=FROM_1)
    side: str = option("both", choices=("both", "left"), needs="dose")
    place: str | None = option(one_machine=True, choices=("cpu",))


REFUSED = {"place side=left": "there is no room", "place dose": "it works alone"}


def test_the_help_of_an_option_stands_in_the_docstring():
    helps = {one.name: one.metadata["help"] for one in fields(Small)}
    of_layers = "How many, of which 5%% are few."
    assert helps == {"dose": "How much. A dose of 0 is none.", "layers": of_layers, "side": "Which.", "place": "Where."}
    every = [*vars(commands.options).values(), ContrastiveOptions]
    declared = [one for kind in every if hasattr(kind, "_argument_group_name") for one in fields(kind)]
    assert len(declared) > 100
    assert [one.name for one in declared if not one.metadata["help"]] == []


def test_every_option_of_the_package_says_what_it_decides():
    of_transformers = {one.name for one in fields(TrainingArguments)}
    ours = [one for one in fields(InfCLTrainingArguments) if one.name not in of_transformers or one.name in OURS]
    assert len(ours) > 40
    assert {one.name for one in ours} == declared_facts(InfCLTrainingArguments).keys()


def test_facts_do_not_disturb_the_parser_of_transformers():
    (small,) = transformers.HfArgumentParser(Small).parse_args_into_dataclasses(["--dose", "2", "--side", "left"])
    assert small == Small(dose=2.0, side="left")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"layers": 1.5}, "layers must be a whole number of at least 1, got 1.5"),
        ({"dose": 1.0, "side": "right"}, "side must be one of 'both', 'left', got 'right'"),
        ({"place": "gpu"}, "place must be one of None, 'cpu', got 'gpu'"),
        ({"side": "left"}, "side=left has no effect without dose: add dose or drop side"),
        ({"dose": 1.0, "side": "left", "place": "cpu"}, "place=cpu and side=left exclude each other: there is no room"),
        ({"dose": 2.0, "place": "cpu"}, "place=cpu and dose=2 exclude each other: it works alone. Omit one of them"),
    ],
)
def test_values_are_checked_by_what_is_declared(values, message):
    def check(options: Small) -> None:
        check_values(options)
        refuse(REFUSED, options)

    for allowed in (Small(), Small(dose=1.0, layers=3, side="left"), Small(dose=0.0, place="cpu")):
        check(allowed)
    refused = Small(**values)
    with pytest.raises(ValueError, match=message):
        check(refused)


def test_a_single_value_of_a_list_is_a_list_of_one(tmp_path):
    one = {"matryoshka_dims": 8, "optimizer": "muon", "muon_parameters": "head"}
    args = arguments(tmp_path, **one, save_formats="transformers", no_decay_parameters=("head", "tail"))
    assert (args.matryoshka_dims, args.muon_parameters) == ([8], ["head"])
    assert (args.save_formats, args.no_decay_parameters) == (["transformers"], ["head", "tail"])
    with pytest.raises(ValueError, match=r"matryoshka_dims must be a list of whole numbers, got '8 16'"):
        arguments(tmp_path, matryoshka_dims="8 16")
    every = [one for one in fields(InfCLTrainingArguments) if one.name in OURS and "ist[" in str(one.type)]
    assert [one.name for one in every if not str(one.type).startswith("list[")] == []


def test_cards_have_a_row_for_each_option_that_names_one_and_is_set():
    assert list(values_of_card(Small())) == []
    assert list(values_of_card(Small(dose=0.5, layers=3))) == [("dose", "dose of the teacher", 0.5)]


def test_resumes_read_what_is_declared(tmp_path):
    facts = facts_by_name(InfCLTrainingArguments)
    assert facts.items() >= facts_by_name(theirs.of_transformers()).items()
    assert facts.items() >= facts_by_name(ContrastiveOptions).items()
    recorded = options_of_arguments(arguments(tmp_path), "no").keys()
    of_ours = {name: facts[name] for name in OURS - {"objective", "equal_ids"}}
    assert {name for name, of_one in of_ours.items() if of_one.decides} == recorded & of_ours.keys()


def test_the_short_help_lists_options_that_exist():
    parser = commands.PARSERS["train"]()
    assert isinstance(parser, Parser)
    parser.shorten()
    short = parser.format_help()
    headings = "Model:", "--model TEXT", "--lora_rank", "--teacher", "--cache_features", "Batch:"
    places = [short.index(heading) for heading in headings]
    assert places == sorted(places), "in the order of the table"


def test_an_option_of_transformers_that_is_not_known_decides():
    assert facts_of_theirs("an_option_of_tomorrow") == Facts(decides=True)
    assert not facts_of_theirs("save_something_new").decides
    known = make_dataclass("Known", ["learning_rate"])
    assert facts_by_name(known)["learning_rate"].within == FINITE


@pytest.mark.parametrize("command", ["average", "embed", "score"])
def test_commands_that_take_the_whole_model_refuse_fsdp(command):
    with pytest.raises(ValueError, match=r"^fsdp=True is not supported: .* whole"):
        check_command(command, SimpleNamespace(fsdp=True))


def test_what_a_command_refuses_are_options_of_it():
    """An unknown name would never hold, and refuse nothing."""
    of_others = {"unsupported_of_accelerate", "arguments", "overrides"}
    for kind in REFUSALS.keys() - of_others:
        command = kind.removeprefix("of_") if kind.startswith("of_") else "train"
        named = {re.split("!=|=|>", condition)[0] for row in REFUSALS[kind] for condition in row.split()}
        assert named <= commands.PARSERS[command]()._kinds.keys(), kind
