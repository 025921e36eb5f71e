"""Options that say which parts of the towers train, and how much of images and captions they see."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .declaring import FROM_0, FROM_1, SHARE, option


def towers() -> Collection[str]:
    from ..encoders.dual_encoder import TOWERS  # which imports torch

    return TOWERS


@dataclass
class TowerOptions:
    freeze: str | None = option(
        "Tower that does not train, with its projection: image or text (LiT, arXiv 2111.07991). It runs once per "
        "step, in evaluation mode.",
        decides=True,
        choices=towers,
    )
    freeze_layers: int | None = option(
        "Layers to freeze at the beginning of each tower, with the embeddings before them; 0 for these alone. They "
        "keep no graph, and run in evaluation mode.",
        decides=True,
        within=FROM_0,
        card="frozen layers of each tower, with the embeddings",
    )
    image_size: int | None = option(
        "Height and width of the images in pixels, such as 336. The position embeddings of the model are interpolated "
        "to this size, which is saved with the model and its processor. Defaults to the size of the model.",
        decides=True,
        within=FROM_1,
        card="height and width that images were resized to, for which positions were interpolated",
    )
    patch_dropout: float | None = option(
        "Share of the patches of each image to leave out at random, such as 0.5 (FLIP, arXiv 2212.00794). Evaluations "
        "see all patches.",
        decides=True,
        within=SHARE,
        card="share of the patches of an image that training left out",
        excludes={"freeze=image": "a frozen tower runs in evaluation mode, in which no patch is left out"},
    )
    max_text_tokens: int | None = option(
        "Cut training captions to this many tokens, special ones included. Evaluations do not cut them. A number above "
        "the tokenizer's limit, up to the positions of the model, raises that limit, also for evaluations and in what "
        "is saved.",
        decides=True,
        within=FROM_1,
        card="tokens to which training cut captions",
    )
