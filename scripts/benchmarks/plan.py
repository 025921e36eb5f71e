"""What `infcl plan` predicts beside the measured rows of `step`, `loss` and `ring`: writes PLAN.md.

The rates of `hf_infcl.planning` were taken from the rows marked as fitted, and from no others. The rows marked as new
were measured after the rates had been chosen; the others were known then, although no rate was taken from them. A
difference is that of the prediction from the measured value.

The rates of several GPUs, and the form in which the host's time and the GPU's are added there, were chosen when the
rows of two, four and eight H200s below were all known; the rows "hf_infcl ring" of four GPUs at 926160b, which also
went into them, are not in this table. The time that small losses of several GPUs take beside their products was chosen
anew after two rows had been predicted blindly 18 and 24% too short: the same case takes 1.6 or 2.1 ms from one run to
the next, and 1.55 ms beside the products lies between them (1.35 before).

With 65,536 pairs on each of eight GPUs the softmax loss takes 15% longer than predicted. Half of that is no
communication: eight losses of a GPU's own pairs took 261 ms there, and 243 ms on a GPU alone.

The first steps that were measured on an H100 are those at d9e0b94. With a bandwidth scaled from the H200's by the
data sheets they were predicted 8.7% too long, compiled 12.0% too long, and their memory 0.5% too small. The bandwidth
is now that of the plain Trainer's step there.

Steps with a frozen image tower take a tenth longer than predicted. The likely reason, which no profile has shown, is
the host: their second pass consists of the small kernels of the text tower, each of which takes the GPU 23 µs on
average (256 pairs) and the host 21 µs to launch, so that every hesitation of the host delays the step. Besides, their
images in fp32 are copied on the stream of the computation, which at 50 GB/s takes 12 ms of the 330.

Until commit c444e05 the first pass kept the graph of one micro-batch while the others were encoded. The predicted
memory of older rows includes what such a forward without a graph takes, 1.28 GiB for 256 pairs by the same count.
Brackets hold the first and last decile. Rows with the compilation are single steps in which the model was compiled,
for tens of seconds; `infcl plan` predicts the steps after it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import CLIPConfig

from hf_infcl import planning
from hf_infcl.planning import GIB, GPUS, PRODUCTS, Choice, Counts

from .common import RESULTS, Row, newest, read
from .training import MODELS

# Commit, micro-batch and implementation of the rows of steps.
FITTED_STEPS = (
    ("3bd15f2", "256", "hf_infcl retain all"),  # matrix products and memory traffic
    ("829e9b3", "256", "Trainer, compiled"),  # what compilation leaves of traffic and activations
    ("ddfe952", "64", "hf_infcl"),  # host time per operation
    ("d9e0b94", "256", "Trainer"),  # memory traffic of the H100
)
# Commit, GPU, number of GPUs, objective, dimension and pairs of the rows of losses.
FITTED_LOSSES = (
    ("600f583", "h200", "1", "softmax", "512", "65536"),
    ("8461ae9", "h100", "1", "softmax", "512", "65536"),
    ("3a8623b", "h200", "1", "softmax", "512", "16384"),  # the time beside the products
    ("568ccbd", "h200", "2", "softmax", "512", "8192"),  # the same on several GPUs
    ("568ccbd", "h200", "2", "softmax", "512", "32768"),
    ("568ccbd", "h200", "2", "sigmoid", "512", "8192"),
    ("2c3643e", "h200", "2", "softmax", "512", "8192"),
    ("2c3643e", "h200", "2", "softmax", "512", "32768"),
    ("2c3643e", "h200", "2", "sigmoid", "512", "8192"),
    ("2c3643e", "h200", "2", "sigmoid", "512", "32768"),
)
# Rows of losses outside of 15%, and why.
OUTSIDE = {
    ("3a8623b", "h200", "1", "softmax", "512", "8192"): "The row is noisy: this case took 0.60 and 0.59 ms at 59872f4.",
    ("4ac4a5d", "h200", "1", "sigmoid", "512", "16384"): "The row is noisy: its fastest tenth took 1.50 ms or less.",
}
WITH_EARLIER_GRAPH = frozenset(("ddfe952", "21050b0", "3bd15f2", "e3a3dba"))
# At these commits some losses of several GPUs were not yet replayed as CUDA graphs; their rows are left out.
WITHOUT_REPLAY = WITH_EARLIER_GRAPH | {"4ac4a5d", "59872f4", "829e9b3", "8461ae9", "ad4ccdb", "56956b3", "9c0c178"}
WITHOUT_REPLAY |= {"600f583", "3a8623b", "926160b", "7692cf4"}
# The commits of all rows that were there when the rates were chosen.
KNOWN_LOSSES = WITHOUT_REPLAY | {"79c62ae", "568ccbd"}
KNOWN_STEPS = KNOWN_LOSSES | {"d9e0b94"}
FORWARD_ALONE = 1.28 * GIB / 256  # bytes for each pair of a ViT-B/16's forward without a graph
PIXEL_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
SMALLEST = 8192  # pairs; the time of smaller losses is that of the host alone


class Compared(NamedTuple):
    """A row with its measured and predicted milliseconds and GiB; of losses the memory is not compared.

    A rate was taken from a row that is fitted, and a row that is known was there when the rates were chosen.
    """

    row: Row
    fitted: bool
    known: bool
    ms: float
    predicted_ms: float
    gib: float = 0.0
    predicted_gib: float = 0.0

    @property
    def gpu(self) -> str:
        """The key of `planning.GPUS`."""
        return _gpu(self.row)

    @property
    def loss(self) -> tuple[str, ...]:
        """Commit, GPU, number of GPUs, objective, dimension and pairs, which are empty where a step was measured."""
        return _loss(self.row)

    @property
    def name(self) -> str:
        """The cells that say what was measured."""
        row = self.row
        gpus = f"{row.get('world_size') or 1} × {self.gpu.upper()}"
        if "objective" in row:
            return f"{gpus} | {row['objective']} | {int(row['batch_size']):,} × {row['dim']}"
        micro_batches = f"{row['accumulation_steps']} × {row['micro_batch_size']}"
        return f"{gpus} | {row['model']} | {micro_batches} | {row['implementation']}"

    @property
    def outside(self) -> bool:
        """Whether the prediction differs by more than 15% of the time or 10% of the memory."""
        return abs(self.predicted_ms / self.ms - 1) > 0.15 or abs(self.predicted_gib - self.gib) > 0.1 * self.gib

    @property
    def compiles(self) -> bool:
        """Whether the model was compiled within the step, which is not predicted."""
        return "with the compilation" in self.row["note"]

    @property
    def role(self) -> str:
        return "fitted" if self.fitted else "" if self.known else "new"


def steps(results: Path = RESULTS) -> Iterator[Compared]:
    """The newest rows of InfCLTrainer's steps, and of the plain Trainer's where they were fitted."""
    counts: dict[tuple[str, str | None], Counts] = {}
    keys = ("world_size", "model", "pixel_dtype", "micro_batch_size", "accumulation_steps", "implementation")
    wanted = lambda row: row["ms"] and row["model"] != "tiny"  # noqa: E731

    def was_fitted(row: Row) -> bool:
        return (row["commit"], row["micro_batch_size"], row["implementation"]) in FITTED_STEPS

    for row, known in _newest(results / "step.csv", keys, wanted, KNOWN_STEPS, was_fitted):
        name, accumulation, fitted = row["implementation"], int(row["accumulation_steps"]), was_fitted(row)
        if not (name.startswith("hf_infcl") or fitted):
            continue
        kept = re.match(r"keeps (\d+) graphs", row["note"])
        choice = Choice(
            gpus=int(row["world_size"]),
            micro_batch=int(row["micro_batch_size"]),
            accumulation=accumulation,
            retain=int(kept[1]) if kept else accumulation if "retain all" in name else 1,
            offload="offload" in name,
            compiled="compiled" in name,
        )
        kind = row["model"], "image" if "freeze" in name else None
        if kind not in counts:
            counts[kind] = planning.count(CLIPConfig(**MODELS[kind[0]]), freeze=kind[1])
        of_model = counts[kind]
        bytes_ = _memory(of_model, choice, row)
        once = name.startswith("Trainer")  # it runs each micro-batch forward once, and keeps one graph
        timed = replace(choice, retain=accumulation) if once else choice
        ms = 1000 * sum(planning.seconds(of_model, timed, GPUS[_gpu(row)]).values())
        yield Compared(row, fitted, known, float(row["ms"]), ms, float(row["peak_gib"]), bytes_ / GIB)


def _memory(counts: Counts, choice: Choice, row: Row) -> float:
    parts = planning.memory(counts, choice, pixel_bytes=PIXEL_BYTES[row["pixel_dtype"]])
    if row["commit"] not in WITH_EARLIER_GRAPH or choice.retain >= choice.accumulation:
        return parts.total
    rest = parts.total - parts.activations - parts.loss
    graph = choice.micro_batch / planning.ROWS * (counts.graph - counts.weight_copies) + counts.weight_copies
    return max(parts.total, rest + graph + choice.micro_batch * FORWARD_ALONE)


def losses(results: Path = RESULTS) -> Iterator[Compared]:
    """The newest rows of the loss with bf16 features on one GPU and several."""

    def wanted(row: Row) -> bool:
        of_ours = row["implementation"] == "hf_infcl" and row["dtype"] == "bfloat16"
        return of_ours and bool(row["ms"]) and int(row["batch_size"]) >= SMALLEST and row["objective"] in PRODUCTS

    def was_fitted(row: Row) -> bool:
        return _loss(row) in FITTED_LOSSES

    for table, more in (("loss", ()), ("ring", ("world_size",))):
        keys = (*more, "objective", "dim", "batch_size")
        for row, known in _newest(results / f"{table}.csv", keys, wanted, KNOWN_LOSSES, was_fitted):
            gpus = int(row.get("world_size") or 1)
            choice, dim = Choice(gpus, int(row["batch_size"]) // gpus, 1), int(row["dim"])
            if gpus > 1 and row["commit"] in WITHOUT_REPLAY and planning.is_replayed(dim, choice):
                continue
            ms = 1000 * planning.loss_seconds(dim, choice, GPUS[_gpu(row)], row["objective"])
            yield Compared(row, was_fitted(row), known, float(row["ms"]), ms)


def _newest(
    table: Path,
    keys: tuple[str, ...],
    wanted: Callable[[Row], Any],
    commits: frozenset[str],
    was_fitted: Callable[[Row], bool],
) -> Iterator[tuple[Row, bool]]:
    """The newest rows of each device that were measured at these commits (True), and the newest others (False).

    Rows that were fitted are among them whether they are the newest or not.
    """
    for device in ("H200", "H100"):
        for known in (True, False):

            def chosen(row: Row, device: str = device, known: bool = known) -> bool:
                return device in row["device"] and (row["commit"] in commits) == known and bool(wanted(row))

            found = newest(table, keys, chosen)
            fitted = read(table, lambda row: chosen(row) and was_fitted(row))
            for row in [*(row for row in fitted if row not in found), *found]:
                yield row, known


def _loss(row: Row) -> tuple[str, ...]:
    named = (row.get(name, "") for name in ("objective", "dim", "batch_size"))
    return row["commit"], _gpu(row), row.get("world_size") or "1", *named


def _gpu(row: Row) -> str:
    return "h200" if "H200" in row["device"] else "h100"


def beside_products(fitted: Iterable[Compared]) -> float:
    """The milliseconds beside the products for which the largest difference of replayed losses is the smallest."""
    rows = [(compared.ms, _products(compared)) for compared in fitted]
    hundredths = range(1000)
    return min(hundredths, key=lambda n: max(abs((products + n / 100) / ms - 1) for ms, products in rows)) / 100


def _products(compared: Compared) -> float:
    """The milliseconds of a loss's matrix products."""
    _, gpu, gpus, objective, dim, pairs = compared.loss
    return 2000 * PRODUCTS[objective] * int(pairs) ** 2 / int(gpus) * int(dim) / GPUS[gpu].loss_flops


def replayed(gpus: int) -> list[Compared]:
    """The fitted rows from which the time of replayed losses beside their products was taken, on one GPU or several."""
    found = [compared for compared in losses() if compared.fitted and int(compared.loss[2]) == gpus]
    return [c for c in found if planning.is_replayed(int(c.loss[4]), Choice(gpus, int(c.loss[5]) // gpus, 1))]


def run(args: argparse.Namespace) -> None:
    if args.fit:
        for name, gpus in (("REPLAY", 1), ("REPLAY_AMONG_GPUS", 2)):
            print(f"{name}: {beside_products(replayed(gpus)):.2f} ms")
        return
    found, lost = list(steps()), list(losses())
    lines = [
        "# Predicted and measured",
        "",
        __doc__.split("\n\n", 1)[1].strip(),
        "Made by `scripts/benchmark.py plan`.",
        "",
        *outside_lines([compared for compared in (*found, *lost) if compared.outside]),
        "## Training steps",
        "",
        "| GPUs | model | micro-batches | implementation | commit | GiB | predicted | | ms | predicted | | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for compared in found:
        row, _, _, ms, predicted_ms, gib, predicted_gib = compared
        role = ", ".join(filter(None, (compared.role, "with the compilation" * compared.compiles)))
        lines.append(
            f"| {compared.name} | {row['commit']} | {gib:.2f} | {predicted_gib:.2f} | "
            f"{predicted_gib / gib - 1:+.1%} | {ms:.0f} | {predicted_ms:.0f} | {predicted_ms / ms - 1:+.1%} | "
            f"{role} |"
        )
    lines += [
        "",
        "## The loss alone",
        "",
        "| GPUs | objective | pairs × dimensions | commit | ms | predicted | | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for compared in lost:
        row, _, _, ms, predicted_ms, *_ = compared
        deciles = "" if ms > 10 else f" ({float(row['ms_p10']):.2f} to {float(row['ms_p90']):.2f})"
        lines.append(
            f"| {compared.name} | {row['commit']} | {ms:.2f}{deciles} | {predicted_ms:.2f} | "
            f"{predicted_ms / ms - 1:+.1%} | {compared.role} |"
        )
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def outside_lines(rows: Sequence[Compared]) -> list[str]:
    """The section of the rows that are not predicted within the bounds, with the reason of each."""
    if not rows:
        return []
    lines = ["## Outside of 10% of memory or 15% of time", ""]
    for compared in rows:
        difference = f"memory {compared.predicted_gib / compared.gib - 1:+.1%}, " if compared.gib else ""
        compiled = "The step contains the compilation, which is not predicted."
        why = compiled if compared.compiles else OUTSIDE.get(compared.loss, "Not explained.")
        name = compared.name.replace(" | ", ", ")
        lines.append(
            f"- {name} at {compared.row['commit']}: {difference}"
            f"time {compared.predicted_ms / compared.ms - 1:+.1%}. {why}"
        )
    return [*lines, ""]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=RESULTS / "PLAN.md")
    parser.add_argument("--fit", action="store_true", help="print the rates of replayed losses instead")
