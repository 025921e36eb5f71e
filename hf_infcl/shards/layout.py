"""The layout of tar shards: samples and their keys, and URLs of the files of a tar file.

A tar file is read from any header on by Python's `tarfile`. A URL says where the contents of a file begin, how long
they are, and which tar file and name they have. The images of a table are such URLs.

`fsspec`, and so `datasets`, opens such URLs in a process that has imported this module.
"""

import hashlib
import io
import itertools
import json
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import fsspec

from ..files.text import shortened, written_otherwise
from .opening import open_shard

IMAGE_EXTENSIONS = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "jp2"))


def dots_in(key: str, extensions: Collection[str]) -> str:
    """A sentence if the names of a sample's files have dots before that of an image's extension."""
    dotted = next((e for e in extensions if "." in e and e.rpartition(".")[2] in IMAGE_EXTENSIONS), None)
    if dotted is None:
        return ""
    return (
        f" The name of a sample ends at the first dot, so {shortened(f'{key}.{dotted}')} belongs to the sample "
        f"{shortened(key)}. Use no other dot than that of the extension."
    )


def apart(keys: Iterable[str]) -> str:
    """A sentence if files of one sample do not follow each other, so that a key begins another sample as well."""
    ended: set[str] = set()
    for key in keys:
        if alike := written_otherwise(key, ended.__contains__):
            return f" The files of a sample must have one name. One is {shortened(key)}{alike}."
        if key in ended:
            return (
                f" The files of a sample must follow each other, but those of {shortened(key)} are apart. "
                "`tar --sort=name` packs them so."
            )
        ended.add(key)
    return ""


def sample_key(shard: str, name: str) -> int:
    """The key of a sample in a shard: 63 bits of the BLAKE2b hash of both names."""
    return int.from_bytes(hashlib.blake2b(f"{shard} {name}".encode(), digest_size=8).digest(), "big") >> 1


T = TypeVar("T")  # what is taken of a file


class DamagedShardError(ValueError):
    """A shard is truncated, or its contents do not have the format that its name implies."""


class _Archive(tarfile.TarFile):
    """Reads nothing when it is created. `tarfile.TarFile` itself would pass over what is no header."""

    def next(self) -> None:
        return None


def tar_samples(
    file: io.BufferedReader,
    url: str,
    contents: Callable[[io.BufferedReader, str, int], T | None],
    stop: int | None = None,
) -> Iterator[tuple[int, str, dict[str, T] | DamagedShardError]]:
    """As `TarReader.samples`, of a file that is opened at the position; a message calls it ``url``.

    Args:
        contents: makes of the file, an extension and a size what a sample has for this extension, or None for nothing.
    """
    for key, files in itertools.groupby(tar_members(file, url), lambda one: one[0]):
        sample: dict[str, T] = {}
        seen, problem = set[str](), ""
        for _, extension, info, end in files:  # noqa: B007  # the end of the last one
            if not seen and stop is not None and info.offset >= stop:
                return
            has_contents = info.isreg() and not info.issparse()
            if extension in seen:
                problem = problem or (
                    f"The shard {url!r} holds more than one file {shortened(f'{key}.{extension}')}. Samples of the "
                    "same name must not follow each other, since they cannot be told apart."
                )
            seen.add(extension)
            if (content := contents(file, extension, info.size if has_contents else 0)) is None:
                continue
            if has_contents:
                sample[extension] = content
            else:
                problem = problem or (
                    f"The shard {url!r} holds {shortened(info.name)} as a link or a sparse file, which has no contents "
                    "of its own. GNU tar stores them with --hard-dereference --dereference."
                )
        yield end, key, DamagedShardError(problem) if problem else sample


def tar_members(file: io.BufferedReader, url: str) -> Iterator[tuple[str, str, tarfile.TarInfo, int]]:
    """Key, extension and header of each file, and where the next header begins; the file's position is a header.

    Files that are hidden have no key and are skipped. Archives that were concatenated are read as one. Whenever a file
    is yielded, it is positioned at the beginning of the contents; the caller may leave it anywhere.
    """
    archive = _Archive(fileobj=file, encoding="utf-8", errors="backslashreplace")
    ended = False
    while True:
        file.seek(archive.offset)
        try:
            info = tarfile.TarInfo.fromtarfile(archive)
        except tarfile.HeaderError:
            at_end = not file.read(1)
            file.seek(archive.offset)
            header = file.read(tarfile.BLOCKSIZE)
            if header.count(0) == tarfile.BLOCKSIZE:  # every archive ends with zeros, and another one may follow them
                ended = True
                archive.offset += tarfile.BLOCKSIZE
                continue
            if len(header) == tarfile.BLOCKSIZE and not (at_end and header[156:157] in b"LKxg"):  # which others follow
                what = f"The shard {url!r} is damaged: there is no tar header at byte {archive.offset}."
                raise DamagedShardError(what) from None
            if ended and not any(header):
                return
            raise truncated(url, archive.offset) from None
        ended = False
        if info.isreg() or info.islnk() or info.issym():
            if not info.name:
                raise DamagedShardError(f"The shard {url!r} has a file without a name at byte {info.offset}.")
            folder, slash, last = info.name.rpartition("/")
            stem, _, extension = last.partition(".")
            if stem:
                yield folder + slash + stem, extension.lower(), info, archive.offset


def truncated(url: str, position: int) -> DamagedShardError:
    return DamagedShardError(f"The shard {url!r} is truncated: byte {position} of the tar file is missing.")


def json_object(content: bytes) -> dict[str, Any]:
    """The fields of an object; raises a ValueError for any other JSON, and for what is none."""
    fields = json.loads(content)
    if not isinstance(fields, dict):
        raise ValueError(f"its .json holds a {type(fields).__name__}, not an object")
    return fields


_SCHEME = "tarmember://"


def member_url(shard: str, position: int, size: int, name: str) -> str:
    """The URL of ``size`` bytes of a shard from a position on, which are the contents of a file of this name."""
    return f"{_SCHEME}{position}+{size}/{quote(shard, safe='')}/{quote(name)}"


def is_member(path: str) -> bool:
    """Whether a path is a `member_url`."""
    return path.startswith(_SCHEME)


def member_size(url: str) -> int:
    """The size in bytes that a `member_url` states."""
    return _parts(url)[1]


def member_file(path: str) -> str:
    """The tar file of a `member_url`, a space, and the name of the file in it; any other path as it is."""
    if not is_member(path):
        return path
    _, _, shard, name = _parts(path)
    return f"{shard} {name}"


def read_member(url: str) -> bytes:
    """The contents of a file in a tar file.

    Raises:
        DamagedShardError: the tar file has become shorter.
        ValueError: it cannot be opened.
    """
    position, size, shard, _ = _parts(url)
    with open_shard(shard, position, buffer=max(1, size)) as file:
        data = file.read(size)
    if len(data) < size:
        raise truncated(shard, position + len(data))
    return data


class _TarMembers(fsspec.AbstractFileSystem):
    """The file system of these URLs, which can only be read."""

    protocol = "tarmember"

    def _open(self, path: str, mode: str = "rb", **options: object) -> io.BytesIO:
        if mode != "rb":
            raise ValueError(f"Files in a tar file can only be read, but {path!r} was opened with mode {mode!r}.")
        return io.BytesIO(read_member(path))

    def info(self, path: str, **options: object) -> dict[str, Any]:
        return {"name": path, "size": member_size(path), "type": "file"}


fsspec.register_implementation(_TarMembers.protocol, _TarMembers, clobber=True)


def _parts(url: str) -> tuple[int, int, str, str]:
    """Position, size, tar file and name of a `member_url`."""
    place, shard, name = url.removeprefix(_SCHEME).split("/", 2)
    position, size = place.split("+")
    return int(position), int(size), unquote(shard), unquote(name)
