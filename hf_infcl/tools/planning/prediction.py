"""Predicts memory and time of a step from what is counted of its model."""

from __future__ import annotations

from typing import NamedTuple

from ...loss.strategies import GATHERED_BYTES, gathered_bytes
from .costs import COMPILED_GRAPH, GIB, GPU, LAUNCHES, Choice, loss_flops, pair_bytes, total_cost
from .counts import Counts, Work

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
