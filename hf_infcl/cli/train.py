"""`infcl train`: trains a model and writes the checkpoint with its results, curves and model card."""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from ..card.callback import CardCallback
from ..card.facts import scores_by_width
from ..card.outcome import doubtful_rate, earlier_best, lines_of_changes, outcome
from ..card.pictures import PicturesCallback
from ..card.settings import precision
from ..card.telling import ProgressPrinter
from ..data import ImageTextDataset, ZeroShotDataset
from ..models.adapters import ADAPTER_FILES, has_adapters
from ..models.open_clip import compare_formats
from ..options.arguments import InfCLTrainingArguments
from ..processes.signals import Preempted
from ..quality.averages import Averaged, described
from ..step.extensions import of_kind
from ..step.selection import WithoutNoisyPairs
from ..trainer.checkpoints import full_disk_explained
from ..trainer.loop_events import measured_last
from ..trainer.model_files import average_with_start, checkpoint_of_end, main_weights, merge_into_start, model_to_train
from ..trainer.trainer import InfCLTrainer
from . import description
from .check import short_check
from .datasets import describe_sets, evaluation_datasets, guard_datasets, replay_set, training_set, what_was_measured
from .defaults import check_average, check_embedded, chooses_model, print_choices
from .dry_run import dry_run, write_nothing
from .embeddings import ledger_lines, write_ledger_of_training
from .launched import leave, mistakes_in_one_line
from .models import write_averages
from .parser import Parser


@record  # so the launcher's last lines are the error of the process that failed first
def train(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Trains, evaluates, and writes checkpoint, results, curves and card into --output_dir."""
    model_options, lora, data, columns, evaluation, keep, args = parser.build(namespace, user_options)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        check_embedded(args.teacher_embeddings, parser.words)
        alpha = check_average(keep, evaluation, args)
        description.check_output_folder(args.output_dir, model_options, data, evaluation, keep)
        earlier = description.earlier_results(Path(args.output_dir), args.resume_from_checkpoint)
        if data.dry_run:
            write_nothing(args)
        elif earlier and not data.overwrite_output_dir:
            names = ", ".join(path.name for path in earlier)
            first = "It has no checkpoint to continue from:"
            if not args.resume_from_checkpoint:
                first = "Continue it with --resume_from_checkpoint auto,"
            raise ValueError(
                f"{args.output_dir} holds an earlier run ({names}). {first} choose another --output_dir, or delete it "
                "with --overwrite_output_dir."
            )
        train_dataset, old_pairs = training_set(data, columns, args), replay_set(data, columns, args)
        chooses = chooses_model(args, keep)
        gains = evaluation_datasets(columns, evaluation, data, chooses=chooses)
        eval_datasets = gains | guard_datasets(columns, keep, evaluation, data, chooses=chooses)
        model, processor, conversion = model_to_train(model_options, lora, args)
        adapted = has_adapters(model)
        trainer = InfCLTrainer(
            model,
            args,
            train_dataset=train_dataset,
            replay_dataset=old_pairs,
            eval_dataset=eval_datasets or None,
            processing_class=processor,
        )
        average = None
        if keep.average_with_start is not None:
            if adapted:
                raise ValueError(
                    "--average_with_start averages whole weights, but only adapters train. Omit it, and average the "
                    "start and the adapters after the training with `infcl average`, which merges them first."
                )
            halves = (guard_datasets(columns, keep, evaluation, data, half, chooses=chooses) for half in (0, 1))
            how = {"alpha": alpha, "tolerance": keep.guard_tolerance}
            average = functools.partial(average_with_start, trainer, main_weights(trainer), gains, [*halves], **how)
    if trainer.is_world_process_zero():
        print(*conversion, sep="\n", end="\n" if conversion else "")
        print_choices(args, parser.chosen, trainer.train_dataset)
        for line in (*describe_sets(eval_datasets), *description.overlaps(train_dataset, eval_datasets)):
            print(line)
        with mistakes_in_one_line(parser.prog, of_libraries=True):
            for line in short_check(trainer, train_dataset, data):
                print(line)
        if rate := doubtful_rate(args):
            print(rate)
    if data.dry_run:
        dry_run(trainer, parser.prog)
        return
    if data.overwrite_output_dir:
        trainer.add_callback(
            description.EarlierDeleted([*earlier, *description.weights_of_other_kind(Path(args.output_dir), adapted)])
        )
    if evaluation.eval_pictures:
        PicturesCallback(trainer, eval_datasets["pairs"], evaluation.eval_pictures)  # before the card, which shows it
    describe = description.describe_run(trainer, model_options, data, columns, conversion)
    trainer.add_callback(CardCallback(functools.partial(describe, adapter=adapted)))
    ProgressPrinter(trainer)
    resume: Any = {"true": True, "True": True}.get(args.resume_from_checkpoint, args.resume_from_checkpoint)
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        try:
            trained = trainer.train(resume_from_checkpoint=resume)
        except Preempted as ended:
            leave(trainer, int(ended.code or 0))
            raise
    if trainer.steps_trained == 0 and description.has_results(trainer):
        if trainer.is_world_process_zero():
            print(f"The model, its card and its results in {args.output_dir} stay unchanged.")
        leave(trainer)
        return
    merge = lora.lora_merge
    with mistakes_in_one_line(parser.prog, of_libraries=False), full_disk_explained(Path(args.output_dir)):
        averaged = save_results(trainer, trained.metrics, eval_datasets, average, model_options.model)
        by_width = scores_by_width(trainer, eval_datasets)
        ledger = None
        if isinstance(train_dataset, ImageTextDataset):
            ledger = write_ledger_of_training(trainer, train_dataset)
        if "open_clip" in args.save_formats and trainer.is_world_process_zero():
            print(compared := compare_formats(str(args.output_dir)))
            describe.keywords["settings"]["saved formats"] = f"transformers and OpenCLIP. {compared}"
        facts = describe(adapter=adapted and not merge, average=averaged, scores_by_width=by_width)
        if merge and trainer.is_world_process_zero():
            merge_into_start(model_options, args)
        CardCallback(lambda: facts).write(args, trainer.state)  # save_model puts peft's card in its place
    if args.push_to_hub:
        with mistakes_in_one_line(parser.prog, of_libraries=True):
            trainer.push_folder(delete=ADAPTER_FILES if merge else ())
    if trainer.is_world_process_zero():
        waits_for = "".join(one.waits_for for one in of_kind(trainer.window_step.extensions, WithoutNoisyPairs))
        of_ledger = ledger_lines(ledger, str(args.output_dir), waits_for=waits_for) if ledger else ()
        print(*lines_of_changes(facts), *of_ledger, sep="\n")
        print_where(args, trainer.hub_model_id if args.push_to_hub else None)
        saves_last = average is None and not args.load_best_model_at_end
        best = earlier_best(trainer.state.log_history, facts) if saves_last else ""
        for line in filter(None, (outcome(facts), best)):
            print(line)
    leave(trainer)


def save_results(
    trainer: InfCLTrainer,
    metrics: dict[str, float],
    eval_datasets: Mapping[str, ImageTextDataset | ZeroShotDataset],
    average: Callable[[], Averaged] | None,
    start: str,
) -> Averaged | None:
    """Writes the model, the metrics of the training and of the final evaluation, and the trainer's state; collective.

    With ``average``, the weights are those that it finds between ``start``, a Hub id or folder, and the end of the
    training. Returns what it has found; None without it.
    """
    if trainer.steps_trained > 0:  # otherwise the run before has trained to the end, and ended before its results
        resumed = trainer.state.global_step - trainer.steps_trained  # the step since which the metrics count
        trainer.save_metrics("train", metrics | ({"train_since_step": resumed} if resumed else {}))
    trainer.save_model(_internal_call=True)  # without a push, which has to include the results
    saved = None
    if average is not None:
        saved = average()
        trainer.save_model(_internal_call=True)
        if trainer.is_world_process_zero():
            end, folder = checkpoint_of_end(trainer), Path(str(trainer.args.output_dir))
            write_averages(folder, saved, start, str(end))
            print(*described(saved), f"The average at alpha {saved.alpha:g} is saved; the end is {end}.", sep="\n")
    if eval_datasets:
        state = trainer.state
        step = state.best_global_step if trainer.args.load_best_model_at_end else state.global_step  # of the weights
        of_last = average is None and step == state.global_step
        measured = measured_last(state, eval_datasets) if of_last else {}
        described_sets = what_was_measured(eval_datasets) | {"eval_precision": precision(trainer)}
        trainer.save_metrics("eval", (measured or trainer.evaluate()) | described_sets)
    trainer.save_state()
    return saved


def print_where(args: InfCLTrainingArguments, hub_model_id: str | None) -> None:
    """Prints where the results are."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"The curves were not drawn: `pip install matplotlib`, and `infcl card {args.output_dir}` draws them.")
    pushed = f" and on the Hub as {hub_model_id}" if hub_model_id else ""
    print(f"The model, its card (README.md) and its results (*.json) are in {args.output_dir}{pushed}.")
