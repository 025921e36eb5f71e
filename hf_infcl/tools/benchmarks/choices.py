"""Images with right captions and wrong ones, between which a model has to choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...data import ImageTextDataset
from ...data.pairs import usable_captions

if TYPE_CHECKING:
    import datasets


class CaptionChoiceDataset(ImageTextDataset):
    """Images with lists of captions for evaluation; the first captions are right, the rest are wrong.

    The items are those of an `ImageTextDataset` with ``all_captions``.

    Attributes:
        kind: the kind of its metrics, see `hf_infcl.evaluation.metrics.Metric`.

    Args:
        dataset: a map-style `datasets.Dataset` without a transform. Its column ``image`` holds images, paths (strings)
            or encoded images (binary), and ``caption`` lists of strings, more than are right.
        right: the number of right captions of each image: 1 as in SugarCrepe, 2 as in SugarCrepe++.

    Raises:
        ValueError: at construction, for a wrong dataset, column or column type, or a row with an empty caption or
            no wrong one; on access, for a bad image.
    """

    kind = "choices"

    def __init__(self, dataset: datasets.Dataset, *, right: int = 1) -> None:
        super().__init__(dataset, all_captions=True)
        self.right = right
        for row, captions in enumerate(self._texts["caption"]):
            if not isinstance(captions, list) or len(captions) <= right or usable_captions(captions) != captions:
                of_right = "its right caption" if right == 1 else f"its {right} right captions"
                raise ValueError(
                    f"Each row needs {of_right} and at least one wrong one, but row {row} has {captions!r}."
                )
