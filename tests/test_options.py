"""Options are declared once: what is said of one in its field is what checks, helps, resumes, plans and cards do."""

from dataclasses import dataclass, fields, make_dataclass

import pytest
import transformers
from helpers.trainers import arguments
from transformers import TrainingArguments

from hf_infcl import InfCLTrainingArguments
from hf_infcl.checkpoints.run_options import options_of_arguments
from hf_infcl.options import declared
from hf_infcl.options.declaring import FROM_1, NUMBER, Facts, facts_of, option
from hf_infcl.options.facts import check_values, facts_by_name, values_of_card
from hf_infcl.options.theirs import facts_of_theirs
from hf_infcl.tools.cli import commands


@dataclass
class Small:
    """Options as a new capability would declare them."""

    dose: float | None = option(help="How much.", decides=True, card="dose of the teacher")
    layers: int = option(default=2, help="How many.", decides=True, within=FROM_1, plans=True)
    side: str = option(default="both", help="Which.", decides=True, choices=("both", "left"), needs="dose")
    place: str | None = option(help="Where.", decides=False, one_machine=True, choices=lambda: ["cpu"])


def test_every_option_of_the_package_says_what_it_decides():
    theirs = {one.name for one in fields(TrainingArguments)}
    ours = [one for one in fields(InfCLTrainingArguments) if one.name not in theirs or one.name in declared.of_infcl()]
    assert len(ours) > 40
    assert [one.name for one in ours if facts_of(one) is None] == []


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
    ],
)
def test_values_are_checked_by_what_is_declared(values, message):
    check_values(Small())
    check_values(Small(dose=1.0, layers=3, side="left", place="cpu"))
    with pytest.raises(ValueError, match=message):
        check_values(Small(**values))


def test_cards_have_a_row_for_each_option_that_names_one_and_is_set():
    assert list(values_of_card(Small())) == []
    assert list(values_of_card(Small(dose=0.5, layers=3))) == [("dose", "dose of the teacher", 0.5)]


def test_plans_and_resumes_read_what_is_declared(tmp_path):
    facts = facts_by_name(InfCLTrainingArguments)
    assert facts == declared.facts_of_training()
    assert {name for name, of_one in facts.items() if of_one.plans} >= commands.OF_PLAN
    recorded = options_of_arguments(arguments(tmp_path), "no").keys()
    of_ours = {name: facts[name] for name in declared.of_infcl() - {"objective", "equal_ids"}}
    assert {name for name, of_one in of_ours.items() if of_one.decides} == recorded & of_ours.keys()


def test_an_option_of_transformers_that_is_not_known_decides():
    assert facts_of_theirs("an_option_of_tomorrow") == Facts(decides=True)
    assert not facts_of_theirs("save_something_new").decides
    known = make_dataclass("Known", ["save_steps"])
    assert facts_by_name(known)["save_steps"].within == NUMBER
