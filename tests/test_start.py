"""Staying near the start of a training: ``keep_features``, compared with plain autograd."""

import copy
from typing import Any

import pytest
import torch
from helpers import models
from helpers.numerics import descend
from helpers.trainers import StopAt, arguments, parameters, trained, trainer_for, whole_weights
from helpers.wrappers import needs_fsdp
from torch import Tensor, nn

from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder

BETA, RATE = 3.0, 5e-3
# Two steps of the same 48 pairs; the second one begins away from the start.
PLAIN = {"max_steps": 2, "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0, "optim": "sgd"}


def build(name: str) -> nn.Module:
    return {"softmax": models.clip, "sigmoid": models.siglip}[name]()


def expected(name: str, *, freeze: str | None = None) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """The parameters after two steps of plain gradient descent, and the loss and kept term of each step."""
    model, batch = build(name), models.Pairs(48).batch()
    encoder, start = DualEncoder(model), DualEncoder(copy.deepcopy(model))
    for one in (encoder, start):
        one.initialise_sigmoid()
    encoder.freeze(freeze)
    with torch.no_grad():
        kept = start.embed(start.model, batch)
    told = []
    for _ in range(2):
        embeds = encoder.embed(model, batch)
        loss = reference.contrastive_loss(*embeds, *encoder.scale_and_bias(), objective=name).sum()
        term = BETA * sum((f - f0).square().sum(1).mean() for f, f0 in zip(embeds, kept, strict=True))
        (loss + term).backward()
        told.append((loss.item(), term.item()))
        descend(model.parameters(), RATE)
    return dict(model.named_parameters()), told


def rank_keep(rank: int, world_size: int, folder: str, name: str, steps: int, options: dict[str, Any]) -> tuple:
    options = {**PLAIN, "keep_features": BETA, "max_logit_scale": 1e6, **options}
    batch = {"per_device_train_batch_size": 48 // world_size // steps, "gradient_accumulation_steps": steps}
    trainer = trained(trainer_for(folder, build(name), models.Pairs(48), **batch, **options))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return whole_weights(trainer.model), [(entry["loss"], entry["keep_features_loss"]) for entry in logs]


def check(found: tuple, name: str, **options: Any) -> None:
    weights, told = found
    parameters_expected, told_expected = expected(name, **options)
    for (loss, term), (loss_expected, term_expected) in zip(told, told_expected, strict=True):
        assert loss == pytest.approx(loss_expected, rel=1e-5), "the loss is logged without the term"
        assert term == pytest.approx(term_expected, rel=1e-3, abs=1e-9)
    assert told[0][1] == 0
    assert told[1][1] > 1e-6
    begin = dict(build(name).named_parameters())
    for key, parameter in parameters_expected.items():
        change = (parameter - begin[key]).norm()
        error = (weights[key].reshape(parameter.shape) - parameter).norm()
        assert error <= 1e-4 * change + 1e-7, key


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("world_size", "steps"), [(1, 1), (1, 4), (2, 2), (3, 2)])
def test_steps_with_kept_features_are_those_of_autograd(ranks, tmp_path, name, world_size, steps):
    for found in ranks.run(rank_keep, world_size, str(tmp_path), name, steps, {}, always_ring=True):
        check(found, name)


def test_what_is_frozen_has_no_distance_and_its_start_does_not_run(tmp_path, monkeypatch):
    check(rank_keep(0, 1, str(tmp_path), "softmax", 2, {"freeze": "image"}), "softmax", freeze="image")
    trainer = trainer_for(tmp_path, keep_features=BETA, freeze="image", max_steps=1)
    runs = []
    original = type(trainer.model.vision_model.embeddings).forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(self is trainer.model.vision_model.embeddings)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(trainer.model.vision_model.embeddings), "forward", counted)
    trainer.train()
    assert runs == [True] * 2, "one forward of the trained model's tower for each micro-batch, and none of the start's"


def rank_fsdp(rank: int, world_size: int, folder: str) -> tuple:
    return rank_keep(rank, world_size, folder, "softmax", 2, {"use_cpu": False, "fsdp": True})


@needs_fsdp
def test_sharded_parameters_have_the_same_steps(fresh_ranks, tmp_path):
    for found in fresh_ranks.run(rank_fsdp, 2, str(tmp_path)):
        check(found, "softmax")


# ---- Resuming, refusals, plans ----


def test_a_resumed_training_keeps_to_the_start_and_not_to_the_checkpoint(tmp_path):
    options = {"keep_features": BETA, "learning_rate": RATE, "max_steps": 4}
    options |= {"save_strategy": "steps", "save_steps": 2}
    whole = trained(trainer_for(tmp_path / "whole", models.clip(), **options))
    trainer_for(tmp_path, models.clip(), **options, callbacks=[StopAt(2)]).train()
    resumed = trained(trainer_for(tmp_path, models.clip(), **options), resume=True)
    assert torch.equal(parameters(resumed), parameters(whole))
    other = trainer_for(tmp_path, models.clip(seed=1), **{**options, "max_steps": 6})
    with pytest.raises(ValueError, match=r"fingerprint of the start was '\w+' and is '\w+'"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_features": -1.0}, "keep_features must be a finite number of at least 0, got -1.0"),
    ],
    ids=["negative"],
)
def test_what_cannot_be_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)
