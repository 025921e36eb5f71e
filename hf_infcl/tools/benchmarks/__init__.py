"""Named benchmarks: from a name to the evaluation set with its classes, prompts and main metric."""

from .names import benchmark_key, expanded
from .sets import benchmark_sets
from .summary import lines_of_scores, means_of_groups

__all__ = ["benchmark_key", "benchmark_sets", "expanded", "lines_of_scores", "means_of_groups"]
