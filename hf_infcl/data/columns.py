"""The columns of a table that hold images, captions and classes, where their usual names or types say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .images import holds_captions, holds_images

if TYPE_CHECKING:
    import datasets

IMAGES = ("image", "img", "filepath", "file_path", "image_path", "path", "jpg", "jpeg", "png", "webp")
CAPTIONS = ("caption", "captions", "text", "txt", "title", "sentence", "sentences")


def find_image_column(features: datasets.Features, wanted: str = "image") -> str:
    """``wanted`` if the table has this column, else its only column of type Image, else the only one of a usual name.

    Args:
        wanted: the preferred name, which is also the result if no column or several ones come into question.
    """
    import datasets

    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    return _only(wanted, features, images or _usual(IMAGES, features, holds_images))


def find_caption_column(features: datasets.Features, wanted: str = "caption") -> str:
    """``wanted``, else the only column of strings or lists of strings with a usual name; see `find_image_column`."""
    return _only(wanted, features, _usual(CAPTIONS, features, holds_captions))


def find_label_column(features: datasets.Features, wanted: str = "label") -> str:
    """``wanted``, else the only ClassLabel column, else ``cls``, as tar shards name it; see `find_image_column`."""
    import datasets

    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    return _only(wanted, features, labels or [name for name in ("cls",) if name in features])


FIND = {"image": find_image_column, "caption": find_caption_column, "label": find_label_column}


def usual_column(kind: str, column: str, dataset: object) -> str:
    """``column``, unless it is the default, which is called as its ``kind``: then the one that `FIND` finds."""
    features = getattr(dataset, "features", None) or {}  # what is no table is refused elsewhere
    return FIND[kind](features) if column == kind else column


def _usual(names: tuple[str, ...], features: datasets.Features, fits: Callable[[object], bool]) -> list[str]:
    return [name for name in names if name in features and fits(features[name])]


def _only(wanted: str, features: datasets.Features, candidates: list[str]) -> str:
    return candidates[0] if wanted not in features and len(candidates) == 1 else wanted
