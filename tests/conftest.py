"""Fixtures of several test files: groups of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported

from helpers.processes import FreshRanks, Ranks


@pytest.fixture
def fresh_ranks() -> FreshRanks:
    return FreshRanks()


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of two processes."""
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    return request.param


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
