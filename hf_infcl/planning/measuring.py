"""The time and memory of a micro-batch, measured on a device with random weights."""

from __future__ import annotations

import time

import torch
from transformers import AutoModel, PretrainedConfig

from ..training.dual_encoder import DualEncoder
from .counting import example_inputs


def measure(config: PretrainedConfig, rows: int, device: torch.device) -> tuple[float, int]:
    """Runs two micro-batches forward and backward under bf16 autocast, and measures the second.

    Returns:
        Its seconds, and the peak of the memory on a GPU in bytes, with the weights and their gradients (0 on a CPU).
    """
    model = AutoModel.from_config(config, dtype=torch.float32).to(device).train()
    encoder = DualEncoder(model)
    batch = {
        name: torch.zeros((rows, *value.shape[1:]), dtype=value.dtype, device=device)
        for name, value in example_inputs(config).items()
    }
    seconds, peak = 0.0, 0
    for _ in range(2):
        _synchronize(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            images, texts = encoder.embed(model, batch)
        (images.float().sum() + texts.float().sum()).backward()
        del images, texts
        _synchronize(device)
        seconds = time.perf_counter() - start
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return seconds, peak


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
