"""The names of the files in a shard: the extensions of images, keys of samples, and what messages say about names."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from .values import shortened

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
    ended = set()
    for key in keys:
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
