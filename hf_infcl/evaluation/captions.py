"""The layout of a batch of images that have any number of captions each.

The captions of a set form one tensor [M, ...] in the order of their images, together with the number of captions of
each image [N]. Memory grows with the total number of captions, not with the maximum per image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .ranking import checked_index

_ON_HOST = "texts_on_host"


def group_by_image(caption_image: Tensor | None, num_captions: int, num_images: int) -> tuple[Tensor, Tensor]:
    """Sorts the captions of a batch by their images, and leaves negative captions out.

    Args:
        caption_image: [num_captions] integer in [0, num_images), the image that each caption belongs to, in any order,
            or -1 for a negative caption, which belongs to no image; None if every image has one caption, in the order
            of the images.

    Returns:
        The indices [m] int64 of the m captions that belong to an image, sorted by image and stable within one; and the
        number of captions of each image [num_images] int64, at least 1.

    Raises:
        ValueError: wrong shape, dtype or values; an image without a caption.
    """
    if caption_image is None:
        if num_captions != num_images:
            raise ValueError(
                f"A batch has {num_captions} captions for {num_images} images. The data collator must return "
                "caption_image [captions], the image that each caption belongs to."
            )
        caption_image = torch.arange(num_captions)
    negative = caption_image == -1
    checked_index("caption_image", caption_image.masked_fill(negative, 0), num_captions, num_images, negative.device)
    counts = torch.bincount(caption_image[~negative], minlength=num_images)
    if (counts == 0).any():
        raise ValueError(
            f"Image {int((counts == 0).nonzero()[0])} of a batch has no caption. Every image needs one: drop the "
            "others from the dataset."
        )
    return caption_image.argsort(stable=True)[int(negative.sum()) :], counts


def image_of_captions(counts: Tensor) -> Tensor:
    """The image [M] that each caption belongs to, from the number of captions of each image [N]."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def caption_ids(input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """An id for each caption: a 64-bit hash of its tokens, so captions with equal tokens have equal ids.

    Args:
        input_ids: [n, L] int64.
        attention_mask: [n, L], 0 where the tokens are padding; None if all tokens count.

    Returns:
        [n] int64, on the device of ``input_ids``; the same in every process.
    """
    tokens = input_ids.cpu().numpy()
    kept = None if attention_mask is None else attention_mask.cpu().numpy().astype(bool)
    rows = tokens if kept is None else [row[mask] for row, mask in zip(tokens, kept, strict=True)]
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    ids = [int.from_bytes(digest, "big", signed=True) for digest in digests]
    return torch.tensor(ids, dtype=torch.int64, device=input_ids.device)


class _OnHost:
    """Tensors that stay in host memory when the batch that has them is moved to a device."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors


class WithTextsOnHost:
    """A data collator whose batches of pairs keep a copy of their tokens and ids in host memory; see `taken_apart`.

    What is read there does not wait for the forwards that the device has queued before.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> Any:
        batch = self._collate(items)
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            return batch
        small = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim < 3}
        return {**batch, _ON_HOST: _OnHost(small)}


def taken_apart(batch: Any) -> tuple[Any, Any]:
    """The batch of a `WithTextsOnHost` as its collator has returned it, and its small tensors in host memory.

    Both are the batch itself if another collator has made it.
    """
    if not isinstance(batch, Mapping) or _ON_HOST not in batch:
        return batch, batch
    return {name: value for name, value in batch.items() if name != _ON_HOST}, batch[_ON_HOST].tensors
