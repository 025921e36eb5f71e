"""`infcl plan`: predicts memory and time of a training from the model's config alone."""

from __future__ import annotations

import argparse
import math

import torch

from ...conversion.models import load_config
from ...conversion.pretrained import base_of_adapters
from ...data.collator import text_positions
from ...options.declared import training_options
from ...options.facts import check_values
from ..planning import GPUS, Planner
from ..planning.answers import answer_line, choose_answer
from ..planning.counting import MOST_TOKENS
from ..planning.report import report
from .launched import mistakes_in_one_line
from .parser import Parser


def plan(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Prints the memory, the time and the options of a training."""
    parser.settle(namespace, user_options)
    asked, namespace.texts_at_once = namespace.texts_at_once, None  # whose windows the plan may have to choose
    namespace.global_batch = namespace.global_batch or namespace.global_batch_size
    namespace.global_batch_size = None  # which is of --gpus, not of this process
    parser.build(namespace, user_options, computes=False)
    namespace.texts_at_once = asked
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        check_options(namespace)
        config = load_config(namespace.model, namespace.open_clip_model)
        longest, tokens = text_positions(config), namespace.max_text_tokens
        # A model of more positions than usual may have a tokenizer that states fewer, and reads all only if it is told.
        if tokens is not None and longest is not None and tokens >= longest + (longest > MOST_TOKENS):
            raise ValueError(f"max_text_tokens must be less than the {longest} tokens of the model, got {tokens}.")
        planner = Planner(namespace, user_options, config)
        in_words = "num_train_epochs" in user_options and "epochs" not in user_options
        epochs = namespace.num_train_epochs if in_words else namespace.epochs
        has_adapters = base_of_adapters(namespace.model) is not None
        print(*report(planner, epochs, has_adapters=has_adapters), sep="\n")
        pairs = namespace.dataset_size or namespace.samples_per_epoch
        answer = choose_answer(vars(namespace), pairs=pairs)
        decided = {name for name in user_options if parser.typed(name) or not namespace.recipe}
        if line := answer_line(answer, vars(namespace), decided, pairs=pairs):
            print("", line, sep="\n")


def check_options(options: argparse.Namespace) -> None:
    """Raises a ValueError if an option of the plan has a value with which nothing can be planned."""
    check_values(options, training_options(), lambda facts: facts.plans)
    for name in ("global_batch", "gpus", "gpu_memory", "dataset_size", "epochs"):
        if (value := getattr(options, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} must be more than 0, got {value}.")
    if options.gpu not in GPUS:
        raise ValueError(
            f"--gpu must be {' or '.join(GPUS)}, whose rates were measured, got {options.gpu!r}. For another GPU give "
            "its --gpu_memory. The predicted memory is then correct, and the times are those of --gpu."
        )
    if options.measure and not (options.use_cpu or torch.cuda.is_available()):
        raise ValueError("--measure needs a GPU, or --use_cpu. Omit it to predict from the config alone.")
