"""Memory and time of an optimizer step, from the counts of its model and the table of costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ...loss.strategies import GATHERED_BYTES, gathered_bytes
from .costs import COMPILED_GRAPH, GPU, RATES, USABLE, Choice, loss_flops, pair_bytes, total_cost
from .counting import Counts, Work

GIB = 1 << 30
LARGEST = 4096  # pairs of the largest micro-batch that is tried


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a step: the sum of the attributes.

    Attributes:
        weights: parameters and their gradients in fp32, under DDP the gradient buckets, and frozen copies.
        optimizer: the two moments of Adam in fp32, or for a matrix of Muon one; and the average of the weights.
        activations: the kept graphs and, at the peak of a backward, its temporary tensors.
        images: the inputs of the window.
        features: the embeddings of the window or their gradients, and the embeddings of teachers, in fp32.
        loss: the memory of the loss, if the peak occurs in it.
    """

    weights: float
    optimizer: float
    activations: float
    images: float
    features: float
    loss: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, part.name) for part in fields(self)))

    @property
    def words(self) -> str:
        """The parts, in GiB."""
        return ", ".join(f"{part.name} {getattr(self, part.name) / GIB:.1f}" for part in fields(self))


def memory(counts: Counts, choice: Choice, *, pixel_bytes: int = 1) -> Memory:
    """The memory of a step.

    Args:
        counts: the counts of the model, with the checkpointing of the choice.
        choice: the composition of the batch.
        pixel_bytes: bytes per image value: 1 with the trainer's own collator, 4 with images in fp32.
    """
    cost, share = total_cost(counts, choice), COMPILED_GRAPH if choice.compiled else 1.0
    graph, peak = (share * choice.micro_batch * part + counts.weight_copies for part in (counts.graph, counts.peak))
    more = share * cost.activations
    images = choice.micro_batch * min(2, choice.accumulation) if choice.offload else choice.rows
    common = {
        "weights": 4.0 * (counts.parameters + counts.trained * (1 if choice.gpus == 1 else 2)) + cost.weights,
        "optimizer": 8.0 * counts.trained + cost.optimizer,
        # The images of the micro-batch that runs are in fp32.
        "images": counts.pixels * (images * pixel_bytes + choice.micro_batch * (4 - pixel_bytes)),
        "features": pair_bytes(counts.dim, choice) + cost.features,
    }
    in_backward = Memory(activations=graph * (choice.kept - 1) + peak + more, loss=0.0, **common)
    in_loss = Memory(activations=graph * choice.kept + more, loss=loss_bytes(counts.dim, choice), **common)
    return max(in_backward, in_loss, key=lambda m: m.total)


def loss_bytes(dim: int, choice: Choice) -> float:
    """The bytes that the loss allocates with bf16 features: a tile of coefficients, gradients, texts of other GPUs."""
    tile = 2.0 * min(choice.rows, 8192) * min(choice.global_batch, 16384)
    own = 12.0 * choice.rows * dim  # gradients of both sides, in fp32 and in bf16
    if choice.gpus == 1:
        return tile + own
    is_gathered = gathered_bytes(choice.global_batch, dim, 2, choice.gpus) <= GATHERED_BYTES
    return tile + own + (8.0 * choice.global_batch * dim if is_gathered else own)


def passes(counts: Counts, choice: Choice) -> dict[str, Work]:
    """The operations of the two passes over a window."""
    cost, towers, times = total_cost(counts, choice), (counts.image, counts.text), choice.accumulation
    first = [tower.forward * times for tower in towers]
    second = [tower.backward * times + tower.again * (times - choice.kept) for tower in towers]
    return {"first pass": sum(first, cost.first_pass), "second pass": sum(second, cost.second_pass)}


def seconds(counts: Counts, choice: Choice, gpu: GPU) -> dict[str, float]:
    """The time of a step by phase, where data is always available.

    A pass takes as long as its operations at the measured share of the GPU's peak, or as the host's launches. The loss
    of few pairs on several GPUs takes up to 3 ms longer, and AdamW 2 ms for 150 million weights.
    """
    rate, cost = RATES["compiled" if choice.compiled else "eager"], total_cost(counts, choice)
    loss = loss_flops(counts.dim, choice, counts.objective) + cost.loss
    first, second = (
        max(choice.micro_batch * work.flops / (rate.share * gpu.peak), work.launches * rate.launch)
        for work in passes(counts, choice).values()
    )
    return {
        "first pass": first,
        "loss": loss / (RATES["loss"].share * gpu.peak),
        "second pass": second,
        "optimizer": cost.update / (RATES["eager"].share * gpu.peak),
    }


def choices(
    counts: Mapping[bool, Counts],
    *,
    gpus: int,
    global_batch: int,
    gpu: GPU,
    memory_gib: float,
    decided: Mapping[str, Any] | None = None,
) -> Iterator[tuple[float, Choice]]:
    """All choices that fit into memory, with their seconds per step.

    Args:
        counts: the counts with (True) and without (False) checkpointing of the activations.
        decided: attributes of `Choice` that are not to be chosen, by name. No other model is compiled.

    Raises:
        ValueError: the global batch is not a multiple of the number of GPUs.
    """
    rows, rest = divmod(global_batch, gpus)
    if rest or rows < 1:
        near = sorted({max(rows, 1) * gpus, (rows + 1) * gpus})
        raise ValueError(
            f"A global batch of {global_batch} pairs cannot be divided equally among {gpus} GPUs. Choose "
            f"{' or '.join(map(str, near))}."
        )
    decided = dict(decided or {})
    micro_batch, accumulation = decided.pop("micro_batch", None), decided.pop("accumulation", None)
    sizes = [size for size in range(1, min(rows, LARGEST) + 1) if rows % size == 0]
    if micro_batch or accumulation:
        sizes = [micro_batch or rows // accumulation]
    for checkpointing, of_model in counts.items():
        for size in sizes if decided.get("checkpointing", checkpointing) == checkpointing else ():
            for offload in (False, True) if "offload" not in decided else (decided["offload"],):
                way = {"offload": offload, "checkpointing": checkpointing, **decided}
                choice = Choice(gpus, size, rows // size, **way)
                free = USABLE * memory_gib * GIB - memory(of_model, choice).total
                if free < 0:
                    continue
                if "retain" not in decided and choice.accumulation > 1:
                    graph = memory(of_model, replace(choice, retain=2)).total - memory(of_model, choice).total
                    more = int(free / graph) if graph > 0 else 0
                    choice = replace(choice, retain=min(choice.accumulation, 1 + more))
                yield sum(seconds(of_model, choice, gpu).values()), choice


def best(found: Iterator[tuple[float, Choice]]) -> tuple[float, Choice] | None:
    """The fastest choice, or a simpler one that takes at most 2% longer: no offloading, larger micro-batches."""
    every = list(found)
    limit = 1.02 * min((time for time, _ in every), default=0.0)
    simple = [pair for pair in every if pair[0] <= limit]
    return min(simple, key=lambda pair: (pair[1].checkpointing, pair[1].offload, pair[1].accumulation), default=None)
