"""Measures the share of the training time that a process waits for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# A warning is logged if the share of the whole training exceeds WAIT_SHARE after WAIT_WINDOWS windows or more.
WAIT_SHARE, WAIT_WINDOWS = 0.1, 20


class DataWait:
    """Measures how long a process trains, and how much of that time it waits for data.

    The first window does not count, because the workers start in it. Evaluations and checkpoints do not count either:
    the clock stands still while it is `stopped`.
    """

    def __init__(self) -> None:
        self.windows = -1
        self._trained = self._waited = 0.0
        self._logged = 0.0, 0.0
        self._started = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The context of what follows each window, in which the clock stands still."""
        self.windows += 1
        if self.windows == 0:
            self._trained = self._waited = 0.0
        else:
            self._trained += time.perf_counter() - self._started
        yield
        self._started = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def share(self) -> float:
        """The share of the time since the training began."""
        return self._waited / self._trained if self._trained else 0.0

    def share_since_last(self) -> float:
        """The share of the time since the last call of this method."""
        trained, waited = self._trained - self._logged[0], self._waited - self._logged[1]
        self._logged = self._trained, self._waited
        return waited / trained if trained > 0 else 0.0
