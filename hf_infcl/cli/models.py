"""`infcl average`: averages the weights before and after a fine-tuning, and measures what that gains and keeps.

`infcl convert`: writes a model of OpenCLIP in transformers' format, or the other way round.

`infcl card`: writes the model card of a folder again, from the facts that `infcl train` left there."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ..card.callback import write_publication
from ..card.facts import TrainingFacts, source_name
from ..card.telling import quieten
from ..models.open_clip import convert as converted
from ..models.open_clip import load
from ..processes.lock import check_writable
from ..quality.averages import SPLIT, Averaged, described, interpolated, not_trained, with_halves
from ..trainer.checkpoints import full_disk_explained
from ..trainer.trainer import InfCLTrainer
from ..trainer.with_start import find_average, main_weights
from .datasets import check_columns, evaluation_datasets, guard_datasets
from .defaults import read_alpha
from .launched import leave, mistakes_in_one_line
from .parser import Parser


def average(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Writes the averaged model and, with sets to measure it on, the results of all averages."""
    options, columns, evaluation, guards, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        alpha = read_alpha("alpha", options.alpha, guards, evaluation)
        if evaluation.eval_pictures:
            raise ValueError("--eval_pictures draws those of one model. Omit it, and draw them with `infcl evaluate`.")
        if args.fsdp:
            raise ValueError(
                "The weights of an average are changed as a whole, which FSDP does not allow. Omit its options, or "
                "start the command with scripts/configs/ddp.yaml."
            )
        _check_output_dir(args.output_dir, namespace.start, namespace.end)
        chooses = alpha is None
        gains = evaluation_datasets(columns, evaluation, chooses=chooses)
        halves = [guard_datasets(columns, guards, evaluation, half=half, chooses=chooses) for half in (0, 1)]
        if sets := gains | with_halves(*halves):
            check_columns(columns, sets)
        start = load(namespace.start).model.state_dict()
        model, processor, _ = load(namespace.end)
        interpolated(start, model.state_dict(), 1.0)  # raises here, on every process, if these are different models
        trainer = InfCLTrainer(model, args, eval_dataset=sets or None, processing_class=processor)
        quieten(trainer)
        if args.process_index == 0:
            check_writable(str(args.output_dir))  # before all averages are measured
    folder = Path(args.output_dir)
    with mistakes_in_one_line(parser.prog, of_libraries=False), full_disk_explained(folder, "again"):
        end, tolerance = main_weights(trainer), guards.guard_tolerance
        averaged = find_average(trainer, start, end, gains, halves, alpha=alpha, tolerance=tolerance)
        trainer.save_model(_internal_call=True)
        if args.process_index == 0:
            (folder / TRAINING_ARGS_NAME).unlink()  # those of the command, which trained nothing
            write_averages(folder, averaged, namespace.start, namespace.end)
    if args.process_index == 0:
        lines = (
            *described(averaged),
            f"The average at alpha {averaged.alpha:g} is in {folder}.",
            not_trained(averaged),
        )
        print(*filter(None, lines), sep="\n")
    leave(trainer)


def write_averages(folder: Path, average: Averaged, start: str, end: str) -> None:
    """Writes what was measured of averages between two models, of which the file has the Hub ids or folders' names."""
    if not average.measured:
        return
    results = {
        "start": source_name(start)[0],
        "end": source_name(end)[0],
        "alpha": average.alpha,
        "chosen": average.tolerance is not None,
        "guard_tolerance": average.tolerance,
        "scores": "recall@1 (mean of both directions) of pairs, top-1 accuracy of classes",
        "split": SPLIT,
        "measured": [asdict(one) for one in average.measured],
    }
    text = json.dumps(results, indent=2, ensure_ascii=False)
    (folder / "average_results.json").write_text(f"{text}\n", encoding="utf-8")


def _check_output_dir(output_dir: str | None, start: str, end: str) -> None:
    """Raises a ValueError if the average would be written over a model, or no folder is named for it."""
    if not output_dir:
        raise ValueError("--output_dir is empty. Name the folder that the average is written into.")
    folder = Path(output_dir)
    if any(folder.resolve() == Path(source).resolve() for source in (start, end)) or any(
        (folder / name).exists() for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME)
    ):
        raise ValueError(f"--output_dir {output_dir} already holds a model. Choose another --output_dir.")


def convert(parser: argparse.ArgumentParser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Converts, and prints what was written and how it compares."""
    with mistakes_in_one_line(parser.prog, of_libraries=True), full_disk_explained(Path(namespace.target), "again"):
        for sentence in converted(**vars(namespace)):
            print(sentence)


def card(parser: argparse.ArgumentParser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Writes the card, and the curves if the folder has the log of the training."""
    folder = Path(namespace.folder)
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        facts, log = TrainingFacts.load(folder), folder / TRAINER_STATE_NAME
        try:
            state = TrainerState.load_from_json(str(log)) if log.is_file() else TrainerState()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{log} is damaged: {error}. Without that file the card has no curves.") from error
    write_publication(facts, folder, state)
    print(f"The card was written to {folder / 'README.md'}.")
