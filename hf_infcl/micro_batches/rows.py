"""Batches with some of the images of another one: smaller micro-batches, and repeated rows for a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..encoders.dual_encoder import TEXT_INPUTS, images_of

# What a batch has for each text. Every other tensor has a row for each image.
_OF_TEXTS = (*TEXT_INPUTS, "start_texts", "teacher_texts", "teacher_known_texts")


def split_batches(batches: Sequence[Mapping[str, Tensor]], largest: int | None) -> list[Any]:
    """The batches of a window in their order, split equally into parts of at most ``largest`` images; None splits none.

    Images keep their order. The captions of an image stay with it, and negative captions are shared equally.
    """
    if largest is None:
        return list(batches)
    parts: list[Any] = []
    for batch in batches:
        images = len(images_of(batch))
        count = -(-images // largest)
        parts += [batch] if count == 1 else _split(batch, torch.arange(images).tensor_split(count))
    return parts


def _split(batch: Mapping[str, Tensor], images: Sequence[Tensor]) -> list[dict[str, Any]]:
    negatives = _negatives(batch).tensor_split(len(images))
    return [take_rows(batch, rows, texts) for rows, texts in zip(images, negatives, strict=True)]


def repeated(batch: Mapping[str, Tensor], images: int) -> dict[str, Any]:
    """A batch of so many images, which are those of another one in turn."""
    of_batch, negatives = len(images_of(batch)), _negatives(batch)
    return take_rows(batch, torch.arange(images) % of_batch, negatives.repeat(-(-images // of_batch)))


def _negatives(batch: Mapping[str, Tensor]) -> Tensor:
    """The places of the texts that belong to no image, [negatives] int64."""
    belongs = batch.get("caption_image")
    return torch.empty(0, dtype=torch.int64) if belongs is None else (belongs.cpu() < 0).nonzero().flatten()


def take_rows(batch: Mapping[str, Tensor], images: Tensor, negatives: Tensor) -> dict[str, Any]:
    """The batch of some images of another one, with their texts.

    Args:
        batch: as a data collator returned it; its texts have not been dealt out.
        images: [images] int64 on the CPU, the rows of the images.
        negatives: [texts] int64 on the CPU, the rows of negative captions to take along.
    """
    count, texts, caption_image = len(images_of(batch)), images, None
    if (belongs := batch.get("caption_image")) is not None:
        # [images, texts]: in the order of the images, and of the texts of each of them.
        of_images, rows = (images[:, None] == belongs.cpu()[None]).nonzero(as_tuple=True)
        texts = torch.cat((rows, negatives))
        caption_image = torch.cat((of_images, torch.full_like(negatives, -1)))
    inputs: dict[str, Any] = {}
    for name, value in batch.items():
        if name == "new_images":  # the first ones
            inputs[name] = int((images < value).sum())
        elif name == "caption_image":
            assert caption_image is not None
            inputs[name] = caption_image.to(value.device)
        elif isinstance(value, Tensor) and name in _OF_TEXTS:
            inputs[name] = _taken(value, texts)
        elif isinstance(value, Tensor) and value.dim() and len(value) == count:
            inputs[name] = _taken(value, images)
        else:
            inputs[name] = value
    return inputs


def _taken(value: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor, without a copy if they are consecutive."""
    if len(rows) and torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + len(rows))):
        return value[int(rows[0]) : int(rows[0]) + len(rows)]
    return value[rows.to(value.device)]
