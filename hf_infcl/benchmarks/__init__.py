"""Named benchmarks: from a name to the evaluation set with its classes, prompts and main metric."""

from .names import benchmark_key, expanded, main_metric
from .sets import benchmark_sets
from .summary import means, table

__all__ = ["benchmark_key", "benchmark_sets", "expanded", "main_metric", "means", "table"]
