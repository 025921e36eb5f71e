"""Files in a tar file as URLs: where their contents begin, how long they are, and which tar file and name they have.

`fsspec`, and so `datasets`, opens such URLs once `register` was called in the process; `read_member` always does.
"""

from __future__ import annotations

import io
from typing import Any
from urllib.parse import quote, unquote

import fsspec

from .opening import open_shard
from .tar_layout import truncated

PROTOCOL = "tarmember"
_SCHEME = f"{PROTOCOL}://"


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
    _, shard, name = path.removeprefix(_SCHEME).split("/", 2)
    return f"{unquote(shard)} {unquote(name)}"


def read_member(url: str) -> bytes:
    """The contents of a file in a tar file.

    Raises:
        DamagedShardError: the tar file has become shorter.
        ValueError: it cannot be opened.
    """
    position, size, shard = _parts(url)
    with open_shard(shard, position, buffer=max(1, size)) as file:
        data = file.read(size)
    if len(data) < size:
        raise truncated(shard, position + len(data))
    return data


class _TarMembers(fsspec.AbstractFileSystem):
    """The file system of these URLs, which can only be read."""

    protocol = PROTOCOL

    def _open(self, path: str, mode: str = "rb", **options: object) -> io.BytesIO:
        if mode != "rb":
            raise ValueError(f"Files in a tar file can only be read, but {path!r} was opened with mode {mode!r}.")
        return io.BytesIO(read_member(path))

    def info(self, path: str, **options: object) -> dict[str, Any]:
        return {"name": path, "size": member_size(path), "type": "file"}


def register() -> None:
    """Makes `fsspec` open these URLs in this process."""
    fsspec.register_implementation(PROTOCOL, _TarMembers, clobber=True)


def _parts(url: str) -> tuple[int, int, str]:
    place, shard, _ = url.removeprefix(_SCHEME).split("/", 2)
    position, size = place.split("+")
    return int(position), int(size), unquote(shard)
