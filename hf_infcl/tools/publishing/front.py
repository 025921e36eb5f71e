"""Writes and draws what averages between two checkpoints gain and what they keep."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...checkpoints.average_choice import Measured
from ...checkpoints.average_search import SPLIT, Averaged
from .curves import COLOURS, without_formulas
from .facts import source_name

FRONT_FILE = "average.png"
AVERAGES_FILE = "average_results.json"


def write_averages(folder: Path, average: Averaged, start: str, end: str) -> None:
    """Writes all that was measured, and draws it where both gain and guards were measured.

    Args:
        folder: to write into.
        average: the average that is saved.
        start, end: Hub ids or folders of both ends.
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
    """Draws a panel for each guard: the gain of every average against what the guard keeps, in per cent.

    Both halves of the guard are drawn, the one that chooses and the one that reports, each with its numbers α.

    Args:
        measured: all averages, with a gain and the same guards.
        alpha: of the average that is saved, which gets a larger mark.
        path: the picture, PNG or another format of matplotlib.
    """
    from matplotlib.figure import Figure

    guards = list(measured[0].rest)
    figure = Figure(figsize=(1 + 5.2 * len(guards), 4.6), layout="constrained", dpi=150)
    axes = figure.subplots(ncols=len(guards), sharey=True, squeeze=False)[0]
    gained = [100 * (one.gained or 0.0) for one in measured]
    for axis, guard in zip(axes, guards, strict=True):
        halves = {
            "the half that reports": [100 * one.rest[guard] for one in measured],
            "the half that chooses": [100 * one.validation[guard] for one in measured],
        }
        for (label, kept), colour, line in zip(halves.items(), COLOURS, ("-", "--"), strict=False):
            axis.plot(kept, gained, color=colour, linestyle=line, marker=".", label=label)
            for one, x, y in zip(measured, kept, gained, strict=True):
                if one.alpha == alpha:
                    axis.plot([x], [y], color=colour, marker="o", markersize=10, fillstyle="none")
                if line == "-":
                    axis.annotate(f"{one.alpha:g}", (x, y), (5, 5), textcoords="offset points", fontsize=8)
        axis.set_xlabel(f"kept on {without_formulas(guard)} (%)")
        axis.grid(alpha=0.3)
        axis.margins(0.08)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, ncols=2)
    axes[0].set_ylabel("gained: score on what was trained for (%)")
    figure.suptitle(f"Averages from the start (0) to the end (1); the ring is the saved one, {alpha:g}", fontsize=10)
    figure.savefig(path)
