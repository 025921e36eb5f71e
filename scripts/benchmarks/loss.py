"""Time, memory and error of the loss on one GPU, beside others.

A row is a forward and backward of one implementation: L2-normalised features, cosines of positives about 0.24,
logit_scale 100 (and logit_bias -10 for the sigmoid loss). Times are quantiles over repetitions in milliseconds, and
first_call_s is the very first step in seconds, with whatever is compiled in it (or found in a cache on disk); memory is
the peak beyond the inputs (empty where torch replays graphs of its own, which it does not count); errors are relative
to float64 on the same inputs. The floor is the time that torch.matmul (cuBLAS) in bf16, timed in the same run, takes
for the least number of B×B×D products: four for softmax, three for sigmoid. Other implementations are measured where
they are installed: inf_cl 1.2.1, cut-cross-entropy 25.1.1, siglip-kernel 0.1.2 (its product of logits in bf16 or, as it
offers, in FP8), open_clip_torch, torch's own linear_cross_entropy.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_infcl import contrastive_loss
from hf_infcl.loss import cuda_graphs

from . import common, peers
from .common import BIAS, RESULTS, SCALE
from .peers import Loss

PRODUCTS = {"softmax": 4, "sigmoid": 3}
COMPILED_UP_TO = 16384  # beyond, our kernels take longer than their launches
REPLAYED = ("hf_infcl compiled", "vanilla compiled, graphs")
COLUMNS = (
    *("date", "commit", "device", "torch", "triton", "objective", "dtype", "dim", "batch_size", "implementation"),
    *("ms", "ms_p10", "ms_p90", "floor_fraction", "matmul_tflops", "peak_mib", "loss_error", "gradient_error"),
    *("first_call_s", "note"),
)


def implementations(objective: str, batch: int) -> dict[str, Loss]:
    """New ones for each row, because each compiles its own."""
    ours = functools.partial(contrastive_loss, objective=objective)
    losses: dict[str, Loss] = {
        "hf_infcl": ours,
        "hf_infcl torch backend": functools.partial(ours, backend="torch"),
        "vanilla": functools.partial(peers.vanilla, objective=objective),
        "vanilla compiled": torch.compile(functools.partial(peers.vanilla, objective=objective), dynamic=False),
        "checkpointed": functools.partial(peers.checkpointed, objective=objective),
        "open_clip": functools.partial(peers.open_clip, objective=objective),
    }
    if batch <= COMPILED_UP_TO:  # both as CUDA graphs
        plain = functools.partial(peers.vanilla, objective=objective)
        losses["hf_infcl compiled"] = torch.compile(ours, mode="reduce-overhead", dynamic=False)
        losses["vanilla compiled, graphs"] = torch.compile(plain, mode="reduce-overhead", dynamic=False)
    if objective == "softmax":
        losses |= {
            "inf_cl": peers.inf_cl,
            "cut_cross_entropy": peers.cut_cross_entropy,
        }
        if hasattr(F, "linear_cross_entropy"):
            losses["torch linear_cross_entropy"] = peers.torch_linear_cross_entropy
    else:
        losses["siglip_kernel"] = peers.siglip_kernel
        losses["siglip_kernel FP8"] = functools.partial(peers.siglip_kernel, backend="chunked_bf16_fp8")
    return losses


def truth(x: Tensor, y: Tensor, objective: str) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and gradients by x and y, in float64 and in chunks."""
    x, y = (t.double().requires_grad_() for t in (x, y))
    scale, bias = (torch.tensor(value, dtype=torch.float64, device=x.device) for value in (SCALE, BIAS))
    loss = peers.checkpointed(x, y, scale, bias, objective=objective, rows=2048)
    return loss.detach(), *torch.autograd.grad(loss, (x, y))


def relative(value: Tensor, true: Tensor) -> float:
    return (torch.linalg.vector_norm(value.double() - true) / torch.linalg.vector_norm(true)).item()


def matmul_rate(size: int = 8192) -> float:
    """TFLOP/s of a square product in bf16."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 / milliseconds_of(lambda: a @ a, 1000)[0] / 1e9  # long enough for the clock to settle


def milliseconds_of(step: Callable[[], Any], milliseconds: int) -> tuple[float, float, float]:
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

    cuda_graphs._recording.cache_clear()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"first_call_s": round(time.perf_counter() - begin, 3)}
    x.grad = y.grad = scale.grad = bias.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(cuda_graphs.PATIENCE):  # the last of these is recorded; what it keeps counts
        value = step()
    torch.cuda.synchronize()
    row["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    if true is not None:
        assert x.grad is not None
        assert y.grad is not None
        row["loss_error"] = f"{relative(value, true[0]):.1e}"
        row["gradient_error"] = f"{max(relative(x.grad, true[1]), relative(y.grad, true[2])):.1e}"
    row["ms"], row["ms_p10"], row["ms_p90"] = (round(t, 4) for t in milliseconds_of(step, milliseconds))
    return row


def run(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmark.py loss times kernels on a GPU, and torch sees none.")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch refuses matmul
        torch.use_deterministic_algorithms(True)
    environment = common.environment(torch.device("cuda"), "triton")
    for objective, dtype_name, dim, batch in (
        (o, t, d, b) for o in args.objectives for t in args.dtypes for d in args.dims for b in args.batch_sizes
    ):
        x, y = common.features(batch, dim, getattr(torch, dtype_name), "cuda")
        rate = matmul_rate()
        floor = PRODUCTS[objective] * 2 * batch**2 * dim / rate / 1e9
        true = truth(x, y, objective) if batch <= args.errors_up_to else None
        for name, loss in implementations(objective, batch).items():
            if args.implementations and name not in args.implementations:
                continue
            row = environment | {
                "objective": objective,
                "dtype": dtype_name,
                "dim": dim,
                "batch_size": batch,
                "implementation": f"{name} deterministic" if args.deterministic else name,
                "matmul_tflops": round(rate),
            }
            torch._dynamo.reset()
            try:
                row |= measure(loss, x, y, true, args.milliseconds)
                if name in REPLAYED:
                    row["peak_mib"] = ""
                row["floor_fraction"] = round(floor / row["ms"], 3)
            except torch.OutOfMemoryError:
                row["note"] = "out of memory"
            except Exception as error:  # others fail in ways of their own; the row says how
                row["note"] = f"{type(error).__name__}: {error}".splitlines()[0]
            torch.cuda.empty_cache()
            common.append(args.output, COLUMNS, row)
    plot(args.output)


def plot(table: Path) -> None:
    """Time and memory against the batch size: a row of two panels for each setting with three sizes or more."""
    rows = common.newest(table, ("objective", "dtype", "dim", "batch_size", "implementation"), lambda row: row["ms"])
    style = common.styles(dict.fromkeys(row["implementation"] for row in rows))
    settings: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        settings.setdefault(f"{row['objective']}, {row['dtype']}, D = {row['dim']}", []).append(row)
    shown = {k: v for k, v in settings.items() if len({row["batch_size"] for row in v}) > 2}
    if not shown:
        return
    figure, axes = common.subplots(len(shown), 2, (7.2, 4.6))
    for (title, group), panels in zip(shown.items(), axes, strict=True):
        for axis, key, label in zip(
            panels, ("ms", "peak_mib"), ("forward + backward, ms", "peak memory, MiB"), strict=True
        ):
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in (row for row in group if row[key]):
                lines.setdefault(row["implementation"], []).append((int(row["batch_size"]), float(row[key])))
            # A single point is no line.
            common.draw_lines(axis, {name: points for name, points in lines.items() if len(points) > 1}, style)
            axis.set(xlabel="batch size", ylabel=label, title=title)
    common.save(figure, table.with_suffix(".png"), [row for group in shown.values() for row in group])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--dims", type=int, nargs="+", default=[512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--objectives", nargs="+", default=["softmax"], choices=list(PRODUCTS))
    parser.add_argument("--implementations", nargs="+", help="by name, default: all that are installed")
    parser.add_argument("--milliseconds", type=int, default=300, help="of repetitions per row")
    parser.add_argument("--deterministic", action="store_true", help="under torch.use_deterministic_algorithms")
    parser.add_argument("--errors-up-to", type=int, default=65536, help="largest batch compared with float64")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "loss.csv", help="the CSV, appended to; its plot lies beside it"
    )
