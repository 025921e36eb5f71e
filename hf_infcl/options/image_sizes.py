"""The sizes of the images in the steps of a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .batch_schedule import Course, read_stages, same_words
from .declaring import ExclusiveOptionsError
from .tower_options import TowerOptions


@dataclass(frozen=True)
class ImageSizes:
    """Smaller images first (arXiv 2305.07017): a size for each step, the full one at the end."""

    sizes: tuple[int, ...]  # heights and widths in pixels; the last one is that of the model
    ends: tuple[float, ...]  # for each size but the last, the share of the samples after which it ends
    first_steps: tuple[int, ...] = ()  # for each size but the first, its first step; empty without a training

    @classmethod
    def of(cls, words: Sequence[str], course: Course | None = None) -> ImageSizes:
        """The schedule of words such as 112:0.5 160:0.4 224: each size with its share of the samples, the rest is last.

        Raises:
            ValueError: the words are no such schedule.
        """
        of = "sizes with their shares of the samples", "sizes of at least one pixel"
        sizes, ends = read_stages("image_size_schedule", words, *of, "112:0.5 160:0.4 224")
        return cls(sizes, ends, () if course is None else tuple(map(course.first_step, ends)))

    def at(self, step: int) -> int:
        """The size of the images in a step, by the number of steps before it."""
        return self.sizes[sum(step >= first for first in self.first_steps)]

    def smaller_at(self, step: int) -> int | None:
        """The size of a step, or None for the full size, at which images are used as the loader returns them."""
        size = self.at(step)
        return None if size == self.sizes[-1] else size


def check_image_sizes(args: TowerOptions) -> None:
    """Raises a ValueError for an ``image_size_schedule`` that is none, or that other options contradict."""
    if args.image_size_schedule is None:
        return
    full = ImageSizes.of(args.image_size_schedule).sizes[-1]
    args.image_size_schedule = same_words(args.image_size_schedule)
    if args.image_size not in (None, full):
        raise ExclusiveOptionsError(
            f"image_size_schedule ends with {full}, and image_size is {args.image_size}. The last steps see "
            "images of the size of the model: give both the same one.",
            ("image_size", "image_size_schedule"),
        )
