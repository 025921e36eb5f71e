"""Records the phase of each process of a training, so that an error about a lost process can name its last phase.

A collective of gloo fails when a process has ended. A collective of NCCL waits for it, in a kernel that no signal
interrupts, until the launcher kills the waiting processes; they cannot say which process they waited for. Therefore a
thread of each process watches the others of its machine.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Any

import psutil
import torch.distributed as dist
from transformers.utils import logging

from ..processes import Processes

POLL = 1.0  # seconds between two looks at the other processes
GRACE = 10.0  # seconds that a process has to end by itself after another one was lost; torchrun kills it after 30
_END = "the end of the training"

logger = logging.get_logger(__name__)


class Phases:
    """Records the phase of each process of the default group, and describes the processes that end or hang.

    Each process writes its own phase into the store of the group. torchrun keeps that store, so it outlives a process.

    While the context is open, a process of this machine that has ended without leaving its own context counts as lost.
    If this process has not left the context `GRACE` seconds later, because it waits for the lost one, it names the lost
    one with its phase and ends with exit code 1.
    """

    def __init__(self) -> None:
        processes = Processes()
        self._rank, self._world_size = processes.rank, processes.world_size
        self._left = threading.Event()
        self._told: set[str] = set()
        self._reachable = processes.world_size > 1  # whether the store answers
        self._store: Any = None
        if processes.world_size > 1:
            self._store = dist.PrefixStore("infcl", dist.distributed_c10d._get_default_store())

    def __enter__(self) -> Phases:
        """Begins the training; collective."""
        if self._reachable:
            this = psutil.Process()
            stated = Processes().gather_text(f"{this.pid} {this.create_time()}")
            self.enter("the start")
            threading.Thread(target=self._watch, args=(self._of_this_machine(stated),), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, SystemExit):
            self.enter(_END)
        self._left.set()

    def enter(self, phase: str) -> None:
        """Records that this process begins a phase."""
        try:
            if self._reachable:
                self._store.set(f"phase/{self._rank}", phase)
        except RuntimeError:  # the launcher that kept the store has ended, and this process may still save a checkpoint
            self._reachable = False

    def tell(self, message: str) -> None:
        """Logs an error, unless the same one was logged before."""
        if message not in self._told:
            self._told.add(message)
            logger.error(message)

    def describe_lost(self, seconds: float = 3.0) -> str:
        """A sentence about the processes that do not answer, for a message after a collective has failed.

        Every process that is left has to call it. A process that does not call it in time counts as lost.
        """
        unreachable = "The process that keeps the group's store does not answer, which is rank 0 or the launcher."
        if not self._reachable:
            return unreachable
        lost = []
        try:
            self._store.set(f"left/{self._rank}", "")
            end = time.monotonic() + seconds
            for rank in range(self._world_size):
                while not self._store.check([f"left/{rank}"]) and time.monotonic() < end:
                    time.sleep(0.05)
                if not self._store.check([f"left/{rank}"]):
                    lost.append(self._of_lost(rank))
        except RuntimeError:
            return unreachable
        return " ".join(lost) or "All processes are left, but cannot reach each other."

    def _of_lost(self, rank: int) -> str:
        return f"Rank {rank} does not answer; its last phase was {self._phase(rank)}."

    def _phase(self, rank: int) -> str:
        return str(self._read(f"phase/{rank}") or "the start")

    def _read(self, key: str) -> str | None:
        """The value of a key of the store, or None if the store has no such key (`get` would wait for it)."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _of_this_machine(self, stated: list[str]) -> dict[int, psutil.Process]:
        """The other processes that the same launcher has started on this machine, by rank.

        Args:
            stated: number and time of creation of the process of each rank.
        """
        local_rank, local_size = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        first = self._rank - local_rank
        here = range(max(first, 0), min(first + local_size, self._world_size))
        found = {rank: _process(stated[rank]) for rank in here if rank != self._rank}
        return {rank: process for rank, process in found.items() if process is not None}

    def _watch(self, others: dict[int, psutil.Process]) -> None:
        """Ends this process if it does not notice by itself that another one was lost."""
        try:
            while not self._left.wait(POLL):
                ended = [rank for rank, process in others.items() if _has_ended(process)]
                if lost := [rank for rank in ended if self._phase(rank) != _END]:
                    # It may be ending for the same reason, or about to be told the reason by the lost process.
                    if self._left.wait(POLL):
                        return
                    self.tell(" ".join(map(self._of_lost, lost)))
                    if not self._left.wait(GRACE):
                        os._exit(1)
        except RuntimeError:  # the launcher that kept the store has ended
            return


def _process(stated: str) -> psutil.Process | None:
    """The process with this number and time of creation, if this process can see it."""
    number, created = stated.split()
    try:
        process = psutil.Process(int(number))
        return process if abs(process.create_time() - float(created)) < 5 else None
    except psutil.Error:
        return None


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
