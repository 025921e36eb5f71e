"""From items to the tensors of a batch, by a processor of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# transformers gives a tokenizer without a stated limit a model_max_length of 1e30.
_NO_LIMIT = 10**6


class ContrastiveCollator:
    """Turns items of `ImageTextDataset` or `ZeroShotDataset` into the tensors of a batch.

    Captions are truncated, and padded to the longest of the batch; but to a fixed length for a model that reads its
    padding like text. SigLIP does: it was trained without an attention mask, and pools the last position whatever it
    holds. Such are taken to be the processors named Siglip* and any tokenizer that gives no attention mask.

    Args:
        processor: has an `image_processor` and a `tokenizer`, as `CLIPProcessor`, `SiglipProcessor` and the like do.
        max_length: tokens per caption, including special ones; by default the tokenizer's `model_max_length`.
        fixed_length: pad every caption to `max_length`; by default as said above. `InfCLTrainer` sets it by the model.

    Raises:
        ValueError: the processor lacks a part, or no maximum length is known.
    """

    def __init__(
        self, processor: ProcessorMixin, max_length: int | None = None, fixed_length: bool | None = None
    ) -> None:
        if missing := [part for part in ("image_processor", "tokenizer") if getattr(processor, part, None) is None]:
            raise ValueError(f"the processor, a {type(processor).__name__}, has no {' and no '.join(missing)}")
        self.processor = processor
        if max_length is None:
            max_length = processor.tokenizer.model_max_length
            if max_length > _NO_LIMIT:
                raise ValueError(
                    f"the tokenizer, a {type(processor.tokenizer).__name__}, states no model_max_length: "
                    "pass max_length, at most the text model's max_position_embeddings"
                )
        self.max_length = max_length
        if fixed_length is None:
            fixed_length = (
                type(processor).__name__.startswith("Siglip")
                or "attention_mask" not in processor.tokenizer.model_input_names
            )
        self._padding = "max_length" if fixed_length else "longest"

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate b items with n captions in all.

        Returns:
            What the image processor gives, `pixel_values` [b, 3, H, W] float in most cases; and for image-text items
            what the tokenizer gives, `input_ids` [n, L] int64 and so on. Then, all int64:
            pair_ids [b]: if the items carry one.
            skipped [b]: if the items carry it.
            caption_image [n]: the row of the batch that each caption belongs to. Absent if every item has one caption.
            labels [b]: for zero-shot items, which have no captions.
        """
        images = [_picture(item["image"]) for item in items]
        batch = dict(self.processor.image_processor(images=images, return_tensors="pt"))
        if "caption" in items[0]:
            if any(not isinstance(item["caption"], list) for item in items):
                raise ValueError(
                    "Each item needs a list of captions, as ImageTextDataset gives it, but the first has "
                    f"{items[0]['caption']!r}. Wrap the rows: ImageTextDataset(dataset)."
                )
            batch |= self.tokenize([caption for item in items for caption in item["caption"]])
            counts = torch.tensor([len(item["caption"]) for item in items])
            if (counts != 1).any():
                batch["caption_image"] = torch.arange(len(items)).repeat_interleave(counts)
        for key, name in (("pair_id", "pair_ids"), ("skipped", "skipped"), ("label", "labels")):
            if key in items[0]:
                batch[name] = torch.tensor([item[key] for item in items])
        return batch

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        """The tokenizer's tensors [n, L] for n texts: captions, or the prompts of a zero-shot classifier."""
        return dict(
            self.processor.tokenizer(
                texts, padding=self._padding, truncation=True, max_length=self.max_length, return_tensors="pt"
            )
        )


def _picture(image: Any) -> Any:
    """PIL's form of a decoded image: processors may take the axes of an array for others."""
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image
