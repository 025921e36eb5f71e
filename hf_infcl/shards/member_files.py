"""The file system of `members`, which `fsspec` imports when it meets one of their URLs."""

from __future__ import annotations

import io
from typing import Any

from fsspec.spec import AbstractFileSystem

from .members import PROTOCOL, member_size, read_member


class TarMembers(AbstractFileSystem):
    """Reads files in tar files, whose paths say where they are."""

    protocol = PROTOCOL

    def _open(self, path: str, mode: str = "rb", **options: object) -> io.BytesIO:
        if mode != "rb":
            raise ValueError(f"Files in a tar file can only be read, but {path!r} was opened with mode {mode!r}.")
        return io.BytesIO(read_member(path))

    def info(self, path: str, **options: object) -> dict[str, Any]:
        return {"name": path, "size": member_size(path), "type": "file"}
