"""What a training has gained and what it has cost, in one score for each set that was measured before and after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...evaluation import Difference
from ...evaluation.metrics import CHANGE, HIGH, LOW, SCORES, score_if_measured
from .facts import Evaluation, TrainingFacts
from .markdown import joined

_SCORE_OF = {  # by the kind of set
    "pairs": "the recall@1 of pairs (the mean of both directions)",
    "classes": "the top-1 accuracy of classes",
    "labels": "the mean average precision of images with several classes",
    "choices": "the share of right captions preferred to wrong ones",
}
_INTERVAL = (
    "In brackets is the 95% interval of the change (paired bootstrap over images). If it includes 0, the change may be "
    "noise."
)


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
    found = []
    for one in sorted(facts.evaluations, key=lambda one: one.guard):
        if one.guard and facts.average is not None and facts.average.tolerance is not None:
            before, after = (facts.average.at(alpha).rest[one.key] for alpha in (0, facts.average.alpha))
            found.append(Change(one, Difference(before, after), half=True))
            continue
        old, new = score_if_measured(one.before), one.score
        if old is not None and new is not None:
            bounds = [one.metrics.get(CHANGE + end) for end in (LOW, HIGH)]
            found.append(Change(one, Difference(old, new, *bounds)))
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
    kinds = {kind for kind, names in SCORES.items() if any(all(name in each for name in names) for each in measured)}
    return f"The score is {joined([words for kind, words in _SCORE_OF.items() if kind in kinds])}."


def lines_of_changes(facts: TrainingFacts) -> Iterator[str]:
    """A table of `changes` in lines of text, in per cent; nothing if no set was measured before the training."""
    if not (set_changes := changes(facts)):
        return
    names = [f"{change.evaluation.dataset}, {change.evaluation.part}{change.kind}" for change in set_changes]
    width = max(map(len, names))
    yield f"{'':<{width}}   before    after   change"
    for name, change in zip(names, set_changes, strict=True):
        score = change.score
        numbers = f"{100 * score.first:7.2f}%  {100 * score.second:6.2f}%   {score.words(100, 2)}"
        half = " (the half of its rows that did not choose the average)" if change.half else ""
        yield f"{name:<{width}}  {numbers}{'  guard' if change.evaluation.guard else ''}{half}"
    yield explained(set_changes)
