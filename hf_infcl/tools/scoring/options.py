"""The options of `infcl score`, without an import of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .. import described


@dataclass
class ScoreOptions:
    _argument_group_name: ClassVar[str] = "Scores"

    split: str = described("train", "Split of the data.")
    streaming: bool = described(
        False, "The data are tar or parquet shards, such as 'shards/{00000..00127}.tar', which are read once."
    )
    on_bad_sample: Literal["raise", "skip"] = described(
        "raise", "What to do with a broken image or an empty caption: end, or leave it out."
    )
    captions_per_image: int = described(1, "Number of captions drawn from an image's list, whose mean cosine counts.")
    window: int = described(4096, "Number of pairs that are compared with each other. All are drawn at random.")

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window must be at least 2, because a pair is compared with others, got {self.window}.")
