"""The package's own options of the commands, beside those of the training."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from numbers import Integral
from typing import ClassVar, Literal

from ...options.declaring import FROM_0, FROM_1, Range, command_option
from ...shards.values import ON_BAD_SAMPLE
from ..scoring import WINDOW


@dataclass
class DataOptions:
    _argument_group_name: ClassVar[str] = "Training data"

    dataset: list[str] = command_option(
        "Image-text pairs to train on: a Hub id or a folder. Required. With --streaming also shards, such as "
        "'shards/{00000..00127}.tar', and more than one dataset.",
        default=MISSING,
    )
    dataset_name: str | None = command_option("Configuration of the training data, if it has several.")
    split: str = command_option("Split of the training data.", default="train")
    on_bad_sample: str = command_option(
        "For a broken image or an empty caption: 'raise' or 'skip'.",
        default="raise",
        choices=ON_BAD_SAMPLE,
    )
    augmentation: str = command_option(
        "Random changes of the images: 'none', 'crop' or 'flip_crop'. 'crop' takes 0.9 to 1 of the image, as CLIP is "
        "trained from scratch; 'flip_crop' also flips half of the images left to right.",
        default="none",
        choices=("none", "crop", "flip_crop"),
    )
    min_side: int | None = command_option(
        "Decode JPEGs at 1/2, 1/4 or 1/8 of their size if both sides keep at least this many pixels. This is faster "
        "and changes the pixels slightly. By default, images are decoded at full size.",
        within=FROM_1,
    )
    streaming: bool = command_option(
        "Read tar or parquet shards during the training, as a stream of unknown length.",
        default=False,
    )
    dataset_weights: list[float] | None = command_option(
        "With --streaming: the proportions in which the samples of several datasets are mixed. By default, they are "
        "read as one set.",
        needs="streaming",
    )
    samples_per_epoch: int | None = command_option(
        "With --streaming: the number of pairs per epoch. Without it, pass --max_steps.",
        within=FROM_1,
        needs="streaming",
    )
    caption_templates: list[str] | None = command_option(
        "Captions from the names of classes, such as 'a photo of a {c}', or a file of them. For images in "
        "a folder for each class: an epoch draws one of the captions of its class for each image, and images of "
        "one class are not each other's negatives.",
    )
    captions_per_image: int = command_option(
        "Captions drawn per epoch from an image's list. All of them are its positives.",
        default=1,
        within=FROM_1,
    )
    negative_caption_column: str | None = command_option(
        "Column of captions that are wrong for the image, strings or lists. Each epoch draws one, which is a negative "
        "of all images."
    )
    shuffle_buffer: int = command_option(
        "With --streaming: the number of samples among which each lane (see --lanes) is shuffled.",
        default=2048,
        within=FROM_1,
    )
    lanes: int | None = command_option(
        "With --streaming: the number of lanes among which the shards are dealt; a worker reads each alone. A run can "
        "resume with other numbers of processes and workers (--dataloader_num_workers) if their product divides it. "
        "Defaults to that product at the start.",
        needs="streaming",
    )
    replay_dataset: list[str] | None = command_option(
        "Old pairs that the model should not forget. Every global batch gets --replay_share of them. Hub ids or "
        "folders, or shards whose name ends with '?streaming=true'; several are read as one set. Options of the "
        "training data, such as --augmentation, apply to them as well.",
    )
    exclude: list[str] | None = command_option(
        "Train without the pairs that a ledger calls wrong. Give the file that `infcl score` has written and the least "
        "probability of what is left out, such as _ledger.parquet:0.5, or the share with the lowest scores, such as "
        "_ledger.parquet:5%%. A second ledger must come from a training without what the first one excludes.",
    )
    check_samples: int | None = command_option(
        "Pairs to read before the training, to tell what is wrong with them; 0 for none. Defaults to 256, and to "
        "10,000 of each set in `infcl check`.",
        within=FROM_0,
    )
    dry_run: bool = command_option(
        "Train three steps and print memory, images a second and the time of the whole training. Nothing is written.",
        default=False,
    )
    overwrite_output_dir: bool = command_option(
        "Delete the checkpoints and results of an earlier run first.",
        default=False,
    )


@dataclass
class ColumnOptions:
    _argument_group_name: ClassVar[str] = "Columns of the training data, and of other datasets that have them"

    image_column: str = command_option(
        "Column of images, paths or encoded images. A table without this column is read by the only one of images or "
        "of a usual name, such as filepath.",
        default="image",
    )
    caption_column: str = command_option(
        "Column of captions: a string or a list of them. A table without this column is read by the only one of a "
        "usual name, such as text.",
        default="caption",
    )
    pair_id_column: str | None = command_option(
        "Rows with equal values in this column are never each other's negatives. It may be the column of captions or, "
        "in a table, that of images.",
    )


# The options that say which pairs a training has, and how they are read.
OF_PAIRS = {one.name for options in (DataOptions, ColumnOptions) for one in fields(options)} - {
    "overwrite_output_dir",
    "dry_run",
}


@dataclass
class CheckOptions:
    _argument_group_name: ClassVar[str] = "Check"

    all: bool = command_option("Read all pairs instead of --check_samples.", default=False)


@dataclass
class EmbedOptions:
    _argument_group_name: ClassVar[str] = "Embeddings"

    key_column: str | None = command_option(
        "Column that names each row of a table. By default the path of its image, or else its number. The "
        "keys of a stream are the names of the samples, after that of the shard."
    )
    format: Literal["npy", "parquet", "safetensors"] = command_option(
        "The format of the files that are written. A training reads npy alone, with --teacher_embeddings.",
        default="npy",
    )
    half_precision: bool = command_option(
        "With npy: 16 instead of 32 bits for each number, half of the disk.", default=False
    )


@dataclass
class ScoreOptions:
    _argument_group_name: ClassVar[str] = "Scores"

    split: str = command_option("Split of the data.", default="train")
    streaming: bool = command_option(
        "The data are tar or parquet shards, such as 'shards/{00000..00127}.tar', which are read once.", default=False
    )
    on_bad_sample: Literal["raise", "skip"] = command_option(
        "What to do with a broken image or an empty caption: end, or leave it out.", default="raise"
    )
    captions_per_image: int = command_option(
        "Number of captions drawn from an image's list, whose mean cosine counts.", default=1, within=FROM_1
    )
    window: int = command_option(
        "Number of pairs that are compared with each other. All are drawn at random.",
        default=WINDOW,
        within=Range(Integral, "at least 2, because a pair is compared with others", lambda value: value >= 2),
    )
