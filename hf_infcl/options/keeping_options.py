"""Options that keep a model near the one that it was before."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from .declaring import FINITE, Range, option


@dataclass
class KeepingOptions:
    keep_features: float | None = option(
        "Weight β of the squared distance to the embeddings before the training. All are normalised. The mean over the "
        "images of the batch, summed over both towers and all captions of an image, is minimised with the loss. A "
        "frozen copy of the model runs once per step.",
        decides=True,
        within=FINITE,
        card="weight of the distance from the embeddings of the start",
    )
    cache_features: str | None = option(
        "Folder for the outputs of what does not train, computed once for all epochs. That is the frozen image tower "
        "(freeze=image), whose outputs are read instead of the images, and the start (keep_features). Images must not "
        "be augmented. Many runs can share the folder.",
        decides=False,
        one_machine=True,
    )
    replay_share: float | None = option(
        "With replay_dataset: share of old pairs in each global batch, by default 0.5.",
        decides=True,
        within=Range(Real, "a number of more than 0 and less than 1", lambda value: 0 < value < 1),
    )
