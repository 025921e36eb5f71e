"""Files that are written whole, with a checksum and the usual modes; pointers of Git LFS are refused."""

import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

LFS_POINTER = b"version https://git-lfs"


def check_pulled(file: str | Path) -> None:
    """Raises a ValueError for a pointer of Git LFS in place of a local file."""
    if os.path.isfile(file) and os.path.getsize(file) < 1024 and Path(file).read_bytes().startswith(LFS_POINTER):
        raise ValueError(f"{file} is a pointer of Git LFS in place of the file: run `git lfs pull` where it lies.")


@contextmanager
def written_whole(path: Path, folder: str | Path | None = None) -> Iterator[Path]:
    """A path to write a file to, which then gets its name: it is there completely or not at all, even after an error.

    Until then it lies beside the file, or in another ``folder`` of the disk. A push of the folder in which it lies
    leaves it out, as all there that begins with an underscore.
    """
    partial = Path(folder or path.parent, f"_{os.getpid()}.{path.name}")
    with ExitStack() as after:
        after.callback(partial.unlink, missing_ok=True)  # after an error it would take room on a disk that may be full
        yield partial
        os.replace(partial, path)


def describe(path: Path) -> dict[str, int]:
    """The size and the checksum of a file."""
    checksum, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum, size = zlib.crc32(block, checksum), size + len(block)
    return {"bytes": size, "crc32": checksum}


def give_usual_modes(place: str | Path) -> None:
    """Gives a file of safetensors, or those in a folder, the mode that the umask gives to all other files.

    Version 0.6 of safetensors and newer let only their owner read them.
    """
    umask = os.umask(0o077)  # cannot be read without being set; meanwhile files are those of their owner
    os.umask(umask)
    place, usual = Path(place), 0o666 & ~umask
    for path in place.glob("*.safetensors") if place.is_dir() else [place]:
        if stat.S_IMODE(path.stat().st_mode) == 0o600 != usual:
            path.chmod(usual)
