"""The options of `infcl embed`, without an import of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass
class EmbedOptions:
    _argument_group_name: ClassVar[str] = "Embeddings"

    split: str = field(default="train", metadata={"help": "Split of the data."})
    streaming: bool = field(
        default=False, metadata={"help": "Read tar or parquet shards, such as 'shards/{00000..00127}.tar'."}
    )
    key_column: str | None = field(
        default=None,
        metadata={
            "help": "Column that names each row of a table. By default the path of its image, or else its number. The "
            "keys of a stream are the names of the samples, after that of the shard."
        },
    )
    format: Literal["parquet", "safetensors", "npy"] = field(
        default="parquet",
        metadata={
            "help": "The format of the files that are written. npy is mapped into memory: a training reads it with "
            "--teacher_embeddings."
        },
    )
    half_precision: bool = field(
        default=False, metadata={"help": "With npy: 16 instead of 32 bits for each number, half of the disk."}
    )
    on_bad_sample: Literal["raise", "skip"] = field(
        default="raise", metadata={"help": "What to do with a broken image: end, or leave it out and count it."}
    )
