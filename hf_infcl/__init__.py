"""Exact contrastive training of image-text models at any batch size, inside the Hugging Face stack."""

import importlib
from typing import TYPE_CHECKING, Any

from .processes import launcher as launcher  # notes the process that has started this one

__version__ = "0.1.0"

# The public names by the modules that define them. These are imported on first use, so that `import hf_infcl` is fast
# and does not require triton, datasets or evaluate.
_NAMES = {
    "data": ("ContrastiveCollator", "ImageTextDataset", "ImageTextStream", "ZeroShotDataset", "load_pairs"),
    "loss": ("ContrastiveLoss", "contrastive_loss"),
    "models.dual_encoder": ("TwoTowers",),
    "options.arguments": ("InfCLTrainingArguments",),
    "step.own_loop": ("ExactContrastiveLoss", "cached_backward"),
    "trainer.trainer": ("InfCLTrainer",),
}

__all__ = [
    "ContrastiveCollator",
    "ContrastiveLoss",
    "ExactContrastiveLoss",
    "ImageTextDataset",
    "ImageTextStream",
    "InfCLTrainer",
    "InfCLTrainingArguments",
    "TwoTowers",
    "ZeroShotDataset",
    "cached_backward",
    "contrastive_loss",
    "load_pairs",
]

if TYPE_CHECKING:
    from .data import ContrastiveCollator, ImageTextDataset, ImageTextStream, ZeroShotDataset, load_pairs
    from .loss import ContrastiveLoss, contrastive_loss
    from .models.dual_encoder import TwoTowers
    from .options.arguments import InfCLTrainingArguments
    from .step.own_loop import ExactContrastiveLoss, cached_backward
    from .trainer.trainer import InfCLTrainer


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
