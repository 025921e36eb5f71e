"""The pictures of the experiments' rows."""

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import grouped
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image, ImageDraw, ImageFont

from . import tables
from .tables import FIXED_SAMPLES, FIXED_STEPS, OPTIMIZERS, STYLE, Row, at_fixed_steps, of_batches

BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"  # Okabe and Ito
SKY = "#56B4E9"
BATCHES_SHOWN = [256, 512, 1024, 2048, 4096]


def panels(rows: int, columns: int) -> tuple[Figure, Any]:
    """A figure and its axes [rows, columns]."""
    figure = Figure(figsize=(5.2 * columns, 4 * rows), layout="constrained", dpi=150)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_global_batch(rows: list[Row], path: Path, shown: str, title_of_axis: str) -> None:
    """A figure against the batch at the same numbers of steps, with each optimizer; single runs are hollow."""
    figure, (axes,) = panels(1, 2)
    for axis, (optimizer, name) in zip(axes, OPTIMIZERS.items(), strict=True):
        for steps, colour, form in zip(FIXED_STEPS, (BLUE, PURPLE, GREEN), "ovD", strict=True):
            found = at_fixed_steps(rows, steps, optimizer=optimizer, method="InfCLTrainer")
            draw_batches(axis, found, shown, f"one loss, {steps:,} steps", colour, f"{form}-")
        found = at_fixed_steps(rows, FIXED_STEPS[0], optimizer=optimizer, method="Trainer")
        draw_batches(axis, found, shown, f"losses over 256, {FIXED_STEPS[0]} steps", VERMILION, "s")
        axis.set_xscale("log", base=2)
        axis.set_xticks(BATCHES_SHOWN, [f"{batch:,}" for batch in BATCHES_SHOWN])
        axis.set(xlabel="pairs in a step", xlim=(220, 4800), title=name)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    axes[0].set(ylabel=title_of_axis)
    top = 1.05 * max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(0, top)
    figure.savefig(path)


def draw_optimizers(rows: list[Row], path: Path) -> None:
    """Recall in another style with each optimizer, against the batch and, where steps were timed, against the time."""
    if not any(of_batches(rows, samples=samples, optimizer="muon") for samples in FIXED_SAMPLES):
        return
    were_timed = any(row["experiment"] == tables.COST_OF_OPTIMIZERS for row in rows)
    figure, (axes,) = panels(1, 2 if were_timed else 1)
    words = {"textcoords": "offset points", "fontsize": 8}
    for optimizer, colour in (("muon", VERMILION), ("adamw", BLUE)):
        for samples, form in zip(reversed(FIXED_SAMPLES), ("D--", "o-"), strict=True):
            of_these = of_batches(rows, samples=samples, optimizer=optimizer, method="InfCLTrainer")
            found = [c for c in of_these if c.batch in BATCHES_SHOWN]
            name = f"{OPTIMIZERS[optimizer]}, {samples / 1e6:.1f} million samples"
            draw_batches(axes[0], found, STYLE, name, colour, form)
            points = timed(rows, found)
            if points:
                axes[1].plot(*zip(*points, strict=True), form, color=colour)
            for place, c in points.items():
                if len(c.ended) == 1:
                    axes[1].plot(*place, form[0], color=colour, mfc="white", zorder=3)
                side, offset = ("right", (-5, 7)) if samples == max(FIXED_SAMPLES) else ("left", (4, -11))
                axes[1].annotate(f"{c.batch:,}", place, offset, **words, color=colour, ha=side)
        grown = tables.configurations(rows, tables.GROWING_BATCH, optimizer=optimizer)
        for place, c in timed(rows, grown).items():
            sizes = list(tables.stages_of(c.setting))
            axes[1].plot(*place, "*", color=colour, ms=10, zorder=4)
            axes[1].annotate(f"{sizes[0]:,} to {sizes[-1]:,}", place, (-16, 2), **words, color=colour, ha="right")
        of_parts = of_batches(rows, samples=FIXED_SAMPLES[0], optimizer=optimizer, batch=1024, method="Trainer")
        name = f"{OPTIMIZERS[optimizer]}, 0.6 million, four losses over 256"
        draw_batches(axes[0], of_parts, STYLE, name, colour, "s")
    axes[0].set_xscale("log", base=2)
    axes[0].set_xticks(BATCHES_SHOWN, [f"{batch:,}" for batch in BATCHES_SHOWN])
    axes[0].set(xlabel="pairs in a step", ylabel="recall@1, known concepts in another style, %", ylim=(-3, None))
    axes[0].legend(frameon=False, fontsize=8)
    axes[0].set_title("the same samples")
    if were_timed:
        axes[1].set_xscale("log")
        axes[1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[1].xaxis.set_major_formatter("{x:,.0f}")
        axes[1].xaxis.set_minor_locator(NullLocator())
        axes[1].set(xlabel="seconds on one GPU (at the points: pairs in a step)", ylim=axes[0].get_ylim())
        axes[1].set_title("the same against time")
    figure.savefig(path)


def timed(rows: list[Row], found: tables.Found) -> dict[tuple[float, float], tables.Configuration]:
    """The trainings whose steps were timed, by their seconds and their mean recall in another style in per cent."""
    times = ((tables.seconds_alone(rows, c.setting), c) for c in found)
    return {(time, 100 * statistics.mean(c.values(STYLE))): c for time, c in times if time is not None}


def draw_batches(axis: Any, found: tables.Found, shown: str, name: str, colour: str, form: str) -> None:
    """Mean and deviation of a trainer's runs against the batch, with a name for the legend, a colour and a form."""
    if not found:
        return
    values = [[100 * v for v in c.values(shown)] for c in found]
    batches, means = [c.batch for c in found], [statistics.mean(v) for v in values]
    errors = [statistics.stdev(v) if len(v) > 1 else 0 for v in values]
    axis.errorbar(batches, means, errors, fmt=form, color=colour, capsize=3, label=name)
    once = [(batch, v[0]) for batch, v in zip(batches, values, strict=True) if len(v) == 1]
    if once:
        axis.plot(*zip(*once, strict=True), form[0], color=colour, mfc="white", zorder=3)


def draw_curves(rows: list[Row], path: Path) -> None:
    """Recall against the samples seen, and against time on a GPU of one's own, for each of `FIXED_SAMPLES`."""
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
        found = {(c.setting.method, c.batch): c for c in of_batches(rows, samples=number, optimizer="adamw")}
        if ("Trainer", 256) in found:
            found.pop(("InfCLTrainer", 256), None)  # the two are one training, but for rounding
        for key in [key for key in found if key in shown]:
            name, colour, marker = shown[key]
            by_point = grouped(found[key].points, lambda row: row["samples_seen"])
            samples = np.array(sorted(by_point))
            recalls = [[100 * tables.value(row, STYLE) for row in by_point[s]] for s in samples]
            means, low, high = (np.array([f(r) for r in recalls]) for f in (statistics.mean, min, max))
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


def draw_fronts(rows: list[Row], path: Path) -> None:
    """Plots gains against what is kept, from the start of each fine-tuning to its end, for each base."""
    styles = {
        "full, AdamW": ("full", "black", "s"),
        "full, Muon": ("full, Muon", "grey", "v"),
        "full, image_learning_rate 3e-05, AdamW": ("image_learning_rate 3e-5", SKY, ">"),
        "full, keep_weights 100, AdamW": ("keep_weights 100", PURPLE, "^"),
        "locked image tower, AdamW": ("locked image tower", PURPLE, "o"),
        "locked image tower, Muon": ("locked image tower, Muon", ORANGE, "o"),
        "full, keep_features 3, AdamW": ("keep_features 3", GREEN, "D"),
        "full, keep_features 3, Muon": ("keep_features 3, Muon", GREEN, "D"),
        "locked image tower, keep_features 3, AdamW": ("locked image tower, keep_features 3", GREEN, "o"),
        "full, replay_share 0.1, AdamW": ("replay, a tenth of the batch", BLUE, "<"),
        "full, replay_share 0.25, AdamW": ("replay, a quarter", BLUE, ">"),
        "full, replay_share 0.5, AdamW": ("replay, a half", VERMILION, "P"),
        "full, replay_share 0.5, Muon": ("replay, a half, Muon", VERMILION, "P"),
    }
    found = {base: {front.way: front for front in tables.fronts(rows, base)} for base in ("AdamW", "Muon")}
    found = {base: of_base for base, of_base in found.items() if of_base}
    if not found:
        return
    figure, (axes,) = panels(1, len(found))
    for axis, (base, of_base) in zip(axes, found.items(), strict=True):
        for way, (name, colour, marker) in styles.items():
            if way in of_base:
                line = [point for (path, _), point in of_base[way].points.items() if path == "line"]
                kept, gained = zip(*line, strict=True)
                axis.plot(kept[1:-1], gained[1:-1], marker, color=colour, ms=4, mfc="white")
                axis.plot(kept[-1:], gained[-1:], marker, color=colour, ms=7, label=name)
                axis.plot(kept, gained, "-", color=colour, lw=1)
                axis.plot(kept[:1], gained[:1], "*", color="black", ms=12)
        axis.set(xlabel="kept: recall@1 of emoji in another style, %", xlim=(0, None), ylim=(0, 29))
        axis.set_title(f"a base that {base} trained")
        axis.legend(frameon=False, fontsize=8, loc="lower left")
    axes[0].set(ylabel="gained: recall@5, new concepts of clip art, %")
    figure.savefig(path)


WRONG_CAPTIONS = {  # by the pairs that are trained on, and how the training chooses among them
    ("right pairs", ""): ("right pairs only", GREEN, "^"),
    ("cleaned at 0.5", ""): ("without what the ledger calls wrong", PURPLE, "D"),
    ("all", "noisy"): ("--leave_out noisy", BLUE, "o"),
    ("all", ""): ("all pairs", VERMILION, "s"),
}


def draw_wrong_captions(found: dict[tuple[str, ...], list[Row]], path: Path) -> None:
    """Recalls against the share of wrong captions, by what is trained on, of `tables.wrong_and_taught_rows`."""
    figure, (axes,) = panels(1, 2)
    titles = {"vendor_recall@1": "another style, recall@1", "concepts_recall@5": "new concepts, recall@5"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for (kept, rule), (label, colour, form) in WRONG_CAPTIONS.items():
            points = {}
            chosen = ("", f"`leave_out` {rule}" if rule else "")
            for (*training, wrong, pairs, taught, options), runs in found.items():
                shown = training == ["all", "small", "Muon", "589,824"] and wrong.endswith("%")
                if shown and pairs == kept and (taught, options) == chosen:
                    points[float(wrong[:-1])] = [float(row[name]) for row in runs]
            shares = sorted(points)
            means = [sum(points[share]) / len(points[share]) for share in shares]
            axis.plot(shares, means, f"{form}-", color=colour, label=label, markersize=6)
            for share in shares:
                axis.plot([share] * len(points[share]), points[share], ".", color=colour, alpha=0.4)
                if len(points[share]) == 1:
                    axis.plot(share, *points[share], form, color=colour, markersize=6, markerfacecolor="white")
        axis.set(xlabel="wrong captions, %", title=title, xlim=(-2, 53), xticks=[0, 10, 20, 50])
        axis.set_ylim(0)
    axes[0].set(ylabel="%")
    axes[1].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path)


def draw_examples(rows: list[Row], corpus: Path, path: Path) -> None:
    """The five best of the held-out vendor's drawings for ten captions, by three models; the right ones framed."""
    folder = corpus / "evaluation/held_out_vendor/test"
    entries = [json.loads(line) for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    shown = {
        ("InfCLTrainer", 256): "one loss over 256 in a step",
        ("Trainer", 4096): "16 losses over 256 in a step",
        ("InfCLTrainer", 4096): "one loss over 4,096 in a step",
    }
    found = {(c.setting.method, c.batch): c.ended for c in at_fixed_steps(rows, FIXED_STEPS[0], optimizer="adamw")}
    best = {}
    for key, title in shown.items():
        told = [row["vendor_examples"] for row in found.get(key, ())]
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
