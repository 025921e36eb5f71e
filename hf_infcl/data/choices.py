"""Images with one right caption and wrong ones, between which a model has to choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .pairs import ImageTextDataset, usable_captions

if TYPE_CHECKING:
    import datasets


class CaptionChoiceDataset(ImageTextDataset):
    """Images with lists of captions, the first of which is right and the others are not, for evaluation.

    The items are those of an `ImageTextDataset` with ``all_captions``.

    Attributes:
        kind: the kind of its metrics, see `hf_infcl.evaluation.metrics.Metric`.

    Args:
        dataset: a map-style `datasets.Dataset` without a transform.
        image_column: a column of images, paths (strings) or encoded images (binary).
        caption_column: a column of lists of at least two strings.

    Raises:
        ValueError: at construction, for a wrong dataset, column or column type, or a row with an empty caption or
            fewer than two; on access, for a bad image.
    """

    kind = "choices"

    def __init__(
        self, dataset: datasets.Dataset, *, image_column: str = "image", caption_column: str = "caption"
    ) -> None:
        super().__init__(dataset, image_column=image_column, caption_column=caption_column, all_captions=True)
        for row, captions in enumerate(self._texts[caption_column]):
            if not isinstance(captions, list) or len(captions) < 2 or usable_captions(captions) != captions:
                raise ValueError(
                    f"Each row needs its right caption and at least one wrong one, but row {row} has {captions!r}."
                )
