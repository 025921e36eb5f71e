"""`infcl score`: writes how well image and caption of each pair of a training set belong together."""

from __future__ import annotations

import argparse
from typing import Any

from ...conversion.models import load
from ...data.sets import SetSpec
from ...options.commands import DataOptions
from ...training.trainer import InfCLTrainer
from ..publishing.facts import content_of, has_learned
from ..scoring.writing import ledger_lines, write_ledger
from .datasets import training_set
from .launched import leave, mistakes_in_one_line
from .parser import Parser


def score(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Scores the pairs, and tells how many are wrong."""
    options, columns, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        if args.fsdp:
            raise ValueError("Every process scores with the whole model. Omit the options of FSDP.")
        chosen = {name: value for name, value in vars(options).items() if name != "window"}
        length = 1 if options.streaming else None  # which a training needs
        named: Any = [SetSpec.read("data", namespace.data)]
        dataset = training_set(DataOptions(named, samples_per_epoch=length, **chosen), columns, args)
        model, processor, conversion = load(namespace.model)
        trainer = InfCLTrainer(model, args, processing_class=processor)
        if trainer.is_world_process_zero():
            print(*conversion, sep="\n", end="\n" if conversion else "")
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        ledger = write_ledger(trainer, dataset, options.window)
    if trainer.is_world_process_zero():
        learned = has_learned(namespace.model, content_of(dataset))
        print(*ledger_lines(ledger, str(args.output_dir), learned=learned), sep="\n")
        if not learned:
            print(
                "A model that was trained on these pairs may know wrong ones by heart. Score with another model, or "
                "train with --leave_out noisy, whose ledger has the scores from during the training."
            )
    leave(trainer)
