"""Processes that are killed: forks, and trainings of two processes, at random moments, resumed until they finish."""

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from . import models
from .processes import context, join_group
from .teachers import SIDES, Running, taught_by
from .trainers import parameters, trainer_for

# A checkpoint after every step makes about every second kill hit a save. With dropout the weights reveal a random state
# that was lost.
OPTIONS = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "learning_rate": 1e-2}
OPTIONS |= {"eval_strategy": "steps", "eval_steps": 3}
# Every second run has a teacher of another width, and with it a linear map that trains.
WEIGHTS = (0.0, 0.5)  # of the teacher
KILLS_OF_A_RUN = 4  # the maximum
HANG = 120  # seconds


class KillCounts(NamedTuple):
    runs: int
    kills: int
    in_saves: int  # kills that left a half-written checkpoint
    wrong: list[str]


class _End(NamedTuple):
    weights: np.ndarray | None  # None if the run was killed
    seconds: float


def count_kills(runs: int, seed: int, seconds: float = float("inf")) -> KillCounts:
    """Kills one of two processes, or both, at random moments of each run; two new processes resume it.

    Args:
        runs: the number of trainings from start to end, each killed up to `KILLS_OF_A_RUN` times.
        seed: the seed of the victims and the moments.
        seconds: no new run begins after this many seconds.
    """
    rng, begin = random.Random(seed), time.monotonic()
    kills = in_saves = done = 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        _train(Path(folder, "first"), 0.0)  # also starts the server of processes
        ends = [(weight, _train(Path(folder, f"whole-{weight}"), weight)) for weight in WEIGHTS]
        assert all(end.weights is not None for _, end in ends), "a run that nobody kills must end"
        while done < runs and time.monotonic() - begin < seconds:
            weight, whole = ends[done % 2]
            done += 1
            place = Path(folder, str(done))
            for attempt in range(KILLS_OF_A_RUN + 1):
                before = _half_written(place)
                victims = rng.choice(([0], [1], [0, 1])) if attempt < KILLS_OF_A_RUN else []
                # During the first seconds the processes form their group.
                moment = rng.uniform(0.3 * whole.seconds, whole.seconds)
                try:
                    end = _train(place, weight, victims, moment)
                except TimeoutError:
                    wrong.append(f"run {done} hangs after {kills} kills")
                    break
                if end.weights is not None:
                    if not np.array_equal(end.weights, whole.weights):
                        wrong.append(f"the weights of run {done} are others")
                    break
                kills += 1
                in_saves += bool(_half_written(place) - before)
            else:
                wrong.append(f"run {done} does not end")
    return KillCounts(done, kills, in_saves, wrong)


def _half_written(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.glob("_partial-*")}


def _train(folder: Path, weight: float, victims: Sequence[int] = (), moment: float = 0.0) -> _End:
    """Trains with a teacher of this weight, if any, or kills the ranks in ``victims`` after ``moment`` seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parent, child = context().Pipe()
    processes = [
        context().Process(target=_rank, args=(rank, store.port, str(folder), weight, child if rank == 0 else None))
        for rank in range(2)
    ]
    begin, weights = time.monotonic(), None
    for process in processes:
        process.start()
    child.close()
    try:
        if victims and not parent.poll(moment):
            for rank in victims:
                processes[rank].kill()
        if not parent.poll(HANG):
            raise TimeoutError
        with contextlib.suppress(EOFError, ConnectionResetError):  # it was killed or failed
            weights = parent.recv()
        for process in processes:
            process.join(HANG)
            if process.is_alive():
                raise TimeoutError
        return _End(weights, time.monotonic() - begin)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(rank: int, port: int, folder: str, weight: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    join_group(rank, 2, port, seconds=HANG / 2)
    data, shown = models.Pairs(40), models.Pairs(9)
    model = models.clip(dropout=0.3)
    teacher = taught_by(Running(models.siglip(), SIDES), model, weight) if weight else {}
    run = trainer_for(folder, model, data, eval_dataset=shown, **teacher, **OPTIONS)
    run.train(resume_from_checkpoint="auto")
    if pipe is not None:
        pipe.send(parameters(run).numpy())  # a tensor would vanish with this process
    os._exit(0)


# ---- Forks ----


def forked(work: Callable[..., Any], *args: Any) -> int | None:
    """Calls ``work`` in a fork, where nothing is collected at a moment of its own. Returns the exit code."""
    gc.collect()
    gc.disable()
    try:
        process = multiprocessing.get_context("fork").Process(target=work, args=args)
        process.start()
    finally:
        gc.enable()
    process.join()
    return process.exitcode


def killed(work: Callable[..., Any], *args: Any) -> None:
    """Calls ``work`` in a fork, which has to be killed."""
    assert forked(work, *args) == -signal.SIGKILL
