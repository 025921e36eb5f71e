"""Tells a person at a terminal what a training logs and measures: a line for each log, a small table for each set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState, TrainingArguments

from ..evaluation.intervals import Difference
from ..evaluation.metrics import CHANGE, HIGH, LOW, METRICS, SCORES, parts_of_score, score_if_measured
from ..files.text import aligned

if TYPE_CHECKING:
    from ..trainer.trainer import InfCLTrainer


HEAD = ("set", "metric", "value", "95% interval", "before", "change")
MEAN = "mean recall@1"  # the name of a score that is the mean of several metrics
# In a line of the log they would only repeat others, or tell what few look at; all are in trainer_state.json.
UNTOLD = set(
    "samples_seen train_seconds total_flos epoch grad_norm_image grad_norm_text loader_samples_per_second "
    "slowest_rank slowest_rank_seconds".split()
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
        self._told: dict[str, int] = {}  # the sets in the last table, to which the next one may belong, with its step
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: TrainerState, control: object, **kwargs: object) -> None:
        if not state.is_world_process_zero:
            return
        if checkpoint := self._trainer.resumption.checkpoint:
            tqdm.write(f"Resumed from {checkpoint}, after step {state.global_step:,} of {state.max_steps:,}.")
        elif args.resume_from_checkpoint == "auto":
            tqdm.write(f"There is no checkpoint in {args.output_dir} to resume from: the training begins.")
        if table := self._trainer.optimization.table_of_groups:
            tqdm.write(table)

    def on_log(self, args: Any, state: TrainerState, control: object, logs: Any = None, **kwargs: object) -> None:
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
            self._told = {}

    def _tell_evaluation(self, args: TrainingArguments, state: TrainerState, logs: Mapping[str, object]) -> None:
        datasets: Any = self._trainer.eval_dataset
        names, first = list(datasets), [entry for entry in state.log_history if entry["step"] == 0 < state.global_step]
        before = {name: value for entry in first for name, value in entry.items()}
        sets = {row[0] for row in make_rows(logs, names)}
        is_again = any(self._told.get(name) == state.global_step for name in sets)  # the best ones, or an average
        brief = 0 < state.global_step < state.max_steps and not is_again
        deciding = (args.metric_for_best_model or "").removeprefix("eval_")
        lines = table_lines(make_rows(logs, names, before, also=deciding, brief=brief), names)
        if state.global_step in self._told.values() and not is_again:
            lines = lines[1:]
        else:
            after = "With the weights that are saved:" if is_again else f"After step {state.global_step:,}:"
            lines.insert(0, after if state.global_step else "Before the training:")
            self._told = {}
        self._told |= dict.fromkeys(sets, state.global_step)
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
    brief: bool = False,
    every: bool = False,
) -> list[tuple[str, ...]]:
    """The rows of a table under `HEAD`: a set, a metric, its value and interval, its value before and the change.

    Shares are in per cent. The change of a score has its paired interval.

    Args:
        metrics: of an evaluation, named ``eval_{set}_{metric}``, with their bounds.
        names: of the sets.
        before: the metrics before the training.
        also: a further metric to show, as ``{set}_{metric}``.
        brief: leave out the parts of a score whose mean is shown.
        every: show all metrics, not only the loss and the parts of the score.
    """
    rows: list[tuple[str, ...]] = []
    for name in names:
        prefix = f"eval_{name}_"
        now, old = (
            {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            for values in (metrics, before or {})
        )
        scored = parts_of_score(now)
        shown = {"loss", MEAN, also.removeprefix(f"{name}_"), *(() if brief and len(scored) > 1 else scored)}
        if len(scored) > 1:
            now[MEAN], old[MEAN] = score_if_measured(now), score_if_measured(old)
        for metric in [metric for metric in (*METRICS, MEAN) if metric in now and (every or metric in shown)]:
            factor, digits, unit = (1, 3, "") if metric == "loss" else (100, 2, "%")
            ends = [f"{100 * now[metric + end]:.2f}" for end in (LOW, HIGH) if metric + end in now]
            cells = [f"{factor * now[metric]:.{digits}f}{unit}", f"[{', '.join(ends)}]" if ends else "", "", ""]
            if old.get(metric) is not None and math.isfinite(now[metric]):
                paired = [now.get(CHANGE + end) for end in (LOW, HIGH)] if metric == MEAN or scored == (metric,) else ()
                change = Difference(old[metric], now[metric], *paired).words(factor, digits)
                cells[2:] = f"{factor * old[metric]:.{digits}f}{unit}", change
            rows.append((name, metric, *cells))
    return rows


def table_lines(rows: Sequence[tuple[str, ...]], names: Iterable[str] = ()) -> list[str]:
    """The lines of a table with its head; columns without any entry are left out, and a set is named once.

    With the ``names`` of all sets, several tables have columns of one width.
    """
    used = [n for n, _ in enumerate(HEAD) if any(row[n] for row in rows)]
    longest = max(len(metric) for parts in SCORES.values() for metric in parts)
    least = (max(map(len, names), default=0), longest, 7, 14, 7, 0)
    sets = [row[0] for row in rows]
    shown = [("" if row[0] == last else row[0], *row[1:]) for row, last in zip(rows, ["", *sets], strict=False)]
    cells = [[row[n] for n in used] for row in (HEAD, *shown)]
    return aligned(cells, right=[at for at, n in enumerate(used) if n in (2, 3, 4)], least=[least[n] for n in used])
