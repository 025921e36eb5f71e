"""Counts or measures the model of a training, as it trains with its options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from transformers import PretrainedConfig

from ...encoders.dual_encoder import DualEncoder
from ...encoders.image_size import config_for_images
from .costs import EFFECTS
from .counts import Counts
from .operations import ROWS, count_encoder, new_encoder


def count(config: PretrainedConfig, *, autocast: bool = True, **options: Any) -> Counts:
    """Counts the model that a config describes, as it trains with these options, see `micro_batch`.

    Without ``autocast``, which stands for ``bf16=True``, it computes in fp32.

    Raises:
        ValueError: the model is not a dual encoder, cannot train with the options, or its forward needs the content of
            tensors.
    """
    return count_encoder(*micro_batch(config, ROWS, torch.device("meta"), **options), autocast=autocast)


def measure(
    config: PretrainedConfig, rows: int, device: torch.device, *, autocast: bool = True, **options: Any
) -> tuple[float, int]:
    """Runs a micro-batch forward and backward, after others that are not measured; arguments as for `count`.

    Returns:
        The seconds, and the peak GPU memory in bytes including the weights and their gradients (0 on a CPU).

    Raises:
        ValueError: there is no GPU, or it has too little memory.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--measure needs a GPU, or --use_cpu. Omit it to predict from the config alone.")
    encoder, batch = micro_batch(config, rows, device, **options)

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            embeds = encoder.embed(encoder.model, batch)
        torch.stack([e.float().sum() for e in embeds if e.requires_grad]).sum().backward()

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    if on_gpu := device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        seconds = timer.timeit(1).mean
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"A micro-batch of {rows} does not fit into this machine's {torch.cuda.get_device_name(device)}. Omit "
            "--measure, or plan with the --gpu_memory of this GPU."
        ) from error
    return seconds, torch.cuda.max_memory_allocated(device) if on_gpu else 0


def micro_batch(
    config: PretrainedConfig,
    rows: int,
    device: torch.device,
    *,
    image_size: int | None = None,
    max_text_tokens: int | None = None,
    gradient_checkpointing: bool = False,
    **options: Any,
) -> tuple[DualEncoder, dict[str, Tensor]]:
    """A model as it trains with these options, of those in `EFFECTS` that change it, and a micro-batch for it."""
    encoder, inputs = new_encoder(config_for_images(config, image_size), rows, device, max_text_tokens)
    encoder.freeze(None)  # what no embedding depends on
    for name, value in options.items():
        if (change := EFFECTS[name].model) is not None and value is not None and value is not False:
            change(encoder, value)
    encoder.eval_frozen_parts()
    if gradient_checkpointing:
        _checkpoint(encoder)
    return encoder, inputs


def _checkpoint(encoder: DualEncoder) -> None:
    """Checkpoints with ``use_reentrant``, since the meta device does not save the same tensors in a second forward."""
    model: Any = encoder.model
    # The second name is that of transformers before 5.20.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": True, "preserve_rng_state": False})
    for module in model.modules():
        if (checkpoint := getattr(module, "_gradient_checkpointing_func", None)) is not None:
            module._gradient_checkpointing_func = partial(_checkpoint_leaf, checkpoint)
    encoder.stop_gradients_at_frozen_layers()


def _checkpoint_leaf(
    checkpoint: Callable[..., Tensor], forward: Callable[..., Tensor], hidden: Tensor, *args: object
) -> Tensor:
    """Reentrant checkpointing above frozen layers: without an input that requires a gradient there would be none."""
    return checkpoint(forward, hidden if hidden.requires_grad else hidden.detach().requires_grad_(), *args)
