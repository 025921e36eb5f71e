"""`infcl evaluate`: zero-shot classification, or loss and retrieval on image-text pairs, or both."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...conversion.models import load
from ...training.set_by_set import evaluate_sets
from ...training.trainer import InfCLTrainer
from ..benchmarks.summary import lines_of_scores, means_of_groups
from ..publishing.facts import facts_of_model
from ..publishing.pictures import PicturesCallback
from ..publishing.settings import precision
from ..publishing.telling import make_rows, quieten, table_lines
from .datasets import check_columns, describe_sets, evaluation_datasets, what_was_measured
from .launched import leave, mistakes_in_one_line
from .parser import Parser


def other_loss(trainer: InfCLTrainer, model: str, pairs: object) -> Iterator[str]:
    """A line if the loss of pairs is computed otherwise than in the training whose record is in the model's folder."""
    ids = getattr(pairs, "pair_id_column", None)
    with suppress(ValueError):  # a model from elsewhere has no record
        facts = facts_of_model(model)
        trained = facts.objective, facts.equal_ids, facts.pair_id_column
        # The columns of two sets may have different names: it only counts whether there is one.
        measured = trainer.setup.objective, trainer.setup.equal_ids, ids and (facts.pair_id_column or ids)
        compared = zip(("objective", "equal_ids", "pair_id_column"), trained, measured, strict=True)
        other = [f"--{name} {value}" if value else f"no --{name}" for name, value, now in compared if value != now]
        if other and pairs is not None:
            had = " and ".join(other)
            yield f"The loss of pairs is not that of the training, which had {had}. Recalls are the same."


def evaluate(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Measures a checkpoint, prints a table and writes eval_results.json into --output_dir."""
    if not (namespace.eval_dataset or namespace.zero_shot_dataset or namespace.eval_benchmark):
        parser.error("There is nothing to measure. Pass --eval_dataset, --zero_shot_dataset or --benchmark.")
    of_model, columns, evaluation, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        datasets = evaluation_datasets(columns, evaluation)
        check_columns(columns, datasets)
        model, processor, conversion = load(of_model.model, of_model.open_clip_model, tokenizer=of_model.tokenizer)
        trainer = InfCLTrainer(model, args, eval_dataset=datasets, processing_class=processor)
    quieten(trainer)
    if trainer.is_world_process_zero():
        of_loss = other_loss(trainer, of_model.model, datasets.get("pairs"))
        print(*conversion, *describe_sets(datasets), *of_loss, sep="\n")
    if evaluation.eval_pictures:
        PicturesCallback(trainer, datasets["pairs"], evaluation.eval_pictures)
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        metrics = evaluate_sets(trainer, datasets)
    means = means_of_groups(metrics, datasets, evaluation.eval_benchmark)
    computed = precision(trainer)
    how = {"eval_precision": computed} | ({} if args.dims is None else {"eval_dims": args.dims})
    trainer.save_metrics("eval", metrics | means | what_was_measured(datasets) | how, combined=False)
    if trainer.is_world_process_zero():
        print(*table_lines(make_rows(metrics, datasets, every=True)), sep="\n")
        print(*lines_of_scores(metrics, datasets, means), sep="\n")
        cut = "" if args.dims is None else f" with the first {args.dims} dimensions of the embeddings"
        print(f"Measured in {computed}{cut}; another precision rounds otherwise, and changes a few answers.")
        print(f"The results were written to {Path(args.output_dir) / 'eval_results.json'}.")
    leave(trainer)
