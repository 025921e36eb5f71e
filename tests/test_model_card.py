"""The card of a run and the picture of its curves."""

from __future__ import annotations

import math
from typing import Any

import pytest
from huggingface_hub import ModelCard
from PIL import Image
from transformers import TrainerState

from hf_infcl import InfCLTrainingArguments
from hf_infcl.publishing.model_card import Evaluation, model_card, plot_curves

ZERO_SHOT = {"acc1": 0.51234, "acc5": math.nan, "mean_per_class_recall": 0.5, "runtime": 1.5, "samples_per_second": 7.0}
PAIRS = {"loss": 1.25, "image_retrieval_recall@1": 0.25, "text_retrieval_recall@1": 0.75, "steps_per_second": 3.0}


def card(folder: Any, **changes: Any) -> ModelCard:
    args = InfCLTrainingArguments(
        output_dir=str(folder / "my-clip"),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        freeze="image",
        use_cpu=True,
    )
    values: dict[str, Any] = {
        "model_class": "CLIPModel",
        "start": "someone/clip",
        "dataset": "someone/pairs",
        "pairs": 1234,
        "objective": "softmax",
        "args": args,
        "state": TrainerState(epoch=1.5, global_step=60, max_steps=60),
        "seconds": 12.3,
    }
    return model_card(**{**values, **changes})


def test_what_the_card_says_is_what_the_hub_reads(tmp_path):
    evaluations = [
        Evaluation("someone/labelled", "validation", 300, ZERO_SHOT, ["a photo of a {}."], ["cat", "dog"]),
        Evaluation("someone/pairs", "test", 1000, PAIRS),
    ]
    card(tmp_path, evaluations=evaluations, curves="curves.png").save(tmp_path / "README.md")
    read = ModelCard.load(tmp_path / "README.md")

    assert read.data.model_name == "my-clip"
    assert read.data.library_name == "transformers"
    assert read.data.base_model == "someone/clip"
    assert read.data.datasets == ["someone/pairs"]
    results = {
        (r.task_type, r.dataset_name, r.dataset_split, r.metric_name): r.metric_value for r in read.data.eval_results
    }
    assert results == {
        ("zero-shot-image-classification", "someone/labelled", "validation", "top-1 accuracy"): 0.5123,
        ("zero-shot-image-classification", "someone/labelled", "validation", "mean per class recall"): 0.5,
        ("image-text-retrieval", "someone/pairs", "test", "contrastive loss of the whole set as one batch"): 1.25,
        ("image-text-retrieval", "someone/pairs", "test", "image retrieval recall@1"): 0.25,
        ("image-text-retrieval", "someone/pairs", "test", "text retrieval recall@1"): 0.75,
    }
    for fact in (
        "**32 pairs** = 8 per device × 4 accumulation steps × 1 process |",
        "60 optimizer steps, 1,920 pairs seen, 1.6 passes over the data",
        "| negatives | all other pairs of the batch, also of equal captions |",
        "0.001, cosine",
        "| frozen | image tower |",
        "| `someone/labelled`, validation | 300 | top-1 accuracy | 0.5123 |",
        "“a photo of a {}.”",
        '["cat", "dog"]',
        "](curves.png)",
    ):
        assert fact in read.text, fact
    assert "top-5" not in read.content, "of two classes"
    assert "during training" not in read.text.partition("## Results")[2]
    assert "bad samples" not in read.text
    assert "runtime" not in read.content
    assert "per_second" not in read.content


def test_local_paths_are_neither_told_nor_linked(tmp_path):
    for name in ("start", "pairs"):
        (tmp_path / name).mkdir()
    local = card(
        tmp_path,
        start=str(tmp_path / "start"),
        dataset=str(tmp_path / "pairs"),
        evaluations=[Evaluation(str(tmp_path / "pairs"), "test", 10, PAIRS)],
    )
    assert str(tmp_path) not in local.content
    assert local.data.base_model is None
    assert local.data.datasets is None
    assert "`start`" in local.text
    assert "`pairs`" in local.text


def test_a_card_without_results_says_so(tmp_path):
    read = card(tmp_path)
    assert "not evaluated" in read.text
    assert "model-index" not in read.data.to_dict()


def test_what_weakens_a_result_is_told(tmp_path):
    args = InfCLTrainingArguments(output_dir=str(tmp_path), eval_strategy="steps", eval_steps=5, use_cpu=True)
    state = TrainerState(global_step=10, max_steps=10, log_history=[{"skipped_samples": 2}, {"skipped_samples": 3}, {}])
    evaluations = [Evaluation("someone/pairs", "test", 1000, PAIRS)]
    text = card(tmp_path, args=args, state=state, evaluations=evaluations, pair_id_column="url").text
    assert "all other pairs of the batch but those of equal `url`" in text
    assert "3 times another row took the place of one" in text
    assert "during training too, on the same sets; the figures are of the last step" in text


def test_curves_are_drawn(tmp_path):
    history = [{"step": step, "loss": 1 / step, "learning_rate": 0.1} for step in range(1, 5)]
    plot_curves(history, tmp_path / "loss.png")
    history += [{"step": step, "eval_a_acc1": 0.5, "eval_b_loss": 1.0} for step in (2, 4)]
    plot_curves(history, tmp_path / "both.png")
    with Image.open(tmp_path / "loss.png") as one, Image.open(tmp_path / "both.png") as two:
        assert one.width == two.width > 1000
        assert two.height > 1.5 * one.height - 100, "a second panel"
        assert len(two.convert("RGB").getcolors(2**24)) > 100


def test_curves_without_losses_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no training loss"):
        plot_curves([{"step": 1, "eval_loss": 1.0}], tmp_path / "x.png")
