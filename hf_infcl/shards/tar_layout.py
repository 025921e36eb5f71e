"""The headers of tar files, and the samples that the names of the files in them form."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TypeVar

from .names import shown

BLOCK = 512  # bytes of a header, and the unit that the contents of a tar file are padded to
T = TypeVar("T")  # what is taken of a file


class DamagedShardError(ValueError):
    """A shard is truncated, or its contents do not have the format that its name implies."""


def tar_samples(
    file: io.BufferedReader,
    url: str,
    contents: Callable[[io.BufferedReader, str, int], T | None],
    position: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, str, dict[str, T] | DamagedShardError]]:
    """As `TarReader.samples`, of a file that is opened at the position; a message calls it ``url``.

    Args:
        contents: makes of the file, an extension and a size what a sample has for this extension, or None for nothing.
    """
    key: str | None = None
    sample: dict[str, T] = {}
    seen: set[str] = set()
    problem = ""
    end = position
    for start, name, size, has_contents in tar_members(file, url, position):
        stem, extension = split_name(name)
        if not stem:
            continue
        if stem != key:
            if key is not None:
                yield end, key, DamagedShardError(problem) if problem else sample
            if stop is not None and start >= stop:
                return
            key, sample, seen, problem = stem, {}, set(), ""
        end = file.tell() + -(-size // BLOCK) * BLOCK
        if extension in seen:
            problem = problem or (
                f"The shard {url!r} holds more than one file {shown(f'{stem}.{extension}')}. Samples of the same "
                "name must not follow each other, since they cannot be told apart."
            )
        seen.add(extension)
        if (content := contents(file, extension, size if has_contents else 0)) is None:
            continue
        if has_contents:
            sample[extension] = content
        else:
            problem = problem or (
                f"The shard {url!r} holds {shown(name)} as a link or a sparse file, which has no contents of its "
                "own. GNU tar stores them with --hard-dereference --dereference."
            )
    if key is not None:
        yield end, key, DamagedShardError(problem) if problem else sample


def tar_members(file: io.BufferedReader, url: str, position: int) -> Iterator[tuple[int, str, int, bool]]:
    """(position of its first header, name, size, whether it is no link) of each file from a header on.

    Archives that were concatenated are read as one. Whenever a name is yielded, the file is positioned at the beginning
    of the contents; the caller may leave it anywhere. Long names follow GNU tar and POSIX (pax), which also stores
    sizes from 8 GiB on.
    """
    start, long_name, long_size = position, None, None
    ended = False
    while True:
        header = file.read(BLOCK)
        if ended and header.count(0) == len(header) < BLOCK:
            return
        if len(header) < BLOCK:
            raise truncated(url, position)
        if header.count(0) == BLOCK:  # every archive ends with zeros, and another one may follow them
            ended = True
            position += BLOCK
            start = position
            continue
        ended = False
        if not header[0]:
            raise DamagedShardError(f"The shard {url!r} has a file without a name at byte {position}.")
        try:
            checksum = int(header[148:156].strip(b" \0"), 8)
        except ValueError:
            checksum = -1
        if checksum != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            raise DamagedShardError(f"The shard {url!r} is damaged: there is no tar header at byte {position}.")
        size = (
            int.from_bytes(header[125:136], "big")
            if header[124] & 0x80
            else int(header[124:136].strip(b" \0") or b"0", 8)
        )
        kind = header[156:157]
        if kind in b"Lx":
            data = file.read(size)
            if kind == b"L":
                long_name = data.rstrip(b"\0")
            else:
                records = _pax_records(data)
                long_name = records.get(b"path", long_name)
                long_size = int(records[b"size"]) if b"size" in records else None
        elif kind in b"\x00071S2":  # regular files, hard links, sparse files, symbolic links
            if long_name is None:
                long_name = header[:100].partition(b"\0")[0]
                if header[257:263] == b"ustar\0" and header[345]:
                    long_name = header[345:500].partition(b"\0")[0] + b"/" + long_name
            size = size if long_size is None else long_size
            yield start, long_name.decode("utf-8", "backslashreplace"), size, kind in b"\x0007"
        position += BLOCK + -(-size // BLOCK) * BLOCK
        file.seek(position)
        if kind not in b"LxKg":  # such headers describe the file after them, and belong to it
            start, long_name, long_size = position, None, None


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """Records of the form "length key=value\\n", where the length counts all of the record."""
    records = {}
    while data:
        digits = data.partition(b" ")[0]
        key, _, value = data[len(digits) + 1 : int(digits) - 1].partition(b"=")
        records[key] = value
        data = data[int(digits) :]
    return records


def split_name(name: str) -> tuple[str, str]:
    """(key, extension) of a file; the key of hidden files and of folders is empty."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return (folder + slash + stem, extension.lower()) if stem else ("", "")


def truncated(url: str, position: int) -> DamagedShardError:
    return DamagedShardError(f"The shard {url!r} is truncated: byte {position} of the tar file is missing.")
