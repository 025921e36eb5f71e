"""The options of `infcl score`, without an import of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...options.declaring import command_option


@dataclass
class ScoreOptions:
    _argument_group_name: ClassVar[str] = "Scores"

    split: str = command_option("Split of the data.", default="train", of_one_set=True)
    streaming: bool = command_option(
        "The data are tar or parquet shards, such as 'shards/{00000..00127}.tar', which are read once.", default=False
    )
    on_bad_sample: Literal["raise", "skip"] = command_option(
        "What to do with a broken image or an empty caption: end, or leave it out.", default="raise"
    )
    captions_per_image: int = command_option(
        "Number of captions drawn from an image's list, whose mean cosine counts.", default=1
    )
    window: int = command_option(
        "Number of pairs that are compared with each other. All are drawn at random.", default=4096
    )

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window must be at least 2, because a pair is compared with others, got {self.window}.")
