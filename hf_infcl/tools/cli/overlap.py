"""Which images of an evaluation set are also trained on, by the contents of their files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress

from ...data import ImageTextDataset
from ...data.images import ImageDataset

_SAMPLED = 1_000  # images of the evaluation set that are looked for
_TRAINED = 200_000  # training images among which they are looked for


def overlaps(trained: object, sets: Mapping[str, ImageDataset]) -> Iterator[str]:
    """A warning for each guard set that has images of the training set; streams are not looked into."""
    if not isinstance(trained, ImageTextDataset):
        return
    for name, guard in ((name, dataset) for name, dataset in sets.items() if name.startswith("guard")):
        shared, looked_for = shared_images(trained, guard)
        if shared:
            yield (
                f"Warning: {shared:,} of {looked_for:,} images of {name}, {guard.name}, "
                f"{'is' if shared == 1 else 'are'} also trained on and cannot show what is forgotten. Name a set that "
                "the training does not contain."
            )


def shared_images(trained: ImageDataset, evaluated: ImageDataset) -> tuple[int, int]:
    """The number of images of an evaluation set whose file is also one of the training set, and that looked for.

    1,000 images at most are looked for among 200,000 training images at most, at equal distances. The sizes of the
    files are compared first, which costs a look into the table or the folder; only training images of a size that
    occurs are read and hashed. Remote images and copies in another format or size are not found.
    """
    looked_for = dict(evaluated.file_sizes(-(-len(evaluated) // _SAMPLED)))
    sizes, every = set(looked_for.values()), trained.file_sizes(-(-len(trained) // _TRAINED))
    wanted = {digest for row in looked_for if (digest := _digest(evaluated, row))}
    digests = {_digest(trained, row) for row, size in every if size in sizes}
    return len(wanted & digests), len(wanted)


def _digest(dataset: ImageDataset, row: int) -> bytes:
    with suppress(ValueError):  # a bad sample, which the training or the evaluation names
        return hashlib.blake2b(dataset.encoded(row), digest_size=16).digest()
    return b""
