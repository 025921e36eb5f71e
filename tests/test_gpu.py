"""The trainer on GPUs: the same parity as on CPUs, over NCCL, in fp32 and bf16. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from test_parity import MODELS, VARIANTS, check

pytestmark = pytest.mark.gpu

CELLS = [(objective, variant, steps) for objective in MODELS for variant in VARIANTS for steps in (1, 2)]


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fp32_gradients_equal_one_process(ranks, world_size, backend):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    check(ranks, world_size, CELLS, {"use_cpu": False, "backend": backend}, backend="nccl", tolerance=5e-5, floor=1e-6)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bf16_gradients_are_within_its_rounding(ranks, world_size, backend):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    options = {"use_cpu": False, "bf16": True, "backend": backend}
    check(ranks, world_size, CELLS, options, backend="nccl", tolerance=0.05, floor=5e-3)
