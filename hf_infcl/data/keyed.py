"""What a pair is known by whenever it is trained: the row of a table, or a hash of the name of a stream's sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset

NO_KEY = -1


class KeyedItem(NamedTuple):
    """An item of a training set with its key: at least 0 and less than 2⁶³, or `NO_KEY`. A stream's has a name too."""

    item: Any
    key: int
    name: str = ""

    @classmethod
    def of_row(cls, item: Any, row: int) -> KeyedItem:
        """The item of a row, which has no key if another row replaces one that is bad."""
        replaces = isinstance(item, Mapping) and item.get("skipped")
        return cls(item, NO_KEY if replaces else int(row))


class KeyedRows(Dataset[KeyedItem]):
    """A dataset with a length whose items have the numbers of their rows as keys.

    Args:
        dataset: of any kind; its own rows may be those of other datasets.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> KeyedItem:
        return KeyedItem.of_row(self.dataset[row], row)

    def __getitems__(self, rows: Sequence[int]) -> list[KeyedItem]:
        return keyed_rows(rows_of(self.dataset, rows), rows)


def rows_of(dataset: Any, rows: Sequence[int]) -> Any:
    """The items of some rows."""
    several = getattr(dataset, "__getitems__", None)
    return several(rows) if callable(several) else [dataset[row] for row in rows]


def keyed_rows(items: Sequence[Any], rows: Sequence[int]) -> list[KeyedItem]:
    """The items of some rows, each with its key."""
    return [KeyedItem.of_row(item, row) for item, row in zip(items, rows, strict=True)]
