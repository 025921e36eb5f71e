"""`infcl compare`: two models on the same evaluation sets."""

from __future__ import annotations

import argparse
from typing import Any

from ...conversion.models import load, load_config
from ...training.trainer import InfCLTrainer
from ..publishing import quieten
from ..publishing.comparison import comparison, lines_of_comparison, write_comparison
from .datasets import check_columns, describe_sets, evaluation_datasets
from .launched import leave, mistakes_in_one_line, tell_deepspeed_of_cpu
from .parser import Parser


def compare(parser: Parser, namespace: argparse.Namespace, given: set[str]) -> None:
    """Measures both models, prints a table and writes compare_results.json and compare.png into --output_dir."""
    if not (namespace.eval_dataset or namespace.zero_shot_dataset or namespace.eval_benchmark):
        parser.error("There is nothing to compare on. Pass --eval_dataset, --zero_shot_dataset or --benchmark.")
    columns, evaluation, args = parser.build(namespace)
    tell_deepspeed_of_cpu(args)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        for name in (namespace.first, namespace.second):
            load_config(name)  # a wrong name is told before the first model is measured
        datasets = evaluation_datasets(columns, evaluation)
        check_columns(columns, datasets)
    trainer: Any = None
    results: list[dict[str, Any]] = []
    for name in (namespace.first, namespace.second):
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
        found = {key: comparison(s, *(one[f"eval_{key}"] for one in results)) for key, s in datasets.items()}
        write_comparison(args.output_dir, found, namespace.first, namespace.second)
        print(*lines_of_comparison(found), f"All results are in {args.output_dir}.", sep="\n")
    leave(trainer)
