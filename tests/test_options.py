"""Options are declared once: what is said of one in its field is what checks, helps, resumes and cards do."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, make_dataclass
from typing import ClassVar

import pytest
import transformers
from helpers.trainers import arguments
from transformers import TrainingArguments

from hf_infcl import InfCLTrainingArguments
from hf_infcl.checkpoints.run_options import options_of_arguments
from hf_infcl.options import declared
from hf_infcl.options.declaring import FROM_1, NUMBER, Facts, HelpPlace, command_option, declared_facts, option
from hf_infcl.options.facts import check_values, facts_by_name, values_of_card
from hf_infcl.options.model_options import LoraOptions
from hf_infcl.options.theirs import facts_of_theirs
from hf_infcl.tools.cli.parser import Parser

OURS = {one.name for part in declared.OURS for one in fields(part)}  # the options that this package declares


@dataclass
class Small:
    """Options as a new capability would declare them."""

    dose: float | None = option(
        help="How much. A dose of 0 is none.",
        decides=True,
        card="dose of the teacher",
        short_help=HelpPlace("Model"),
        help_in_command="How much a day. A dose of 0 is none.",
    )
    layers: int = option(default=2, help="How many.", decides=True, within=FROM_1)
    side: str = option(default="both", help="Which.", decides=True, choices=("both", "left"), needs="dose")
    place: str | None = option(
        help="Where.",
        decides=False,
        one_machine=True,
        choices=lambda: ["cpu"],
        excludes={"side=left": "there is no room", "dose": "it works alone"},
    )


@dataclass
class SmallCommand:
    """Options as a command would declare them."""

    _argument_group_name: ClassVar[str] = "Small"

    spoon: str | None = command_option(help="Its spoon.", short_help=HelpPlace("Model", 5))
    bowl: str | None = command_option(help="Its bowl.", of_one_set=True)


def test_every_option_of_the_package_says_what_it_decides():
    theirs = {one.name for one in fields(TrainingArguments)}
    ours = [one for one in fields(InfCLTrainingArguments) if one.name not in theirs or one.name in OURS]
    assert len(ours) > 40
    assert [one.name for one in ours if declared_facts(one) is None] == []


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
        ({"side": "left"}, "side=left has no effect without dose. Pass both or none"),
        ({"dose": 1.0, "side": "left", "place": "cpu"}, "place=cpu and side=left exclude each other: there is no room"),
        ({"dose": 2.0, "place": "cpu"}, "place=cpu and dose=2 exclude each other: it works alone. Omit one of both"),
    ],
)
def test_values_are_checked_by_what_is_declared(values, message):
    check_values(Small())
    check_values(Small(dose=1.0, layers=3, side="left"))
    check_values(Small(dose=0.0, place="cpu"))
    with pytest.raises(ValueError, match=message):
        check_values(Small(**values))


def test_a_single_value_of_a_list_is_a_list_of_one(tmp_path):
    one = {"teacher_embeddings": "outputs/t", "matryoshka_dims": 8, "optimizer": "muon", "muon_parameters": "head"}
    args = arguments(tmp_path, **one, save_formats="transformers", no_decay_parameters=("head", "tail"))
    assert (args.teacher_embeddings, args.matryoshka_dims, args.muon_parameters) == (["outputs/t"], [8], ["head"])
    assert (args.save_formats, args.no_decay_parameters) == (["transformers"], ["head", "tail"])
    with pytest.raises(ValueError, match=r"matryoshka_dims must be a list of whole numbers, got '8 16'"):
        arguments(tmp_path, matryoshka_dims="8 16")
    every = [one for one in fields(InfCLTrainingArguments) if declared_facts(one) and "ist[" in str(one.type)]
    assert [one.name for one in every if not str(one.type).startswith("list[")] == []


def test_cards_have_a_row_for_each_option_that_names_one_and_is_set():
    assert list(values_of_card(Small())) == []
    assert list(values_of_card(Small(dose=0.5, layers=3))) == [("dose", "dose of the teacher", 0.5)]


def test_resumes_read_what_is_declared(tmp_path):
    facts = facts_by_name(InfCLTrainingArguments)
    assert facts == declared.facts_of_training()
    recorded = options_of_arguments(arguments(tmp_path), "no").keys()
    of_ours = {name: facts[name] for name in OURS - {"objective", "equal_ids"}}
    assert {name for name, of_one in of_ours.items() if of_one.decides} == recorded & of_ours.keys()


@pytest.fixture
def parser_of_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parser]:
    """The parser of a training that has the options of `Small` and `SmallCommand`, too."""
    monkeypatch.setattr(declared, "OURS", (*declared.OURS, Small))
    declared.training_options.cache_clear()
    yield Parser("train", "Trains.", SmallCommand, LoraOptions, shown=None)
    declared.training_options.cache_clear()


def test_the_short_help_lists_an_option_by_its_declaration_alone(parser_of_small):
    assert "--layers" in (whole := parser_of_small.format_help())
    assert "A dose of 0 is none." in whole
    parser_of_small.shorten()
    short = parser_of_small.format_help()
    assert re.search(r"--spoon TEXT +Its spoon\.\n", short)
    assert re.search(r"--dose X +How much a day\.\n", short)
    assert "--layers" not in short
    assert "--bowl" not in short
    headings = "Model:", "--spoon", "--lora_rank", "--teacher", "--cache_features", "--dose", "Batch:"
    places = [short.index(heading) for heading in headings]
    assert places == sorted(places), "under its heading, by its number or after all that have one"


def test_every_short_help_leaves_out_what_only_says_how_one_set_is_read():
    parser = Parser("small", "Does little.", SmallCommand, shown=("layers", "dose"))
    assert "--bowl" in parser.format_help()
    parser.shorten()
    short = parser.format_help()
    assert "--spoon" in short
    assert "--bowl" not in short


def test_a_place_is_under_a_heading_of_the_short_help():
    with pytest.raises(ValueError, match=r"heading must be one of Data, .*, got 'Modle'"):
        HelpPlace("Modle")


def test_an_option_of_transformers_that_is_not_known_decides():
    assert facts_of_theirs("an_option_of_tomorrow") == Facts(decides=True)
    assert not facts_of_theirs("save_something_new").decides
    known = make_dataclass("Known", ["save_steps"])
    assert facts_by_name(known)["save_steps"].within == NUMBER
