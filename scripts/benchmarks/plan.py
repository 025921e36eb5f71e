"""Compares the predictions of `infcl plan` with the measured rows of `step`, `loss` and `ring`: writes PLAN.md.

Memory is counted. Times are operations over a share of the GPU's peak, or launches of the host. The shares of each GPU
and the time of a launch, in `hf_infcl.tools.planning.costs`, are medians of the rows below, so that these are no test
of them. They have to come within 25% for most rows. Differences are those of the prediction from the measured value.

The host limits small steps, and its speed differs from machine to machine: an eager launch took from 21 to 58 μs. On a
fast host (ddfe952) such steps take half as long as predicted. `infcl plan --measure` runs a micro-batch on the GPU at
hand, and so is closer.

Not predicted are the launches of a small loss on several GPUs and the exchange between them. Such a loss takes up to 10
ms longer, in steps that take from a tenth of a second to minutes. Rows with the compilation are single steps in which
the model was compiled. Until c444e05 the first pass kept the graph of one micro-batch while the others were encoded, so
the predicted memory of older rows includes a forward without a graph, 1.28 GiB for 256 pairs. Brackets contain the
first and last decile.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from transformers import CLIPConfig

from hf_infcl.loss import OBJECTIVES
from hf_infcl.tools.planning.costs import GIB, GPUS, LAUNCHES, Choice, Cost, Counts, loss_flops, seconds, step_cost
from hf_infcl.tools.planning.counting import count

from .common import RESULTS, STEP_SETTING, Row, grouped, newest
from .inputs import prefixes, sizes_of

WITH_EARLIER_GRAPH = frozenset(("ddfe952", "21050b0", "3bd15f2", "e3a3dba"))
FORWARD_ALONE = 1.28 * GIB / 256  # bytes per pair of a forward of ViT-B/16 without a graph
SETTING = (*STEP_SETTING, "accumulation_steps", "implementation")
FUSED = "2026-11-27"  # the first day on which eager rows have `hf_infcl.encoders.fused_layers`
FULL_LENGTH = "77"  # tokens
PIXEL_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
SMALLEST = 8192  # pairs; the time of smaller losses is only that of the host
TIME, MEMORY = 0.25, 0.1  # the differences within which predictions are to be


class Compared(NamedTuple):
    """A row with its measured and predicted milliseconds and GiB; the memory of losses is not compared.

    ``kind`` is one of `GPU.shares`, ``share`` the measured share of the peak, and ``launch`` the seconds of the row for
    each launch if the host limited it, or None.
    """

    row: Row
    name: str
    kind: str
    ms: float
    predicted_ms: float
    share: float
    launch: float | None = None
    gib: float = 0.0
    predicted_gib: float = 0.0

    @property
    def compiles(self) -> bool:
        """Whether the step includes the compilation of the model, which is not predicted."""
        return "with the compilation" in self.row["note"]

    @property
    def near(self) -> tuple[bool, bool]:
        """Whether time and memory are within `TIME` and `MEMORY`."""
        return abs(self.predicted_ms / self.ms - 1) <= TIME, abs(self.predicted_gib - self.gib) <= MEMORY * self.gib


def _gpu(row: Row) -> str:
    return "h200" if "H200" in row["device"] else "h100"


def _newest(table: str, keys: tuple[str, ...], wanted: str) -> Iterator[Row]:
    """The newest rows of each device with implementations that begin so."""
    for device in ("H200", "H100"):

        def chosen(row: Row, device: str = device) -> bool:
            return device in row["device"] and bool(row["ms"]) and row["implementation"].startswith(wanted)

        yield from newest(RESULTS / f"{table}.csv", keys, chosen)


def steps() -> Iterator[Compared]:
    """The steps of InfCLTrainer."""
    for row in _newest("step", SETTING, "hf_infcl"):
        # The peak of "by default", and that day of "auto", is that of what was tried; rows do not say which pairs are
        # left out, nor the teacher.
        unplanned = ("by default", "leave_out", "teacher", *(["auto"] if row["date"] == FUSED else []))
        if row["model"] == "tiny" or any(name in row["implementation"] for name in unplanned):
            continue
        counts, choice, gpu, ms = _counts(row), _choice(row), GPUS[_gpu(row)], float(row["ms"])
        cost = step_cost(counts, choice, pixel_bytes=PIXEL_BYTES[row["pixel_dtype"]])
        kind, work, times = choice.kind, cost.passes, seconds(cost, choice, gpu)
        in_passes = ms / 1000 - times["loss"]
        of_host = work.launches * LAUNCHES[kind] > gpu.seconds(work.flops, kind)
        model = row["model"] + f", {row['image_size']} pixels" * (row["image_size"] != "224")
        model += f", {float(row['patch_dropout']):.0%} of the patches left out" * (float(row["patch_dropout"]) > 0)
        model += f", texts of {row['text_tokens']} tokens" * (row["text_tokens"] != FULL_LENGTH)
        division = f"{choice.gradient_accumulation_steps} × {choice.per_device_train_batch_size}"
        name = f"{choice.gpus} × {gpu.name} | {model} | {division}"
        yield Compared(
            row,
            f"{name} | {row['implementation']}",
            kind,
            ms,
            1000 * sum(times.values()),
            share=work.flops / (gpu.peak * in_passes),
            launch=in_passes / work.launches if of_host else None,
            gib=float(row["peak_gib"]),
            predicted_gib=_bytes(row, cost, counts, choice) / GIB,
        )


def _choice(row: Row) -> Choice:
    name, accumulation = row["implementation"], int(row["accumulation_steps"])
    kept = re.match(r"keeps (\d+) graphs", row["note"])
    options: dict[str, Any] = {
        "retain_graphs": int(kept[1]) if kept else accumulation if "retain all" in name else 1,
        "offload_inputs": "offload" in name,
        "torch_compile": "compiled" in name,
        "texts_at_once": accumulation if "texts at once" in name else 1,
    }
    if "matryoshka" in name:
        options["matryoshka_dims"] = prefixes(row["model"])
    return Choice(int(row["world_size"]), int(row["micro_batch_size"]), accumulation, options)


def _counts(row: Row) -> Counts:
    return _counts_of(
        row["model"],
        int(row["image_size"]),
        int(row["micro_batch_size"]),
        patch_dropout=float(row["patch_dropout"]),
        max_text_tokens=None if row["text_tokens"] == FULL_LENGTH else int(row["text_tokens"]),
        freeze="image" if "freeze" in row["implementation"] else None,
        bf16_activations="bf16" in row["implementation"],
        # As under torch.compile, layers were not fused before.
        torch_compile="compiled" in row["implementation"] or row["date"] < FUSED,
    )


@functools.cache
def _counts_of(model: str, image_size: int, pairs: int, **options: Any) -> Counts:
    return count(CLIPConfig(**sizes_of(model, image_size)), pairs, **options)


def _bytes(row: Row, cost: Cost, counts: Counts, choice: Choice) -> float:
    if row["commit"] not in WITH_EARLIER_GRAPH or choice.kept == choice.gradient_accumulation_steps:
        return cost.total
    forward = counts.both.graph + choice.per_device_train_batch_size * FORWARD_ALONE
    return cost.total + max(0.0, forward - cost.activations)


def losses() -> Iterator[Compared]:
    """The loss with bf16 features, on one GPU and on several."""
    for table, more in (("loss", ()), ("ring", ("world_size",))):
        for row in _newest(table, (*more, "objective", "dim", "batch_size", "dtype", "implementation"), "hf_infcl"):
            of_ours = row["implementation"] == "hf_infcl" and row["dtype"] == "bfloat16"
            if not of_ours or int(row["batch_size"]) < SMALLEST or row["objective"] not in OBJECTIVES:
                continue
            gpus, gpu, ms = int(row.get("world_size") or 1), GPUS[_gpu(row)], float(row["ms"])
            pairs, dim, objective = int(row["batch_size"]), int(row["dim"]), row["objective"]
            share = loss_flops(dim, Choice(gpus, pairs // gpus, 1), objective) / (gpu.peak * ms / 1000)
            name = f"{gpus} × {gpu.name} | {objective} | {pairs:,} × {dim}"
            yield Compared(row, name, "loss", ms, ms * share / gpu.shares["loss"], share)


def shares(rows: list[Compared]) -> dict[tuple[str, str], float]:
    """As in `GPUS`, by GPU and kind of step: medians of the rows that it limited, and of the loss on one GPU alone.

    Eager steps whose layers are not fused compute as much in more time.
    """
    of_gpu = [one for one in rows if not one.compiles and one.launch is None]
    of_gpu = [one for one in of_gpu if one.kind != "eager" or one.row["date"] >= FUSED]
    wanted = [one for one in of_gpu if one.kind != "loss" or one.row.get("world_size", "1") == "1"]
    groups = grouped(wanted, lambda one: (_gpu(one.row), one.kind))
    return {key: statistics.median(one.share for one in group) for key, group in groups.items()}


def launches(rows: list[Compared]) -> dict[str, float]:
    """As in `LAUNCHES`: medians of the rows that the host limited."""
    of_host = [one for one in rows if not one.compiles and one.launch is not None]
    groups = grouped(of_host, lambda one: one.kind)
    return {kind: statistics.median(one.launch for one in group) for kind, group in groups.items()}


def run(args: argparse.Namespace) -> None:
    found, lost = list(steps()), list(losses())
    whole = [one for one in found if not one.compiles]
    times, memories = (sum(one.near[part] for one in whole) for part in (0, 1))
    rate = [f"{GPUS[gpu].name} {kind} {share:.2f}" for (gpu, kind), share in shares([*found, *lost]).items()]
    rate += [f"{1e6 * seconds:.0f} μs for a launch of {kind} steps" for kind, seconds in launches(found).items()]
    lines = [
        "# Predicted and measured",
        "",
        __doc__.split("\n\n", 1)[1].strip(),
        "Made by `scripts/benchmark.py plan`.",
        "",
        f"Of {len(whole)} steps, {times} are predicted within {TIME:.0%} in time and {memories} within {MEMORY:.0%} in "
        f"memory; of {len(lost)} losses, {sum(one.near[0] for one in lost)}. Medians: {'; '.join(rate)}.",
        "",
        "## Training steps",
        "",
        "| GPUs | model | micro-batches | implementation | commit | GiB | predicted | | ms | predicted | | limit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        limit = "compilation" if one.compiles else f"GPU, {one.share:.2f}" if one.launch is None else ""
        limit = limit or f"host, {1e6 * (one.launch or 0):.0f} μs"
        lines.append(
            f"| {one.name} | {one.row['commit']} | {one.gib:.2f} | {one.predicted_gib:.2f} | "
            f"{one.predicted_gib / one.gib - 1:+.1%} | {one.ms:.0f} | {one.predicted_ms:.0f} | "
            f"{one.predicted_ms / one.ms - 1:+.1%} | {limit} |"
        )
    lines += [
        "",
        "## The loss alone",
        "",
        "| GPUs | objective | pairs × dimensions | commit | ms | predicted | | share of the peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in lost:
        deciles = "" if one.ms > 10 else f" ({float(one.row['ms_p10']):.2f} to {float(one.row['ms_p90']):.2f})"
        lines.append(
            f"| {one.name} | {one.row['commit']} | {one.ms:.2f}{deciles} | {one.predicted_ms:.2f} | "
            f"{one.predicted_ms / one.ms - 1:+.1%} | {one.share:.2f} |"
        )
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=RESULTS / "PLAN.md")
