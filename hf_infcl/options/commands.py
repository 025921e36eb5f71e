"""The options of the commands, beside those of the training; read without torch."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from typing import ClassVar

from .declaring import FROM_0, FROM_1, Range, command_option

BAD_SAMPLES = ("raise", "skip")


@dataclass
class ModelOptions:
    _argument_group_name: ClassVar[str] = "Model"

    model: str = command_option(
        "The model: a Hub id, a folder or a .pt, of transformers or of OpenCLIP. Adapters come with their model, and a "
        "training continues them. Required.",
        default=MISSING,
    )
    open_clip_model: str | None = command_option(
        "For a .pt: OpenCLIP's name of the model, such as ViT-B-32, or its config as JSON."
    )
    tokenizer: str | None = command_option(
        "Another tokenizer than the model's own: a Hub id or a folder. It is saved with the model. A .pt has none, and "
        "gets CLIP's from the Hub without this option."
    )


@dataclass
class MeasuredModelOptions(ModelOptions):
    model: list[str] = command_option(  # type: ignore[assignment]  # several in place of one
        "The model, or several to compare: Hub ids, folders or a .pt, of transformers or of OpenCLIP. Adapters come "
        "with their model. Required.",
        default=MISSING,
    )


@dataclass
class TrainedModelOptions(ModelOptions):
    new_weights: list[str] | None = command_option(
        "Weights or modules that the checkpoint may lack, such as visual_projection. They are drawn from --seed. A "
        "checkpoint that lacks others is refused."
    )


@dataclass
class LoraOptions:
    _argument_group_name: ClassVar[str] = "LoRA adapters (package peft)"

    lora_rank: int | None = command_option(
        "Train LoRA adapters of this rank instead of the weights. Their alpha is twice the rank."
    )
    lora_targets: list[str] = command_option(
        "Names of the layers that get adapters, such as q_proj v_proj.", default=["all-linear"]
    )
    lora_logit_scale: bool = command_option(
        "Train logit_scale and logit_bias beside new adapters. They are then in the adapter's file.", default=False
    )
    lora_merge: bool = command_option(
        "At the end, merge the adapters into the weights. The whole model is saved and pushed instead.", default=False
    )


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
        "For a broken image or an empty caption: 'raise' or 'skip'.", default="raise", choices=BAD_SAMPLES
    )
    augmentation: str = command_option(
        "Random changes of the images: 'none', 'crop' or 'flip_crop'. 'crop' takes 0.9 to 1 of the image, as CLIP is "
        "trained from scratch; 'flip_crop' also flips half of the images left to right.",
        default="none",
        choices=("none", "crop", "flip_crop"),
    )
    min_side: int | None = command_option(
        "Decode JPEGs at 1/2, 1/4 or 1/8 of their size if both sides keep at least this many pixels. This is faster "
        "and changes the pixels slightly.",
        within=FROM_1,
    )
    streaming: bool = command_option(
        "Read tar or parquet shards during the training, as a stream of unknown length.", default=False
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
        "Captions from the names of classes, such as 'a photo of a {c}', or a file of them. For images in a folder for "
        "each class: an epoch draws one of the captions of its class for each image, and images of one class are not "
        "each other's negatives."
    )
    captions_per_image: int = command_option(
        "Captions drawn per epoch from an image's list. All of them are its positives.", default=1, within=FROM_1
    )
    negative_caption_column: str | None = command_option(
        "Column of captions that are wrong for the image, strings or lists. Each epoch draws one, which is a negative "
        "of all images."
    )
    shuffle_buffer: int = command_option(
        "With --streaming: the number of samples among which each lane is shuffled.", default=2048, within=FROM_1
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
        "training data, such as --augmentation, apply to them as well."
    )
    exclude: list[str] | None = command_option(
        "Train without the pairs that a ledger calls wrong. Give the file that `infcl score` has written and the least "
        "probability of what is left out, such as _ledger.parquet:0.5, or the share with the lowest scores, such as "
        "_ledger.parquet:5%%. A second ledger must come from a training without what the first one excludes."
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
        "Delete the checkpoints and results of an earlier run first.", default=False
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
        "in a table, that of images."
    )


# The options that say which pairs a training has, and how they are read.
OF_PAIRS = {one.name for kind in (DataOptions, ColumnOptions) for one in fields(kind)}
OF_PAIRS -= {"overwrite_output_dir", "dry_run"}


@dataclass
class EvaluationOptions:
    _argument_group_name: ClassVar[str] = "Evaluation"

    eval_dataset: str | None = command_option(
        "Image-text pairs to measure the loss and retrieval on: a Hub id or a folder. By default, the split of a set "
        "to evaluate is test, or else validation, or else its only one; 'my/tables?split=dev' names another."
    )
    zero_shot_dataset: str | None = command_option(
        "Labelled images to measure zero-shot classification on: a Hub id or a folder."
    )
    eval_pictures: int = command_option(
        "Images of --eval_dataset to draw with the captions that they find. Each evaluation draws them into "
        "pictures.png in --output_dir, which is pushed with the model.",
        default=0,
        within=FROM_0,
        needs="eval_dataset",
    )
    eval_benchmark: list[str] | None = command_option(
        "Named benchmarks to measure, such as imagenet1k flickr30k vtab+. They are read from the Hub "
        "(clip-benchmark/wds_imagenet1k) or --benchmark_folder, and their own files name classes and prompts.",
        aliases=["--benchmark"],
    )
    benchmark_folder: str | None = command_option(
        "Folder with local copies of the benchmarks. Each is in a folder such as wds_imagenet1k."
    )
    label_column: str = command_option("Column of class numbers in --zero_shot_dataset.", default="label")
    class_names: list[str] | None = command_option(
        "Names of the classes, in the order of their numbers, or a file with one in each line. Names of the folders "
        "may have any order. By default those stored in the dataset, or the names of its folders."
    )
    templates: list[str] = command_option(
        "Prompts with {c} for the class, or a file of them; 'a photo of a {c}.' by default.",
        default=["a photo of a {}."],
    )


@dataclass
class GuardOptions:
    _argument_group_name: ClassVar[str] = "What the model should keep"

    guard_dataset: list[str] | None = command_option(
        "Pairs or classes on which the model should not get worse, Hub ids or folders. Images without captions are "
        "classified with --templates. A training measures them before and after."
    )
    guard_benchmark: list[str] | None = command_option(
        "Named benchmarks, as for --eval_benchmark, on which the model should not get worse."
    )
    guard_tolerance: float = command_option(
        "What each guard may lose in the average that is chosen, as a fraction. 0.01 is one point of recall@1 (the "
        "mean of both directions) or of top-1 accuracy. One half of the rows of each guard chooses, the other half "
        "reports what was kept.",
        default=0.01,
        within=Range(Real, "a fraction from 0 to 1, such as 0.01", lambda value: 0 <= value <= 1),
    )


_AUTO = (
    "or 'auto'. This measures 0, 0.1 ... 1 and takes the greatest gain on --eval_dataset and --zero_shot_dataset at "
    "which every --guard_dataset stays within --guard_tolerance; among gains within the interval of the greatest, that "
    "with the lowest loss."
)


@dataclass
class StartOptions(GuardOptions):
    average_with_start: str | None = command_option(
        f"Save the average of the weights before and after the training: 0.5 is halfway, {_AUTO} The last checkpoint "
        "keeps the weights of the end."
    )


OF_TRAINING = (TrainedModelOptions, LoraOptions, DataOptions, ColumnOptions, EvaluationOptions, StartOptions)


@dataclass
class AverageOptions:
    _argument_group_name: ClassVar[str] = "Average"

    alpha: str = command_option(f"How far to go from START (0) to END (1), {_AUTO}", default="0.5")


@dataclass
class CheckOptions:
    _argument_group_name: ClassVar[str] = "Check"

    all: bool = command_option("Read all pairs instead of --check_samples.", default=False)


@dataclass
class EmbedOptions:
    _argument_group_name: ClassVar[str] = "Embeddings"

    key_column: str | None = command_option(
        "Column that names each row of a table. By default the path of its image, or else its number. The keys of a "
        "stream are the names of the samples, after that of the shard."
    )
    format: str = command_option(
        "The format of the files that are written: npy, parquet or safetensors. A training reads npy alone, with "
        "--teacher_embeddings.",
        default="npy",
        choices=("npy", "parquet", "safetensors"),
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
    on_bad_sample: str = command_option(
        "For a broken image or an empty caption: 'raise' or 'skip'.", default="raise", choices=BAD_SAMPLES
    )
    captions_per_image: int = command_option(
        "Number of captions drawn from an image's list, whose mean cosine counts.", default=1, within=FROM_1
    )
    window: int = command_option(
        "Number of pairs that are compared with each other. All are drawn at random.",
        default=4096,
        within=Range(Integral, "at least 2, because a pair is compared with others", lambda value: value >= 2),
    )
