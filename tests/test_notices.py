"""Captions that are cut or repeated are told once, before the first step."""

import datasets
import pytest
import transformers
from helpers import models, trainers
from helpers.pictures import picture
from helpers.processors import END, LENGTH, clip_processor
from helpers.shards import pair, png, write_parquet, write_tar
from torch.utils.data import ConcatDataset, Subset

from hf_infcl import ImageTextDataset, ImageTextStream, ZeroShotDataset
from hf_infcl.card import training_facts
from hf_infcl.data import ContrastiveCollator
from hf_infcl.trainer.loaders import CaptionNotices

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONG = " ".join(LETTERS[:LENGTH])  # with the token that ends it, one more than the limit


@pytest.fixture
def warnings(monkeypatch):
    """The warnings of `hf_infcl.trainer.loaders`."""
    said: list[str] = []
    logger = transformers.utils.logging.get_logger("hf_infcl.trainer.loaders")
    monkeypatch.setattr(logger, "warning", said.append)
    return said


def pairs(captions, **options):
    rows = {"image": [picture(row, (20, 24)) for row in range(len(captions))], "caption": captions}
    return ImageTextDataset(datasets.Dataset.from_dict(rows), **options)


def trainer_for(folder, train, evaluated=None, **options):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1, **options}
    options |= {"eval_dataset": evaluated, "processing_class": clip_processor(), "data_collator": None}
    return trainers.trainer_for(folder, models.clip(end=END), train, **options)


def test_captions_that_are_cut_are_told_of_every_set_before_step_1(tmp_path, warnings):
    train = pairs([LONG, *LETTERS[:7]])
    labels = datasets.ClassLabel(names=["a", LONG])
    rows = datasets.Dataset.from_dict({"image": [picture(0), picture(1)], "label": [0, 1]}).cast_column("label", labels)
    zero_shot = ZeroShotDataset(rows, templates=["{}"])
    evaluated = {"pairs": pairs([[LONG, "a"], ["b"], ["c"]], all_captions=True), "zero_shot": zero_shot}
    trainer = trainer_for(tmp_path, Subset(ConcatDataset([train]), range(8)), evaluated, eval_strategy="steps")
    told_at = []
    trainer.add_callback(
        type("At", (transformers.TrainerCallback,), {"on_step_begin": lambda *_, **__: told_at.append(len(warnings))})()
    )
    trainer.train()
    trainer.evaluate()
    assert told_at == [3] == [len(warnings)], "told once, and before the first step"
    for line, share in zip(warnings, ("12.5% of 8", "25.0% of 4", "50.0% of 2"), strict=True):
        assert f"{share} captions of the" in line
        assert f"have more than {LENGTH} tokens" in line
    assert [name.partition(" of ")[2] for name in trainer.caption_notices.cut] == [
        "",
        "eval_pairs_*",
        "eval_zero_shot_*",
    ]
    assert trainer.caption_notices.cut["training set"] == 0.125
    facts = training_facts(trainer, model_class="CLIPModel", start="me/clip", sources=[], pair_id_column=None)
    assert [*facts.cut_captions.values()] == [0.125, 0.25, 0.5]


def test_a_set_that_is_evaluated_without_a_training_is_looked_at_too(tmp_path, warnings):
    trainer = trainer_for(tmp_path, pairs([*LETTERS[:4]]))
    trainer.evaluate(pairs([LONG, "b"], all_captions=True), metric_key_prefix="test")
    assert ["50.0% of 2 captions of the evaluation set of test_*" in line for line in warnings] == [True]


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_streams_are_told_by_a_sample_that_changes_nothing_of_the_training(tmp_path, warnings, kind):
    captions = [LONG, LONG, *LETTERS[:6]]
    if kind == "tar":
        files = [[(f"{n}.png", png(n, 20)), (f"{n}.txt", text.encode())] for n, text in enumerate(captions)]
        source = write_tar(tmp_path / "0.tar", [*pair(9)[:1], *[file for sample in files for file in sample]])
    else:
        source = write_parquet(tmp_path / "0.parquet", range(8), image=[png(n, 20) for n in range(8)], caption=captions)
    stream = ImageTextStream(str(source), on_bad_sample="skip")
    trainer = trainer_for(tmp_path / "out", stream)
    trainer.train()
    cut, repeated = warnings
    assert "25.0% of 8 captions of the training set" in cut
    assert "2 of 8 images of the training set have a caption that another one also has" in repeated
    assert trainer.state.log_history[0]["stream_samples"] == 4


def test_the_limit_counts_the_tokens_that_the_model_gets():
    collator = ContrastiveCollator(clip_processor())
    assert collator.is_cut(LONG)
    assert not collator.is_cut(LONG[:-2])
    assert len(collator.tokenize([LONG[:-2]])["input_ids"][0]) == LENGTH


@pytest.mark.parametrize(
    ("captions", "options", "count"),
    [
        (["a", "A ", *LETTERS[2:]], {}, 2),
        ([["a", "b"], ["b", "c"], *([letter] for letter in LETTERS[3:])], {}, 2),
        (["a", "a"], {"pair_id_column": "caption"}, None),
        ([*LETTERS], {}, None),
        ([["a", "a"], ["b"]], {}, None),
    ],
)
def test_repeated_captions_are_told_with_the_cure(warnings, captions, options, count):
    notices = CaptionNotices()
    for _ in range(2):
        notices.look("training set", [pairs(captions, **options)], None, batch_size=32)
    assert len(warnings) == (count is not None)
    for line in warnings:
        assert f"{count} of {len(captions)} images of the training set" in line
        assert "has 32 pairs, are each other's negatives unless you pass pair_id_column='caption' (--pair_id" in line


def test_a_training_that_is_resumed_does_not_tell_again(tmp_path, warnings):
    train = pairs([LONG, *["the same"] * 7])
    options = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    trainer_for(tmp_path, train, max_steps=2, **options).train()
    assert len(warnings) == 2
    again = trainer_for(tmp_path, train, max_steps=3, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(warnings) == 2
    assert again.caption_notices.cut["training set"] == 0.125, "the card has it"


def test_old_pairs_are_not_called_the_training_set(tmp_path, warnings):
    new, old = pairs([f"new {letter}" for letter in LETTERS[:8]]), pairs([LONG, *["the same old words"] * 7])
    trainers.trainer_for(tmp_path, models.clip(end=END), new, replay_dataset=old, max_steps=1).train()
    assert [("training set" in line, "of the replayed set have" in line) for line in warnings] == [(False, True)] * 2


def test_captions_that_repeat_are_only_told_of_a_training_set(warnings):
    CaptionNotices().look("evaluation set", [pairs(["a", "a"], all_captions=True)], None)
    assert warnings == []
