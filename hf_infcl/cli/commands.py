"""The commands, and the options that each of them reads, without an import of torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from ..options import commands as options
from .parser import Parser, plain_parser

COMMANDS = {
    "check": "read the data as a training would, and say what would spoil it",
    "train": "train a dual encoder with the exact contrastive loss of the global batch",
    "evaluate": "measure classification, or loss and retrieval of pairs; of several models their differences",
    "average": "average the weights before and after a fine-tuning, so that less is forgotten",
    "embed": "write the embeddings of images and texts, with their keys",
    "score": "write how well each image and its caption belong together, to find wrong pairs",
    "card": "write the model card of a trained model again",
    "convert": "write a model of OpenCLIP in transformers' format, or the other way round",
}

# The options that the short help of a training lists, by its headings.
SHORT_HELP = {
    "Data": "dataset streaming samples_per_epoch image_column caption_column pair_id_column caption_templates "
    "captions_per_image augmentation on_bad_sample leave_out exclude replay_dataset replay_share",
    "Model": "model tokenizer objective freeze lora_rank image_size teacher teacher_embeddings cache_features",
    "Batch": "global_batch_size per_device_train_batch_size gradient_accumulation_steps activation_checkpointing",
    "Length": "num_train_epochs max_steps early_stopping_patience dry_run",
    "Rates": "learning_rate lr_scheduler_type warmup_steps weight_decay optimizer",
    "Precision and speed": "bf16 torch_compile dataloader_num_workers use_cpu",
    "Evaluation": "eval_dataset zero_shot_dataset class_names templates eval_benchmark guard_dataset eval_strategy "
    "eval_steps eval_pictures metric_for_best_model",
    "Logging and saving": "output_dir overwrite_output_dir logging_steps report_to save_steps save_formats "
    "average_with_start resume_from_checkpoint push_to_hub",
}
# The options of a training that decide about an evaluation alone.
OF_EVALUATION = set(
    """
    objective strategy backend equal_ids max_text_tokens dims output_dir per_device_eval_batch_size bf16 use_cpu
    dataloader_num_workers report_to run_name
    """.split()
)
# The options of a training that decide about its check.
OF_CHECK = {"output_dir", "dataloader_num_workers"}
# The options of a training that decide about embeddings.
OF_EMBEDDING = set(
    "output_dir per_device_eval_batch_size max_text_tokens dims bf16 use_cpu dataloader_num_workers".split()
)
# The options of data that its short help lists.
OF_EMBEDDED = set(
    """
    dataset split streaming on_bad_sample augmentation replay_dataset exclude image_column caption_column pair_id_column
    """.split()
)


def evaluate_parser() -> Parser:
    """The options of `infcl evaluate`, whose --dims may be one number or one for each model."""
    parser = Parser(
        "evaluate",
        "Measure a dual encoder: zero-shot classification, or loss and retrieval on image-text pairs, or both. Of "
        "several models, the differences from the first are measured, with their 95% intervals.",
        *(options.MeasuredModelOptions, options.ColumnOptions, options.EvaluationOptions),
        shown=OF_EVALUATION,
    )
    (dims,) = (action for action in parser._actions if action.dest == "dims")
    dims.nargs, dims.metavar = "+", "N"
    dims.help = "Cut the embeddings to this many dimensions. Several numbers are those of the models in their order."
    return parser


# The command check takes the options of a training as they are, and so does embed.
PARSERS: dict[str, Callable[[], Parser | argparse.ArgumentParser]] = {
    "check": partial(
        Parser,
        "check",
        "Read the data of a training and say what would spoil it: faulty images and captions, copies, leaks, slow "
        "loading. It takes the whole command of the training. Required are --model, of which only the config and the "
        "tokenizer are read, and --dataset, or a --recipe or file that names them. The exit code is 0 if nothing "
        "spoils a training, 1 if something does, and 2 if an option is wrong.",
        options.CheckOptions,
        *options.OF_TRAINING,
        shown=OF_CHECK,
        recipes=True,
    ),
    "train": partial(
        Parser,
        "train",
        "Train a dual encoder (CLIP, SigLIP, ...) with the exact contrastive loss of the global batch. Required are "
        "--model and --dataset, or a --recipe or file that names them.",
        *options.OF_TRAINING,
        shown=SHORT_HELP,
        recipes=True,
    ),
    "evaluate": evaluate_parser,
    "average": partial(
        Parser,
        "average",
        "Average the weights before and after a fine-tuning, which returns most of what was forgotten for a part of "
        "what was gained.",
        *(options.AverageOptions, options.ColumnOptions, options.EvaluationOptions, options.GuardOptions),
        shown=OF_EVALUATION,
        positionals={
            "start": "The model from which the fine-tuning began: a Hub id or a folder.",
            "end": "The model after it. Adapters are merged into their model first.",
        },
    ),
    "embed": partial(
        Parser,
        "embed",
        "Write the normalised embeddings of images and texts, with their keys, on one process or several. A second run "
        "computes what the first one has not. For --teacher_embeddings, give the whole command of a training, or its "
        "file, instead of DATA: its --dataset and --replay_dataset are embedded as the training reads them.",
        options.EmbedOptions,
        *options.OF_TRAINING,
        shown=OF_EMBEDDING | OF_EMBEDDED,
        optional={"model", "dataset"},
        accepts=options.OF_TRAINING,
        positionals={
            "encoder": "The model that embeds: a Hub id or a folder.",
            "[data]": "A folder or a Hub id; with --streaming tar or parquet shards.",
        },
        recipes=True,
    ),
    "score": partial(
        Parser,
        "score",
        "Write how well each image of a training set and its caption belong together, as a model sees it, and draw the "
        "pairs that do not seem to.",
        *(options.ScoreOptions, options.ColumnOptions),
        shown=OF_EMBEDDING,
        positionals={
            "model": "The model: a Hub id or a folder.",
            "data": "The training set: a folder or a Hub id; with --streaming tar or parquet shards.",
        },
    ),
    "card": partial(
        plain_parser,
        "card",
        "Write the model card of a trained model again, with the template of this version.",
        positionals={"folder": "The --output_dir of `infcl train`, or a copy of the repository that it pushed."},
    ),
    "convert": partial(
        plain_parser,
        "convert",
        "Write a model of OpenCLIP in transformers' format, or the other way round, with its processor.",
        options.ConvertOptions,
        positionals={
            "source": "A folder with open_clip_config.json and weights, a Hub repository that holds these, or a .pt of "
            "OpenCLIP's training; with --to open_clip, a folder or a Hub repository of transformers. Or adapters, "
            "which are merged into their model.",
            "target": "The folder to write, which may also be the source.",
        },
    ),
}
