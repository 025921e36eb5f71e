"""A process that is killed or hangs, in any phase, ends the others in bounded time, with its rank and phase named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.processes import context
from helpers.trainers import parameters, trainer_for

from hf_infcl.training.checkpoints import choose

WAIT = 60  # seconds that a test waits for the end of a process; the group's timeout is shorter

OPTIONS = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}

# The phase, the method of the trainer that never returns, and the number of its call, from 1.
PHASES = {
    "loading data after step 1": ("data_collator", 4),
    "the first pass after step 1": ("_encode", 4),
    "the second pass after step 1": ("_encode", 6),
    "the optimizer's step after step 1": ("_after_optimizer_step", 2),
    "evaluating after step 2": ("evaluation_loop", 1),
    "saving after step 2": ("_save_rng_state", 2),
}


def trainer(folder: str) -> Any:
    data = models.Pairs(32)
    return trainer_for(folder, models.clip(dropout=0.3), data, **OPTIONS, eval_dataset=models.Pairs(8))


def interrupt(work: Callable[..., Any], time: int, number: int) -> Callable[..., Any]:
    """``work``, but call number ``time`` stops or kills the process."""
    calls = iter(range(1, 1000))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == time:
            os.kill(os.getpid(), number)
        return work(*args, **kwargs)

    return interrupted


def rank_interrupted(
    rank: int, port: int, folder: str, method: str, time: int, number: int, seconds: float, pipe: Any
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        os.environ[name] = str(value)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=seconds))
    run = trainer(folder)
    if rank == 1:
        setattr(run, method, interrupt(getattr(run, method), time, number))
    try:
        run.train()
        pipe.send("trained to the end")
    except RuntimeError as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(1)


def interrupted(folder: str, method: str, time: int, number: int = signal.SIGKILL, seconds: float = 50) -> str:
    """What rank 0 raises when rank 1 gets a signal."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parent, child = context().Pipe()
    job = (store.port, folder, method, time, number, seconds, child)
    processes = [context().Process(target=rank_interrupted, args=(rank, *job)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        assert parent.poll(WAIT), "rank 0 hangs"
        return parent.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()


def rank_goes_on(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    whole, run = trainer(f"{folder}/whole"), trainer(f"{folder}/killed")
    whole.train()
    run.train(resume_from_checkpoint="auto")
    assert run.steps_trained == 1
    return [parameters(whole), parameters(run)]


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_process_is_named_with_its_phase(ranks, tmp_path, phase):
    folder = tmp_path / "killed"
    message = interrupted(str(folder), *PHASES[phase])
    assert message == f"OtherRankFailedError: Rank 1 does not answer; its last phase was {phase}."
    assert choose(str(folder), "auto") == str(folder / "checkpoint-1")
    if phase.startswith("saving"):
        for whole, run in ranks.run(rank_goes_on, 2, str(tmp_path)):
            assert torch.equal(whole, run)


def test_a_process_that_hangs_is_named_after_the_timeout(tmp_path):
    message = interrupted(str(tmp_path), "_encode", 4, signal.SIGSTOP, seconds=8)
    assert message == "OtherRankFailedError: Rank 1 does not answer; its last phase was the first pass after step 1."
