#!/usr/bin/env python3
"""Measures this package's loss beside others: time, memory and error, as rows of a CSV and as a plot.

    python scripts/benchmark.py loss --batch-sizes 4096 16384 65536 --dims 512 1024 --objectives softmax sigmoid

A row is a forward and backward of one implementation on one GPU: L2-normalised features, cosines of positives about
0.24, logit_scale 100 (and logit_bias -10 for the sigmoid loss). Times are quantiles over repetitions in milliseconds;
memory is the peak beyond the inputs; errors are relative to float64 on the same inputs. The floor is the time that
torch.matmul (cuBLAS), timed in the same run, takes for the least number of B×B×D products: four for softmax, three for
sigmoid. Other implementations are measured where they are installed: inf_cl 1.2.1, cut-cross-entropy 25.1.1,
open_clip_torch, torch's own linear_cross_entropy.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import importlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_infcl import contrastive_loss

SCALE, BIAS = 100.0, -10.0
PRODUCTS = {"softmax": 4, "sigmoid": 3}
FOLDER = Path(__file__).parent / "benchmarks"

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # image_embeds, text_embeds, logit_scale, logit_bias


def features(batch: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(batch + dim)

    def unit() -> Tensor:
        return F.normalize(torch.randn(batch, dim, device="cuda", generator=g), dim=-1)

    x = unit()
    return x.to(dtype), F.normalize(x + 4 * unit(), dim=-1).to(dtype)


def vanilla(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, objective: str) -> Tensor:
    """What one writes first; the logits in the features' dtype."""
    logits = scale.to(x.dtype) * x @ y.t()
    if objective == "sigmoid":
        return F.softplus(
            torch.where(torch.eye(len(x), dtype=torch.bool, device=x.device), -1, 1) * (logits + bias)
        ).sum() / len(x)
    target = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def checkpointed(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, objective: str, rows: int = 4096) -> Tensor:
    """What a careful user writes: chunks of rows, recomputed in the backward."""

    def direction(a: Tensor, b: Tensor, start: int) -> Tensor:
        logits = scale.to(a.dtype) * a @ b.t()
        target = torch.arange(start, start + len(a), device=a.device)
        if objective == "sigmoid":
            logits = logits + bias
            own = logits.gather(1, target[:, None])
            return F.softplus(logits).sum() - F.softplus(own).sum() + F.softplus(-own).sum()
        return F.cross_entropy(logits, target, reduction="sum") / 2

    pairs = ((x, y), (y, x)) if objective == "softmax" else ((x, y),)
    terms = [
        checkpoint(direction, a[start : start + rows], b, start, use_reentrant=False)
        for a, b in pairs
        for start in range(0, len(a), rows)
    ]
    return torch.stack(terms).sum() / len(x)


def inf_cl(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    loss = importlib.import_module("inf_cl").cal_flash_loss  # one process's tiles
    x, y = x.float(), y.float()
    return (loss(x, y, scale=scale).mean() + loss(y, x, scale=scale).mean()) / 2


def cut_cross_entropy(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    loss = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    target = torch.arange(len(x), device=x.device)
    return (loss((scale * x).to(x.dtype), y, target) + loss((scale * y).to(y.dtype), x, target)) / 2


def torch_linear_cross_entropy(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    target = torch.arange(len(x), device=x.device)
    loss: Any = getattr(F, "linear_cross_entropy")  # noqa: B009 (from torch 2.12 on)
    return (loss((scale * x).to(x.dtype), y, target) + loss((scale * y).to(y.dtype), x, target)) / 2


def open_clip(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, *, objective: str) -> Tensor:
    losses = importlib.import_module("open_clip.loss")
    if objective == "sigmoid":
        return losses.SigLipLoss()(x, y, scale.to(x.dtype), bias.to(x.dtype))
    return losses.ClipLoss()(x, y, scale.to(x.dtype))


def implementations(objective: str) -> dict[str, Loss]:
    """Factories, because each row compiles its own."""
    ours = functools.partial(contrastive_loss, objective=objective)
    losses: dict[str, Loss] = {
        "hf_infcl": ours,
        "hf_infcl torch backend": functools.partial(ours, backend="torch"),
        "vanilla": functools.partial(vanilla, objective=objective),
        "vanilla compiled": torch.compile(functools.partial(vanilla, objective=objective), dynamic=False),
        "checkpointed": functools.partial(checkpointed, objective=objective),
        "open_clip": functools.partial(open_clip, objective=objective),
    }
    if objective == "softmax":
        losses |= {
            "inf_cl": inf_cl,
            "cut_cross_entropy": cut_cross_entropy,
            "torch linear_cross_entropy": torch_linear_cross_entropy,
        }
    return losses


def truth(x: Tensor, y: Tensor, objective: str, rows: int = 2048) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and gradients by x and y, in float64 and in chunks."""
    batch = len(x)
    x, y = x.double(), y.double()
    chunks = [slice(start, start + rows) for start in range(0, batch, rows)]
    gx, gy = torch.zeros_like(x), torch.zeros_like(y)
    loss = torch.zeros((), dtype=torch.float64, device=x.device)

    def logits(r: slice) -> tuple[Tensor, Tensor]:
        z = SCALE * x[r] @ y.t()
        return z, z.diagonal(r.start)

    if objective == "sigmoid":
        for r in chunks:
            z, own = logits(r)
            z += BIAS
            own.neg_()
            loss += F.softplus(z).sum()
            z.sigmoid_()
            own.neg_()
            gx[r] = z @ y
            gy += z.t() @ x[r]
        return loss / batch, gx * (SCALE / batch), gy * (SCALE / batch)
    columns = torch.full((batch,), -math.inf, dtype=torch.float64, device=x.device)
    lse = torch.empty_like(columns)
    for r in chunks:
        z, own = logits(r)
        lse[r] = z.logsumexp(1)
        columns = torch.logaddexp(columns, z.logsumexp(0))
        loss += (lse[r] - 2 * own).sum()
    for r in chunks:
        z, _ = logits(r)
        g = (z - lse[r, None]).exp_() + (z - columns).exp_()
        g.diagonal(r.start).sub_(2)
        gx[r] = g @ y
        gy += g.t() @ x[r]
    return (loss + columns.sum()) / (2 * batch), gx * (SCALE / (2 * batch)), gy * (SCALE / (2 * batch))


def relative(value: Tensor, true: Tensor) -> float:
    return (torch.linalg.vector_norm(value.double() - true) / torch.linalg.vector_norm(true)).item()


def matmul_rate(dtype: torch.dtype, size: int = 8192) -> float:
    """TFLOP/s of a square product."""
    a = torch.randn(size, size, device="cuda", dtype=dtype)
    return 2 * size**3 / quantiles(lambda: a @ a, 1000)[0] / 1e9  # long enough for the clock to settle


def quantiles(step: Callable[[], Any], milliseconds: int) -> tuple[float, float, float]:
    """Median, first and last decile of the time in ms; of one run if that alone takes longer than a second."""
    from triton.testing import do_bench

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    if (once := start.elapsed_time(end)) > 1000:
        return once, once, once
    median, low, high = do_bench(step, warmup=milliseconds // 4, rep=milliseconds, quantiles=[0.5, 0.1, 0.9])
    return median, low, high


def measure(loss: Loss, x: Tensor, y: Tensor, true: tuple[Tensor, ...] | None, milliseconds: int) -> dict[str, Any]:
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    scale = torch.tensor(SCALE, device="cuda", requires_grad=True)
    bias = torch.tensor(BIAS, device="cuda", requires_grad=True)

    def step() -> Tensor:
        x.grad = y.grad = scale.grad = bias.grad = None
        value = loss(x, y, scale, bias)
        value.backward()
        return value.detach()

    step()
    x.grad = y.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = step()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"peak_mib": round((torch.cuda.max_memory_allocated() - before) / 2**20)}
    if true is not None:
        assert x.grad is not None
        assert y.grad is not None
        row["loss_error"] = f"{relative(value, true[0]):.1e}"
        row["gradient_error"] = f"{max(relative(x.grad, true[1]), relative(y.grad, true[2])):.1e}"
    row["ms"], row["ms_p10"], row["ms_p90"] = (round(t, 4) for t in quantiles(step, milliseconds))
    return row


COLUMNS = (
    *("date", "device", "torch", "triton", "objective", "dtype", "dim", "batch_size", "implementation"),
    *("ms", "ms_p10", "ms_p90", "floor_fraction", "matmul_tflops", "peak_mib", "loss_error", "gradient_error", "note"),
)


def benchmark_loss(args: argparse.Namespace) -> None:
    import triton

    if not torch.cuda.is_available():
        raise SystemExit("benchmark.py loss times kernels on a GPU, and torch sees none.")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch refuses matmul
        torch.use_deterministic_algorithms(True)
    environment = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    begun = args.output.exists()
    with args.output.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if not begun:
            writer.writeheader()
        for objective, dtype_name, dim, batch in (
            (o, t, d, b) for o in args.objectives for t in args.dtypes for d in args.dims for b in args.batch_sizes
        ):
            x, y = features(batch, dim, getattr(torch, dtype_name))
            rate = matmul_rate(torch.bfloat16)
            floor = PRODUCTS[objective] * 2 * batch**2 * dim / rate / 1e9
            true = truth(x, y, objective) if batch <= args.errors_up_to else None
            for name, loss in implementations(objective).items():
                if args.implementations and name not in args.implementations:
                    continue
                row = environment | {
                    "objective": objective,
                    "dtype": dtype_name,
                    "dim": dim,
                    "batch_size": batch,
                    "implementation": name + " deterministic" * args.deterministic,
                    "matmul_tflops": round(rate),
                }
                torch._dynamo.reset()
                try:
                    row |= measure(loss, x, y, true, args.milliseconds)
                    row["floor_fraction"] = round(floor / row["ms"], 3)
                except torch.OutOfMemoryError:
                    row["note"] = "out of memory"
                except Exception as error:  # others fail in ways of their own; the row says how
                    row["note"] = f"{type(error).__name__}: {error}".splitlines()[0]
                torch.cuda.empty_cache()
                writer.writerow(row)
                file.flush()
                print(*(f"{key}={row[key]}" for key in COLUMNS[4:] if key in row), flush=True)
    plot(args.output)


def plot(table: Path) -> None:
    """Time and memory against the batch size: a row of two panels for each setting with three sizes or more."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["ms"]]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    settings: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        settings.setdefault(f"{row['objective']}, {row['dtype']}, D = {row['dim']}", []).append(row)
    shown = {k: v for k, v in settings.items() if len({row["batch_size"] for row in v}) > 2}
    if not shown:
        return
    figure, axes = plt.subplots(len(shown), 2, figsize=(11, 4.5 * len(shown)), squeeze=False)
    for (title, group), (time, memory) in zip(shown.items(), axes, strict=True):
        for axis, key, label in ((time, "ms", "forward + backward, ms"), (memory, "peak_mib", "peak memory, MiB")):
            for color, name in enumerate(names):
                points = sorted((int(r["batch_size"]), float(r[key])) for r in group if r["implementation"] == name)
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", ms=3, color=f"C{color}", label=name)
            axis.set(xscale="log", yscale="log", xlabel="batch size", ylabel=label, title=title)
            axis.grid(alpha=0.3)
        time.legend(fontsize=7)
    figure.suptitle(f"{rows[0]['device']}, torch {rows[0]['torch']}, {rows[0]['date']}")
    figure.tight_layout()
    figure.savefig(table.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="command")
    loss = commands.add_parser("loss", help="forward and backward of the loss on one GPU")
    loss.set_defaults(run=benchmark_loss)
    loss.add_argument("--batch-sizes", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    loss.add_argument("--dims", type=int, nargs="+", default=[512])
    loss.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    loss.add_argument("--objectives", nargs="+", default=["softmax"], choices=list(PRODUCTS))
    loss.add_argument("--implementations", nargs="+", help="by name, default: all that are installed")
    loss.add_argument("--milliseconds", type=int, default=300, help="of repetitions per row")
    loss.add_argument("--deterministic", action="store_true", help="under torch.use_deterministic_algorithms")
    loss.add_argument("--errors-up-to", type=int, default=65536, help="largest batch compared with float64")
    loss.add_argument(
        "--output", type=Path, default=FOLDER / "loss.csv", help="the CSV, appended to; its plot lies beside it"
    )
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
