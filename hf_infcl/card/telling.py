"""Tells a person what a training logs, measures, gains and costs, and what makes it doubtful that it taught anything.

`ProgressPrinter` tells it at a terminal while the model trains; a card and the end of the command tell the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState, TrainingArguments

from ..evaluation.intervals import Difference
from ..evaluation.metrics import CHANGE, HIGH, LOW, METRICS, SCORES, parts_of_score, score_if_measured
from ..files.text import aligned, counted, joined
from ..optim.groups import NAMES
from ..options.arguments import InfCLTrainingArguments
from ..options.declaring import spelled
from ..quality.averages import not_trained
from .facts import Evaluation, TrainingFacts

if TYPE_CHECKING:
    from ..trainer.trainer import InfCLTrainer

# ---- At a terminal while the model trains ----

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
        rows = make_rows(logs, names, before)
        sets = {name for name, *_ in rows}
        is_again = any(self._told.get(name) == state.global_step for name in sets)  # the best ones, or an average
        brief = 0 < state.global_step < state.max_steps and not is_again
        parts = [name for of_kind in SCORES.values() for name in of_kind if len(of_kind) == 1 or not brief]
        told, deciding = ("loss", MEAN, *parts), (args.metric_for_best_model or "").removeprefix("eval_")
        rows = [row for row in rows if row[1] in told or f"{row[0]}_{row[1]}" == deciding]
        lines = table_lines(rows, names)
        if state.global_step in self._told.values() and not is_again:
            lines = lines[1:]
        else:
            after = "With the weights that are saved:" if is_again else f"After step {state.global_step:,}:"
            lines.insert(0, after if state.global_step else "Before the training:")
            self._told = {}
        self._told |= dict.fromkeys(sets, state.global_step)
        tqdm.write("\n".join(lines))


def short(value: object) -> str:
    """A logged value with four digits that count."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def make_rows(
    metrics: Mapping[str, Any], names: Iterable[str], before: Mapping[str, Any] | None = None
) -> list[tuple[str, ...]]:
    """The rows of a table under `HEAD`: a set, a metric, its value and interval, its value before and the change.

    Shares are in per cent. The change of a score has its paired interval. An evaluation and the one ``before`` the
    training name their metrics, and the bounds of these, ``eval_{set}_{metric}``.
    """
    rows: list[tuple[str, ...]] = []
    for name in names:
        prefix = f"eval_{name}_"
        now, old = (
            {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            for values in (metrics, before or {})
        )
        scored = parts_of_score(now)
        if len(scored) > 1:
            now[MEAN], old[MEAN] = score_if_measured(now), score_if_measured(old)
        for metric in [metric for metric in (*METRICS, MEAN) if metric in now]:
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
    metric = max((name for parts in SCORES.values() for name in parts), key=len)
    widest = (max(names, key=len, default=""), metric, "100.00%", "[10.00, 99.99]", "100.00%", "")
    shown = [("" if row[0] == last[0] else row[0], *row[1:]) for row, last in zip(rows, [("",), *rows], strict=False)]
    cells = [[row[n] for n in used] for row in (widest, HEAD, *shown)]
    return aligned(cells, right=[at for at, n in enumerate(used) if n in (2, 3, 4)])[1:]


# ---- What the training has gained and cost ----

_SCORE_OF = {  # by the kind of set
    "pairs": "the recall@1 of pairs (the mean of both directions)",
    "classes": "the top-1 accuracy of classes",
    "labels": "the mean average precision of images with several classes",
    "choices": "the share of right captions preferred to wrong ones",
}
_INTERVAL = "In brackets is the 95% interval (paired bootstrap over images). If it includes 0, the change may be noise."


class Change(NamedTuple):
    """The change of the score of one set by a training."""

    evaluation: Evaluation
    score: Difference  # from before the training to after it
    half: bool  # whether the scores are of that half of the rows by which no average was chosen


def changes(facts: TrainingFacts) -> list[Change]:
    """The sets that were measured before and after a training: first those that it was for, then the guards.

    If a guard has chosen the average with the start, its scores are those of the other half of its rows.
    """
    average, found = facts.average, []
    for one in sorted(facts.evaluations, key=lambda one: one.guard):
        before, after = score_if_measured(one.before), one.score
        ends = [one.metrics.get(CHANGE + end) for end in (LOW, HIGH)]
        if half := one.guard and average is not None and average.tolerance is not None:
            before, after = (average.at(alpha).rest[one.key] for alpha in (0, average.alpha))
            ends = []
        if before is not None and after is not None:
            found.append(Change(one, Difference(before, after, *ends), half))
    return found


def way(evaluation: Evaluation, facts: TrainingFacts) -> str:
    """How it measures its images, " (captions)" or " (classes)", if others measure the same ones; otherwise nothing."""
    if [one.images for one in facts.evaluations].count(evaluation.images) == 1:
        return ""
    return " (classes)" if evaluation.class_names else " (captions)"


def explained(set_changes: Sequence[Change]) -> str:
    """The sentences that explain the scores of these sets and their intervals."""
    sentence = words_of_scores([change.evaluation.metrics for change in set_changes])
    return f"{sentence} {_INTERVAL}" if any(change.score.low is not None for change in set_changes) else sentence


def words_of_scores(measured: Sequence[Mapping[str, float]]) -> str:
    """A sentence that says which metrics the scores of these sets are."""
    scored = {*map(parts_of_score, measured)}
    return f"The score is {joined([words for kind, words in _SCORE_OF.items() if SCORES[kind] in scored])}."


def lines_of_changes(facts: TrainingFacts) -> Iterator[str]:
    """A table of `changes` in lines of text, in per cent; nothing if no set was measured before the training."""
    if not (set_changes := changes(facts)):
        return
    rows: list[tuple[str, ...]] = [("", "before", "after", "change")]
    for one in set_changes:
        guard = "  guard" if one.evaluation.guard else ""
        half = " (the half of its rows that did not choose the average)" if one.half else ""
        numbers = [f"{100 * value:6.2f}%" for value in (one.score.first, one.score.second)]
        place = f"{one.evaluation.dataset}, {one.evaluation.part}{way(one.evaluation, facts)}"
        rows.append((place, *numbers, f"{one.score.words(100, 2)}{guard}{half}"))
    yield from aligned(rows, right=(1, 2))
    yield explained(set_changes)


TOO_FEW_STEPS = 100  # for a schedule; fine-tuning 128 steps of 512 pairs has learned (scripts/real_pairs)
# A step of Adam moves a weight by about the learning rate, and one of Muon a matrix by a fifth of its rate (root mean
# square); weights of towers are about 0.02. So a thousand steps below the first number change them by a twentieth, and
# one step at the second replaces them. Fine-tuning by AdamW takes 1e-6 to 1e-4, adapters and random weights 1e-4 to
# 1e-2. Muon was best at 2e-3 to 4e-3 (scripts/real_pairs), and takes four times AdamW's rate by default.
RATES = {"adamw": (1e-6, 1e-1), "muon": (4e-6, 1e-1)}
# Standard deviation of the losses of single pairs, in nats, and the standard errors by which a mean is clearly lower.
_DEVIATION, _CLEARLY = 2.0, 2.0


def outcome(facts: TrainingFacts) -> str:
    """A sentence, if the model was not trained or it is doubtful that it has learned; otherwise nothing.

    Few steps and unusual rates are told only if no measurement shows that they were enough.
    """
    if facts.average is not None and (sentence := not_trained(facts.average)):
        return sentence
    learned = [shown for evaluation in facts.evaluations if (shown := _has_learned(evaluation, facts)) is not None]
    if any(learned):
        return ""
    reasons = [doubt for rate in facts.rates.items() if (doubt := _doubt_of_rate(*rate))]
    if facts.steps < TOO_FEW_STEPS:
        reasons.insert(0, f"the training made {counted(facts.steps, 'step')} instead of a few hundred")
    if learned:
        rose = any(one.before for one in facts.evaluations if not one.guard)
        beyond = "rose beyond its 95% interval" if rose else "is clearly above chance"
        reasons.append(f"no score of what it was trained for {beyond}")
    return f"It is doubtful that this model has learned anything: {'; '.join(reasons)}." if reasons else ""


def earlier_best(history: Sequence[Mapping[str, Any]], facts: TrainingFacts) -> str:
    """A sentence, if a set that the model was trained for had a better score long before the end; otherwise nothing.

    It is better if it lies above the 95% interval of the last one; where the score is of both directions, above the
    mean of their bounds. ``history`` is Trainer's ``log_history``; the training has saved its last weights.
    """
    for evaluation in facts.evaluations:
        high = score_if_measured(evaluation.metrics, end=HIGH)
        if evaluation.guard or high is None:
            continue
        prefix = f"eval_{evaluation.key}_"
        scores = [(score_if_measured(entry, prefix), -entry["step"]) for entry in history if entry["step"]]
        best, step = max(((score, step) for score, step in scores if score is not None), default=(0.0, 0))
        if best > high:
            return (
                f"The best score of {evaluation.dataset}, {evaluation.part}, was {best:.2%} after step {-step:,}, and "
                f"{evaluation.score:.2%} at the end, outside of its 95% interval. --load_best_model_at_end saves the "
                "best model."
            )
    return ""


def doubtful_rate(args: InfCLTrainingArguments) -> str:
    """A sentence, before a training, if its learning rate is one of which `outcome` will doubt that it teaches."""
    rate = args.learning_rate
    if rate == 0:
        return "The learning rate is 0, so that no weight changes. Fine-tuning takes about 1e-5 (--learning_rate 1e-5)."
    if "adam" not in spelled(args.optim) or not (doubt := _doubt_of_rate("adamw", rate)):
        return ""
    advice = "Fine-tuning takes about 1e-5, training from random weights 1e-3 (--learning_rate)."
    return f"{doubt[0].upper()}{doubt[1:]}. {advice}"


def _doubt_of_rate(algorithm: str, rate: float) -> str:
    """Part of a sentence about a learning rate by which weights hardly change or are replaced."""
    low, high = RATES[algorithm]
    of = f"the learning rate of {NAMES[algorithm]} is {rate:g}"
    if rate < low:
        return f"{of}, below {low:g}, so that weights hardly change"
    return f"{of}, at least {high:g}, so that each step replaces the weights" if rate >= high else ""


def _has_learned(evaluation: Evaluation, facts: TrainingFacts) -> bool | None:
    """Whether a set that the model was trained for shows that it has learned; None if it cannot show it.

    Only the parts of its score count, above what guessing gives: among ten classes, a top-5 accuracy rises by chance.
    """
    before, after = evaluation.before, evaluation.metrics
    names = [name for name in parts_of_score(before or after) if name + LOW in after]
    if evaluation.guard or not names:
        return None
    chance = 1 / (len(evaluation.class_names) or evaluation.size)  # to be exceeded if none was measured before
    risen = [max(before.get(name, chance), chance) < after[name + LOW] for name in names]
    changed = after.get(CHANGE + LOW, 0.0) > 0 and any(after[name] > chance for name in names)
    return any(risen) or changed or _has_lower_loss(evaluation, facts)


def _has_lower_loss(evaluation: Evaluation, facts: TrainingFacts) -> bool:
    """Whether the loss is clearly lower than before, and than that of a model that tells no pair from another.

    Where captions repeat, the loss may show what no recall can.
    """
    before, after = evaluation.before.get("loss"), evaluation.metrics.get("loss")
    if before is None or after is None or facts.objective != "softmax":
        return False
    return after < min(before, math.log(evaluation.size)) - _CLEARLY * _DEVIATION / math.sqrt(evaluation.size)
