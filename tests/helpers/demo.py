"""The files of the demo, and functions that run the repository's programs as a user does."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_infcl.tools import cli

from .processes import without_os_exit

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
CONFIGS = SCRIPTS / "configs"
DEMO = yaml.load((SCRIPTS / "demo.yaml").read_text(), Loader=yaml.BaseLoader)  # `no` stays `no`


def make_digits(folder: Path) -> Path:
    """Writes digits/ and clip-init/ into a folder, as make_digits.py does, and returns it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_digits.py", "--output_dir", str(folder)])
        runpy.run_path(str(SCRIPTS / "make_digits.py"), run_name="__main__")
    return folder


def start(*words: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python in the repository root. stdout also contains stderr."""
    known = filter(None, [os.environ.get("PYTHONPATH")])
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *known]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def infcl(*words: Any) -> None:
    """Runs a command in this process."""
    cli.main(words=[str(word) for word in words])


def infcl_launched(*words: Any) -> None:
    """Runs a command in this process, which `launched` has started."""
    with without_os_exit():
        infcl(*words)


def run(*words: Any) -> str:
    """Runs Python in the repository root, expects success, and returns the output."""
    done = start(*words)
    assert done.returncode == 0, done.stdout
    return done.stdout


def accelerate(config: str) -> list[Any]:
    """The words of `accelerate launch` with one of scripts/configs, for two processes."""
    return ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / f"{config}.yaml", "--main_process_port", 0]
