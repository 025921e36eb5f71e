"""The processor's cores, and whether other processes compute on them."""

from __future__ import annotations

import os


def busy_cores(threads: int) -> str:
    """A sentence if other processes compute on the cores on which torch will compute with so many threads.

    Threads that wait for one another occupy their cores. Of three processes on two cores, a step of a small model took
    40 to 100 ms by one thread each, and 250 to 4,600 ms by torch's default of two.
    """
    there, load = cores(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    free = max(1, int(there - load))
    if "OMP_NUM_THREADS" in os.environ or load < 1 or threads <= free:
        return ""
    return (
        f"The load of this machine is {load:.1f}, and torch computes with {threads} threads on its {there} cores. They "
        f"wait for one another. With OMP_NUM_THREADS={free} in the environment, the training may be many times as fast."
    )


def cores() -> int:
    """The processor's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
