"""Opens datasets, decodes images, draws captions and collates batches."""

from .collator import ContrastiveCollator
from .images import transparency as transparency
from .labelled import ZeroShotDataset, captions_of_classes
from .pairs import ImageTextDataset, caption_pair_id, load_pairs
from .streams import ImageTextStream

__all__ = [
    "ContrastiveCollator",
    "ImageTextDataset",
    "ImageTextStream",
    "ZeroShotDataset",
    "caption_pair_id",
    "captions_of_classes",
    "load_pairs",
]
