"""The random generators that forwards draw from: kept, or started from a seed for a while."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """A context after which the generators of Python, NumPy, torch's CPU and ``device`` continue as before it."""
    # Without a device any type that torch knows will do, because None is allowed only since torch 2.13.
    devices, kind = ((), "cuda") if device.type == "cpu" else ((device.index or 0,), device.type)
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the generator that other code draws from
    with torch.random.fork_rng(devices=devices, device_type=kind):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """A context in which the generators start from ``seed``, and after which they continue as before it.

    These are those of Python, NumPy, torch's CPU and ``device``. Other GPUs than this one are left with the seed.
    """
    device = torch.device("cpu") if device is None else device
    # torch's own function is slower: it queues the seed, with the formatted stack, for accelerators not used yet.
    seed_torch = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
    with random_state_kept(device):
        seed_torch(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # it takes 32 bits
        yield
