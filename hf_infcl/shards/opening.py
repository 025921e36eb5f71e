"""Finds shards by name, locally or on the Hub, and reads their bytes, with retries and a cache on a local disk."""

import functools
import hashlib
import io
import logging
import os
import posixpath
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import fsspec
from filelock import FileLock
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from ..files.hub import hub_answers, hub_asked_once, not_there
from ..files.text import Url, without_secrets, written_otherwise
from ..files.whole import check_pulled, written_whole

logger = logging.getLogger(__name__)

T = TypeVar("T")
_FORMATS = (".tar", ".parquet")
_MAGIC = re.compile(r"[*?\[]")

# Seconds before each new try after a read that failed.
RETRY_SECONDS: tuple[float, ...] = (1, 2, 4, 8)
# A file that does not exist or is not permitted to this user is not tried again.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError)
_BUFFER = 2**20


# ---- Names ----


def find_shards(source: str, *, split: str = "train", name: str | None = None) -> list[str]:
    """The shards that a name refers to, in a fixed order. Messages that show them hide the secrets of their URLs.

    Args:
        source: a tar or parquet file, a glob (``shards/*.tar``) or a range (``shards/{00000..00127}.tar``), local or
            with a protocol of fsspec (``hf://datasets/...``, ``https://...``); or a local folder or a Hub id, whose
            files are found as `datasets.load_dataset` finds them. What exists is taken literally, whatever its name
            holds.
        split: the split of a folder or a Hub repository.
        name: configuration of a folder or a Hub repository that has several.

    Raises:
        ValueError: there is nothing at the source, it has other files than tar and parquet, or it has no such split.
    """
    source = Url(source)
    if source.startswith("hf://") and not hub_answers():
        raise ValueError(f"{source!r} are on the Hub, which could not be reached. Try again, or name a local copy.")
    literal = len(existing_part(source))
    if source.startswith("pipe:") or (".tar::" in source and literal < len(source)):
        raise ValueError(
            f"{source!r} is written for webdataset. Shards are read where they are, to resume at any sample: name the "
            "path or URL (s3://bucket/{000..127}.tar), and several sources one after the other (--dataset a b)."
        )
    patterns = _expand_braces(source, literal)
    is_pattern = len(patterns) > 1 or source.endswith(_FORMATS) or _MAGIC.search(source, literal)
    if "://" in source and not is_pattern:
        patterns = [f"{source.rstrip('/')}/**/*{extension}" for extension in _FORMATS]
    if os.path.isdir(source) or not (is_pattern or "://" in source):
        found = _data_files(source, split, name)
    else:
        found = [url for pattern in patterns for url in _matches(pattern)]
    urls: list[str] = [Url(url) for url in found]
    if wrong := [url for url in urls if not url.endswith(_FORMATS)]:
        raise ValueError(
            f"A stream reads .tar and .parquet files, but {source!r} has {wrong[0]!r}. Compressed tar files have to be "
            "unpacked once to .tar; other kinds of datasets are read without streaming."
        )
    if not urls:
        raise ValueError(f"No .tar or .parquet files were found at {source!r}.")
    if repeated := sorted(url for url, count in Counter(urls).items() if count > 1):
        raise ValueError(f"{source!r} names the shard {repeated[0]!r} more than once.")
    return urls


def existing_part(path: str) -> str:
    """The longest beginning of a local path, up to a slash or its end, that exists; empty if there is none."""
    local = path.removeprefix("file://")
    ends = [] if "://" in local else [slash.start() for slash in re.finditer(r"(?<=.)/", local)] + [len(local)]
    length = next((end for end in reversed(ends) if os.path.lexists(local[:end])), 0)
    return path[: len(path) - len(local) + length] if length else ""


@contextmanager
def existing_paths_are_literal() -> Iterator[None]:
    """While it is open, a glob of local files takes what exists literally, though its name holds ``*``, ``?`` or ``[``.

    `datasets` appends its patterns to the path of a folder, so that a folder ``[v1]`` cannot be loaded. An escaped path
    would not do: fsspec lists all that is beside such a folder.
    """
    of_fsspec = LocalFileSystem.glob

    def glob(files: LocalFileSystem, path: str, *args: object, detail: bool = False, **options: object) -> Any:
        literal = existing_part(stripped := files._strip_protocol(path))
        if not _MAGIC.search(literal):
            return of_fsspec(files, path, *args, detail=detail, **options)
        if literal == stripped:
            infos = {path: files.info(path)}
        else:
            inside = DirFileSystem(literal, files)
            below = super(DirFileSystem, inside).glob(stripped[len(literal) + 1 :], *args, detail=True, **options)
            infos = {f"{literal}/{name}": info for name, info in below.items()}
        return infos if detail else list(infos)

    with patch.object(LocalFileSystem, "glob", glob):
        yield


def _expand_braces(pattern: str, literal: int = 0) -> list[str]:
    """``a{08..10}`` stands for a08, a09, a10, and ``{x,y}`` for x, y, as in a shell, after the first characters."""
    braces = re.compile(r"\{([^{}]*)\}").search(pattern, literal)
    if braces is None:
        return [pattern]
    if bounds := re.fullmatch(r"(\d+)\.\.(\d+)", braces[1]):
        first, last = bounds.groups()
        if int(last) < int(first):
            raise ValueError(f"The range {braces[0]} in {Url(pattern)!r} ends before it begins.")
        inner = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    elif "," in braces[1]:
        inner = braces[1].split(",")
    else:
        raise ValueError(f"{braces[0]} in {Url(pattern)!r} is neither a range such as {{000..127}} nor a list {{a,b}}.")
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [before + middle + rest for middle in inner for rest in _expand_braces(after)]


def _matches(pattern: str) -> list[str]:
    """The files that match a pattern. Plain names are used unchanged; local files must exist."""
    if _MAGIC.search(pattern, len(existing_part(pattern))):
        file_system, path = fsspec.core.url_to_fs(pattern)
        paths: list[str] = []
        # Some protocols raise it if the folder or the repository is not there.
        with suppress(FileNotFoundError), existing_paths_are_literal():
            paths = sorted(file_system.glob(path))
        return [file_system.unstrip_protocol(url) for url in paths] if "://" in pattern else paths
    if "://" not in pattern and not os.path.isfile(pattern):
        raise ValueError(f"The shard {pattern!r} is not there{written_otherwise(pattern, os.path.exists)}.")
    return [pattern]


def _data_files(source: str, split: str, name: str | None) -> list[str]:
    """Files of a split of a local folder or a Hub repository, which `datasets` knows how to tell apart."""
    if any(os.path.isfile(os.path.join(source, file)) for file in ("state.json", "dataset_dict.json")):
        raise ValueError(f"{source!r} is of save_to_disk. Read it without streaming, or write shards by to_parquet.")
    try:
        files = dataset_builder(source, name).config.data_files or {}
    except (OSError, ValueError) as error:  # among them ConnectionError, and HFValidationError of what is no Hub id
        raise ValueError(not_there("There are no shards", source, error)) from error
    if split not in files:
        raise ValueError(f"{source!r} has no split {split!r}. Its splits are {[str(key) for key in files]}.")
    return sorted(str(file) for file in files[split])


# By the end of a file's name, the builder of `datasets` that reads it.
KINDS_OF_FILES = {
    **{".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json"},
    **{".parquet": "parquet", ".tar": "webdataset"},
}


def kind_of_file(path: str) -> str | None:
    """The builder of `datasets` for one file of data; None for others."""
    return KINDS_OF_FILES.get(os.path.splitext(path)[1].lower())


def dataset_builder(source: str, name: str | None, **options: Any) -> Any:
    """The `datasets.DatasetBuilder` of a local folder or file, whose path is taken literally, or of a Hub id."""
    import datasets

    if os.path.isfile(source) and (kind := kind_of_file(source)):
        source, options = kind, {**options, "data_files": os.path.abspath(source)}
    elif os.path.isdir(source):
        source = os.path.abspath(source)  # the name "csv" alone would be taken for the format
    listed_once = functools.cache(LocalFileSystem.ls)  # for `datasets` looks for its files with dozens of patterns
    with existing_paths_are_literal(), patch.object(LocalFileSystem, "ls", listed_once), hub_asked_once(source):
        return datasets.load_dataset_builder(source, name, **options)


def shard_names(urls: Sequence[str]) -> list[str]:
    """Short names that stay the same when the folder that holds all the shards moves, or a password changes."""
    urls = [without_secrets(url) for url in urls]
    # Character by character, since urls are no paths; cut at a folder below.
    shared = os.path.commonprefix([posixpath.dirname(url) + "/" for url in urls])  # noqa: RUF071
    return [url[shared.rfind("/") + 1 :] for url in urls]


def digest(names: Sequence[str]) -> str:
    """16 hexadecimal digits that are equal for equal names in the same order."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def content_tag(url: str) -> str:
    """What tells a shard from another one of the same name: its size, or its revision on the Hub, or nothing."""
    if "://" not in url:
        return str(os.stat(url).st_size)
    revision = re.search(r"@([0-9a-f]{40})/", url)
    return revision[1] if revision else ""


# ---- Bytes ----


class ReadError(OSError):
    """A file could not be read after several tries, for reasons other than its contents."""


class _RetriedFile(io.RawIOBase):
    """A local or remote file. If a read fails, the file is opened again at the byte that was reached."""

    def __init__(self, url: str) -> None:
        self._url, self._position = Url(url), 0
        self._file: Any = None
        self._size: int | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._persist(self._read, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            self._persist(self._open)
            if self._size is None:
                raise io.UnsupportedOperation(f"The size of {self._url!r} is not known.")
            offset += self._size
        elif whence == os.SEEK_CUR:
            offset += self._position
        self._position = offset
        return offset

    def close(self) -> None:
        self._forget()
        super().close()

    def _persist(self, action: Callable[..., T], *args: object) -> T:
        """Returns the result of the action, which is repeated if it fails."""
        waits = [*RETRY_SECONDS]
        while True:
            try:
                return action(*args)
            except Exception as error:  # noqa: PERF203  # libraries of protocols raise exceptions of any class
                # A traceback that shows the error would show the secrets of the URL.
                shown = error if without_secrets(self._url) == self._url else None
                cause = f"{type(error).__name__}: {without_secrets(str(error))}"
                if isinstance(error, _FINAL):
                    raise ValueError(f"The file {self._url!r} cannot be opened: {cause}") from shown
                self._forget()
                what = f"Reading the file {self._url!r} failed at byte {self._position}: {cause}"
                if not waits:
                    raise ReadError(f"{what}. It was tried {len(RETRY_SECONDS) + 1} times.") from shown
                logger.warning("%s. It is tried again in %g s.", what, waits[0])
                time.sleep(waits.pop(0))

    def _read(self, size: int) -> bytes:
        self._open()
        if self._file.tell() != self._position:
            try:
                self._file.seek(self._position)
            except ValueError:  # a server that does not know ranges
                if self._file.tell() > self._position:
                    self._forget()
                    self._open()
                while (ahead := self._position - self._file.tell()) > 0:
                    if not self._file.read(min(ahead, _BUFFER)):
                        raise EOFError(f"the file ends before byte {self._position}") from None
        data: bytes = self._file.read(size)
        if not data and size and self._size is not None and self._position < self._size:
            raise EOFError(f"the connection ended, and the file has {self._size} bytes")
        return data

    def _open(self) -> None:
        if self._file is None:
            # Local files go without fsspec, which costs a copy of every read.
            file: Any = open_cached(self._url) if "://" in self._url else open(self._url, "rb")  # noqa: SIM115
            is_local = isinstance(file, io.BufferedReader)
            self._size = os.fstat(file.fileno()).st_size if is_local else getattr(file, "size", None)
            self._file = file

    def _forget(self) -> None:
        with suppress(Exception):  # closing a lost connection may fail, and there may be none
            self._file.close()
        self._file = None


def open_shard(url: str, position: int = 0, buffer: int = _BUFFER) -> io.BufferedReader:
    """A file opened for reading from a position on. Failed reads are repeated and finally raise a ReadError.

    Raises:
        ValueError: the limit of the cache is no number.
    """
    check_pulled(url)
    _cache_limit()
    file = _RetriedFile(url)
    file.seek(position)
    return io.BufferedReader(file, buffer)


# ---- A cache of remote shards on a local disk ----


def open_cached(url: str) -> Any:
    """A remote file or, of a shard, its copy in the folder ``INFCL_SHARD_CACHE`` of this machine, if that is set.

    fsspec's own caches show other processes a copy that is not complete, and have no bound. The size tells a shard from
    another one of the same name.
    """
    folder = os.environ.get("INFCL_SHARD_CACHE")
    if not folder or not url.endswith(_FORMATS):
        return fsspec.open(url, "rb").open()
    files, remote = fsspec.core.url_to_fs(url)
    size = files.size(remote)
    path = Path(folder, f"{digest([url, str(size)])}{posixpath.splitext(url)[1]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"_{path.name}.lock")):
        try:
            file = path.open("rb")
            os.utime(path)  # as the last one that was used
        except FileNotFoundError:
            with written_whole(path) as partial:
                files.get_file(remote, str(partial))
                if size is not None and partial.stat().st_size != size:
                    raise EOFError(f"it has {size} bytes, of which {partial.stat().st_size} came") from None
                file = partial.open("rb")  # which stays readable if it is removed
            _remove_oldest(path.parent, _cache_limit())
    return file


def _cache_limit() -> float:
    """The bytes that the shards in the cache may take."""
    told = os.environ.get("INFCL_SHARD_CACHE_GB", "100")
    if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", told):
        raise ValueError(
            f"INFCL_SHARD_CACHE_GB is the size of the cache in gigabytes, such as 100, but it is {told!r}."
        )
    return float(told) * 1e9


def _remove_oldest(folder: Path, limit: float) -> None:
    """Removes the shards that were used longest ago until all have at most so many bytes, but for the last one."""
    with FileLock(folder / "_remove.lock"):
        used = []
        for path in {*folder.iterdir()} - {*folder.glob("*.lock")}:
            with suppress(FileNotFoundError):  # it has just got its name
                used.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in used)
        for seconds, size, path in sorted(used)[:-1]:
            # A name with an underscore is being written, unless its process was killed.
            if total > limit and (not path.name.startswith("_") or time.time() - seconds > 3600):
                path.unlink(missing_ok=True)
                total -= size
