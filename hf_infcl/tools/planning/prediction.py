"""Counts or measures the model of a training, and predicts memory and time of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ...encoders.dual_encoder import DualEncoder
from ...encoders.image_size import config_for_images
from ...loss.strategies import GATHERED_BYTES, gathered_bytes
from .costs import COMPILED_GRAPH, GIB, GPU, LAUNCHES, MODEL_CHANGES, Choice, loss_flops, pair_bytes, total_cost
from .counting import ROWS, Counts, Work, count_encoder, example_inputs, new_encoder

LOSS_TILE = 8192, 16384  # the most images and texts whose coefficients the loss holds at once


class Memory(NamedTuple):
    """Bytes on one GPU at the peak of a step: the sum of the attributes."""

    weights: float  # parameters and gradients in fp32, under DDP the gradient buckets, and frozen copies
    optimizer: float  # the moments of Adam in fp32, or for a matrix of Muon one, and the average of the weights
    activations: float  # the kept graphs and, at the peak of a backward, its temporary tensors
    images: float  # of the window
    features: float  # the embeddings of the window or their gradients, and those of teachers, in fp32
    loss: float  # what it allocates, if the peak occurs in it

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def words(self) -> str:
        """The parts, in GiB."""
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in self._asdict().items())


def micro_batch(
    config: PretrainedConfig,
    rows: int,
    device: torch.device,
    *,
    image_size: int | None = None,
    max_text_tokens: int | None = None,
    gradient_checkpointing: bool = False,
    **changes: Any,
) -> tuple[DualEncoder, dict[str, Tensor]]:
    """A model with random weights as it trains with these options, see `MODEL_CHANGES`, and inputs of full length."""
    encoder = new_encoder(config_for_images(config, image_size), device)
    encoder.freeze(None)  # what no embedding depends on
    for name, value in changes.items():
        if value is not None and value is not False:
            MODEL_CHANGES[name](encoder, value)
    encoder.eval_frozen_parts()
    if gradient_checkpointing:
        model: Any = encoder.model
        # The second name is that of transformers before 5.20.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": True, "preserve_rng_state": False})
        for module in model.modules():
            if (checkpoint := getattr(module, "_gradient_checkpointing_func", None)) is not None:
                module._gradient_checkpointing_func = partial(_checkpoint_leaf, checkpoint)
        encoder.stop_gradients_at_frozen_layers()
    return encoder, example_inputs(encoder.model.config, rows, device, max_text_tokens)


def _checkpoint_leaf(
    checkpoint: Callable[..., Tensor], forward: Callable[..., Tensor], hidden: Tensor, *args: object
) -> Tensor:
    """Reentrant checkpointing above frozen layers: without an input that requires a gradient there would be none."""
    return checkpoint(forward, hidden if hidden.requires_grad else hidden.detach().requires_grad_(), *args)


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
    """Runs two micro-batches forward and backward, and measures the second; arguments as for `count`.

    Returns:
        The seconds, and the peak GPU memory in bytes including the weights and their gradients (0 on a CPU).

    Raises:
        ValueError: the GPU has too little memory.
    """
    on_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = 0.0
    try:
        encoder, batch = micro_batch(config, rows, device, **options)
        for _ in range(2):
            synchronize()
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                embeds = encoder.embed(encoder.model, batch)
            torch.stack([e.float().sum() for e in embeds if e.requires_grad]).sum().backward()
            del embeds
            synchronize()
            seconds = time.perf_counter() - start
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"A micro-batch of {rows} does not fit into this machine's {torch.cuda.get_device_name(device)}. Omit "
            "--measure, or plan with the --gpu_memory of this GPU."
        ) from error
    return seconds, torch.cuda.max_memory_allocated(device) if on_gpu else 0


def memory(counts: Counts, choice: Choice, *, pixel_bytes: int = 1) -> Memory:
    """The memory of a step.

    Args:
        counts: the counts of the model, with the checkpointing of the choice.
        choice: the composition of the batch.
        pixel_bytes: bytes per image value: 1 with the trainer's own collator, 4 with images in fp32.
    """
    cost, share = total_cost(counts, choice), COMPILED_GRAPH if choice.torch_compile else 1.0
    pairs, micro_batches = choice.per_device_train_batch_size, choice.gradient_accumulation_steps
    graph, peak = (share * pairs * part + counts.weight_copies for part in (counts.graph, counts.peak))
    images = pairs * min(2, micro_batches) if choice.offload_inputs else choice.rows
    always = {
        "weights": 4.0 * (counts.parameters + counts.trained * (1 if choice.gpus == 1 else 2)) + cost.weights,
        "optimizer": 8.0 * counts.trained + cost.optimizer,
        # The images of the micro-batch that runs are in fp32.
        "images": counts.pixels * (images * pixel_bytes + pairs * (4 - pixel_bytes)),
        "features": pair_bytes(counts.dim, choice) + cost.features,
    }
    kept = graph * choice.kept + share * cost.activations
    in_backward = Memory(activations=kept - graph + peak, loss=0.0, **always)
    in_loss = Memory(activations=kept, loss=loss_bytes(counts.dim, choice), **always)
    return max(in_backward, in_loss, key=lambda part: part.total)


def loss_bytes(dim: int, choice: Choice) -> float:
    """The bytes that the loss allocates with bf16 features: a tile of coefficients, gradients, texts of other GPUs."""
    tile = 2.0 * min(choice.rows, LOSS_TILE[0]) * min(choice.global_batch, LOSS_TILE[1])
    gradients = 12.0 * choice.rows * dim  # gradients of both sides, in fp32 and in bf16
    if choice.gpus == 1:
        return tile + gradients
    is_gathered = gathered_bytes(choice.global_batch, dim, 2, choice.gpus) <= GATHERED_BYTES
    return tile + gradients + (8.0 * choice.global_batch * dim if is_gathered else gradients)


def passes(counts: Counts, choice: Choice) -> tuple[Work, Work]:
    """The operations of the two passes over a window."""
    cost, towers, times = total_cost(counts, choice), (counts.image, counts.text), choice.gradient_accumulation_steps
    first = [tower.forward * times for tower in towers]
    second = [tower.backward * times + tower.again * (times - choice.kept) for tower in towers]
    return sum(first, cost.first_pass), sum(second, cost.second_pass)


def seconds(counts: Counts, choice: Choice, gpu: GPU) -> dict[str, float]:
    """The time of a step by phase, where data is always available.

    A pass takes as long as its operations at the measured share of the GPU's peak, or as the host's launches. The loss
    of few pairs on several GPUs takes up to 3 ms longer, and AdamW 2 ms for 150 million weights.
    """
    kind, cost = "compiled" if choice.torch_compile else "eager", total_cost(counts, choice)
    first, second = (
        max(gpu.seconds(choice.per_device_train_batch_size * work.flops, kind), work.launches * LAUNCHES[kind])
        for work in passes(counts, choice)
    )
    loss = loss_flops(counts.dim, choice, counts.objective) + cost.loss
    update = gpu.seconds(cost.update, "eager")
    return {"first pass": first, "loss": gpu.seconds(loss, "loss"), "second pass": second, "optimizer": update}
