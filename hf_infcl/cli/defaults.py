"""The options of a training that the command chooses, and how it tells them."""

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..data.replay import Replayed, epochs_of
from ..evaluation.metrics import METRICS, metrics_of_kind
from ..files.text import counted
from ..options.arguments import InfCLTrainingArguments
from ..options.commands import OF_PAIRS, StartOptions
from ..options.declaring import FILES
from ..step.micro_batches import memory_is_known
from ..trainer.evaluating import check_metric, use_of_metric
from .benchmarks import benchmark_key, expanded
from .datasets import guard_names


def intervals(namespace: argparse.Namespace, user_options: set[str]) -> dict[str, Any]:
    """Chooses the intervals of logging, saving and evaluating that the user did not give.

    Trainer's defaults of 500 steps suit many small steps, but a run with large batches may have only 50. Such a run
    logs every step (or the first, the last and every hundredth of the run, if that is longer), and saves and evaluates
    every epoch (or every tenth of the run, if ``max_steps`` ends it).
    """
    limited = namespace.max_steps > 0
    tenth, hundredth = (math.ceil(namespace.max_steps / n) if limited else 1 / n for n in (10, 100))
    chosen: dict[str, Any] = {}

    def choose(value: object, *names: str, when: object = True) -> None:
        """Chooses the first of several options, unless the user has set one of them."""
        if when and not user_options & {*names}:
            chosen[names[0]] = value

    choose(hundredth, "logging_steps", "logging_strategy")
    steps = next((getattr(namespace, name) for name in ("save_steps", "eval_steps") if name in user_options), None)
    steps = tenth if steps is None and limited else steps
    sets = namespace.eval_dataset or namespace.zero_shot_dataset or namespace.guard_dataset
    evaluated = sets or namespace.eval_benchmark or namespace.guard_benchmark
    for what, wanted in (("save", True), ("eval", evaluated)):
        choose("epoch" if steps is None else "steps", f"{what}_strategy", when=wanted)
        strategy = chosen.get(f"{what}_strategy", getattr(namespace, f"{what}_strategy"))
        choose(steps or tenth, f"{what}_steps", when=strategy == "steps")
    saves = namespace.save_strategy != "no"
    choose(3, "save_total_limit", when=saves)
    choose(True, "eval_on_start", when=evaluated)  # so that the card tells what the training has changed
    choose(True, "load_best_model_at_end", when=saves and namespace.early_stopping_patience)
    name, kind = ("pairs", "pairs") if namespace.eval_dataset else ("zero_shot", "classes")
    needs_metric = use_of_metric(namespace) and (sets or not evaluated)
    choose(f"{name}_{next(iter(metrics_of_kind(kind)))}", "metric_for_best_model", when=needs_metric)
    choose(True, "logging_first_step", when="logging_steps" in chosen)  # and the last, see `loop_events.is_logged`
    return chosen


def check_best_metric(namespace: argparse.Namespace) -> None:
    """Raises a ValueError if a checkpoint or the learning rate would be chosen by a metric that no set can have.

    Once the evaluation datasets are open, the trainer decides: a guard set of classes has other metrics than one of
    pairs, and fewer than five classes have no top-5 accuracy.
    """
    if (use := use_of_metric(namespace)) is None:
        return
    kinds = {"pairs": metrics_of_kind("pairs")} if namespace.eval_dataset else {}
    kinds |= dict.fromkeys(guard_names(namespace.guard_dataset), METRICS)
    kinds |= {"zero_shot": metrics_of_kind("classes")} if namespace.zero_shot_dataset else {}
    for way, names in (("", namespace.eval_benchmark), ("guard_", namespace.guard_benchmark)):
        kinds |= {f"{way}{benchmark_key(name)}": METRICS for name in expanded(names or (), namespace.benchmark_folder)}
    if not kinds:
        raise ValueError(
            f"{use} needs something to evaluate: pass a set or benchmark to evaluate, such as --eval_dataset."
        )
    check_metric(namespace, [f"{name}_{metric}" for name, metrics in kinds.items() for metric in metrics])


def chooses_model(args: InfCLTrainingArguments, keep: StartOptions) -> bool:
    """Whether evaluations choose the weights that are saved, or how they are trained."""
    return keep.average_with_start == "auto" or (args.eval_strategy != "no" and use_of_metric(args) is not None)


def read_alpha(option: str, options: argparse.Namespace) -> float | None:
    """The α that an option of a command names, "auto" or a number; None for the one to be chosen, or for no average.

    Raises:
        ValueError: the value is neither; a set is missing for the choice.
    """
    if (value := getattr(options, option)) is None:
        return None
    if value == "auto":
        gains = options.eval_dataset or options.zero_shot_dataset or options.eval_benchmark
        if not (gains and (options.guard_dataset or options.guard_benchmark)):
            raise ValueError(
                f"--{option} auto weighs what was gained against what is kept. Pass --eval_dataset, "
                "--zero_shot_dataset or --eval_benchmark for the one and --guard_benchmark or "
                f"--guard_dataset for the other, or a number as --{option}."
            )
        return None
    with suppress(ValueError):
        if 0 <= (alpha := float(value)) <= 1:
            return alpha
    raise ValueError(f"--{option} must be 'auto' or a number from 0 (the start) to 1 (the end), got {value!r}.")


def check_embedded(folder: str | None, words: Sequence[str]) -> None:
    """Raises a ValueError if the folder of a teacher's embeddings does not exist, with the command that writes it.

    ``words`` are the command line of the training, of which that command repeats what says which pairs it has.
    """
    if folder is None or Path(folder).exists():
        return
    command, is_of_pairs = [*(word for word in words[:1] if word.endswith(FILES)), "TEACHER"], False
    for word in words:
        if word.startswith("--"):
            is_of_pairs = word[2:].partition("=")[0].replace("-", "_") in OF_PAIRS
        command += [word] * is_of_pairs
    raise ValueError(
        f"--teacher_embeddings: there is no folder {folder}. With the folder or Hub id of the large model in place of "
        f"TEACHER, this writes it: infcl embed {shlex.join([*command, '--output_dir', folder])}"
    )


def in_steps(chosen: Mapping[str, Any], steps: int) -> str:
    """The chosen options as words; intervals that are shares of a run become steps."""
    words = []
    for name, value in chosen.items():
        if name.endswith("_steps"):
            value = math.ceil(value * steps) if value < 1 else f"{value:g}"  # as Trainer computes them
        words.append(f"--{name}" if value is True else f"--{name} {value}")
    return " ".join(words)


def print_choices(args: InfCLTrainingArguments, chosen: Mapping[str, object], pairs: object) -> None:
    """Prints the options that `intervals` has chosen, and how the global batch of the training set is divided."""
    with suppress(ValueError):  # the training refuses the batch
        steps, epochs = args.max_steps, epochs_of(pairs, args)
        if steps <= 0 and epochs is not None:
            steps = epochs.steps(args.num_train_epochs)
        if chosen:
            print("Chosen by default:", in_steps(chosen, steps))
    accumulation = args.gradient_accumulation_steps
    if not (args.divides_by_itself and memory_is_known(args.device)):  # otherwise it is not divided yet
        print(
            f"The global batch of {args.global_batch_size:,} pairs is {args.per_device_train_batch_size} per device × "
            f"{counted(accumulation, 'accumulation step')} × {counted(args.world_size, 'process')}."
        )
    if isinstance(pairs, Replayed):
        print(f"{pairs.old:,} of these pairs are old ({pairs.old / args.global_batch_size:.3g}, after rounding).")
