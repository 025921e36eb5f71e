"""`infcl average`: averages the weights before and after a fine-tuning, and measures what that gains and keeps."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import find_adapter_config_file

from ..averaging import (
    ALPHAS,
    Measured,
    adapters_of_zero,
    check_alpha,
    check_tolerance,
    chosen,
    interpolated,
    running_statistics,
    score,
)
from ..conversion.sentence_transformers import write_sentence_files
from ..data import ContrastiveCollator
from ..options.arguments import InfCLTrainingArguments
from ..publishing import FRONT_FILE, plot_front, source_name
from ..training.trainer import InfCLTrainer
from .datasets import check_columns, evaluation_datasets, guard_datasets
from .launched import leave, mistakes_in_one_line, tell_deepspeed_of_cpu
from .models import load
from .options import AverageOptions, EvaluationOptions
from .parser import Parser

RESULTS_FILE = "average_results.json"
VALIDATION, REST = "validation", "rest"  # end the names of the two halves of a guard
SPLIT = (
    "A random half of the rows of each guard (validation, always the same) may choose alpha; the other half (rest) "
    "reports what was kept. The gain is measured on the same rows that choose."
)


class Average:
    """A model whose weights move between the start and the end of a fine-tuning.

    Args:
        start: the checkpoint before it.
        end: the checkpoint after it, or its LoRA adapter, whose model is the start.
        path: one of `hf_infcl.averaging.PATHS`.

    Attributes:
        model, processor: as loaded; `move` changes the weights of the model in place.

    Raises:
        ValueError: a checkpoint cannot be loaded; the two are not the same model; an adapter holds more than LoRA's
            factors.
    """

    def __init__(self, start: str, end: str, path: str) -> None:
        self._path = path
        base, processor, _ = load(start)
        if find_adapter_config_file(end) is None:
            self.model, self.processor, _ = load(end)
            self._start, self._end = base.state_dict(), _copied(self.model.state_dict())
            self._set: Callable[[dict[str, Tensor]], Any] = self.model.load_state_dict
        else:
            self.model, self.processor = with_trained_adapter(base, end), processor
            self._end = _copied(adapter_state(self.model))
            self._start = adapters_of_zero(self._end)
            self._set = self._set_adapter
        interpolated(self._start, self._end, 1.0, path)  # raises here rather than after the first evaluation

    def _set_adapter(self, state: dict[str, Tensor]) -> None:
        import peft

        peft.set_peft_model_state_dict(self.model, state)

    def move(self, alpha: float) -> None:
        """Gives the model the weights at ``alpha``."""
        self._set(interpolated(self._start, self._end, alpha, self._path))

    @property
    def batch_norms(self) -> int:
        """The number of batch norms with running statistics."""
        return len(running_statistics(self._end)) // 2


def with_trained_adapter(base: Any, adapter: str) -> Any:
    """The model with a trained adapter of peft.

    Raises:
        ValueError: peft is not installed, or the adapter is not one of this model.
    """
    try:
        import peft
    except ImportError:
        raise ValueError(f"{adapter} is an adapter of the package peft: pip install peft.") from None
    try:
        return peft.PeftModel.from_pretrained(base, adapter)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{adapter} is not an adapter of the start, because it cannot be added: {error}") from error


def adapter_state(model: Any) -> dict[str, Tensor]:
    """The tensors of a model's adapter, as peft saves them."""
    import peft

    state: dict[str, Tensor] = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return state


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def average(parser: Parser, namespace: argparse.Namespace, given: set[str]) -> None:
    """Writes the averaged model, and if there are sets to measure it on, the results and a picture of all averages."""
    options, columns, evaluation, args = parser.build(namespace)
    tell_deepspeed_of_cpu(args)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        check_options(options, args, evaluation)
        check_place(args.output_dir, namespace.start, namespace.end)
        gains = evaluation_datasets(columns, evaluation)
        halves = [guard_datasets(columns, options, evaluation, half) for half in (0, 1)]
        moving = Average(namespace.start, namespace.end, options.path)
        trainer = None
        if sets := gains | with_halves(*halves):
            check_columns(columns, sets)
            trainer = InfCLTrainer(moving.model, args, eval_dataset=sets, processing_class=moving.processor)
    measured: list[Measured] = []
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        if trainer is not None:
            for alpha in ALPHAS if options.alpha == "auto" else sorted({0.0, float(options.alpha), 1.0}):
                moving.move(alpha)
                measured.append(measured_at(alpha, trainer.evaluate(), list(gains), list(halves[0])))
        alpha = chosen(measured, options.guard_tolerance).alpha if options.alpha == "auto" else float(options.alpha)
        moving.move(alpha)
    if args.process_index == 0:
        folder = Path(args.output_dir)
        moving.model.save_pretrained(folder)
        moving.processor.save_pretrained(folder)
        collator = ContrastiveCollator.for_model(moving.processor, moving.model.config)
        write_sentence_files(folder, moving.model.config.model_type, moving.processor, **collator.text_options)
        if measured:
            write_results(folder, namespace, options, alpha, measured)
        tell(folder, options, alpha, measured, moving.batch_norms)
    if trainer is not None:
        leave(trainer)


def check_options(options: AverageOptions, args: InfCLTrainingArguments, evaluation: EvaluationOptions) -> None:
    """Raises a ValueError if an option has no meaning, or another one is missing for it."""
    if options.alpha == "auto":
        gains = evaluation.eval_dataset or evaluation.zero_shot_dataset
        if not (gains and options.guard_dataset):
            raise ValueError(
                "--alpha auto weighs what was gained against what is kept. Pass --eval_dataset or --zero_shot_dataset "
                "for the one and --guard_dataset for the other, or a number as --alpha."
            )
    else:
        try:
            check_alpha(float(options.alpha))
        except ValueError:
            raise ValueError(
                f"--alpha must be 'auto' or a number from 0 (START) to 1 (END), got {options.alpha!r}."
            ) from None
    check_tolerance(options.guard_tolerance)
    if evaluation.eval_pictures:
        raise ValueError("--eval_pictures draws those of one model. Omit it, and draw them with `infcl evaluate`.")
    if args.fsdp or args.deepspeed:
        raise ValueError(
            "The weights of an average are changed as a whole, which neither FSDP nor DeepSpeed allows. Omit their "
            "options, or start the command with scripts/configs/ddp.yaml."
        )


def check_place(output_dir: Any, start: str, end: str) -> None:
    """Raises a ValueError if the average would be written over a model."""
    place = Path(output_dir)
    if any(place.resolve() == Path(source).resolve() for source in (start, end)) or any(
        (place / name).exists() for name in ("config.json", "adapter_config.json")
    ):
        raise ValueError(f"--output_dir {output_dir} already holds a model. Choose another --output_dir.")


def with_halves(validation: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Both halves of each guard, by names that end with `VALIDATION` and `REST`."""
    parts = ((VALIDATION, validation), (REST, rest))
    return {f"{name}_{part}": half for part, sets in parts for name, half in sets.items()}


def measured_at(alpha: float, metrics: Mapping[str, float], gains: Sequence[str], guards: Sequence[str]) -> Measured:
    """The scores of one evaluation.

    Args:
        alpha: at which it took place.
        metrics: all of them, with the prefix ``eval``.
        gains: the names of the sets that the training was for.
        guards: the names of the guard sets, without their halves.
    """
    gained = [score(metrics, f"eval_{name}") for name in gains]
    validation, rest = ({g: score(metrics, f"eval_{g}_{part}") for g in guards} for part in (VALIDATION, REST))
    return Measured(alpha, sum(gained) / len(gained) if gained else None, validation, rest)


def write_results(
    folder: Path, namespace: argparse.Namespace, options: AverageOptions, alpha: float, measured: Sequence[Measured]
) -> None:
    """Writes all that was measured, and draws it where both gain and guards were measured."""
    results = {
        "start": source_name(namespace.start)[0],
        "end": source_name(namespace.end)[0],
        "path": options.path,
        "alpha": alpha,
        "chosen": options.alpha == "auto",
        "guard_tolerance": options.guard_tolerance,
        "scores": "recall@1 (mean of both directions) of pairs, top-1 accuracy of classes",
        "split": SPLIT,
        "measured": [asdict(one) for one in measured],
    }
    (folder / RESULTS_FILE).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if measured[0].gained is not None and measured[0].rest and importlib.util.find_spec("matplotlib") is not None:
        plot_front(measured, alpha, folder / FRONT_FILE)


def tell(folder: Path, options: AverageOptions, alpha: float, measured: Sequence[Measured], batch_norms: int) -> None:
    """Prints the table of what was measured, and what the average is."""
    if measured:
        guards = list(measured[0].rest)
        if guards:
            print(SPLIT)
        print("  ".join(["alpha", "  gained", *(f"{name} ({VALIDATION}, {REST})" for name in guards)]))
        for one in measured:
            gained = "       -" if one.gained is None else f"{100 * one.gained:7.2f}%"
            kept = (f"{100 * one.validation[g]:.2f}%, {100 * one.rest[g]:.2f}%".rjust(len(g) + 20) for g in guards)
            print("  ".join([f"{one.alpha:5.2g}", gained, *kept]) + ("  <" if one.alpha == alpha else ""))
    if batch_norms:
        print(
            f"The running statistics of {batch_norms} batch norms were averaged like the weights. They are not those "
            "that the averaged weights would have on data, so measure the model before you use it."
        )
    if options.alpha == "auto" and alpha == 0:
        print("Every average costs a guard more than --guard_tolerance or gains nothing, so the start was saved.")
    print(f"The average at alpha {alpha:g} is in {folder}.")
