#!/usr/bin/env python3
"""Tables and pictures of the experiments' rows.

    python scripts/real_pairs/tables.py --corpus outputs/real_pairs

Reads results/results.csv beside this file, writes results/TABLES.md and the pictures. For every configuration the
learning rate is the one that is best on the validation set at the first seed; the figures are of the test sets.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for real_pairs

from real_pairs.sources import DOWNLOADS, NPM, folder_of

RESULTS = Path(__file__).parent / "results"
BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"  # Okabe and Ito

Row = dict[str, Any]
# The figures of the tables: a name, and the columns whose mean it is.
FIGURES: dict[str, Sequence[str]] = {
    "other style, R@1": ("vendor_image_recall@1", "vendor_text_recall@1"),
    "new concepts, R@5": ("concepts_image_recall@5", "concepts_text_recall@5"),
    "zero-shot, other style": ("zero_shot_vendor_acc1",),
    "zero-shot, new concepts": ("zero_shot_concepts_acc1",),
}
STYLE, CONCEPTS = list(FIGURES)[:2]
SETTING = ("experiment", "method", "batch", "objective", "pair_ids", "way")


def read(table: Path) -> list[Row]:
    """The rows with numbers as numbers; text and empty cells stay as they are."""
    with table.open(newline="", encoding="utf-8") as file:
        return [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return text


def score(row: Row) -> float:
    return statistics.mean(value for name, value in row.items() if name.startswith("validation_"))


def value(row: Row, figure: str) -> float:
    return statistics.mean(row[column] for column in FIGURES[figure])


class Configuration:
    """The runs of one setting.

    Args:
        rows: its rows, of all learning rates, seeds and points of the trainings.
    """

    def __init__(self, rows: list[Row]) -> None:
        ended = [row for row in rows if row["finished"]]
        first = min(row["seed"] for row in ended)
        self.by_rate = {row["learning_rate"]: row for row in ended if row["seed"] == first}
        self.rate = max(self.by_rate, key=lambda rate: score(self.by_rate[rate]))
        self.ended = [row for row in ended if row["learning_rate"] == self.rate]
        self.points = [row for row in rows if row["learning_rate"] == self.rate]
        self.batch = int(ended[0]["batch"])

    @property
    def rate_cell(self) -> str:
        """The learning rate; a star if no smaller or no greater one was tried."""
        at_edge = len(self.by_rate) > 1 and self.rate in (min(self.by_rate), max(self.by_rate))
        return f"{self.rate:g}" + "*" * at_edge

    @property
    def steps(self) -> int:
        return int(self.ended[0]["steps"])

    def values(self, figure: str) -> list[float]:
        return [value(row, figure) for row in self.ended]

    def cell(self, figure: str) -> str:
        """Mean and standard deviation over the seeds, in per cent."""
        values = [100 * v for v in self.values(figure)]
        deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else " (1 seed)"
        return f"{statistics.mean(values):.1f}{deviation}"


def configurations(rows: Iterable[Row], **wanted: Any) -> dict[tuple, Configuration]:
    """The configurations with these values, by (method, batch, objective, pair_ids, way), the small batches first."""
    groups: dict[tuple, list[Row]] = collections.defaultdict(list)
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            groups[tuple(row[name] for name in SETTING[1:])].append(row)
    complete = {key: found for key, found in groups.items() if any(row["finished"] for row in found)}
    return {key: Configuration(complete[key]) for key in sorted(complete, key=lambda key: (key[0] != "Trainer", key))}


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def label(method: str, batch: int, micro_batch: int = 256) -> str:
    if method != "Trainer":
        return f"`{method}`, one loss over {batch:,}"
    losses = batch // micro_batch
    return (
        "`Trainer`, a step for each loss over 256" if losses == 1 else f"`Trainer`, {losses} losses over 256 in a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, help="of scripts/real_pairs.py, to show what is retrieved")
    parser.add_argument("--downloads", type=Path, default=DOWNLOADS, help="of scripts/real_pairs.py")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = read(args.results / "results.csv")
    tables = {
        "The global batch, at the same number of samples": global_batch(rows),
        "Learning rates": rates(rows),
        "The same number of steps": fixed_steps(rows),
        "Objectives and false negatives": objectives(rows),
        "Fine-tuning": fine_tuning(rows),
        "Cost": cost(rows),
    }
    if args.corpus is not None:
        folder = folder_of(args.downloads, NPM["emojibase"])
        tables["Ten examples"] = examples(rows, args.corpus, folder / "package/en/data.json")
    text = "\n\n".join(f"## {title}\n\n{table}" for title, table in tables.items() if table)
    (args.results / "TABLES.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    draw_global_batch(rows, args.results / "global_batch.png")
    draw_curves(rows, args.results / "curves.png")


# ---- Tables ----


def global_batch(rows: list[Row]) -> str:
    found = configurations(rows, experiment="1_global_batch")
    body = [
        [label(method, c.batch), f"{c.steps:,}", c.rate_cell, *(c.cell(figure) for figure in FIGURES)]
        for (method, *_), c in found.items()
    ]
    return markdown(["", "steps", "learning rate", *FIGURES], body)


def rates(rows: list[Row]) -> str:
    """The validation scores of the linear and the square-root rule, from the tuned rate of the batch of 256 on."""
    found = {
        c.batch: c for (method, *_), c in configurations(rows, experiment="1_global_batch").items() if method[0] == "I"
    }
    if 256 not in found:
        return ""
    base = found[256].rate

    def of_rule(configuration: Configuration, rate: float) -> str:
        near = [tried for tried in configuration.by_rate if abs(tried / rate - 1) < 0.05]
        return f"{rate:.2g}: {100 * score(configuration.by_rate[near[0]]):.1f}" if near else f"{rate:.2g}: not tried"

    body = []
    for batch, configuration in found.items():
        tried = ", ".join(f"{rate:g}: {100 * score(row):.1f}" for rate, row in sorted(configuration.by_rate.items()))
        factor = batch / 256
        body.append(
            [
                f"{batch:,}",
                f"{configuration.rate:g}: {100 * score(configuration.by_rate[configuration.rate]):.1f}",
                of_rule(configuration, base * factor**0.5),
                of_rule(configuration, base * factor),
                tried,
            ]
        )
    return markdown(["batch", "tuned", "square-root rule", "linear rule", "all that were tried"], body)


def fixed_steps(rows: list[Row]) -> str:
    found = configurations(rows, experiment="2_fixed_steps")
    body = [
        [label(method, c.batch), f"{c.steps * c.batch:,}", c.rate_cell, *(c.cell(figure) for figure in FIGURES)]
        for (method, *_), c in found.items()
    ]
    return markdown(["", "samples", "learning rate", *FIGURES], body) if body else ""


def objectives(rows: list[Row]) -> str:
    plain = configurations(rows, experiment="1_global_batch", method="InfCLTrainer")
    found = plain | configurations(rows, experiment="3_objectives")
    batches = {c.batch for (_, _, objective, ids, _), c in found.items() if objective == "sigmoid" or ids}
    body = [
        [f"{c.batch:,}", objective, "yes" if ids else "no", c.rate_cell, *(c.cell(figure) for figure in FIGURES)]
        for (_, _, objective, ids, _), c in sorted(found.items(), key=lambda item: item[0][1:4])
        if c.batch in batches
    ]
    return markdown(["batch", "loss", "`pair_ids`", "learning rate", *FIGURES], body) if body else ""


def fine_tuning(rows: list[Row]) -> str:
    """The rate of each way is the best by the mean over the seeds, all of which have tried every rate."""
    ended = [row for row in rows if row["experiment"] == "4_fine_tuning" and row["finished"]]
    body = []
    for way in dict.fromkeys(row["way"] for row in ended):
        by_rate: dict[float, list[Row]] = collections.defaultdict(list)
        for row in ended:
            if row["way"] == way:
                by_rate[row["learning_rate"]].append(row)
        rate = max(by_rate, key=lambda rate: statistics.mean(map(score, by_rate[rate])))
        configuration = Configuration(by_rate[rate])
        gain, kept = configuration.cell(CONCEPTS), configuration.cell(STYLE)
        body.append([way, f"{rate:g}", gain, kept, configuration.cell("zero-shot, other style")])
    head = ["", "learning rate", "clip art (new): new concepts, R@5", "emoji (guard): other style, R@1"]
    return markdown([*head, "emoji (guard): zero-shot, other style"], body) if body else ""


def cost(rows: list[Row]) -> str:
    body = []
    for row in rows:
        if row["experiment"] == "5_cost":
            rate = row["samples"] / row["seconds"]
            name = label(row["method"], int(row["batch"]))
            body.append(
                [name, f"{1000 * row['seconds'] / row['steps']:,.1f} ms", f"{rate:,.0f}", f"{row['peak_gib']} GiB"]
            )
    return markdown(["micro-batches of 256", "a step", "pairs per second", "peak memory"], body) if body else ""


def examples(rows: list[Row], corpus: Path, emojibase: Path) -> str:
    """The five best of the held-out vendor's drawings for ten captions, as characters; brackets mark the right one."""
    folder = corpus / "evaluation/held_out_vendor/test"
    names = [json.loads(line)["name"] for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    entries = json.loads(emojibase.read_text(encoding="utf-8"))
    entries += [variant for entry in entries for variant in entry.get("skins", [])]
    characters = {entry["label"].lower(): entry["emoji"] for entry in entries}
    shown = ("Trainer", 256), ("Trainer", 4096), ("InfCLTrainer", 4096)
    found = configurations(rows, experiment="1_global_batch")
    chosen = [c for wanted in shown for (method, *_), c in found.items() if (method, c.batch) == wanted]
    told = [[row["vendor_examples"] for row in c.ended if row.get("vendor_examples")] for c in chosen]
    if not all(told):  # rows of a run from before the examples were kept
        return ""
    best = [json.loads(first) for first, *_ in told]
    body = []
    for number in range(10):
        query = number * len(names) // 10
        cells = []
        for of_model in best:
            drawn = [(index == query, characters[names[index]]) for index in of_model[number]]
            cells.append(" ".join(f"[{character}]" if right else character for right, character in drawn))
        body.append([names[query], *cells])
    return markdown(["caption", *(label(method, batch) for method, batch in shown)], body)


# ---- Pictures ----


def panels(count: int, height: float = 4.0) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(5.2 * count, height), layout="constrained", dpi=150)
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_global_batch(rows: list[Row], path: Path) -> None:
    """Quality against the batch at the same number of samples, and against the steps for each batch."""
    found = configurations(rows, experiment="1_global_batch")
    ours = sorted((c for (method, *_), c in found.items() if method == "InfCLTrainer"), key=lambda c: c.batch)
    theirs = sorted((c for (method, *_), c in found.items() if method == "Trainer"), key=lambda c: c.batch)
    figure, axes = panels(3)
    for axis, name, title in (
        (axes[0], STYLE, "known concepts in another style, recall@1"),
        (axes[1], CONCEPTS, "new concepts, recall@5"),
    ):
        for several, style in (
            (ours, {"color": BLUE, "marker": "o", "label": "InfCLTrainer: one loss over the batch"}),
            (theirs, {"color": VERMILION, "marker": "s", "ls": "none", "label": "Trainer: losses over 256 pairs each"}),
        ):
            values = [[100 * v for v in c.values(name)] for c in several]
            errors = [statistics.stdev(v) if len(v) > 1 else 0 for v in values]
            axis.errorbar([c.batch for c in several], [statistics.mean(v) for v in values], errors, capsize=3, **style)
        axis.set_xscale("log", base=2)
        batches = sorted({c.batch for c in (*ours, *theirs)})
        axis.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axis.set(title=title, xlabel=f"pairs of a step, {int(ours[0].ended[0]['samples']):,} samples seen")
    for configuration, colour in zip(ours, colormaps["viridis_r"](np.linspace(0.15, 1, len(ours))), strict=True):
        by_step: dict[float, list[float]] = collections.defaultdict(list)
        for row in configuration.points:
            by_step[row["steps"]].append(100 * value(row, STYLE))
        means = [statistics.mean(by_step[step]) for step in sorted(by_step)]
        style = {"color": colour, "marker": "o", "ms": 4, "label": f"{configuration.batch:,}"}
        axes[2].plot(sorted(by_step), means, **style)
    axes[2].set_xscale("log", base=2)
    axes[2].xaxis.set_major_formatter(ScalarFormatter())
    axes[2].set(title="known concepts in another style, recall@1", xlabel="optimizer steps")
    for axis in axes:
        axis.set(ylabel="per cent", ylim=(0, None))
        axis.legend(frameon=False, fontsize=8, title="pairs of a step" if axis is axes[2] else None)
    figure.savefig(path)


def draw_curves(rows: list[Row], path: Path) -> None:
    """Recall against the samples seen, and against time on a GPU of one's own (from the cost rows)."""
    seconds = {
        (row["method"], row["batch"]): row["seconds"] / row["samples"] for row in rows if row["experiment"] == "5_cost"
    }
    shown = {
        ("Trainer", 256): ("Trainer: a step for each loss over 256", VERMILION, "s"),
        ("Trainer", 4096): ("Trainer: 16 losses over 256 in a step", ORANGE, "^"),
        ("InfCLTrainer", 1024): ("InfCLTrainer: one loss over 1,024", GREEN, "D"),
        ("InfCLTrainer", 4096): ("InfCLTrainer: one loss over 4,096", BLUE, "o"),
    }
    figure, axes = panels(2)
    found = configurations(rows, experiment="1_global_batch")
    for (method, *_), configuration in found.items():
        key = method, configuration.batch
        if key not in shown:
            continue
        name, colour, marker = shown[key]
        by_point: dict[float, list[float]] = collections.defaultdict(list)
        for row in configuration.points:
            by_point[row["samples_seen"]].append(100 * value(row, STYLE))
        samples = np.array(sorted(by_point))
        means = np.array([statistics.mean(by_point[s]) for s in samples])
        low, high = (np.array([f(by_point[s]) for s in samples]) for f in (min, max))
        for axis, scale in ((axes[0], 1e-3), (axes[1], seconds.get(key))):
            if scale is not None:
                axis.plot(samples * scale, means, color=colour, marker=marker, label=name)
                axis.fill_between(samples * scale, low, high, color=colour, alpha=0.15, linewidth=0)
    axes[0].set(xlabel="samples seen (thousands)", title="known concepts in another style, recall@1")
    axes[1].set(xlabel="seconds on one GPU, micro-batches of 256", title="the same against time")
    for axis in axes:
        axis.set(ylabel="per cent", ylim=(0, None), xlim=(0, None))
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
