"""Draws a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .counting import Counts
from .prediction import GIB, GPU, USABLE, Choice, memory, seconds


def draw(path: Path, counts: Counts, choice: Choice, gpu: GPU, memory_gib: float) -> None:
    """Memory and time against the global batch, with the micro-batch of a choice."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib.") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    windows = [2**power for power in range(max(12, choice.accumulation.bit_length() + 1))]
    batches = [choice.micro_batch * choice.gpus * window for window in windows]
    label = "the plan" if choice.retain == 1 else f"the plan, which keeps {choice.retain} graphs"
    for offload, name in ((False, "images on the GPU"), (True, "offload_inputs")):
        ways = [replace(choice, accumulation=window, retain=1, offload=offload) for window in windows]
        left.plot(batches, [memory(counts, way).total / GIB for way in ways], "--" if offload else "-", label=name)
    left.axhline(USABLE * memory_gib, color="0.5", lw=1, label=f"usable of {memory_gib:g} GiB")
    left.plot(choice.global_batch, memory(counts, choice).total / GIB, "o", color="black", label=label)
    left.set(title="Memory per GPU", ylabel="GiB at the peak of a step", ylim=(0, 2 * memory_gib))
    for compiled in (False, True):
        ways = [replace(choice, accumulation=window, retain=1, compiled=compiled) for window in windows]
        times = [sum(seconds(counts, way, gpu).values()) for way in ways]
        right.plot(batches, times, "--" if compiled else "-", label="torch.compile" if compiled else "eager")
    time = sum(seconds(counts, choice, gpu).values())
    right.plot(choice.global_batch, time, "o", color="black", label=label)
    right.set(title=f"Time of a step on {choice.gpus} × {gpu.name}", ylabel="seconds", yscale="log")
    for axis in (left, right):
        axis.set(xscale="log", xlabel=f"global batch, micro-batches of {choice.micro_batch}")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
