"""LoRA adapters of the package peft, and position embeddings that are interpolated for images of another size."""

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from ..files.whole import give_usual_modes
from .dual_encoder import DualEncoder
from .model_types import IMAGE_TOWERS


def resize_config(config: PretrainedConfig, size: int | None) -> None:
    """Gives the config of a dual encoder another size of images in pixels; None leaves it as it is.

    Raises ValueError if the size is no multiple of the patches.
    """
    vision: Any = getattr(config, "vision_config", None)
    if size is not None and getattr(vision, "image_size", size) != size:
        _check_multiple(vision, size)
        vision.image_size = size


def resize_images(encoder: DualEncoder, size: int | None) -> None:
    """Gives the image tower position embeddings for images of another size in pixels, and its config that size.

    They are interpolated as transformers does it with ``interpolate_pos_encoding``: bicubic, for TIPSv2 bilinear with
    antialiasing. What is saved then loads with ``from_pretrained``. A tower without positions, such as a ConvNet, takes
    the size as it is. None leaves the model as it is.

    Raises:
        ValueError: the size is no multiple of the patches; the positions of the tower cannot be interpolated; the model
            has adapters around it, in whose file they would be missing.
    """
    tower: Any = encoder.towers().get("image")
    config: Any = getattr(tower, "config", None)
    if size is None or getattr(config, "image_size", None) == size:
        return
    kind, model = getattr(config, "model_type", None), f"The image tower of {type(encoder.base).__name__}"
    if kind in IMAGE_TOWERS:
        _check_multiple(config, size)
        if encoder.base is not encoder.model:
            raise ValueError(
                f"image_size={size} changes the position embeddings of the model, which is of {config.image_size} "
                "pixels, and the adapter's file would not have them. Add adapters to a model of this size, or merge "
                "them at the end (--lora_merge)."
            )
        with torch.no_grad():
            _resize_positions(tower.embeddings, config, size)
    elif kind == "siglip2_vision_model":
        raise ValueError(
            f"{model} (type {kind!r}) takes images of any size, cut into at most max_num_patches patches. Leave "
            "image_size out, and set processor.image_processor.max_num_patches."
        )
    elif kind is None or any("position" in name for name, _ in tower.named_parameters()):
        raise ValueError(
            f"{model} (type {kind!r}) has position embeddings that cannot be interpolated to another image_size. Leave "
            f"image_size out, or train a tower of the types {', '.join(IMAGE_TOWERS)}, or one without positions."
        )
    of_tower: Any
    for of_tower in (config, getattr(getattr(encoder.base, "config", None), "vision_config", None)):
        if hasattr(of_tower, "image_size"):
            of_tower.image_size = size


def _check_multiple(config: Any, size: int) -> None:
    patch = getattr(config, "patch_size", 1)
    if size % patch:
        near = max(1, round(size / patch)) * patch
        raise ValueError(
            f"image_size={size} is no multiple of the patches of the image tower, which are of {patch} × {patch} "
            f"pixels. Choose {near}."
        )


def _resize_positions(embeddings: Any, config: PretrainedConfig, size: int) -> None:
    old, new = ((side // config.patch_size) ** 2 for side in (config.image_size, size))
    # AIMv2's have no method of their own, and like SigLIP's no class token.
    of_siglip = partial(SiglipVisionEmbeddings.interpolate_pos_encoding, embeddings)
    interpolate: Any = getattr(embeddings, "interpolate_pos_encoding", of_siglip)
    positions = new
    for name, weight in [*embeddings.named_parameters()]:
        if name.startswith("position_embedding"):  # AIMv2's native models compute theirs
            positions = weight.shape[-2] - old + new  # with the class token
            tokens = weight.new_empty(1, positions, weight.shape[-1])  # only the shape counts
            values = interpolate(tokens, size, size).reshape(*weight.shape[:-2], positions, -1).clone()
            module, _, attribute = name.rpartition(".")
            setattr(embeddings.get_submodule(module), attribute, nn.Parameter(values, weight.requires_grad))
    if hasattr(embeddings, "position_ids"):
        embeddings.position_ids = torch.arange(positions, device=embeddings.position_ids.device)[None]
    # What the modules noted of the size at their construction.
    sizes = {"num_patches": new, "num_positions": positions, "num_embeddings": positions, "image_size": size}
    for noted in embeddings.modules():
        for attribute, value in sizes.items():
            if hasattr(noted, attribute):
                is_pair = isinstance(getattr(noted, attribute), (tuple, list))
                setattr(noted, attribute, (value, value) if is_pair else value)


ADAPTER_FILES = (ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME)


def with_adapters(model: nn.Module, rank: int, targets: list[str], seed: int) -> Any:
    """Adds LoRA adapters (arXiv 2106.09685). Nothing else trains: logit_scale and logit_bias keep their values.

    They are drawn from the ``seed``, alike on all processes.
    """
    try:
        import peft
    except ImportError:
        raise ValueError("--lora_rank needs the package peft: pip install peft.") from None
    modules = "all-linear" if targets == ["all-linear"] else targets
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        try:
            return peft.get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(
                f"lora_targets must be the names of modules, or the ends of these, got {' '.join(targets)}: {error}"
            ) from error


def merge_adapters(folder: Path, start: PreTrainedModel) -> None:
    """Replaces the adapter in the folder, which was trained from the model start, by the whole model."""
    import peft

    peft.PeftModel.from_pretrained(start, folder).merge_and_unload().save_pretrained(folder)
    give_usual_modes(folder)
    for name in ADAPTER_FILES:
        (folder / name).unlink(missing_ok=True)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters of peft around it."""
    return hasattr(model, "get_base_model")


def describe_adapters(model: Any) -> tuple[str, list[str], float | None]:
    """The words for what trains ("LoRA adapters of rank 4"), the layers that have adapters, and LoRA's alpha."""
    config = model.peft_config["default"]
    rank, targets = getattr(config, "r", None), config.target_modules
    words = f"{config.peft_type.value.upper().replace('LORA', 'LoRA')} adapters" + (f" of rank {rank}" if rank else "")
    return words, sorted([targets] if isinstance(targets, str) else targets or []), getattr(config, "lora_alpha", None)


def beside_adapters(model: Any) -> dict[str, nn.Parameter]:
    """The trained parameters that peft does not save with an adapter, by name; empty if ``model`` is not peft's.

    peft saves its adapters and whole modules (``modules_to_save``), but no single parameter, such as logit_scale.
    """
    if not has_adapters(model):
        return {}
    from peft import get_peft_model_state_dict

    named: dict[str, Any] = dict(model.named_parameters())
    saved = {
        id(value)
        for name in model.peft_config
        for value in get_peft_model_state_dict(model, named, name, save_embedding_layers=False).values()
    }
    return {name: p for name, p in named.items() if p.requires_grad and id(p) not in saved}


def add_beside_adapters(folder: str | Path, model: Any, state_dict: Mapping[str, Tensor]) -> None:
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
    digest = hashlib.sha256()  # LoRA's factors change nothing at the start, where their product is zero
    for name, parameter in model.named_parameters():
        if ".lora_" not in name and not (frozen and parameter.requires_grad):
            digest.update(f"{name} {parameter.dtype}\n".encode())
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
