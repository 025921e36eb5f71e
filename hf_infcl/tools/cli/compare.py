"""`infcl compare`: two models on the same evaluation sets."""

from __future__ import annotations

import argparse
from typing import Any

from ...conversion.models import load, load_config
from ...encoders.dual_encoder import DualEncoder, check_type_of_config
from ...training.trainer import InfCLTrainer
from ..publishing.comparison import comparison, lines_of_comparison, write_comparison
from ..publishing.telling import quieten
from .datasets import check_columns, describe_sets, evaluation_datasets
from .launched import leave, mistakes_in_one_line
from .parser import Parser


def compare(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Measures both models, prints a table and writes compare_results.json and compare.png into --output_dir."""
    if not (namespace.eval_dataset or namespace.zero_shot_dataset or namespace.eval_benchmark):
        parser.error("There is nothing to compare on. Pass --eval_dataset, --zero_shot_dataset or --benchmark.")
    every = namespace.dims if isinstance(namespace.dims, list) else [namespace.dims]
    if len(every) > 2:
        parser.error(f"--dims takes one number for both models, or one for each, got {len(every)}: {every}.")
    models = []
    for name, dims in ((namespace.first, every[0]), (namespace.second, every[-1])):
        namespace.dims = dims
        columns, evaluation, args = parser.build(namespace)
        models.append((name, args))
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        for name, _ in models:
            check_type_of_config(load_config(name), name)  # what is wrong is told before the first model is measured
        for name, one in models:
            if one.dims is not None and one.dims > (width := DualEncoder(load(name).model).width()):
                raise ValueError(
                    f"--dims {one.dims} does not fit the embeddings of {name}, which have {width} dimensions. Choose "
                    f"at most {width} for this model."
                )
        datasets = evaluation_datasets(columns, evaluation)
        check_columns(columns, datasets)
    trainer: Any = None
    results: list[dict[str, Any]] = []
    for name, args in models:
        with mistakes_in_one_line(parser.prog, of_libraries=True):
            trainer = None  # its model makes room for the next
            model, processor, conversion = load(name)
            trainer = InfCLTrainer(model, args, eval_dataset=datasets, processing_class=processor)
            quieten(trainer)
        if trainer.is_world_process_zero():
            print(*conversion, *(describe_sets(datasets) if not results else ()), sep="\n")
        with mistakes_in_one_line(parser.prog, of_libraries=False):
            trainer.evaluate()
        results.append(trainer.found)
    if trainer.is_world_process_zero():
        comparisons = {key: comparison(s, *(one[f"eval_{key}"] for one in results)) for key, s in datasets.items()}
        first, second = (name if one.dims is None else f"{name}, {one.dims} dimensions" for name, one in models)
        write_comparison(args.output_dir, comparisons, first, second)
        print(
            f"first: {first}\nsecond: {second}",
            *lines_of_comparison(comparisons),
            f"All results are in {args.output_dir}.",
            sep="\n",
        )
    leave(trainer)
