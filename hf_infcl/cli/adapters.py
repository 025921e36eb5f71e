"""LoRA adapters of the package peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from .command_options import ModelOptions
from .models import load

ADAPTER_FILES = (ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME)


def with_adapters(model: Any, rank: int, targets: list[str]) -> Any:
    """Adds LoRA adapters (arXiv 2106.09685). Nothing else trains: logit_scale and logit_bias keep their values."""
    try:
        import peft
    except ImportError:
        raise ValueError("--lora_rank needs the package peft: pip install peft.") from None
    if rank < 1:
        raise ValueError(f"--lora_rank must be at least 1, got {rank}.")
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets[0] if targets == ["all-linear"] else targets
    )
    return peft.get_peft_model(model, config)


def merge_adapters(folder: Path, start: ModelOptions) -> None:
    """Replaces the adapter in the folder, which was trained from the model start, by the whole model."""
    import peft

    model, *_ = load(start.model, start.open_clip_model)
    peft.PeftModel.from_pretrained(model, folder).merge_and_unload().save_pretrained(folder)
    for name in ADAPTER_FILES:
        (folder / name).unlink(missing_ok=True)
