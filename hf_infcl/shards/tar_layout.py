"""The files in a tar file from any header on, by Python's `tarfile`, and the samples that their names form."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from typing import TypeVar

from .values import shortened

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
    problem, end = "", position
    for info, following in tar_members(file, url):
        stem, extension = split_name(info.name)
        if not stem:
            continue
        if stem != key:
            if key is not None:
                yield end, key, DamagedShardError(problem) if problem else sample
            if stop is not None and info.offset >= stop:
                return
            key, sample, seen, problem = stem, {}, set(), ""
        end, has_contents = following, info.isreg() and not info.issparse()
        if extension in seen:
            problem = problem or (
                f"The shard {url!r} holds more than one file {shortened(f'{stem}.{extension}')}. Samples of the same "
                "name must not follow each other, since they cannot be told apart."
            )
        seen.add(extension)
        if (content := contents(file, extension, info.size if has_contents else 0)) is None:
            continue
        if has_contents:
            sample[extension] = content
        else:
            problem = problem or (
                f"The shard {url!r} holds {shortened(info.name)} as a link or a sparse file, which has no contents of "
                "its own. GNU tar stores them with --hard-dereference --dereference."
            )
    if key is not None:
        yield end, key, DamagedShardError(problem) if problem else sample


def tar_members(file: io.BufferedReader, url: str) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Each file from the file's position on, a header, and where the next header begins.

    Archives that were concatenated are read as one. Whenever a file is yielded, it is positioned at the beginning of
    the contents; the caller may leave it anywhere.
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
            if ended and not any(header) and len(header) < tarfile.BLOCKSIZE:
                return
            if header.count(0) == tarfile.BLOCKSIZE:  # every archive ends with zeros, and another one may follow them
                ended = True
                archive.offset += tarfile.BLOCKSIZE
                continue
            if len(header) < tarfile.BLOCKSIZE or (at_end and header[156:157] in b"LKxg"):  # which others follow
                raise truncated(url, archive.offset) from None
            raise DamagedShardError(
                f"The shard {url!r} is damaged: there is no tar header at byte {archive.offset}."
            ) from None
        ended = False
        if info.isreg() or info.islnk() or info.issym():
            if not info.name:
                raise DamagedShardError(f"The shard {url!r} has a file without a name at byte {info.offset}.")
            yield info, archive.offset


def split_name(name: str) -> tuple[str, str]:
    """(key, extension) of a file; the key of hidden files and of folders is empty."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return (folder + slash + stem, extension.lower()) if stem else ("", "")


def truncated(url: str, position: int) -> DamagedShardError:
    return DamagedShardError(f"The shard {url!r} is truncated: byte {position} of the tar file is missing.")
