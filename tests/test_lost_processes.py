"""If a process is killed or hangs, in any phase, the others end in bounded time and name its rank and phase."""

import contextlib
import faulthandler
import functools
import itertools
import logging
import math
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.processes import context, join_group, on_ranks
from helpers.trainers import parameters, trainer_for

from hf_infcl.processes import signals as phases
from hf_infcl.processes.collectives import Processes
from hf_infcl.processes.signals import Interruptions
from hf_infcl.trainer.checkpoints import choose

WAIT = 120  # seconds within which rank 0 has to end; the group's timeout is shorter

OPTIONS = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}

# On a GPU, trials, kept graphs and the decision about compilation would change the number of forwards.
GIVEN: dict[str, Any] = {"texts_at_once": 1, "retain_graphs": "1", "torch_compile": False}

# The phase, the method of the trainer or of a part of it in which the process ends, and the number of its call, from 1.
PHASES = {
    "loading data after step 1": ("data_collator", 4),
    "the first pass after step 1": ("model.forward", 4),
    "the second pass after step 1": ("model.forward", 6),
    "the optimizer's step after step 1": ("callback_handler.on_optimizer_step", 2),
    "evaluating after step 2": ("evaluation_loop", 1),
    "saving after step 2": ("save_model", 2),
}


def trainer(folder: str, **options: Any) -> Any:
    data = models.Pairs(32)
    return trainer_for(folder, models.clip(dropout=0.3), data, **OPTIONS, eval_dataset=models.Pairs(8), **options)


def at_call(number: int, action: Callable[[], Any], work: Callable[..., Any]) -> Callable[..., Any]:
    """``work`` with ``action`` before call number ``number``."""
    calls = iter(range(1, 1000))

    @functools.wraps(work)  # ranks whose collators have other names would train different runs
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            action()
        return work(*args, **kwargs)

    return interrupted


class Tell(logging.Handler):
    """Sends logged errors through a pipe."""

    def __init__(self, pipe: Any) -> None:
        super().__init__(logging.ERROR)
        self.pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self.pipe.send(record.getMessage())


def rank_interrupted(
    rank: int,
    pipe: Any,
    port: int,
    folder: str,
    actions: dict[int, Any],
    backend: str,
    seconds: float,
    grace: float,
    options: dict[str, Any],
) -> None:
    phases.GRACE = grace
    if rank == 0:
        faulthandler.dump_traceback_later(WAIT - 10)  # if rank 0 hangs, the test prints where
    if backend == "nccl":
        # After a timeout, NCCL's watchdog waits 60 s for a report before it aborts the process.
        os.environ |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # otherwise an abort dumps the memory of the process
    join_group(rank, 2, port, backend, seconds)
    run = trainer(folder, **options)
    if rank in actions:
        method, number, action = actions[rank]
        *parts, name = method.split(".")
        owner = functools.reduce(getattr, parts, run)
        setattr(owner, name, at_call(number, action, getattr(owner, name)))
    if rank == 0:
        phases.logger.addHandler(Tell(pipe))
    try:
        run.train()
    except RuntimeError as error:
        if rank == 0:
            pipe.send(f"{type(error).__name__}: {error}")
    os._exit(2)


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)


def wait_forever() -> None:
    threading.Event().wait()


KILLED, STOPPED = functools.partial(end_by, signal.SIGKILL), functools.partial(end_by, signal.SIGSTOP)


def interrupted(
    folder: str,
    actions: dict[int, Any],
    *,
    backend: str = "gloo",
    seconds: float = 50,
    grace: float = phases.GRACE,
    **options: Any,
) -> tuple[list[str], int]:
    """What rank 0 logs and raises when some ranks take an action in a call of a method, and its exit code.

    Args:
        actions: for each rank, the method, the number of the call from 1, and the action.
        seconds: the timeout of the group.
        options: options of the training.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parent, child = context().Pipe()
    job = (store.port, folder, actions, backend, seconds, grace, options)
    processes = [
        context().Process(target=rank_interrupted, args=(rank, pipe, *job)) for rank, pipe in enumerate((child, None))
    ]
    for process in processes:
        process.start()
    child.close()
    told, end = [], time.monotonic() + WAIT
    try:
        with contextlib.suppress(EOFError):
            while parent.poll(max(0, end - time.monotonic())):
                told.append(parent.recv())
        processes[0].join(max(5, end - time.monotonic()))
        assert processes[0].exitcode is not None, f"Rank 0 hangs. It has told {told}."
        return told, processes[0].exitcode
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
    told, _ = interrupted(str(folder), {1: (*PHASES[phase], KILLED)})
    message = f"Rank 1 does not answer; its last phase was {phase}."
    assert told == [message, f"OtherRankFailedError: {message}"]
    assert choose(str(folder), "auto") == str(folder / "checkpoint-1")
    if phase.startswith("saving"):
        for whole, run in ranks.run(rank_goes_on, 2, str(tmp_path)):
            assert torch.equal(whole, run)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_process_is_named_with_its_phase_on_gpus(tmp_path, phase):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    told, code = interrupted(str(tmp_path), {1: (*PHASES[phase], KILLED)}, backend="nccl", **GIVEN)
    assert told, code
    assert told[0] == f"Rank 1 does not answer; its last phase was {phase}."
    assert code != 0, "by the thread, by NCCL's watchdog or by the error"


def test_a_process_that_waits_for_a_killed_one_without_an_error_ends(tmp_path):
    """This is how NCCL waits for a process that has been killed."""
    place = PHASES["the first pass after step 1"]
    told, code = interrupted(str(tmp_path), {0: (*place, wait_forever), 1: (*place, KILLED)}, grace=1)
    assert told == ["Rank 1 does not answer; its last phase was the first pass after step 1."]
    assert code == 1


def test_a_process_that_hangs_is_named_after_the_timeout(tmp_path):
    place = PHASES["the first pass after step 1"]
    told, _ = interrupted(str(tmp_path), {1: (*place, STOPPED)}, seconds=8)
    message = "Rank 1 does not answer; its last phase was the first pass after step 1."
    assert told == [message, f"OtherRankFailedError: {message}"]


@on_ranks(2)
def test_a_process_that_has_ended_its_training_is_not_lost(rank, world_size):
    looks, ended, enough = itertools.count(1), threading.Event(), threading.Event()

    def has_ended(process: Any) -> bool:
        if ended.is_set() and next(looks) == 3:
            enough.set()
        return ended.is_set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "POLL", 0.01)
        patch.setattr(phases, "GRACE", 0.0)
        patch.setattr(phases, "has_ended", has_ended)
        with phases.Phases() as of_training:
            if rank == 0:
                Processes().gather_objects("rank 1 has left")
                ended.set()
                assert enough.wait(60)
        if rank == 1:
            Processes().gather_objects("rank 1 has left")
    assert not of_training.logged


@on_ranks(2)
def test_a_process_that_gets_further_after_another_was_lost_is_not_ended(rank, world_size):
    places, enough = itertools.count(), threading.Event()

    def another_place() -> str:
        place = next(places)
        if place == 5:
            enough.set()
        return str(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "POLL", 0.01)
        patch.setattr(phases, "GRACE", 0.0)
        patch.setattr(phases, "has_ended", lambda process: rank == 0)
        patch.setattr(phases, "current_place", another_place)
        with phases.Phases():
            if rank == 0:
                assert enough.wait(60)
            Processes().gather_objects("rank 0 has got further")


@on_ranks(2)
def test_work_after_a_training_ends_although_another_process_is_lost(rank, world_size):
    lost, interruptions = threading.Event(), Interruptions()

    def finish() -> None:
        lost.set()
        time.sleep(0.5)  # much longer than a process may wait for a lost one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "POLL", 0.01)
        patch.setattr(phases, "GRACE", 0.0)
        patch.setattr(phases, "has_ended", lambda process: lost.is_set())
        with interruptions.watched(math.inf, finish):
            Processes().gather_objects("both are in their trainings")
    assert lost.is_set()


def rank_is_stopped(rank: int, world_size: int) -> set[str]:
    """Rank 1 makes no progress and its thread does not watch, as after SIGSTOP, while rank 0 waits for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "POLL", (0.01, 100)[rank])
        with phases.Phases() as of_training:
            of_training.enter(f"the {('first', 'second')[rank]} pass after step 3")
            Processes().gather_objects("both are in their phases")
            of_training._timeout = 0.5  # from here on, since rank 1 may come late
            end = time.monotonic() + 60
            while rank == 0 and not of_training.logged and time.monotonic() < end:
                threading.Event().wait(0.05)
            Processes().gather_objects("rank 0 has told")
    return of_training.logged


def test_a_process_that_hangs_is_named_before_the_timeout(ranks):
    """NCCL needs the message before the timeout, which ends the waiting process without an error."""
    (told,), nothing = ranks.run(rank_is_stopped, 2)
    assert re.match(r"This process has made no progress for \d of the 0\.5 seconds of ddp_timeout\. Rank 1 does ", told)
    assert "Rank 1 does not answer; its last phase was the second pass after step 3. Places: rank 0: in the " in told
    assert re.search(r"rank 0: in the first pass after step 3, at \w+\.py:\d+ \(\w+\)\.$", told)
    assert not nothing


@pytest.mark.gpu
def test_a_process_that_hangs_is_named_on_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    place = PHASES["the first pass after step 1"]
    options: dict[str, Any] = {"backend": "nccl", "seconds": 25, "ddp_timeout": 25}
    told, code = interrupted(str(tmp_path), {1: (*place, STOPPED)}, **options, **GIVEN)
    assert told, code
    assert "Rank 1 does not answer; its last phase was the first pass after step 1. Places: rank 0: in " in told[0]
    assert code != 0, "by NCCL's watchdog"
