"""The tables of the Inf-CL paper beside the rows of `memory`, `ring` and `step`: writes TABLES.md.

The paper's figures are from tables 1, 2 and 4 of arXiv 2410.17243v1, taken from a transcription, not from the PDF. Our
figures are taken from rows of the CSVs. ✗ means that it does not fit, – that it was not measured. The paper gives GB,
we give GiB of torch's allocator.
"""

import argparse
from pathlib import Path

from .common import RESULTS, Row, grouped, markdown, newest

K = 1024
PAPER_SIZES = (32, 64, 128, 256, 1024)
PAPER_MEMORY = {  # table 1: ViT-L/14, gradient cache with micro-batches of 128, AdamW; loss (peak) in GB
    "CLIP, 8 × A800": ("16.67 (46.40)", "66.11 (77.94)", "✗", "✗", "✗"),
    "OpenCLIP, 8 × A800": ("2.27 (43.97)", "8.63 (46.38)", "33.64 (51.23)", "✗", "✗"),
    "Inf-CL, 8 × A800": ("0.18 (44.20)", "0.36 (46.63)", "0.72 (51.46)", "1.45 (61.13)", "✗"),
    "Inf-CL, data offload, 8 × A800": ("0.18 (42.40)", "0.36 (42.49)", "0.72 (42.69)", "1.45 (43.07)", "6.53 (45.40)"),
    "CLIP, 32 × A800": ("16.66 (42.85)", "66.11 (75.52)", "✗", "✗", "✗"),
    "OpenCLIP, 32 × A800": ("0.71 (42.46)", "2.45 (43.06)", "8.98 (44.26)", "34.35 (46.71)", "✗"),
    "Inf-CL, 32 × A800": ("0.05 (42.48)", "0.09 (43.08)", "0.18 (44.30)", "0.35 (46.71)", "1.44 (61.20)"),
}
PAPER_MAXIMUM = (  # table 2: budget, then batch (loss memory) of CLIP, OpenCLIP and Inf-CL
    ("ViT-B/16, 8 × A800", "68k (74.39 GB)", "172k (59.95 GB)", "800k (3.01 GB)"),
    ("ViT-B/16, 32 × A800", "68k (74.39 GB)", "360k (66.29 GB)", "3456k (3.27 GB)"),
    ("ViT-L/14, 8 × A800", "64k (66.11 GB)", "152k (47.23 GB)", "448k (2.52 GB)"),
    ("ViT-L/14, 32 × A800", "64k (66.11 GB)", "352k (64.13 GB)", "2048k (2.89 GB)"),
    ("ViT-L/14, data offload, 8 × A800", "64k (66.11 GB)", "184k (69.10 GB)", "4096k (26.12 GB)"),
    ("ViT-L/14, data offload, 32 × A800", "64k (66.11 GB)", "368k (64.13 GB)", "12288k (19.59 GB)"),
)
PAPER_ABLATION = (  # table 4: what is tiled, loss memory, its complexity, peak memory in GB; our counterpart
    ("nothing (CLIP)", "66.21", "O(B²)", "69.24", "CLIP"),
    ("nothing, local loss (OpenCLIP)", "16.96", "O(B²/W)", "20.79", "OpenCLIP local loss"),
    ("across GPUs (Ring-CL)", "4.81", "O(B²/W²)", "12.30", "ring untiled (Ring-CL)"),
    ("across and inside GPUs (Inf-CL)", "0.81", "O(B/W²)", "12.30", "hf_infcl ring"),
)
STEP_KEYS = ("world_size", "model", "pixel_dtype", "micro_batch_size", "batch_size", "implementation")


def of_most_devices(rows: list[Row]) -> list[Row]:
    most = max((int(row["world_size"]) for row in rows), default=0)
    return [row for row in rows if int(row["world_size"]) == most]


def by_hardware(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by model, number of devices and dtype of images, with the fewest devices first."""
    in_order = sorted(rows, key=lambda row: int(row["world_size"]))
    return grouped(in_order, lambda row: f"{row['model']}, {hardware_of(row)}, {row['pixel_dtype']} images")


def thousands(batch: int) -> str:
    return f"{batch // K}k" if batch % K == 0 else f"{batch:,}"


def memory(steps: list[Row]) -> str:
    sizes = sorted({K * size for size in PAPER_SIZES} | {int(row["batch_size"]) for row in steps})
    lines: list[tuple[str, ...]] = []
    for name, values in PAPER_MEMORY.items():
        of_size = dict(zip(PAPER_SIZES, values, strict=True))
        lines.append((f"{name} (paper)", *(of_size.get(size // K, "–") for size in sizes)))
    for hardware, rows in by_hardware(steps).items():
        for name in dict.fromkeys(row["implementation"] for row in rows):
            cells = dict.fromkeys(sizes, "–")
            for row in (row for row in rows if row["implementation"] == name):
                figures = (float(row[key] or 0) for key in ("loss_gib", "peak_gib"))
                cells[int(row["batch_size"])] = "{:.2f} ({:.2f})".format(*figures) if row["peak_gib"] else "✗"
            lines.append((f"{name}, {hardware}", *cells.values()))
    return markdown(("loss (peak) memory per GPU", *map(thousands, sizes)), lines)


def hardware_of(row: Row) -> str:
    return f"{row['world_size']} × {row['device'].removeprefix('NVIDIA ')}"


def maximum(steps: list[Row]) -> str:
    lines = list(PAPER_MAXIMUM)
    for hardware, rows in by_hardware(steps).items():
        for compiled in ("", ", compiled"):
            resident = tuple(largest(rows, name + compiled) for name in ("CLIP", "OpenCLIP local loss", "hf_infcl"))
            offloaded = "–", "–", largest(rows, "hf_infcl offload" + compiled)
            for cells, how in ((resident, ""), (offloaded, ", offload_inputs")):
                if set(cells) != {"–"}:
                    lines.append((hardware + how + compiled, *cells))
    return markdown(("budget", "CLIP", "OpenCLIP", "Inf-CL / hf_infcl"), lines)


def largest(steps: list[Row], name: str) -> str:
    """The largest batch on which a step was trained."""
    ran = [row for row in steps if row["implementation"] == name and row["peak_gib"]]
    if not ran:
        return "–"
    row = max(ran, key=lambda row: int(row["batch_size"]))
    return f"≥ {thousands(int(row['batch_size']))} ({float(row['loss_gib'] or 0):.2f} GiB)"


def ablation(memories: list[Row], times: list[Row]) -> str:
    def figure(rows: list[Row], name: str, column: str) -> str:
        found = [row[column] for row in rows if row["implementation"] == name]
        return found[-1] if found else "–"

    lines = []
    for tiled, loss, complexity, peak, name in PAPER_ABLATION:
        mib = figure(memories, name, "peak_mib")
        ours = f"{int(mib) / K:.2f}" if mib.isdigit() else mib
        ms = figure(times, name, "ms")
        lines.append((tiled, complexity, loss, peak, ours, ms if ms == "–" else f"{float(ms):.1f}"))
    where = hardware_of(memories[0]) if memories else "–"
    return markdown(
        ("tiled", "logits", "loss, GB (paper)", "peak, GB (paper)", f"loss, GiB ({where})", f"ms ({where})"), lines
    )


def run(args: argparse.Namespace) -> None:
    def is_whole(row: Row) -> bool:
        return row["comparison"] == "table" and not float(row["patch_dropout"] or 0)

    steps = newest(RESULTS / "step.csv", STEP_KEYS, is_whole)
    same = ("world_size", "objective", "batch_size", "implementation")

    def at_64k(row: Row) -> bool:
        return row["batch_size"] == str(64 * K) and row["objective"] == "softmax" and row["dim"] == "512"

    memories = of_most_devices(newest(RESULTS / "memory.csv", same, lambda row: at_64k(row) and row["peak_mib"]))
    times = of_most_devices(newest(RESULTS / "ring.csv", same, lambda row: at_64k(row) and row["ms"]))
    dates = sorted({row["date"] for row in (*steps, *memories, *times)})
    when = " to ".join(sorted({*dates[:1], *dates[-1:]})) or "no run yet"
    text = f"""# The paper's tables

{__doc__.split(chr(10) * 2)[1].strip()}
Made by `scripts/benchmark.py tables`; rows of ours: {when}.

## Memory of a training step (table 1)

The paper's model is ViT-L/14, ours is named; the figures are of the loss, and in brackets the peak.

{memory(steps)}

## Largest batch (table 2)

Ours are the largest batches that were tried, which filled no GPU; they are no limits.

{maximum(steps)}

## What is tiled (table 4)

Ours at a global batch of 65,536, D = 512, bf16; Ring-CL's matrices are fp32.

{ablation(memories, times)}
"""
    args.output.write_text(text)
    print(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=RESULTS / "TABLES.md")
