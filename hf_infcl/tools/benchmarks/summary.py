"""The scores of benchmarks: the main metric of each, and the means of the groups that were named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...data.images import ImageDataset
from ...evaluation.metrics import METRICS, SCORES
from .names import GROUPS, MAIN_METRICS, benchmark_key


def scores(metrics: Mapping[str, float], sets: Mapping[str, ImageDataset]) -> dict[str, tuple[str, float]]:
    """(main metric, its value) of each benchmark by its name.

    The metrics are named ``eval_{key}_...`` by the keys of the sets, some of which may be no benchmarks.
    """
    results = {}
    for key, dataset in sets.items():
        if (files := getattr(dataset, "benchmark", None)) is not None:
            names = MAIN_METRICS.get(files.name, SCORES[getattr(dataset, "kind", "pairs")])
            values = [metrics[f"eval_{key}_{name}"] for name in names]
            words = "mean recall@1" if len(names) > 1 else METRICS[names[0]].words
            results[files.name] = words, sum(values) / len(values)
    return results


def means_of_groups(
    metrics: Mapping[str, float], sets: Mapping[str, ImageDataset], named: Sequence[str] | None
) -> dict[str, float]:
    """``eval_mean_{group}``: the mean score of each group that was named."""
    values = {name: value for name, (_, value) in scores(metrics, sets).items()}
    groups = [name for name in dict.fromkeys(named or ()) if name in GROUPS]
    return {f"eval_mean_{benchmark_key(g)}": sum(values[n] for n in GROUPS[g]) / len(GROUPS[g]) for g in groups}


def lines_of_scores(
    metrics: Mapping[str, float], sets: Mapping[str, ImageDataset], means: Mapping[str, float]
) -> Iterator[str]:
    """Lines with the main metric of each benchmark and the means of `means_of_groups`, in per cent."""
    results = scores(metrics, sets)
    of_groups = {name.removeprefix("eval_"): value for name, value in means.items()}
    width = max((len(name) for name in (*results, *of_groups)), default=0)
    for name, (words, value) in results.items():
        yield f"{name:<{width}}  {100 * value:6.2f}%  {words}"
    for name, value in of_groups.items():
        yield f"{name:<{width}}  {100 * value:6.2f}%  mean of the scores above that belong to it"
