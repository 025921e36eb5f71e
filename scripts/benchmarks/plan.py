"""Compares the predictions of `infcl plan` with the measured rows of `step`, `loss` and `ring`: writes PLAN.md.

The rates of `hf_infcl.tools.planning` were fitted to the rows marked as fitted, and to no others; `plan --fit` fits
those of the loss again. The rows marked as new were measured after the rates had been chosen. The other rows were
known at that time, although no rate was fitted to them. Differences are those of the prediction from the measured
value.

Of 20 losses that were predicted before they were measured (d9e0b94 and 2c3643e), 18 were within 9.5%, and the two of
2 × 4,096 pairs 18 and 24% too short; such a loss takes 1.5 to 2.1 ms from one run to the next. The formula was then
improved, and the kernels became up to 14% faster than those to which the rates were fitted. Of the 46 losses at
6258f51, 157e28c and c379bca, 43 are nevertheless predicted within 15%, most of them too long. The times of the first
steps on an H100 (d9e0b94) were predicted 8.7% too long, compiled 12.0%, and their memory 0.5% too small.

The rates of larger losses on several GPUs were chosen when the rows of two, four and eight H200s below were known. With
65,536 pairs on each of eight GPUs the softmax loss takes longer than predicted. Half of the difference is not
communication: eight losses of a GPU's own pairs took 261 ms there, and 243 ms on a single GPU.

Steps with a frozen image tower take a tenth longer than predicted. In their profile (4 × 256 pairs, one H200, e247512)
the two passes take as long as predicted: 173 + 116 ms, predicted 190 + 102. Copies of the images in fp32, clipping and
others, which are not predicted, take 21 ms, and the small kernels of the text tower wait for the host.

`infcl plan --measure` at e247512, on one H200, gave for the forward and backward of a micro-batch (predictions in
brackets): ViT-B/16 with 256 pairs 144 ms and 28.5 GiB (145 and 28.3), with a frozen image tower 66 and 6.8 (66 and
6.8), with 64 pairs 67 and 8.2 (55 and 8.1); ViT-L/14 with 128 pairs 230 and 44.9 (259 and 44.7); SigLIP's ViT-B/16 with
128 pairs 86 and 13.9 (74 and 13.8). Each is a single measurement.

The host's time for a compiled model was chosen with the compiled steps of `Trainer` at e74afb7 and ef62812, when all
compiled rows below were known. The memory of kept graphs with texts put together was corrected after the rows of
e74afb7. These rows are no test of the two, although they are marked as new. Those of 058df7e are: on one host with two
H100s, a benchmark on each, the memory of 24 steps was predicted within 4%, and the time of the ten with all or half of
the patches of a ViT-B/16 or with 160 pixels within 15%. The others took up to 2.1 times as long as predicted. Twelve
compiled steps followed at 1a94d03 on two such hosts, and at a8f0f35 and 9788094, on two more, 14 compiled steps and
four eager ones with 160 pixels: the memory of all was predicted within 5%, and the time of the ten with all or half of
the patches or with 160 pixels of a ViT-B/16 within 11%. The others took 1.2 to 2.0 times as long.

Until c444e05 the first pass kept the graph of one micro-batch while the others were encoded, so the predicted memory of
older rows includes a forward without a graph, 1.28 GiB for 256 pairs. Brackets contain the first and last decile.
Rows with the compilation are single steps in which the model was compiled, which `infcl plan` does not predict.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import CLIPConfig

from hf_infcl.loss import OBJECTIVES
from hf_infcl.tools import planning
from hf_infcl.tools.planning import GIB, GPU, GPUS, Choice, Counts

from .common import RESULTS, STEP_SETTING, Row, newest, read
from .inputs import sizes_of

# Commit, micro-batch and implementation of the rows of steps.
FITTED_STEPS = (
    ("3bd15f2", "256", "hf_infcl retain all"),  # matrix products and memory traffic
    ("829e9b3", "256", "Trainer, compiled"),  # the traffic and activations that remain under compilation
    ("ddfe952", "64", "hf_infcl"),  # host time per operation
    ("d9e0b94", "256", "Trainer"),  # memory traffic of the H100
)
# Commit, GPU, number of GPUs, objective, dimension and pairs of the rows of losses.
FITTED_LOSSES = (
    ("e247512", "h200", "1", "softmax", "256", "65536"),  # the time of products and of logits
    ("e247512", "h200", "1", "softmax", "1024", "65536"),
    ("e247512", "h200", "1", "sigmoid", "256", "65536"),
    ("e247512", "h200", "1", "sigmoid", "1024", "65536"),
    ("d9e0b94", "h100", "1", "softmax", "512", "65536"),
    ("d9e0b94", "h100", "1", "softmax", "1024", "65536"),
    ("d9e0b94", "h100", "1", "sigmoid", "512", "65536"),
    ("8461ae9", "h100", "1", "sigmoid", "1024", "65536"),
    ("3a8623b", "h200", "1", "softmax", "512", "16384"),  # the time in addition to these
    ("568ccbd", "h200", "2", "softmax", "512", "8192"),  # the same on several GPUs
    ("568ccbd", "h200", "2", "softmax", "512", "32768"),
    ("568ccbd", "h200", "2", "sigmoid", "512", "8192"),
    ("2c3643e", "h200", "2", "softmax", "512", "8192"),
    ("2c3643e", "h200", "2", "softmax", "512", "32768"),
    ("2c3643e", "h200", "2", "sigmoid", "512", "8192"),
    ("2c3643e", "h200", "2", "sigmoid", "512", "32768"),
)
WITH_EARLIER_GRAPH = frozenset(("ddfe952", "21050b0", "3bd15f2", "e3a3dba"))
# At these commits some losses of several GPUs were not yet replayed as CUDA graphs; their rows are left out.
WITHOUT_REPLAY = WITH_EARLIER_GRAPH | {"4ac4a5d", "59872f4", "829e9b3", "8461ae9", "ad4ccdb", "56956b3", "9c0c178"}
WITHOUT_REPLAY |= {"600f583", "3a8623b", "926160b", "7692cf4"}
# The commits of all rows that existed when the rates were chosen.
KNOWN = WITHOUT_REPLAY | {"79c62ae", "568ccbd", "d9e0b94", "2c3643e", "e247512"}
# Why rows of losses are not predicted within the bounds.
LAUNCHED = "The host took longer to launch the kernels than the GPU to run them; since cf49f40 they are replayed."
HOST = "The host limits the time, which at the commits of the fitted rows was 1.6 and 2.1 ms."
OTHER_RUN = "The host limits the time, which was 2.45 ms in a run of 15de2e0."
FASTER = "Since 2c3643e, the kernels have become 6% faster, and communication takes 0.4 ms instead of 0.6."
RAN_TEXT_TOWER = (
    "Until 3d300c2 a compiled model ran its text tower for a single text in each micro-batch that had none."
)
REASONS = {
    ("157e28c", "h100", "1", "softmax", "768", "16384"): LAUNCHED,
    ("c379bca", "h200", "2", "softmax", "512", "8192"): HOST,
    ("1a94d03", "h100", "2", "softmax", "512", "8192"): OTHER_RUN,
    ("c379bca", "h200", "2", "sigmoid", "512", "32768"): FASTER,
}
OUTSIDE = """\
The host limits small steps, and its speed differs from machine to machine. The rates are those of a host that launches
an operation in 21 μs. Where `Trainer` took longer than predicted in the same run, a line ends with the time of a launch
that would explain how long it took, and with the difference that remains in our step with such launches."""
SETTING = (*STEP_SETTING, "accumulation_steps")
FULL_LENGTH = "77"  # tokens
FORWARD_ALONE = 1.28 * GIB / 256  # bytes per pair of a forward of ViT-B/16 without a graph
PIXEL_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
SMALLEST = 8192  # pairs; the time of smaller losses is only that of the host


class Compared(NamedTuple):
    """A row with its measured and predicted milliseconds and GiB. The memory of losses is not compared.

    Rates were fitted to rows that are fitted. Rows that are known existed when the rates were chosen.
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
        """Commit, GPU, number of GPUs, objective, dimension and pairs. The last three are empty for a step."""
        return _loss(self.row)

    @property
    def name(self) -> str:
        """The cells of the table that describe what was measured."""
        row = self.row
        gpus = f"{row.get('world_size') or 1} × {self.gpu.upper()}"
        if "objective" in row:
            return f"{gpus} | {row['objective']} | {int(row['batch_size']):,} × {row['dim']}"
        micro_batches = f"{row['accumulation_steps']} × {row['micro_batch_size']}"
        model = row["model"] + f", {row['image_size']} pixels" * (row["image_size"] != "224")
        model += f", {float(row['patch_dropout']):.0%} of the patches left out" * (float(row["patch_dropout"]) > 0)
        model += f", texts of {row['text_tokens']} tokens" * (row["text_tokens"] != FULL_LENGTH)
        return f"{gpus} | {model} | {micro_batches} | {row['implementation']}"

    @property
    def outside(self) -> bool:
        """Whether the prediction differs by more than 15% of the time or 10% of the memory."""
        return abs(self.predicted_ms / self.ms - 1) > 0.15 or abs(self.predicted_gib - self.gib) > 0.1 * self.gib

    @property
    def compiles(self) -> bool:
        """Whether the step includes the compilation of the model, which is not predicted."""
        return "with the compilation" in self.row["note"]

    @property
    def role(self) -> str:
        return "fitted" if self.fitted else "" if self.known else "new"


def steps() -> Iterator[Compared]:
    """The newest rows of InfCLTrainer's steps, and those of the plain Trainer's to which rates were fitted."""
    keys = (*SETTING, "implementation")

    def was_fitted(row: Row) -> bool:
        return (row["commit"], row["micro_batch_size"], row["implementation"]) in FITTED_STEPS

    for row, known in _newest(RESULTS / "step.csv", keys, _is_step, was_fitted):
        fitted = was_fitted(row)
        if row["implementation"].startswith("hf_infcl") or fitted:
            ms, gib = _milliseconds(row, GPUS[_gpu(row)]), _memory(row) / GIB
            yield Compared(row, fitted, known, float(row["ms"]), ms, float(row["peak_gib"]), gib)


def _is_step(row: Row) -> bool:
    return bool(row["ms"]) and row["model"] != "tiny"


def _choice(row: Row) -> Choice:
    name, accumulation = row["implementation"], int(row["accumulation_steps"])
    kept = re.match(r"keeps (\d+) graphs", row["note"])
    return Choice(
        gpus=int(row["world_size"]),
        micro_batch=int(row["micro_batch_size"]),
        accumulation=accumulation,
        retain=int(kept[1]) if kept else accumulation if "retain all" in name else 1,
        offload="offload" in name,
        compiled="compiled" in name,
        texts=accumulation if "texts at once" in name else 1,
    )


def _counts(row: Row) -> Counts:
    tokens = None if row["text_tokens"] == FULL_LENGTH else int(row["text_tokens"])
    freeze = "image" if "freeze" in row["implementation"] else None
    return _counts_of(row["model"], int(row["image_size"]), float(row["patch_dropout"]), tokens, freeze)


@functools.cache
def _counts_of(model: str, image_size: int, patch_dropout: float, tokens: int | None, freeze: str | None) -> Counts:
    config = CLIPConfig(**sizes_of(model, image_size))
    return planning.count(config, patch_dropout=patch_dropout, text_tokens=tokens, freeze=freeze)


def _milliseconds(row: Row, gpu: GPU) -> float:
    choice = _choice(row)
    if row["implementation"].startswith("Trainer"):  # one forward per micro-batch, and one graph at a time
        choice = replace(choice, retain=choice.accumulation)
    return 1000 * sum(planning.seconds(_counts(row), choice, gpu).values())


def _on_its_host(row: Row) -> str:
    """How far a prediction is off if it takes the time of a launch from the steps of `Trainer` in the same run."""
    name = "Trainer" + ", compiled" * ("compiled" in row["implementation"])
    same = ("commit", "device", *SETTING)
    rows = read(RESULTS / "step.csv", lambda other: all(other[key] == row[key] for key in same))
    before = [other for other in rows[: rows.index(row)] if other["implementation"] == name]
    if not before:
        return "Not explained."
    trainer, gpu = before[-1], GPUS[_gpu(row)]
    first = round(1e6 * gpu.launch)
    for launch in range(first, 10 * first):
        host = replace(gpu, launch=1e-6 * launch)
        if _milliseconds(trainer, host) >= float(trainer["ms"]):
            break
    if launch == first:
        return "Not explained."
    difference = _milliseconds(row, host) / float(row["ms"]) - 1
    return f"With launches of {launch} μs, as in `{name}`: {difference:+.1%}."


def _memory(row: Row) -> float:
    counts, choice = _counts(row), _choice(row)
    parts = planning.memory(counts, choice, pixel_bytes=PIXEL_BYTES[row["pixel_dtype"]])
    if row["commit"] not in WITH_EARLIER_GRAPH or choice.retain >= choice.accumulation:
        return parts.total
    rest = parts.total - parts.activations - parts.loss
    graph = choice.micro_batch / planning.ROWS * (counts.graph - counts.weight_copies) + counts.weight_copies
    return max(parts.total, rest + graph + choice.micro_batch * FORWARD_ALONE)


def losses() -> Iterator[Compared]:
    """The newest rows of the loss with bf16 features, on one GPU and on several."""

    def wanted(row: Row) -> bool:
        of_ours = row["implementation"] == "hf_infcl" and row["dtype"] == "bfloat16"
        return of_ours and bool(row["ms"]) and int(row["batch_size"]) >= SMALLEST and row["objective"] in OBJECTIVES

    def was_fitted(row: Row) -> bool:
        return _loss(row) in FITTED_LOSSES

    for table, more in (("loss", ()), ("ring", ("world_size",))):
        keys = (*more, "objective", "dim", "batch_size")
        for row, known in _newest(RESULTS / f"{table}.csv", keys, wanted, was_fitted):
            gpus = int(row.get("world_size") or 1)
            choice, dim = Choice(gpus, int(row["batch_size"]) // gpus, 1), int(row["dim"])
            if gpus > 1 and row["commit"] in WITHOUT_REPLAY and planning.is_replayed(dim, choice):
                continue
            ms = 1000 * planning.loss_seconds(dim, choice, GPUS[_gpu(row)], row["objective"])
            yield Compared(row, was_fitted(row), known, float(row["ms"]), ms)


def _newest(
    table: Path, keys: tuple[str, ...], wanted: Callable[[Row], Any], was_fitted: Callable[[Row], bool]
) -> Iterator[tuple[Row, bool]]:
    """The newest rows of each device that were known when the rates were chosen (True), and the newest others (False).

    They include all rows to which rates were fitted, even if newer ones exist.
    """
    for device in ("H200", "H100"):
        for known in (True, False):

            def chosen(row: Row, device: str = device, known: bool = known) -> bool:
                return device in row["device"] and (row["commit"] in KNOWN) == known and bool(wanted(row))

            found = newest(table, keys, chosen)
            fitted = read(table, lambda row: chosen(row) and was_fitted(row))
            for row in [*(row for row in fitted if row not in found), *found]:
                yield row, known


def _loss(row: Row) -> tuple[str, ...]:
    named = (row.get(name, "") for name in ("objective", "dim", "batch_size"))
    return row["commit"], _gpu(row), row.get("world_size") or "1", *named


def _gpu(row: Row) -> str:
    return "h200" if "H200" in row["device"] else "h100"


def rates(gpu: str) -> tuple[float, float]:
    """`loss_flops` in TFLOP/s and `logit` in ps of a GPU.

    They minimise the largest relative error of the predictions for the fitted rows of this GPU.
    """
    rows = [compared for compared in losses() if compared.fitted and compared.loss[1:3] == (gpu, "1")]
    rows = [compared for compared in rows if not _is_replayed(compared)]
    at_one_teraflop = replace(GPUS[gpu], loss_flops=1e12, logit=0.0)
    at_one_picosecond = replace(GPUS[gpu], loss_flops=math.inf, logit=1e-12)
    times = [(c.ms, _blocks(c, at_one_teraflop), _blocks(c, at_one_picosecond)) for c in rows]

    def worst(rates: tuple[int, float]) -> float:
        flops, logit = rates
        return max(abs((products / flops + logit * logits) / ms - 1) for ms, products, logits in times)

    return min(((flops, n / 100) for flops in range(500, 800, 2) for n in range(200)), key=worst)


def beside_blocks(gpus: int) -> tuple[float, float]:
    """`HOST_OF_REPLAY` and `WAIT_OF_REPLAY` in ms, or 0 and `REPLAY` for one GPU, chosen like those of `rates`."""
    rows = [compared for compared in losses() if compared.fitted and int(compared.loss[2]) == gpus]
    times = [(compared.ms, _blocks(compared, GPUS[compared.gpu])) for compared in rows if _is_replayed(compared)]

    def worst(beside: tuple[float, float]) -> float:
        host, wait = beside
        return max(abs((math.hypot(blocks, host) + wait) / ms - 1) for ms, blocks in times)

    hosts = range(200) if gpus > 1 else (0,)
    return min(((host / 100, wait / 100) for host in hosts for wait in range(200)), key=worst)


def _is_replayed(compared: Compared) -> bool:
    gpus, pairs = int(compared.loss[2]), int(compared.loss[5])
    return planning.is_replayed(int(compared.loss[4]), Choice(gpus, pairs // gpus, 1))


def _blocks(compared: Compared, gpu: GPU) -> float:
    """The milliseconds of a loss's blocks."""
    _, _, gpus, objective, dim, pairs = compared.loss
    return 1000 * planning.block_seconds(int(dim), int(pairs) ** 2 // int(gpus), gpu, objective)


def run(args: argparse.Namespace) -> None:
    if args.fit:
        for name in GPUS:
            print(f"{name}: %d TFLOP/s of products, %.2f ps for a logit" % rates(name))
        for gpus in (1, 2):
            print(f"A replayed loss on {gpus}: %.2f ms of the host, and %.2f" % beside_blocks(gpus))
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
    """The section on rows whose predictions are outside of the bounds, with the reason for each."""
    if not rows:
        return []
    lines = ["## Outside of 10% of memory or 15% of time", "", OUTSIDE, ""]
    for compared in rows:
        difference = f"memory {compared.predicted_gib / compared.gib - 1:+.1%}, " if compared.gib else ""
        why = REASONS.get(compared.loss, "Not explained.")
        if compared.compiles:
            why = "The step contains the compilation, which is not predicted."
        elif compared.row["commit"] == "e74afb7" and "compiled" in compared.name:
            why = RAN_TEXT_TOWER
        elif "objective" not in compared.row and compared.predicted_ms < compared.ms:
            why = _on_its_host(compared.row)
        name = compared.name.replace(" | ", ", ")
        lines.append(
            f"- {name} at {compared.row['commit']}: {difference}"
            f"time {compared.predicted_ms / compared.ms - 1:+.1%}. {why}"
        )
    return [*lines, ""]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=RESULTS / "PLAN.md")
    parser.add_argument("--fit", action="store_true", help="print the rates of the loss instead")
