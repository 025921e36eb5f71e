"""Pushes to the Hub and a resume from it, with the real Hub client, which talks to a double on this machine."""

import concurrent.futures
import errno
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from helpers import models
from helpers.hub import Hub, talk_to
from helpers.processors import clip_processor
from helpers.trainers import StopAt, parameters, trained, trainer_for
from helpers.wrappers import FSDP, FSDP_SHARDS, wrapped
from huggingface_hub.errors import HfHubHTTPError
from transformers import TrainerCallback

from hf_infcl.trainer import model_files as pushes

TOKEN = "hf_" + "s3cr3t" * 6
SAVING = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
PUSHING = {**SAVING, "push_to_hub": True, "hub_model_id": "me/mine", "hub_token": TOKEN, "hub_always_push": True}

WRAPPERS = {"ddp": {}, "fsdp": FSDP, "fsdp shards": FSDP_SHARDS}


@pytest.fixture
def slow_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A double that takes files only while the training waits for its push."""

    def wait(jobs: Any) -> None:
        hub.takes_files.set()
        concurrent.futures.wait(jobs)
        hub.takes_files.clear()

    hub.takes_files.clear()
    monkeypatch.setattr(pushes, "wait", wait)
    return hub


def folders(files: dict[str, bytes]) -> set[str]:
    return {name.partition("/")[0] for name in files if "/" in name}


@pytest.mark.parametrize(
    ("strategy", "commits", "checkpoints"),
    [
        ("end", 1, set()),
        ("every_save", 3, set()),
        ("checkpoint", 5, {"last-checkpoint"}),
        ("all_checkpoints", 5, {"checkpoint-1", "checkpoint-2"}),
    ],
)
def test_a_strategy_pushes_what_it_says_to_a_branch_of_a_private_repository(
    hub, tmp_path, strategy, commits, checkpoints
):
    options = {"hub_strategy": strategy, "hub_private_repo": True, "hub_revision": "trial"}
    trainer = trained(trainer_for(tmp_path / "out", **PUSHING, **options))
    trainer.push_to_hub()
    (created,) = hub.created
    assert created.get("private") or created.get("visibility") == "private"
    assert hub.commits["me/mine", "main"] == [{}], "the other branch stays as it was"
    assert len(hub.commits["me/mine", "trial"]) == 1 + commits
    files = hub.files("me/mine", "trial")
    assert folders(files) == checkpoints
    for name in checkpoints:
        saved = tmp_path / "out" / name.replace("last-checkpoint", "checkpoint-2")
        uploaded = {path.removeprefix(f"{name}/"): data for path, data in files.items() if path.startswith(f"{name}/")}
        assert uploaded == {path.name: path.read_bytes() for path in saved.iterdir()}
    assert not [path for path, data in files.items() if TOKEN.encode() in data]
    model = transformers.CLIPModel.from_pretrained("me/mine", revision="trial")
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), parameters(trainer))


def rank_push(rank: int, world_size: int, folder: str, endpoint: str, options: dict[str, Any]) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as monkeypatch:
        talk_to(endpoint, monkeypatch)
        trainer = trained(trainer_for(folder, **{**PUSHING, **options}, hub_strategy="every_save"))
        trainer.push_folder()
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters())
        return torch.cat([p.detach().flatten() for p in whole])


@pytest.mark.parametrize("wrapper", wrapped(WRAPPERS))
def test_what_two_processes_push_is_an_ordinary_model(hub, ranks, fresh_ranks, tmp_path, wrapper):
    processes = ranks if wrapper == "ddp" else fresh_ranks
    weights, _ = processes.run(rank_push, 2, str(tmp_path / "out"), hub.endpoint, WRAPPERS[wrapper])
    for number, tree in enumerate(hub.commits["me/mine", "main"][1:]):
        folder = tmp_path / f"commit-{number}"
        folder.mkdir()
        for name, data in tree.items():
            (folder / name).write_bytes(data)
        model, info = transformers.CLIPModel.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
    assert number == 2, "at both saves and at the end"
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), weights)


class Failures(logging.Handler, TrainerCallback):
    """Holds the training at its first save until the failure of the push has been logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []
        self.logged = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if len(self.messages) == 2:
            self.logged.set()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.logged.wait(60), "the training has not been told of the failure"


def test_a_failed_push_is_reported_at_once_and_the_next_save_pushes_again(hub, tmp_path):
    failures = Failures()
    logger = logging.getLogger("hf_infcl.trainer.model_files")
    logger.addHandler(failures)
    try:
        trainer = trainer_for(tmp_path, **PUSHING, hub_strategy="all_checkpoints", callbacks=[failures])
        hub.failures = 2  # the commits of the model and of the checkpoint
        trainer.train()
    finally:
        logger.removeHandler(failures)
    for message in failures.messages:
        assert message.startswith("The push of step 1 has failed: HfHubHTTPError")
        assert "403" in message
        assert message.endswith("The next save pushes again.")
        assert TOKEN not in message
    files = hub.files("me/mine")
    assert folders(files) == {"checkpoint-2"}
    for name in ("checkpoint-2/model.safetensors", "model.safetensors"):
        assert files[name] == (tmp_path / "checkpoint-2/model.safetensors").read_bytes()


class Versions(TrainerCallback):
    """Writes a card at each push, and keeps the files of each checkpoint."""

    def __init__(self) -> None:
        self.files: list[dict[str, bytes]] = []

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Path(args.output_dir, "README.md").write_text(f"After step {state.global_step}.")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
        files = {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
        self.files.append({**files, "README.md": f"After step {state.global_step}.".encode()})


@pytest.mark.parametrize("weights", ["adapter_model", "model open_clip_model"])
@pytest.mark.parametrize("always", [True, False])
def test_files_do_not_change_while_they_are_pushed(slow_hub, tmp_path, weights, always):
    """The first push reads its files only when the training waits for it, and each step writes others."""
    model, formats = models.clip(), ["transformers", "open_clip"]
    if weights == "adapter_model":
        model, formats = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=r".*q_proj")), formats[:1]
    options = {**PUSHING, "hub_always_push": always, "save_formats": formats, "save_total_limit": 1, "max_steps": 3}
    versions = Versions()
    trainer = trainer_for(tmp_path, model, **options, processing_class=clip_processor(), callbacks=[versions])
    (tmp_path / "_notes.txt").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/events").touch()
    (tmp_path / "whole").symlink_to(tmp_path)
    (tmp_path / "latest").symlink_to(tmp_path / "checkpoint-0")
    trainer.train()
    trees = slow_hub.commits["me/mine", "main"][1:]
    assert len(trees) == (3 if always else 1)
    for tree, files in zip(trees, versions.files, strict=False):
        assert files.keys() == {"README.md", *(f"{name}.safetensors" for name in weights.split())}
        assert files.items() <= tree.items()
        assert {"training_args.bin", "tokenizer.json", "runs/events"} <= tree.keys()
        assert folders(tree) == {"runs"}, "links are not followed"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("enforce fail")])
def test_a_push_that_cannot_start_does_not_end_the_training(hub, tmp_path, monkeypatch, caplog, error):
    """torch.save raises a RuntimeError if the disk is full."""
    begun = mock.Mock(side_effect=[error, *[mock.DEFAULT] * 9], wraps=shutil.copy)
    monkeypatch.setattr(transformers.trainer.shutil, "copy", begun)
    trainer_for(tmp_path, **PUSHING, hub_strategy="all_checkpoints").train()
    assert f"The push of step 1 could not start: {type(error).__name__}: {error}." in caplog.text
    assert folders(hub.files("me/mine")) == {"checkpoint-2"}


class InterruptAt(TrainerCallback):
    """Interrupts the training when a step is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_no_push_outlives_a_training(slow_hub, tmp_path):
    """Otherwise another training in the same folder could replace what is being pushed."""
    trainer = trainer_for(tmp_path, **PUSHING, hub_strategy="checkpoint", callbacks=[InterruptAt(2)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(slow_hub.commits["me/mine", "main"]) == 1 + 4
    assert b'"step": 2' in slow_hub.files("me/mine")["last-checkpoint/trainer_state.json"]


@pytest.mark.parametrize("loads", [True, False])
def test_a_checkpoint_arrives_before_it_is_removed_in_favour_of_the_best(slow_hub, tmp_path, caplog, loads):
    """The loss falls, so that the first checkpoint has the greatest."""
    best = {"load_best_model_at_end": loads, "metric_for_best_model": "loss", "greater_is_better": True}
    options = {**best, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": models.Pairs(9), "max_steps": 3}
    options |= {"hub_strategy": "checkpoint", "save_total_limit": 1}
    trainer_for(tmp_path, **PUSHING, **options).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert "has failed" not in caplog.text
    assert b'"step": 3' in slow_hub.files("me/mine")["last-checkpoint/trainer_state.json"]


def test_the_wait_for_pushes_is_no_time_of_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(pushes, "time", mock.Mock(monotonic=mock.Mock(side_effect=[0, 1000, 1000, 1000])))
    trainer = trainer_for(tmp_path, **SAVING)
    begin = time.time()
    took = trainer.train().metrics["train_runtime"]
    assert took <= time.time() - begin - 999.9


def test_a_checkpoint_stays_until_it_has_arrived(slow_hub, tmp_path, caplog):
    """save_total_limit would delete two checkpoints."""
    trainer = trained(trainer_for(tmp_path, **PUSHING, hub_strategy="checkpoint", save_total_limit=1, max_steps=3))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    slow_hub.takes_files.set()
    trainer.push_folder()
    assert "has failed" not in caplog.text
    assert b'"step": 3' in slow_hub.files("me/mine")["last-checkpoint/trainer_state.json"]


class Running(concurrent.futures.Future[None]):
    """The copy of the first checkpoint, which still runs at the next save."""

    def done(self) -> bool:
        return False


def test_a_copy_into_a_store_hinders_no_push(hub, tmp_path, monkeypatch):
    job = Running()
    job.set_result(None)  # so that the end of the training does not wait for it
    monkeypatch.setattr(pushes.CheckpointStore, "copy", lambda store, folder, **_: store.jobs.setdefault(job, folder))
    options = {**PUSHING, "hub_strategy": "all_checkpoints", "checkpoint_store": f"memory://{tmp_path.name}"}
    trainer_for(tmp_path, **options).train()
    assert folders(hub.files("me/mine")) == {"checkpoint-1", "checkpoint-2"}


def test_a_final_push_that_fails_is_raised(hub, tmp_path):
    trainer = trainer_for(tmp_path, **{**PUSHING, "hub_always_push": False}, hub_strategy="checkpoint")
    hub.failures = 100
    trainer.train()
    with pytest.raises(HfHubHTTPError):
        trainer.push_to_hub()
    with pytest.raises(OSError, match=r"could not be pushed to me/mine: HfHubHTTPError.*--exclude '_\*'"):
        trainer.push_folder()
    assert hub.commits["me/mine", "main"] == [{}]
    hub.failures = 0
    trainer.push_folder()
    assert hub.files("me/mine")["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()


def test_a_run_goes_on_from_the_hub_s_last_checkpoint(hub, tmp_path):
    whole = trained(trainer_for(tmp_path / "whole", models.clip(0.3), max_steps=4, **SAVING))
    options = {**PUSHING, "hub_strategy": "checkpoint", "max_steps": 4}
    trainer_for(tmp_path / "lost", models.clip(0.3), **options, callbacks=[StopAt(2)]).train()
    again = trained(trainer_for(tmp_path / "new", models.clip(0.3, seed=5), **options), resume="last-checkpoint")
    assert again.steps_trained == 2
    assert torch.equal(parameters(again), parameters(whole))
    empty = trainer_for(tmp_path / "empty", **{**options, "hub_model_id": "me/empty"})
    with pytest.raises(ValueError, match="me/empty has no last-checkpoint"):
        empty.train(resume_from_checkpoint="last-checkpoint")
    with pytest.raises(ValueError, match="name the repository with hub_model_id"):
        trainer_for(tmp_path / "none", **SAVING).train(resume_from_checkpoint="last-checkpoint")
    gone = trainer_for(tmp_path / "gone", **SAVING, hub_model_id="me/gone")
    with pytest.raises(ValueError, match=r"last-checkpoint of me/gone could not be downloaded: .*404"):
        gone.train(resume_from_checkpoint="last-checkpoint")


def test_a_repository_that_cannot_be_created_is_told_before_the_first_step(tmp_path, monkeypatch):
    talk_to("http://127.0.0.1:9", monkeypatch)  # a port on which nobody listens
    with pytest.raises(OSError, match=r"me/mine of the Hub could not be .*: ConnectError.*`hf auth login`") as error:
        trainer_for(tmp_path, **PUSHING)
    assert TOKEN not in str(error.value)
