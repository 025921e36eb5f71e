"""Signals around each change of a growing global batch, and before evaluations on which a training depends."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.processes import context, on_ranks
from helpers.trainers import parameters, trained, trainer_for
from torch import Tensor
from transformers import TrainerCallback

from hf_infcl import InfCLTrainer
from hf_infcl.processes.signals import Preempted
from hf_infcl.trainer.checkpoints import choose

# 7 steps of 8 pairs, of which the fifth begins a second pass over 37 rows. With dropout the weights reveal a random
# state that was lost.
OPTIONS = {"gradient_accumulation_steps": 4, "max_steps": 7, "save_strategy": "steps", "save_steps": 2}
OPTIONS |= {"per_device_train_batch_size": 2, "learning_rate": 1e-2}
LOGGED = ("loss", "grad_norm", "learning_rate", "global_batch_size", "samples_seen", "epoch", "eval_loss", "step")


class Signal(TrainerCallback):
    """Sends this process a signal once, in the optimizer's step that follows a number of steps."""

    def __init__(self, number: int, after: int) -> None:
        self.number, self.after = number, after

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after:
            os.kill(os.getpid(), self.number)


def training(folder: Path, seed: int = 0, **options: Any) -> InfCLTrainer:
    return trainer_for(folder, models.clip(dropout=0.3, seed=seed), models.Pairs(37), **{**OPTIONS, **options})


def end_of(run: InfCLTrainer) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """What was logged, and the weights and the optimizer's moments."""
    logged = [entry for entry in run.state.log_history if {"loss", "eval_loss"} & entry.keys()]
    moments = [value for state in run.optimizer.state_dict()["state"].values() for value in state.values()]
    return [{key: entry[key] for key in LOGGED if key in entry} for entry in logged], [parameters(run), *moments]


def assert_same(run: InfCLTrainer, whole: InfCLTrainer) -> None:
    (logged, tensors), (expected, others) = end_of(run), end_of(whole)
    assert logged == expected
    assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


# ---- Around the end of a pass ----


def train_until_killed(folder: Path, after: int) -> None:
    training(folder, callbacks=[Signal(signal.SIGKILL, after)]).train()


@pytest.mark.parametrize(("after", "saved"), [(3, 2), (4, 4), (5, 4)])
def test_a_training_that_is_killed_around_the_end_of_a_pass_loses_nothing(tmp_path, once, after, saved):
    whole = once("whole", lambda: trained(training(tmp_path / "whole")))
    process = context().Process(target=train_until_killed, args=(tmp_path / "parts", after))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert choose(str(tmp_path / "parts"), "auto") == str(tmp_path / "parts" / f"checkpoint-{saved}")
    resumed = trained(training(tmp_path / "parts", seed=5), resume="auto")
    assert_same(resumed, whole)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_signal_to_one_rank_in_the_last_step_of_a_pass_loses_nothing(rank, world_size, tmp_path):
    whole = trained(training(Path(tmp_path, "whole")))
    for after in (3, 5):  # passes have four steps on one process, and two on two
        asked = [Signal(signal.SIGTERM, after)] if rank == world_size - 1 else []
        with pytest.raises(Preempted):
            training(Path(tmp_path, str(after)), callbacks=asked).train()
        resumed = trained(training(Path(tmp_path, str(after)), seed=5), resume="auto")
        assert resumed.steps_trained == 7 - (after + 1)
        assert_same(resumed, whole)


# ---- Evaluations ----

BY_METRIC = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}
EVERY = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0}}


@pytest.mark.parametrize(
    "options",
    [
        EVERY,
        {"greater_is_better": True, "early_stopping_patience": 1},
        {"load_best_model_at_end": True},
        {"load_best_model_at_end": True, "save_strategy": "best"},
    ],
    ids=["plateau", "early stopping", "best", "save the best"],
)
def test_an_evaluation_that_a_signal_ends_is_made_up_for(tmp_path, options):
    given = {**BY_METRIC, **options, "eval_dataset": models.Pairs(9, seed=3)}
    whole = trained(training(tmp_path / "whole", **given))
    with pytest.raises(Preempted):
        training(tmp_path / "parts", callbacks=[Signal(signal.SIGTERM, 3)], **given).train()
    resumed = trained(training(tmp_path / "parts", seed=5, **given), resume="auto")
    assert_same(resumed, whole)
    if "load_best_model_at_end" in options:
        assert Path(resumed.state.best_model_checkpoint).name == Path(whole.state.best_model_checkpoint).name


@pytest.mark.parametrize("strategy", ["steps", "best", "epoch"])
def test_the_evaluation_of_the_last_step_is_made_up_for_although_nothing_is_left_to_train(tmp_path, strategy):
    given = {**BY_METRIC, "load_best_model_at_end": True, "save_strategy": strategy, "eval_dataset": models.Pairs(37)}
    given |= {"eval_strategy": "epoch"} if strategy == "epoch" else {}
    whole = trained(training(tmp_path / "whole", **given))
    with pytest.raises(Preempted):
        training(tmp_path / "parts", callbacks=[Signal(signal.SIGTERM, 6)], **given).train()
    resumed = trained(training(tmp_path / "parts", seed=5, **given), resume="auto")
    assert resumed.steps_trained == 0
    assert whole.state.best_global_step == 7, "other weights than the last would be those of any earlier evaluation"
    assert resumed.state.best_model_checkpoint == f"{tmp_path}/parts/checkpoint-7"
    assert_same(resumed, whole)


def test_an_evaluation_of_several_sets_is_repeated_from_its_begin(tmp_path):
    class InSecond(TrainerCallback):
        def on_evaluate(self, *args: Any, metrics: Any = None, **kwargs: Any) -> None:
            if "eval_first_loss" in metrics:
                os.kill(os.getpid(), signal.SIGTERM)

    sets = {"first": models.Pairs(9, seed=3), "second": models.Pairs(9, seed=4)}
    given = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": sets}
    with pytest.raises(Preempted):
        training(tmp_path, callbacks=[InSecond()], **given).train()
    resumed = trained(training(tmp_path, **given), resume="auto")
    evaluated = [
        (entry["step"], name)
        for entry in resumed.state.log_history
        for name in ("eval_first_loss", "eval_second_loss")
        if name in entry
    ]
    assert evaluated == [(step, name) for step in (3, 6, 7) for name in ("eval_first_loss", "eval_second_loss")]


# ---- Signals to all processes ----


class SignalToAll(TrainerCallback):
    """Lets another process send a signal to this one and its workers, as `timeout` and a terminal do."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            subprocess.run(["kill", "-TERM", "--", f"-{os.getpgid(0)}"], check=True, start_new_session=True)
            time.sleep(0.5)  # in which a worker would end


def train_in_a_group(folder: Path) -> None:
    os.setpgid(0, 0)
    multiprocessing.set_start_method("fork", force=True)  # so that workers are of this group
    batch = {"gradient_accumulation_steps": 2, "save_steps": 100, "max_steps": 50}
    training(folder, **batch, dataloader_num_workers=2, callbacks=[SignalToAll()]).train()


def test_workers_live_on_until_the_training_has_saved(tmp_path):
    process = context().Process(target=train_in_a_group, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    assert choose(str(tmp_path), "auto") == str(tmp_path / "checkpoint-2")
