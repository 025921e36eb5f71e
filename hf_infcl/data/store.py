"""Rows with keys, and a store of arrays by these keys: written in parts, looked up at random.

A key is the row of a table, or a hash of the name of a stream's sample. Also found here: facts that hold for a dataset
and for all datasets that it wraps."""

import hashlib
import json
import logging
import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
from torch.utils.data import IterableDataset, Subset

from ..files.whole import describe, give_usual_modes, written_whole

NO_KEY = -1


class SizedDataset(Protocol):
    """A dataset with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class KeyedItem(NamedTuple):
    """An item of a training set with its key: at least 0 and less than 2⁶³, or `NO_KEY`.

    One of a stream also has a name, and the number of passes before that in which it is read.
    """

    item: Any
    key: int
    name: str = ""
    passes: int = 0


class KeyedRows(Subset[Any]):
    """Some rows of a dataset with a length, of which a loader gets batches; the key of each is its number there."""

    def __getitems__(self, indices: list[int]) -> list[KeyedItem]:
        return keyed_rows(super().__getitems__(indices), [self.indices[index] for index in indices])


def keyed_rows(items: Sequence[object], rows: Sequence[int]) -> list[KeyedItem]:
    """The items of some rows, each with its key. An item that stands in for a bad row has none."""
    replaced = [isinstance(item, Mapping) and item.get("skipped") for item in items]
    return [KeyedItem(item, NO_KEY if bad else int(row)) for item, bad, row in zip(items, replaced, rows, strict=True)]


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


_MOST_OPEN = 128  # parts that a process maps at a time, since each takes a file descriptor
_ROW = 2**32 - 1  # the lower half of a place, whose upper half is the part

logger = logging.getLogger(__name__)


class Store:
    """Arrays [n, D] of one name in a folder, by the keys of their rows.

    Part 2 of 10 is a file such as ``images-00002-of-00010.npy`` and, written before it, one that ends in ``.json``,
    with its checksum, its keys and other lists with a value for each row. Once all parts are there, the index of
    `finish` has the sorted hashes of all keys and the place of each. A look-up reads about thirty values of the index
    and the row itself, so 10 million rows need no more memory than what was read last.
    """

    def __init__(self, folder: str | Path, name: str, parts: int) -> None:
        self.folder, self.name = Path(folder), name
        self._paths = [self.folder / f"{name}-{part:05}-of-{parts:05}.npy" for part in range(parts)]
        self._index_path = self.folder / f"{name}.index.npy"
        self._open: dict[int, np.ndarray] = {}  # the parts that are mapped into memory

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.folder, self.name, len(self._paths))  # another process maps the files itself

    # ---- Writing ----

    def lacks(self, part: int) -> bool:
        """Whether a part is not there, or has changed since it was written."""
        if not (path := self._paths[part]).exists():
            return True
        with suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["file"] == describe(path):
                return False
        logger.warning("%s is damaged, or has no checksum. It is computed again.", path)
        return True

    def write(self, part: int, keys: Sequence[str], values: np.ndarray, **columns: Sequence[str]) -> None:
        """Writes the rows [n, D] of a part, and what else is known of each, completely or not at all."""
        with written_whole(self._paths[part]) as partial:
            np.save(partial, values)
            beside = {"file": describe(partial), "keys": list(keys), **columns}
            self._paths[part].with_suffix(".json").write_text(json.dumps(beside), encoding="utf-8")

    def finish(self) -> None:
        """Writes the index of all parts."""
        every = [np.empty((2, 0), np.uint64)]
        for part, path in enumerate(self._paths):
            keys = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["keys"]
            every.append(np.stack((hashed(keys), (part << 32) + np.arange(len(keys), dtype=np.uint64))))
        whole = np.concatenate(every, axis=1)
        with written_whole(self._index_path) as partial:
            np.save(partial, whole[:, whole[0].argsort(kind="stable")])

    @property
    def is_finished(self) -> bool:
        return self._index_path.exists()

    # ---- Reading ----

    def __len__(self) -> int:
        return self._index.shape[1]

    @property
    def first_part(self) -> np.ndarray:
        """The part with the first row of the index, whose width D and dtype all parts have; [0, 0] without rows."""
        return self._part(int(self._index[1, 0]) >> 32) if len(self) else np.empty((0, 0), np.float32)

    def missing(self, keys: Sequence[str]) -> np.ndarray:
        """Which of some keys have no row, [keys] bool; no row is read."""
        return ~self._look_up(keys)[1]

    def find(self, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The rows of some keys [keys, D], zeros where there is none, and whether there is one, [keys] bool.

        Raises:
            ValueError: files are damaged.
        """
        places, known = self._look_up(keys)
        values = np.zeros((len(keys), self.first_part.shape[1]), self.first_part.dtype)
        try:
            for row in np.flatnonzero(known):
                values[row] = self._part(int(places[row]) >> 32)[int(places[row]) & _ROW]
        except (IndexError, ValueError) as error:
            raise self._damaged(error) from error
        return values, known

    def _look_up(self, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The places of some keys [keys], and whether they are there, [keys] bool."""
        (hashes, places), wanted = self._index, hashed(keys)
        if len(hashes) == 0:
            return np.zeros(len(keys), np.uint64), np.zeros(len(keys), bool)
        at = np.searchsorted(hashes, wanted).clip(max=len(hashes) - 1)
        return places[at], hashes[at] == wanted

    @cached_property
    def _index(self) -> np.ndarray:
        """[2, n] uint64, mapped into memory: hashes and places."""
        index = self._mapped(self._index_path)
        if index.shape != (2, index.shape[-1]):
            raise self._damaged(f"an index of the shape {list(index.shape)}")
        return index

    def _part(self, number: int) -> np.ndarray:
        if number not in self._open:
            if len(self._open) == _MOST_OPEN:
                self._open.clear()
            values: Any = self._mapped(self._paths[number])
            other = next(iter(self._open.values()), values)
            if values.ndim != 2 or values.shape[1] != other.shape[1]:
                raise ValueError(f"{self._paths[number]} has the shape {list(values.shape)}")
            # Or the system would read 128 KiB for each row of files that do not stay in memory anyway. Of smaller ones
            # it should read ahead: the rows that come along are looked up later.
            are_large = values[:1].nbytes * len(self) > psutil.virtual_memory().total / 2
            if are_large and hasattr(mmap, "MADV_RANDOM"):  # which Windows lacks
                values.base.madvise(mmap.MADV_RANDOM)
            self._open[number] = values
        return self._open[number]

    def _mapped(self, path: Path) -> np.ndarray:
        try:
            return np.load(path, mmap_mode="r")
        except (EOFError, OSError, ValueError) as error:
            raise self._damaged(error) from error

    def _damaged(self, why: object) -> ValueError:
        return ValueError(f"The files of {self.name} in {self.folder} are damaged ({why}). Compute them again.")


class PartFiles:
    """Parts in parquet or safetensors, which no training reads, so that they have no index."""

    def __init__(self, folder: Path, kind: str, parts: int, format: str) -> None:
        self._paths = [folder / f"{kind}-{part:05}-of-{parts:05}.{format}" for part in range(parts)]

    def lacks(self, part: int) -> bool:
        return not self._paths[part].exists()

    def write(self, part: int, keys: Sequence[str], values: np.ndarray, **columns: Sequence[str]) -> None:
        known_by = {"keys" if name == "names" else name: words for name, words in columns.items()}
        with written_whole(self._paths[part]) as partial_path:
            if self._paths[part].suffix == ".parquet":
                import pyarrow as pa
                import pyarrow.parquet as pq

                texts = {name.removesuffix("s"): pa.array(words, pa.string()) for name, words in known_by.items()}
                flat = pa.array(values.reshape(-1), pa.float32())
                embedding = pa.FixedSizeListArray.from_arrays(flat, max(1, values.shape[1]))
                pq.write_table(pa.table({**texts, "embedding": embedding}), partial_path)
            else:
                from safetensors.numpy import save_file

                texts = {name: json.dumps(words, ensure_ascii=False) for name, words in known_by.items()}
                save_file({"embeddings": values}, partial_path, texts)
                give_usual_modes(partial_path)


Writer = Store | PartFiles


def of_caption(key: str, caption: str) -> str:
    """The key of the row of a caption: that of its pair, and the caption."""
    return f"{key}\0{caption}"


def hashed(keys: Iterable[str]) -> np.ndarray:
    """[n] uint64: 8 bytes of the BLAKE2b hash of each key. Among 10 million, a collision has a probability of 3e-6."""
    return np.frombuffer(b"".join(hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys), np.uint64)
