"""Draws the curves of a run: its losses, accuracies and recalls over the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...evaluation.metrics import CEILING, FRACTION, HIGH, LOW, METRICS, Metric, metric_named

# Okabe and Ito's colours, which the colour-blind can tell apart: blue, vermilion, green, purple, orange, sky blue.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

TRAINING, LEFT_OUT = "training loss (nats)", "share of the pairs"  # axes beside those of evaluations

Line = dict[int, float]  # values by optimizer step


def plot_curves(log_history: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Draws the training loss and, in separate panels, the losses and the scores of the evaluations.

    With ``leave_out``, a panel shows the share of the pairs that was left out.

    A contrastive loss grows with the number of pairs over which it is computed. The losses of global batches and of
    evaluation sets therefore cannot be compared and share no axis. Of two evaluations at one step, only the first is
    drawn, because with ``load_best_model_at_end`` the second uses the weights of an earlier step. The 95% intervals of
    scores are shaded. Each axis shows the range of its values.

    Args:
        log_history: ``trainer.state.log_history``: dicts with "step" and any of "loss" and "eval_..." keys.
        path: the picture, PNG or another format of matplotlib.

    Raises:
        ValueError: the history holds no training loss.
    """
    # pyplot is avoided because it keeps global state and chooses a display, which a library should not do.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    of_metrics = [metric.axis for metric in METRICS.values() if metric.axis is not None]
    panels: dict[str, dict[str, Line]] = {axis: {} for axis in (TRAINING, LEFT_OUT, *of_metrics)}
    ceilings: dict[str, float] = {}  # by the label of the score
    intervals: dict[str, dict[int, tuple[float, float]]] = {}
    for entry in log_history:
        for key, value in entry.items():
            metric = metric_named(key) if key.startswith("eval_") else None
            if value is None:
                continue
            if key == "loss":
                pairs = entry.get("global_batch_size")
                axis, name = TRAINING, f"one batch of {pairs:,} pairs" if pairs else "one batch"
            elif key == "left_out":
                axis, name = LEFT_OUT, "pairs left out of the training"
            elif metric is not None and metric.axis is not None:
                axis, name = metric.axis, _label(key, metric)
            else:
                continue
            panels[axis].setdefault(name, {}).setdefault(entry["step"], value)
            if key + LOW in entry:
                intervals.setdefault(name, {}).setdefault(entry["step"], (entry[key + LOW], entry[key + HIGH]))
            if entry.get(key + CEILING, 1) < 1:
                ceilings[name] = entry[key + CEILING]
    if not panels[TRAINING]:
        raise ValueError("The log history holds no training loss. Lower logging_steps to at most the number of steps.")

    panels = {axis: lines for axis, lines in panels.items() if lines}
    names = sum(len(lines) for lines in panels.values())  # each takes a line of its own above its panel
    figure = Figure(figsize=(7, 0.5 + 2.3 * len(panels) + 0.2 * names), layout="constrained", dpi=150)
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (label, lines) in zip(axes, panels.items(), strict=True):
        bottom, top = _limits(lines, intervals, label)
        for index, (name, points) in enumerate(lines.items()):
            colour = COLOURS[index % len(COLOURS)]
            if ceilings.get(name, top) < top:
                axis.axhline(ceilings[name], color=colour, linestyle="--", linewidth=1)
            if between_at := intervals.get(name):
                axis.fill_between(
                    [*between_at], *zip(*between_at.values(), strict=True), color=colour, alpha=0.15, lw=0
                )
            at_most = f" (at most {ceilings[name]:.2f})" if name in ceilings else ""
            axis.plot(points.keys(), points.values(), color=colour, marker=".", clip_on=False, label=name + at_most)
        axis.set_ylabel(label)
        axis.set_ylim(bottom, top)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
    axes[-1].set_xlabel("optimizer step")
    figure.savefig(path)


def _limits(
    lines: Mapping[str, Line], intervals: Mapping[str, Mapping[int, tuple[float, float]]], label: str
) -> tuple[float, float]:
    """The lower and the upper end of an axis, a little beyond its values and their intervals; of shares within 0 and 1.

    Curves that change little would be flat lines on an axis from 0. A ceiling far above them has no line.
    """
    values = [value for points in lines.values() for value in points.values()]
    values += [bound for name in lines for bounds in intervals.get(name, {}).values() for bound in bounds]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    low, high = low - margin, high + margin
    return (max(low, -0.02), min(high, 1.02)) if label == FRACTION else (low, high)


def _label(key: str, metric: Metric) -> str:
    """The set, if it has a name, and what was measured: "pairs: image retrieval recall@1"."""
    (name,) = (name for name, known in METRICS.items() if known is metric)
    place = key.removeprefix("eval_").removesuffix(name).replace("_", " ").strip()
    # matplotlib takes what is between two dollars for a formula.
    return (f"{place}: " if place else "").replace("$", r"\$") + metric.words
