"""What is evaluated beside a training or an average, and what the model should keep: options of several commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass
class EvaluationOptions:
    _argument_group_name: ClassVar[str] = "Evaluation"

    eval_dataset: str | None = field(
        default=None, metadata={"help": "Image-text pairs to measure the loss and retrieval on: a Hub id or a folder."}
    )
    eval_split: str | None = field(
        default=None,
        metadata={"help": "Split of --eval_dataset. By default test, or else validation, or else its only split."},
    )
    eval_image_column: str | None = field(
        default=None, metadata={"help": "Column of images in --eval_dataset, if it differs from --image_column."}
    )
    eval_caption_column: str | None = field(
        default=None, metadata={"help": "Column of captions in --eval_dataset, if it differs from --caption_column."}
    )
    zero_shot_dataset: str | None = field(
        default=None, metadata={"help": "Labelled images to measure zero-shot classification on: a Hub id or a folder."}
    )
    zero_shot_split: str | None = field(
        default=None, metadata={"help": "Split of --zero_shot_dataset. By default as for --eval_split."}
    )
    zero_shot_image_column: str | None = field(
        default=None, metadata={"help": "Column of images in --zero_shot_dataset, if it differs from --image_column."}
    )
    eval_pictures: int = field(
        default=0,
        metadata={
            "help": "Images of --eval_dataset to draw with the captions that they find. Each evaluation draws them "
            "into pictures.png in --output_dir, which is pushed with the model."
        },
    )
    eval_benchmark: list[str] | None = field(
        default=None,
        metadata={
            "aliases": ["--benchmark"],
            "help": "Named benchmarks to measure, such as imagenet1k flickr30k vtab+. They are read from the Hub "
            "(clip-benchmark/wds_imagenet1k) or --benchmark_folder, and their own files name classes and prompts.",
        },
    )
    benchmark_folder: str | None = field(
        default=None,
        metadata={"help": "Folder with local copies of the benchmarks. Each is in a folder such as wds_imagenet1k."},
    )
    label_column: str = field(default="label", metadata={"help": "Column of class numbers in --zero_shot_dataset."})
    class_names: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the classes, by number, or a file with one in each line. Names of folders are matched by "
            "name. By default those stored in the dataset, which for a folder of folders are the names of these."
        },
    )
    templates: list[str] = field(
        default_factory=lambda: ["a photo of a {}."],
        metadata={"help": "Prompts with {} for the class, or a file of them; 'a photo of a {}.' by default."},
    )

    def __post_init__(self) -> None:
        if self.eval_pictures < 0 or (self.eval_pictures and not self.eval_dataset):
            raise ValueError(
                f"eval_pictures must be at least 0. Above 0 it also needs --eval_dataset, whose images it draws. Got "
                f"{self.eval_pictures} and --eval_dataset {self.eval_dataset}."
            )


@dataclass
class GuardOptions:
    _argument_group_name: ClassVar[str] = "What the model should keep"

    guard_dataset: list[str] | None = field(
        default=None,
        metadata={
            "help": "Pairs or classes on which the model should not get worse, Hub ids or folders. Images without "
            "captions are classified with --templates. A training measures them before and after."
        },
    )
    guard_benchmark: list[str] | None = field(
        default=None,
        metadata={"help": "Named benchmarks, as for --eval_benchmark, on which the model should not get worse."},
    )
    guard_split: str | None = field(
        default=None, metadata={"help": "The split of each --guard_dataset. By default as for --eval_split."}
    )
    guard_image_column: str | None = field(
        default=None, metadata={"help": "Column of images in each --guard_dataset, if it differs from --image_column."}
    )
    guard_caption_column: str | None = field(
        default=None,
        metadata={"help": "Column of captions in each --guard_dataset, if it differs from --caption_column."},
    )
    guard_tolerance: float = field(
        default=0.01,
        metadata={
            "help": "What each guard may lose in an average that is chosen, as a fraction. 0.01 is one point of "
            "recall@1 (the mean of both directions) or of top-1 accuracy. One half of the rows of each guard chooses, "
            "the other half reports what was kept."
        },
    )


@dataclass
class StartOptions(GuardOptions):
    _argument_group_name: ClassVar[str] = "What the model should keep"

    average_with_start: str | None = field(
        default=None,
        metadata={
            "help": "Save the average of the weights before and after: 0.5 is halfway, or 'auto'. This "
            "measures 0, 0.1 ... 1 and takes the greatest gain on --eval_dataset and --zero_shot_dataset at which "
            "every --guard_dataset stays within --guard_tolerance; of gains within the interval of the greatest, "
            "that with the lowest loss. The weights of the end stay in the last checkpoint."
        },
    )
    average_path: Literal["line", "depth"] = field(
        default="line",
        metadata={
            "help": "With --average_with_start, as --path of `infcl average`. 'line' scales every change alike "
            "(WiSE-FT); 'depth' scales those of early layers more (LiNeS)."
        },
    )


@dataclass
class AverageOptions:
    _argument_group_name: ClassVar[str] = "Average"

    alpha: str = field(
        default="0.5",
        metadata={
            "help": "How far to go from START (0) to END (1), or 'auto'. This measures 0, 0.1 ... 1 and takes the "
            "greatest gain on --eval_dataset and --zero_shot_dataset at which every --guard_dataset stays within "
            "--guard_tolerance; of gains within the interval of the greatest, that with the lowest loss."
        },
    )
    path: Literal["line", "depth"] = field(
        default="line",
        metadata={
            "help": "'line' scales every change alike (WiSE-FT); 'depth' scales those of early layers more (LiNeS)."
        },
    )
