"""Long versions of checks that the suite runs in a short version. Each appends rows to tests/results/soak.csv.

python tests/soak.py loss                          10,000 random cases of the loss against float64, in this process
python tests/soak.py loss --world_sizes 1 2 3 4    as many cases for each number of processes (one per GPU, if any)
python tests/soak.py train --steps 5000            5,000 steps, during which memory, files and threads must not grow
python tests/soak.py text                          10,000 cases each for files, command lines and model cards
python tests/soak.py kills                         40 runs of two processes, killed at random moments and resumed
python tests/soak.py memory --cases 100            as many trainings on one GPU, of which only the global batch is given

``--minutes`` is a time limit; each row has the number of cases or steps that were done. The exit code is 1 after any
failure.
"""

import argparse
import csv
import datetime
import gc
import importlib.metadata
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from helpers.fuzz import Case, Findings, rank_cases
from helpers.kills import count_kills
from helpers.processes import Ranks

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "soak.csv"
COLUMNS = ("date", "commit", "device", "python", "torch", "triton", "transformers", "check", "processes", "count")
COLUMNS += ("seconds", "failures", "detail")
CASES_AT_A_TIME = 50
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def write_row(results: Path, **values: Any) -> None:
    row = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **values,
    }
    for package in ("triton", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            row[package] = importlib.metadata.version(package)
    begun = results.exists()
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if not begun:
            writer.writeheader()
        writer.writerow(row)
    print(*(f"{name}={row[name]}" for name in COLUMNS[7:]), flush=True)


def commit() -> str:
    """The commit's short hash, with "-dirty" if files differ from it. Without a git history it is HF_INFCL_COMMIT."""
    if named := os.environ.get("HF_INFCL_COMMIT"):
        return named
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


# ---- The loss ----


def fuzz_loss(options: argparse.Namespace) -> int:
    """Runs random cases on each number of processes; returns the number of wrong losses and gradients."""
    wrong = 0
    for world_size in options.world_sizes:
        begin, findings = time.monotonic(), Findings()
        for found in several_ranks(world_size, options) if world_size > 1 else one_process(options):
            findings.add(found)
            print(f"{world_size} processes: {findings.cases} cases, {len(findings.failures)} failures", flush=True)
            if time.monotonic() - begin > 60 * options.minutes:
                break
        for failure in findings.failures[:20]:
            print(failure)
        ratios = sorted(findings.ratios)
        write_row(
            options.results,
            check="loss",
            processes=world_size,
            count=findings.cases,
            seconds=round(time.monotonic() - begin),
            failures=len(findings.failures),
            detail=(
                f"seeds from {options.first_seed}; {len(ratios)} errors are {median(ratios):.2g} of plain torch's in "
                f"the median; beyond what rounding explains, but not beyond plain torch: {findings.beyond_rounding}"
            ),
        )
        wrong += len(findings.failures)
    return wrong


def consecutive(options: argparse.Namespace) -> Iterable[Iterable[int]]:
    """The seeds of all cases, in batches."""
    last = options.first_seed + options.cases
    for first in range(options.first_seed, last, CASES_AT_A_TIME):
        yield range(first, min(first + CASES_AT_A_TIME, last))


def by_kernels(options: argparse.Namespace) -> Iterable[Iterable[int]]:
    """The seeds of all cases, in batches of cases for which a GPU compiles the same kernels.

    Every kernel occurs in one batch before any kernel occurs in a second one. Each is therefore compiled by a single
    worker, and is in Triton's cache when other workers need it.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for seed in range(options.first_seed, options.first_seed + options.cases):
        alike.setdefault(Case.draw(seed, 1, DEVICE).kernels(), []).append(seed)
    for first in range(0, max(map(len, alike.values())), CASES_AT_A_TIME):
        yield from filter(None, (seeds[first : first + CASES_AT_A_TIME] for seeds in alike.values()))


def one_process(options: argparse.Namespace) -> Iterator[Findings]:
    """Cases of one process each, on several workers: most of the time is spent on compiling and launching kernels."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context, begin_worker, (context.Value("i"),)) as pool:
        tasks = [pool.submit(rank_cases, 0, 1, DEVICE, seeds) for seeds in by_kernels(options)]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            pool.shutdown(cancel_futures=True)


def begin_worker(begun: Any) -> None:
    """Gives a worker one thread and a GPU. GPUs are assigned to workers in turn.

    Args:
        begun: the number of workers that started before this one, shared by all workers.
    """
    torch.set_num_threads(1)
    if ON_GPU:
        with begun.get_lock():
            torch.cuda.set_device(begun.value % torch.cuda.device_count())
            begun.value += 1


def several_ranks(world_size: int, options: argparse.Namespace) -> Iterator[Findings]:
    """Cases of several processes. In every other batch texts of any size are sent around the ring, not gathered."""
    pool = Ranks()
    try:
        for number, seeds in enumerate(consecutive(options)):
            by_rank = pool.run(
                *(rank_cases, world_size, DEVICE, seeds),
                backend="nccl" if ON_GPU else "gloo",
                timeout=600,
                always_ring=number % 2 == 1,
            )
            for other in by_rank[1:]:
                by_rank[0].failures += other.failures
            yield by_rank[0]
    finally:
        pool.close()


# ---- Training ----


def train(options: argparse.Namespace) -> int:
    """Trains, evaluates and saves; returns the number of measures of the process that have grown."""
    from helpers import models  # here, so that the processes of the loss do not import transformers
    from helpers.trainers import trainer_for
    from helpers.usage import Usage

    begin, seen = time.monotonic(), Usage(options.steps, minutes=options.minutes)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(
            folder,
            models.clip(dropout=0.1),
            models.Pairs(512),
            max_steps=options.steps,
            callbacks=[seen],
            eval_dataset=models.Pairs(16, seed=1),
            eval_strategy="steps",
            eval_steps=max(1, options.steps // 20),
            save_strategy="steps",
            save_steps=max(1, options.steps // 20),
            save_total_limit=2,
            logging_steps=max(1, options.steps // 20),
            use_cpu=not ON_GPU,
            bf16=ON_GPU,
            max_grad_norm=1.0,
        )
        gc.collect()
        gc.freeze()  # searching the objects of all imports at every measurement takes longer than the training
        trainer.train()
        gc.unfreeze()
    growth, grown, last = seen.growth(), seen.grown(), seen.seen[-1]
    write_row(
        options.results,
        check="train",
        processes=1,
        count=trainer.state.global_step,
        seconds=round(time.monotonic() - begin),
        failures=len(grown),
        detail="; ".join(f"{name} {last[name]:.6g} ({growth[name]:+.3g})" for name in last),
    )
    return len(grown)


# ---- Text ----

STATISTICS = r"^tests/test_\w+\.py::(.*):\n\n((?:  .*\n|\n)+)"  # of one test, as printed by hypothesis


def fuzz_text(options: argparse.Namespace) -> int:
    """Runs two test files that draw random input, with 10,000 cases each; returns the number of files that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis"]
    command += ["--hypothesis-profile=long", "--hypothesis-show-statistics"]
    wrong = 0
    for file in ("tests/test_fuzz.py", "tests/test_cli.py"):
        ended = subprocess.run([*command, file], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(ended.stdout)
        wrong += ended.returncode != 0
        for name, statistics in re.findall(STATISTICS, ended.stdout, re.MULTILINE):
            counts = re.findall(r"(\d+) passing(?: examples)?, (\d+) failing", statistics)
            passing, failing = (sum(map(int, column)) for column in zip(*counts, strict=True))
            seconds = sum(map(float, re.findall(r"phase \(([\d.]+) seconds\)", statistics)))
            write_row(
                *(options.results,),
                **{"check": "text", "processes": 1, "count": passing + failing, "seconds": round(seconds)},
                **{"failures": failing, "detail": name},
            )
    return wrong


# ---- Kills ----


def kill(options: argparse.Namespace) -> int:
    """Runs trainings that are killed at random moments; returns how many ended without the right weights."""
    begin = time.monotonic()
    counts = count_kills(options.runs, options.first_seed, 60 * options.minutes)
    write_row(
        options.results,
        check="kills",
        processes=2,
        count=counts.kills,
        seconds=round(time.monotonic() - begin),
        failures=len(counts.wrong),
        detail="; ".join([f"{counts.runs} runs; {counts.in_saves} kills within a save", *counts.wrong]),
    )
    return len(counts.wrong)


# ---- Memory ----


def train_settings(options: argparse.Namespace) -> int:
    """Trains random settings, of which only the global batch is given; returns how many did not reach their end."""
    from helpers.settings import Setting, described, train

    begin, outcomes = time.monotonic(), []
    for seed in range(options.first_seed, options.first_seed + options.cases):
        setting = Setting.draw(seed)
        outcomes.append(train(setting))
        print(described(seed, setting, outcomes[-1]), flush=True)
        if time.monotonic() - begin > 60 * options.minutes:
            break
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    repeated = sum(outcome.repeated > 0 for outcome in outcomes)
    write_row(
        options.results,
        check="memory",
        processes=1,
        count=len(outcomes),
        seconds=round(time.monotonic() - begin),
        failures=len(failures),
        detail="; ".join(
            [
                f"settings from {options.first_seed}; {repeated} trainings repeated a step, because memory ran out",
                f"peak memory {median(outcome.peak for outcome in outcomes):.0%} of the GPU in the median",
                *failures[:5],
            ]
        ),
    )
    return len(failures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("loss", "train", "text", "kills", "memory"))
    parser.add_argument("--cases", type=int, default=10_000, help="random cases of the loss, for each world size")
    parser.add_argument("--first_seed", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[1], help="numbers of processes of a case")
    parser.add_argument("--workers", type=int, default=8 if ON_GPU else 2, help="cases of one process at a time")
    parser.add_argument("--steps", type=int, default=1000 if ON_GPU else 5000, help="optimizer steps of the training")
    parser.add_argument("--runs", type=int, default=40, help="trainings that are killed and resumed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="the longest duration of each row")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the CSV that the rows are appended to")
    options = parser.parse_args()
    checks = {"loss": fuzz_loss, "train": train, "text": fuzz_text, "kills": kill, "memory": train_settings}
    wrong = checks[options.check](options)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
