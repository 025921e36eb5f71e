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
    """Draws the gain of every average, and what each guard keeps, over α and in per cent; 95% intervals are shaded.

    Of a guard both halves are drawn, the one that chooses and the one that reports. Which of them differ by more than
    noise can be seen from the intervals, also where a guard has few rows.

    Args:
        measured: all averages, with a gain and the same guards.
        alpha: of the average that is saved, at which a line stands.
        path: the picture, PNG or another format of matplotlib.
    """
    from matplotlib.figure import Figure

    guards = list(measured[0].rest)
    figure = Figure(figsize=(1 + 3.8 * (1 + len(guards)), 3.6), layout="constrained", dpi=150)
    axes = figure.subplots(ncols=1 + len(guards), squeeze=False)[0]
    alphas = [one.alpha for one in measured]
    panels: list[tuple[str, list[float], list[tuple[float, float] | None], list[float]]] = [
        ("gained on what was trained for", [one.gained or 0.0 for one in measured], [_gained(o) for o in measured], [])
    ]
    for guard in guards:
        kept, bounds = [one.rest[guard] for one in measured], [one.rest_bounds.get(guard) for one in measured]
        panels.append((f"kept on {without_formulas(guard)}", kept, bounds, [o.validation[guard] for o in measured]))
    for axis, colour, (title, values, bounds, choosing) in zip(axes, COLOURS, panels, strict=False):
        axis.axvline(alpha, color="#888888", linewidth=1, linestyle=":")
        shaded = [(a, *between) for a, between in zip(alphas, bounds, strict=True) if between is not None]
        if shaded:
            at, low, high = zip(*shaded, strict=True)
            axis.fill_between(
                at, *([100 * end for end in ends] for ends in (low, high)), color=colour, alpha=0.15, lw=0
            )
        label = "the half that reports" if choosing else None
        axis.plot(alphas, [100 * value for value in values], color=colour, marker=".", label=label)
        if choosing:
            label = "the half that chooses"
            axis.plot(alphas, [100 * value for value in choosing], color=colour, linestyle="--", lw=1, label=label)
            axis.legend(frameon=False, fontsize=8)
        axis.set_title(f"{title} (%)", fontsize=9)
        axis.set_xlabel("α, from the start (0) to the end (1)", fontsize=9)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Averages of the weights; the saved one is at {alpha:g}", fontsize=10)
    figure.savefig(path)


def _gained(one: Measured) -> tuple[float, float] | None:
    return None if one.gained_low is None or one.gained_high is None else (one.gained_low, one.gained_high)
