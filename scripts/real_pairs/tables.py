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
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

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
SWAPS = {f"{kind} swapped": (f"vendor_{kind}_swaps",) for kind in ("attribute", "number", "relation")}
COLUMNS = ("learning rate", "seeds")
FIXED_STEPS = 576


class Setting(NamedTuple):
    """A configuration of an experiment; the defaults stand for columns that a row does not have."""

    method: str
    batch: float
    objective: str
    pair_ids: bool
    way: str = ""
    captions: float = 1
    equal_ids: str = "exclude"
    negatives: bool = False

    @classmethod
    def of(cls, row: Row) -> Setting:
        return cls(**{name: row[name] for name in cls._fields if row.get(name, "") != ""})


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
    return statistics.mean(row[column] for column in {**FIGURES, **SWAPS}[figure])


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
        """Mean and standard deviation over the seeds, in per cent; one seed has no deviation."""
        values = [100 * v for v in self.values(figure)]
        deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.1f}{deviation}"

    def cells(self, *figures: str) -> list[str]:
        """The learning rate, the number of seeds, and the figures: by default all of `FIGURES`."""
        return [self.rate_cell, str(len(self.ended)), *(self.cell(figure) for figure in figures or FIGURES)]


def configurations(rows: Iterable[Row], *experiments: str, **wanted: Any) -> dict[Setting, Configuration]:
    """The configurations of the experiments with these values, `Trainer` first, then the small batches."""
    groups: dict[Setting, list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row["experiment"] in experiments and all(row[name] == value for name, value in wanted.items()):
            groups[Setting.of(row)].append(row)
    complete = {key: found for key, found in groups.items() if any(row["finished"] for row in found)}
    return {key: Configuration(complete[key]) for key in sorted(complete, key=lambda key: (key[0] != "Trainer", key))}


def at_fixed_steps(rows: Iterable[Row]) -> dict[Setting, Configuration]:
    """The configurations of 2_fixed_steps, and those of 1_global_batch that have as many steps."""
    several = [row for row in rows if row["experiment"] in ("1_global_batch", "2_fixed_steps")]
    kept = [row for row in several if row["samples"] == FIXED_STEPS * row["batch"]]
    return configurations(kept, "1_global_batch", "2_fixed_steps")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def label(setting: Setting, micro_batch: int = 256) -> str:
    batch = int(setting.batch)
    if setting.method != "Trainer":
        return f"`{setting.method}`, one loss over {batch:,}"
    losses = batch // micro_batch
    return (
        "`Trainer`, a step for each loss over 256" if losses == 1 else f"`Trainer`, {losses} losses over 256 in a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, help="of scripts/real_pairs.py, to show what is retrieved")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = read(args.results / "results.csv")
    tables = {
        "The global batch, at the same number of samples": global_batch(rows),
        "Learning rates": rates(rows),
        "The same number of steps": fixed_steps(rows),
        "Objectives and false negatives": objectives(rows),
        "Several captions": several_captions(rows),
        "Hard negatives": hard_negatives(rows),
        "Fine-tuning": fine_tuning(rows),
        "Cost": cost(rows),
    }
    text = "\n\n".join(f"## {title}\n\n{table}" for title, table in tables.items() if table)
    (args.results / "TABLES.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    draw_global_batch(rows, args.results / "global_batch.png")
    draw_curves(rows, args.results / "curves.png")
    if args.corpus is not None:
        draw_examples(rows, args.corpus, args.results / "examples.png")


# ---- Tables ----


def global_batch(rows: list[Row]) -> str:
    body = [
        [label(setting), f"{c.steps:,}", *c.cells()] for setting, c in configurations(rows, "1_global_batch").items()
    ]
    return markdown(["", "steps", *COLUMNS, *FIGURES], body)


def rates(rows: list[Row]) -> str:
    """The validation scores of the linear and the square-root rule, from the tuned rate of the batch of 256 on."""
    found = {c.batch: c for c in configurations(rows, "1_global_batch", method="InfCLTrainer").values()}
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
    body = [[label(setting), f"{c.steps * c.batch:,}", *c.cells()] for setting, c in at_fixed_steps(rows).items()]
    return markdown(["", "samples", *COLUMNS, *FIGURES], body) if len(body) > 1 else ""


def objectives(rows: list[Row]) -> str:
    found = configurations(rows, "1_global_batch", "3_objectives", method="InfCLTrainer")
    batches = {c.batch for setting, c in found.items() if setting.objective == "sigmoid" or setting.pair_ids}
    body = [
        [f"{c.batch:,}", setting.objective, "yes" if setting.pair_ids else "no", *c.cells()]
        for setting, c in found.items()
        if c.batch in batches
    ]
    return markdown(["batch", "loss", "`pair_ids`", *COLUMNS, *FIGURES], body) if body else ""


def positives(setting: Setting) -> str:
    captions = "one caption" if setting.captions == 1 else f"{int(setting.captions)} captions"
    return captions + ", names as positives" * (setting.pair_ids and setting.equal_ids == "positive")


def several_captions(rows: list[Row]) -> str:
    body = [[positives(setting), *c.cells()] for setting, c in configurations(rows, "6_several_captions").items()]
    return markdown(["per image", *COLUMNS, *FIGURES], body) if body else ""


def hard_negatives(rows: list[Row]) -> str:
    """How often an image is nearer to its caption than to the swapped one, beside the recalls."""
    found = configurations(rows, "6_several_captions", "7_hard_negatives", pair_ids=False)
    body = [
        [positives(setting), "yes" if setting.negatives else "no", *c.cells(*SWAPS, STYLE, CONCEPTS)]
        for setting, c in found.items()
        if setting._replace(negatives=True) in found
    ]
    head = ["per image", "swapped captions in training", *COLUMNS, *SWAPS, STYLE, CONCEPTS]
    return markdown(head, body) if body else ""


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
        title = "before the fine-tuning" if way == "base" else way
        body.append([title, *configuration.cells(CONCEPTS, STYLE, "zero-shot, other style")])
    head = ["", *COLUMNS, "clip art (new): new concepts, R@5", "emoji (guard): other style, R@1"]
    return markdown([*head, "emoji (guard): zero-shot, other style"], body) if body else ""


def cost(rows: list[Row]) -> str:
    body = []
    for row in rows:
        if row["experiment"] == "5_cost":
            rate = row["samples"] / row["seconds"]
            name = label(Setting.of(row))
            body.append(
                [name, f"{1000 * row['seconds'] / row['steps']:,.1f} ms", f"{rate:,.0f}", f"{row['peak_gib']:.1f} GiB"]
            )
    return markdown(["micro-batches of 256", "a step", "pairs per second", "peak memory"], body) if body else ""


# ---- Pictures ----


def panels(count: int, height: float = 4.0) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(5.2 * count, height), layout="constrained", dpi=150)
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_global_batch(rows: list[Row], path: Path) -> None:
    """Quality against the batch at the same number of optimizer steps, and at the same number of samples.

    The marker of a single run is hollow.
    """
    ours = {"color": BLUE, "marker": "o", "label": "InfCLTrainer: one loss over all pairs of a step"}
    plain = {"color": VERMILION, "marker": "s", "ls": "none", "label": "Trainer: a loss over each 256 of them"}
    same_samples = configurations(rows, "1_global_batch")
    samples = next(iter(same_samples.values())).ended[0]["samples"]
    figure, axes = panels(2)
    for axis, found, title in (
        (axes[0], at_fixed_steps(rows), f"the same number of steps: {FIXED_STEPS}"),
        (axes[1], same_samples, f"the same number of samples: {int(samples):,}"),
    ):
        for method, style in (("InfCLTrainer", ours), ("Trainer", plain)):
            several = [c for setting, c in found.items() if setting.method == method]
            values = [[100 * v for v in c.values(STYLE)] for c in several]
            errors = [statistics.stdev(v) if len(v) > 1 else 0 for v in values]
            if values:
                batches = [c.batch for c in several]
                means = [statistics.mean(v) for v in values]
                axis.errorbar(batches, means, errors, capsize=3, **style)
                once = [(batch, v[0]) for batch, v in zip(batches, values, strict=True) if len(v) == 1]
                if once:
                    axis.plot(*zip(*once, strict=True), style["marker"], color=style["color"], mfc="white", zorder=3)
        axis.set_xscale("log", base=2)
        batches = sorted({c.batch for c in found.values()})
        axis.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axis.set(title=title, xlabel="pairs in a step", ylim=(0, None))
    axes[0].set_ylabel("recall@1, known concepts in another style, %")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
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
    for setting, configuration in configurations(rows, "1_global_batch").items():
        key = setting.method, configuration.batch
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


def draw_examples(rows: list[Row], corpus: Path, path: Path) -> None:
    """The five best of the held-out vendor's drawings for ten captions, by three models; the right ones framed."""
    folder = corpus / "evaluation/held_out_vendor/test"
    entries = [json.loads(line) for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    shown = {
        Setting("InfCLTrainer", 256, "softmax", False): "one loss over 256 in a step",
        Setting("Trainer", 4096, "softmax", False): "16 losses over 256 in a step",
        Setting("InfCLTrainer", 4096, "softmax", False): "one loss over 4,096 in a step",
    }
    found = at_fixed_steps(rows)
    best = {}
    for setting, title in shown.items():
        told = [row["vendor_examples"] for row in found[setting].ended] if setting in found else []
        if not any(told):  # it has not run, or in a version that did not keep them
            return
        best[title] = json.loads(next(filter(None, told)))
    side, gap, left, top = 56, 4, 230, 24
    width = left + len(best) * (5 * (side + gap) + 16)
    canvas = Image.new("RGB", (width, top + 10 * (side + gap)), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(13)
    for column, (title, of_model) in enumerate(best.items()):
        x = left + column * (5 * (side + gap) + 16)
        draw.text((x, 4), title, "black", font)
        for number, indices in enumerate(of_model):
            query, y = number * len(entries) // 10, top + number * (side + gap)
            if column == 0:
                text = "\n".join(textwrap.wrap(entries[query]["name"], 32))
                draw.multiline_text((4, y + side // 2), text, "black", font, anchor="lm")
            for place, index in enumerate(indices):
                corner = (x + place * (side + gap), y)
                picture = Image.open(folder / entries[index]["file_name"]).convert("RGB").resize((side, side))
                canvas.paste(picture, corner)
                if index == query:
                    draw.rectangle([corner[0] - 2, y - 2, corner[0] + side + 1, y + side + 1], outline=GREEN, width=2)
    canvas.quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main()
