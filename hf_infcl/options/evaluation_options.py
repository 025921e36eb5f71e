"""What is evaluated beside a training or an average, and what the model should keep: options of several commands."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from .declaring import FROM_0, Range, command_option


@dataclass
class EvaluationOptions:
    _argument_group_name: ClassVar[str] = "Evaluation"

    eval_dataset: str | None = command_option(
        "Image-text pairs to measure the loss and retrieval on: a Hub id or a folder. By default, the split of a set "
        "to evaluate is test, or else validation, or else its only one; 'my/tables?split=dev' names another.",
    )
    zero_shot_dataset: str | None = command_option(
        "Labelled images to measure zero-shot classification on: a Hub id or a folder.",
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
        "may have any order. By default those stored in the dataset, or the names of its folders.",
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
        "classified with --templates. A training measures them before and after.",
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


@dataclass
class StartOptions(GuardOptions):
    _argument_group_name: ClassVar[str] = "What the model should keep"

    average_with_start: str | None = command_option(
        "Save the average of the weights before and after the training: 0.5 is halfway, or 'auto'. This measures 0, "
        "0.1 ... 1 and takes the greatest gain on --eval_dataset and --zero_shot_dataset at which every "
        "--guard_dataset stays within --guard_tolerance; among gains within the interval of the greatest, that with "
        "the lowest loss. The last checkpoint keeps the weights of the end.",
    )


@dataclass
class AverageOptions:
    _argument_group_name: ClassVar[str] = "Average"

    alpha: str = command_option(
        "How far to go from START (0) to END (1), or 'auto'. This measures 0, 0.1 ... 1 and takes the greatest gain on "
        "--eval_dataset and --zero_shot_dataset at which every --guard_dataset stays within --guard_tolerance; among "
        "gains within the interval of the greatest, that with the lowest loss.",
        default="0.5",
    )
