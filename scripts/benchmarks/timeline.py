"""A picture of the streams of a GPU during one step, and the fraction of transfers hidden by computation."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import common


class Event(NamedTuple):
    """A kernel or a copy on a stream; times in microseconds."""

    stream: int
    name: str
    start: float
    duration: float


COLORS = {
    "compute": common.OURS,
    "transfer around the ring": "#1d4e89",
    "other collective": "#e9a23b",
    "copy or fill": "#9a9a9a",
}

MARK = "the step of the timeline"


def kind(name: str) -> str:
    """The key of `COLORS` for a kernel of this name."""
    lower = name.lower()
    if "nccl" in lower:
        return "transfer around the ring" if "sendrecv" in lower else "other collective"
    return "copy or fill" if lower.startswith(("memcpy", "memset")) else "compute"


def record(step: Callable[[], Any], device: torch.device) -> list[Event]:
    """The events on this process's GPU during one step, after two warm-up steps. All processes must call this."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=2, active=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(trace)),
        ) as profile:
            for _ in range(3):
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if dist.is_initialized():
                    dist.barrier()
                with torch.profiler.record_function(MARK):
                    step()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                profile.step()
        recorded = json.loads(trace.read_text())["traceEvents"]
    # Earlier events, such as the barrier's kernel that waits for the other processes, do not belong to the step.
    begin = next(event["ts"] for event in recorded if event["name"] == MARK and event["cat"] == "user_annotation")
    return [
        Event(event["args"]["stream"], event["name"], event["ts"], event["dur"])
        for event in recorded
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event["ts"] >= begin
    ]


def union(events: Iterable[Event]) -> list[tuple[float, float]]:
    """The times at which any of the events ran, as disjoint intervals in order."""
    merged: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        start, end = event.start, event.start + event.duration
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def hidden(events: Iterable[Event]) -> float | None:
    """The fraction of the time of transfers during which computation also ran; None without transfers.

    The time of a transfer includes waiting for the neighbouring process, since its kernel waits on the GPU.
    """
    by_kind = common.grouped(events, lambda event: kind(event.name))
    transfers = union(by_kind.get("transfer around the ring", []))
    if not transfers:
        return None
    computation = union(by_kind.get("compute", []))
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in transfers for b in computation)
    return both / sum(end - start for start, end in transfers)


def draw(events: list[Event], path: Path, what: str) -> str:
    """Draws a row per stream, the busiest on top, coloured by kind; returns the title."""
    share = hidden(events)
    title = what + ("" if share is None else f"\n{share:.1%} of the transfers' time is hidden behind computation")
    begin = min(event.start for event in events)
    streams: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for event in events:
        bars = streams.setdefault(event.stream, {}).setdefault(kind(event.name), [])
        bars.append(((event.start - begin) / 1000, event.duration / 1000))
    order = sorted(streams, key=lambda s: sum(d for bars in streams[s].values() for _, d in bars), reverse=True)
    figure, ((axis,),) = common.subplots(1, 1, (13, 1.7 + 0.6 * len(order)))
    for row, stream in enumerate(order):
        for name, bars in streams[stream].items():
            axis.broken_barh(bars, (row - 0.35, 0.7), color=COLORS[name], lw=0.3)  # an edge keeps short ones visible
    axis.set_yticks(range(len(order)), [f"stream {stream}" for stream in order])
    axis.invert_yaxis()
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("ms")
    axis.set_xlim(left=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    seen = [name for name in COLORS if any(name in kinds for kinds in streams.values())]
    totals = {name: sum(d for kinds in streams.values() for _, d in kinds.get(name, [])) for name in seen}
    axis.legend(
        [axis.barh(0, 0, color=COLORS[name]) for name in seen],
        [f"{name}: {totals[name]:.3g} ms" for name in seen],
        ncols=len(seen),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.32 if len(order) < 3 else -0.2),
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    return title
