"""Signals that ask a training to end: it saves a checkpoint first."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from . import launcher

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


def end_early(number: int, step: int, *, trained: bool, saved: bool, tells: bool) -> Preempted:
    """The end of a training by a signal.

    Args:
        number: the signal's.
        step: the number of trained optimizer steps.
        trained: whether this training has trained any of them.
        saved: whether there is a checkpoint of the last one.
        tells: whether this process logs how to resume.
    """
    if trained:
        what = f"checkpoint-{step} is saved" if saved else "No checkpoint of it could be saved"
    else:
        what = "Nothing was trained before that"
    if tells:
        logger.warning(
            f"{signal.Signals(number).name} has ended the training after step {step}. {what}. "
            "Resume with --resume_from_checkpoint auto (in Python, trainer.train(resume_from_checkpoint='auto'))."
        )
    return Preempted(128 + number)


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
