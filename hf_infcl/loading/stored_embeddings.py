"""Embeddings in files that are mapped into memory, looked up by the places of their rows: `infcl embed --format npy`.

A folder has, for its images and for its texts, the embeddings in ``images.npy`` [n, D], and an index of two more
arrays: the sorted hashes of the keys of the rows, and the number of the row of each. A look-up reads about thirty
values of the index and the row itself, so 10 million rows need no more memory than what was read last.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ..data.images import BadSampleError, ImageDataset
from ..data.streams import ImageTextStream
from ..shards.opening import content_tag

RECORD = "embeddings.json"
_RECORDED = {"data", "fingerprint", "kinds", "model", "weights"}  # what the record of a folder has at least
SAMPLED = 32  # rows by which a table is recognised


class StoredEmbeddings:
    """A folder of embeddings.

    Raises:
        ValueError: there is no such folder, it is not complete, of another format or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:  # what was embedded, with which model
            self.record: dict[str, Any] = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder} has no {RECORD}, so it holds no embeddings of `infcl embed`. Was it moved or deleted?"
            ) from error
        except ValueError as error:
            raise ValueError(f"{self.folder / RECORD} is damaged ({error}). Embed the data again.") from error
        if not isinstance(self.record, dict):
            raise ValueError(f"{self.folder / RECORD} is damaged: it holds no mapping. Embed the data again.")
        if self.record.get("format") != "npy":
            raise ValueError(
                f"The embeddings in {folder} are in the format {self.record.get('format')!r}, which cannot be mapped "
                "into memory. Write them with `infcl embed --format npy`."
            )
        if lacking := sorted(_RECORDED - self.record.keys()):
            raise ValueError(f"{self.folder / RECORD} is damaged: it lacks {', '.join(lacking)}. Embed the data again.")
        self.kinds: list[str] = self.record["kinds"]  # which of "images" and "texts" it has
        if missing := [kind for kind in self.kinds if not (self.folder / f"{kind}.npy").exists()]:
            raise ValueError(
                f"The embeddings of {' and '.join(missing)} in {folder} are not complete. Run the same `infcl embed` "
                "again: it computes what is missing."
            )
        self._mapped: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        widths = {kind: self._arrays(kind)[2].shape[1] for kind in self.kinds}
        if len(set(widths.values())) > 1:
            raise ValueError(f"The embeddings in {folder} have several widths: {widths}. Embed the data again.")
        self.width: int = next(iter(widths.values()))
        # How many views of each image have embeddings, and what draws them; None for the images as they are.
        self.views: dict[str, Any] | None = self.record["data"].get("views")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mapped": {}}  # another process maps the files itself

    @property
    def rows(self) -> int:
        """The rows of the data that have embeddings: their images', or of captions alone all rows."""
        if "images" not in self.kinds:
            return int(self.record["data"]["rows"])
        return len(self._arrays("images")[0]) // (self.views or {"count": 1})["count"]

    def _arrays(self, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sorted hashes, the row of each, and the embeddings."""
        if kind not in self._mapped:
            paths = index_paths(self.folder, kind)
            try:
                hashes, rows, values = (np.load(path, mmap_mode="r") for path in paths)
            except (EOFError, OSError, ValueError) as error:
                raise ValueError(f"The files of {kind} in {self.folder} are damaged ({error}). Embed again.") from error
            if not (len(hashes) == len(rows) == len(values)) or values.ndim != 2:
                raise ValueError(
                    f"The files of {kind} in {self.folder} do not belong together: {len(hashes)} keys and embeddings "
                    f"of the shape {list(values.shape)}. Embed the data again."
                )
            _read_at_random(values)
            self._mapped[kind] = hashes, rows, values
        return self._mapped[kind]

    def _look_up(self, kind: str, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The places of some keys in the index, [keys], and whether they are there, [keys] bool."""
        hashes, wanted = self._arrays(kind)[0], hashed(keys)
        if len(hashes) == 0:
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
        at = np.searchsorted(hashes, wanted).clip(max=len(hashes) - 1)
        return at, hashes[at] == wanted

    def has(self, kind: str, keys: Sequence[str]) -> np.ndarray:
        """Whether some rows have an embedding, [rows] bool, of which none is read."""
        return self._look_up(kind, keys)[1]

    def find(self, kind: str, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The embeddings of some rows [rows, D], zeros where there is none, and whether there is one, [rows] bool.

        Raises:
            ValueError: an embedding is zero or not finite, or the index names a row that is not there.
        """
        _, rows, values = self._arrays(kind)
        embeddings = np.zeros((len(keys), self.width), values.dtype)
        at, known = self._look_up(kind, keys)
        try:
            embeddings[known] = values[rows[at[known]]]
        except IndexError as error:
            raise ValueError(f"The index of {kind} in {self.folder} is damaged ({error}). Embed again.") from error
        is_usable = np.isfinite(embeddings).all(1) & (embeddings.any(1) | ~known)
        for bad in np.flatnonzero(~is_usable)[:1]:
            what = "zero" if np.isfinite(embeddings[bad]).all() else "not finite"
            raise ValueError(
                f"The embedding of {keys[bad]!r} in {self.folder} ({kind}) is {what}, so the file is damaged. Embed "
                "the data again."
            )
        return embeddings, known


def _read_at_random(values: Any) -> None:
    """Keeps the system from reading 128 KiB for each row of a file that does not stay in memory anyway.

    For smaller files it should read ahead: the rows that come along are asked for later.
    """
    if values.nbytes > psutil.virtual_memory().total / 2 and hasattr(mmap, "MADV_RANDOM"):  # which Windows lacks
        values.base.madvise(mmap.MADV_RANDOM)


def embedding_folders(folder: str) -> list[str]:
    """The folders of embeddings: one for each set that `infcl embed --dataset` has read, or the folder itself."""
    parts = [] if Path(folder, RECORD).exists() else Path(folder).glob(f"*/{RECORD}")
    return sorted(str(path.parent) for path in parts) or [folder]


def of_caption(key: str, caption: str) -> str:
    """The key of the embedding of a caption: the place of its row, and the caption."""
    return f"{key}\0{caption}"


def hashed(keys: Iterable[str]) -> np.ndarray:
    """[n] uint64: 8 bytes of the BLAKE2b hash of each key. Among 10 million, a collision has a probability of 3e-6."""
    digests = [b"", *(hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys)]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def index_paths(folder: Path, kind: str) -> tuple[Path, Path, Path]:
    """The files of a kind: the sorted hashes, the row of each, and the embeddings, whose file is written last."""
    return folder / f"{kind}.hashes.npy", folder / f"{kind}.rows.npy", folder / f"{kind}.npy"


# ---- The data that was embedded ----


ORDER = "image sizes", "image names"  # what tells the order of all rows; tables of both kinds have one of these


def described_table(
    rows: int, images: ImageDataset | None, captions: Callable[[int], list[str]] | None
) -> dict[str, Any]:
    """The facts by which a table is recognised: its length, hashes of a few images and of the captions of a few rows.

    A hash of the sizes of all images, or of the names of their files if the table does not hold these, tells whether
    the rows were put into another order. Neither is read: of 10 million rows that takes less than a second, or four.
    Images of one size without names may change places unnoticed if none of them is among the few: to read a part of
    each would take minutes.
    """
    sampled = range(0, rows, -(-rows // SAMPLED))
    description: dict[str, Any] = {"rows": rows}
    if images is not None:
        description["images"] = _digest(_read(images.encoded, row) for row in sampled)
        description |= _order(images)
    if captions is not None:
        description["texts"] = _digest(repr(captions(row)).encode() for row in sampled)
    return description


def described_shards(stream: ImageTextStream) -> dict[str, Any]:
    """The facts by which shards are recognised: the name of each, and its size or its revision on the Hub."""
    tags = [content_tag(shard.url) for shard in stream.shards]
    return {"shards": dict(zip(stream.places, tags, strict=True))}


def differences(recorded: Mapping[str, object], described: Mapping[str, object], kinds: Iterable[str]) -> str:
    """How a table differs from the one that was embedded, by `described_table` of both; empty if it does not."""
    # With other rows, images and texts differ as well.
    names = ["rows"] if recorded.get("rows") != described.get("rows") else [*kinds]
    if "images" in names:
        names += [name for name in ORDER if name in recorded and name in described]  # earlier records have none
    return ", ".join(
        f"{name} {'were' if name != 'rows' else 'of the set were'} {recorded.get(name)} and are {described.get(name)}"
        for name in names
        if recorded.get(name) != described.get(name)
    )


def _order(images: ImageDataset) -> dict[str, str]:
    """The last part of `described_table`."""
    import pyarrow.compute as pc

    sizes = images.computed("bytes", pc.binary_length)
    if sizes.null_count < len(sizes):
        return {ORDER[0]: _digest([sizes.fill_null(-1).to_numpy().astype(np.int64).tobytes()])}
    names = images.computed("path", lambda paths: pc.replace_substring_regex(paths, r"^.*[/\\]", ""))
    return {ORDER[1]: _digest(["\0".join(names.fill_null("").to_pylist()).encode()])}


def _read(encoded: Callable[[int], bytes], row: int) -> bytes:
    try:
        return encoded(row)
    except BadSampleError:
        return b"bad"


def _digest(values: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(hashlib.blake2b(value).digest())
    return digest.hexdigest()[:16]
