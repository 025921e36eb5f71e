"""What ends a training from outside: processes that are lost, and signals to any of its processes.

A collective of gloo fails when a process has ended or hangs. A collective of NCCL waits for that process in a kernel
that no signal interrupts, until the launcher or NCCL's own timeout ends the waiting processes, which cannot say for
which process they waited. Each process therefore has a thread that watches the other processes of its machine, and its
own progress, and an error about a lost process names its last phase.
"""

import ctypes
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch.distributed as dist

from . import launcher
from .collectives import OtherRankFailedError, Processes, by_rank, is_lost_connection

POLL = 1.0  # seconds between two looks at the other processes, or at the launcher
GRACE = 10.0  # seconds that a process may spend without progress after another was lost; torchrun kills it after 30
# The shares of the timeout after which a process without progress writes its place into the store, and logs all places.
SHARE_PLACE_AFTER, LOG_PLACES_AFTER = 0.8, 0.9
ANSWER = 3.0  # seconds in which a process answers after a failed collective, or counts as lost
_END = "the end of the training"

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_ECHO = 3.0  # seconds; a launcher passes on a signal that a batch system has already sent to all processes

logger = logging.getLogger(__name__)


# ---- Lost processes ----


class Phases:
    """Records the phase of each process of the default group, and describes the processes that end or hang.

    Each process writes its own phase into the store of the group. torchrun keeps that store, so it outlives a process
    (or, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, rank 0 does).

    While the context is open, a process of this machine that has ended without leaving its own context counts as lost.
    This process then reports the lost one with its phase. If it neither leaves the context nor makes progress for
    `GRACE` seconds, because it waits for the lost one, it ends with exit code 1.

    A process that makes no progress for most of the group's timeout logs where each process is and which ones do not
    answer, before the timeout ends it.

    Args:
        timeout: the timeout of the group's collectives, in seconds.
    """

    def __init__(self, timeout: float = math.inf) -> None:
        processes = Processes()
        self._timeout, self._progressed = timeout, time.monotonic()
        self._rank, self._world_size = processes.rank, processes.world_size
        self._left = threading.Event()
        self.logged: set[str] = set()
        self._reachable = processes.world_size > 1  # whether the store answers
        if self._reachable:
            self._store = dist.PrefixStore("infcl", dist.distributed_c10d._get_default_store())

    def __enter__(self) -> "Phases":
        """Begins the training; collective."""
        if self._reachable:
            this = psutil.Process()
            stated = Processes().gather_objects((this.pid, this.create_time()))
            self.enter("the start")
            threading.Thread(target=self._watch, args=(self._of_this_machine(stated),), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Ends the training. An error of a collective whose other process is lost names that process and its phase."""
        try:
            if kind is None or issubclass(kind, SystemExit):
                self.enter(_END)
            elif isinstance(error, RuntimeError) and is_lost_connection(error):
                self.log_once(message := self.describe_lost())
                raise OtherRankFailedError(message) from error
        finally:
            self._left.set()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Records that this process begins a phase, after this number of trained optimizer steps."""
        self.note_progress()
        if step is not None:
            phase = f"{phase} after step {step}"
        try:
            if self._reachable:
                self._store.set(f"phase/{self._rank}", phase)
        except RuntimeError:  # the launcher that kept the store has ended, and this process may still save a checkpoint
            self._reachable = False

    def note_progress(self) -> None:
        """Records that this process does not hang."""
        self._progressed = time.monotonic()

    def log_once(self, message: str) -> None:
        """Logs an error, unless the same one was logged before."""
        if message not in self.logged:
            self.logged.add(message)
            logger.error(message)

    def describe_lost(self) -> str:
        """A sentence about the processes that do not answer, for a message after a failed collective.

        Every remaining process has to call this. A process that does not call it in time counts as lost.
        """
        unreachable = "The process that keeps the group's store does not answer, which is rank 0 or the launcher."
        if not self._reachable:
            return unreachable
        lost = []
        try:
            self._store.set(f"left/{self._rank}", "")
            end = time.monotonic() + ANSWER
            for rank in range(self._world_size):
                while not self._store.check([f"left/{rank}"]) and time.monotonic() < end:
                    time.sleep(0.05)
                if not self._store.check([f"left/{rank}"]):
                    lost.append(self._of_lost(rank))
        except RuntimeError:
            return unreachable
        return " ".join(lost) or "All processes are still running, but cannot reach each other."

    def _of_lost(self, rank: int) -> str:
        return f"Rank {rank} does not answer; its last phase was {self._phase(rank)}."

    def _phase(self, rank: int) -> str:
        return str(self._read(f"phase/{rank}") or "the start")

    def _read(self, key: str) -> str | None:
        """The value of a key of the store, or None if the store has no such key (`get` would wait for it)."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _of_this_machine(self, stated: list[tuple[int, float]]) -> dict[int, psutil.Process]:
        """The other processes that the same launcher started on this machine, by rank.

        ``stated`` has the process id and the creation time of each rank's process.
        """
        local_rank, local_size = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        first = self._rank - local_rank
        here = range(max(first, 0), min(first + local_size, self._world_size))
        processes = {}
        for rank in set(here) - {self._rank}:
            number, created = stated[rank]
            with suppress(psutil.Error):  # this process cannot see it
                process = psutil.Process(number)
                if abs(process.create_time() - created) < 5:
                    processes[rank] = process
        return processes

    def _watch(self, processes: dict[int, psutil.Process]) -> None:
        """Reports processes that are lost or hang, and ends this process if it does not notice by itself."""
        key, hangs = f"place/{self._rank}", False  # where the store has the place of this process while it hangs
        logged = math.nan  # the last progress for which the places were logged
        try:
            while not self._left.wait(POLL):
                ended = [rank for rank, process in processes.items() if has_ended(process)]
                if lost := [rank for rank in ended if self._phase(rank) != _END]:
                    # It may be ending for the same reason, or about to receive the reason from the lost process.
                    if self._left.wait(POLL):
                        return
                    self.log_once(" ".join(map(self._of_lost, lost)))
                    self._end_if_stuck()
                    return
                idle = time.monotonic() - self._progressed
                if hangs != (idle > SHARE_PLACE_AFTER * self._timeout):
                    hangs = not hangs
                    if hangs:
                        self._store.set(key, f"in {self._phase(self._rank)}, {current_place()}")
                    else:  # it continues
                        self._store.delete_key(key)
                if idle > LOG_PLACES_AFTER * self._timeout and logged != self._progressed:
                    logged = self._progressed
                    self._log_places(idle)
        except RuntimeError:  # the launcher that kept the store has ended
            return

    def _end_if_stuck(self) -> None:
        """Ends this process if it waits in one place of the program; returns when it has left the context."""
        place, since = "", time.monotonic()
        while not self._left.wait(POLL):
            now = current_place()
            if now != place:
                place, since = now, time.monotonic()
            elif time.monotonic() - since > GRACE:
                os._exit(1)

    def _log_places(self, seconds: float) -> None:
        """Logs the places of all processes that hang; the others do not answer."""
        places = [self._read(f"place/{rank}") for rank in range(self._world_size)]
        lost = [self._of_lost(rank) for rank, place in enumerate(places) if place is None]
        idle = f"This process has made no progress for {seconds:.0f} of the {self._timeout:g} seconds of ddp_timeout."
        self.log_once(" ".join([idle, *lost, f"Places: {by_rank([place or '' for place in places])}."]))


def has_ended(process: psutil.Process) -> bool:
    """Whether it no longer runs. Its parent may not have noticed yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def current_place() -> str:
    """The line of the program at which the main thread of this process is."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


# ---- Signals ----


@contextmanager
def ended_with_launcher() -> Iterator[None]:
    """A context in which this process ends with its launcher, which it would not notice while waiting for others.

    Raises:
        ValueError: the processes cannot meet at MASTER_ADDR and MASTER_PORT.
    """
    left = threading.Event()

    def watch() -> None:
        while not left.wait(POLL):
            if launcher.has_gone():
                logger.error("The launcher ended while its processes formed their group, so this process ends as well.")
                os._exit(128 + signal.SIGTERM)

    if launcher.is_launched():
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except dist.DistNetworkError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        why = "another program uses that port" if "EADDRINUSE" in str(error) else str(error).rstrip(".")
        raise ValueError(
            f"The processes cannot meet at {place} (MASTER_ADDR and MASTER_PORT): {why}. Choose a free port; `torchrun "
            "--standalone` does so itself."
        ) from error
    finally:
        left.set()


def heed_parent_alone(worker: int = 0) -> None:
    """Lets no process but its parent end this one, a worker of a data loader; for ``DataLoader(worker_init_fn=...)``.

    `timeout`, a terminal and some batch systems send a signal to all processes of a training. Its workers would end at
    once, although the training still needs their batches for the step after which it saves a checkpoint. A worker whose
    parent has gone ends by itself, as torch sees to.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not hasattr(signal, "sigwaitinfo"):  # not on macOS or Windows
        return

    def look() -> None:
        while True:
            received = signal.sigwaitinfo(SIGNALS)
            if received.si_signo == signal.SIGTERM and received.si_pid == parent.pid:
                os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # also of the threads that begin from now on
    threading.Thread(target=look, daemon=True).start()


class Preempted(SystemExit):
    """The training has ended before its last step because of a signal.

    The exit code of the process is 128 plus the number of the signal: 143 for SIGTERM, 138 for SIGUSR1, 130 for SIGINT.
    """


class EndRequestedError(Exception):
    """A signal, whose number is its argument, has requested the end of the training where it cannot be saved."""


class Preemption:
    """While the context is open, the first signal is noted and the second, 3 seconds later or more, ends the process.

    A process whose launcher has ended acts as if it received SIGTERM, because nothing else would end or restart it.
    Signals are noted only if the main thread of the program opens the context; otherwise they keep their usual effect.
    So does SIGINT (Ctrl-C) in an interactive session, where it raises KeyboardInterrupt, and in the background of a
    shell script, where it is ignored.
    """

    def __init__(self) -> None:
        self._noted, self._since = 0, 0.0
        self._before: dict[int, tuple[Any, ctypes.Array[ctypes.c_char]]] = {}

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is threading.main_thread():
            usual = hasattr(sys, "ps1") or signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            for number in set(SIGNALS) - ({signal.SIGINT} if usual else set()):
                # Python knows handlers that were set in C, as by `faulthandler.register`, as None or not at all, so the
                # system's record of them is kept as well, a ``struct sigaction`` of at most some 150 bytes.
                action = ctypes.create_string_buffer(1024)
                ctypes.CDLL(None).sigaction(number, None, action)
                self._before[number] = signal.signal(number, self._note), action
        return self

    def __exit__(self, *_: object) -> None:
        for number, (handler, action) in self._before.items():
            if handler is not None:
                signal.signal(number, handler)
            ctypes.CDLL(None).sigaction(number, action, None)

    @property
    def signal(self) -> int:
        """The number of the signal that was noted, or 0."""
        return self._noted or (signal.SIGTERM if launcher.has_gone() else 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._noted:
            self._noted, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > _ECHO:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Interruptions:
    """Learns of signals and of lost processes while a training is `watched`; before and after it, of none."""

    def __init__(self) -> None:
        self._preemption, self.phases = Preemption(), Phases()
        self._evaluates = False

    @contextmanager
    def watched(self, timeout: float, finish: Callable[[], object]) -> Iterator[None]:
        """The context of a training, with the timeout of `Phases`.

        ``finish`` is called after the training, also after one that has failed. While it runs, `Phases` no longer ends
        this process because another one is lost.
        """
        with Preemption() as self._preemption:
            try:
                with Phases(timeout) as self.phases:
                    yield
            finally:
                finish()

    @property
    def is_ending(self) -> bool:
        """Whether a signal has requested the end of this process, which may also have ended its workers."""
        return bool(self._preemption.signal)

    def agree(self, numbers: Sequence[float] = ()) -> list[list[float]]:
        """`Processes.agree` between two steps.

        Raises:
            EndRequestedError: on all processes, if any has received a signal to end.
        """
        agreed = Processes().agree([self._preemption.signal, *numbers])
        if signals := {int(number) for number, *_ in agreed if number}:
            raise EndRequestedError(max(signals))
        return [values for _, *values in agreed]

    @contextmanager
    def evaluation(self, step: int, control: Any) -> Iterator[None]:
        """The context of an evaluation after so many optimizer steps, which a signal ends after a batch.

        The checkpoint that is saved then says by Trainer's ``control`` that the evaluation is still to be made.
        """
        self.phases.enter("evaluating", step)
        self._evaluates = True
        try:
            yield
        except EndRequestedError:
            control.should_evaluate = True
            raise
        finally:
            self._evaluates = False

    def end_batch(self) -> None:
        """Notes that a batch of an evaluation is done; collective.

        Raises:
            EndRequestedError: as `agree`, in an evaluation between two steps.
        """
        self.phases.note_progress()
        if self._evaluates:
            self.agree()
        else:
            Processes().agree([])
