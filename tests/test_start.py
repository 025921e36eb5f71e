"""Staying near the start of a training: ``keep_features`` and ``keep_weights``, compared with plain autograd."""

import copy
from typing import Any

import pytest
import torch
from helpers import models
from helpers.numerics import descend
from helpers.trainers import StopAt, arguments, parameters, trained, trainer_for, whole_weights
from helpers.wrappers import needs_fsdp
from torch import Tensor, nn

from hf_infcl import InfCLTrainer, reference
from hf_infcl.encoders.dual_encoder import DualEncoder

BETA, STRENGTH, RATE = 3.0, 20.0, 5e-3
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


# ---- Weights ----


def pulled(folder: Any, model: nn.Module | None = None, **options: Any) -> InfCLTrainer:
    defaults = {"max_steps": 3, "learning_rate": RATE, "keep_weights": STRENGTH, "lr_scheduler_type": "constant"}
    return trainer_for(folder, model or models.clip(), **{**defaults, **options})


@pytest.mark.parametrize("options", [{}, {"optimizer": "muon"}, {"layer_decay": 0.5}], ids=["adamw", "muon", "rates"])
def test_each_step_pulls_what_would_decay(tmp_path, options):
    """The same training with weight decay, whose every step is followed by what the start adds."""
    trainer = trained(pulled(tmp_path, **options))
    start = {name: p.detach().clone() for name, p in models.clip().named_parameters()}
    other = pulled(tmp_path, **{**options, "keep_weights": None, "weight_decay": STRENGTH})
    decaying = set(other.get_decay_parameter_names(other.model))
    named = {p: name for name, p in other.model.named_parameters()}

    def add(optimizer: Any, *args: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if named[p] in decaying:
                        p += group["lr"] * STRENGTH * start[named[p]]

    other.create_optimizer().register_step_post_hook(add)
    other.train()
    weights, begin = dict(trainer.model.named_parameters()), nn.utils.parameters_to_vector(start.values())
    difference = torch.cat([(weights[n] - p).detach().flatten() for p, n in named.items() if n in decaying])
    change = parameters(trainer) - begin
    # AdamW and Muon magnify the rounding of a gradient.
    assert difference.norm() <= (0.05 if options.get("optimizer") else 0.005) * change.norm()
    free = trained(pulled(tmp_path, **{**options, "keep_weights": None}))
    assert change.norm() < 0.99 * (parameters(free) - begin).norm()


def test_adapters_decay_to_zero(tmp_path):
    peft = pytest.importorskip("peft")

    def train(**options: Any) -> Tensor:
        torch.manual_seed(1)
        model = peft.get_peft_model(models.clip(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
        trainer = trained(pulled(tmp_path, model, **options))
        return parameters(trainer)

    torch.testing.assert_close(train(), train(keep_weights=None, weight_decay=STRENGTH), rtol=1e-4, atol=1e-6)


def rank_pulled(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> list[Tensor]:
    trainer = trained(pulled(folder, per_device_train_batch_size=6 // world_size, keep_features=BETA, **options))
    return [weight.reshape(-1) for weight in whole_weights(trainer.model).values()]


def near(found: list[Tensor], expected: list[Tensor]) -> bool:
    start = nn.utils.parameters_to_vector(models.clip().parameters())
    now, then = torch.cat(found), torch.cat(expected)
    return bool((now - then).norm() <= 0.01 * (then - start).norm())


@needs_fsdp
def test_processes_pull_as_one(ranks, fresh_ranks, tmp_path):
    sgd = {"optim": "sgd"}  # AdamW would turn the rounding of gradients into steps
    (one,) = ranks.run(rank_pulled, 1, str(tmp_path), sgd)
    for world_size in (2, 3):
        assert all(near(found, one) for found in ranks.run(rank_pulled, world_size, str(tmp_path), sgd))
    sharded = fresh_ranks.run(rank_pulled, 2, str(tmp_path), {**sgd, "use_cpu": False, "fsdp": True})
    assert all(near(found, one) for found in sharded)


# ---- Resuming, refusals, plans ----


def test_a_resumed_training_keeps_to_the_start_and_not_to_the_checkpoint(tmp_path):
    options = {"keep_features": BETA, "keep_weights": STRENGTH, "learning_rate": RATE, "max_steps": 4}
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
        (
            {"keep_weights": 1.0, "weight_decay": 0.1},
            "keep_weights=1 and weight_decay=0.1 exclude each other: the one pulls",
        ),
        ({"keep_weights": 1.0, "optim": "schedule_free_adamw"}, "of which schedule-free optimizers have two sets"),
    ],
    ids=["negative", "decay", "schedule-free"],
)
def test_what_cannot_be_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


def test_a_pull_beyond_the_start_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"keep_weights=300 times the learning rate 0\.005 is 1\.5"):
        pulled(tmp_path, keep_weights=300.0).train()
