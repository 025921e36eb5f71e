"""Two models on one evaluation set: the differences in lines of text, in JSON and in pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...data import ImageTextDataset, ZeroShotDataset
from ...evaluation import (
    Choices,
    ClassRanks,
    Difference,
    Found,
    LabelScores,
    PairRanks,
    differences,
    differences_by_class,
)
from ...evaluation.metrics import METRICS
from ...shards.values import counted
from ..checking.looking import thumbnail
from ..checking.sheet import draw_rows
from ..scoring.sheet import lines_of

PICTURES = 16  # of the images that only one of the models gets right
EvaluationSet = ImageTextDataset | ZeroShotDataset
_RIGHT_BY = ("text_retrieval_recall@1", "acc1", "text_acc")  # by which an image is right; a kind of set has one
_CLASSES = 10  # lines of classes; the JSON has all


@dataclass(frozen=True)
class Comparison:
    """Two models on one set."""

    dataset: EvaluationSet
    ranks: tuple[Found, Found]  # of the first model, and of the second
    metrics: Mapping[str, Difference]
    classes: Mapping[int, Difference]  # of the recall of each class that occurs, by its number; empty for pairs

    def wins(self, model: int) -> list[int]:
        """The rows that the first (0) or second (1) model alone gets right.

        The most confident mistakes of the other model come first: those whose answer exceeds the right one most.
        """
        rankings = [ranks for ranks in self.ranks if not isinstance(ranks, LabelScores)]
        if not rankings:
            return []  # an image of several classes is neither right nor wrong
        right = [ranks.right for ranks in rankings]
        rows = (right[model] & ~right[1 - model]).nonzero()[:, 0]
        order = rankings[1 - model].gaps[rows].argsort(descending=True, stable=True)
        return rows[order].tolist()


def comparison(dataset: EvaluationSet, first: Found, second: Found) -> Comparison:
    """Compares two models by their ranks on a set."""
    classes: dict[int, Difference] = {}
    if isinstance(first, ClassRanks) and isinstance(second, ClassRanks):
        classes = differences_by_class(first, second)
    return Comparison(dataset, (first, second), differences(first, second), classes)


def write_comparison(folder: str | Path, comparisons: Mapping[str, Comparison], first: str, second: str) -> None:
    """Writes compare_results.json and, if the models differ on an image, compare.png, of comparisons by their sets."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    results = {"first": first, "second": second, **{key: _results(one) for key, one in comparisons.items()}}
    (folder / "compare_results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    (folder / "compare.png").unlink(missing_ok=True)  # of an earlier command
    if rows := [row for key, one in comparisons.items() for row in _pictures(key, one)]:
        draw_rows(rows, lines=4).save(folder / "compare.png")


def lines_of_comparison(comparisons: Mapping[str, Comparison]) -> Iterator[str]:
    """Tables in lines of text, in per cent, with the classes whose differences beyond noise are largest."""
    for key, one in comparisons.items():
        yield from _lines(key, one)
    yield "In brackets are the 95% intervals of the differences (paired bootstrap over the images)."


def _lines(key: str, compared: Comparison) -> Iterator[str]:
    head = f"{key}: {counted(len(compared.dataset), 'image')}"
    width = max(28, len(head) - 2, *(len(METRICS[name].words) for name in compared.metrics))
    yield f"{head:<{width + 2}}{'first':>9}  second   difference"
    for name, difference in compared.metrics.items():
        yield f"  {METRICS[name].words:<{width}}{_numbers(difference)}"
    clear = [(label, one) for label, one in compared.classes.items() if not one.is_noise]
    clear.sort(key=lambda item: -abs(item[1].second - item[1].first))
    if compared.classes:
        yield f"  {len(clear)} of {len(compared.classes)} classes differ by more than noise" + (":" if clear else ".")
    for label, one in clear[:_CLASSES]:
        yield f"    {''.join(lines_of(_class_name(compared.dataset, label), 26, 1)):<{width - 2}}{_numbers(one)}"
    if not isinstance(compared.ranks[0], LabelScores):
        only = [f"{len(compared.wins(model)):,}" for model in (0, 1)]
        by = next(METRICS[name].words for name in _RIGHT_BY if name in compared.metrics)
        yield f"  images that only the first gets right: {only[0]}, that only the second gets right: {only[1]} ({by})"


def _numbers(one: Difference) -> str:
    return f"{100 * one.first:8.2f}% {100 * one.second:7.2f}%   {one.words(100, 2)}"


def _results(compared: Comparison) -> dict[str, Any]:
    """What `lines_of_comparison` tells, complete, for JSON: fractions, and the rows on which the models differ."""
    named = {f"{label} {_class_name(compared.dataset, label)}": asdict(one) for label, one in compared.classes.items()}
    return {
        "images": len(compared.dataset),
        "metrics": {name: asdict(one) for name, one in compared.metrics.items()},
        **({"classes": named} if named else {}),
        "right_by_first_alone": compared.wins(0),
        "right_by_second_alone": compared.wins(1),
    }


def _pictures(key: str, compared: Comparison) -> Iterator[tuple[str, Sequence[tuple[bytes, tuple[str, str]]]]]:
    """Titled rows of pictures of what each model alone gets right."""
    for model, (winner, loser) in enumerate((("first", "second"), ("second", "first"))):
        rows = compared.wins(model)
        wrong: Any = compared.ranks[1 - model]
        shown = []
        for row in rows[:PICTURES]:
            right, answer = _right_and_answer(compared.dataset, wrong, row)
            shown.append((thumbnail(compared.dataset.image(row)), (right, f"{loser} model: {answer}")))
        if shown:
            yield f"{key}: right by the {winner} model alone, {len(rows):,} of {len(compared.dataset):,} images", shown


def _right_and_answer(dataset: EvaluationSet, ranks: PairRanks | ClassRanks | Choices, row: int) -> tuple[str, str]:
    """The class or first caption of a row, and what the model answers."""
    answer = int(ranks.answers[row])
    if isinstance(ranks, ClassRanks):
        return _class_name(dataset, int(ranks.labels[row])), _class_name(dataset, answer)
    assert isinstance(dataset, ImageTextDataset)
    if isinstance(ranks, Choices):
        captions = dataset.without_image(row)["caption"]
        return captions[0], captions[answer]
    owner = int(ranks.text_image[answer])
    number = answer - int(torch.searchsorted(ranks.text_image, owner))  # captions are in the order of their images
    return dataset.without_image(row)["caption"][0], dataset.without_image(owner)["caption"][number]


def _class_name(dataset: EvaluationSet, label: int) -> str:
    assert isinstance(dataset, ZeroShotDataset)
    return dataset.class_names[label]
