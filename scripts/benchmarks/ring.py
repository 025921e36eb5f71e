"""Time of the loss across GPUs: the strategies, and other implementations.

    torchrun --nproc-per-node 4 scripts/benchmark.py ring --objectives softmax sigmoid

A row is a forward and backward of one implementation on W GPUs with b pairs each (inputs as in `loss`). All processes
start a repetition together, and its time is that of the slowest process. Times are quantiles in milliseconds.

The yardstick is the row "no communication": W losses of b pairs, one after another on each GPU, on all GPUs at the same
time. That is the work of a GPU for a batch of W·b pairs without any exchange. ``efficiency`` is the time of the
yardstick divided by that of the row (``gpairs_per_s``: W·b² combinations of an image and a text over the time, in 1e9).
It measures communication only if kernels take longer than their launches, of which the yardstick has as many as
"hf_infcl ring". Otherwise, as with 8 × 4,096 pairs, it can exceed 100%, and the picture leaves it out.

``peak_mib`` is the most that a process allocates beyond its inputs, including gradients but not NCCL's buffers.
``gradient_difference`` is the relative difference of the images' gradient from that of the first row. "hf_infcl ring"
also sends around texts that "hf_infcl" gathers. "ring untiled" is the paper's ablation Ring-CL: the same ring with
plain torch and whole b×b blocks. inf_cl, in fp32, and siglip-kernel are measured if they are installed.

With --captions k the batch size counts images, each with k texts on its own GPU, all of them positives. SigLIP+ of
siglip-kernel weights them, so its gradient is that of a different loss. The picture leaves these rows out.

    python scripts/benchmark.py ring --blocks 256 --per-gpu-batch-sizes 512

measures the host on one GPU instead: a process alone takes its part in a ring of that many blocks, each of the texts of
``--gathered`` processes, and receives copies of what it sends, without a network. ``host_us`` is the time in which the
host queues a forward and backward, ``device_us`` the time until the GPU has done it, both in microseconds per block;
``graphs_mib`` is the memory of the recording. ``--predict`` writes exchange.csv: the exchange that is chosen for H100s,
eight to a machine, beside the newest measurement of ring.csv. Rows without one are simulated.
"""

import argparse
import functools
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hf_infcl import contrastive_loss
from hf_infcl.kernels import torch_backend as tiled
from hf_infcl.loss import OBJECTIVES, contrastive, cuda_graphs, local_contrastive_loss, strategies
from hf_infcl.loss.strategies import STRATEGIES
from hf_infcl.processes import collectives

from . import common, peers
from .common import BIAS, RESULTS, SCALE, Row
from .peers import Loss

COLUMNS = """
    date commit device torch triton world_size objective dtype dim per_gpu_batch_size batch_size implementation ms
    ms_p10 ms_p90 gpairs_per_s efficiency peak_mib gradient_difference note
""".split()
COLUMNS_OF_BLOCKS = """
    date commit device torch triton objective dtype dim blocks gathered per_gpu_batch_size implementation host_us
    device_us graphs_mib
""".split()
SETTING = ("world_size", "objective", "dtype", "dim", "per_gpu_batch_size")
ALONE, OURS = "no communication", "hf_infcl"
LARGEST_BATCH = 1 << 22  # of predictions


@dataclass
class Implementation:
    """A loss, the bytes of its matrices for W processes with b pairs each, and the context in which it has to run."""

    loss: Loss
    matrices: Callable[[int, int], int] = lambda b, w: 0
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def always_ring() -> AbstractContextManager[Any]:
    """Texts are sent around the ring, however small they are."""
    return mock.patch.object(strategies, "choose_exchange", lambda w, *sizes: strategies.Exchange(w, 1, 0.0))


@contextmanager
def untiled() -> Iterator[None]:
    """The torch backend computes whole blocks, like the paper's Ring-CL."""
    with always_ring(), mock.patch.object(tiled, "tile_shape", lambda m, n, device_type="cpu": (m, n)):
        yield


def with_captions(objective: str, ids: dict[str, Tensor]) -> dict[str, Implementation]:
    """The yardstick, this package's ring and siglip-kernel's ring, for images and texts with ids."""
    ours = Implementation(functools.partial(contrastive_loss, objective=objective, **ids))
    known = {ALONE: Implementation(functools.partial(repeated_alone, objective=objective, **ids)), OURS: ours}
    if objective == "sigmoid" and importlib.util.find_spec("siglip_kernel") is not None:
        known["siglip-kernel SigLIP+ ring"] = Implementation(functools.partial(peers.siglip_kernel_plus_ring, **ids))
    return known


def implementations(objective: str, itemsize: int) -> dict[str, Implementation]:
    """The yardstick, this package's strategies beginning with the ring, and other losses with this objective."""
    ours = functools.partial(contrastive_loss, objective=objective)
    known = {ALONE: Implementation(functools.partial(repeated_alone, objective=objective))}
    known |= {OURS: Implementation(ours), "hf_infcl ring": Implementation(ours, context=always_ring)}
    known |= {
        f"hf_infcl {strategy}": Implementation(functools.partial(ours, strategy=strategy))
        for strategy in STRATEGIES
        if strategy != "ring"
    }
    known["ring untiled (Ring-CL)"] = Implementation(
        functools.partial(ours, backend="torch"), lambda b, w: 5 * 4 * b * b, untiled
    )
    if objective == "softmax":
        known["CLIP"] = Implementation(peers.clip, lambda b, w: peers.MATRICES * itemsize * (w * b) ** 2)
        rows = lambda b, w: peers.MATRICES * itemsize * w * b * b  # noqa: E731
        known["OpenCLIP local loss"] = Implementation(peers.open_clip_local, rows)
        known["DisCo-CLIP"] = Implementation(peers.disco, rows)
        if importlib.util.find_spec("inf_cl") is not None:
            known["inf_cl ring"] = Implementation(peers.inf_cl_ring)
    elif importlib.util.find_spec("siglip_kernel") is not None:
        known["siglip-kernel ring"] = Implementation(peers.siglip_kernel_ring)
    return known


def repeated_alone(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, **options: Any) -> Tensor:
    """W losses of this process's own pairs, each with its backward, without any exchange."""
    for _ in range(common.world_size() - 1):
        local_contrastive_loss(x, y, scale, bias, **options).backward()
    return local_contrastive_loss(x, y, scale, bias, **options)


class Step:
    """A forward and backward of an implementation on this process's pairs."""

    def __init__(
        self, implementation: Implementation, batch: int, dim: int, dtype: torch.dtype, device: Any, captions: int = 1
    ) -> None:
        self._implementation = implementation
        x, y = common.features(captions * batch, dim, dtype, device, seed=1000 * common.rank())
        x = x[:batch].clone()
        self.inputs = (
            *(t.requires_grad_() for t in (x, y)),
            *(torch.tensor(value, device=device, requires_grad=True) for value in (SCALE, BIAS)),
        )

    def forget(self) -> None:
        """Drops the gradients."""
        for tensor in self.inputs:
            tensor.grad = None

    def __call__(self) -> None:
        self.forget()
        with self._implementation.context():
            self._implementation.loss(*self.inputs).backward()

    def obstacle(self, batch: int) -> str:
        """Why this step is not tried. This is computed, since a process that failed could leave the others waiting."""
        needed = self._implementation.matrices(batch, common.world_size())
        if needed <= common.free_bytes(self.inputs[0].device) - 4 * common.GIB:
            return ""
        return f"not tried: needs {needed / common.GIB:.0f} GiB for matrices of logits (computed)"


def difference(gradient: Tensor, first: Tensor, device: torch.device) -> float:
    """The relative norm of the difference of two gradients, over all processes."""
    first = first.double()
    squares = [
        common.over_processes(a.square().sum().item(), device, dist.ReduceOp.SUM) for a in (gradient - first, first)
    ]
    return (squares[0] / squares[1]) ** 0.5


def measure(step: Step, device: torch.device, budget: float) -> Row:
    step()  # the first call compiles and is not measured
    step.forget()
    peak = common.peak_bytes(step, device)
    row = common.quantiles(common.slowest_seconds(step, device, budget))
    return row if peak is None else row | {"peak_mib": round(peak / common.MIB)}


def exchange_copies(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Takes the place of `dist.batch_isend_irecv`: a process receives what it sends."""
    sent, received = ([o.tensor for o in operations if o.op is op] for op in (dist.isend, dist.irecv))
    for tensor, own in zip(received, sent, strict=True):
        tensor.copy_(own)
    return []


def gather_copies(gathered: Tensor, part: Tensor, group: Any) -> None:
    """Takes the place of `collectives.gather_into`."""
    gathered.view(-1, *part.shape).copy_(part.expand(len(gathered) // len(part), *part.shape))


def run_blocks(args: argparse.Namespace) -> None:
    """Appends rows of the host's time per block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.blocks * args.gathered)
    exchange = strategies.Exchange(args.blocks, args.gathered, 0.0)
    for objective, dim, b in ((o, d, b) for o in args.objectives for d in args.dims for b in args.per_gpu_batch_sizes):
        loss = functools.partial(contrastive_loss, objective=objective)
        for recorded in (False, True)[: 1 + (device.type == "cuda")]:
            step = Step(Implementation(loss), b, dim, getattr(torch, args.dtype), device)
            with ExitStack() as stack:
                stack.enter_context(mock.patch.dict(os.environ, HF_INFCL_RING_GROUP=str(args.gathered)))
                stack.enter_context(mock.patch.object(strategies, "choose_exchange", return_value=exchange))
                stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", exchange_copies))
                stack.enter_context(mock.patch.object(collectives, "gather_into", gather_copies))
                stack.enter_context(mock.patch.object(contrastive, "launches_dominate", return_value=recorded))
                free = common.free_bytes(device)
                for _ in range(cuda_graphs.PATIENCE + 2):
                    step()
                step.forget()
                held = (free - common.free_bytes(device)) / common.MIB if recorded else 0
                times = []
                for _ in range(10):
                    begin = common.now(device)
                    step()
                    queued = time.perf_counter() - begin
                    times.append((queued, common.now(device) - begin))
            cuda_graphs.forget_recordings()
            host, whole = (sorted(values)[len(values) // 2] / args.blocks * 1e6 for values in zip(*times, strict=True))
            row = common.environment(device, "triton") | {"objective": objective, "dtype": args.dtype, "dim": dim}
            row |= {"blocks": args.blocks, "gathered": args.gathered, "per_gpu_batch_size": b}
            row |= {"implementation": "recorded" if recorded else "launched", "graphs_mib": round(held)}
            row |= {"host_us": round(host, 1), "device_us": round(whole, 1)}
            common.append(args.output.with_name("blocks.csv"), COLUMNS_OF_BLOCKS, row)
    dist.destroy_process_group()


def predictions(measured: Path = RESULTS / "ring.csv") -> list[Row]:
    """The exchanges of a softmax loss of 512 dimensions in bf16, for numbers of GPUs and of pairs on each."""
    setting = {"objective": "softmax", "dtype": "bfloat16", "dim": "512", "implementation": OURS}
    known = {
        (int(row["world_size"]), int(row["per_gpu_batch_size"])): row["ms"]
        for row in common.newest(measured, SETTING, lambda row: row["ms"] and setting.items() <= row.items())
    }
    rows = []
    for gpus, pairs in itertools.product((2, 4, 8, 16, 64, 256, 1024), (256, 1024, 4096, 16384, 65536)):
        if gpus * pairs > LARGEST_BATCH:
            continue
        exchange = strategies.choose_exchange(gpus, min(gpus, 8), 80e9, gpus * pairs, gpus * pairs, 512, 2)
        row = {"gpus": gpus, "pairs": pairs, "exchange": str(exchange), "predicted_ms": f"{1e3 * exchange.seconds:.3g}"}
        measured_ms = known.get((gpus, pairs), "")
        rows.append(row | {"measured_ms": measured_ms, "simulated": "" if measured_ms else "yes"})
    return rows


def run(args: argparse.Namespace) -> Iterator[Row]:
    if args.predict:
        table = args.output.with_name("exchange.csv")
        table.unlink(missing_ok=True)
        for row in predictions():
            common.append(table, tuple(row), row)
        return
    if args.blocks:
        run_blocks(args)
        return
    device = common.start_processes()
    dtype = getattr(torch, args.dtype)
    w = common.world_size()
    environment = common.environment(device, "triton") | {"world_size": w, "dtype": args.dtype}
    sizes = [*args.per_gpu_batch_sizes, *(batch // w for batch in args.global_batch_sizes)]
    for objective, dim, b in ((o, d, b) for o in args.objectives for d in args.dims for b in dict.fromkeys(sizes)):
        first: Tensor | None = None
        alone: float | None = None
        known = implementations(objective, dtype.itemsize)
        if args.captions > 1:
            ids = torch.arange(b, device=device) + b * common.rank()
            known = with_captions(objective, {"image_ids": ids, "text_ids": ids.repeat(args.captions)})
        for name, implementation in known.items():
            if args.implementations and name not in (ALONE, *args.implementations):
                continue
            row = environment | {"objective": objective, "dim": dim, "per_gpu_batch_size": b, "batch_size": w * b}
            row["implementation"] = f"{name}, {args.captions} captions" if args.captions > 1 else name
            step = Step(implementation, b, dim, dtype, device, args.captions)
            if note := step.obstacle(b):
                row["note"] = note
            else:
                try:
                    row |= measure(step, device, args.milliseconds / 1000)
                except Exception as error:  # the same on every process: an implementation that does not run here
                    row["note"] = f"{type(error).__name__}: {error}".splitlines()[0]
            if "ms" in row:
                alone = row["ms"] if name == ALONE else alone
                row["efficiency"] = round(alone / row["ms"], 3) if alone else ""
                row["gpairs_per_s"] = round(args.captions * w * b * b / row["ms"] / 1e6, 2)
                if name != ALONE:
                    gradient = step.inputs[0].grad
                    assert gradient is not None
                    first = gradient if first is None else first
                    row["gradient_difference"] = f"{difference(gradient, first, device):.1e}"
            yield row


def plot(table: Path) -> None:
    """Plots the time of each implementation, with a panel for each setting, on the most GPUs measured."""

    def is_drawn(row: Row) -> bool:
        return bool(row["ms"]) and "captions" not in row["implementation"]

    rows = common.newest(table, (*SETTING, "implementation"), is_drawn)
    most = max((int(row["world_size"]) for row in rows), default=0)
    of_most = [row for row in rows if int(row["world_size"]) == most]
    settings = common.grouped(of_most, lambda row: tuple(row[key] for key in SETTING))
    if not settings:
        return
    figure, axes = common.panels(len(settings), (7.5, 3.8))
    for axis, ((w, objective, dtype, dim, b), group) in zip(axes, settings.items(), strict=True):
        # Shares refer to the yardstick in the picture, even if a row comes from another run.
        alone = yardstick(rows, group)
        notes = {
            row["implementation"]: f"{float(row['ms']):.4g} ms"
            + (f", {alone / float(row['ms']):.1%}" if alone else "")
            + (f", {int(row['peak_mib']):,} MiB" if row["peak_mib"] else "")
            for row in group
        }
        common.draw_bars(axis, {row["implementation"]: float(row["ms"]) for row in group}, notes)
        rate = "rate relative to no communication; " if alone else "no rates: launches limit the yardstick; "
        axis.set(
            title=f"{objective}, {w} × {int(b):,} pairs, D = {dim}, {dtype}",
            xlabel=f"forward + backward, ms; {rate}peak memory",
        )
    common.save(figure, table.with_suffix(".png"), of_most)


def yardstick(rows: list[Row], group: list[Row]) -> float | None:
    """The milliseconds without communication in a setting; None if its row is missing or not meaningful.

    It is not meaningful if the yardstick's losses are so small that their launches limit it, which is assumed when its
    rate (``gpairs_per_s``) is less than half of its best rate.
    """
    alone = next((row for row in group if row["implementation"] == ALONE), None)
    if alone is None:
        return None
    others = ("world_size", "objective", "dtype", "dim")
    rates = [
        float(row["gpairs_per_s"])
        for row in rows
        if row["implementation"] == ALONE and all(row[key] == alone[key] for key in others)
    ]
    return float(alone["ms"]) if float(alone["gpairs_per_s"]) > 0.5 * max(rates) else None


def add_shared_arguments(parser: argparse.ArgumentParser, global_batches: Sequence[int]) -> None:
    """The arguments of this benchmark and of `memory`."""
    parser.add_argument("--per-gpu-batch-sizes", type=int, nargs="*", default=[65536], help="b of each GPU")
    parser.add_argument("--global-batch-sizes", type=int, nargs="*", default=global_batches, help="W·b, besides")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--objectives", nargs="+", default=["softmax"], choices=OBJECTIVES)
    parser.add_argument("--implementations", nargs="+", help="by name, default: all; 'no communication' of ring always")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser, global_batches=[])
    parser.add_argument("--dims", type=int, nargs="+", default=[512])
    parser.add_argument("--milliseconds", type=int, default=1000, help="of repetitions per row")
    parser.add_argument("--captions", type=int, default=1, help="texts of each image")
    parser.add_argument("--blocks", type=int, help="of a ring of which this is the only process; measures the host")
    parser.add_argument("--gathered", type=int, default=1, help="processes whose texts form one of the --blocks")
    parser.add_argument("--predict", action="store_true", help="write the chosen exchanges instead")
