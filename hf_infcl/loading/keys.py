"""The keys by which the pairs of a training set are known, for a selection that remembers them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from ..data import ImageTextStream
from ..data.keyed import KeyedRows
from ..options.arguments import InfCLTrainingArguments
from .replay import Replayed


def check_keyed(dataset: Any, args: InfCLTrainingArguments) -> None:
    """Raises a ValueError if the pairs of a training set cannot be told apart, which ``leave_out`` needs."""
    of_shards = isinstance(dataset, (ImageTextStream, Replayed))
    if args.leave_out is not None and isinstance(dataset, IterableDataset) and not of_shards:
        raise ValueError(
            f"leave_out={args.leave_out!r} has to recognise each pair when it comes again, but those of a "
            f"{type(dataset).__name__} have no keys. Train on a dataset with a length or an ImageTextStream, or leave "
            "it out."
        )


def with_keys(dataset: Any, args: InfCLTrainingArguments) -> Any:
    """A dataset with a length, whose items are keyed if ``leave_out`` needs that. Streams and replay key theirs."""
    return dataset if args.leave_out is None or isinstance(dataset, IterableDataset) else KeyedRows(dataset)
