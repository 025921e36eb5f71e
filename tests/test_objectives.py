"""An objective is added by its definition, its two forms and its row in the table, and by nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.numerics import features, relative_error, run
from helpers.trainers import trainer_for

from hf_infcl import contrastive_loss
from hf_infcl.card import Source
from hf_infcl.card.cards import model_card
from hf_infcl.card.facts import TrainingFacts
from hf_infcl.loss import OBJECTIVES, reference
from hf_infcl.loss.batch import Terms


def doubled(loss: Any) -> Any:
    def terms(*arguments: Any) -> Terms:
        once = loss(*arguments)
        return once._replace(divisor=once.divisor / 2)

    return terms


@pytest.fixture
def _twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the objective "twice", which is twice the softmax loss."""
    softmax = reference.DEFINITIONS["softmax"]
    monkeypatch.setitem(reference.DEFINITIONS, "twice", lambda *cells: 2 * softmax(*cells))
    once = OBJECTIVES["softmax"]
    row = replace(
        once,
        of_pairs=doubled(once.of_pairs),
        of_several_positives=doubled(once.of_several_positives),
        products=8,
        largest_scale=2.0,
        words="twice the softmax",
    )
    monkeypatch.setitem(OBJECTIVES, "twice", row)


def test_every_objective_is_defined():
    assert OBJECTIVES.keys() == reference.DEFINITIONS.keys()


def test_an_unknown_objective_is_refused():
    known = ", ".join(map(repr, OBJECTIVES))
    for loss in (contrastive_loss, reference.contrastive_loss):
        with pytest.raises(ValueError, match=f"objective must be one of {known}, got 'twice'"):
            loss(*features(4, 8), 10.0, objective="twice")


@pytest.mark.usefixtures("_twice")
def test_the_loss_of_a_new_objective():
    x, y = features(6, 8, dtype=torch.float64)
    ids = torch.arange(6) // 2
    for given in ({}, {"pair_ids": ids}, {"image_ids": ids, "text_ids": ids}):
        options = {"objective": "twice", **given}
        loss, gradients = run(contrastive_loss, x, y, 10.0, -1.0, torch.float64, **options)
        truth, expected = run(reference.contrastive_loss, x, y, 10.0, -1.0, torch.float64, **options)
        assert relative_error(loss, truth) < 1e-12
        for gradient, exact in zip(gradients[:3], expected[:3], strict=True):
            assert relative_error(gradient, exact) < 1e-10


@pytest.mark.usefixtures("_twice")
def test_training_and_card_know_a_new_objective(tmp_path):
    losses = {}
    for objective in ("softmax", "twice"):
        trainer = trainer_for(tmp_path, objective=objective, max_steps=1)
        losses[objective] = trainer.train().training_loss
    assert losses["twice"] == pytest.approx(2 * losses["softmax"])
    scale, *_ = trainer.dual_encoder.scale_and_bias()
    assert scale.item() == pytest.approx(2.0), "the default of max_logit_scale is the table's"

    facts: dict[str, Any] = {
        "name": "n",
        "location": "me/n",
        "model_class": "CLIPModel",
        "start": "me/clip",
        "steps": 6,
    }
    facts |= {"sources": [Source("me/pairs", True)], "start_on_hub": True, "pairs": 12, "strategy": "ring"}
    facts |= {"per_device_batch_size": 4, "accumulation_steps": 1, "processes": 1, "seconds": 1.0, "device": "CPU"}
    made = TrainingFacts(objective="twice", versions={"torch": torch.__version__}, settings={}, **facts)
    assert "| objective | twice the softmax |" in model_card(made).text
