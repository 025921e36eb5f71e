"""Signals that ask a training to end: it saves a checkpoint first."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from transformers.utils import logging

from .. import launcher

logger = logging.get_logger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_POLL = 1.0  # seconds between two looks at the launcher
_ECHO = 3.0  # seconds; a launcher passes on the signal that a batch system has sent to all processes already


@contextmanager
def ended_with_launcher() -> Iterator[None]:
    """A context in which this process ends if its launcher does: waiting for the others, it would not notice."""
    left = threading.Event()

    def watch() -> None:
        while not left.wait(_POLL):
            if launcher.has_gone():
                logger.error("The launcher has ended while its processes formed their group, and so does this process.")
                os._exit(128 + signal.SIGTERM)

    if launcher.is_launched():
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        left.set()


class Preempted(SystemExit):
    """Training has ended before its last step, because a signal asked for it.

    The exit code of the process is 128 plus the number of the signal: 143 for SIGTERM, 138 for SIGUSR1.
    """


class Preemption:
    """While the context is open, the first signal is noted and the second, 3 seconds later or more, ends the process.

    A process whose launcher has gone counts as one that got SIGTERM: nobody would ever end or restart it. Signals are
    noted only if the context is opened in the main thread of the program; otherwise they keep their usual effect.
    """

    def __init__(self) -> None:
        self._noted, self._since = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

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
