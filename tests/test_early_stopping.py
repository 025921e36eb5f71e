"""Trainings that end early, and best checkpoints, by a metric of one of several sets; a search for a learning rate."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import models
from helpers.demo import infcl
from helpers.guides import block_of
from helpers.trainers import arguments, trained, trainer_for
from transformers import EarlyStoppingCallback

from hf_infcl import InfCLTrainer
from hf_infcl.cli import defaults
from hf_infcl.cli.commands import PARSERS

SETS = {"near": models.Pairs(8, seed=1), "my-far set": models.Pairs(12, seed=2)}
METRIC = "my-far set_loss"


def training(folder: Path, **options: Any) -> InfCLTrainer:
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 9}
    options = {**steps, "metric_for_best_model": METRIC, "early_stopping_patience": 3, **options}
    return trainer_for(folder, eval_dataset=SETS, **options)


def test_a_training_ends_when_nothing_improves_also_after_a_resume(tmp_path):
    whole = trained(training(tmp_path / "whole", learning_rate=0.0))
    assert whole.state.global_step == 4, "the first evaluation is the best, and three others do not improve on it"
    training(tmp_path / "cut", learning_rate=0.0, max_steps=2, lr_scheduler_type="constant").train()
    resumed = trained(training(tmp_path / "cut", learning_rate=0.0, lr_scheduler_type="constant"), resume=True)
    assert resumed.state.global_step == 4
    resumed.train()
    assert resumed.state.global_step == 4, "a new training begins to count anew"


def test_the_callback_of_transformers_waits_for_the_set_of_its_metric(tmp_path, caplog):
    options: dict[str, Any] = {"learning_rate": 0.0, "early_stopping_patience": None, "load_best_model_at_end": True}
    callback = EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=0.5)
    run = training(tmp_path, **options, callbacks=[callback])
    run.train()
    assert run.state.global_step == 4, "the first evaluation is the best, and three others do not improve on it"
    assert "early stopping is disabled" not in caplog.text
    run.remove_callback(EarlyStoppingCallback)
    run.train()
    assert run.state.global_step == 9


def test_a_resume_counts_no_evaluation_again_and_trains_nothing_after_the_end(tmp_path, caplog):
    options: dict[str, Any] = {"learning_rate": 0.0, "lr_scheduler_type": "constant", "eval_on_start": True}
    for step in (1, 2, 3):  # interrupted after each
        cut = trained(training(tmp_path, **options, max_steps=step, early_stopping_patience=4), resume="auto")
        assert cut.state.global_step == step
    for patience, end, trains in (4, 5, True), (4, 5, False), (6, 7, True):
        resumed = trained(training(tmp_path, **options, early_stopping_patience=patience), resume="auto")
        assert (resumed.state.global_step, resumed.steps_trained > 0) == (end, trains)
    assert "checkpoint-5 was saved after step 5, and early_stopping_patience=4 ended the run there" in caplog.text


def test_the_best_checkpoint_is_that_of_the_best_metric_of_one_set(tmp_path):
    run = training(tmp_path, learning_rate=3e-3, max_steps=5, early_stopping_patience=9, load_best_model_at_end=True)
    run.train()
    values: dict[int, float] = {}
    for step in range(1, 6):
        entries = [entry for entry in run.state.log_history if entry["step"] == step]
        measured = {name: value for entry in entries for name, value in entry.items()}
        values[step] = measured[f"eval_{METRIC}"]
    best = min(values, key=values.__getitem__)
    assert run.state.best_metric == pytest.approx(values[best], rel=1e-12)
    assert run.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert run.evaluate()[f"eval_{METRIC}"] == pytest.approx(values[best], rel=1e-6), "its weights were loaded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_stopping_patience": 0}, "early_stopping_patience must be a whole number of at least 1, got 0"),
        ({"early_stopping_patience": 2}, "and eval_strategy=no exclude each other: there would be no evaluations"),
    ],
)
def test_what_cannot_end_a_training_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(tmp_path):
    run = training(tmp_path, metric_for_best_model="far_loss")
    with pytest.raises(ValueError, match=r"must be one of near_loss, .*, got 'far_loss'"):
        run.train()
    run = training(tmp_path, metric_for_best_model=None)
    with pytest.raises(ValueError, match="early_stopping_patience looks up metric_for_best_model"):
        run.train()


def test_the_command_keeps_the_best_model_of_a_training_that_may_end_early():
    words = ["--model", "m", "--dataset", "d", "--eval_dataset", "e", "--early_stopping_patience", "2"]
    reader = PARSERS["train"]()
    chosen = defaults.intervals(reader.read(words), reader.given)
    assert chosen["load_best_model_at_end"] is True
    assert chosen["metric_for_best_model"] == "pairs_loss"
    namespace = reader.read([*words, "--load_best_model_at_end", "false"])
    assert "load_best_model_at_end" not in defaults.intervals(namespace, reader.given)
    namespace = reader.read([*words, "--metric_for_best_model", "pairs_acc1"])
    with pytest.raises(ValueError, match="got 'pairs_acc1'"):
        defaults.check_best_metric(namespace)


def test_the_loop_of_the_guide_compares_trainings(small, tmp_path, monkeypatch):
    """Its commands, with the data and the size of a small machine."""
    loop = block_of("scripts/README.md", "for rate in ", "bash")
    values, command, comparison = re.fullmatch(r"for rate in (.*); do\n(.*)\ndone\n(.*)\n", loop, re.DOTALL).groups()
    monkeypatch.chdir(tmp_path)
    small_machine = {"--model": small[2], "--global_batch_size": 8}
    for rate in values.split():
        command_line = command.replace("\\\n", " ").replace("$rate", rate).replace("my/images", "pairs")
        words = shlex.split(command_line.replace("?split=validation", "?split=test"))[1:]
        options = {**small_machine, "--num_train_epochs": 2, "--report_to": "none", "--dataloader_num_workers": 0}
        infcl(*words, *[part for option in options.items() for part in option], "--use_cpu", "--bf16", "false")
    lines = subprocess.run(["bash", "-c", comparison], capture_output=True, text=True, check=True).stdout.splitlines()
    losses = [float(line.split()[-1].rstrip(",")) for line in lines]
    assert len(losses) == len(values.split()) == 3
    assert losses == sorted(losses)
    for line in lines:
        folder = Path(line.split("/eval_results")[0])
        assert json.loads((folder / "eval_results.json").read_text())["eval_pairs_loss"] == pytest.approx(
            json.loads((folder / "trainer_state.json").read_text())["best_metric"], rel=1e-5
        )
