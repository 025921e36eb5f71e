"""What holds for a dataset and for all datasets that it wraps."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset


def set_epoch(dataset: object, epoch: int) -> None:
    """Calls ``set_epoch`` of a dataset and of all datasets that it wraps, where the method exists."""
    for part in all_parts(dataset):
        if callable(method := getattr(part, "set_epoch", None)):
            method(epoch)


def has_epochs(dataset: object) -> bool:
    """Whether a dataset, or one that it wraps, has a method ``set_epoch``."""
    return any(callable(getattr(part, "set_epoch", None)) for part in all_parts(dataset))


def most_captions(dataset: object) -> int:
    """The maximum number of captions per image drawn by a dataset or one that it wraps."""
    return max((getattr(part, "captions_per_image", 1) for part in all_parts(dataset)), default=1)


def negative_caption_columns(dataset: object) -> list[str]:
    """The columns of negative captions of a dataset and of all datasets that it wraps."""
    columns = (getattr(part, "negative_caption_column", None) for part in all_parts(dataset))
    return sorted({column for column in columns if column})


def gives(dataset: object, key: str) -> bool:
    """Whether the items of a dataset have this one of the keys that not all datasets give."""
    return any(key in getattr(part, "optional_keys", ()) for part in all_parts(dataset))


def content_fingerprint(dataset: object) -> str:
    """A fingerprint of the contents of a dataset and of all datasets that it wraps; empty if none has one."""
    tags = [part.content_fingerprint() for part in all_parts(dataset) if hasattr(part, "content_fingerprint")]
    return tags[0] if len(tags) == 1 else hashlib.sha256(" ".join(tags).encode()).hexdigest()[:16] if tags else ""


def all_parts(dataset: object) -> Iterator[Any]:
    """A dataset and all datasets that it wraps.

    It looks into the attributes ``dataset`` and ``datasets``, where torch's Subset, ConcatDataset and
    random_split and accelerate's shards of streams keep them.
    """
    pending: list[object] = [dataset]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        several = getattr(part, "datasets", ())
        if isinstance(several, Mapping):
            several = several.values()
        pending += [getattr(part, "dataset", None), *(several if isinstance(several, Collection) else ())]


def check_has_rows(dataset: object) -> None:
    """Raises a ValueError if a dataset to evaluate is, or wraps, a stream: the last rows would count several times."""
    if streams := [part for part in all_parts(dataset) if isinstance(part, IterableDataset)]:
        raise ValueError(
            f"A {type(streams[0]).__name__} cannot be evaluated, since processes cannot share its rows equally. "
            'Evaluate a dataset that has a length, such as ImageTextDataset(load_pairs("shards", split="test"), '
            "all_captions=True), for tar shards as well."
        )
