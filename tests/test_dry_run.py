"""`infcl train --dry_run` starts like a training, tells what it will take, and writes nothing."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers.demo import infcl, mistake
from helpers.processes import launched, without_os_exit
from helpers.trainers import trainer_for

from hf_infcl.cli import train
from hf_infcl.cli.train import _FirstSteps, lines_of_steps


def files_in(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_nothing_is_written(small, tmp_path, monkeypatch, capsys):
    """No matter what the training would write, push or delete."""
    places: list[str] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(train.atexit, "register", lambda delete, place, **_: places.append(place))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/trainer_state.json").write_text("{}")
    before = files_in(tmp_path)
    words = ["--eval_dataset", tmp_path / "pairs", "--eval_pictures", 2, "--save_steps", 1, "--push_to_hub"]
    words += ["--early_stopping_patience", 1, "--report_to", "tensorboard", "--overwrite_output_dir"]
    infcl(*small, *words, "--dry_run")
    (place,) = places
    after = files_in(tmp_path)
    assert {name: time for name, time in after.items() if not name.startswith(place)} | {
        str(tmp_path / "temporary"): before[str(tmp_path / "temporary")]
    } == before
    assert {path.name for path in Path(place).iterdir()} <= {"_run.lock"}
    printed = capsys.readouterr().out
    assert "Dry run: 3 steps of 7. Nothing was written.\nMemory: " in printed
    assert re.search(r"^Memory: \d+\.\d\d GiB at the peak, on each process\.$", printed, re.MULTILINE)
    speed = r"^Speed: [\d,.]+ images a second; a step of 8 pairs takes \S+ s, of which it waits \S+ s for data\.$"
    assert re.search(speed, printed, re.MULTILINE)
    assert re.search(r"^The whole training takes 0:00:\d\d, with equally fast loading, and", printed, re.MULTILINE)
    assert "Loss:" not in printed, "a process alone exchanges nothing"
    assert "pairs of the training set were checked" in printed, "as before a training"


def test_a_training_of_fewer_steps(small, capsys):
    infcl(*small, "--max_steps", 1, "--dry_run")
    assert "Dry run: 1 step of 1. Nothing was written." in capsys.readouterr().out


def test_mistakes_are_those_of_a_training(small, tmp_path, capsys):
    assert "global batch" in mistake(capsys, *small, "--dry_run", "--gradient_accumulation_steps", 99)
    line = mistake(capsys, *small, "--freeze", "image", "--cache_features", tmp_path / "cache", "--dry_run")
    assert f"dry_run=True and cache_features={tmp_path / 'cache'} exclude each other: these are computed before" in line


def run(*words: Any) -> None:
    with without_os_exit():
        infcl(*words)


def test_two_processes_tell_it_once(small, tmp_path):
    code, output = launched(run, *small, "--dry_run")
    assert code == 0, output
    assert output.count("Dry run: 3 steps of 4. Nothing was written.") == 1, output
    assert output.count("Loss: all texts gathered; on H100s it is predicted to take 0.0013 s of a step.") == 1, output
    assert not (tmp_path / "out").exists()


def test_what_is_printed_is_measured(tmp_path):
    """The first step, which chooses kernels, is left out; so is a chip whose peak is not known."""
    trainer = trainer_for(tmp_path, max_steps=4, logging_steps=1)
    trainer.add_callback(_FirstSteps())
    trainer.train()
    assert trainer.state.global_step == 3
    logs = [entry for entry in trainer.state.log_history if "samples_per_second" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 3]
    assert all("data_wait" in entry for entry in logs[1:])
    size = trainer.args.global_batch_size
    for entry, seconds, waits in zip(logs, (9.0, 2.0, 3.0), (4.0, 0.5, 1.5), strict=True):
        entry |= {"samples_per_second": size / seconds, "data_wait": waits / seconds}
    _, memory, speed, whole = lines_of_steps(trainer, 2**29)
    assert memory == "Memory: 0.50 GiB at the peak, on each process."
    assert speed.startswith(
        f"Speed: {size / 2.5:,.1f} images a second; a step of {size} pairs takes 2.5 s, of which it"
    )
    assert speed.endswith("waits 1 s for data.")
    assert whole.startswith("The whole training takes 0:00:10, ")
    for entry, share in zip(logs, (0.1, 0.3, 0.5), strict=True):
        entry["train_mfu"] = share
    assert ", with 40% of the chip's peak." in [*lines_of_steps(trainer, 2**29)][2]


@pytest.mark.gpu
def test_the_memory_of_a_gpu_and_its_share_of_the_peak(small):
    words: list[Any] = [word for word in small if word != "--use_cpu"]
    one = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # without a launcher only one is allowed
    command = [sys.executable, "-m", "hf_infcl", *map(str, words), "--bf16", "--dry_run"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": one}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    print(printed)
    assert re.search(r"^Memory: \d+\.\d\d GiB at the peak, of the \d+\.\d on each \S", printed, re.MULTILINE)
