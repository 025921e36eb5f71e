"""`infcl average`: averages the weights before and after a fine-tuning, and measures what that gains and keeps."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...checkpoints.average_options import check_options, check_place, read_alpha
from ...checkpoints.average_search import Measured, described, find_average, measured_at, not_trained, with_halves
from ...checkpoints.between import BetweenCheckpoints
from ...checkpoints.lock import check_writable
from ...conversion.sentence_transformers import write_sentence_files
from ...data import ContrastiveCollator
from ...encoders.adapters import has_adapters
from ...readable import give_usual_modes
from ...training.trainer import InfCLTrainer
from ..publishing.average_card import average_card
from ..publishing.front import write_averages
from ..publishing.telling import quieten
from .datasets import check_columns, evaluation_datasets, guard_datasets
from .description import describe_evaluations
from .launched import leave, mistakes_in_one_line
from .parser import Parser


def average(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Writes the averaged model and its card; with sets to measure it on, the results and a picture of all averages."""
    options, columns, evaluation, guards, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        alpha = read_alpha("alpha", options.alpha, guards, evaluation)
        check_options(args, evaluation)
        check_place(args.output_dir, namespace.start, namespace.end)
        gains = evaluation_datasets(columns, evaluation)
        halves = [guard_datasets(columns, guards, evaluation, half=half) for half in (0, 1)]
        moving = BetweenCheckpoints(namespace.start, namespace.end, options.path)
        trainer = None
        if sets := gains | with_halves(*halves):
            check_columns(columns, sets)
            trainer = InfCLTrainer(moving.model, args, eval_dataset=sets, processing_class=moving.processor)
            quieten(trainer)
        if args.process_index == 0:
            check_writable(str(args.output_dir))  # before all averages are measured

    def measure(alpha: float) -> Measured:
        assert trainer is not None
        return measured_at(alpha, trainer.evaluate(), list(gains), list(halves[0]))

    with mistakes_in_one_line(parser.prog, of_libraries=False):
        averaged = find_average(
            moving.move,
            measure if sets else None,
            alpha=alpha,
            path=options.path,
            tolerance=guards.guard_tolerance,
            batch_norms=moving.batch_norms,
        )
    if args.process_index == 0:
        folder = Path(args.output_dir)
        moving.model.save_pretrained(folder)
        give_usual_modes(folder)
        moving.processor.save_pretrained(folder)
        collator = ContrastiveCollator.for_model(moving.processor, moving.model.config)
        write_sentence_files(folder, moving.model.config.model_type, moving.processor, **collator.text_options)
        write_averages(folder, averaged, namespace.start, namespace.end)
        adapted = has_adapters(moving.model)
        loaded = moving.model.get_base_model() if adapted else moving.model
        average_card(
            folder,
            averaged,
            namespace.start,
            namespace.end,
            model_class=type(loaded).__name__,
            tokens=collator.max_length,
            adapter=adapted,
            evaluations=describe_evaluations(gains | halves[0]),
        ).save(folder / "README.md")  # in the place of peft's
        lines = (
            *described(averaged),
            f"The average at alpha {averaged.alpha:g}, with its card (README.md), is in {folder}.",
            not_trained(averaged),
        )
        print(*filter(None, lines), sep="\n")
    if trainer is not None:
        leave(trainer)
