"""Ray Train starts the workers of scripts/ray_train.py again when one was killed, and they go on."""

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from helpers.demo import SCRIPTS, copy_rows
from helpers.guides import ROOT

PACKAGES = Path(sys.prefix) / "ray"  # see tests/ray.txt
STEPS, FIRST_SAVE, LIMIT = 40, 10, 300


def workers(launcher: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in launcher.children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::RayTrainWorker"):
                found.append(process)
        except psutil.Error:  # noqa: PERF203  # it has ended
            continue
    return found


@pytest.mark.ray
def test_a_killed_worker_costs_a_restart(demo, tmp_path):
    assert PACKAGES.is_dir(), "who asks for this test installs tests/ray.txt as it says"
    copy_rows(demo / "digits" / "train", tmp_path / "pairs" / "train", 48)
    words = ["--model", demo / "clip-init", "--dataset", tmp_path / "pairs", "--output_dir", tmp_path / "out"]
    words += ["--global_batch_size", "16", "--max_steps", str(STEPS), "--save_steps", str(FIRST_SAVE)]
    path = os.pathsep.join(map(str, (ROOT, PACKAGES)))
    with tempfile.TemporaryDirectory(prefix="ray") as short, (tmp_path / "printed").open("w+") as printed:
        own = {"PYTHONPATH": path, "RAY_TMPDIR": short, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        driver = psutil.Popen(
            [sys.executable, SCRIPTS / "ray_train.py", *map(str, words)],
            env={**os.environ, **own, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        all_of_ray: list[psutil.Process] = []
        try:
            end, killed = time.monotonic() + LIMIT, None
            while driver.poll() is None and time.monotonic() < end:
                if killed is None and (tmp_path / "out" / "model" / f"checkpoint-{FIRST_SAVE}").exists():
                    killed = workers(driver)[-1]
                    killed.kill()
                all_of_ray = driver.children(recursive=True) or all_of_ray
                time.sleep(0.05)
        finally:
            for process in [driver, *all_of_ray]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        said = (tmp_path / "printed").read_text()
    assert driver.wait() == 0, said
    assert killed is not None, said
    (steps,) = set(re.findall(rf"Trained (\d+) steps up to step {STEPS}", said))
    assert 0 < int(steps) <= STEPS - FIRST_SAVE, said
    assert re.search(rf"{{'step': {STEPS}, 'loss': .*, 'samples_seen': {16 * STEPS}}} Checkpoint\(", said), said
