"""A metric is added by its function, its row in the table and the guide's list, and by nothing else."""

import pickle
import re
from typing import Any

import pytest
import torch
from helpers import models
from helpers.guides import ROOT
from helpers.trainers import trained, trainer_for

from hf_infcl.card import Evaluation, Source
from hf_infcl.card.cards import model_card
from hf_infcl.card.facts import TrainingFacts
from hf_infcl.card.pictures import plot_curves
from hf_infcl.evaluation import retrieval_metrics, zero_shot_metrics
from hf_infcl.evaluation.metrics import METRICS, ClassRanks, Metric, PairRanks, metric_named, metrics_of_kind, recalls

GUIDE = (ROOT / "scripts/README.md").read_text(encoding="utf-8")


def mean_rank(ranks: PairRanks) -> float:
    return 1 + ranks.images.double().mean().item()


@pytest.fixture
def _mean_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the metric "mean_rank" of pairs, of which a smaller value is better."""
    row = Metric("pairs", mean_rank, "mean rank of the image", "rank", axis="mean rank", greater_is_better=False)
    monkeypatch.setitem(METRICS, "mean_rank", row)


@pytest.mark.usefixtures("_mean_rank")
def test_a_new_metric_is_measured_and_chooses_the_best_model(tmp_path):
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "max_steps": 3}
    options |= {"metric_for_best_model": "mean_rank", "learning_rate": 0.03}
    trainer = trained(trainer_for(tmp_path, eval_dataset=models.Pairs(16), **options))
    measured = [entry["eval_mean_rank"] for entry in trainer.state.log_history if "eval_mean_rank" in entry]
    assert len({*measured}) > 1
    assert trainer.state.best_metric == min(measured), "a smaller rank is better"
    plot_curves(trainer.state.log_history, tmp_path / "with.png")
    rest = [{k: v for k, v in entry.items() if k != "eval_mean_rank"} for entry in trainer.state.log_history]
    plot_curves(rest, tmp_path / "without.png")
    assert (tmp_path / "with.png").stat().st_size > (tmp_path / "without.png").stat().st_size


@pytest.mark.usefixtures("_mean_rank")
def test_the_card_names_a_new_metric():
    evaluation = Evaluation("me/pairs", True, "test", 16, "pairs", metrics={"mean_rank": 2.5})
    facts: dict[str, Any] = {"name": "n", "location": "me/n", "model_class": "CLIPModel", "start": "me/clip"}
    facts |= {"steps": 6, "start_on_hub": True, "sources": [Source("me/pairs", True)], "pairs": 12, "strategy": "ring"}
    facts |= {"per_device_batch_size": 4, "accumulation_steps": 1, "processes": 1, "seconds": 1.0, "device": "CPU"}
    versions = {"torch": torch.__version__}
    card = model_card(
        TrainingFacts(objective="softmax", versions=versions, settings={}, evaluations=[evaluation], **facts)
    )
    assert "| mean rank of the image | 2.5000 |" in card.text
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_name) == ("rank", "mean rank of the image")


def test_the_evaluations_measure_what_the_table_says():
    rows = torch.eye(6)
    classes = zero_shot_metrics(rows, rows, torch.arange(6))
    assert list(classes) == list(metrics_of_kind("classes"))
    assert list(zero_shot_metrics(rows[:4], rows[:4], torch.arange(4))) == list(metrics_of_kind("classes", 4))
    pairs = retrieval_metrics(rows, rows, torch.arange(6))
    assert ["loss", *pairs] == list(metrics_of_kind("pairs")), "the trainer adds the loss"
    assert retrieval_metrics(rows, rows, torch.arange(6), ks=(2, 3)).keys() == recalls((2, 3)).keys()


@pytest.mark.parametrize(
    ("logged", "name"),
    [
        ("eval_pairs_loss", "loss"),
        ("loss", "loss"),
        ("eval_old_image_retrieval_recall@10", "image_retrieval_recall@10"),
        ("eval_runtime", None),
        ("eval_acc12", None),
    ],
)
def test_a_logged_name_ends_with_that_of_its_metric(logged, name):
    assert metric_named(logged) == name


def test_the_guide_lists_every_metric():
    named = re.findall(r"`eval_(?:pairs|zero_shot|voc2007_multilabel|sugarcrepe_add_att)_([\w@]+)`", GUIDE)
    assert named == list(METRICS)


def test_metrics_can_be_pickled():
    ranks = ClassRanks(torch.tensor([0, 3, 7]), torch.tensor([0, 1, 2]), 10)
    again = pickle.loads(pickle.dumps(METRICS))
    assert [again[name].measure(ranks).share() for name in ("acc1", "acc5")] == pytest.approx([1 / 3, 2 / 3])
