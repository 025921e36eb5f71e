"""Every figure of the page of answers stands where its link leads, and its commands are accepted."""

import re
import shlex
from typing import NamedTuple

import pytest
from helpers.guides import ROOT

from hf_infcl.cli.commands import PARSERS

PAGE = "scripts/ANSWERS.md"


class Answer(NamedTuple):
    """A row of the table of the page."""

    have: str
    write: str
    gain: str
    price: str


def answers() -> list[Answer]:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    head, *rows = re.findall(r"^\| (.*) \|$", page, re.MULTILINE)
    assert head.split(" | ") == ["I have", "write", "measured gain", "price"]
    return [Answer(*row.split(" | ")) for row in rows]


ANSWERS = {answer.have: answer for answer in answers()}


def section(link: str) -> str:
    """The part of a page that a link names, up to the next heading."""
    path, anchor = link.split("#")
    text = (ROOT / PAGE).parent.joinpath(path).read_text(encoding="utf-8")
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        if re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lower()).replace(" ", "-") == anchor:
            return part
    raise AssertionError(f"{path} has no section {anchor}")


LINK = re.compile(r"\[([^]]*)\]\(([^)]*)\)")


@pytest.mark.parametrize("name", ANSWERS)
def test_every_figure_stands_where_its_link_leads(name):
    links = LINK.findall(ANSWERS[name].gain + ANSWERS[name].price)
    assert links or ANSWERS[name].gain == "not measured"
    check(links)


def test_the_figures_of_embedders_stand_where_their_link_leads():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    links = [link for link in LINK.findall(page) if link[1].endswith("#any-embedder")]
    assert links
    check(links)


def check(links: list[tuple[str, str]]) -> None:
    for words, link in links:
        figures = re.findall(r"\d[\d,]*(?:\.\d+)?", words)
        assert figures, words
        for figure in figures:
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d|[.,]\d)", section(link)), f"{figure} in {link}"


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_to_be_written_is_accepted(name):
    words = shlex.split(ANSWERS[name].write.strip("`").replace("torchrun --nproc_per_node 8 -m hf_infcl ...", ""))
    given = ["--dataset", "my/images", "--eval_dataset", "my/images", "--model", "my/clip", "--output_dir", "out"]
    namespace = (parser := PARSERS["train"]()).read([*words, *given])
    assert {word[2:] for word in words if word.startswith("--")} <= parser.given
    assert namespace.output_dir == "out"


@pytest.mark.parametrize("name", [name for name in ANSWERS if "random weights" in name + ANSWERS[name].gain])
def test_what_was_measured_from_random_weights_says_with_which_optimizer(name):
    assert "with AdamW" in ANSWERS[name].gain
    assert "with Muon" in ANSWERS[name].gain


def test_the_page_has_answers_for_random_weights():
    assert len(ANSWERS) == 15
    assert sum("random weights" in name + answer.gain for name, answer in ANSWERS.items()) == 7
