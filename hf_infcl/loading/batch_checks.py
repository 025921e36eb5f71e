"""Checks of what a data collator returns for a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..encoders.dual_encoder import IMAGE_FEATURES, images_of
from ..evaluation.captions import group_by_image


def check_window(window: Sequence[Mapping[str, Tensor]], equal_ids: str) -> None:
    """Raises a ValueError if the batches of a window cannot be trained on together; see `check_batch`."""
    for batch in window:
        check_batch(batch, equal_ids)
    with_ids = sum("pair_ids" in batch for batch in window)
    if 0 < with_ids < len(window):
        raise ValueError(
            f"pair_ids are in {with_ids} of the {len(window)} micro-batches of a global batch, and not in the others. "
            "The data collator must give them for all or for none."
        )


def check_batch(batch: object, equal_ids: str) -> None:
    """Raises a ValueError if a data collator returns a batch that cannot be trained on.

    Args:
        equal_ids: ``"exclude"``, with which every image needs exactly one caption, or ``"positive"``.
    """
    if not isinstance(batch, Mapping) or images_of(batch) is None or "input_ids" not in batch:
        got = f"keys {list(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ValueError(
            f"The data collator must give a dict with pixel_values and input_ids at least, got {got}. "
            'The default one makes them of the "image" of each item and of its "caption", a list of strings.'
        )
    for name in ("pixel_values", IMAGE_FEATURES, "input_ids", "pair_ids", "skipped", "caption_image"):
        if name in batch and not isinstance(batch[name], Tensor):
            raise ValueError(
                f"The data collator must give {name} as a tensor, or leave pair_ids, skipped and caption_image out, "
                f"got a {type(batch[name]).__name__}."
            )
    images, texts = len(images_of(batch)), len(batch["input_ids"])
    if "pair_ids" in batch and batch["pair_ids"].shape != (images,):
        raise ValueError(
            f"The data collator must give pair_ids as [{images}] int64, one for each image, got "
            f"{list(batch['pair_ids'].shape)}."
        )
    _, captions = group_by_image(batch.get("caption_image"), texts, images)
    if equal_ids == "exclude" and (captions > 1).any():
        raise ValueError(
            f"Image {captions.argmax()} of a training batch has {captions.max()} captions, and equal_ids is 'exclude'. "
            "Pass equal_ids='positive', which trains on all of them, or give each image one. An ImageTextDataset, of "
            "a datasets.Dataset, draws it anew in each epoch; a Dataset or collator of your own has to choose it."
        )
