"""A stream of numbered images whose collator looks up the model's inputs by the number."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_infcl import ImageTextStream

from . import models
from .shards import number_of

PAIRS = models.Pairs(1000)


def collate(items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The pairs of model inputs that the numbers in the items' images stand for."""
    batch = PAIRS.batch([number_of(item) for item in items])
    for key, name in (("pair_id", "pair_ids"), ("skipped", "skipped")):
        if key in items[0]:
            batch[name] = torch.tensor([item[key] for item in items])
    return batch


def stream_of(folder: Path | str, **options: Any) -> ImageTextStream:
    return ImageTextStream(str(folder), **{"shuffle_buffer": 10, "open_shards": 2, "lanes": 4, **options})
