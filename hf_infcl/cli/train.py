"""`infcl train`: trains a model and writes the checkpoint with its results, curves and model card.

Also what its card says of the options, what becomes of an earlier run in the output folder, and the first steps of a
training with ``--dry_run``, which write nothing, and what they say of all of it.
"""

import argparse
import atexit
import functools
import importlib.util
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy
from transformers.utils import CONFIG_NAME

from ..card import facts
from ..card.cards import CURVES_FILE, CardCallback, escaped
from ..card.pictures import PICTURES_FILE, PicturesCallback
from ..card.telling import ProgressPrinter, doubtful_rate, earlier_best, lines_of_changes, outcome, quieten
from ..data import ImageTextDataset
from ..data.replay import Replayed
from ..data.sets import STATED, SetSpec, read_sets
from ..files.hub import stated_licence
from ..files.text import code, counted, joined
from ..loss.strategies import machines_of
from ..models.adapters import ADAPTER_FILES, describe_adapters, has_adapters
from ..models.open_clip import compare_formats
from ..models.pretrained import base_of_adapters
from ..options.arguments import InfCLTrainingArguments
from ..options.commands import DataOptions, ModelOptions
from ..processes.collectives import Processes
from ..processes.signals import Preempted
from ..quality.averages import Averaged, described
from ..quality.ledger import words_of_excluded
from ..trainer.checkpoints import full_disk_explained
from ..trainer.loop_events import measured_last
from ..trainer.model_files import average_with_start, checkpoint_of_end, main_weights, merge_into_start, model_to_train
from ..trainer.trainer import InfCLTrainer
from . import datasets as sets
from .check import short_check
from .defaults import check_embedded, chooses_model, print_choices, read_alpha
from .embeddings import write_ledger_of_training
from .launched import leave, mistakes_in_one_line, tell
from .models import write_averages
from .parser import Parser


def train(parser: Parser, namespace: argparse.Namespace) -> None:
    """Trains, evaluates, and writes checkpoint, results, curves and card into --output_dir."""
    model_options, lora, data, columns, evaluation, keep, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        check_embedded(args.teacher_embeddings, parser.words)
        check_output_folder(args.output_dir, namespace)
        earlier = earlier_results(Path(args.output_dir), args.resume_from_checkpoint)
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
        train_dataset, old_pairs = sets.training_set(data, columns, args), sets.replay_set(data, columns, args)
        chooses = chooses_model(args, keep)
        gains = sets.evaluation_datasets(columns, evaluation, data, chooses=chooses)
        eval_datasets = gains | sets.guard_datasets(columns, keep, evaluation, data, chooses=chooses)
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
            halves = (sets.guard_datasets(columns, keep, evaluation, data, half, chooses=chooses) for half in (0, 1))
            how = {"alpha": read_alpha("average_with_start", namespace), "tolerance": keep.guard_tolerance}
            average = functools.partial(average_with_start, trainer, main_weights(trainer), gains, [*halves], **how)
    if trainer.is_world_process_zero():
        tell(trainer, *conversion)
        print_choices(args, parser.chosen, trainer.train_dataset)
        tell(trainer, *sets.describe_sets(eval_datasets), *sets.overlaps(train_dataset, eval_datasets))
        with mistakes_in_one_line(parser.prog, of_libraries=True):
            tell(trainer, *short_check(trainer, train_dataset, data))
        tell(trainer, doubtful_rate(args))
    if data.dry_run:
        dry_run(trainer)
        return
    if data.overwrite_output_dir:
        trainer.add_callback(EarlierDeleted([*earlier, *weights_of_other_kind(Path(args.output_dir), adapted)]))
    if evaluation.eval_pictures:
        PicturesCallback(trainer, eval_datasets["pairs"], evaluation.eval_pictures)  # before the card, which shows it
    describe = describe_run(trainer, model_options, data, conversion)
    trainer.add_callback(CardCallback(functools.partial(describe, adapter=adapted)))
    ProgressPrinter(trainer)
    resume: Any = {"true": True, "True": True}.get(args.resume_from_checkpoint, args.resume_from_checkpoint)
    try:
        trained = trainer.train(resume_from_checkpoint=resume)
    except Preempted as ended:
        leave(trainer, int(ended.code or 0))
        raise
    if trainer.steps_trained == 0 and has_results(trainer):
        tell(trainer, f"The model, its card and its results in {args.output_dir} stay unchanged.")
        leave(trainer)
        return
    with full_disk_explained(Path(args.output_dir)):
        averaged = save_results(trainer, trained.metrics, average, model_options.model)
        by_width = facts.scores_by_width(trainer, eval_datasets)
        of_ledger = write_ledger_of_training(trainer, train_dataset)
        if "open_clip" in args.save_formats and trainer.is_world_process_zero():
            print(compared := compare_formats(str(args.output_dir)))
            describe.keywords["settings"]["saved formats"] = f"transformers and OpenCLIP. {compared}"
        facts_of_run = describe(adapter=adapted and not lora.lora_merge, average=averaged, scores_by_width=by_width)
        if lora.lora_merge and trainer.is_world_process_zero():
            merge_into_start(model_options, args)
        CardCallback(lambda: facts_of_run).write(args, trainer.state)  # save_model puts peft's card in its place
    if args.push_to_hub:
        with mistakes_in_one_line(parser.prog, of_libraries=True):
            trainer.push_folder(delete=ADAPTER_FILES if lora.lora_merge else ())
    if trainer.is_world_process_zero():
        folder = str(args.output_dir)
        print(*lines_of_changes(facts_of_run), *of_ledger, sep="\n")
        if importlib.util.find_spec("matplotlib") is None:
            print(f"The curves were not drawn: `pip install matplotlib`, and `infcl card {folder}` draws them.")
        pushed = f" and on the Hub as {trainer.hub_model_id}" if args.push_to_hub else ""
        print(f"The model, its card (README.md) and its results (*.json) are in {folder}{pushed}.")
        saves_last = average is None and not args.load_best_model_at_end
        best = earlier_best(trainer.state.log_history, facts_of_run) if saves_last else ""
        tell(trainer, outcome(facts_of_run), best)
    leave(trainer)


def save_results(
    trainer: InfCLTrainer, metrics: dict[str, float], average: Callable[[], Averaged] | None, start: str
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
            tell(trainer, *described(saved), f"The average at alpha {saved.alpha:g} is saved; the end is {end}.")
    eval_datasets: Any = trainer.eval_dataset
    if eval_datasets:
        state = trainer.state
        step = state.best_global_step if trainer.args.load_best_model_at_end else state.global_step  # of the weights
        of_last = average is None and step == state.global_step
        measured = measured_last(state, eval_datasets) if of_last else {}
        described_sets = sets.what_was_measured(eval_datasets) | {"eval_precision": facts.precision(trainer)}
        trainer.save_metrics("eval", (measured or trainer.evaluate()) | described_sets)
    trainer.save_state()
    return saved


def describe_run(
    trainer: InfCLTrainer, model: ModelOptions, data: DataOptions, conversion: Sequence[str]
) -> functools.partial[facts.TrainingFacts]:
    """`training_facts` with the facts that the options and the trainer know, and what `load` said of a conversion."""
    trained: Any = trainer.train_dataset
    pairs = trained.datasets[0] if isinstance(trained, Replayed) else trained
    eval_datasets: Any = trainer.eval_dataset or {}
    encoder = trainer.dual_encoder
    settings = {"converted": f"from OpenCLIP's format. {escaped(' '.join(conversion))}"} if conversion else {}
    base = None  # the model under the adapters that the start came with
    if has_adapters(encoder.model):  # then only these train
        (words, layers, alpha), base = describe_adapters(encoder.model), base_of_adapters(model.model)
        continued = "" if base is None else f", those of {facts.source_name(model.model)[0]}"
        settings["trained weights"] = words + continued
        settings["layers with adapters"] = joined(list(map(code, layers))) + (f"; alpha {alpha:g}" if alpha else "")
    if not encoder.temperature_parameters[0].requires_grad:
        settings["logit_scale"] = f"{encoder.scale_and_bias()[0].item():.4g}, frozen"
    if excluded := [f"{which} by {code(file)}" for which, file in map(words_of_excluded, data.exclude or ())]:
        settings["pairs excluded before"] = joined(excluded)
    settings["image preprocessing"] = trainer.context.collator.image_backend
    return functools.partial(
        facts.training_facts,
        trainer,
        model_class=type(encoder.base).__name__,
        start=(base or model.model).removeprefix("hf-hub:"),
        random_start=encoder.looks_random(),
        sources=describe_sources(data),
        content=facts.content_of(pairs),
        replay_sources=[_source(spec, "train") for spec in read_sets("replay_dataset", data.replay_dataset)],
        pairs=len(pairs) if isinstance(pairs, ImageTextDataset) else None,
        pair_id_column=pairs.pair_id_column,
        evaluations=[*describe_evaluations(eval_datasets)],
        settings=settings,
    )


def describe_sources(options: DataOptions) -> list[facts.Source]:
    """The training data for the card, with the licences that the Hub states."""
    weights = sets.mixture_weights(options)
    shares = [None] * len(options.dataset) if weights is None else [weight / sum(weights) for weight in weights]
    specs = read_sets("dataset", options.dataset)
    return [_source(spec, options.split, share) for spec, share in zip(specs, shares, strict=True)]


def _source(spec: SetSpec, split: str, share: float | None = None) -> facts.Source:
    name, is_on_hub = facts.source_name(spec.path)
    licence = stated_licence(name, "dataset") if is_on_hub else None
    return facts.Source(name, is_on_hub, spec.split or split, licence, share)


def describe_evaluations(datasets: sets.Sets) -> Iterator[facts.Evaluation]:
    """The evaluation data for the card; the metrics come from the logs."""
    for key, dataset in datasets.items():
        files = dataset.benchmark
        (name, on_hub) = facts.source_name(dataset.source) if files is None else (files.dataset, files.on_hub)
        split, revision = (dataset.split or "test", None) if files is None else ("test", files.revision)
        is_guard = key.startswith("guard")
        yield facts.Evaluation(name, on_hub, split, len(dataset), key, guard=is_guard, revision=revision)


RESULTS = ("*_results.json", ".eval_results", "trainer_state.json", facts.FACTS_FILE, CURVES_FILE, PICTURES_FILE)
LAST_RESULTS = ("eval_results.json", TRAINER_STATE_NAME)  # written only at the end of a run


def earlier_results(folder: Path, resume: str | None) -> list[Path]:
    """The checkpoints and results of an earlier run in the folder, unless this run continues it.

    With ``"auto"``, a run that ended before its first checkpoint and before its results starts again.
    """
    checkpoints = list(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    is_unfinished = not any((folder / name).exists() for name in LAST_RESULTS)
    if resume and (checkpoints or resume != "auto" or is_unfinished):
        return []
    return sorted([*checkpoints, *(path for pattern in RESULTS for path in folder.glob(pattern))])


def weights_of_other_kind(folder: Path, adapters: bool) -> list[Path]:
    """The whole model of an earlier run if this one saves adapters, or its adapters, which would be added to this one.

    A folder that holds both is loaded as both together.
    """
    patterns = (CONFIG_NAME, "model*.safetensors*") if adapters else ADAPTER_FILES
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


class EarlierDeleted(TrainerCallback):
    """Deletes the results of an earlier run once a training begins, which no wrong option can prevent any more.

    That is done on every machine that saves its own results.
    """

    def __init__(self, results: Sequence[Path]) -> None:
        self._results = results

    def on_train_begin(self, args: Any, state: object, control: object, **kwargs: object) -> None:
        for path in self._results if args.should_save else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def has_results(trainer: InfCLTrainer) -> bool:
    """Whether the results in output_dir belong to the current step; the same answer on all processes."""
    path = Path(str(trainer.args.output_dir), TRAINER_STATE_NAME)
    try:
        written = TrainerState.load_from_json(str(path)).global_step == trainer.state.global_step
    except (OSError, ValueError, TypeError):  # it is missing, or a run was killed while it wrote the file
        written = False
    return bool(Processes().agree([written])[0][0])


def check_output_folder(output_dir: str | None, options: argparse.Namespace) -> None:
    """Raises a ValueError if the results would overwrite the model, or be written among the files of a dataset."""
    output = Path(str(output_dir)).resolve()
    datasets = [(role, spec.path) for role in STATED for spec in read_sets(role, getattr(options, role, None))]
    base = base_of_adapters(options.model) if Path(options.model).is_dir() else None
    for option, source in (("model", options.model), ("model", base), *datasets):
        folder = Path(source or "").resolve()
        if not source or not folder.is_dir():
            continue
        if folder == output or (option != "model" and folder in output.parents):
            raise ValueError(
                f"--output_dir {output_dir} is inside the folder of --{option} {source}, whose files the results would "
                "replace or mix with. Choose another --output_dir."
            )


# ---- A dry run ----

STEPS = 3  # the first one also starts the workers, and chooses kernels or compiles them
_GIB = 2**30


def write_nothing(args: InfCLTrainingArguments) -> None:
    """Lets a training save, evaluate and push nothing; its ``output_dir`` becomes one that ends with the process.

    It logs every step, into Trainer's state alone.
    """
    args.output_dir = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, args.output_dir, ignore_errors=True)
    args.save_strategy, args.eval_strategy = SaveStrategy.NO, IntervalStrategy.NO
    args.logging_strategy, args.logging_steps = IntervalStrategy.STEPS, 1
    args.eval_on_start = args.load_best_model_at_end = args.push_to_hub = False
    args.metric_for_best_model = args.early_stopping_patience = None
    args.report_to = []


def dry_run(trainer: InfCLTrainer) -> None:
    """Trains the first steps and prints memory, speed and the time of the whole training; collective."""
    quieten(trainer)
    trainer.add_callback(_FirstSteps())
    trainer.train()
    device = trainer.args.device
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    memory = max(peak for (peak,) in Processes().agree([used]))
    tell(trainer, *lines_of_steps(trainer, memory))
    leave(trainer)


class _FirstSteps(TrainerCallback):
    """Ends a training after its first steps."""

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        control.should_training_stop |= state.global_step == STEPS


def lines_of_steps(trainer: InfCLTrainer, memory: float) -> Iterator[str]:
    """The report on a training by the logs of its first steps; its processes use at most so many bytes each."""
    state, args = trainer.state, trainer.args
    logs = [entry for entry in state.log_history if "samples_per_second" in entry]
    # Without the first one, if there are others, and without that after which it is known how many graphs fit.
    warm_up = 2 if args.device.type == "cuda" and args.retain_graphs == "auto" else 1
    logs = logs[warm_up:] or logs[-1:]
    seconds = [args.global_batch_size / entry["samples_per_second"] for entry in logs]
    waits = [of_step * entry.get("data_wait", 0.0) for of_step, entry in zip(seconds, logs, strict=True)]
    step, wait = sum(seconds) / len(logs), sum(waits) / len(logs)
    yield f"Dry run: {counted(state.global_step, 'step')} of {state.max_steps:,}. Nothing was written."
    of = "on each process"
    if args.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(args.device)
        of = f"of the {gpu.total_memory / _GIB:.1f} on each {gpu.name}"
    yield f"Memory: {memory / _GIB:.2f} GiB at the peak, {of}."
    shares = [entry["train_mfu"] for entry in logs if "train_mfu" in entry]
    of_peak = f", with {sum(shares) / len(shares):.0%} of the chip's peak" if shares else ""
    yield (
        f"Speed: {args.global_batch_size / step:,.1f} images a second; a step of {args.global_batch_size:,} pairs "
        f"takes {step:.3g} s, of which it waits {wait:.2g} s for data{of_peak}."
    )
    if args.world_size > 1 and (exchange := machines_of(Processes(), args.device).chosen) is not None:
        yield f"Loss: {exchange}; on H100s it is predicted to take {exchange.seconds:.2g} s of a step."
    whole = timedelta(seconds=round(step * state.max_steps))
    yield f"The whole training takes {whole}, with equally fast loading, and without evaluations and checkpoints."
