#!/usr/bin/env python3
"""Run the experiments of the YAML files on all GPUs, the first file and its first configuration first.

    python -m real_pairs.experiments --corpus outputs/real_pairs --output_dir outputs/experiments experiments/*.yaml

Each configuration is trained with several learning rates at the first seed. While the best one, by the recalls of the
validation set, is the least or the greatest that was tried, the next one beyond it, at half or twice the rate, is tried
as well. The best one is trained with the other seeds; the best so far, and before any run has ended the first of the
list, gets them while others are being tried, so that no GPU waits.

The rows of a run are added to results.csv when it has ended. At the time limit the runs under way are ended without
rows; the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks and real_pairs

import torch
import yaml
from benchmarks.common import environment

from real_pairs.fine_tuning import fine_tune
from real_pairs.in_memory import prepare, to_device
from real_pairs.swaps import KINDS
from real_pairs.training import SETS, Row, Run, score, train, versions

LEAST, MOST = 1.2e-4, 8.1e-3  # learning rates beyond which none is tried
METRICS = tuple(f"{name}_{way}_recall@{k}" for name in SETS[:3] for way in ("image", "text") for k in (1, 5, 10))
METRICS += tuple(f"{name}_{metric}" for name in SETS[3:] for metric in ("acc1", "mean_per_class_recall"))
METRICS += tuple(f"{name}_{kind}_swaps" for name in SETS[1:3] for kind in KINDS)
COLUMNS = (
    *(field.name for field in dataclasses.fields(Run)),
    *("path", "alpha", "steps", "samples_seen", "finished", "seconds", "logit_scale", "peak_gib"),
    *("alone", "processes_per_gpu", "torch_compile"),
    *METRICS,
    *("concepts_examples", "vendor_examples"),
    *("date", "commit", "device", "torch", "transformers"),
)


@dataclass(frozen=True)
class Plan:
    """One configuration of a YAML file.

    Attributes:
        run: its run with the first learning rate and the first seed.
        rates, seeds: what is tried; the rate that is thought to be the best stands first.
        alone: whether nothing else runs on the same GPU.
        base: the training that must have ended before, for a fine-tuning.
    """

    run: Run
    rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    alone: bool = False
    base: Run | None = None

    def wanted(self, scores: dict[tuple[float, int], float]) -> list[Run]:
        """The runs that are needed next, given the scores of those that ended by learning rate and seed.

        A plan of a single rate is about that rate: others that were tried do not matter.
        """

        def runs(rates: Iterable[float], seeds: Iterable[int]) -> list[Run]:
            pairs = itertools.product(rates, seeds)
            return [dataclasses.replace(self.run, learning_rate=rate, seed=seed) for rate, seed in pairs]

        first = self.seeds[0]
        only = self.rates if len(self.rates) == 1 else {rate for rate, _ in scores}
        tried = {rate: value for (rate, seed), value in scores.items() if seed == first and rate in only}
        next_rates = [rate for rate in self.rates if rate not in tried]
        best = max(tried, key=lambda rate: tried[rate]) if tried else self.rates[0]
        if not next_rates and len(self.rates) > 1:
            if best == max(tried) and 2 * best < MOST:
                next_rates = [2 * best]
            elif best == min(tried) and best / 2 > LEAST:
                next_rates = [best / 2]
        return runs(next_rates, [first]) + runs([best], self.seeds[1:])


def read_plans(paths: Sequence[Path], micro_batch: int = 2048, *, toy: bool = False) -> list[Plan]:
    """The configurations of the files in their order.

    Args:
        paths: the YAML files.
        micro_batch: the largest micro-batch of configurations that name none.
        toy: whether batches are a sixty-fourth of the file's, and samples are few.
    """
    plans = []
    for path in paths:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        configurations = settings.pop("configurations")
        alone = settings.pop("alone", False)
        ways = settings.pop("ways", [])
        steps = settings.pop("steps", None)
        base = settings.pop("base", None)
        tried = {"learning_rates": [0.0], "seeds": [0, 1, 2]}
        tried |= {name: settings.pop(name) for name in list(tried) if name in settings}

        def run(values: dict[str, Any], path: Path = path, steps: int | None = steps) -> Run:
            values = {"micro_batch": min(micro_batch, values["batch"]), **values}
            options = values.get("options")
            values["options"] = json.dumps(options) if options else ""
            if steps is not None:
                values["samples"] = steps * values["batch"]
            if toy:
                values["micro_batch"] = max(2, values["micro_batch"] // 64)
                values["batch"] = max(values["micro_batch"], values["batch"] // 64)
                values["samples"] = 4 * values["batch"]
            return Run(experiment=path.stem, **values)

        for configuration in configurations:
            of_this = {name: configuration.pop(name, values) for name, values in tried.items()}
            rates, seeds = tuple(of_this["learning_rates"]), tuple(of_this["seeds"])
            common = {**settings, "learning_rate": rates[0], "seed": seeds[0], **configuration}
            if base is None:
                plans.append(Plan(run(common), rates, seeds, alone))
                continue
            based = run({**settings, **base, "way": "base"})
            plans.append(Plan(based, (based.learning_rate,), seeds))
            for way in ways:
                of_way = {name: value for name, value in way.items() if name != "learning_rates"}
                tuned = [run({**common, **of_way, "learning_rate": rate}) for rate in way["learning_rates"]]
                plans += [Plan(one, (one.learning_rate,), seeds, base=based) for one in tuned]
    return plans


# ---- Processes ----


@dataclass
class Worker:
    process: Any
    channel: Any
    gpu: int
    plan: Plan | None = None
    run: Run | None = None
    began: float = 0.0


def work(channel: Any, tensors: Path, processes_per_gpu: int, toy: bool, compiled: bool) -> None:
    """Trains the runs that arrive, on the one GPU that this process sees or on the CPU; sends what was measured."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = to_device(torch.load(tensors, weights_only=True), device)
    torch._dynamo.config.recompile_limit = 64  # a layer is compiled once for every micro-batch that a run of this has
    shared = {
        **environment(device),
        **versions(),
        "processes_per_gpu": processes_per_gpu,
        "torch_compile": compiled,
    }
    channel.send("ready")
    while True:
        plan, run = channel.recv()
        origin = {**shared, "alone": plan.alone}
        rows: list[Row] = []
        error = ""
        try:
            if run.way:
                base = run if plan.base is None else dataclasses.replace(plan.base, seed=run.seed)
                weights = tensors.with_name(f"{base.experiment} {base.seed}.pt")
                rows = fine_tune(run, data, origin, weights, toy=toy, compiled=compiled)
            else:
                rows, _ = train(run, data, origin, toy=toy, compiled=compiled)
        except Exception:
            error = traceback.format_exc()
        channel.send((rows, error))
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Queue:
    """Hands the runs of the plans out to workers, in the order of the plans.

    Args:
        plans: the plans.
        table: the CSV that the rows are added to. Runs that ended in it are not repeated.
        end: the time, as of `time.monotonic`, at which nothing runs any more.
        machine: columns that decide about the speed; earlier rows that agree in them tell how long a run will take.
    """

    def __init__(self, plans: Sequence[Plan], table: Path, end: float, machine: Row) -> None:
        self._plans, self._table, self._end = plans, table, end
        self._machine = {name: str(value) for name, value in machine.items()}
        self._scores: list[dict[tuple[float, int], float]] = [{} for _ in plans]
        self._issued: set[Run] = set()
        self._seconds: dict[tuple, float] = {}  # per sample, of the runs that ended, by what decides about the speed
        self._written: set[Run] = set()  # the runs whose rows were in the table before
        self._bases: set[Run] = set()  # that were trained
        self.skipped: set[Run] = set()
        self.failures: list[str] = []
        if table.exists():
            with table.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            table.unlink()  # it may lack columns that are new
            self._write(rows)
            self._remember(rows)

    def _remember(self, rows: Sequence[dict[str, str]]) -> None:
        """Counts the runs that ended earlier."""
        for row in rows:
            if row["finished"] != "True":
                continue
            run = _run_of(row)
            self._written.add(run)
            same_machine = all(row.get(name) == value for name, value in self._machine.items())
            if same_machine and run.evaluations and run.way in ("", "base"):
                self._seconds[_kind(run)] = float(row["seconds"]) / run.samples
            metrics = {name: float(row[name]) for name in METRICS if row.get(name)}
            if run.way != "base":  # its weights are gone
                self._count(run, score(metrics) if metrics else 0.0)

    def _count(self, run: Run, value: float) -> None:
        """Counts a run that ended for all plans that it is part of."""
        for plan, scores in zip(self._plans, self._scores, strict=True):
            same = dataclasses.replace(run, **plan.run.indifferent)
            if dataclasses.replace(same, learning_rate=plan.run.learning_rate, seed=plan.run.seed) == plan.run:
                self._issued.add(same)
                scores[run.learning_rate, run.seed] = value

    def next_for(self, worker: Worker, workers: Sequence[Worker]) -> tuple[Plan, Run] | None:
        """The first run that may begin on this worker's GPU now and is likely to end in time."""
        beside = [other for other in workers if other.gpu == worker.gpu and other.plan is not None]
        if any(other.plan.alone for other in beside if other.plan is not None):
            return None
        for plan, scores in zip(self._plans, self._scores, strict=True):
            if plan.alone and (beside or worker.gpu != workers[0].gpu):
                continue
            for run in plan.wanted(scores):
                if run in self._issued or not self._has_its_turn(plan, run):
                    continue
                if self._estimate(plan) > self.seconds_left():
                    self.skipped.add(run)
                    continue
                self._issued.add(run)
                return plan, run
        return None

    def _has_its_turn(self, plan: Plan, run: Run) -> bool:
        """A fine-tuning follows its base, and a base is trained if one of its fine-tunings is missing."""
        if run.way != "base":
            return plan.base is None or dataclasses.replace(plan.base, seed=run.seed) in self._bases
        others = ((p, p.wanted(scores)) for p, scores in zip(self._plans, self._scores, strict=True))
        return any(r.seed == run.seed and r not in self._issued for p, rs in others if p.base == plan.run for r in rs)

    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def _estimate(self, plan: Plan) -> float:
        """Seconds that a run of the plan will take, by earlier ones of the same kind or else by the slowest one."""
        return 1.1 * plan.run.samples * self._seconds.get(_kind(plan.run), max(self._seconds.values(), default=0.0))

    def finished(self, worker: Worker, rows: list[Row], error: str) -> None:
        """Writes what a worker measured, and prints the error that ended its run, if one did."""
        plan, run = worker.plan, worker.run
        assert plan is not None
        assert run is not None
        worker.plan = worker.run = None
        if run not in self._written:
            self._write(rows)
        if error:
            self.failures.append(error)
            print(f"{run} failed:\n{error}", flush=True)
            return
        took = time.monotonic() - worker.began
        if run.way == "base":
            self._bases.add(run)
        if run.evaluations and run.way in ("", "base"):  # a run for its cost mostly compiles
            self._seconds[_kind(run)] = took / run.samples
        last = rows[-1]
        value = score(last) if any(name.startswith("validation") for name in last) else 0.0
        self._count(run, value)
        seen = " ".join(f"{k}={last[k]}" for k in ("vendor_image_recall@1", "concepts_image_recall@5") if k in last)
        usual = {field.name: field.default for field in dataclasses.fields(Run)}
        special = (
            "way",
            "replay",
            "options",
            "optimizer",
            "samples",
            "objective",
            "pair_ids",
            "captions",
            "equal_ids",
            "negatives",
        )
        settings = "".join(f" {n}={getattr(run, n)}" for n in special if getattr(run, n) != usual[n])
        print(
            f"{run.experiment} {run.method} batch={run.batch}{settings} rate={run.learning_rate:g} seed={run.seed}: "
            f"{took:.1f} s score={value:.4f} {seen}",
            flush=True,
        )

    def _write(self, rows: Sequence[Row]) -> None:
        begun = self._table.exists()
        with self._table.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="")
            if not begun:
                writer.writeheader()
            writer.writerows(rows)


def _run_of(row: dict[str, str]) -> Run:
    """The run of a row of the CSV."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Run):
        if text := row.get(field.name):  # rows from before a field was added have its default
            values[field.name] = text == "True" if field.type == "bool" else _CASTS[str(field.type)](text)
    return Run(**values)


_CASTS: dict[str, Any] = {"str": str, "int": int, "float": float}


def _kind(run: Run) -> tuple:
    return run.method, run.batch, run.micro_batch, run.captions, run.negatives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiments", type=Path, nargs="+", help="YAML files, the most important first")
    parser.add_argument("--corpus", type=Path, default=Path("outputs/real_pairs"), help="of scripts/real_pairs.py")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/experiments"))
    parser.add_argument("--minutes", type=float, default=24 * 60, help="time limit, preparation included")
    parser.add_argument("--processes_per_gpu", type=int, default=3, help="runs at a time: small steps leave a GPU idle")
    parser.add_argument("--micro_batch", type=int, default=2048, help="at most this where a file does not name one")
    parser.add_argument("--torch_compile", action="store_true", help="compile the layers of the towers")
    parser.add_argument("--toy", action="store_true", help="a tiny model, few samples: to try everything out on a CPU")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    args.output_dir.mkdir(parents=True, exist_ok=True)
    plans = read_plans(args.experiments, args.micro_batch, toy=args.toy)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = {"device": environment(device)["device"], "torch_compile": args.torch_compile}
    queue = Queue(plans, args.output_dir / "results.csv", end, machine)
    with tempfile.TemporaryDirectory() as folder:
        tensors = Path(folder, "corpus.pt")
        torch.save(prepare(args.corpus), tensors)
        print(f"The corpus was prepared; {end - time.monotonic():.0f} s are left.", flush=True)
        run_all(queue, tensors, args.processes_per_gpu, toy=args.toy, compiled=args.torch_compile)
    print(f"{len(queue.failures)} runs failed, {len(queue.skipped)} were not begun for want of time.")


def run_all(queue: Queue, tensors: Path, processes_per_gpu: int, *, toy: bool, compiled: bool) -> None:
    """Starts workers on all GPUs, or on the CPU, and hands runs out until none is left or the time is up."""
    context = multiprocessing.get_context("spawn")
    workers = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    # One worker of each GPU starts first: the runs that want a GPU for themselves begin on the first one.
    for number in range(max(1, len(gpus)) * processes_per_gpu):
        gpu = number % max(1, len(gpus))
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[gpu]
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, tensors, processes_per_gpu, toy, compiled), daemon=True)
        process.start()
        theirs.close()
        workers.append(Worker(process, ours, gpu))
    try:
        for worker in workers:
            worker.channel.recv()  # it is ready
        print(f"{len(workers)} processes are ready; {queue.seconds_left():.0f} s are left.", flush=True)
        while True:
            for worker in workers:
                if worker.plan is None and (task := queue.next_for(worker, workers)) is not None:
                    worker.plan, worker.run = task
                    worker.began = time.monotonic()
                    worker.channel.send(task)
            busy = {worker.channel: worker for worker in workers if worker.plan is not None}
            if not busy or queue.seconds_left() <= 0:
                break
            for channel in multiprocessing.connection.wait(list(busy), timeout=queue.seconds_left()):
                worker = busy[channel]
                try:
                    queue.finished(worker, *channel.recv())
                except EOFError:
                    queue.finished(worker, [], "Its process ended.")
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


if __name__ == "__main__":
    main()
