"""The time and memory of a micro-batch, measured on a device with random weights."""

from __future__ import annotations

import time

import torch
from transformers import PretrainedConfig

from .counting import build, example_inputs


def measure(
    config: PretrainedConfig,
    rows: int,
    device: torch.device,
    *,
    freeze: str | None = None,
    freeze_layers: int | None = None,
    patch_dropout: float | None = None,
    text_tokens: int | None = None,
    checkpointing: bool = False,
) -> tuple[float, int]:
    """Runs two micro-batches forward and backward under bf16 autocast, and measures the second.

    The arguments are as in `count`. The model is not compiled.

    Returns:
        The seconds, and the peak GPU memory in bytes including the weights and their gradients (0 on a CPU).

    Raises:
        ValueError: the GPU has too little memory.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = 0.0
    try:
        encoder = build(config, device, freeze, freeze_layers, checkpointing, patch_dropout)
        batch = example_inputs(config, rows, device, text_tokens)
        for _ in range(2):
            _synchronize(device)
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16):
                embeds = encoder.embed(encoder.model, batch)
            torch.stack([e.float().sum() for e in embeds if e.requires_grad]).sum().backward()
            del embeds
            _synchronize(device)
            seconds = time.perf_counter() - start
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"A micro-batch of {rows} does not fit into this machine's {torch.cuda.get_device_name(device)}. Omit "
            "--measure, or plan with the --gpu_memory of this GPU."
        ) from error
    return seconds, torch.cuda.max_memory_allocated(device) if on_gpu else 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
