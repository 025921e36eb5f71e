"""Measures, averages and converts models: `infcl evaluate`, `average` and `convert`; and `infcl card`."""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ..card.cards import write_publication
from ..card.facts import TrainingFacts, facts_of_model, precision, source_name
from ..card.pictures import PicturesCallback
from ..card.telling import make_rows, quieten, table_lines
from ..data import transparency
from ..evaluation.intervals import differences
from ..evaluation.metrics import Found
from ..files.text import aligned, counted
from ..models.dual_encoder import DualEncoder
from ..models.open_clip import convert as converted
from ..models.open_clip import load, load_readers
from ..options.commands import EvaluationOptions
from ..processes.lock import check_writable
from ..quality.averages import SPLIT, Averaged, described, interpolated, not_trained, with_halves
from ..trainer.checkpoints import full_disk_explained
from ..trainer.model_files import find_average
from ..trainer.trainer import InfCLTrainer
from .benchmarks import scores_and_means
from .datasets import Sets, check_columns, describe_sets, evaluation_datasets, guard_datasets, what_was_measured
from .defaults import read_alpha
from .launched import leave, mistakes_in_one_line, tell
from .parser import Parser

OF_ONE_MODEL = ("open_clip_model", "tokenizer", "eval_pictures")  # options that no other of several models shares


def other_loss(trainer: InfCLTrainer, model: str, pairs: object) -> Iterator[str]:
    """Lines on what differs, in the loss of pairs or in images, from the training whose record is in the folder."""
    ids = getattr(pairs, "pair_id_column", None)
    with suppress(ValueError):  # a model from elsewhere has no record
        facts = facts_of_model(model)
        trained = facts.objective, facts.equal_ids, facts.pair_id_column
        # The columns of two sets may have different names: it only counts whether there is one.
        measured = trainer.context.objective, trainer.context.equal_ids, ids and (facts.pair_id_column or ids)
        compared = zip(("objective", "equal_ids", "pair_id_column"), trained, measured, strict=True)
        other = [f"--{name} {value}" if value else f"no --{name}" for name, value, now in compared if value != now]
        if other and pairs is not None:
            had = " and ".join(other)
            yield f"The loss of pairs is not that of the training, which had {had}. Recalls are the same."
        if (before := facts.settings.get("transparency of images", now := transparency())) != now:
            yield f"In the training, transparency of images was {before}. Here it is {now}: transparent images change."


def evaluate(parser: Parser, namespace: argparse.Namespace) -> None:
    """Measures a checkpoint, or several and their differences; writes the results into --output_dir."""
    if not (namespace.eval_dataset or namespace.zero_shot_dataset or namespace.eval_benchmark):
        parser.error("There is nothing to measure. Pass --eval_dataset, --zero_shot_dataset or --benchmark.")
    widths: list[int | None] = namespace.dims or [None]
    names: list[str] = namespace.model
    if len(widths) not in (1, len(names)):
        parser.error(f"--dims takes one number for all models, or one for each of {len(names)}, got {widths}.")
    if len(names) > 1 and (own := [name for name in OF_ONE_MODEL if name in parser.given]):
        parser.error(f"--{own[0]} is of one model, and --model names {len(names)}. Evaluate each alone, or drop it.")
    models = []
    for name, namespace.dims in zip(names, widths * len(names), strict=False):
        of_model, columns, evaluation, args = parser.build(namespace)
        models.append((name, args))
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        datasets = evaluation_datasets(columns, evaluation)
        check_columns(columns, datasets)
        if len(models) > 1:
            _check_models(models)  # before the first one is measured
    trainer: Any = None
    found: list[dict[str, Found]] = []
    for name, args in models:
        with mistakes_in_one_line(parser.prog, of_libraries=True):
            trainer = None  # its model makes room for the next
            model, processor, conversion = load(name, of_model.open_clip_model, tokenizer=of_model.tokenizer)
            trainer = InfCLTrainer(model, args, eval_dataset=datasets, processing_class=processor)
        quieten(trainer)
        if trainer.is_world_process_zero():
            of_loss = other_loss(trainer, name, datasets.get("pairs")) if len(models) == 1 else ()
            tell(trainer, *conversion, *(() if found else describe_sets(datasets)), *of_loss)
        if evaluation.eval_pictures:
            PicturesCallback(trainer, datasets["pairs"], evaluation.eval_pictures)
        metrics = trainer.evaluate()
        found.append({key: trainer.found[f"eval_{key}"] for key in datasets})
    with full_disk_explained(Path(trainer.args.output_dir), "again"):
        if len(models) == 1:
            _write_metrics(trainer, metrics, datasets, evaluation)
        elif trainer.is_world_process_zero():
            _write_differences(models, found, datasets)
    leave(trainer)


def _check_models(models: Sequence[tuple[str, Any]]) -> None:
    """Raises a ValueError if one of several models, each with its arguments, cannot be measured."""
    for name, args in models:
        load_readers(name)  # raises an error for a model that is no dual encoder
        if args.dims is not None and args.dims > (width := DualEncoder(load(name).model).width()):
            raise ValueError(
                f"--dims {args.dims} does not fit the embeddings of {name}, which have {width} dimensions. Take fewer."
            )


def _write_metrics(trainer: Any, metrics: dict[str, float], datasets: Sets, options: EvaluationOptions) -> None:
    """Prints a table of the metrics of one model, and writes eval_results.json; collective."""
    dims = trainer.args.dims
    scores, means = scores_and_means(metrics, datasets, options.eval_benchmark)
    computed = precision(trainer)
    how = {"eval_precision": computed} | ({} if dims is None else {"eval_dims": dims})
    trainer.save_metrics("eval", metrics | means | what_was_measured(datasets) | how, combined=False)
    if trainer.is_world_process_zero():
        print(*table_lines(make_rows(metrics, datasets)), *scores, sep="\n")
        cut = "" if dims is None else f" with the first {dims} dimensions of the embeddings"
        print(f"Measured in {computed}{cut}; another precision rounds otherwise, and changes a few answers.")
        print(f"The results were written to {Path(trainer.args.output_dir) / 'eval_results.json'}.")


def _write_differences(models: Sequence[tuple[str, Any]], found: Sequence[dict[str, Found]], datasets: Sets) -> None:
    """Prints the differences of the other models from the first, and writes compare_results.json."""
    names = [name if args.dims is None else f"{name}, {args.dims} dimensions" for name, args in models]
    sets: dict[str, Any] = {}
    rows = [["", f"{1:>7}", *(head for n in range(2, 1 + len(names)) for head in (f"{n:>7}", f"{n} - 1"))]]
    for key, dataset in datasets.items():
        each = [differences(found[0][key], other[key]) for other in found[1:]]
        sets[key] = {"images": len(dataset), "metrics": {m: [asdict(one[m]) for one in each] for m in each[0]}}
        rows.append([f"{key}: {counted(len(dataset), 'image')}", *[""] * (len(rows[0]) - 1)])
        for metric, of_first in each[0].items():
            cells = [cell for one in each for cell in (f"{100 * one[metric].second:6.2f}%", one[metric].words(100, 2))]
            rows.append([f"  {metric}", f"{100 * of_first.first:6.2f}%", *cells])
    path = Path(models[0][1].output_dir) / "compare_results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"models": names, **sets}, indent=2), encoding="utf-8")
    print(*(f"{number}: {name}" for number, name in enumerate(names, 1)), sep="\n")
    print(*aligned(rows), sep="\n")
    print("In brackets are the 95% intervals of the differences (paired bootstrap over the images).")
    print(f"The results were written to {path}.")


def average(parser: Parser, namespace: argparse.Namespace) -> None:
    """Writes the averaged model and, with sets to measure it on, the results of all averages."""
    _, columns, evaluation, guards, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        alpha = read_alpha("alpha", namespace)
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
    with full_disk_explained(folder, "again"):
        averaged = find_average(trainer, start, gains, halves, alpha=alpha, tolerance=guards.guard_tolerance)
        trainer.save_model(_internal_call=True)
        if args.process_index == 0:
            (folder / TRAINING_ARGS_NAME).unlink()  # those of the command, which trained nothing
            write_averages(folder, averaged, namespace.start, namespace.end)
    where = f"The average at alpha {averaged.alpha:g} is in {folder}."
    tell(trainer, *described(averaged), where, not_trained(averaged))
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
    has_model = any((folder / name).exists() for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME))
    if has_model or folder.resolve() in (Path(start).resolve(), Path(end).resolve()):
        raise ValueError(f"--output_dir {output_dir} already holds a model. Choose another --output_dir.")


def convert(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> None:
    """Converts, and prints what was written and how it compares."""
    with mistakes_in_one_line(parser.prog, of_libraries=True), full_disk_explained(Path(namespace.target), "again"):
        for sentence in converted(**vars(namespace)):
            print(sentence)


def card(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> None:
    """Writes the card, and the curves if the folder has the log of the training."""
    folder = Path(namespace.folder)
    facts, log = TrainingFacts.load(folder), folder / TRAINER_STATE_NAME
    try:
        state = TrainerState.load_from_json(str(log)) if log.is_file() else TrainerState()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{log} is damaged: {error}. Without that file the card has no curves.") from error
    write_publication(facts, folder, state)
    print(f"The card was written to {folder / 'README.md'}.")
