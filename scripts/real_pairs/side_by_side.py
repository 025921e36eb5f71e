"""Runs jobs side by side, several on each GPU, and writes what they measured as a CSV."""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from benchmarks.common import environment

from .in_memory import to_device

Job = dict[str, Any]


def arguments(description: str | None, parts: str) -> argparse.ArgumentParser:
    """The options of a script that runs jobs. ``parts`` says which there are."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=parts)
    parser.add_argument("--corpus", type=Path, help="the folder that real_pairs.py has written")
    parser.add_argument("--tensors", help="the file of the prepared corpus, which is written if it is not there")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[5], help="runs at a time on each GPU; the last trains the teachers"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="no run begins later than this")
    parser.add_argument("--toy", action="store_true", help="ten steps of a tiny model, to try things out")
    return parser


def run(
    jobs: Sequence[Job],
    run_job: Callable[..., Job],
    args: argparse.Namespace,
    name: str,
    prepared: Callable[[], dict[str, Any]],
    needed_by: Callable[[Mapping[str, Any]], list[str]] | None = None,
) -> None:
    """Runs the jobs and writes NAME.csv into ``args.output_dir``.

    Args:
        jobs: what to run, the most important first. One with "save" runs on the last GPU.
        run_job: called with a job, the data on its device, ``args.output_dir`` and ``toy``; returns a row.
        args: of `arguments`.
        name: of the CSV.
        prepared: makes the data, as `in_memory.prepare` does.
        needed_by: the files in ``args.output_dir`` without which a job cannot begin.
    """
    end = time.time() + args.seconds
    args.output_dir.mkdir(parents=True, exist_ok=True)
    tensors = args.tensors or str(args.output_dir / "tensors.pt")
    if not Path(tensors).exists():
        torch.save(prepared(), tensors)
    context, gpus = mp.get_context("spawn"), len(args.processes)
    taken, lock = context.Array("i", len(jobs), lock=False), context.Lock()
    needed = [needed_by(job) if needed_by else [] for job in jobs]
    words = (jobs, needed, taken, lock, run_job, tensors, args.output_dir, end, args.toy, gpus)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus)]
    processes = []
    for gpu, count in enumerate(args.processes):
        os.environ["CUDA_VISIBLE_DEVICES"] = names[gpu]  # InfCLTrainer refuses a process that sees several
        for _ in range(count):
            processes.append(context.Process(target=_work, args=(*words, gpu)))
            processes[-1].start()
    for process in processes:
        process.join()
    rows = [json.loads(line) for line in (args.output_dir / "rows.jsonl").read_text().splitlines()]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with (args.output_dir / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _work(
    jobs: Sequence[Job],
    needed: Sequence[list[str]],
    taken: Any,
    lock: Any,
    run_job: Callable[..., Job],
    tensors: str,
    folder: Path,
    end: float,
    toy: bool,
    gpus: int,
    gpu: int,
) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = to_device(torch.load(tensors, weights_only=True, mmap=True), device)
    data["sources"] = data.get("sources") or ["any"] * len(data["counts"])
    while time.time() < end:
        with lock:
            free = [i for i in range(len(jobs)) if not taken[i] and (gpu == gpus - 1 or "save" not in jobs[i])]
            begin = [i for i in free if all((folder / name).exists() for name in needed[i])]
            # First those on which others wait. Of the rest each GPU takes its own share as long as there is one, so
            # that runs of a kind are not on one GPU.
            number = min(begin, key=lambda i: ("save" not in jobs[i], i % gpus != gpu, i), default=None)
            if number is not None:
                taken[number] = 1
        if number is None:
            if not free:
                return
            time.sleep(1)
            continue
        row = {**run_job(jobs[number], data, folder, toy=toy), **environment(device)}
        print(row, flush=True)
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def save(content: Any, path: Path) -> None:
    """Others may wait for the file, which therefore appears whole."""
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    os.replace(partial, path)
