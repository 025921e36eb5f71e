"""An exponential moving average of the weights, which is evaluated and saved in place of the last ones."""

from typing import Any

import pytest
import torch
from helpers import models
from helpers.trainers import StopAt, trained, trainer_for
from helpers.wrappers import FSDP, FSDP_SHARDS, wrapped
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from hf_infcl import InfCLTrainer
from hf_infcl.optimizers import MuonAdamW
from hf_infcl.optimizers.moving_average import AVERAGE, MovingAverage

EMA = {"ema_decay": 0.6, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "muon": {"optimizer": "muon", "ema_device": "cpu"},
    "fsdp": FSDP,
    "fsdp shards": FSDP_SHARDS,
}


def whole(model: Any) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


class Weights(TrainerCallback):
    """Keeps the trained weights after each step."""

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []

    def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append(whole(model))


def trainer_of(folder: Any, *callbacks: Any, seed: int = 0, **options: Any) -> InfCLTrainer:
    given: dict[str, Any] = {**EMA, **options}
    return trainer_for(folder, models.clip(0.3, seed), models.Pairs(64), callbacks=list(callbacks), **given)


def averaged(seen: list[list[Tensor]], decay: float) -> list[Tensor]:
    """By the definition, in float64."""
    found = [p.double() for p in seen[0]]
    for number, weights in enumerate(seen):
        d = min(decay, (1 + number) / (10 + number))
        found = [d * a + (1 - d) * p.double() for a, p in zip(found, weights, strict=True)]
    return found


def rank_average(rank: int, world_size: int, folder: str, wrapper: str) -> None:
    """The model ends with the average of all steps; evaluations and saves in between do not change the training."""
    options = WRAPPERS[wrapper]
    plain, watched = Weights(), Weights()
    without = {**options, "ema_decay": None, "ema_device": None, "save_strategy": "no"}
    trainer_of(f"{folder}/plain", plain, **without).train()
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": models.Pairs(9)}
    trainer = trained(trainer_of(f"{folder}/whole", watched, **options, **evaluated))
    for before, now in zip(plain.seen, watched.seen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    last = whole(trainer.model)
    for found, expected in zip(last, averaged(watched.seen, 0.6), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(last, watched.seen[-1], strict=True))
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    trainer.save_model(f"{folder}/last")
    assert trainer.evaluate()["eval_loss"] == evaluations[-1], "that of step 4 was of the average, too"

    if "fsdp" in options:
        with pytest.raises(ValueError, match="FSDP has divided the average of each process already"):
            trainer_of(f"{folder}/host", ema_device="cpu", **options)

    # A run that is resumed from its checkpoint ends with the same bits, last weights and average.
    again = Weights()
    resumed = trainer_of(f"{folder}/whole", again, seed=5, **options, **evaluated)
    resumed.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-2")
    assert resumed.steps_trained == 2
    for before, now in zip(watched.seen[2:], again.seen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(last, whole(resumed.model), strict=True))


@pytest.mark.parametrize("changes", [{}, {"freeze": "image"}, {"load_best_model_at_end": True}])
def test_one_process_resumes_to_the_bit_after_an_interruption(tmp_path, changes):
    options = {**changes, "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": models.Pairs(9)}
    options["metric_for_best_model"] = "loss"
    trainer = trained(trainer_of(tmp_path / "whole", **options))
    trainer_of(tmp_path / "part", StopAt(2), **options).train()
    resumed = trained(trainer_of(tmp_path / "part", seed=7, **options), resume="auto")
    assert all(torch.equal(a, b) for a, b in zip(whole(trainer.model), whole(resumed.model), strict=True))
    best = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    if "load_best_model_at_end" in changes:
        assert trainer.evaluate()["eval_loss"] == min(best)


def test_the_average_begins_with_the_limited_temperature(tmp_path):
    found = Weights()
    trainer = trained(trainer_of(tmp_path, found, max_steps=1, save_strategy="no", max_logit_scale=2.0))
    assert all(torch.equal(a, b) for a, b in zip(whole(trainer.model), found.seen[0], strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_average_in_host_memory_has_the_same_bits(device):
    def averages(*, in_host: bool) -> list[Tensor]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in ((), (7,), (300, 65))]
        optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
        average = MovingAverage(optimizer, 0.9, in_host=in_host)
        for step in range(6):
            if step == 3:  # a checkpoint: torch loads all states to the device of the weights
                state, optimizer = optimizer.state_dict(), torch.optim.AdamW(weights, lr=0.1, fused=True)
                average = MovingAverage(optimizer, 0.9, in_host=in_host)
                optimizer.load_state_dict(state)
            for p in weights:
                p.grad = torch.randn_like(p)
            optimizer.step()
            average.update()
            average.evaluate()
            average.train()
        kept = [optimizer.state[p][AVERAGE] for p in weights]
        assert {one.device.type for one in kept} == {"cpu" if in_host else device}
        average.evaluate()
        return [p.detach() for p in weights]

    assert all(torch.equal(a, b) for a, b in zip(averages(in_host=True), averages(in_host=False), strict=True))


class Explode(TrainerCallback):
    """Ruins the weights after step 25; the last checkpoint is that of step 24."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 25:
            with torch.no_grad():
                model.logit_scale.fill_(4.6)
                model.visual_projection.weight.normal_()


@pytest.mark.parametrize("split", [(4, 2), (8, 1)])
def test_a_roll_back_restores_the_trained_weights_and_the_average(tmp_path, split):
    options = {"divergence_factor": 1.3, "on_divergence": "roll_back", "max_steps": 27, "save_steps": 12}
    options |= dict(zip(("per_device_train_batch_size", "gradient_accumulation_steps"), split, strict=True))
    watched = Weights()
    trainer = trained(trainer_of(tmp_path, Explode(), watched, **options))
    of_24, _, of_26, of_27 = watched.seen[23:]
    assert all(torch.equal(a, b) for a, b in zip(of_24, of_26, strict=True)), "window 26 went back"
    assert not any(torch.equal(a, b) for a, b in zip(of_26, of_27, strict=True))
    expected = averaged([*watched.seen[:24], of_27], 0.6)
    for found, wanted in zip(whole(trainer.model), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", wrapped(WRAPPERS))
def test_the_average_is_that_of_the_definition_and_resumes_to_the_bit(request, tmp_path, wrapper, backend):
    groups = request.getfixturevalue("ranks" if wrapper in ("ddp", "muon") else "fresh_ranks")
    groups.run(rank_average, 2, str(tmp_path), wrapper, backend=backend, always_ring=True)
    saved = models.tf.CLIPModel.from_pretrained(tmp_path / "last")
    if wrapper != "fsdp shards":
        checkpoint = models.tf.CLIPModel.from_pretrained(tmp_path / "whole/checkpoint-4")
        assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), checkpoint.parameters(), strict=True))


def test_what_cannot_be_averaged_is_refused(tmp_path):
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match="ema_decay must be a number of at least 0 and less than 1"):
            trainer_of(tmp_path, ema_decay=decay)
    with pytest.raises(ValueError, match="ema_device=cpu has no effect without ema_decay"):
        trainer_of(tmp_path, ema_decay=None, ema_device="cpu")
    with pytest.raises(ValueError, match=r"ema_device must be one of None, 'cpu', got 'cuda'"):
        trainer_of(tmp_path, ema_device="cuda")
    with pytest.raises(ValueError, match=r"some are in torch.bfloat16, in which the average would not move"):
        trainer_for(tmp_path, models.clip().bfloat16(), ema_decay=0.9).train()
    optimizer = MuonAdamW([torch.nn.Parameter(torch.zeros(2))])
    MovingAverage(optimizer, 0.9)
    with pytest.raises(ValueError, match="MuonAdamW averages the weights itself"):
        MovingAverage(optimizer, 0.9)


def test_batch_norms_are_told(tmp_path, caplog):
    trainer_for(tmp_path, models.align(), ema_decay=0.9)
    assert "stay those of the last weights" in caplog.text


def test_another_decay_is_another_run(tmp_path):
    trainer_of(tmp_path, StopAt(2)).train()
    with pytest.raises(ValueError, match=r"ema_decay was 0\.6 and is 0\.9"):
        trainer_of(tmp_path, ema_decay=0.9).train(resume_from_checkpoint="auto")
