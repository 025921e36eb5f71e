"""Weighted sums of metrics, as the metric by which checkpoints are chosen."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..evaluation.metrics import metric_named

_SIGN = re.compile(r"\s+([+-])\s+")  # only with spaces, because names of sets may have such characters
_WEIGHT = re.compile(r"(-?)(?:(\d+(?:\.\d*)?|\.\d+)\*)?(.+)")


def parse_terms(metric: str) -> list[tuple[float, str]]:
    """The weights and the metrics, without ``eval_``, of a sum such as ``"0.5*pairs_acc - guard1_old_loss"``.

    A metric alone is a sum of one term.
    """
    first, *rest = _SIGN.split(metric.strip())
    terms = []
    for sign, term in [("+", first), *zip(rest[::2], rest[1::2], strict=True)]:
        parts = _WEIGHT.fullmatch(term)
        if parts is None:
            raise ValueError("metric_for_best_model is empty. Name a metric, or leave it out.")
        minus, weight, name = parts.groups()
        factor = float(weight or 1) * (-1 if minus else 1)
        terms.append((-factor if sign == "-" else factor, name.removeprefix("eval_")))
    return terms


def is_sum(metric: str | None) -> bool:
    """Whether a metric is a weighted sum, which no evaluation measures itself."""
    return metric is not None and [weight for weight, _ in parse_terms(metric)] != [1.0]


def value_of(metric: str, metrics: Mapping[str, float]) -> float | None:
    """The value of a metric or a sum of them (see `parse_terms`); None if one of its terms was not measured."""
    terms = parse_terms(metric)
    if any(f"eval_{name}" not in metrics for _, name in terms):
        return None
    return sum(weight * metrics[f"eval_{name}"] for weight, name in terms)


def key_of(metric: str) -> str:
    """The key under which Trainer looks up its metric_for_best_model."""
    return metric if metric.startswith("eval_") else f"eval_{metric}"


def with_sum(metrics: dict[str, float], metric: str | None) -> dict[str, float]:
    """The metrics of an evaluation, and the sum of them that ``metric`` asks for, if all its terms are there."""
    if metric is None or not is_sum(metric) or (value := value_of(metric, metrics)) is None:
        return metrics
    return {**metrics, key_of(metric): value}


def greater_is_better(metric: str) -> bool | None:
    """Whether the best model has the largest value; None for a metric that is not in the table.

    Raises:
        ValueError: in a sum, which should be large, a term has the wrong sign.
    """
    if not is_sum(metric):
        measured = metric_named(metric)
        return None if measured is None else measured.greater_is_better
    for weight, name in parse_terms(metric):
        measured = metric_named(name)
        if measured is not None and (weight > 0) != measured.greater_is_better:
            better, sign = ("greater", "plus") if measured.greater_is_better else ("smaller", "minus")
            raise ValueError(
                f"The sum {metric!r} of metric_for_best_model is to be large, but {name} is better the {better} it is. "
                f"Give it a {sign}, or set greater_is_better."
            )
    return True
