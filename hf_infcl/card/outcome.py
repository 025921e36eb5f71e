"""What a training has gained and what it has cost, set by set, and what makes it doubtful that it taught anything."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation.intervals import Difference
from ..evaluation.metrics import CHANGE, HIGH, LOW, SCORES, parts_of_score, score_if_measured
from ..files.text import aligned, counted
from ..optim.groups import NAMES
from ..options.arguments import InfCLTrainingArguments
from ..options.declaring import spelled
from ..quality.averages import not_trained
from .facts import Evaluation, TrainingFacts
from .settings import joined

_SCORE_OF = {  # by the kind of set
    "pairs": "the recall@1 of pairs (the mean of both directions)",
    "classes": "the top-1 accuracy of classes",
    "labels": "the mean average precision of images with several classes",
    "choices": "the share of right captions preferred to wrong ones",
}
_INTERVAL = "In brackets is the 95% interval (paired bootstrap over images). If it includes 0, the change may be noise."


@dataclass
class Change:
    """The change of the score of one set by a training."""

    evaluation: Evaluation
    score: Difference  # from before the training to after it
    half: bool = False  # whether the scores are of that half of the rows by which no average was chosen
    kind: str = ""  # " (captions)" or " (classes)" if the same images were measured in both ways


def changes(facts: TrainingFacts) -> list[Change]:
    """The sets that were measured before and after a training: first those that it was for, then the guards.

    Of a guard that has chosen the average with the start, the scores are those of the other half of its rows.
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
    places = [(change.evaluation.dataset, change.evaluation.split) for change in found]
    for change, place in zip(found, places, strict=True):
        if places.count(place) > 1:
            change.kind = " (classes)" if change.evaluation.class_names else " (captions)"
    return found


def explained(set_changes: Sequence[Change]) -> str:
    """What the scores of these sets are, and their intervals, in sentences."""
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
        place = f"{one.evaluation.dataset}, {one.evaluation.part}{one.kind}"
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
        scores = [(score_if_measured(entry, prefix), entry["step"]) for entry in history if entry["step"]]
        best, step = max(((value, -step) for value, step in scores if value is not None), default=(0.0, 0))
        if best > high:
            last = score_if_measured(evaluation.metrics)
            return (
                f"The best score of {evaluation.dataset}, {evaluation.part}, was {best:.2%} after step {-step:,}, and "
                f"{last:.2%} at the end, outside of its 95% interval. --load_best_model_at_end saves the best model."
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
    known = before or after  # without a measurement before the training, the score is compared with chance
    names = [name for of_kind in SCORES.values() for name in of_kind if name in known and name + LOW in after]
    if evaluation.guard or not names:
        return None
    chance = 1 / (len(evaluation.class_names) or evaluation.size)
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
