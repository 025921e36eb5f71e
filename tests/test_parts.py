"""Parts of `InfCLTrainer` alone, without a Trainer: evaluating, resuming, ending early, progress."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers import models
from helpers.trainers import arguments
from torch.utils.data import DataLoader
from transformers import TrainerState
from transformers.trainer_utils import EvalLoopOutput

from hf_infcl.data import ImageTextStream, transparency
from hf_infcl.loss import reference
from hf_infcl.models.counting import count_window
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.options.record import RECORD_NAME, RunRecord
from hf_infcl.step.terms import Context
from hf_infcl.step.window import Window
from hf_infcl.trainer import loop_events as progress
from hf_infcl.trainer import resuming
from hf_infcl.trainer.evaluating import Evaluator
from hf_infcl.trainer.loop_events import Progress, saved_early
from hf_infcl.trainer.resuming import Resumption


def evaluator_of(folder: Any, equal_ids: str = "exclude", **options: Any) -> tuple[Evaluator, DualEncoder]:
    encoder, args = DualEncoder(models.clip()), arguments(folder, **options)
    context = Context(encoder, Accelerator(cpu=True), args, equal_ids, lambda batch: batch)
    return Evaluator(context, None, TrainerState()), encoder


def evaluated(evaluator: Evaluator, data: Any) -> EvalLoopOutput:
    """The output of a loop like Trainer's, over batches of 4 rows."""

    def loop(batches: Any) -> EvalLoopOutput:
        torch.rand(1)  # as dropout does
        embedded = [evaluator.embed(batch) for batch in batches]
        predictions, labels = zip(*embedded, strict=True) if embedded else ((), ())
        joined = [tuple(torch.cat(parts) for parts in zip(*several, strict=True)) for several in (predictions, labels)]
        return EvalLoopOutput(*joined, {}, sum(len(images) for images, _ in predictions))

    return evaluator.run(loop, DataLoader(data, batch_size=4), "eval_mine")


@pytest.mark.parametrize(("equal_ids", "repeats"), [("exclude", 0), ("exclude", 2), ("positive", 2)])
def test_an_evaluation_is_of_the_whole_set(tmp_path, equal_ids, repeats):
    """10 rows in batches of 4: the loss of one batch and recalls among all rows; the random state stays."""
    data = models.Pairs(10, repeats=repeats)
    evaluator, encoder = evaluator_of(tmp_path, equal_ids)
    before = torch.get_rng_state()
    metrics = evaluated(evaluator, data).metrics
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        images, texts = encoder.embed(encoder.model, data.batch())
        ids = {"pair_ids": data.ids} if equal_ids == "exclude" else {"image_ids": data.ids, "text_ids": data.ids}
        loss = reference.contrastive_loss(images, texts, *encoder.scale_and_bias(), **ids)
        cosines = images @ texts.T
        ranks = (cosines >= cosines.diagonal()[:, None]).sum(1)
    assert metrics["eval_mine_loss"] == pytest.approx(loss.item(), rel=1e-5)
    for count in (1, 5):
        expected = (ranks <= count).float().mean().item()
        assert metrics[f"eval_mine_text_retrieval_recall@{count}"] == pytest.approx(expected)


def test_an_evaluation_without_rows_or_with_other_batches_is_refused(tmp_path):
    evaluator, _ = evaluator_of(tmp_path)
    with pytest.raises(ValueError, match=r"The evaluation set of eval_mine_\* is empty"):
        evaluated(evaluator, models.Pairs(0))
    with pytest.raises(ValueError, match=r"pixel_values and input_ids.* got keys \['input_ids'\]"):
        evaluator.embed({"input_ids": torch.zeros(1, 4)})
    with pytest.raises(ValueError, match=r'include_for_metrics=\["inputs"\] asks for input_ids'):
        evaluator_of(tmp_path, include_for_metrics=["inputs"])[0].embed(
            {"pixel_values": models.Pairs(1).images, "labels": torch.zeros(1)}
        )


RUN = {"global_batch_size": 8, "objective": "softmax", "seed": 1}


@pytest.fixture
def checkpoint(tmp_path):
    RunRecord(RUN, position=8, processes=2).write(tmp_path)
    return str(tmp_path)


def test_a_run_resumes_from_its_own_checkpoint_only(checkpoint, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(resuming.logger, "warning", said.append)
    Resumption(checkpoint).check(RUN, None, 2)
    Resumption().check(RUN, None, 2)
    assert not said
    changes = "objective was 'softmax' and is 'sigmoid', seed was 1 and is 2"
    with pytest.raises(ValueError, match=f"of another run: {changes}"):
        Resumption(checkpoint).check(RUN | {"objective": "sigmoid", "seed": 2}, None, 2)
    Resumption(checkpoint).check(RUN, None, 4)
    assert "was written by 2 processes, but this run has 4" in said[0]
    with pytest.raises(ValueError, match="holds no position in a stream"):
        Resumption(checkpoint).check(RUN, ImageTextStream.__new__(ImageTextStream), 2)


def test_a_resume_under_another_rule_of_transparency_says_so(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(resuming.logger, "warning", said.append)
    for rule, lines in ((transparency(), 0), ("dropped", 1)):
        RunRecord(RUN | {"transparency of images": rule}, position=8).write(tmp_path)
        Resumption(str(tmp_path)).check(RUN, None, 1)
        assert len(said) == lines
    assert f"transparency of images was dropped. With this release of transformers it is {transparency()}" in said[0]


def test_a_checkpoint_of_another_trainer_is_not_resumed(tmp_path):
    with pytest.raises(ValueError, match=f"another trainer wrote it.* Start from its weights: --model {tmp_path}"):
        Resumption(str(tmp_path)).check(RUN, None, 1)


def test_a_record_of_another_version_says_so(checkpoint):
    path = Path(checkpoint, RECORD_NAME)
    path.write_text(path.read_text().replace('"position"', '"epoch"'))
    with pytest.raises(ValueError, match=f"is of another version of hf_infcl.* its weights: --model {checkpoint}"):
        Resumption(checkpoint)


def test_a_complete_run_trains_nothing_more(checkpoint, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(resuming.logger, "warning", said.append)
    args, resumption = arguments(tmp_path / "run", max_steps=20, per_device_train_batch_size=2), Resumption(checkpoint)
    lengths: Any = {"max_steps": 20, "num_train_epochs": 4, "logging_steps": 1}
    left, complete = (  # windows of the epochs: 5, 4, 5, 4
        SimpleNamespace(state=TrainerState(global_step=step, **lengths), args=args, train_dataset=range(18))
        for step in (19, 20)
    )
    assert resumption.first_position(left, (7, 7)) == (1, 6), "three windows of two micro-batches"
    resumption.record = replace(resumption.record, position=None)
    assert resumption.first_position(left, (7, 7)) == (7, 7), "Trainer's"
    assert not said
    assert resumption.first_position(complete, (7, 7)) == (4, 0)
    assert said == [f"Nothing is left to train: {checkpoint} was saved after step 20, and the run has 20 steps."]


@pytest.mark.parametrize(
    ("trained", "saved_step", "expected"),
    [
        (False, -1, "Nothing was trained before that"),
        (True, 3, "checkpoint-3 is saved"),  # at this step already
        (True, 2, "checkpoint-3 is saved"),
    ],
)
def test_a_signal_ends_a_training_with_one_checkpoint_of_its_last_step(caplog, trained, saved_step, expected):
    saves = []

    def save(model: str, trial: str) -> None:
        saves.append((trainer.saved_step, model, trial))
        trainer.saved_step = 3

    handler = SimpleNamespace(on_save=lambda *told: saves.append(told))
    parts = {"state": TrainerState(global_step=3), "saved_step": saved_step, "callback_handler": handler}
    parts |= {"model_wrapped": "model", "args": "args", "control": "control"}
    trainer = SimpleNamespace(**parts, steps_trained=int(trained), _save_checkpoint=save)
    ended = saved_early(trainer, "trial", 15)
    assert ended.code == 128 + 15
    assert saves == ([(2, "model", "trial"), ("args", trainer.state, "control")] if saved_step == 2 else [])
    assert f"SIGTERM has ended the training after step 3. {expected}." in caplog.text


def test_progress_counts_pairs_and_seconds_across_an_interruption(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    state = TrainerState(global_step=10, stateful_callbacks={"train_seconds": 5.0})
    part = Progress(state, 8)
    encoder = DualEncoder(models.clip())
    first = {"global_batch_size": 8, "samples_seen": 80, "train_seconds": 5.0}
    assert part.logs(10, torch.device("cpu"), encoder) == first
    now[0] += 4
    logs = part.logs(12, torch.device("cpu"), encoder)
    assert (logs["samples_seen"], logs["samples_per_second"], logs["train_seconds"]) == (96, 4.0, 9.0)
    assert part.first_step == 10
    # ---- On a chip with a known peak ----
    window = Window([models.Pairs(4).batch(), models.Pairs(4).batch()])
    part.look_at(window)
    part.look_at(Window([models.Pairs(2).batch()]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(progress, "peak_of", lambda name: count_window(encoder, window.batches) / 0.5)
    now[0] += 2
    assert part.logs(13, torch.device("cuda"), encoder)["train_mfu"] == 0.25
    monkeypatch.setattr(progress, "peak_of", lambda name: None)
    now[0] += 2
    assert "train_mfu" not in part.logs(14, torch.device("cuda"), encoder)
    now[0] -= 4
    assert part.rate({"train_runtime": 2.0}, 12) == {"train_samples_per_second": 8.0}
    assert part.rate({"loss": 1.0}, 12) == {}
    now[0] += 1
    part.keep_seconds(state)
    assert state.stateful_callbacks["train_seconds"] == 10.0, "a checkpoint knows the time since the last log as well"
