"""The options of `infcl embed`, without an import of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...options.declaring import command_option


@dataclass
class EmbedOptions:
    _argument_group_name: ClassVar[str] = "Embeddings"

    key_column: str | None = command_option(
        "Column that names each row of a table. By default the path of its image, or else its number. The "
        "keys of a stream are the names of the samples, after that of the shard."
    )
    format: Literal["parquet", "safetensors", "npy"] = command_option(
        "The format of the files that are written. npy, which --dataset implies, is mapped into memory: a "
        "training reads it with --teacher_embeddings.",
        default="parquet",
    )
    half_precision: bool = command_option(
        "With npy: 16 instead of 32 bits for each number, half of the disk.", default=False
    )
    views: int | None = command_option(
        "With --dataset: embed so many augmented views of each image, those of the first epochs of a "
        "training with this --augmentation and --seed, which then come again. By default, the images as they are."
    )

    def __post_init__(self) -> None:
        if self.views is not None and self.views < 1:
            raise ValueError(f"views must be at least 1, got {self.views}.")
