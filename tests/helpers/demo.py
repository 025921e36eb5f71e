"""The files of the demo, and functions that run the repository's programs as a user does."""

import contextlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from filelock import FileLock

from hf_infcl import cli
from hf_infcl.card import cards

from .guides import ROOT
from .processes import without_os_exit

SCRIPTS = ROOT / "scripts"
CONFIGS = SCRIPTS / "configs"
DEMO = yaml.load((SCRIPTS / "demo.yaml").read_text(), Loader=yaml.BaseLoader)  # `no` stays `no`


def made_once(base: Path, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first of all workers to ask for it makes. ``base`` is the folder of this worker's tests."""
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            make(folder.with_suffix(".part"))
            folder.with_suffix(".part").rename(folder)
    return folder


def all_digits(base: Path) -> Path:
    """A folder with digits/ and clip-init/, as make_digits.py writes them. Tests only read it."""

    def make(folder: Path) -> None:
        words = ["make_digits.py", "--output_dir", str(folder)]
        with mock.patch.object(sys, "argv", words), mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]):
            runpy.run_path(str(SCRIPTS / "make_digits.py"), run_name="__main__")

    return made_once(base, "all-digits", make)


def copy_rows(folder: Path, to: Path, count: int, first: int = 0) -> None:
    """Copies so many images of a folder and their rows of its metadata."""
    to.mkdir(parents=True)
    lines = (folder / "metadata.jsonl").read_text().splitlines()[first : first + count]
    (to / "metadata.jsonl").write_text("\n".join(lines))
    for line in lines:
        shutil.copy(folder / json.loads(line)["file_name"], to)


def infcl(*words: Any, draws: bool = False) -> None:
    """Runs a command in this process. In place of curves, which take half of a small training, it writes their numbers.

    Args:
        draws: draw the curves.
    """
    written = mock.patch.object(cards, "plot_curves", lambda log, path: Path(path).write_text(json.dumps(log)))
    with contextlib.nullcontext() if draws else written:
        cli.main(words=[str(word) for word in words])


def mistake(capsys: pytest.CaptureFixture[str], *words: Any, code: int | None = None) -> str:
    """The single line with which a command ends, with this exit code or one of a mistake."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        infcl(*words)
    assert end.value.code in ((1, 2) if code is None else (code,))
    said = capsys.readouterr().err.splitlines()
    (line,) = [line for line in said if line.startswith("infcl")]
    assert not any("Traceback" in line for line in said)
    return line


def exit_code(*words: Any) -> int:
    """Runs a command in this process, which ends without an exit if its code is 0."""
    try:
        infcl(*words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def infcl_launched(*words: Any) -> None:
    """Runs a command in this process, which `launched` has started."""
    with without_os_exit():
        infcl(*words)


def run(*words: Any) -> str:
    """Runs Python in the repository root, expects success, and returns the output, that of stderr included."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def accelerate(config: str) -> list[Any]:
    """The words of `accelerate launch` with one of scripts/configs, for two processes."""
    return ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / f"{config}.yaml", "--main_process_port", 0]


def accelerate_launch(*words: Any) -> None:
    """Runs `accelerate launch` in this process, which `alone` has started, with forks in place of new interpreters."""
    from accelerate.commands import launch
    from torch.distributed import run as torchrun
    from torch.distributed.launcher.api import elastic_launch

    def forked(args: Any) -> None:
        config, _, _ = torchrun.config_from_args(args)
        config.start_method = "spawn" if torch.cuda.is_available() else "fork"
        elastic_launch(config, run_module)(args.training_script, *args.training_script_args)

    with mock.patch.object(torchrun, "run", forked):
        launch.launch_command(launch.launch_command_parser().parse_args([str(word) for word in words]))


def run_module(name: str, *words: str) -> None:
    """Runs a module as `python -m` does, in this process, which a launcher has started."""
    with without_os_exit(), mock.patch.object(sys, "argv", [name, *words]):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
