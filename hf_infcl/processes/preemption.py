"""What may end a training from outside: signals to any of its processes, and processes that are lost."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from . import launcher
from .collectives import Processes
from .phases import Phases

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_POLL = 1.0  # seconds between two looks at the launcher
_ECHO = 3.0  # seconds; a launcher passes on a signal that a batch system has already sent to all processes


@contextmanager
def ended_with_launcher() -> Iterator[None]:
    """A context in which this process ends with its launcher, which it would not notice while waiting for others."""
    left = threading.Event()

    def watch() -> None:
        while not left.wait(_POLL):
            if launcher.has_gone():
                logger.error("The launcher ended while its processes formed their group, so this process ends as well.")
                os._exit(128 + signal.SIGTERM)

    if launcher.is_launched():
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
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


class _Handler:
    """Handles a signal until the handler before is restored, even if that was set in C, as by `faulthandler.register`.

    Python knows handlers that were set in C as None or not at all, so the system's own record of the handler, a
    ``struct sigaction`` of at most some 150 bytes, is kept as well.
    """

    def __init__(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._number = number
        self._action = ctypes.create_string_buffer(1024)
        ctypes.CDLL(None).sigaction(number, None, self._action)
        self._known = signal.signal(number, handler)

    def restore(self) -> None:
        if self._known is not None:
            signal.signal(self._number, self._known)
        ctypes.CDLL(None).sigaction(self._number, self._action, None)


class AskedToEndError(Exception):
    """A signal has asked for the end of the training in a place where it cannot be saved.

    Args:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Preemption:
    """While the context is open, the first signal is noted and the second, 3 seconds later or more, ends the process.

    A process whose launcher has ended acts as if it received SIGTERM, because nothing else would end or restart it.
    Signals are noted only if the main thread of the program opens the context; otherwise they keep their usual effect.
    So does SIGINT (Ctrl-C) in an interactive session, where it raises KeyboardInterrupt, and in the background of a
    shell script, where it is ignored.
    """

    def __init__(self) -> None:
        self._noted, self._since = 0, 0.0
        self._before: dict[int, _Handler] = {}

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            usual = hasattr(sys, "ps1") or signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            noted = [number for number in SIGNALS if not (usual and number == signal.SIGINT)]
            self._before = {number: _Handler(number, self._note) for number in noted}
        return self

    def __exit__(self, *_: object) -> None:
        for handler in self._before.values():
            handler.restore()

    @property
    def signal(self) -> int:
        """The number of the signal that was noted, or 0."""
        if not self._noted and launcher.has_gone():
            return signal.SIGTERM
        return self._noted

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._noted:
            self._noted, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > _ECHO:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Interruptions:
    """Learns of signals and of lost processes while a training is `watched`; before and after it, of none.

    Attributes:
        phases: records what this process is doing.
    """

    def __init__(self) -> None:
        self._preemption, self.phases = Preemption(), Phases()
        self._evaluates = False

    @contextmanager
    def watched(self, timeout: float, finish: Callable[[], object]) -> Iterator[None]:
        """The context of a training.

        Args:
            timeout: of the group's collectives, in seconds.
            finish: is called after the training, also after one that has failed. While it runs, `Phases` no longer ends
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
        """Whether a signal has asked this process to end, which may also have ended its workers."""
        return bool(self._preemption.signal)

    def agree(self, numbers: Sequence[float] = ()) -> list[list[float]]:
        """`Processes.agree` between two steps.

        Raises:
            AskedToEndError: on all processes, if any has received a signal to end.
        """
        agreed = Processes().agree([self._preemption.signal, *numbers])
        if signals := {int(number) for number, *_ in agreed if number}:
            raise AskedToEndError(max(signals))
        return [values for _, *values in agreed]

    @contextmanager
    def evaluation(self, step: int, control: Any) -> Iterator[None]:
        """The context of an evaluation between two steps, which a signal ends after a batch.

        Args:
            step: the number of trained optimizer steps.
            control: Trainer's. The checkpoint that is saved then says by it that the evaluation is still to be made.
        """
        self.phases.enter("evaluating", step)
        self._evaluates = True
        try:
            yield
        except AskedToEndError:
            control.should_evaluate = True
            raise
        finally:
            self._evaluates = False

    def end_batch(self) -> None:
        """Notes that a batch of an evaluation is done; collective.

        Raises:
            AskedToEndError: as `agree`, in an evaluation between two steps.
        """
        self.phases.note_progress()
        if self._evaluates:
            self.agree()
        else:
            Processes().agree([])
