"""Tells a person at a terminal what a training logs and measures: a line for each log, a small table for each set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..evaluation.intervals import Difference
from ..evaluation.metrics import CHANGE, HIGH, LOW, METRICS, SCORES, score_if_measured

if TYPE_CHECKING:
    from ..trainer.trainer import InfCLTrainer


HEAD = ("set", "metric", "value", "95% interval", "before", "change")
# In a line of the log they would only repeat others, or tell what few look at; all are in trainer_state.json.
UNTOLD = set(
    "samples_seen train_seconds total_flos epoch grad_norm_image grad_norm_text loader_samples_per_second".split()
)
SHORT = {"learning_rate": "lr", "positive_cosine": "cosine", "samples_per_second": "samples/s"}  # names in such a line


def quieten(trainer: InfCLTrainer) -> None:
    """Keeps Trainer from printing its logs as dicts; its progress bars stay."""
    trainer.remove_callback(PrinterCallback)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback):
            bar: Any = callback
            bar.on_log = lambda *args, **kwargs: None


class ProgressPrinter(TrainerCallback):
    """Prints the groups of the optimizer, a line for each log of the training and a table for each evaluation.

    A value that stays the same is told once. The tables have the loss and the score of each set, and the metric that
    decides, if there is one; those in the midst of the training leave out the two recalls whose mean is the score. The
    rest is in the results. The ``eval_dataset`` of the trainer, if any, is a dict.
    """

    def __init__(self, trainer: InfCLTrainer) -> None:
        quieten(trainer)
        self._trainer = trainer
        self._last: dict[str, Any] = {}  # the values that were told last
        self._headed: int | None = None  # the step of the last table, to which the next set may belong
        self._told: set[str] = set()  # the sets in it
        trainer.add_callback(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not state.is_world_process_zero:
            return
        if checkpoint := self._trainer.resumption.checkpoint:
            tqdm.write(f"Resumed from {checkpoint}, after step {state.global_step:,} of {state.max_steps:,}.")
        elif args.resume_from_checkpoint == "auto":
            tqdm.write(f"There is no checkpoint in {args.output_dir} to resume from: the training begins.")
        if table := self._trainer.optimization.table_of_groups:
            tqdm.write(table)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if any(name.startswith("eval_") for name in logs):
            self._tell_evaluation(args, state, logs)
        elif "train_runtime" in logs and self._trainer.steps_trained == 0:
            tqdm.write(
                f"This run was finished before, after step {state.global_step:,}, so nothing was trained. To train on, "
                f"start anew from its weights: --model {args.output_dir} and another --output_dir."
            )
        elif "train_runtime" in logs:
            seconds, loss = logs["train_runtime"], logs["train_loss"]
            resumed = state.global_step - self._trainer.steps_trained
            since = f" since step {resumed:,}" if resumed else ""
            tqdm.write(f"The training took {seconds:,.0f} s{since}; its mean loss{since} was {loss:.4g}.")
        else:
            new = {name for name, value in logs.items() if self._last.get(name) != value or name == "loss"} - UNTOLD
            self._last |= logs
            words = [f"{SHORT.get(name, name)} {short(value)}" for name, value in logs.items() if name in new]
            tqdm.write(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join(words)}")
            self._headed = None

    def _tell_evaluation(self, args: TrainingArguments, state: TrainerState, logs: Mapping[str, object]) -> None:
        datasets: Any = self._trainer.eval_dataset
        names = list(datasets)
        before: dict[str, Any] = {}
        for entry in state.log_history:
            if entry["step"] == 0 < state.global_step:
                before |= entry
        deciding = args.metric_for_best_model or ""
        rows = make_rows(logs, names, before, also=deciding.removeprefix("eval_"))
        sets = {row[0] for row in rows}
        is_again = self._headed == state.global_step and not sets.isdisjoint(self._told)  # the best ones, or an average
        if 0 < state.global_step < state.max_steps and not is_again:
            kept = {f"{name}_{metric}" for name, metric, *_ in rows if metric not in SCORES["pairs"]}
            kept.add(deciding.removeprefix("eval_"))
            rows = [row for row in rows if f"{row[0]}_{row[1]}" in kept]
        lines = table_lines(rows, names)
        if self._headed == state.global_step and not is_again:
            lines = lines[1:]
        else:
            after = "With the weights that are saved:" if is_again else f"After step {state.global_step:,}:"
            lines.insert(0, after if state.global_step else "Before the training:")
            self._told = set()
        self._headed = state.global_step
        self._told |= sets
        for line in lines:
            tqdm.write(line)


def short(value: object) -> str:
    """A logged value with four digits that count."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def make_rows(
    metrics: Mapping[str, Any],
    names: Iterable[str],
    before: Mapping[str, Any] | None = None,
    *,
    also: str = "",
    every: bool = False,
) -> list[tuple[str, ...]]:
    """The rows of a table under `HEAD`: a set, a metric, its value and interval, its value before and the change.

    Shares are in per cent. The change of a score has its paired interval.

    Args:
        metrics: of an evaluation, named ``eval_{set}_{metric}``, with their bounds.
        names: of the sets.
        before: the metrics before the training.
        also: a further metric to show, as ``{set}_{metric}``.
        every: show all metrics, not only the loss and the parts of the score.
    """
    before = before or {}
    rows: list[tuple[str, ...]] = []
    for name in names:
        prefix = f"eval_{name}_"
        measured = {metric: prefix + metric for metric in METRICS if prefix + metric in metrics}
        scored = next((parts for parts in SCORES.values() if measured.keys() >= set(parts)), ())
        bounds = [metrics.get(prefix + CHANGE + end) for end in (LOW, HIGH)]
        for metric, key in measured.items():
            if every or metric == "loss" or metric in scored or f"{name}_{metric}" == also:
                paired = bounds if scored == (metric,) else ()
                rows.append((name, metric, *_cells(metric, metrics, key, before.get(key), paired)))
        if len(scored) > 1:
            value, old = score_if_measured(metrics, prefix), score_if_measured(before, prefix)
            rows.append((name, "mean recall@1", *_cells("", {"": value}, "", old, bounds)))
    return rows


def _cells(
    metric: str, metrics: Mapping[str, Any], key: str, old: float | None, bounds: Sequence[float | None]
) -> tuple[str, str, str, str]:
    """Value, interval, value before, change."""
    is_loss = metric == "loss"
    value, factor, digits = metrics[key], 1 if is_loss else 100, 3 if is_loss else 2
    shown = [f"{factor * one:.{digits}f}{'' if is_loss else '%'}" for one in (value, old or 0.0)]
    interval = ""
    if key + LOW in metrics:
        interval = f"[{100 * metrics[key + LOW]:.2f}, {100 * metrics[key + HIGH]:.2f}]"
    if old is None or not math.isfinite(value):
        return shown[0], interval, "", ""
    return shown[0], interval, shown[1], Difference(old, value, *bounds).words(factor, digits)


def table_lines(rows: Sequence[tuple[str, ...]], names: Iterable[str] = ()) -> list[str]:
    """The lines of a table with its head; columns without any entry are left out, and a set is named once.

    With the ``names`` of all sets, several tables have columns of one width.
    """
    used = [n for n, _ in enumerate(HEAD) if any(row[n] for row in rows)]
    cells = [HEAD, *rows]
    widths = [max(len(row[n]) for row in cells) for n in range(len(HEAD))]
    widths[0] = max([widths[0], *map(len, names)])
    widths[1] = max([widths[1], *(len(metric) for parts in SCORES.values() for metric in parts)])
    widths[2:5] = [max(width, least) for width, least in zip(widths[2:5], (7, 14, 7), strict=True)]
    lines, last = [], ""
    for row in cells:
        shown = ["" if n == 0 and row[0] == last else row[n] for n in used]
        last = row[0]
        # Words to the left, numbers to the right; the last column may be of any width.
        padded = [f"{cell:{'<' if n in (0, 1, 5) else '>'}{widths[n]}}" for n, cell in zip(used, shown, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines
