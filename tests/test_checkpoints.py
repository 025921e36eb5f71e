"""Only complete checkpoints are resumed from: after a kill, a full disk, damage or a signal to end."""

import errno
import faulthandler
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from filelock import FileLock
from helpers import models
from helpers.kills import forked, killed
from helpers.processes import on_ranks
from helpers.trainers import StopAt, parameters, trained, trainer_for
from safetensors.torch import save_file
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from hf_infcl import InfCLTrainer
from hf_infcl.options.record import RunRecord
from hf_infcl.processes import launcher, lock
from hf_infcl.processes.lock import LOCK_NAME, locked
from hf_infcl.processes.signals import SIGNALS, Preempted, Preemption
from hf_infcl.trainer import checkpoints
from hf_infcl.trainer.checkpoints import MANIFEST_NAME, Checkpoint, choose, damage, rotate

# Two windows per epoch. With dropout the weights reveal a random state that was not restored.
OPTIONS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
FIRST_IS_BEST: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
FIRST_IS_BEST |= {"metric_for_best_model": "loss", "greater_is_better": True}  # which falls
RECORD = RunRecord({"model": "model"})
ALONE: Any = {"completes": True, "flushes": True, "ends_on_failure": False}


def trainer(folder: Any, seed: int = 0, **options: Any) -> Any:
    return trainer_for(folder, models.clip(dropout=0.3, seed=seed), models.Pairs(20), **{**OPTIONS, **options})


def written(folder: Path, step: int, content: str = "content") -> Path:
    """A checkpoint with one file besides its record."""
    checkpoint = Checkpoint(folder, step)
    checkpoint.begin(RECORD)
    (checkpoint.partial / "part").mkdir()
    (checkpoint.partial / "part" / "file").write_text(content)
    checkpoint.flush()
    checkpoint.complete()
    return checkpoint.folder


# ---- Complete checkpoints ----


def test_a_checkpoint_has_its_name_once_it_is_complete(tmp_path):
    checkpoint = Checkpoint(tmp_path, 3)
    checkpoint.begin(RECORD)
    (checkpoint.partial / "file").write_text("content")
    assert choose(str(tmp_path), "auto") is None
    checkpoint.flush()
    checkpoint.complete()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert damage(tmp_path / "checkpoint-3") is None
    assert RunRecord.read(tmp_path / "checkpoint-3") == RECORD


def test_another_of_the_same_step_replaces_it(tmp_path):
    written(tmp_path, 3, "old")
    assert (written(tmp_path, 3, "new") / "part" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_what_a_save_has_left_is_removed_with_a_word(tmp_path, caplog):
    left = Checkpoint(tmp_path, 2)
    left.begin(RECORD)
    shutil.copytree(written(tmp_path, 1), tmp_path / "_removed-checkpoint-3")
    written(tmp_path, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-4"}
    for name in ("_partial-checkpoint-2", "_removed-checkpoint-3"):
        assert f"{name} was left by an interrupted save" in caplog.text


def test_a_file_or_a_link_in_the_place_of_a_checkpoint_is_removed(tmp_path):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").touch()
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "others")
    (tmp_path / "_partial-checkpoint-7").symlink_to(tmp_path / "others")
    (tmp_path / "checkpoint-2").touch()
    written(tmp_path, 1)
    written(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-2", "others"}
    assert (tmp_path / "others" / "file").exists()


def test_the_newest_is_known_after_the_clock_was_set_back(tmp_path, monkeypatch):
    written(tmp_path, 9)  # from an earlier run; the next run resumed from an earlier step
    for step in (2, 3):
        monkeypatch.setattr(checkpoints.time, "time_ns", lambda step=step: 1000 - step)
        newest = written(tmp_path, step)
        assert choose(str(tmp_path), "auto") == str(newest)


def test_a_file_system_without_locks_or_flushed_folders_is_written_to(tmp_path, monkeypatch, caplog):
    flush = os.fsync

    def flush_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flush(handle)

    def no_lock(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(os, "fsync", flush_files)
    monkeypatch.setattr(FileLock, "_acquire", no_lock)
    with locked(tmp_path, locks=True, shared=True):
        newest = written(tmp_path, 1)
    assert choose(str(tmp_path), "auto") == str(newest)
    assert "_run.lock cannot be locked ([Errno 37] No locks available), so a second run in this folder" in caplog.text


def removed_halfway(folder: Path, kill_at: int) -> None:
    count_calls(lambda: rotate(folder, 1, [folder / "checkpoint-2"]), kill_at)


def test_a_checkpoint_that_is_removed_halfway_is_removed_at_the_next_save(tmp_path):
    first, last = written(tmp_path, 1), written(tmp_path, 2)
    calls = count_calls(lambda: rotate(tmp_path, 2, [last]))
    killed(removed_halfway, tmp_path, calls + 40)
    assert not first.exists()
    written(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-3"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # no process can read its first bytes


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {"missing": os.unlink, "has ": cut, "has changed": change_a_byte, "has  ": lambda path: path.write_bytes(b"")}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_found_and_named(tmp_path, how):
    checkpoint = written(tmp_path, 1)
    DAMAGE[how](checkpoint / "part" / "file")
    assert f"checkpoint-1/part/file {how.strip() if how != 'missing' else 'is missing'}" in str(damage(checkpoint))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": 3}', '{"files": {"part/file": 7}}'])
def test_a_damaged_manifest_is_named(tmp_path, content):
    checkpoint = written(tmp_path, 1)
    (checkpoint / MANIFEST_NAME).write_text(content)
    assert f"checkpoint-1/{MANIFEST_NAME} is damaged" in str(damage(checkpoint))


def test_rotation_counts_complete_checkpoints_alone(tmp_path):
    folders = [written(tmp_path, step) for step in (1, 2, 3, 4)]
    (folders[2] / MANIFEST_NAME).unlink()
    foreign = tmp_path / "checkpoint-9"
    foreign.mkdir()
    rotate(tmp_path, 2, [folders[3]])
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{step}" for step in (2, 3, 4, 9)}
    rotate(tmp_path, 1, [folders[3], folders[1]])
    assert folders[1].is_dir(), "the best one stays"
    assert choose(str(tmp_path), "auto") == str(folders[3])


# ---- Training with them ----


def test_a_checkpoint_holds_what_trainer_s_does(tmp_path):
    trainer(tmp_path, save_total_limit=1).train()
    names = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert names == {
        *("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
        *("trainer_state.json", "training_args.bin", "infcl_run.json", MANIFEST_NAME),
    }
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", LOCK_NAME}


def test_the_best_checkpoint_is_known_by_its_place(tmp_path):
    best = trained(trainer(tmp_path, eval_dataset=models.Pairs(9), save_total_limit=1, **FIRST_IS_BEST))
    assert best.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    assert state["best_global_step"] == 2
    saved = models.tf.CLIPModel.from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(torch.nn.utils.parameters_to_vector(saved.parameters()), parameters(best))


class Averaging(torch.optim.SGD):
    """Evaluates the mean of the points that it trains, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                self.state[p].setdefault("mean", p.detach().clone()).lerp_(p.detach(), 1 / group["steps"])

    def eval(self) -> None:
        self._exchange("mean", "point", training=False)

    def train(self) -> None:
        self._exchange("point", "mean", training=True)

    @torch.no_grad()
    def _exchange(self, wanted: str, kept: str, training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group.get("training", True) != training else ():
                if wanted in self.state[p]:
                    self.state[p][kept] = p.detach().clone()
                    p.copy_(self.state[p][wanted])
            group["training"] = training


def averaging(folder: Any, seed: int = 0, **options: Any) -> InfCLTrainer:
    model = models.clip(dropout=0.3, seed=seed)
    optimizers = (Averaging([{"params": list(model.parameters()), "steps": 0, "training": True}], lr=1.0), None)
    options = {**OPTIONS, "eval_dataset": models.Pairs(9), "optimizers": optimizers, **options}
    return trainer_for(folder, model, models.Pairs(20), **options)


def test_checkpoints_and_model_hold_the_weights_that_a_schedule_free_optimizer_evaluates(tmp_path):
    run = trained(averaging(tmp_path))
    state = run.optimizer.optimizer.state
    assert all(torch.equal(p, state[p]["mean"]) and not torch.equal(p, state[p]["point"]) for p in state)
    weights = parameters(run)
    run.evaluate()
    assert torch.equal(parameters(run), weights)
    saved = models.tf.CLIPModel.from_pretrained(tmp_path / "checkpoint-4")
    assert torch.equal(torch.nn.utils.parameters_to_vector(saved.parameters()), weights)
    resumed = trained(averaging(tmp_path, seed=5), resume=str(tmp_path / "checkpoint-2"))
    assert torch.equal(parameters(resumed), weights)


def test_the_best_model_of_a_schedule_free_optimizer_stays(tmp_path):
    best = averaging(tmp_path, **FIRST_IS_BEST)
    best.add_callback(StopAt(3))  # a step after the evaluation, so that the model holds the weights that train
    best.train()
    saved = models.tf.CLIPModel.from_pretrained(best.state.best_model_checkpoint)
    best.evaluate()
    assert torch.equal(torch.nn.utils.parameters_to_vector(saved.parameters()), parameters(best))


def test_auto_starts_or_goes_on(tmp_path, caplog):
    expected = parameters(trained(trainer(tmp_path / "whole")))
    folder = tmp_path / "parts"
    with pytest.raises(ValueError, match="has no checkpoint to resume from"):
        trainer(folder).train(resume_from_checkpoint=True)
    trainer(folder, callbacks=[StopAt(2)]).train(resume_from_checkpoint="auto")
    resumed = trained(trainer(folder, seed=5), resume="auto")
    assert resumed.steps_trained == 2
    assert torch.equal(parameters(resumed), expected)
    change_a_byte(folder / "checkpoint-4" / "optimizer.pt")
    resumed = trained(trainer(folder, seed=5), resume=True)
    assert resumed.steps_trained == 2
    assert torch.equal(parameters(resumed), expected)
    assert "A checkpoint is skipped" in caplog.text
    assert "checkpoint-4/optimizer.pt has changed since it was written" in caplog.text


def test_a_damaged_checkpoint_is_refused(tmp_path):
    trainer(tmp_path / "whole", callbacks=[StopAt(2)]).train()
    for number, (name, how) in enumerate(
        [
            ("model.safetensors", cut),
            ("model.safetensors", change_a_byte),
            ("optimizer.pt", os.unlink),
            ("scheduler.pt", os.unlink),
            ("rng_state.pth", os.unlink),
            ("trainer_state.json", cut),
            ("infcl_run.json", change_a_byte),
            (MANIFEST_NAME, os.unlink),
        ]
    ):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / str(number))
        how(folder / "checkpoint-2" / name)
        for wanted in (str(folder / "checkpoint-2"), True, "auto"):
            with pytest.raises(
                ValueError, match=rf"(cannot be resumed from|is complete): .*checkpoint-2/{name} .*"
            ) as told:
                choose(str(folder), wanted)
            assert wanted not in (True, "auto") or str(told.value).endswith(f"--model {folder}/checkpoint-2")


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    models.clip().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model is not the checkpoint of a training: it has no trainer_state\.json"):
        choose(str(tmp_path), str(tmp_path / "model"))


def test_the_output_of_a_training_is_no_checkpoint_and_that_of_another_trainer_is_one(tmp_path):
    run = trained(trainer(tmp_path, save_steps=2))
    run.save_model()
    run.save_state()
    message = r"holds a model and the log of its training, but no optimizer, .* \(checkpoint-4, checkpoint-2\)"
    with pytest.raises(ValueError, match=message):
        choose(str(tmp_path), str(tmp_path))
    for name in (MANIFEST_NAME, "infcl_run.json"):
        (tmp_path / "checkpoint-2" / name).unlink()
    assert choose(str(tmp_path), str(tmp_path / "checkpoint-2")) == str(tmp_path / "checkpoint-2")


def test_models_alone_are_counted_and_removed_and_nothing_to_go_on_from(tmp_path):
    trainer(tmp_path, save_steps=1, save_total_limit=2, save_only_model=True).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    with pytest.raises(ValueError, match="save_only_model, without the optimizer"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_damaged_record_of_an_old_checkpoint_does_not_end_the_training(tmp_path):
    folders = [written(tmp_path, step) for step in (1, 2, 3)]
    record = folders[0] / "infcl_run.json"
    record.write_text(record.read_text().replace("{", "["))
    make_unreadable(folders[1] / MANIFEST_NAME)
    rotate(tmp_path, 1, [folders[2]])
    assert all(folder.is_dir() for folder in folders)


def test_two_runs_in_one_folder_are_refused(tmp_path):
    message = r"Another run is training in .*: choose another output_dir"
    with locked(tmp_path, locks=True, shared=True), pytest.raises(ValueError, match=message):
        trainer(tmp_path).train()
    trainer(tmp_path).train()


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(tmp_path):
    run = trainer(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("a file of this name")
    with pytest.raises(ValueError, match="Nothing can be written to output_dir"):
        run.train()


def rank_of_a_machine(rank: int, world_size: int, folder: str) -> list[str]:
    """Every process is the first process of a machine with its own disk."""
    Path(folder, str(rank)).mkdir()
    before = os.getcwd()
    os.chdir(Path(folder, str(rank)))
    try:
        os.environ["LOCAL_RANK"] = "0"
        with pytest.raises(ValueError, match=r"On rank 1: output_dir .* is not the folder in which"):
            trainer("apart").train()
        if rank == 0:
            Path("of-another-trainer").mkdir()
            Path("of-another-trainer", TRAINER_STATE_NAME).write_text("{}")
            Path("of-another-trainer", "optimizer.pt").touch()
        with pytest.raises(ValueError, match="Rank 1 finds no folder of-another-trainer"):
            choose("run", "of-another-trainer", looks=rank == 0)
        options = {"save_on_each_node": True}
        expected = parameters(trained(trainer("whole", **options)))
        trainer("run", **options).train()
        if rank == 1:
            change_a_byte(Path("run", "checkpoint-4", "optimizer.pt"))
        resumed = trained(trainer("run", seed=5, **options), resume="auto")
        assert resumed.steps_trained == 2, "a checkpoint is complete if it is so on every machine"
        assert torch.equal(parameters(resumed), expected)
        return sorted(path.name for path in Path("run", "checkpoint-4").glob("rng*"))
    finally:
        os.chdir(before)


def test_machines_with_disks_of_their_own_save_and_resume_together(ranks, tmp_path):
    files = ranks.run(rank_of_a_machine, 2, str(tmp_path))
    assert files == [["rng_state_0.pth"], ["rng_state_1.pth"]]


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no /proc")
@on_ranks(2)
def test_a_folder_that_one_rank_cannot_write_to_is_found_before_the_first_step(rank, world_size, tmp_path):
    output_dir = f"{tmp_path}/run" if rank == 0 else "/proc/self"  # nobody can write to /proc
    run = trainer(output_dir)
    with pytest.raises(ValueError, match="On rank 1: Nothing can be written to output_dir /proc/self"):
        run.train()
    assert run.state.global_step == 0


@on_ranks(2, timeout=20)
def test_a_folder_that_takes_no_more_files_is_told_on_all_ranks(rank, world_size, tmp_path):
    error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    refused = pytest.raises(ValueError, match=f"^Nothing can be written to output_dir {tmp_path}: .*Choose another")
    full = mock.patch.object(lock, "NamedTemporaryFile", side_effect=error)
    with full, refused, locked(tmp_path, locks=rank == 0, shared=True):
        pass


# ---- A disk that is full ----


def let_files_grow_to(limit: int) -> None:
    """Makes Python, torch and safetensors raise an OSError when they write more than ``limit`` bytes to a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def write_files(checkpoint: Checkpoint, content: float = 0.0) -> None:
    """Writes with Python, safetensors and torch, in files of about 1, 40 and 100 kB."""
    (checkpoint.partial / "config.json").write_text(f"{content} " * 250)
    save_file({"weights": torch.full((10_000,), content)}, checkpoint.partial / "model.safetensors")
    torch.save(torch.full((25_000,), content), checkpoint.partial / "optimizer.pt")


@pytest.mark.parametrize("limit", [100, 20_000, 60_000], ids=["config", "model", "optimizer"])
def test_a_full_disk_costs_one_checkpoint_only(tmp_path, limit, caplog):
    def write(checkpoint: Checkpoint) -> None:
        let_files_grow_to(limit if checkpoint.folder.name == "checkpoint-4" else resource.RLIM_INFINITY)
        try:
            write_files(checkpoint)
        finally:
            let_files_grow_to(resource.RLIM_INFINITY)

    for step in (2, 4, 6):
        checkpoint = Checkpoint(tmp_path, step)
        saved = checkpoint.save(RECORD, partial(write, checkpoint), **ALONE)
        assert saved == (step != 4)
        if saved:
            rotate(tmp_path, 2, [checkpoint.folder])
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-6"}
    assert "checkpoint-4 could not be written, and the training continues without it" in caplog.text


class Starve(TrainerCallback):
    """No file takes more than 100 bytes while the checkpoint after step 4 is written."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        let_files_grow_to(100 if state.global_step == 4 else resource.RLIM_INFINITY)

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        let_files_grow_to(resource.RLIM_INFINITY)


@on_ranks(2)
def test_a_rank_that_cannot_write_costs_all_this_checkpoint(rank, world_size, tmp_path):
    run = trained(trainer(tmp_path, callbacks=[Starve()] if rank == 1 else [], logging_strategy="no"))
    assert (run.state.global_step, run.saved_step) == (4, 2)
    torch.distributed.barrier()  # rank 0 removes what was written, and rank 1 does not wait for that
    assert {path.name for path in Path(tmp_path).iterdir()} == {LOCK_NAME, "checkpoint-2"}
    # Without a state of the optimizer, rank 1 writes nothing and needs no tmp_path.
    starved = [Starve()] if rank == 0 else []
    run = trained(trainer(f"{tmp_path}/of-rank-{rank}", save_only_model=True, callbacks=starved, logging_strategy="no"))
    assert (run.state.global_step, run.saved_step) == (4, 2)


# ---- Killed ----


# They call more or fewer functions, depending on which of two threads is first.
OF_THREADS = ("threading.py", "thread.py", "_base.py", "_weakrefset.py", "selectors.py")


class Calls:
    """Counts the calls of built-in functions until it is stopped; kills this process at a given call or rename.

    Those of Python's modules of threads do not count.
    """

    def __init__(self, kill_at: int | None = None, kill_at_rename: int | None = None) -> None:
        self.count = self.renames = 0
        self.moment = kill_at, kill_at_rename

    def start(self) -> None:
        sys.setprofile(self.note)

    def stop(self) -> None:
        sys.setprofile(None)

    def note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and not frame.f_code.co_filename.endswith(OF_THREADS):
            self.count += 1
            self.renames += argument is os.rename
            if self.count == self.moment[0] or self.renames == self.moment[1]:
                os.kill(os.getpid(), signal.SIGKILL)


def count_calls(work: Callable[[], Any], *moment: int | None) -> int:
    calls = Calls(*moment)
    calls.start()
    try:
        work()
    finally:
        calls.stop()
    return calls.count


def counted(work: Callable[..., int], *args: Any) -> int:
    """The calls that ``work`` counts in a fork: as many as one that is killed would make, which forks from here too."""
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
    assert forked(lambda: send.send(work(*args))) == 0
    return receive.recv()


def moments(calls: int, count: int) -> list[tuple[int | None, int | None]]:
    """When to kill a save: at calls spread over all, and at its second rename.

    The first rename completes the checkpoint, the second begins the removal of the one before.
    """
    return [((2 * number + 1) * calls // (2 * count), None) for number in range(count)] + [(None, 2)]


def save_next(folder: Path, step: int, *moment: int | None) -> int:
    """Saves the checkpoint of a step and removes the one before."""

    def save() -> None:
        checkpoint = Checkpoint(folder, step)
        assert checkpoint.save(RECORD, partial(write_files, checkpoint, step), **ALONE)
        rotate(folder, 1, [checkpoint.folder])

    return count_calls(save, *moment)


def test_killed_at_any_moment_of_a_save_a_complete_checkpoint_is_there(tmp_path):
    save_next(tmp_path / "start", 2)
    save_next(shutil.copytree(tmp_path / "start", tmp_path / "first"), 4)  # imports what no later save imports again
    calls = counted(save_next, shutil.copytree(tmp_path / "start", tmp_path / "whole"), 4)
    found = []
    for number, moment in enumerate(moments(calls, 40)):
        folder = shutil.copytree(tmp_path / "start", tmp_path / f"killed-{number}")
        killed(save_next, folder, 4, *moment)
        newest = Path(str(choose(str(folder), "auto")))
        found.append(int(newest.name.removeprefix("checkpoint-")))
        assert torch.equal(torch.load(newest / "optimizer.pt"), torch.full((25_000,), float(found[-1]))), moment
        save_next(folder, 6)
        assert [path.name for path in folder.iterdir()] == ["checkpoint-6"], moment
    assert found == sorted(found), "once it is complete it stays"
    assert set(found) == {2, 4}


class KilledInSave(TrainerCallback):
    """Counts the calls of the save after step 4, or is killed in it."""

    def __init__(self, *moment: int | None) -> None:
        self.calls = Calls(*moment)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.calls.start()

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.calls.stop()


def killed_while_saving(folder: Path, *moment: int | None) -> None:
    """Resumes from step 2, and is killed while it writes the checkpoint after step 4."""
    trained(trainer(folder, seed=5, save_total_limit=1, callbacks=[KilledInSave(*moment)]), resume="auto")


KILL_TEST = "test_a_training_that_is_killed_in_a_save_loses_nothing"


def test_a_training_that_is_killed_in_a_save_loses_nothing(tmp_path):
    if torch.cuda.is_available():  # CUDA does not survive the forks below, so this runs in an interpreter without a GPU
        unseen = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "pytest", "-q", f"{__file__}::{KILL_TEST}"]
        assert subprocess.run(command, env={**os.environ, **unseen}).returncode == 0
        return
    options = {"save_total_limit": 1}
    save = KilledInSave()
    whole = trained(trainer(tmp_path / "whole", callbacks=[save], **options))
    trainer(tmp_path / "start", callbacks=[StopAt(2)], **options).train()
    found = []
    for number, moment in enumerate(moments(save.calls.count, 5)):
        folder = shutil.copytree(tmp_path / "start", tmp_path / f"killed-{number}")
        killed(killed_while_saving, folder, *moment)
        newest = choose(str(folder), "auto")
        assert newest is not None, f"killed at {moment}, of {save.calls.count} calls"
        found.append(Path(newest).name)
        resumed = trained(trainer(folder, seed=6, **options), resume="auto")
        assert torch.equal(parameters(resumed), parameters(whole)), moment
    assert found == sorted(found), "once it is complete it stays"
    assert set(found) == {"checkpoint-2", "checkpoint-4"}


# ---- Asked to end ----


class Ask(TrainerCallback):
    """Sends this process a signal after a step, or during the evaluation that follows it."""

    def __init__(self, number: int, place: str, step: int = 3) -> None:
        self.number, self.place, self.step = number, place, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and self.place == "step":
            os.kill(os.getpid(), self.number)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.place == "evaluation", "the signal has not ended it"
        self.place = "after it"
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("world_size", "numbers", "place"),
    [
        (1, (signal.SIGTERM, signal.SIGINT), "step"),
        (2, (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), "step"),
        (2, (signal.SIGTERM,), "evaluation"),
    ],
)
@on_ranks()
def test_a_signal_to_one_rank_saves_on_all_and_nothing_is_lost(rank, world_size, tmp_path, numbers, place):
    options: dict[str, Any] = {"save_steps": 100}
    if place == "evaluation":
        options |= {"eval_dataset": models.Pairs(64), "eval_strategy": "steps", "eval_steps": 3}
    expected = parameters(trained(trainer(f"{tmp_path}/whole", **options)))
    for number in numbers:
        parts, handler = f"{tmp_path}/{number}", signal.getsignal(number)
        asked = [Ask(number, place)] if rank == world_size - 1 else []
        with pytest.raises(Preempted) as ended:
            trainer(parts, callbacks=asked, **options).train()
        assert ended.value.code == 128 + number
        assert signal.getsignal(number) == handler
        assert choose(parts, "auto") == f"{parts}/checkpoint-3"
        resumed = trained(trainer(parts, seed=5, **options), resume="auto")
        assert torch.equal(parameters(resumed), expected)


def test_a_checkpoint_that_cannot_be_read_is_skipped(tmp_path):
    written(tmp_path, 1)
    newest = written(tmp_path, 2)
    (newest / "part" / "file").unlink()
    make_unreadable(newest / MANIFEST_NAME)
    with pytest.raises(ValueError, match=r"checkpoint-2 cannot be read: \[Errno 5\]"):
        choose(str(tmp_path), str(newest))
    assert choose(str(tmp_path), "auto") == str(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("save_strategy", ["no", "steps"])
def test_a_signal_in_the_last_step_ends_the_training_as_well(tmp_path, save_strategy):
    run = trainer(tmp_path, callbacks=[Ask(signal.SIGTERM, "step", 4)], save_strategy=save_strategy)
    with pytest.raises(Preempted, match="143"):
        run.train()
    assert choose(str(tmp_path), "auto") == str(tmp_path / "checkpoint-4")


def signalled_twice() -> None:
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # the signal that a launcher passes on
        assert preemption.signal == signal.SIGTERM
        with mock.patch("time.monotonic", return_value=time.monotonic() + 60):
            os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)


def test_a_second_signal_ends_at_once():
    assert forked(signalled_twice) == -signal.SIGTERM


def faults_are_still_dumped(path: Path) -> None:
    with path.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        with Preemption():
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(0)


def test_a_handler_of_faulthandler_is_restored(tmp_path):
    assert forked(faults_are_still_dumped, tmp_path / "dump") == 0, "the signal has ended it"
    assert "faults_are_still_dumped" in (tmp_path / "dump").read_text()


def test_a_handler_that_python_does_not_know_does_not_end_the_training(monkeypatch):
    """Python reports a handler that was set in C, before it started, as None, and does not accept None."""
    before, set_handler = {number: signal.getsignal(number) for number in SIGNALS}, signal.signal
    monkeypatch.setattr(signal, "signal", lambda number, handler: (set_handler(number, handler), None)[1])
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption.signal == signal.SIGTERM
    finally:
        for number, handler in before.items():
            set_handler(number, handler)


def test_ctrl_c_stays_ignored_in_the_background_of_a_script():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGINT)
            assert preemption.signal == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_an_interactive_session_is_a_keyboard_interrupt(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt), Preemption():
        signal.raise_signal(signal.SIGINT)


def test_a_launcher_that_has_gone_counts_as_a_signal(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    preemption = Preemption()
    assert preemption.signal == 0
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert preemption.signal == signal.SIGTERM


def test_a_system_that_does_not_fork_has_a_launcher_as_well(monkeypatch):
    monkeypatch.delattr(os, "register_at_fork")  # as on Windows, where `contrastive_loss` is used
    assert not runpy.run_path(str(launcher.__file__))["has_gone"]()


@pytest.mark.parametrize("inherited", [False, True])
def test_only_a_launcher_that_started_this_process_can_have_gone(inherited):
    """Importing torch and transformers takes seconds; the launcher is watched from the import of the package on.

    A shell within a launched job passes the launcher's variables on, and may end before what it has started.
    """
    process = """
import os, sys, time, hf_infcl
assert "torch" not in sys.modules
parent = os.getppid()
print("imported", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
print("its launcher has gone:", hf_infcl.launcher.has_gone())
"""
    launch = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]], env={**os.environ, "TORCHELASTIC_RUN_ID": "some"})
"""
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "some"} if inherited else os.environ
    command = [sys.executable, "-c", launch, process]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert launcher.stdout is not None
    with launcher.stdout as printed:
        assert printed.readline() == "imported\n"
        launcher.kill()
        launcher.wait()
        assert printed.read() == f"its launcher has gone: {not inherited}\n"
