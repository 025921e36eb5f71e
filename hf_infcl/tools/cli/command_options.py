"""The options of the commands that are no options of a training."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from .. import described


@dataclass
class DataOptions:
    _argument_group_name: ClassVar[str] = "Training data"

    dataset: list[str] = field(
        metadata={
            "help": "Image-text pairs to train on: a Hub id or a folder. Required. With --streaming also shards, such "
            "as 'shards/{00000..00127}.tar', and more than one dataset."
        }
    )
    dataset_name: str | None = described(None, "Configuration of the training data, if it has several.")
    split: str = described("train", "Split of the training data.")
    on_bad_sample: str = described("raise", "For a broken image or an empty caption: 'raise' or 'skip'.")
    augmentation: str = described(
        "none",
        "Random changes of the images: 'none', 'crop' or 'flip_crop'. 'crop' takes 0.9 to 1 of the image, "
        "as CLIP is trained from scratch; 'flip_crop' also flips half of the images left to right.",
    )
    min_side: int | None = described(
        None,
        "Decode JPEGs at 1/2, 1/4 or 1/8 of their size if both sides keep at least this many pixels. This "
        "is faster and changes the pixels slightly. By default, images are decoded at full size.",
    )
    text_dropout: float = described(
        0.0,
        "Probability with which each word of a training caption is left out, drawn anew in each epoch; one "
        "word stays. Evaluations see whole captions.",
    )
    streaming: bool = described(False, "Read tar or parquet shards during the training, as a stream of unknown length.")
    dataset_weights: list[float] | None = described(
        None,
        "With --streaming: the proportions in which the samples of several datasets are mixed. By default, "
        "they are read as one set.",
    )
    samples_per_epoch: int | None = described(
        None, "With --streaming: the number of pairs per epoch. Without it, pass --max_steps."
    )
    caption_templates: list[str] | None = described(
        None,
        "Captions from the names of classes, such as 'a photo of a {c}', or a file of them. For images in "
        "a folder for each class: an epoch draws one of the captions of its class for each image, and images of "
        "one class are not each other's negatives.",
    )
    captions_per_image: int = described(
        1, "Captions drawn per epoch from an image's list. All of them are its positives."
    )
    negative_caption_column: str | None = described(
        None,
        "Column of captions that are wrong for the image, strings or lists. Each epoch draws one, which is "
        "a negative of all images.",
    )
    shuffle_buffer: int = described(
        2048, "With --streaming: the number of samples among which each lane (see --lanes) is shuffled."
    )
    lanes: int | None = described(
        None,
        "With --streaming: the number of lanes that the shards are dealt to, each read alone. A "
        "run can resume with other numbers of processes and workers (--dataloader_num_workers) if their product "
        "divides it. Defaults to that product at the start.",
    )
    replay_dataset: list[str] | None = described(
        None,
        "Old pairs that the model should not forget. Every global batch gets --replay_share of "
        "them. Hub ids or folders, or with --replay_streaming shards; several are read as one set. Options of the "
        "training data, such as --augmentation, apply to them as well.",
    )
    replay_streaming: bool = described(False, "Read every --replay_dataset as a stream of shards, like --streaming.")
    replay_split: str = described("train", "Split of each --replay_dataset.")
    replay_image_column: str | None = described(
        None, "Column of images in each --replay_dataset, if it differs from --image_column."
    )
    replay_caption_column: str | None = described(
        None, "Column of captions in each --replay_dataset, if it differs from --caption_column."
    )
    exclude: list[str] | None = described(
        None,
        "Train without the wrong pairs of a ledger. Give the file that `infcl score` has written and the "
        "least probability of what is left out, such as _ledger.parquet:0.9. Of several ledgers, each is of the "
        "set that those before it leave. Of a stream, only what is left out takes memory: 8 bytes for each pair.",
    )
    check_samples: int | None = described(
        None,
        "Pairs to read before the training, to tell what is wrong with them; 0 for none. "
        "Defaults to 256, and to 10,000 of each set in `infcl check`.",
    )
    overwrite_output_dir: bool = described(False, "Delete the checkpoints and results of an earlier run first.")

    def __post_init__(self) -> None:
        if self.check_samples is not None and self.check_samples < 0:
            raise ValueError(f"check_samples must be at least 0, got {self.check_samples}.")


@dataclass
class ColumnOptions:
    _argument_group_name: ClassVar[str] = "Columns of the training data, and of other datasets that have them"

    image_column: str = described(
        "image",
        "Column of images, paths or encoded images. A table without this column is read by the only one "
        "of images or of a usual name, such as filepath.",
    )
    caption_column: str = described(
        "caption",
        "Column of captions: a string or a list of them. A table without this column is read by the only "
        "one of a usual name, such as text.",
    )
    pair_id_column: str | None = described(
        None,
        "Rows with equal values in this column are never each other's negatives. It may be the column of captions.",
    )

    @property
    def of_pairs(self) -> dict[str, str | None]:
        return {column.name: getattr(self, column.name) for column in fields(self)}


@dataclass
class CheckOptions:
    _argument_group_name: ClassVar[str] = "Check"

    all: bool = described(False, "Read all pairs instead of --check_samples.")
    ledger: Path | None = described(None, "Also tell what a ledger of the training set (`infcl score`) says.")


@dataclass
class PlanOptions:
    _argument_group_name: ClassVar[str] = "Plan"

    global_batch: int | None = described(
        None,
        "Pairs of one optimizer step. By default the product of --gpus, --per_device_train_batch_size and "
        "--gradient_accumulation_steps.",
    )
    gpus: int = described(1, "The number of GPUs.")
    gpu: str = described(
        "h100",
        "The GPU whose measured rates predict the time: h100 or h200. For another GPU, also give its --gpu_memory.",
    )
    gpu_memory: float | None = described(None, "Memory of one GPU in GiB. Defaults to that of --gpu.")
    dataset_size: int | None = described(None, "Pairs of the training set, for the time of an epoch.")
    epochs: float = described(1.0, "Epochs of the training.")
    measure: bool = described(False, "Also time two micro-batches on this machine's GPU.")
