"""`infcl average`: averages the weights before and after a fine-tuning, and measures what that gains and keeps."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import find_adapter_config_file

from ...checkpoints.average_options import read_alpha
from ...checkpoints.average_search import Measured, described, find_average, measured_at, not_trained, with_halves
from ...checkpoints.average_weights import adapters_of_zero, interpolated, running_statistics
from ...checkpoints.lock import check_writable
from ...conversion.models import load
from ...conversion.pretrained import base_of_adapters, with_trained_adapter
from ...conversion.sentence_transformers import write_sentence_files
from ...data import ContrastiveCollator
from ...encoders.adapters import adapter_state, has_adapters
from ...options.arguments import InfCLTrainingArguments
from ...options.evaluation_options import EvaluationOptions
from ...training.trainer import InfCLTrainer
from ..publishing.average_card import average_card
from ..publishing.front import write_averages
from ..publishing.telling import quieten
from .datasets import check_columns, evaluation_datasets, guard_datasets
from .description import describe_evaluations
from .launched import leave, mistakes_in_one_line, tell_deepspeed_of_cpu
from .parser import Parser


class BetweenCheckpoints:
    """A model whose weights move between the start and the end of a fine-tuning.

    Args:
        start: the checkpoint before it.
        end: the checkpoint after it, or its LoRA adapter, whose model is the start. If the start has an adapter as
            well, both are merged into their models.
        path: one of `hf_infcl.checkpoints.average_weights.PATHS`.

    Attributes:
        model, processor: as loaded; `move` changes the weights of the model in place.

    Raises:
        ValueError: a checkpoint cannot be loaded; the two are not the same model; an adapter holds more than LoRA's
            factors.
    """

    def __init__(self, start: str, end: str, path: str) -> None:
        self._path = path
        base, processor, _ = load(start)
        if find_adapter_config_file(end) is None or base_of_adapters(start) is not None:
            self.model, self.processor, _ = load(end)
            self._start, self._end = base.state_dict(), _copied(self.model.state_dict())
            self._set: Callable[[dict[str, Tensor]], Any] = self.model.load_state_dict
        else:
            self.model, self.processor = with_trained_adapter(base, end).requires_grad_(False), processor
            from peft import set_peft_model_state_dict  # it is installed, as there is an adapter

            self._end = _copied(adapter_state(self.model))
            self._start = adapters_of_zero(self._end)
            self._set = partial(set_peft_model_state_dict, self.model)
        interpolated(self._start, self._end, 1.0, path)  # raises here rather than after the first evaluation

    def move(self, alpha: float) -> None:
        """Gives the model the weights at ``alpha``."""
        self._set(interpolated(self._start, self._end, alpha, self._path))

    @property
    def batch_norms(self) -> int:
        """The number of batch norms with running statistics."""
        return len(running_statistics(self._end)) // 2


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def average(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Writes the averaged model and its card; with sets to measure it on, the results and a picture of all averages."""
    options, columns, evaluation, guards, args = parser.build(namespace)
    tell_deepspeed_of_cpu(args)
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
            adapter=adapted,
            evaluations=describe_evaluations(evaluation, guards, gains | halves[0]),
        ).save(folder / "README.md")  # in the place of peft's
        lines = (
            *described(averaged),
            f"The average at alpha {averaged.alpha:g}, with its card (README.md), is in {folder}.",
            not_trained(averaged),
        )
        print(*filter(None, lines), sep="\n")
    if trainer is not None:
        leave(trainer)


def check_options(args: InfCLTrainingArguments, evaluation: EvaluationOptions) -> None:
    """Raises a ValueError for options that have no meaning for an average."""
    if evaluation.eval_pictures:
        raise ValueError("--eval_pictures draws those of one model. Omit it, and draw them with `infcl evaluate`.")
    if args.fsdp or args.deepspeed:
        raise ValueError(
            "The weights of an average are changed as a whole, which neither FSDP nor DeepSpeed allows. Omit their "
            "options, or start the command with scripts/configs/ddp.yaml."
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
