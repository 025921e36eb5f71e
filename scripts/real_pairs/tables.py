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
# The recalls of each direction: of images by their captions, and of captions by their images.
DIRECTIONS = {
    f"{found} found, {name}": (f"{data}_{way}_recall@{k}",)
    for name, data, k in (("other style, R@1", "vendor", 1), ("new concepts, R@5", "concepts", 5))
    for found, way in (("images", "image"), ("captions", "text"))
}
VALIDATION = "validation"  # the figure that learning rates are chosen by
# How often an image is nearer to its caption than to the swapped one: names that were trained on, then new ones.
SWAPS = {
    f"{kind} swapped, {name}": (f"{data}_{kind}_swaps",)
    for name, data in (("other style", "vendor"), ("new concepts", "concepts"))
    for kind in ("attribute", "number", "relation")
}
COLUMNS = ("learning rate", "seeds")
BATCHES = ("1_global_batch", "2_fixed_steps", "8_more_samples")  # the experiments that differ in the batch
FIXED_STEPS = (576, 1152, 2304)
FIXED_SAMPLES = (589_824, 2_359_296)


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
    if figure == VALIDATION:
        return score(row)
    return statistics.mean(row[column] for column in {**FIGURES, **DIRECTIONS, **SWAPS}[figure])


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
        self._rows = rows
        self.batch = int(ended[0]["batch"])

    @property
    def rate_cell(self) -> str:
        """The learning rate; a star if no smaller or no greater one was tried."""
        at_edge = len(self.by_rate) > 1 and self.rate in (min(self.by_rate), max(self.by_rate))
        return f"{self.rate:g}" + "*" * at_edge

    def at_each_rate(self) -> list[Configuration]:
        """The runs of each learning rate that was tried, from the least on."""
        return [Configuration([r for r in self._rows if r["learning_rate"] == rate]) for rate in sorted(self.by_rate)]

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


def at_fixed_steps(rows: Iterable[Row], steps: int = FIXED_STEPS[0]) -> dict[Setting, Configuration]:
    return configurations((row for row in rows if row["samples"] == steps * row["batch"]), *BATCHES)


def at_fixed_samples(rows: Iterable[Row], samples: int) -> dict[Setting, Configuration]:
    return configurations((row for row in rows if row["samples"] == samples), *BATCHES)


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
        "Steps and batch, in another style": steps_and_batch(rows, STYLE),
        "Steps and batch, on new concepts": steps_and_batch(rows, CONCEPTS),
        "Each direction": directions(rows),
        "Objectives and false negatives": objectives(rows),
        "Several captions": several_captions(rows),
        "Hard negatives": hard_negatives(rows),
        "Fine-tuning": fine_tuning(rows),
        "Cost": cost(rows),
    }
    text = "\n\n".join(f"## {title}\n\n{table}" for title, table in tables.items() if table)
    (args.results / "TABLES.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    draw_global_batch(rows, args.results / "global_batch.png", STYLE, "recall@1, known concepts in another style, %")
    draw_global_batch(rows, args.results / "new_concepts.png", CONCEPTS, "recall@5, new concepts, %")
    draw_curves(rows, args.results / "curves.png")
    draw_fine_tuning(rows, args.results / "fine_tuning.png")
    if args.corpus is not None:
        draw_examples(rows, args.corpus, args.results / "examples.png")


# ---- Tables ----


def global_batch(rows: list[Row]) -> str:
    body = [
        [f"{samples:,}", label(setting), f"{c.steps:,}", *c.cells()]
        for samples in FIXED_SAMPLES
        for setting, c in at_fixed_samples(rows, samples).items()
    ]
    return markdown(["samples", "", "steps", *COLUMNS, *FIGURES], body)


def rates(rows: list[Row]) -> str:
    """The validation scores of the linear and the square-root rule, from the tuned rate of the batch of 256 on."""
    found = {c.batch: c for s, c in at_fixed_samples(rows, FIXED_SAMPLES[0]).items() if s.method == "InfCLTrainer"}
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
    body = [
        [f"{steps:,}", label(setting), f"{c.steps * c.batch:,}", *c.cells()]
        for steps in FIXED_STEPS
        for setting, c in at_fixed_steps(rows, steps).items()
    ]
    return markdown(["steps", "", "samples", *COLUMNS, *FIGURES], body) if len(body) > 1 else ""


def of_every_size(rows: list[Row]) -> list[tuple[Setting, Configuration]]:
    """The trainings that differ in the batch, of the fewest samples first."""
    sizes = sorted({row["samples"] for row in rows if row["experiment"] in BATCHES})
    return [pair for samples in sizes for pair in at_fixed_samples(rows, samples).items()]


def steps_and_batch(rows: list[Row], figure: str) -> str:
    """The figure of one loss over the batch: a line for each number of steps, a column for each batch."""
    found = {(c.steps, c.batch): c for setting, c in of_every_size(rows) if setting.method == "InfCLTrainer"}
    batches = sorted({batch for _, batch in found})
    body = [
        [f"{steps:,}", *(found[steps, batch].cell(figure) if (steps, batch) in found else "" for batch in batches)]
        for steps in sorted({steps for steps, _ in found})
    ]
    return markdown(["steps", *(f"{batch:,} pairs" for batch in batches)], body) if body else ""


def directions(rows: list[Row]) -> str:
    """Images found by captions and captions by images, of the trainings that differ in the batch."""
    body = [
        [label(setting), f"{c.steps:,}", f"{c.steps * c.batch:,}", *c.cells(*DIRECTIONS)]
        for setting, c in of_every_size(rows)
    ]
    return markdown(["", "steps", "samples", *COLUMNS, *DIRECTIONS], body) if body else ""


def objectives(rows: list[Row]) -> str:
    """The settings of 3_objectives beside plain softmax with as many pairs in a step and as many samples."""
    kept = [row for row in rows if row["experiment"] in ("1_global_batch", "2_fixed_steps", "3_objectives")]
    body = []
    for batch, samples in sorted({(r["batch"], r["samples"]) for r in kept if r["experiment"] == "3_objectives"}):
        same = [row for row in kept if row["samples"] == samples]
        found = configurations(same, *{row["experiment"] for row in same}, method="InfCLTrainer", batch=batch)
        for setting, c in found.items():
            ids = "yes" if setting.pair_ids else "no"
            body.append([f"{c.batch:,}", f"{c.steps:,}", setting.objective, ids, *c.cells()])
    return markdown(["batch", "steps", "loss", "`pair_ids`", *COLUMNS, *FIGURES], body) if body else ""


def positives(setting: Setting) -> str:
    captions = "one caption" if setting.captions == 1 else f"{int(setting.captions)} captions"
    return f"{captions}, names as positives" if setting.pair_ids and setting.equal_ids == "positive" else captions


def of_each_rate(name: Sequence[str], configuration: Configuration, *figures: str) -> list[list[str]]:
    """A line for each learning rate, with the figure that one was chosen by; that one is bold."""
    lines = []
    for c in configuration.at_each_rate():
        rate, *cells = c.cells(VALIDATION, *figures)
        lines.append([*name, f"**{rate}**" if c.rate == configuration.rate else rate, *cells])
    return lines


def several_captions(rows: list[Row]) -> str:
    body = []
    for setting, c in configurations(rows, "6_several_captions").items():
        body += of_each_rate([positives(setting)], c, *FIGURES)
    return markdown(["per image", *COLUMNS, VALIDATION, *FIGURES], body) if body else ""


def hard_negatives(rows: list[Row]) -> str:
    """How often an image is nearer to its caption than to the swapped one, beside the recalls."""
    found = configurations(rows, "6_several_captions", "7_hard_negatives", pair_ids=False)
    figures = (*SWAPS, STYLE, CONCEPTS)
    body = []
    for setting, c in found.items():
        if setting._replace(negatives=True) in found:
            body += of_each_rate([positives(setting), "yes" if setting.negatives else "no"], c, *figures)
    head = ["per image", "swapped captions in training", *COLUMNS, VALIDATION, *figures]
    return markdown(head, body) if body else ""


def fine_tuning(rows: list[Row]) -> str:
    """Validation and new concepts are those of clip art, which the fine-tuning is about; the rest is of emoji."""
    figures = (CONCEPTS, STYLE, "zero-shot, other style")
    body = []
    for setting, c in tunings(rows).items():
        body += of_each_rate(["before the fine-tuning" if setting.way == "base" else setting.way], c, *figures)
    heads = ["clip art: validation", "clip art: new concepts, R@5", "emoji: other style, R@1", "emoji: zero-shot"]
    return markdown(["", *COLUMNS, *heads], body) if body else ""


def tunings(rows: list[Row]) -> dict[Setting, Configuration]:
    """The ways of the fine-tuning, the state before it first."""
    found = configurations(rows, "4_fine_tuning")
    return {setting: found[setting] for setting in sorted(found, key=lambda setting: setting.way != "base")}


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


def panels(rows: int, columns: int) -> tuple[Figure, Any]:
    """A figure and its axes [rows, columns]."""
    figure = Figure(figsize=(5.2 * columns, 4 * rows), layout="constrained", dpi=150)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_global_batch(rows: list[Row], path: Path, shown: str, title_of_axis: str) -> None:
    """A figure against the batch at the same number of optimizer steps, and at the same numbers of samples.

    The marker of a single run is hollow.
    """
    figure, (axes,) = panels(1, 2)
    in_steps = [at_fixed_steps(rows, steps) for steps in FIXED_STEPS]
    of_samples = [at_fixed_samples(rows, samples) for samples in FIXED_SAMPLES]
    for steps, found, colour, form in zip(FIXED_STEPS, in_steps, (BLUE, PURPLE, GREEN), "ovD", strict=True):
        draw_batches(axes[0], found, shown, "InfCLTrainer", (f"one loss, {steps:,} steps", colour, f"{form}-"))
    draw_batches(axes[0], in_steps[0], shown, "Trainer", (f"losses over 256, {FIXED_STEPS[0]} steps", VERMILION, "s"))
    for samples, found, colour, form in zip(FIXED_SAMPLES, of_samples, (BLUE, GREEN), "oD", strict=True):
        draw_batches(axes[1], found, shown, "InfCLTrainer", (f"one loss, {samples:,} samples", colour, f"{form}-"))
    for samples, found, colour, form in zip(FIXED_SAMPLES, of_samples, (VERMILION, ORANGE), "s^", strict=True):
        draw_batches(axes[1], found, shown, "Trainer", (f"losses over 256, {samples:,} samples", colour, form))
    top = 1.1 * max(100 * v for found in in_steps + of_samples for c in found.values() for v in c.values(shown))
    for axis, several, place in ((axes[0], in_steps, "lower right"), (axes[1], of_samples, "lower left")):
        axis.set_xscale("log", base=2)
        batches = sorted({c.batch for found in several for c in found.values()})
        axis.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axis.set(xlabel="pairs in a step", ylim=(0, top))
        axis.legend(frameon=False, fontsize=8, loc=place)
    axes[0].set(ylabel=title_of_axis, title="the same number of steps")
    axes[1].set_title("the same number of samples")
    figure.savefig(path)


def draw_batches(
    axis: Any, found: dict[Setting, Configuration], shown: str, method: str, style: tuple[str, str, str]
) -> None:
    """Mean and deviation of a trainer's runs against the batch, with a name for the legend, a colour and a form."""
    name, colour, form = style
    several = [c for setting, c in found.items() if setting.method == method]
    values = [[100 * v for v in c.values(shown)] for c in several]
    if not values:
        return
    batches, means = [c.batch for c in several], [statistics.mean(v) for v in values]
    errors = [statistics.stdev(v) if len(v) > 1 else 0 for v in values]
    axis.errorbar(batches, means, errors, fmt=form, color=colour, capsize=3, label=name)
    once = [(batch, v[0]) for batch, v in zip(batches, values, strict=True) if len(v) == 1]
    if once:
        axis.plot(*zip(*once, strict=True), form[0], color=colour, mfc="white", zorder=3)


def draw_curves(rows: list[Row], path: Path) -> None:
    """Recall against the samples seen, and against time on a GPU of one's own (from the cost rows).

    Above the trainings of 589,824 samples, below those of 2,359,296.
    """
    seconds = {
        (row["method"], row["batch"]): row["seconds"] / row["samples"] for row in rows if row["experiment"] == "5_cost"
    }
    shown = {
        ("Trainer", 256): ("Trainer: a step for each loss over 256", VERMILION, "s"),
        ("Trainer", 4096): ("Trainer: 16 losses over 256 in a step", ORANGE, "^"),
        ("InfCLTrainer", 256): ("InfCLTrainer: one loss over 256", PURPLE, "v"),
        ("InfCLTrainer", 1024): ("InfCLTrainer: one loss over 1,024", GREEN, "D"),
        ("InfCLTrainer", 4096): ("InfCLTrainer: one loss over 4,096", BLUE, "o"),
    }
    figure, axes = panels(2, 2)
    for (against_samples, against_time), number in zip(axes, FIXED_SAMPLES, strict=True):
        found = at_fixed_samples(rows, number)
        for setting, configuration in found.items():
            key = setting.method, configuration.batch
            if key not in shown or (key == ("InfCLTrainer", 256) and ("Trainer", 256) in {s[:2] for s in found}):
                continue  # the two are one training, but for rounding
            name, colour, marker = shown[key]
            by_point: dict[float, list[float]] = collections.defaultdict(list)
            for row in configuration.points:
                by_point[row["samples_seen"]].append(100 * value(row, STYLE))
            samples = np.array(sorted(by_point))
            means = np.array([statistics.mean(by_point[s]) for s in samples])
            low, high = (np.array([f(by_point[s]) for s in samples]) for f in (min, max))
            for axis, scale in ((against_samples, 1e-3), (against_time, seconds.get(key))):
                if scale is not None:
                    axis.plot(samples * scale, means, color=colour, marker=marker, label=name)
                    axis.fill_between(samples * scale, low, high, color=colour, alpha=0.15, linewidth=0)
        against_samples.xaxis.set_major_formatter("{x:,.0f}")
        against_samples.set(xlabel="samples seen (thousands)", ylabel="recall@1 in another style, %")
        against_time.set(xlabel="seconds on one GPU, micro-batches of 256, eager")
        for axis in (against_samples, against_time):
            axis.set(ylim=(0, None), xlim=(0, None))
        against_samples.legend(frameon=False, fontsize=8)
        against_samples.set_title(f"trainings of {number:,} samples")
        against_time.set_title("the same against time")
    figure.savefig(path)


def draw_fine_tuning(rows: list[Row], path: Path) -> None:
    """What is gained on clip art against what is kept of the emoji, for every way and learning rate."""
    styles = {
        "base": ("before", "black", "*", (0, 0)),
        "full": ("full", VERMILION, "s", (-4, -12)),
        "locked image tower": ("locked image tower", BLUE, "o", (4, 6)),
        "LoRA": ("LoRA", GREEN, "D", (-6, -12)),
    }
    figure, ((axis,),) = panels(1, 1)
    for setting, configuration in tunings(rows).items():
        name, colour, marker, offset = styles[setting.way]
        each = configuration.at_each_rate()
        kept, gained = ([[100 * v for v in c.values(figure)] for c in each] for figure in (STYLE, CONCEPTS))
        x, y = ([statistics.mean(v) for v in values] for values in (kept, gained))
        errors = [[statistics.stdev(v) if len(v) > 1 else 0 for v in values] for values in (gained, kept)]
        size = 10 if setting.way == "base" else 6
        axis.errorbar(x, y, *errors, color=colour, marker=marker, ms=size, capsize=2, ls=":", label=name)
        side = "right" if offset[0] < 0 else "left"
        for c, place in zip(each, zip(x, y, strict=True), strict=True):
            if setting.way != "base":
                text = {"textcoords": "offset points", "color": colour, "fontsize": 8, "ha": side}
                axis.annotate(f"{c.rate:.0e}".replace("e-0", "e-"), place, offset, **text)
    axis.set(xlabel="emoji, which it was trained on: recall@1 in another style, %", xlim=(0, None), ylim=(0, None))
    axis.set(ylabel="clip art, which is new: recall@5, new concepts, %")
    axis.legend(frameon=False, fontsize=8)
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
    side, gap, left, top = 56, 4, 230, 28
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
