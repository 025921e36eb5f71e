"""The periods of a training whose images have fewer tokens at first: smaller images, or fewer patches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from ...encoders.image_size import check_sizes_of_config, config_for_images
from ...options.image_sizes import ImageSizes
from . import prediction
from .counting import Counts, count
from .prediction import GPU, Choice


class Period(NamedTuple):
    """Steps whose images have equally many tokens.

    Attributes:
        end: the share of the samples of the training after which it ends.
        counts: of its steps.
        words: what is different from the last steps.
    """

    end: float
    counts: Counts
    words: str = ""

    def seconds(self, choice: Choice, gpu: GPU) -> float:
        """Of one step."""
        return sum(prediction.seconds(self.counts, choice, gpu).values())


def periods_of(
    options: Any, config: PretrainedConfig, frozen: Mapping[str, Any], *, checkpointing: bool, last: Counts
) -> list[Period]:
    """The periods of a training with ``full_tokens_last`` and ``image_size_schedule``; a single one without them.

    Args:
        options: of the training.
        config: of the model.
        frozen: what is frozen, as for `count`.
        checkpointing: as for `count`.
        last: the counts of the last steps.

    Raises:
        ValueError: the schedule of sizes does not fit the model.
    """
    words = options.image_size_schedule
    own = getattr(config.vision_config, "image_size", None)
    sizes = ImageSizes((own,), ()) if words is None else ImageSizes.of(words)  # type: ignore[arg-type]
    check_sizes_of_config(config.vision_config, sizes.sizes)
    whole_from = 1 - (options.full_tokens_last or 0.0)
    found = []
    for begin, end in itertools.pairwise(sorted({0.0, *sizes.ends, whole_from, 1.0})):
        size = sizes.sizes[sum(begin >= ended for ended in sizes.ends)]
        share = options.patch_dropout if begin < whole_from else None
        if end == 1.0:
            found.append(Period(1.0, last))
            continue
        counts = count(config_for_images(config, size), **frozen, patch_dropout=share, checkpointing=checkpointing)
        images = f"images of {size} pixels" if words else ""
        found.append(Period(end, counts, " and ".join(filter(None, (images, share and "fewer patches")))))
    return found


def mean_seconds(periods: Sequence[Period], choice: Choice, gpu: GPU, begin: float = 0.0, end: float = 1.0) -> float:
    """The mean seconds of the steps from one share of the training to another."""
    ends, spent = [0.0, *(period.end for period in periods)], 0.0
    for first, period in zip(ends, periods, strict=False):
        spent += max(0.0, min(end, period.end) - max(begin, first)) * period.seconds(choice, gpu)
    return spent / (end - begin)
