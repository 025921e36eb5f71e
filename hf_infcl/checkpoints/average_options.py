"""The options by which `infcl average` and `infcl train` average weights."""

from __future__ import annotations

from pathlib import Path

from ..options.arguments import InfCLTrainingArguments
from ..options.declaring import spelled
from ..options.evaluation_options import EvaluationOptions, GuardOptions, StartOptions
from .average_search import check_tolerance
from .average_weights import check_alpha


def check_average(keep: StartOptions, evaluation: EvaluationOptions, args: InfCLTrainingArguments) -> float | None:
    """The α of --average_with_start, or None for the one to be chosen.

    Raises:
        ValueError: an average is asked for that could not be found at the end of the training.
    """
    if keep.average_with_start is None:
        return None
    alpha = read_alpha("average_with_start", keep.average_with_start, keep, evaluation)
    strategy = spelled(args.save_strategy)
    if strategy == "no" or (strategy == "best" and not args.load_best_model_at_end):
        raise ValueError(
            "--average_with_start saves an average in place of the weights at the end, which only a checkpoint then "
            f"keeps, but --save_strategy {strategy} saves none of them. Choose epoch or steps."
        )
    return alpha


def read_alpha(option: str, value: str, guards: GuardOptions, evaluation: EvaluationOptions) -> float | None:
    """The α that the value of an option names, "auto" or a number; None for the one to be chosen.

    ``guards`` names the sets to keep and the tolerance, and ``evaluation`` those that the training is for.

    Raises:
        ValueError: the value is neither; a set is missing for the choice; the tolerance is no fraction.
    """
    check_tolerance(guards.guard_tolerance)
    if value == "auto":
        gains = evaluation.eval_dataset or evaluation.zero_shot_dataset or evaluation.eval_benchmark
        if not (gains and (guards.guard_dataset or guards.guard_benchmark)):
            raise ValueError(
                f"--{option} auto weighs what was gained against what is kept. Pass --eval_dataset, "
                "--zero_shot_dataset or --eval_benchmark for the one and --guard_benchmark or "
                f"--guard_dataset for the other, or a number as --{option}."
            )
        return None
    try:
        check_alpha(float(value))
    except ValueError:
        raise ValueError(
            f"--{option} must be 'auto' or a number from 0 (the start) to 1 (the end), got {value!r}."
        ) from None
    return float(value)


def check_options(args: InfCLTrainingArguments, evaluation: EvaluationOptions) -> None:
    """Raises a ValueError for options that have no meaning for an average."""
    if evaluation.eval_pictures:
        raise ValueError("--eval_pictures draws those of one model. Omit it, and draw them with `infcl evaluate`.")
    if args.fsdp:
        raise ValueError(
            "The weights of an average are changed as a whole, which FSDP does not allow. Omit its options, "
            "or start the command with scripts/configs/ddp.yaml."
        )


def check_place(output_dir: str | None, start: str, end: str) -> None:
    """Raises a ValueError if the average would be written over a model or a card, or no folder is named for it."""
    if not output_dir:
        raise ValueError("--output_dir is empty. Name the folder that the average is written into.")
    place = Path(output_dir)
    if any(place.resolve() == Path(source).resolve() for source in (start, end)) or any(
        (place / name).exists() for name in ("config.json", "adapter_config.json")
    ):
        raise ValueError(f"--output_dir {output_dir} already holds a model. Choose another --output_dir.")
    if (place / "README.md").exists():
        raise ValueError(
            f"--output_dir {output_dir} holds a README.md, which the card of the average would replace. Choose another "
            "--output_dir."
        )
