"""Pairs that a small model learns in seconds: images and captions of the same five attributes, some of them swapped."""

import torch
from transformers import set_seed

from . import models

ATTRIBUTES, VALUES = 5, 10


class Concepts(models.Pairs):
    """Images that are the sum of one picture for each attribute, and captions that name the attributes.

    Args:
        rows: of the set.
        wrong: share of the pairs whose captions belong to others.
        seed: of the pairs; the pictures of the attributes are always the same.

    Attributes:
        is_wrong: [rows] bool.
    """

    def __init__(self, rows: int = 512, wrong: float = 0.0, seed: int = 1) -> None:
        super().__init__(rows)
        pictures = torch.randn(ATTRIBUTES, VALUES, *self.images.shape[1:], generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(0, VALUES, (rows, ATTRIBUTES), generator=generator)
        noise = torch.randn(self.images.shape, generator=generator)
        self.images = pictures[torch.arange(ATTRIBUTES), values].sum(1) / ATTRIBUTES**0.5 + 0.2 * noise
        self.tokens = 2 + VALUES * torch.arange(ATTRIBUTES) + values
        self.mask = torch.ones_like(self.tokens)
        chosen = torch.randperm(rows, generator=generator)[: int(wrong * rows)]
        self.is_wrong = torch.zeros(rows, dtype=torch.bool)
        self.is_wrong[chosen] = True
        self.tokens[chosen] = self.tokens[chosen.roll(1)]


def linear() -> models.Own:
    """One matrix for each tower."""
    set_seed(0)
    return models.Own()
