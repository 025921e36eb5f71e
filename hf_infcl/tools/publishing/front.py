"""Writes and draws what averages between two checkpoints gain and what they keep."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...checkpoints.average_search import SPLIT, Averaged, Measured
from .curves import COLOURS, without_formulas
from .facts import source_name

FRONT_FILE = "average.png"
AVERAGES_FILE = "average_results.json"


def write_averages(folder: Path, average: Averaged, start: str, end: str) -> None:
    """Writes all that was measured, and draws it where both gain and guards were measured.

    ``start`` and ``end`` are the Hub ids or folders of both ends, and ``average`` is the one that is saved.
    """
    measured = average.measured
    if not measured:
        return
    results = {
        "start": source_name(start)[0],
        "end": source_name(end)[0],
        "path": average.path,
        "alpha": average.alpha,
        "chosen": average.tolerance is not None,
        "guard_tolerance": average.tolerance,
        "scores": "recall@1 (mean of both directions) of pairs, top-1 accuracy of classes",
        "split": SPLIT,
        "measured": [asdict(one) for one in measured],
    }
    (folder / AVERAGES_FILE).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if measured[0].gained is not None and measured[0].rest and importlib.util.find_spec("matplotlib") is not None:
        plot_front(measured, average.alpha, folder / FRONT_FILE)


def plot_front(measured: Sequence[Measured], alpha: float, path: str | Path) -> None:
    """Draws the gain of every average, and what each guard keeps, over α and in per cent; 95% intervals are shaded.

    Of a guard both halves are drawn, the one that chooses and the one that reports. Which of them differ by more than
    noise can be seen from the intervals, also where a guard has few rows. A line stands at ``alpha``, that of the
    average that is saved. All averages have a gain and the same guards.
    """
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    guards = list(measured[0].rest)
    figure = Figure(figsize=(1 + 3.8 * (1 + len(guards)), 3.6), layout="constrained", dpi=150)
    axes = figure.subplots(ncols=1 + len(guards), squeeze=False)[0]
    alphas = [one.alpha for one in measured]

    def draw(axis: Axes, colour: str, title: str, values: Sequence[float], bounds: Mapping[float, Any]) -> None:
        axis.axvline(alpha, color="#888888", linewidth=1, linestyle=":")
        if bounds:
            low, high = ([100 * bound for bound in ends] for ends in zip(*bounds.values(), strict=True))
            axis.fill_between([*bounds], low, high, color=colour, alpha=0.15, lw=0)
        axis.plot(alphas, [100 * value for value in values], color=colour, marker=".", label="the half that reports")
        axis.set_title(f"{title} (%)", fontsize=9)
        axis.set_xlabel("α, from the start (0) to the end (1)", fontsize=9)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)

    gained = [one.gained or 0.0 for one in measured]
    bounds = {one.alpha: (one.gained_low, one.gained_high) for one in measured if one.gained_low is not None}
    draw(axes[0], COLOURS[0], "score on what was trained for", gained, bounds)
    for axis, colour, guard in zip(axes[1:], itertools.cycle(COLOURS[1:]), guards, strict=False):
        bounds = {one.alpha: one.rest_bounds[guard] for one in measured if guard in one.rest_bounds}
        draw(axis, colour, f"kept on {without_formulas(guard)}", [one.rest[guard] for one in measured], bounds)
        choosing = [100 * one.validation[guard] for one in measured]
        axis.plot(alphas, choosing, color=colour, linestyle="--", lw=1, label="the half that chooses")
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"Averages of the weights; the saved one is at {alpha:g}", fontsize=10)
    figure.savefig(path)
