"""What a pair is known by whenever it is trained: the row of a table, or a hash of the name of a stream's sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.data import Subset

NO_KEY = -1


class SizedDataset(Protocol):
    """A dataset with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class KeyedItem(NamedTuple):
    """An item of a training set with its key: at least 0 and less than 2⁶³, or `NO_KEY`. A stream's has a name too."""

    item: Any
    key: int
    name: str = ""


class PlainRows(Subset[Any]):
    """The rows of a dataset with a length, without its other methods.

    Loaders of accelerate call a method ``set_epoch`` whenever they are iterated. That of a dataset that is evaluated
    would change the epoch of a training on the same dataset.
    """

    def __init__(self, dataset: SizedDataset) -> None:
        super().__init__(dataset, range(len(dataset)))  # type: ignore[arg-type]


class KeyedRows(PlainRows):
    """The rows of a dataset with a length, each with its number as the key."""

    def __getitem__(self, row: int) -> KeyedItem:
        return keyed_rows([super().__getitem__(row)], [row])[0]

    def __getitems__(self, rows: list[int]) -> list[KeyedItem]:
        return keyed_rows(super().__getitems__(rows), rows)


def read_rows(dataset: SizedDataset, rows: Sequence[int]) -> Any:
    """The items of some rows."""
    several = getattr(dataset, "__getitems__", None)
    return several(rows) if callable(several) else [dataset[row] for row in rows]


def keyed_rows(items: Sequence[object], rows: Sequence[int]) -> list[KeyedItem]:
    """The items of some rows, each with its key. An item that stands in for a bad row has none."""
    replaced = [isinstance(item, Mapping) and item.get("skipped") for item in items]
    return [KeyedItem(item, NO_KEY if bad else int(row)) for item, bad, row in zip(items, replaced, rows, strict=True)]
