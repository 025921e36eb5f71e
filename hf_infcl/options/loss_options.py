"""The loss of a training, and how it is computed."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from numbers import Real

from .declaring import Range, option

EQUAL_IDS = ("exclude", "positive")  # what pairs with equal ids are to each other


def objectives() -> Collection[str]:
    from ..loss import OBJECTIVES  # which imports torch

    return OBJECTIVES


def strategies() -> Collection[str]:
    from ..loss.strategies import STRATEGIES

    return STRATEGIES


def backends() -> Collection[str]:
    from ..kernels import BACKENDS

    return BACKENDS


@dataclass
class LossOptions:
    objective: str | None = option(
        "The loss: softmax (InfoNCE, as CLIP) or sigmoid (as SigLIP). Sigmoid needs a model with a logit_bias. "
        "Defaults to the one that the model was designed for.",
        decides=True,
        choices=objectives,
    )
    strategy: str = option(
        "How the processes share the batch: ring, disco, local or gather. All give the same loss and gradient.",
        default="ring",
        decides=False,
        choices=strategies,
    )
    backend: str = option(
        "Which kernels compute the loss: auto, triton or torch.",
        default="auto",
        decides=False,
        one_machine=True,
        choices=backends,
    )
    equal_ids: str | None = option(
        "What pairs with equal pair ids are to each other: 'exclude' (neither positives nor negatives) or 'positive'. "
        "Defaults to 'positive' with several captions per image, which require it, else to 'exclude'. It also applies "
        "to the evaluation loss.",
        decides=True,
        choices=EQUAL_IDS,
    )
    max_logit_scale: float | None = option(
        "Upper limit of the multiplier of the cosines, applied after each step. Defaults to 100 with softmax, as in "
        "CLIP, and to none with sigmoid. The lower limit is then 1.",
        decides=True,
        within=Range(
            Real,
            f"a number of at least 1 ({math.inf} for no limit; it limits the multiplier, not its logarithm)",
            lambda value: value >= 1,
        ),
    )
