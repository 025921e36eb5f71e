"""A Hub that cannot be reached is asked once, whatever is loaded, and the sentence does not say what it has."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.demo import mistake
from helpers.hub import hub_for_this_process, talk_to
from huggingface_hub import constants

from hf_infcl.cli.benchmarks import benchmark_sets
from hf_infcl.data import ImageTextStream, load_pairs
from hf_infcl.data.tables import Table
from hf_infcl.files import hub
from hf_infcl.files.hub import _answers, asks_hub_once, stated_licence
from hf_infcl.models import open_clip as models
from hf_infcl.models.open_clip import convert
from hf_infcl.models.pretrained import named_tokenizer

NEITHER = "There {} at 'no-such/name': no local folder has this name, nothing of this name was downloaded before"
LOADS: dict[str, tuple[Callable[..., object], str]] = {
    "model": (models.load, "no model of this name was downloaded before"),
    "readers": (models.load_readers, "no model of this name was downloaded before"),
    "conversion": (lambda name: convert(name, Path("ours")), "no model of this name was downloaded before"),
    "tokenizer": (named_tokenizer, "no tokenizer of this name was downloaded before"),
    "table": (lambda name: load_pairs(name, split="train"), NEITHER.format("is no dataset")),
    "stream": (ImageTextStream, NEITHER.format("are no shards")),
    "shards": (lambda name: ImageTextStream(f"hf://datasets/{name}/{{0..9}}.tar"), r"'hf://.*' are on the Hub, which"),
    "pattern": (lambda name: ImageTextStream(f"hf://datasets/{name}/*.tar"), r"'hf://.*' are on the Hub, which"),
    "benchmark": (lambda name: benchmark_sets([name]), "no-such/name was not downloaded before"),
}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the Hub's client waits between attempts, of a Hub where nothing listens."""
    seconds: list[float] = []
    _answers.cache_clear()
    monkeypatch.setattr(time, "sleep", seconds.append)
    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=lambda: 0.0))  # an answer may hold for a moment only
    talk_to("http://127.0.0.1:9", monkeypatch)
    return seconds


@pytest.mark.parametrize("kind", LOADS)
def test_what_is_not_there_is_told_after_one_question(kind, waits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load, words = LOADS[kind]
    for _ in range(2):  # the answer holds
        with pytest.raises(ValueError, match=words) as told:
            load("no-such/name")
        assert "could not be reached" in str(told.value)
        assert "HF_HUB_OFFLINE" not in str(told.value), "which nobody has set"
        assert waits == [1]
        assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("name", ["./dta/imgs", "data/imgs", "dat/images"])
@pytest.mark.parametrize("answers", [False, True])
def test_what_is_near_to_a_misspelt_path_is_told_before_the_hub(waits, tmp_path, monkeypatch, name, answers):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/images").mkdir(parents=True)
    with hub_for_this_process(monkeypatch, tmp_path / "cache") if answers else nullcontext():
        for load in (models.load, lambda path: load_pairs(path, split="train"), ImageTextStream):
            with pytest.raises(ValueError, match=r"no such folder exists|There is no folder") as told:
                load(name)
            said = str(told.value)
            assert f", but there is 'data/images'. A path is relative to {tmp_path}." in said
            assert "hf download" not in said
            assert ("The Hub has nothing of this name" in said) == (name[0] != ".")
            named = r"\./nothing'(: no such folder exists| to load a model from)"
            with pytest.raises(ValueError, match=named + r"\. A path is relative to [^ ]+\.$"):
                load("./nothing")


def test_a_split_is_looked_for_without_a_question_of_its_own(waits):
    table = Table("no-such/name")
    assert table.split_to_evaluate() == "test"
    with pytest.raises(ValueError, match="There is no dataset"):
        table.load("test")
    assert waits == [1]


def test_a_licence_is_not_waited_for(waits):
    assert stated_licence("no-such/name") is None
    assert waits == [1]


@pytest.mark.parametrize("path", ["/no/folder", "./folder"])
def test_for_a_path_nothing_is_asked(path, waits):
    for load in (models.load, lambda name: load_pairs(name, split="train"), ImageTextStream):
        with pytest.raises(ValueError, match=r"There (is|are) no"):
            load(path)
    assert waits == []


def test_a_command_tells_it_in_a_line(waits, tmp_path, capsys):
    words = ["train", "--model", "no-such/model", "--dataset", "no-such/name", "--use_cpu", "--max_steps", 1]
    line = mistake(capsys, *words, "--output_dir", tmp_path)
    assert NEITHER.format("is no dataset") in line
    assert waits == [1]


def test_while_the_hub_answers_its_client_stays_online(tmp_path, monkeypatch):
    """So that the client tries again where a request fails."""
    offline: list[bool] = []

    @asks_hub_once
    def load(name: str) -> None:
        offline.append(constants.HF_HUB_OFFLINE)

    with hub_for_this_process(monkeypatch, tmp_path / "cache"):
        load("no-such/name")
    assert offline == [False]
