"""Tests of what is told about ledgers, and of those that cannot be written."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from helpers.concepts import linear
from helpers.shards import write_tars
from helpers.streams import collate, stream_of
from helpers.trainers import trainer_for

from hf_infcl import ImageTextDataset
from hf_infcl.tools.checking.findings import _named, findings_of_ledger
from hf_infcl.tools.publishing.facts import FACTS_FILE, has_learned
from hf_infcl.tools.scoring.ledger import LEDGER_FILE, Ledger, make_ledger
from hf_infcl.tools.scoring.writing import file_names, ledger_lines, write_ledger_of_training


def test_scores_that_mean_nothing_advise_to_exclude_none(tmp_path):
    strange = make_ledger("data", np.arange(60), np.random.default_rng(0).normal(size=60))
    (line,) = ledger_lines(strange, tmp_path)
    assert "do not mean anything yet" in line
    (finding,) = findings_of_ledger(strange, "ledger")
    assert "do not mean anything yet" in finding.text
    assert (finding.options, finding.rows, finding.spoils) == ("", (), False)
    some = make_ledger("data", np.arange(50), np.array([-1.0] + [5.0] * 49))
    (line,) = ledger_lines(some, tmp_path, waits_for="pairs score 0.6")
    assert line.startswith("Do not exclude pairs by the scores")
    none = make_ledger("data", np.arange(50), np.full(50, 5.0))
    (line,) = ledger_lines(none, tmp_path, waits_for="0.0% of the pairs score below 0")
    assert "None of 50 pairs seems wrong, but this model was trained on all of them, and may know wrong ones" in line
    first, second, *_ = ledger_lines(some, tmp_path, learned=True)
    assert first.startswith("This model was trained on these pairs")
    assert second.startswith("At least 1 of 50 pairs")


def test_a_check_tells_what_the_training_of_a_ledger_left_out(tmp_path):
    ledger = make_ledger("data", np.arange(50), np.array([-1.0] + [5.0] * 49))
    ledger.left_out = np.arange(50) < 2
    ledger.write(tmp_path / LEDGER_FILE)
    read = Ledger.read(tmp_path / LEDGER_FILE)
    np.testing.assert_array_equal(read.left_out, ledger.left_out)
    (finding,) = findings_of_ledger(read, "it")
    assert finding.text.endswith("At its end the training left out 2 of 50 pairs (4.00%).")
    ledger.left_out = None
    (finding,) = findings_of_ledger(ledger, "it")
    assert "left out" not in finding.text


@pytest.mark.parametrize(
    ("settings", "split", "learned"),
    [
        ({}, "train", True),
        ({}, "test", False),
        ({"pairs left out": "none, because"}, "train", True),
        ({"pairs left out": "the worst 0.1"}, "train", False),
        ({"pairs excluded before": "wrong"}, "train", False),
    ],
)
def test_the_record_of_a_model_says_what_it_has_learned(tmp_path, settings, split, learned):
    data = tmp_path / "pictures"
    data.mkdir()
    sources = [{"dataset": "pictures", "on_hub": False, "split": split}]
    names = ("name", "location", "model_class", "start", "objective", "strategy", "device")
    numbers = ("per_device_batch_size", "accumulation_steps", "processes", "steps", "seconds")
    facts = {**dict.fromkeys(names, "x"), **dict.fromkeys(numbers, 1), "start_on_hub": False, "versions": {}}
    facts |= {"sources": sources, "evaluations": [], "settings": settings}
    (tmp_path / FACTS_FILE).write_text(json.dumps(facts))
    assert has_learned(str(tmp_path), str(data), "train") == learned
    assert has_learned(str(tmp_path / "checkpoint-3"), str(data), "train") == learned
    assert not has_learned(str(data), str(data), "train"), "it has no record"


def test_a_ledger_is_of_the_shards_that_were_trained(tmp_path, caplog):
    write_tars(tmp_path / "shards", [20] * 2)
    stream = stream_of(tmp_path / "shards")
    options = {"leave_out": "noisy", "objective": "softmax", "data_collator": collate}
    trainer = trainer_for(tmp_path, linear(), stream, **options)
    content = stream.content_fingerprint()
    trainer.train()
    Path(stream.shards[0].url).unlink()
    ledger = write_ledger_of_training(trainer, stream.plain())
    assert ledger is not None
    assert ledger.content == content
    # ---- Nowhere to write it ----
    Path(tmp_path, LEDGER_FILE).unlink()
    Path(tmp_path, LEDGER_FILE).mkdir()
    with caplog.at_level("WARNING"):
        assert write_ledger_of_training(trainer, stream) is None
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
    assert file_names(pairs, np.array([0, 2])) == (["b/3.png", "a/0.png"] if last else None)
    assert list(pairs.file_sizes()) == [(1, 3), (2, 3)], "of images that are there"
