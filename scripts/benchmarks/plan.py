"""What `infcl plan` predicts beside the measured rows of `step`, `loss` and `ring`: writes PLAN.md.

The rates of `hf_infcl.planning` were taken from the rows marked as fitted, and from no others. A difference is that of
the prediction from the measured value. The rows with a frozen tower and micro-batches of 256 are of a commit that held
the kept graph throughout the first pass, 1 GiB more than since commit c444e05. There are no rows of steps on H100s, and
of compiled steps only the one that was fitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import CLIPConfig

from hf_infcl import planning
from hf_infcl.planning import GIB, GPUS, PRODUCTS, Choice

from .common import RESULTS, Row, newest
from .training import MODELS

# Commit, micro-batch and implementation of the rows of steps; commit, device, dimension and rows of those of losses.
FITTED_STEPS = (
    ("3bd15f2", "256", "hf_infcl retain all"),  # matrix products and memory traffic
    ("829e9b3", "256", "Trainer, compiled"),  # what compilation leaves of traffic and activations
    ("ddfe952", "64", "hf_infcl retain all, offload"),  # host time per operation
)
FITTED_LOSSES = (
    ("600f583", "h200", "512", "65536"),
    ("8461ae9", "h100", "512", "65536"),
    ("3a8623b", "h200", "512", "8192"),  # the time to launch
)
SMALLEST = 8192  # pairs per GPU; smaller losses take milliseconds of a step of seconds


class Compared(NamedTuple):
    """A row with its measured and predicted milliseconds and GiB; of losses the memory is not compared."""

    row: Row
    fitted: bool
    ms: float
    predicted_ms: float
    gib: float = 0.0
    predicted_gib: float = 0.0


def steps(results: Path = RESULTS) -> Iterator[Compared]:
    """The newest rows of InfCLTrainer's steps, and of the plain Trainer's where they were fitted."""
    keys = ("world_size", "pixel_dtype", "micro_batch_size", "accumulation_steps", "implementation")
    config = CLIPConfig(**MODELS["vit-b-16"])
    counts = {freeze: planning.count(config, freeze=freeze) for freeze in (None, "image")}
    for row in newest(results / "step.csv", keys, lambda row: row["ms"] and row["model"] == "vit-b-16"):
        name, accumulation = row["implementation"], int(row["accumulation_steps"])
        fitted = (row["commit"], row["micro_batch_size"], name) in FITTED_STEPS
        if not (name.startswith("hf_infcl") or fitted):
            continue
        choice = Choice(
            gpus=int(row["world_size"]),
            micro_batch=int(row["micro_batch_size"]),
            accumulation=accumulation,
            retain=accumulation if "retain" in name else 1,
            offload="offload" in name,
            compiled="compiled" in name,
        )
        of_model = counts["image" if "freeze" in name else None]
        gib = planning.memory(of_model, choice, pixel_bytes=4 if row["pixel_dtype"] == "float32" else 2).total / GIB
        once = name.startswith("Trainer")  # it runs each micro-batch forward once, and keeps one graph
        timed = replace(choice, retain=accumulation) if once else choice
        ms = 1000 * sum(planning.seconds(of_model, timed, GPUS[_gpu(row)]).values())
        yield Compared(row, fitted, float(row["ms"]), ms, float(row["peak_gib"]), gib)


def losses(results: Path = RESULTS) -> Iterator[Compared]:
    """The newest rows of the loss with bf16 features on one GPU and several."""
    tables = (("loss", "H200", ()), ("loss", "H100", ()), ("ring", "H200", ("world_size",)))
    for table, device, more in tables:

        def wanted(row: Row, device: str = device) -> bool:
            of_ours = row["implementation"] == "hf_infcl" and row["dtype"] == "bfloat16" and bool(row["ms"])
            return of_ours and device in row["device"]

        for row in newest(results / f"{table}.csv", (*more, "objective", "dim", "batch_size"), wanted):
            gpus = int(row.get("world_size") or 1)
            choice = Choice(gpus, int(row["batch_size"]) // gpus, 1)
            if choice.rows < SMALLEST or row["objective"] not in PRODUCTS:
                continue
            name = _gpu(row)
            ms = 1000 * planning.loss_seconds(int(row["dim"]), choice, GPUS[name], row["objective"])
            fitted = (row["commit"], name, row["dim"], row["batch_size"]) in FITTED_LOSSES and row[
                "objective"
            ] == "softmax"
            yield Compared(row, fitted, float(row["ms"]), ms)


def _gpu(row: Row) -> str:
    return "h200" if "H200" in row["device"] else "h100"


def run(args: argparse.Namespace) -> None:
    lines = [
        "# Predicted and measured",
        "",
        __doc__.split("\n\n", 1)[1].strip(),
        "Made by `scripts/benchmark.py plan`.",
        "",
        "## Steps of a CLIP ViT-B/16",
        "",
        "| GPUs | micro-batches | implementation | commit | GiB | predicted | | ms | predicted | | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, fitted, ms, predicted_ms, gib, predicted_gib in steps():
        lines.append(
            f"| {row['world_size']} × {_gpu(row).upper()} | {row['accumulation_steps']} × {row['micro_batch_size']} | "
            f"{row['implementation']} | {row['commit']} | {gib:.2f} | {predicted_gib:.2f} | "
            f"{predicted_gib / gib - 1:+.1%} | {ms:.0f} | {predicted_ms:.0f} | {predicted_ms / ms - 1:+.1%} | "
            f"{'fitted' if fitted else ''} |"
        )
    lines += [
        "",
        "## The loss alone",
        "",
        "| GPUs | objective | pairs × dimensions | commit | ms | predicted | | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, fitted, ms, predicted_ms, *_ in losses():
        lines.append(
            f"| {row.get('world_size') or 1} × {_gpu(row).upper()} | {row['objective']} | {int(row['batch_size']):,} × "
            f"{row['dim']} | {row['commit']} | {ms:.2f} | {predicted_ms:.2f} | {predicted_ms / ms - 1:+.1%} | "
            f"{'fitted' if fitted else ''} |"
        )
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=RESULTS / "PLAN.md")
