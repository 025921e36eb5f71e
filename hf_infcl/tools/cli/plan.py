"""`infcl plan`: predicts memory and time of a training from the model's config alone."""

from __future__ import annotations

import argparse

from ...conversion.models import load_config
from ...conversion.pretrained import base_of_adapters
from ...data.collator import text_positions
from ...encoders.dual_encoder import check_type_of_config
from ...options.batch_options import auto_or_number
from ..planning.answers import answer_line, choose_answer
from ..planning.counting import MOST_TOKENS
from ..planning.planner import Planner
from ..planning.report import report
from .launched import mistakes_in_one_line
from .parser import Parser


def plan(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Prints the memory, the time and the options of a training."""
    parser.settle(namespace, user_options, "global_batch")
    asked, namespace.texts_at_once = namespace.texts_at_once, None  # whose windows the plan may have to choose
    if namespace.global_batch is None:
        namespace.global_batch = namespace.global_batch_size
    namespace.global_batch_size = None  # which is of --gpus, not of this process
    parser.build(namespace, user_options, computes=False)
    namespace.texts_at_once = asked
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        auto_or_number("texts_at_once", asked or "auto", 1)
        config = load_config(namespace.model, namespace.open_clip_model)
        check_type_of_config(config, namespace.model)
        longest, tokens = text_positions(config), namespace.max_text_tokens
        # A model of more positions than usual may have a tokenizer that states fewer, and reads all only if it is told.
        if tokens is not None and longest is not None and tokens >= longest + (longest > MOST_TOKENS):
            raise ValueError(f"max_text_tokens must be less than the {longest} tokens of the model, got {tokens}.")
        planner = Planner(namespace, user_options, config)
        in_words = "num_train_epochs" in user_options and "epochs" not in user_options
        epochs = namespace.num_train_epochs if in_words else namespace.epochs
        has_adapters = base_of_adapters(namespace.model) is not None
        pairs = namespace.dataset_size or namespace.samples_per_epoch
        namespace.dataset_size = namespace.samples_per_epoch if parser.typed("samples_per_epoch") else pairs
        print(*report(planner, epochs, has_adapters=has_adapters), sep="\n")
        answer = choose_answer(vars(namespace), pairs=pairs)
        decided = {name for name in user_options if parser.typed(name) or not namespace.recipe}
        if line := answer_line(answer, vars(namespace), decided, pairs=pairs):
            print("", line, sep="\n")
