"""Memory of the loss across GPUs, with b pairs per GPU and with growing global batches until one does not fit.

    for w in 1 2 4; do torchrun --nproc-per-node $w scripts/benchmark.py memory --global-batch-sizes; done
    torchrun --nproc-per-node 4 scripts/benchmark.py memory --per-gpu-batch-sizes

A row is the peak of one forward and backward on the GPU that allocates the most. ``peak_mib`` is the memory beyond the
images and texts, which take ``inputs_mib``. It includes ``gradients_mib`` for their gradients, which every
implementation must return. A loss is not tried if its logits alone would not fit; its row has a note and no peak.
NCCL's buffers and the models are not included; see `step` for a whole training step.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from . import common, ring
from .common import Row

COLUMNS = """
    date commit device torch triton world_size objective dtype dim per_gpu_batch_size batch_size implementation peak_mib
    inputs_mib gradients_mib note
""".split()
SMALL = 256  # pairs of a first step, so that libraries and workspaces are not counted as memory of the loss


def run(args: argparse.Namespace) -> Iterator[Row]:
    device = common.start_processes()
    w, dtype = common.world_size(), getattr(torch, args.dtype)
    environment = common.environment(device, "triton") | {"world_size": w, "dtype": args.dtype}
    sizes = [*args.per_gpu_batch_sizes, *(batch // w for batch in args.global_batch_sizes)]
    for objective in args.objectives:
        for name, implementation in ring.implementations(objective, dtype.itemsize).items():
            if args.implementations and name not in args.implementations:
                continue
            try:
                ring.Step(implementation, SMALL, args.dim, dtype, device)()
            except Exception as error:  # the same on every process: an implementation that does not run here
                print(f"{name}: {type(error).__name__}: {error}")
                continue
            for b in sorted(dict.fromkeys(sizes)):
                step = ring.Step(implementation, b, args.dim, dtype, device)
                inputs = round(2 * b * args.dim * dtype.itemsize / common.MIB)  # as much as their gradients
                row: Row = {"objective": objective, "dim": args.dim, "per_gpu_batch_size": b, "batch_size": w * b}
                row |= environment | {"implementation": name, "inputs_mib": inputs, "gradients_mib": inputs}
                if note := step.obstacle(b):
                    row["note"] = note
                elif (peak := common.peak_bytes(step, device)) is not None:
                    row["peak_mib"] = round(peak / common.MIB)
                else:
                    row["note"] = "runs; memory is measured on GPUs only"
                yield row
                del step


def plot(table: Path) -> None:
    """For each objective, memory against the global batch on the most GPUs, and against the GPUs with one b."""
    keys = ("world_size", "objective", "dtype", "dim", "per_gpu_batch_size", "implementation")
    rows = common.newest(table, keys, lambda row: row["peak_mib"])
    objectives = list(dict.fromkeys(row["objective"] for row in rows))
    if not rows:
        return
    style = common.styles(dict.fromkeys(row["implementation"] for row in rows))
    most = max(int(row["world_size"]) for row in rows)
    worlds: dict[str, set[str]] = {}
    for row in rows:
        worlds.setdefault(row["per_gpu_batch_size"], set()).add(row["world_size"])
    common_b = max(worlds, key=lambda b: (len(worlds[b]), int(b)))
    figure, axes = common.subplots(len(objectives), 2, (7.4, 4.6))
    for objective, (growth, scaling) in zip(objectives, axes, strict=True):
        of_objective = [row for row in rows if row["objective"] == objective]
        of_most = [row for row in of_objective if int(row["world_size"]) == most]
        of_common = [row for row in of_objective if row["per_gpu_batch_size"] == common_b]
        common.draw_lines(growth, common.lines_of(of_most, "batch_size", "peak_mib"), style)
        common.draw_lines(scaling, common.lines_of(of_common, "world_size", "peak_mib"), style)
        label = "peak memory of the loss per GPU, MiB"
        growth.set(title=f"{objective}, {most} GPUs", xlabel="global batch", ylabel=label)
        scaling.set(title=f"{objective}, {int(common_b):,} pairs per GPU", xlabel="GPUs", ylabel=label)
        scaling.set_xticks([1, 2, 4, 8][: most.bit_length()], ["1", "2", "4", "8"][: most.bit_length()], minor=False)
        scaling.minorticks_off()
    common.save(figure, table.with_suffix(".png"), rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ring.add_shared_arguments(parser, global_batches=[2**n for n in range(15, 21)])
    parser.add_argument("--dim", type=int, default=512)
