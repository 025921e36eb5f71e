"""The table of objectives. Options, plans, cards and tests read from it what they have to know about each."""

from collections.abc import Callable
from dataclasses import dataclass

from . import one_positive, several_positives
from .batch import Terms


@dataclass(frozen=True)
class Objective:
    """A loss of a batch. `hf_infcl.loss.reference.DEFINITIONS` has its definition under the same name.

    Attributes:
        of_pairs: computes it for pairs; called by `one_positive.evaluate`.
        of_several_positives: computes it for several positives; called by `several_positives.evaluate`.
        products: the matrix products of B × B × D in the loss and its gradient.
        passes: how often the texts travel around a ring of processes.
        largest_scale: the default of ``max_logit_scale`` in a training; None means no limit.
        words: its name in a model card.
    """

    of_pairs: Callable[..., Terms]
    of_several_positives: Callable[..., Terms]
    products: int
    passes: int
    largest_scale: float | None
    words: str


OBJECTIVES: dict[str, Objective] = {
    "softmax": Objective(
        of_pairs=one_positive.softmax,
        of_several_positives=several_positives.softmax,
        products=4,
        passes=2,
        largest_scale=100.0,  # CLIP's rule (arXiv 2103.00020, section 2.5)
        words="softmax (InfoNCE, as CLIP)",
    ),
    "sigmoid": Objective(
        of_pairs=one_positive.sigmoid,
        of_several_positives=several_positives.sigmoid,
        products=3,
        passes=1,
        largest_scale=None,
        words="sigmoid (as SigLIP)",
    ),
}
