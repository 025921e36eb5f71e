"""LoRA adapters of the package peft."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, is_peft_available

from ..readable import give_usual_modes
from .dual_encoder import DualEncoder
from .image_size import resize_images

if TYPE_CHECKING:
    from peft import PeftModel

LORA = ".lora_"  # in the names of LoRA's factors, whose start is zero: they change nothing
ADAPTER_FILES = (ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME)


def with_adapters(
    model: nn.Module, rank: int, targets: list[str], image_size: int | None = None, *, seed: int, merged: bool = False
) -> Any:
    """Adds LoRA adapters (arXiv 2106.09685). Nothing else trains: logit_scale and logit_bias keep their values.

    Args:
        model: the model, which gets the image size first if the adapters will be ``merged`` into it; see
            `resize_images`. Otherwise a training refuses to change it.
        image_size: the height and width of the images; None for those of the model.
        merged: whether `merge_adapters` follows.
        seed: from which the adapters are drawn, alike on all processes.
    """
    try:
        import peft
    except ImportError:
        raise ValueError("--lora_rank needs the package peft: pip install peft.") from None
    if rank < 1:
        raise ValueError(f"--lora_rank must be at least 1, got {rank}.")
    if image_size is not None and merged:
        resize_images(DualEncoder(model), image_size)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets[0] if targets == ["all-linear"] else targets
    )
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        try:
            return peft.get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(
                f"lora_targets must be the names of modules, or the ends of these, got {' '.join(targets)}: {error}"
            ) from error


def merge_adapters(folder: Path, start: PreTrainedModel, image_size: int | None = None) -> None:
    """Replaces the adapter in the folder, which was trained from the model start, by the whole model."""
    import peft

    if image_size is not None:
        resize_images(DualEncoder(start), image_size)
    peft.PeftModel.from_pretrained(start, folder).merge_and_unload().save_pretrained(folder)
    give_usual_modes(folder)
    for name in ADAPTER_FILES:
        (folder / name).unlink(missing_ok=True)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters of peft around it."""
    if not is_peft_available():
        return False
    import peft

    return isinstance(model, peft.PeftModel)


def words_of_adapters(model: Any) -> str:
    """What trains in a model with adapters, for a report: "LoRA adapters of rank 4"."""
    config = model.peft_config["default"]
    rank = getattr(config, "r", None)
    return f"{config.peft_type.value.upper().replace('LORA', 'LoRA')} adapters" + (f" of rank {rank}" if rank else "")


def layers_of_adapters(model: Any) -> tuple[list[str], float | None]:
    """The names of the layers that have adapters, and the alpha of LoRA, if a model has that."""
    config = model.peft_config["default"]
    targets = config.target_modules
    return sorted([targets] if isinstance(targets, str) else targets or []), getattr(config, "lora_alpha", None)


def beside_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters that peft does not save with an adapter, by name; empty if ``model`` is not peft's.

    peft saves its adapters and whole modules (``modules_to_save``), but no single parameter, such as logit_scale.
    """
    if not has_adapters(model):
        return {}
    import peft

    adapted: Any = model
    named: dict[str, Any] = dict(model.named_parameters())
    saved = {
        id(value)
        for name in adapted.peft_config
        for value in peft.get_peft_model_state_dict(
            adapted, state_dict=named, adapter_name=name, save_embedding_layers=False
        ).values()
    }
    return {name: p for name, p in named.items() if p.requires_grad and id(p) not in saved}


def add_beside_adapters(folder: str | Path, model: PeftModel, state_dict: Mapping[str, Tensor]) -> None:
    """Adds the values of `beside_adapters` to the files of all adapters that ``save_pretrained`` has written.

    peft loads the values of any other parameter that an adapter's file contains, so ``PeftModel.from_pretrained``, a
    resumed training and the loading of the best model all restore them. ``state_dict`` has the whole values of the
    parameters, by their names in the model.
    """
    values = {name: state_dict[name].detach().cpu().contiguous() for name in beside_adapters(model)}
    if not values:
        return
    for adapter in model.peft_config:
        file = Path(folder, "" if adapter == "default" else adapter, ADAPTER_SAFE_WEIGHTS_NAME)
        if file.is_file():  # a subclass may save some of the adapters only
            save_file({**load_file(file), **values}, file, metadata={"format": "pt"})


def weight_fingerprint(model: nn.Module, *, frozen: bool = False) -> str:
    """A hash of the weights, or of the ``frozen`` ones alone, without LoRA's factors: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if LORA not in name and not (frozen and parameter.requires_grad):
            digest.update(f"{name} {parameter.dtype}\n".encode())
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
