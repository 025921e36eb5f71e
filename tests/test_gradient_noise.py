"""The gradient noise scale: its formula on known gradients, and its parts against explicit contributions."""

import pytest
import torch
from helpers import models
from helpers.parity import MODELS
from helpers.processes import on_ranks
from helpers.trainers import StopAt, arguments, parameters, trained, trainer_for
from torch import nn

from hf_infcl import InfCLTrainer, reference
from hf_infcl.encoders.dual_encoder import DualEncoder
from hf_infcl.windows.extensions import of_kind
from hf_infcl.windows.gradient_noise import GradientNoise
from hf_infcl.windows.window import Window

WINDOW = Window([{"pixel_values": torch.zeros(8, 1), "input_ids": torch.zeros(8, 1)} for _ in range(4)])


def test_estimate_of_known_gradients():
    torch.manual_seed(0)
    mean, spread = torch.full((50,), 0.3), torch.linspace(0.5, 2.0, 50)
    parameter = nn.Parameter(torch.zeros(50))
    noise, every = GradientNoise([parameter], 1, 1), []
    for _ in range(300):
        gradients = mean + spread * torch.randn(4, 8, 50)  # of 4 micro-batches of 8 pairs
        noise.begin_window(WINDOW, 0)
        parameter.grad = gradients[0].mean(0) / 4
        noise.after_backward(0, 1.0)
        parameter.grad = gradients.mean((0, 1))
        noise.end_window(WINDOW, 1.0)
        every.append(noise.logs().get("gradient_noise_scale"))
    expected = (spread**2).sum() / (mean**2).sum()
    seen = torch.tensor([one for one in every[20:] if one is not None])
    assert seen.median() == pytest.approx(expected.item(), rel=0.15)


def test_micro_batches_may_differ_in_their_pairs():
    """As the halves of one that was too large."""
    sizes, parameter = (3, 2, 3, 2), nn.Parameter(torch.zeros(3))
    noise = GradientNoise([parameter], 1, 1)
    window = Window([{"pixel_values": torch.zeros(n, 1), "input_ids": torch.zeros(n, 1)} for n in sizes])
    noise.begin_window(window, 0)
    parameter.grad = torch.full((3,), 2.0) * 3 / 10  # 3 of the 10 pairs, whose mean is 2
    noise.after_backward(0, 1.0)
    parameter.grad = torch.full((3,), 1.5)
    noise.end_window(window, 1.0)
    small, big = 3 * 2.0**2, 3 * 1.5**2
    signal, spread = (10 * big - 3 * small) / 7, (small - big) / (1 / 3 - 1 / 10)
    assert noise.estimates() == pytest.approx((signal, spread))


def test_a_gradient_that_is_not_finite_is_left_out():
    """As that of a step that the scaler of fp16 skips."""
    parameter = nn.Parameter(torch.zeros(3))
    noise, logged = GradientNoise([parameter], 1, 1), []
    for factor in (float("inf"), 1.0):
        noise.begin_window(WINDOW, 0)
        parameter.grad = factor * torch.full((3,), 0.3)
        noise.after_backward(0, 1.0)
        parameter.grad = torch.ones(3)
        noise.end_window(WINDOW, 1.0)
        logged.append(noise.logs())
    # |G_8|² = 4.32 and |G_32|² = 3, so that |g|² = 2.56 and tr(Σ) = 14.08.
    assert logged == [{}, {"gradient_noise_scale": 5.5}]


@pytest.mark.parametrize(("first", "last"), [(1.0, 0.01), (0.2, 1.0)], ids=["signal", "spread"])
def test_estimates_below_their_error_have_no_scale(first, last):
    parameter = nn.Parameter(torch.zeros(3))
    noise = GradientNoise([parameter], 1, 1)
    assert noise.logs() == {}
    noise.begin_window(WINDOW, 0)
    parameter.grad = torch.full((3,), first)
    noise.after_backward(0, 1.0)
    parameter.grad = torch.full((3,), last)
    noise.end_window(WINDOW, 1.0)
    assert [estimate > 0 for estimate in noise.estimates()] == [first < last, first > last]
    assert noise.logs() == {}


def noise_of(trainer: InfCLTrainer) -> GradientNoise:
    (found,) = of_kind(trainer.window_step.extensions, GradientNoise)
    return found


def rank_noise(rank: int, world_size: int, folder: str, objective: str) -> tuple[float, float]:
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 1}
    trainer = trained(trainer_for(folder, MODELS[objective](), models.Pairs(48), **given, gradient_noise_steps=1))
    signal, noise = noise_of(trainer).estimates()
    (logs,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs.get("gradient_noise_scale") == (round(noise / signal, 1) if min(signal, noise) > 0 else None)
    return signal, noise


@pytest.mark.parametrize("objective", MODELS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_contributions_of_micro_batches_are_those_of_plain_autograd(ranks, tmp_path, world_size, objective):
    found = ranks.run(rank_noise, world_size, str(tmp_path), objective)
    model, data, batch = MODELS[objective](), models.Pairs(48), 12 * world_size
    encoder = DualEncoder(model)
    encoder.initialise_sigmoid()
    rows = torch.randperm(48, generator=torch.Generator().manual_seed(42))[:batch]
    embeds = [encoder.embed(model, data.batch(part)) for part in rows.split(4)]
    whole = [torch.cat(tower).detach().requires_grad_() for tower in zip(*embeds, strict=True)]
    reference.contrastive_loss(*whole, *encoder.scale_and_bias(), objective=objective).backward()
    temperature = [id(p) for p in encoder.temperature_parameters]
    weights = [p for p in model.parameters() if id(p) not in temperature]
    parts = []
    for number, features in enumerate(embeds):
        of_rows = [tower.grad[4 * number : 4 * number + 4] for tower in whole]
        parts.append(torch.cat([g.flatten() for g in torch.autograd.grad(features, weights, of_rows)]))
    big = sum(parts).square().sum()
    # The first micro-batch of each process is measured.
    small = torch.stack([len(parts) * parts[rank] for rank in range(world_size)]).square().sum(1).mean()
    signal, noise = (batch * big - 4 * small) / (batch - 4), (small - big) / (1 / 4 - 1 / batch)
    assert abs(signal) > 1e-3 * small, "the test says nothing"
    for seen in found:
        assert seen == pytest.approx((signal.item(), noise.item()), rel=1e-3)


def test_measuring_changes_no_weight_and_follows_its_interval(tmp_path, monkeypatch):
    measured = []
    real = GradientNoise._norm
    monkeypatch.setattr(GradientNoise, "_norm", lambda self: measured.append(1) or real(self))
    runs = [trained(trainer_for(tmp_path, max_steps=5, gradient_noise_steps=steps)) for steps in (None, 2)]
    assert torch.equal(*map(parameters, runs))
    assert len(measured) == 6, "twice in steps 0, 2 and 4"


def test_a_resumed_training_measures_the_same_steps(tmp_path, monkeypatch):
    measured = []
    real = GradientNoise._norm
    monkeypatch.setattr(GradientNoise, "_norm", lambda self: measured.append(1) or real(self))
    options = {"max_steps": 6, "gradient_noise_steps": 3, "save_strategy": "steps", "save_steps": 2}
    trainer_for(tmp_path, models.clip(), models.Pairs(40), **options, callbacks=[StopAt(2)]).train()
    assert len(measured) == 2
    trainer_for(tmp_path, models.clip(), models.Pairs(40), **options).train(resume_from_checkpoint=True)
    assert len(measured) == 4, "twice in steps 0 and 3"


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_resumed_training_goes_on_with_the_mean(rank, world_size, tmp_path):
    options = {"max_steps": 6, "gradient_noise_steps": 2, "save_strategy": "steps", "save_steps": 3}
    data = models.Pairs(24 * world_size)
    whole = trained(trainer_for(f"{tmp_path}/whole", models.clip(), data, **options))
    trainer_for(f"{tmp_path}/part", models.clip(), data, **options, callbacks=[StopAt(3)]).train()
    resumed = trained(trainer_for(f"{tmp_path}/part", data=data, **options), resume=True)
    expected, found = (noise_of(trainer).estimates() for trainer in (whole, resumed))
    assert found == pytest.approx(expected, rel=1e-5)
    history = [[e.get("gradient_noise_scale") for e in t.state.log_history if "loss" in e] for t in (whole, resumed)]
    assert history[0] == history[1]
    larger = {"gradient_accumulation_steps": 3, "resume_with_changes": True, "max_steps": 4, "gradient_noise_steps": 4}
    other = trainer_for(f"{tmp_path}/part", data=data, **{**options, **larger})
    other.train(resume_from_checkpoint=f"{tmp_path}/part/checkpoint-3")
    assert noise_of(other).estimates() is None, "that of another batch"


def test_steps_of_one_micro_batch_have_no_scale(tmp_path):
    options = {"gradient_accumulation_steps": 1, "global_batch_schedule": ["4:0.5", "8"], "max_steps": 6}
    trainer = trained(trainer_for(tmp_path, **options, gradient_noise_steps=1))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert not any("gradient_noise_scale" in entry for entry in logs if entry["global_batch_size"] == 4)
    assert len(logs) == 6


def test_wrong_intervals_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gradient_noise_steps must be a whole number of at least 1, got 0"):
        arguments(tmp_path, gradient_noise_steps=0)


@pytest.mark.parametrize("options", [{}, {"global_batch_schedule": ["2:0.5", "4"]}])
def test_a_training_without_two_micro_batches_in_a_step_is_refused(tmp_path, options):
    options |= {"gradient_noise_steps": 1, "gradient_accumulation_steps": 1}
    with pytest.raises(
        ValueError, match=r"that of 4 pairs is one micro-batch .* per_device_train_batch_size, which is 4"
    ):
        trainer_for(tmp_path, models.clip(), models.Pairs(40), **options)
