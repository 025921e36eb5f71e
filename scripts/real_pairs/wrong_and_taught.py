#!/usr/bin/env python3
"""Trains with wrong captions and with teachers, on one GPU, several runs at a time; appends to wrong_and_taught.csv.

    python scripts/real_pairs/wrong_and_taught.py --corpus outputs/real_pairs --output_dir outputs/wrong_and_taught

Each run is the small CLIP of the experiments, 1,024 pairs × 576 steps (589,824 samples), Muon at 4e-3. ``wrong`` is the
share of the training pairs that have the captions of another pair, the same ones in all runs. With ``oracle`` these are
removed before the training. ``teacher`` says how a teacher teaches, with β = 1: it is the same model after 1,179,648
samples, which knows the right captions; "stored" are its embeddings of the images as they are, "online" those of the
augmented images. The columns are those of experiments.py: recall in another style (vendor), on new concepts and on the
validation set, in per cent, both directions averaged; ``auc`` and ``auc_of_ledger`` tell how well the averages of the
rule and of the ledger separate right from wrong pairs at the end, and ``border`` is what the rule has chosen.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks and real_pairs

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from benchmarks.common import environment
from torch import Tensor

from hf_infcl.encoders.dual_encoder import DualEncoder
from hf_infcl.evaluation import retrieval_metrics
from hf_infcl.passes.grad_cache import Features
from hf_infcl.windows.extensions import of_kind
from hf_infcl.windows.selection import WithoutNoisyPairs
from hf_infcl.windows.terms import TeacherDistance
from real_pairs import training
from real_pairs.in_memory import normalised, prepare, to_device

SAMPLES, BATCH, RATE = 589_824, 1024, 4e-3
PLAIN: dict[str, Any] = {"wrong": 0.0, "oracle": False, "teacher": "", "options": {}}


def jobs_of(names: Sequence[str]) -> list[dict[str, Any]]:
    """The runs of the chosen parts, the longest first."""
    noisy = {"leave_out": "noisy"}
    parts = {
        "wrong": [
            *({"wrong": w, "seed": s, "options": noisy} for s in (0, 1, 2) for w in (0.2, 0.5)),
            *({"wrong": w, "seed": 0} for w in (0.2, 0.5, 0.1, 0.0)),
            *({"wrong": w, "seed": 0, "options": noisy} for w in (0.1, 0.0)),
            *({"wrong": w, "seed": 0, "oracle": True} for w in (0.2, 0.5)),
        ],
        "taught": [
            {"seed": 100, "save": True},
            *({"seed": s, "teacher": "stored"} for s in (0, 1, 2)),
            {"seed": 0, "teacher": "online"},
            {"seed": 0, "teacher": "stored", "options": {"matryoshka_dims": [32, 64, 128]}},
            {"seed": 0, "options": {"matryoshka_dims": [32, 64, 128]}},
            {"seed": 0, "wrong": 0.5, "teacher": "stored"},
            {"seed": 0, "wrong": 0.5, "teacher": "stored", "options": noisy},
            {"seed": 0, "teacher": "stored", "options": {"contrastive_weight": 0.0}},
            {"seed": 1},
        ],
    }
    return [{**PLAIN, **job} for name in names for job in parts[name]]


def with_wrong_captions(data: dict[str, Any], share: float) -> tuple[dict[str, Any], Tensor]:
    """The data in which this share of the pairs has the captions of another pair; and which, [pairs] bool."""
    drawn, pairs, device = torch.Generator().manual_seed(99), len(data["counts"]), data["counts"].device
    wrong = torch.randperm(pairs, generator=drawn)[: int(pairs * share)]
    other = wrong[torch.randperm(len(wrong), generator=drawn)].to(device)
    wrong = wrong.to(device)
    changed = {name: data[name].clone() for name in ("tokens", "counts")}
    for name, rows in changed.items():
        rows[wrong] = data[name][other]
    is_wrong = torch.zeros(pairs, dtype=torch.bool, device=device)
    is_wrong[wrong] = True
    return {**data, **changed}, is_wrong


class FromBatch:
    """A `Teacher` whose embeddings `InMemory` puts into the batch."""

    width, options, inputs, words = None, {}, None, "stored"

    def embed(self, inputs: Mapping[str, Any], frozen_outputs: Mapping[str, Any]) -> Features:
        return inputs["stored_images"], inputs["stored_texts"]


@torch.no_grad()
def stored(teacher: Any, data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A teacher's normalised embeddings of the images, [N, D], and of all captions, [N, C, D]."""
    dual, device = DualEncoder(teacher.eval()), data["images"].device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        images = [dual.encode_images({"pixel_values": normalised(part)}) for part in data["images"].split(1024)]
        texts = [dual.encode_texts({"input_ids": t.long()}) for t in data["tokens"].flatten(0, 1).split(4096)]
    return torch.cat(images).float(), torch.cat(texts).float().unflatten(0, data["tokens"].shape[:2])


@torch.no_grad()
def at_width(model: Any, data: dict[str, Any], width: int) -> dict[str, float]:
    """Recalls of the embeddings' first dimensions."""
    dual, found = DualEncoder(model.eval(), width), {}
    for name, k in (("vendor", 1), ("concepts", 5)):
        values = data["sets"][name]
        with torch.compiler.set_stance("force_eager"), torch.autocast(data["images"].device.type, torch.bfloat16):
            images = [dual.encode_images({"pixel_values": normalised(part)}) for part in values["images"].split(1024)]
            texts = [dual.encode_texts({"input_ids": part.long()}) for part in values["tokens"].split(1024)]
        metrics = retrieval_metrics(
            F.normalize(torch.cat(images).float(), dim=1),
            F.normalize(torch.cat(texts).float(), dim=1),
            torch.arange(sum(map(len, images)), device=data["images"].device),
        )
        recalls = [metrics[f"{way}_retrieval_recall@{k}"] for way in ("image", "text")]
        found[f"{name}_recall@{k}_of_{width}"] = round(100 * sum(recalls) / 2, 2)
    return found


class Observed(training.InfCLTrainer):
    """Remembers its step, which has the averages of the pairs."""

    last: Any = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        Observed.last = self.window_step
        return result


def run_job(job: dict[str, Any], data: dict[str, Any], folder: Path, *, toy: bool) -> dict[str, Any]:
    samples = 2 * SAMPLES if job.get("save") else SAMPLES
    run = training.Run(
        experiment="wrong_and_taught",
        method="InfCLTrainer",
        batch=64 if toy else BATCH,
        micro_batch=64 if toy else BATCH,
        samples=640 if toy else samples,
        learning_rate=3e-3 if job.get("save") else RATE,
        seed=job["seed"],
        evaluations=1,
        optimizer="muon",
        options=json.dumps(job["options"]),
    )
    changed, is_wrong = with_wrong_captions(data, job["wrong"])
    guests: dict[str, Any] = {}
    sources = None
    if job["oracle"]:
        changed["sources"] = ["wrong" if bad else "right" for bad in is_wrong.tolist()]
        sources = ["right"]
    if job["teacher"]:
        teacher = training.new_model(data, 0, toy=toy).to(data["images"].device)
        teacher.load_state_dict(torch.load(folder / "teacher.pt", weights_only=True))
        if job["teacher"] == "online":
            guests["teacher"] = teacher
        else:
            changed["stored"] = stored(teacher, changed)
            guests["extensions"] = [TeacherDistance([FromBatch()], 1.0)]
    training.TRAINERS["InfCLTrainer"] = Observed
    rows, model = training.train(run, changed, {}, sources=sources, toy=toy, compiled=data["images"].is_cuda, **guests)
    if job.get("save"):
        torch.save(model.state_dict(), folder / "teacher.partial")
        os.replace(folder / "teacher.partial", folder / "teacher.pt")
    found = {name: value for name, value in job.items() if name != "save"} | {"options": json.dumps(job["options"])}
    found |= {"seconds": rows[-1]["seconds"], "samples": rows[-1]["samples_seen"]}
    for name, k in (("vendor", 1), ("concepts", 5)):
        found[f"{name}_recall@{k}"] = 50 * sum(rows[-1][f"{name}_{way}_recall@{k}"] for way in ("image", "text"))
    found["validation"] = 100 * training.score(rows[-1])
    if "matryoshka_dims" in job["options"] or job["teacher"]:
        for width in (32, 64, 128):
            found |= at_width(model, data, width)
    for selection in of_kind(Observed.last.extensions, WithoutNoisyPairs):
        found |= _of_selection(selection, is_wrong)
    return found


def _of_selection(selection: WithoutNoisyPairs, is_wrong: Tensor) -> dict[str, Any]:
    """How well the averages at the end of a training tell the wrong pairs from the others."""
    fast, slow = selection.averages.state_dict()["averages"].to(is_wrong.device)
    found: dict[str, Any] = {"border": selection.border or ""}
    if is_wrong.any():
        for name, values in (("auc", fast), ("auc_of_ledger", slow)):
            ranks = values.argsort().argsort().double() + 1
            right = (~is_wrong).sum()
            wins = ranks[~is_wrong].sum() - right * (right + 1) / 2
            found[name] = round((wins / (right * is_wrong.sum())).item(), 4)
    return found


def work(jobs: Any, taken: Any, lock: Any, tensors: str, folder: Path, end: float, toy: bool) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = to_device(torch.load(tensors, weights_only=True), device)
    data["sources"] = data.get("sources") or ["any"] * len(data["counts"])
    while time.time() < end:
        with lock:
            waits = not (folder / "teacher.pt").exists()
            free = [i for i in range(len(jobs)) if not taken[i]]
            number = next((i for i in free if not (jobs[i]["teacher"] and waits)), None)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["wrong", "taught"], choices=["wrong", "taught"])
    parser.add_argument("--corpus", type=Path, help="the folder that real_pairs.py has written")
    parser.add_argument("--tensors", help="what in_memory.prepare returned for it, saved by torch")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=5, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=3600, help="no run begins later than this")
    parser.add_argument("--toy", action="store_true", help="ten steps of a tiny model, to try things out")
    args = parser.parse_args()
    end = time.time() + args.seconds
    args.output_dir.mkdir(parents=True, exist_ok=True)
    tensors = args.tensors or str(args.output_dir / "tensors.pt")
    if not Path(tensors).exists():
        torch.save(prepare(args.corpus), tensors)
    context, jobs = mp.get_context("spawn"), jobs_of(args.parts)
    taken, lock = context.Array("i", len(jobs), lock=False), context.Lock()
    words = (jobs, taken, lock, tensors, args.output_dir, end, args.toy)
    processes = [context.Process(target=work, args=words) for _ in range(args.processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    rows = [json.loads(line) for line in (args.output_dir / "rows.jsonl").read_text().splitlines()]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (args.output_dir / "wrong_and_taught.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
