"""Named benchmarks: from a name to the evaluation set with its classes, prompts and main metric."""
