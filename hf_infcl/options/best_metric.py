"""The metric of an evaluation by which checkpoints are chosen or the learning rate falls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..data import ZeroShotDataset
from ..evaluation.metrics import metrics_of_kind
from .combinations import SCHEDULES_BY_METRIC
from .declaring import spelled


def use_of_metric(options: Any) -> str | None:
    """The option for which Trainer looks up a metric after every evaluation, or None if there is no such option."""
    schedule = spelled(options.lr_scheduler_type)
    uses = {
        "early_stopping_patience": options.early_stopping_patience is not None,
        "load_best_model_at_end": options.load_best_model_at_end,
        "save_strategy='best'": options.save_strategy == "best",
        f"lr_scheduler_type={schedule!r}": schedule in SCHEDULES_BY_METRIC,
        "metric_for_best_model": options.metric_for_best_model is not None,
    }
    return next((use for use, is_set in uses.items() if is_set), None)


def check_metric_of_training(options: Any, evaluated: object) -> None:
    """Raises a ValueError if a training would look up a metric that its evaluations do not measure."""
    use = use_of_metric(options)
    if use is not None and options.eval_strategy != "no":
        check_metric(str(options.metric_for_best_model), metrics_of(evaluated), use)


def metrics_of(dataset: object) -> list[str]:
    """The names of the metrics of a set, without the prefix ``eval_``; for a dictionary of sets with their names."""
    if isinstance(dataset, Mapping):
        return [f"{name}_{metric}" for name, one in dataset.items() for metric in metrics_of(one)]
    if isinstance(dataset, ZeroShotDataset):
        return list(metrics_of_kind(dataset.kind, len(dataset.class_names)))
    return list(metrics_of_kind(getattr(dataset, "kind", "pairs")))


def check_metric(wanted: str, names: Sequence[str], use: str) -> None:
    """Raises a ValueError if the metric that an option (``use``) looks up is not measured.

    It is with or without ``eval_``; the names of those that are measured are without.
    """
    if (name := wanted.removeprefix("eval_")) not in names:
        looked_up = use if use == "metric_for_best_model" else f"{use} looks up metric_for_best_model, which"
        raise ValueError(f"{looked_up} must be one of {', '.join(names)}, got {name!r}.")
