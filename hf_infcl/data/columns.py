"""The columns of a table that hold images, captions and classes, where their usual names or types say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .images import holds_captions, holds_images

if TYPE_CHECKING:
    import datasets

IMAGES = ("image", "img", "filepath", "file_path", "image_path", "path", "jpg", "jpeg", "png", "webp")
CAPTIONS = ("caption", "captions", "text", "txt", "title", "sentence", "sentences")
LABELS = ("cls",)  # as tar shards name it


def find_column(kind: str, features: datasets.Features, wanted: str = "") -> str:
    """``wanted`` if the table has this column, else its only one of the kind's type, else the only one of a usual name.

    Args:
        kind: "image", whose type is Image, "caption", which has none, or "label", whose type is ClassLabel.
        wanted: the preferred name, by default that of the kind. It is also the result if no column or several ones
            come into question.
    """
    import datasets

    wanted = wanted or kind
    type_of_kind, usual, fits = {
        "image": (datasets.Image, IMAGES, holds_images),
        "caption": ((), CAPTIONS, holds_captions),
        "label": (datasets.ClassLabel, LABELS, lambda feature: True),
    }[kind]
    found = [name for name, feature in features.items() if isinstance(feature, type_of_kind)]
    found = found or [name for name in usual if name in features and fits(features[name])]
    return found[0] if wanted not in features and len(found) == 1 else wanted


def usual_column(kind: str, column: str, dataset: object) -> str:
    """``column``, unless it is the default, which is called as its ``kind``: then the one of `find_column`."""
    features: Any = getattr(dataset, "features", None) or {}  # what is no table is refused elsewhere
    return find_column(kind, features) if column == kind else column
