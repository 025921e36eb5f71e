"""Tests of what is told about ledgers, and of those that cannot be written."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from helpers.concepts import linear
from helpers.shards import numbered, write_tars
from helpers.streams import collate
from helpers.trainers import trained, trainer_for

from hf_infcl import ImageTextDataset, ImageTextStream, load_pairs
from hf_infcl.card.facts import FACTS_FILE, content_of, has_learned
from hf_infcl.cli.checking import _named
from hf_infcl.cli.embeddings import file_names, write_ledger_of_training
from hf_infcl.quality.ledger import LEDGER_FILE, SHEET_FILE, Ledger, ledger_lines


def test_scores_that_mean_nothing_advise_to_exclude_none(tmp_path):
    strange = Ledger("data", np.arange(60), np.random.default_rng(0).normal(size=60))
    (line,) = ledger_lines(strange, tmp_path)
    assert "do not mean anything yet" in line
    some = Ledger("data", np.arange(50), np.array([-1.0] + [5.0] * 49))
    (line,) = ledger_lines(some, tmp_path, waits_for="pairs score 0.6")
    assert line.startswith("Do not exclude pairs by the scores")
    none = Ledger("data", np.arange(50), np.full(50, 5.0))
    line, *_ = ledger_lines(none, tmp_path, waits_for="0.0% of the pairs score below 0")
    assert "None of 50 pairs seems wrong, but this model was trained on all of them, and may know wrong ones" in line
    first, second, *_ = ledger_lines(some, tmp_path, learned=True)
    assert first.startswith("This model was trained on these pairs")
    assert second.startswith("At least 1 of 50 pairs")


def test_a_model_that_knows_all_pairs_by_heart_is_told_how_to_go_on(tmp_path):
    """Hardly any score is below 0, so the rule of `leave_out` waits; the lowest ones may be those of wrong pairs."""
    waits_for, share = "0.5% of the pairs score below 0, and the rule begins at 1%", f"{tmp_path / LEDGER_FILE}:5%`"
    for wrong in (0, 2):
        ledger = Ledger("data", np.arange(400), np.array([-1.0] * wrong + [5.0] * (400 - wrong)))
        for of in ({"waits_for": waits_for}, {"learned": True}):
            *lines, sheet, advice = ledger_lines(ledger, tmp_path, **of)
            assert any(line.startswith("At least 2 of 400" if wrong else "None of 400") for line in lines)
            assert str(tmp_path / SHEET_FILE) in sheet
            assert f"`infcl train --exclude {share}" in advice
        assert not any(share in line for line in ledger_lines(ledger, tmp_path)), "of a model that has not seen them"
    many = Ledger("data", np.arange(400), np.array([-1.0] * 40 + [5.0] * 360))
    assert not any(share in line for line in ledger_lines(many, tmp_path, learned=True))


@pytest.mark.parametrize(
    ("settings", "content", "learned"),
    [
        ({}, "these", True),
        ({}, "others", False),
        ({}, "", False),  # of an earlier version
        ({"pairs left out": "none, because"}, "these", True),
        ({"pairs left out": "those that did not seem to belong together"}, "these", False),
        ({"pairs excluded before": "wrong"}, "these", False),
    ],
)
def test_the_record_of_a_model_says_what_it_has_learned(tmp_path, settings, content, learned):
    sources = [{"dataset": "pictures", "on_hub": False, "split": "train"}]
    names = ("name", "location", "model_class", "start", "objective", "strategy", "device")
    numbers = ("per_device_batch_size", "accumulation_steps", "processes", "steps", "seconds")
    facts = {**dict.fromkeys(names, "x"), **dict.fromkeys(numbers, 1), "start_on_hub": False, "versions": {}}
    facts |= {"sources": sources, "evaluations": [], "settings": settings, "content": content}
    (tmp_path / FACTS_FILE).write_text(json.dumps(facts))
    assert has_learned(str(tmp_path), "these") == learned
    assert has_learned(str(tmp_path / "checkpoint-3"), "these") == learned
    assert not has_learned(str(tmp_path.parent), "these"), "it has no record"


def test_other_shards_of_a_folder_and_of_the_same_sizes_are_other_data(tmp_path):
    write_tars(tmp_path / "shards", [20] * 4)
    streams = [ImageTextStream(f"{tmp_path}/shards/0000{shards}.tar") for shards in ("{0..1}", "{2..3}", "{0..1}")]
    first, second, again = map(content_of, streams)
    assert streams[0].content_fingerprint() == streams[1].content_fingerprint()
    assert first == again != second


def test_a_ledger_that_cannot_be_written_leaves_the_results(tmp_path, caplog):
    data = numbered(range(40))
    trainer = trained(trainer_for(tmp_path, linear(), data, leave_out="noisy", data_collator=collate))
    Path(tmp_path, LEDGER_FILE).mkdir()
    with caplog.at_level("WARNING"):
        assert write_ledger_of_training(trainer, data) == []
    assert "The ledger was not written." in caplog.text


def test_pairs_are_named_by_what_they_are():
    assert _named("39") == "row 39"
    assert _named("0/00000.tar 000005") == "sample 0/00000.tar 000005"
    assert _named("the rest of 0/1.tar") == "the rest of 0/1.tar"


@pytest.mark.parametrize("last", ["/set/b/3.png", None])
def test_selected_rows_have_the_names_of_their_files(last):
    images = [{"bytes": b"123", "path": path} for path in ("/set/a/0.png", "/set/b/1.png", "/set/b/2.png")]
    images.append({"bytes": None, "path": last} if last else None)
    table = datasets.Dataset.from_dict({"image": images, "caption": list("abcd")})
    selected = table.cast_column("image", datasets.Image()).select([3, 1, 0])
    pairs = ImageTextDataset(selected)
    assert file_names(pairs, np.array([0, 2])) == (["b/3.png", "a/0.png"] if last else [])
    assert list(pairs.file_sizes()) == [(1, 3), (2, 3)], "of images that are there"


def test_files_in_tar_files_are_named_after_them(tmp_path):
    write_tars(tmp_path / "a%20b", [20] * 2)
    table = load_pairs(str(tmp_path / "a%20b"), split="train", image_column="png")
    pairs = ImageTextDataset(table, image_column="png", caption_column="txt")
    assert file_names(pairs, np.array([0, 25])) == ["00000.tar 000000.png", "00001.tar 000025.png"]
