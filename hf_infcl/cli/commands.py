"""The commands, and the options that each of them reads, without an import of torch."""

from typing import ClassVar

from ..options import commands as options
from .parser import Parser

# The options of a training that decide about embeddings.
OF_EMBEDDING = "output_dir per_device_eval_batch_size max_text_tokens dims bf16 use_cpu dataloader_num_workers"
# The options of a training that decide about an evaluation alone.
OF_EVALUATION = f"{OF_EMBEDDING} objective strategy backend equal_ids report_to run_name"


class Check(Parser):
    """Read the data of a training and say what would spoil it: faulty images and captions, copies, leaks, slow loading.

    It takes the whole command of the training. Required are --model, of which only the config and the tokenizer are
    read, and --dataset, or a --recipe or file that names them. The exit code is 0 if nothing spoils a training, 1 if
    something does, and 2 if an option is wrong.
    """

    reads = (options.CheckOptions, *options.OF_TRAINING)
    shown = "output_dir dataloader_num_workers"


class Train(Parser):
    """Train a dual encoder (CLIP, SigLIP, ...) with the exact contrastive loss of the global batch.

    Required are --model and --dataset, or a --recipe or file that names them.
    """

    reads = options.OF_TRAINING
    shown: ClassVar = {
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


class Evaluate(Parser):
    """Measure a dual encoder, or several and how they differ: classification, or loss and retrieval of pairs, or both.

    Of several models, the differences from the first are measured, with their 95% intervals.
    """

    reads = (options.MeasuredModelOptions, options.ColumnOptions, options.EvaluationOptions)
    shown = OF_EVALUATION

    def __init__(self) -> None:
        super().__init__()
        (dims,) = (action for action in self._actions if action.dest == "dims")
        dims.nargs, dims.metavar = "+", "N"
        dims.help = (
            "Cut the embeddings to this many dimensions. Several numbers are those of the models in their order."
        )


class Average(Parser):
    """Average the weights before and after a fine-tuning, so that less is forgotten.

    The average returns most of what was forgotten for a part of what was gained.

    Args:
        start: The model from which the fine-tuning began: a Hub id or a folder.
        end: The model after it. Adapters are merged into their model first.
    """

    reads = (options.AverageOptions, options.ColumnOptions, options.EvaluationOptions, options.GuardOptions)
    shown = OF_EVALUATION
    positionals = ("start", "end")


class Embed(Parser):
    """Write the normalised embeddings of images and texts, with their keys, on one process or several.

    A second run computes what the first one has not. For --teacher_embeddings, give the whole command of a training, or
    its file, instead of DATA: its --dataset and --replay_dataset are embedded as the training reads them.

    Args:
        encoder: The model that embeds: a Hub id or a folder.
        data: A folder or a Hub id; with --streaming tar or parquet shards.
    """

    reads = (options.EmbedOptions, *options.OF_TRAINING)
    shown: ClassVar = {
        "Embeddings": f"key_column format half_precision {OF_EMBEDDING}",
        "Data": "dataset split streaming on_bad_sample augmentation replay_dataset exclude image_column caption_column "
        "pair_id_column",
    }
    optional = ("model", "dataset", "data")
    positionals = ("encoder", "data")


class Score(Parser):
    """Write how well each image of a training set and its caption belong together, to find wrong pairs.

    A model sees how well they do. The pairs that do not seem to are drawn.

    Args:
        model: The model: a Hub id or a folder.
        data: The training set: a folder or a Hub id; with --streaming tar or parquet shards.
    """

    reads = (options.ScoreOptions, options.ColumnOptions)
    shown = OF_EMBEDDING
    positionals = ("model", "data")


class Card(Parser):
    """Write the model card of a trained model again, with the template of this version.

    Args:
        folder: The --output_dir of `infcl train`, or a copy of the repository that it pushed.
    """

    positionals = ("folder",)


class Convert(Parser):
    """Write a model of OpenCLIP in transformers' format, or the other way round, with its processor.

    Args:
        source: A folder with open_clip_config.json and weights, a Hub repository that holds these, or a .pt of
            OpenCLIP's training; with --to open_clip, a folder or a Hub repository of transformers. Or adapters, which
            are merged into their model.
        target: The folder to write, which may also be the source.
    """

    reads = (options.ConvertOptions,)
    positionals = ("source", "target")


PARSERS = {kind.__name__.lower(): kind for kind in (Check, Train, Evaluate, Average, Embed, Score, Card, Convert)}
