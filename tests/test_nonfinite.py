"""A window with non-finite numbers or an exploding loss is refused on all processes, or skipped without a trace."""

import math
from typing import Any

import pytest
import torch
from helpers import models
from helpers.processes import on_ranks
from helpers.trainers import StopAt, parameters, trained, trainer_for
from transformers import TrainerCallback

from hf_infcl.step import step

# The second of three windows is bad. Rows are not shuffled.
OPTIONS = {"max_steps": 3, "learning_rate": 1e-2, "train_sampling_strategy": "sequential"}


def pairs(rows: int, bad: Any = ()) -> models.Pairs:
    data = models.Pairs(rows)
    data.images[list(bad), 0, 3, 3] = math.nan
    return data


# ---- Refused ----


def rank_refused(rank: int, world_size: int, folder: str, row: int, where: str) -> tuple[str, bool]:
    data = models.Pairs(40)
    if where == "embeddings":
        data.images[row] = math.nan
    trainer = trainer_for(folder, data=data, max_steps=4)
    before: list[torch.Tensor] = []
    backwards: list[int] = []  # the step of each

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        backwards.append(trainer.state.global_step)
        first = backwards.count(1) == 1  # the first micro-batch in the second window
        return gradient * math.nan if rank == 1 and first else gradient

    if where == "gradient":
        trainer.model.visual_projection.weight.register_hook(spoil)
    trainer.add_callback(Remember(before, trainer))
    with pytest.raises(ValueError, match=r"is not finite|because") as error:
        trainer.train()
    return str(error.value), torch.equal(before[-1], parameters(trainer))


class Remember(TrainerCallback):
    """Keeps the weights after every step."""

    def __init__(self, weights: list[torch.Tensor], trainer: Any) -> None:
        self.weights, self.trainer = weights, trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.weights.append(parameters(self.trainer))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.weights.append(parameters(self.trainer))


def test_the_rows_whose_embeddings_are_not_finite_are_named_on_all_processes(ranks, tmp_path):
    # Row 7 of the micro-batches of rank 1 in the second window of the epoch's permutation.
    order = torch.randperm(40, generator=torch.Generator().manual_seed(42)).tolist()
    row = order[16 + 8 + 4 + 2]  # window 1, micro-batch 1, rank 1, row 2
    for message, unchanged in ranks.run(rank_refused, 2, str(tmp_path), row, "embeddings"):
        place = f"rank 1: image embeddings of micro-batch 1, row 2 ({row} of the training set)."
        assert f"The loss of the global batch after step 1 is nan, because these are not finite: {place}" in message
        assert unchanged


def test_the_parameters_whose_gradient_is_not_finite_are_named_on_all_processes(ranks, tmp_path):
    for message, unchanged in ranks.run(rank_refused, 2, str(tmp_path), 0, "gradient"):
        assert "The gradient of the global batch after step 1 is not finite: " in message
        assert "ranks 0, 1: visual_projection.weight; rank 1: micro-batch 0." in message
        assert unchanged


def test_the_rows_whose_gradient_is_not_finite_are_named(tmp_path, monkeypatch):
    trainer = trainer_for(tmp_path, **OPTIONS, data=models.Pairs(24))

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, features: torch.Tensor) -> torch.Tensor:
            return features.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient[6] = math.inf
            return gradient

    plain = step.loss_of_window

    def spoilt(context: Any, window: Any, features: Any, *others: Any) -> torch.Tensor:
        return plain(context, window, (features[0], Spoil.apply(features[1])), *others)

    monkeypatch.setattr(step, "loss_of_window", spoilt)
    with pytest.raises(ValueError, match=r"rank 0: text embeddings of micro-batch 1, row 2 \(6 of the training set\)"):
        trainer.train()


# ---- Skipped ----


class NotFinite(TrainerCallback):
    """Makes the gradient of the second window infinite, or the gradients of all windows."""

    def __init__(self, trainer: Any, steps: Any) -> None:
        weight = trainer.model.text_projection.weight
        weight.register_hook(lambda g: g * math.inf if trainer.state.global_step in steps else g)


def check_skips(folder: str, where: str) -> None:
    size = 8 if not torch.distributed.is_initialized() else 8 * torch.distributed.get_world_size()
    bad = [size + 3] if where == "embeddings" else []
    trainer = trainer_for(folder, data=pairs(3 * size, bad), **OPTIONS, skip_nonfinite=1)
    if where == "gradient":
        NotFinite(trainer, [1])
    trainer.train()
    # The same training without the rows of that window. The learning rate falls in two of three steps.
    data = models.Pairs(3 * size)
    for name in ("images", "tokens"):
        values = getattr(data, name)
        setattr(data, name, torch.cat([values[:size], values[2 * size :], values[:size]]))
    expected = trained(trainer_for(folder, data=data, **OPTIONS, callbacks=[StopAt(2)]))
    assert torch.equal(parameters(trainer), parameters(expected))
    assert trainer.lr_scheduler.state_dict() == expected.lr_scheduler.state_dict()
    states = [t.optimizer.state_dict()["state"] for t in (trainer, expected)]
    assert all(torch.equal(one[k], other[k]) for one, other in zip(*map(dict.values, states), strict=True) for k in one)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry.get("skipped_windows", 0) for entry in logs] == [0, 1, 1]
    assert logs[1]["loss"] == logs[0]["loss"], "that of the window before"
    assert [entry["loss"] for entry in logs[::2]] == [e["loss"] for e in expected.state.log_history if "loss" in e]


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_skipped_window_changes_neither_weights_nor_optimizer_nor_schedule(rank, world_size, tmp_path):
    for where in ("embeddings", "gradient"):
        check_skips(tmp_path, where)


def test_a_skipped_window_changes_no_running_statistics(tmp_path):
    data = pairs(6, [4, 5])
    data.images = torch.nn.functional.interpolate(data.images, (32, 32))
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "weight_decay": 0.0}
    trainer = trained(trainer_for(tmp_path, models.align(), data, **{**OPTIONS, **options}, skip_nonfinite=1))
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    assert trainer.window_step.checks.skipped == 1


def test_a_resume_goes_on_counting_the_windows_that_were_skipped_after_the_last_log(tmp_path):
    options = {**OPTIONS, "skip_nonfinite": 1, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3}
    trainer_for(tmp_path, data=pairs(24, [9]), **options, callbacks=[StopAt(2)]).train()
    resumed = trained(trainer_for(tmp_path, data=pairs(24, [9]), **options), resume=True)
    assert [entry["skipped_windows"] for entry in resumed.state.log_history if "loss" in entry] == [1]


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_windows_in_a_row_are_skipped_than_allowed(tmp_path, most):
    step, kept = trainer_for(tmp_path, skip_nonfinite=most).window_step, []
    checks = step.checks
    for bad in (False, True, False, True):
        checks.begin_window(step.wrapper)
        if bad:
            checks.refuse("It is nan.")
        else:
            checks.end_window()
        kept.append(not checks.skipping)
    assert kept == [True, False, True, False]
    checks.begin_window(step.wrapper)
    if most == 1:
        with pytest.raises(ValueError, match=r"^It is nan\. Steps skipped just before it: 1\."):
            checks.refuse("It is nan.")
    else:
        checks.refuse("It is nan.")
    assert checks.skipped == most + 1


def test_a_resume_remembers_the_last_loss_and_the_windows_skipped_in_a_row(tmp_path):
    # The bad windows are 2 and 3, and the checkpoint lies between them.
    options = {**OPTIONS, "skip_nonfinite": 1, "save_strategy": "steps", "save_steps": 2}
    first = trained(trainer_for(tmp_path, data=pairs(24, [8, 16]), **options, callbacks=[StopAt(2)]))
    resumed = trainer_for(tmp_path, data=pairs(24, [8, 16]), **options)
    with pytest.raises(ValueError, match=r"after step 2 is nan, .*\. Steps skipped just before it: 1\."):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.window_step.checks.last_loss == first.window_step.checks.last_loss


def scaled(trainer: Any, scale: float) -> Any:
    """Makes the trainer scale its loss as in fp16, which accelerate does only on GPUs."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return trainer


def test_a_scaler_that_skips_a_step_is_counted(tmp_path):
    trainer = scaled(trainer_for(tmp_path, data=models.Pairs(24), **OPTIONS, max_grad_norm=0.0), 1024.0)
    NotFinite(trainer, [1])
    trainer.train()
    assert trainer.window_step.checks.skipped == 1
    assert trainer.lr_scheduler.last_epoch == 2
    assert trainer.accelerator.scaler.get_scale() == 512.0


def test_a_scaler_skips_a_window_whose_loss_is_not_finite(tmp_path):
    options = {**OPTIONS, "skip_nonfinite": 1, "max_grad_norm": 0.0}
    trainer = trained(scaled(trainer_for(tmp_path, data=pairs(24, [9]), **options), 1024.0))
    assert trainer.window_step.checks.skipped == 1
    assert parameters(trainer).isfinite().all()
    assert trainer.lr_scheduler.last_epoch == 2
    assert trainer.accelerator.scaler.get_scale() == 512.0


def test_a_gradient_that_overflows_without_being_scaled_up_is_refused(tmp_path):
    checks = trainer_for(tmp_path).window_step.checks
    checks.end_window(1.0)
    with pytest.raises(ValueError, match=r"not finite in fp16, although the loss is scaled by 0\.5 only"):
        checks.end_window(0.5)


# ---- Losses that are zero ----


def test_a_loss_without_negatives_is_told(tmp_path, caplog):
    equal, one = models.Pairs(8), {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    equal.ids = torch.zeros(8, dtype=torch.int64)
    for data, options in ((equal, {}), (models.Pairs(1), one)):
        caplog.clear()
        trainer_for(tmp_path, data=data, **options).train()
        assert caplog.text.count("The loss and its gradient are exactly 0, so the model learns nothing") == 1
    caplog.clear()
    trainer_for(tmp_path).train()
    assert "learns nothing" not in caplog.text
