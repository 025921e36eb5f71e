"""`infcl evaluate`: zero-shot classification, or loss and retrieval on image-text pairs, or both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data import ImageTextDataset, ZeroShotDataset, load_pairs
from ..publishing import PicturesCallback
from ..training.arguments import InfCLTrainingArguments
from ..training.trainer import InfCLTrainer
from .launched import leave, mistakes_in_one_line
from .models import load
from .options import ColumnOptions, EvaluationOptions, ModelOptions, Parser


def evaluate(words: Sequence[str]) -> None:
    """Measures a checkpoint, prints a table and writes eval_results.json into --output_dir."""
    parser = Parser(
        "evaluate",
        "Measure a dual encoder: zero-shot classification, or loss and retrieval on image-text pairs, or both.",
        *(ModelOptions, ColumnOptions, EvaluationOptions, InfCLTrainingArguments),
    )
    namespace, _ = parser.read(words)
    if not (namespace.eval_dataset or namespace.zero_shot_dataset):
        parser.error("There is nothing to measure. Pass --eval_dataset, --zero_shot_dataset or both.")
    model_options, columns, evaluation, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        datasets = evaluation_datasets(columns, evaluation)
        model, processor = load(model_options.model)
        trainer = InfCLTrainer(model, args, eval_dataset=datasets, processing_class=processor)
    if evaluation.eval_pictures:
        PicturesCallback(trainer, datasets["pairs"], evaluation.eval_pictures)
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics, combined=False)
    if trainer.is_world_process_zero():
        print(f"The results were written to {Path(args.output_dir) / 'eval_results.json'}.")
    leave(trainer)


def evaluation_datasets(columns: ColumnOptions, options: EvaluationOptions) -> dict[str, Any]:
    """The requested evaluation datasets, by the prefix of their metrics: "pairs" and "zero_shot"."""
    found: dict[str, Any] = {}
    if options.eval_dataset:
        rows = load_pairs(options.eval_dataset, split=options.eval_split)
        found["pairs"] = ImageTextDataset(rows, all_captions=True, **columns.of_pairs)  # type: ignore[arg-type]
    if options.zero_shot_dataset:
        found["zero_shot"] = ZeroShotDataset(
            load_pairs(options.zero_shot_dataset, split=options.zero_shot_split),
            image_column=columns.image_column,
            label_column=options.label_column,
            class_names=options.class_names,
            templates=options.templates,
        )
    return found
