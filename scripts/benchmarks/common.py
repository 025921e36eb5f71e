"""Helpers that several benchmarks share: processes, inputs, timing, rows of a CSV, and the style of plots."""

import argparse
import collections
import csv
import datetime
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
SCALE, BIAS = 100.0, -10.0
MIB, GIB = 2**20, 2**30

Row = dict[str, Any]
T = TypeVar("T")


def run_benchmark(module: Any, words: Sequence[str]) -> None:
    """Appends the rows that a module of benchmarks yields to a CSV, and draws its plot of the newest ones, if any."""
    name = module.__name__.rpartition(".")[2]
    how: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "conflict_handler": "resolve"}
    parser = argparse.ArgumentParser(prog=f"benchmark.py {name}", description=module.__doc__, **how)
    beside = "; plot beside it" if hasattr(module, "plot") else ""
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.csv", help=f"appended to{beside}")
    module.add_arguments(parser)  # `tables` has an --output of its own
    args = parser.parse_args(words)
    row = None
    for row in module.run(args) or ():  # `tables` has no rows
        append(args.output, module.COLUMNS, row)
    if row is not None and rank() == 0 and hasattr(module, "plot"):
        module.plot(args.output)
    end_processes()


# ---- Processes ----


def start_processes() -> torch.device:
    """Joins torchrun's processes, or forms a group of this process alone; returns the device of this process.

    Without a GPU everything runs on CPUs over gloo, which shows that it works but not how fast it is.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if on_gpu else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def end_processes() -> None:
    """Ends all processes together. If there are several, Python's clean-up is skipped, as gloo may abort in it."""
    if dist.is_initialized():
        several = world_size() > 1
        dist.barrier()
        dist.destroy_process_group()
        if several:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def over_processes(value: float, device: torch.device, operation: Any = dist.ReduceOp.MAX) -> float:
    """The largest of the processes' values, or the result of another reduction; the same on every process."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation)
    return tensor.item()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# ---- Inputs ----


def features(batch: int, dim: int, dtype: torch.dtype, device: Any, seed: int = 0) -> tuple[Tensor, Tensor]:
    """L2-normalised images and texts [batch, dim] whose positives have cosines of about 0.24."""
    g = torch.Generator(device).manual_seed(batch + dim + seed)

    def unit() -> Tensor:
        return F.normalize(torch.randn(batch, dim, device=device, generator=g), dim=-1)

    x = unit()
    return x.to(dtype), F.normalize(x + 4 * unit(), dim=-1).to(dtype)


# ---- Time and memory ----


def now(device: torch.device) -> float:
    """The time at which all that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """The duration of one step on this process. All processes start together."""
    if dist.is_initialized():
        dist.barrier()
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def slowest_seconds(step: Callable[[], Any], device: torch.device, budget: float) -> list[float]:
    """The times of repetitions during about ``budget`` seconds, each on the slowest process."""
    once = over_processes(seconds(step, device), device)
    if once > budget:
        return [once]
    count = min(100, round(budget / once))
    return [over_processes(seconds(step, device), device) for _ in range(count)]


def quantiles(values: Iterable[float]) -> Row:
    """Median, first and last decile of times in seconds, as columns in ms."""
    q = torch.quantile(torch.tensor(list(values), dtype=torch.float64), torch.tensor([0.5, 0.1, 0.9]).double())
    return {name: round(1000 * value, 4) for name, value in zip(("ms", "ms_p10", "ms_p90"), q.tolist(), strict=True)}


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int | None:
    """The most that a step allocates by torch, so without NCCL's buffers, on any process; None on a CPU."""
    if device.type == "cpu":
        step()
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return int(over_processes(torch.cuda.max_memory_allocated() - before, device))


def free_bytes(device: torch.device) -> float:
    """The memory that is free on every process; infinite on a CPU."""
    if device.type == "cpu":
        return float("inf")
    torch.cuda.empty_cache()
    return over_processes(torch.cuda.mem_get_info()[0], device, dist.ReduceOp.MIN)


# ---- Rows ----


def environment(device: torch.device, *packages: str) -> Row:
    """Date, commit, device and versions, for every row."""
    row: Row = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            row[package] = importlib.metadata.version(package)
    return row


def commit() -> str:
    """The short hash of the commit, with "-dirty" if files differ; of a copy without history, HF_INFCL_COMMIT."""
    if named := os.environ.get("HF_INFCL_COMMIT"):
        return named
    command = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):  # no git, or no repository
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def append(table: Path, columns: Sequence[str], row: Row) -> None:
    """Appends a row to the CSV and prints it, on rank 0 only."""
    if rank() != 0:
        return
    table.parent.mkdir(parents=True, exist_ok=True)
    begun = table.exists()
    if begun:
        with table.open(newline="") as file:
            header = next(csv.reader(file))
        if header != list(columns):
            raise SystemExit(f"{table} has other columns than are written: move it, or pass another --output.")
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        if not begun:
            writer.writeheader()
        writer.writerow(row)
    unsaid = ("date", "commit", "device", "torch", "triton", "transformers")
    print(*(f"{key}={row[key]}" for key in columns if row.get(key, "") != "" and key not in unsaid), flush=True)


def read(table: Path, wanted: Callable[[Row], Any]) -> list[Row]:
    """The ``wanted`` rows, in the order of measurement; none if there is no table."""
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if wanted(row)]


def read_numbers(table: Path) -> list[Row]:
    """The rows with numbers as numbers; text and empty cells stay as they are."""
    return [{name: _number(text) for name, text in row.items()} for row in read(table, bool)]


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return text


# The columns of `step` that hold for all implementations of a run.
STEP_SETTING = ("world_size", "model", "pixel_dtype", "image_size", "patch_dropout", "text_tokens", "micro_batch_size")


def newest(table: Path, keys: tuple[str, ...], wanted: Callable[[Row], Any], device: str | None = None) -> list[Row]:
    """The newest ``wanted`` rows for each combination of ``keys``, of one device, by default that of the most rows."""
    rows = read(table, wanted)
    counts = collections.Counter(row["device"] for row in rows)
    device = device or max(counts, key=counts.__getitem__, default=None)
    return list({tuple(row[key] for key in keys): row for row in rows if row["device"] == device}.values())


def grouped(rows: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """The rows of each key, with the keys in the order in which they first occur."""
    groups: dict[Any, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; empty without rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) if len(lines) > 2 else ""


# ---- Plots ----

OURS, MUTED = "#c1121f", ("#4a6fa5", "#6b8f71", "#a98467", "#7d6b91", "#5f7a7f", "#b08ea2", "#8a8a5c", "#737373")
MARKERS = "sD^vP*Xh<>"


def styles(names: Iterable[str]) -> dict[str, Row]:
    """Line styles by implementation: bold for this package, thin in the same colour for its variants, else muted."""
    ours = [name for name in names if name.startswith("hf_infcl")]
    others = [name for name in names if not name.startswith("hf_infcl")]
    lines: dict[str, Row] = {
        name: {"color": OURS, "lw": 3.0 if i == 0 else 1.2, "ls": ("-", "--", ":", "-.")[i % 4], "zorder": 3}
        | {"marker": "o", "ms": 6 if i == 0 else 3}
        for i, name in enumerate(sorted(ours, key=lambda name: (name != "hf_infcl", ours.index(name))))
    }
    for i, name in enumerate(others):
        lines[name] = {"color": MUTED[i % len(MUTED)], "lw": 1.2, "marker": MARKERS[i % len(MARKERS)], "ms": 5}
    return lines


def lines_of(rows: Iterable[Row], count: str, value: str) -> dict[str, list[tuple[float, float]]]:
    """The points of each implementation, for `draw_lines`, by the names of the columns of a count and of a value."""
    groups = grouped(rows, lambda row: row["implementation"])
    return {name: [(int(row[count]), float(row[value])) for row in group] for name, group in groups.items()}


def draw_lines(axis: Any, lines: dict[str, list[tuple[float, float]]], style: dict[str, Row]) -> None:
    """Draws lines on logarithmic axes, each with its name beside its last point."""
    for name, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), **style[name])
    axis.set(xscale="log", yscale="log")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.autoscale_view()
    to_axes = (axis.transScale + axis.transLimits).transform
    ends = sorted((*to_axes(max(points)), name) for name, points in lines.items())
    low, right = -1.0, max((x for x, _, _ in ends), default=0.0) + 0.035
    for x, y, name in sorted(ends, key=lambda end: end[1]):
        low = max(y, low + 0.052)
        where = {"xycoords": "axes fraction", "textcoords": "axes fraction", "annotation_clip": False}
        weight = "bold" if name == "hf_infcl" else "normal"
        text = {"va": "center", "fontsize": 8.5, "color": style[name]["color"], "weight": weight}
        dotted = {"arrowstyle": "-", "lw": 0.5, "ls": (0, (1, 3)), "color": "0.5"}
        axis.annotate(name, (x, y), (right, low), arrowprops=dotted, **where, **text)


def draw_bars(axis: Any, values: dict[str, float], notes: dict[str, str]) -> None:
    """Draws horizontal bars, the smallest on top, each with its value and a note."""
    names = sorted(values, key=values.__getitem__, reverse=True)
    variant = "#e08a90"
    colors = [OURS if name == "hf_infcl" else variant if name.startswith("hf_infcl") else MUTED[-1] for name in names]
    axis.barh(names, [values[name] for name in names], color=colors, height=0.65)
    for position, name in enumerate(names):
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        text = {"textcoords": "offset points", "va": "center", "fontsize": 8, "bbox": behind}
        axis.annotate(notes[name], (values[name], position), (4, 0), **text)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.45)
    axis.set_xlim(left=0)


def subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes [rows, columns], drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False)


def panels(count: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure with ``count`` axes, two in a row, of this size in inches."""
    columns = min(2, count)
    figure, axes = subplots(-(-count // columns), columns, size)
    for axis in axes.flat[count:]:
        axis.axis("off")
    return figure, list(axes.flat[:count])


def save(figure: Any, path: Path, rows: list[Row]) -> None:
    """Writes the picture, titled with the device, the version of torch, the commit if there is one, and the dates."""
    dates = sorted({row["date"] for row in rows})
    last = max(rows, key=lambda row: row["date"])
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    devices = " and ".join(dict.fromkeys(row["device"] for row in rows))
    commits = {row["commit"] for row in rows}
    commit = f"commit {commits.pop()}, " if len(commits) == 1 else ""
    inch = 1 / figure.get_figheight()
    figure.suptitle(f"{devices}, torch {last['torch']}, {commit}{when}", fontsize=10, y=1 - 0.1 * inch, va="top")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 * inch))
    figure.savefig(path, dpi=110)
