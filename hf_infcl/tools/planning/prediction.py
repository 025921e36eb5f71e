"""Memory and time of an optimizer step, predicted from the counts of a micro-batch and measured rates of GPUs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...loss import OBJECTIVES
from ...loss.contrastive import is_small
from ...loss.strategies import GATHERED_BYTES, gathered_bytes
from ...optimizers.newton_schulz import STEPS
from .counting import ROWS, Counts, Operation

GIB = 1 << 30
USABLE = 0.92  # of a GPU's memory; the rest is for CUDA, NCCL and fragmentation
# `scripts/benchmark.py plan --fit` takes the next three times from measured rows.
REPLAY = 0.07e-3  # seconds of a loss on one GPU in addition to its blocks; a small loss is replayed as a CUDA graph
# On several GPUs: seconds of the host, which partly overlap with the device's (see `loss_seconds`), and seconds that
# are added to both. The first two are for a small loss, in which the host calls collectives between CUDA graphs.
HOST_OF_REPLAY, WAIT_OF_REPLAY = 1.12e-3, 0.66e-3
HOST_PER_PRODUCT, WAIT_PER_PRODUCT = 0.55e-3, 0.25e-3  # for each of 4 or 3 products, the first also for each block


@dataclass(frozen=True)
class GPU:
    """Rates of a GPU in training, below those of its data sheet.

    Attributes:
        name: the printed name.
        memory_gib: the memory that CUDA reports.
        flops: floating point operations per second of matrix products in bf16.
        bandwidth: bytes per second read from and written to device memory.
        launch: seconds of host time per operation in eager mode.
        loss_flops: floating point operations per second of the matrix products in the loss's kernels.
        logit: seconds per logit that the loss takes in addition to the products: for the exponential, and for writing
            the coefficient and reading it again.
    """

    name: str
    memory_gib: float
    flops: float
    bandwidth: float
    launch: float
    loss_flops: float
    logit: float


# scripts/benchmarks/plan.py names the rows to which these rates were fitted.
GPUS = {
    "h100": GPU("H100", 79.6, 480e12, 2.30e12, 21e-6, 618e12, 0.34e-12),
    "h200": GPU("H200", 140.4, 480e12, 2.95e12, 21e-6, 686e12, 1.22e-12),
}
# Bytes that Muon reads and writes per value of its matrices, without those of its products: in the steps that all
# processes make, and in the orthogonalisation, which they share. Counted, not fitted: on one H200 the steps of four
# models (scripts/benchmarks/results/optimizer.csv) are predicted within 10%.
MUON_TRAFFIC, ORTHOGONALISING_TRAFFIC = 38.0, 52.0
COMPILED_TRAFFIC = 0.42  # share of the memory traffic between matrix products that torch.compile leaves
# For each matrix product of a compiled model the host takes as long as for this many eager operations. The kernels
# between the products are included.
COMPILED_LAUNCHES = 4
COMPILED_GRAPH = 0.75  # share of the activations that a compiled model keeps; it recomputes the others
# Attributes of `Choice` that only options decide.
GIVEN = ("muon", "keep_features", "keep_weights", "ema", "texts", "prefixes", "stored")


@dataclass(frozen=True)
class Choice:
    """The composition of a global batch on GPUs that each hold the whole model.

    Attributes:
        gpus: the number of processes.
        micro_batch: the pairs of one forward, ``per_device_train_batch_size``.
        accumulation: the micro-batches of a window, ``gradient_accumulation_steps``.
        retain: the micro-batches whose autograd graphs are kept, ``retain_graphs``.
        texts: the micro-batches whose texts are encoded at once, ``texts_at_once``.
        offload: ``offload_inputs``.
        compiled: ``torch_compile``.
        checkpointing: ``gradient_checkpointing``.
        muon: ``optimizer="muon"``.
        keep_features, keep_weights, ema: whether the training keeps features, weights, or an average of the weights.
        prefixes: ``matryoshka_dims``.
        stored: the folders of ``teacher_embeddings``.
    """

    gpus: int
    micro_batch: int
    accumulation: int
    retain: int = 1
    offload: bool = False
    compiled: bool = False
    checkpointing: bool = False
    muon: bool = False
    keep_features: bool = False
    keep_weights: bool = False
    ema: bool = False
    texts: int = 1
    prefixes: tuple[int, ...] = ()
    stored: int = 0

    def passes_of_texts(self, first: int = 0) -> Counter[int]:
        """By the number of micro-batches whose texts a micro-batch encodes, how many do so; from ``first`` on."""
        if self.texts == 1:  # a window may have a million micro-batches
            return Counter({1: self.accumulation - first})
        apart = 1 if self.gpus > 1 else 0  # the last one has its own
        together = self.accumulation - apart
        groups = [min(self.texts, together - begin) for begin in range(0, together, self.texts)]
        return Counter([*groups, *[0] * (together - len(groups)), *[1] * apart][first:])

    @property
    def rows(self) -> int:
        """Pairs of a window on one GPU."""
        return self.micro_batch * self.accumulation

    @property
    def global_batch(self) -> int:
        return self.rows * self.gpus

    @property
    def options(self) -> str:
        """The options of `infcl train`."""
        words = f"--per_device_train_batch_size {self.micro_batch} --gradient_accumulation_steps {self.accumulation}"
        words += f" --retain_graphs {self.retain}" if self.retain > 1 else ""
        words += f" --texts_at_once {self.texts}" if max(self.passes_of_texts()) > 1 else ""
        words += " --offload_inputs" if self.offload else ""
        words += " --gradient_checkpointing" if self.checkpointing else ""
        words += " --optimizer muon" if self.muon else ""
        return words + (" --torch_compile" if self.compiled else "") + " --bf16"


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a step: the sum of the attributes.

    Attributes:
        weights: parameters and their gradients in fp32, under DDP the gradient buckets, and the trained weights of the
            start.
        optimizer: the two moments of Adam in fp32, or for a matrix of Muon one; and the average of the weights.
        activations: the kept graphs and, at the peak of a backward, its temporary tensors.
        images: the inputs of the window.
        features: the embeddings of the window or their gradients, and those of the start, in fp32.
        loss: the memory of the loss, if the peak occurs in the loss or if CUDA graphs keep that memory.
    """

    weights: float
    optimizer: float
    activations: float
    images: float
    features: float
    loss: float

    @property
    def total(self) -> float:
        return self.weights + self.optimizer + self.activations + self.images + self.features + self.loss


def memory(counts: Counts, choice: Choice, *, pixel_bytes: int = 1) -> Memory:
    """The memory of a step.

    Args:
        counts: the counts of the model, with the checkpointing of the choice.
        choice: the composition of the batch.
        pixel_bytes: bytes per image value: 1 with the trainer's own collator, 4 with images in fp32.
    """
    scale = choice.micro_batch / ROWS
    factor = COMPILED_GRAPH if choice.compiled else 1.0
    graph = factor * scale * (counts.graph - counts.weight_copies) + counts.weight_copies
    peak = factor * scale * (counts.peak - counts.weight_copies) + counts.weight_copies
    values = counts.dim * choice.rows  # of the features of one side
    retain = min(choice.retain, choice.accumulation)
    # A graph contains the texts of one micro-batch. The kept ones may have encoded more.
    in_kept = choice.passes_of_texts() - choice.passes_of_texts(retain)
    more_texts = factor * scale * counts.texts[0] * (sum(n * times for n, times in in_kept.items()) - retain)
    start = choice.keep_features or choice.keep_weights
    common = {
        "weights": 4.0 * (counts.parameters + counts.trained * ((1 if choice.gpus == 1 else 2) + start)),
        "optimizer": (12.0 if choice.ema else 8.0) * counts.trained - 4.0 * (muon_values(counts) if choice.muon else 0),
        "images": counts.pixels
        * (choice.micro_batch * min(2, choice.accumulation) if choice.offload else choice.rows)
        * pixel_bytes
        + (4 - pixel_bytes) * counts.pixels * choice.micro_batch,  # the images of a micro-batch in fp32
        "features": 2 * 4.0 * values * (1 + choice.keep_features + choice.stored)
        + 3 * 2 * 4.0 * choice.rows * sum(choice.prefixes),  # normalised prefixes, their norms' graph and gradients
    }
    loss = loss_bytes(counts.dim, choice)
    kept = loss if is_replayed(counts.dim, choice) else 0.0
    in_backward = Memory(activations=graph * (retain - 1) + peak + more_texts, loss=kept, **common)
    in_loss = Memory(activations=graph * retain + more_texts, loss=loss, **common)
    return max(in_backward, in_loss, key=lambda m: m.total)


def loss_bytes(dim: int, choice: Choice) -> float:
    """The bytes that the loss allocates with bf16 features: a tile of coefficients, gradients, texts of other GPUs."""
    rows = choice.rows
    tile = 2.0 * min(rows, 8192) * min(choice.global_batch, 16384)
    own = 12.0 * rows * dim  # gradients of both sides, in fp32 and in bf16
    if choice.gpus == 1:
        return tile + own
    return tile + own + (8.0 * choice.global_batch * dim if is_gathered(dim, choice) else 12.0 * rows * dim)


def is_gathered(dim: int, choice: Choice) -> bool:
    """Whether the texts of all GPUs and their gradients are few enough to be gathered instead of sent around."""
    return gathered_bytes(choice.global_batch, dim, 2, choice.gpus) <= GATHERED_BYTES


def is_replayed(dim: int, choice: Choice) -> bool:
    """Whether the loss is replayed as CUDA graphs."""
    whole = choice.gpus == 1 or is_gathered(dim, choice)
    return whole and is_small(choice.rows, choice.global_batch, dim, choice.gpus)


def seconds(counts: Counts, choice: Choice, gpu: GPU) -> dict[str, float]:
    """The time of a step by phase, assuming that phases do not overlap and that data is always available."""
    retained = min(choice.retain, choice.accumulation)
    passes, passes_again = choice.passes_of_texts(), choice.passes_of_texts(retained)
    _, of_texts, backward_of_texts = counts.texts
    forward, again, backward = (
        {count: _seconds(_micro_batch(operations, texts, count), choice, gpu) for count in passes}
        for operations, texts in (
            (counts.forward, of_texts),
            (counts.again, of_texts),
            (counts.backward, backward_of_texts),
        )
    )
    return {
        "first pass": _sum(forward, passes) + (_sum(again, passes) if choice.keep_features else 0.0),
        "loss": sum(loss_seconds(dim, choice, gpu, counts.objective) for dim in (*choice.prefixes, counts.dim)),
        "second pass": _sum(backward, passes) + _sum(again, passes_again),
        "optimizer": optimizer_seconds(counts, choice, gpu),
    }


def _sum(seconds_of: Mapping[int, float], passes: Counter[int]) -> float:
    return sum(times * seconds_of[count] for count, times in passes.items())


def _micro_batch(operations: Sequence[Operation], texts: Sequence[Operation], count: int) -> list[Operation]:
    """The operations of a micro-batch that encodes the texts of ``count`` micro-batches, given those that encode one's.

    Args:
        operations: of a micro-batch with its own texts.
        texts: those of them that are for texts.
        count: the micro-batches whose texts are encoded.
    """
    if count == 1:
        return list(operations)
    rest = Counter(texts)
    images = []
    for o in operations:
        if rest[o] > 0:
            rest[o] -= 1
        else:
            images.append(o)
    more = [Operation(count * o.flops, count * o.nbytes, o.waits) for o in texts] if count else []
    return images + more


def muon_values(counts: Counts) -> int:
    """The values of all matrices that Muon would update."""
    return sum(rows * columns for rows, columns in counts.matrices)


def optimizer_seconds(counts: Counts, choice: Choice, gpu: GPU) -> float:
    """The time of the optimizer's step. The processes share Muon's orthogonalisation; its exchange is not counted."""
    of_adamw = 28.0 / gpu.bandwidth  # reads 16 and writes 12 bytes per value
    average = counts.trained * 12.0 / gpu.bandwidth if choice.ema else 0.0  # reads 8 and writes 4
    if not choice.muon:
        return counts.trained * of_adamw + average
    values, flops = muon_values(counts), 0.0
    for short, long in map(sorted, counts.matrices):
        flops += STEPS * (4.0 * short**2 * long + 2.0 * short**3)  # of each step: two products m·n·m and one m·m·m
    shared = flops / gpu.flops + ORTHOGONALISING_TRAFFIC * values / gpu.bandwidth
    return (counts.trained - values) * of_adamw + MUON_TRAFFIC * values / gpu.bandwidth + shared / choice.gpus + average


def _seconds(operations: Sequence[Operation], choice: Choice, gpu: GPU) -> float:
    """The time of operations, each limited by either arithmetic or memory traffic.

    The device begins an operation when it has finished the previous one and the host has launched the new one.
    """
    scale = choice.micro_batch / ROWS
    traffic, launch = 1.0, gpu.launch
    if choice.compiled:
        traffic = COMPILED_TRAFFIC
        launch *= COMPILED_LAUNCHES * sum(1 for o in operations if o.flops) / max(1, len(operations))
    host = device = 0.0
    for o in operations:
        if o.waits and not choice.compiled:
            host = device
        seconds = max(o.flops / gpu.flops, o.nbytes / gpu.bandwidth) if o.flops else traffic * o.nbytes / gpu.bandwidth
        host += launch
        device = max(device, host) + scale * seconds
    return device


def loss_seconds(dim: int, choice: Choice, gpu: GPU, objective: str) -> float:
    """The time of the loss and its gradient: the time of its blocks, and of the host that launches them.

    On several GPUs, both partly overlap: the root of the sum of their squares fits whichever is longer. There, a loss
    below 3 ms is only known to half a millisecond, because its measurements differ by that much.
    """
    products = OBJECTIVES[objective].products
    device = block_seconds(dim, choice.rows * choice.global_batch, gpu, objective)
    if choice.gpus == 1:
        return device + REPLAY
    if is_replayed(dim, choice):
        return math.hypot(device, HOST_OF_REPLAY) + WAIT_OF_REPLAY
    blocks = 1 if is_gathered(dim, choice) else choice.gpus
    return math.hypot(device, products * blocks * HOST_PER_PRODUCT) + products * WAIT_PER_PRODUCT


def block_seconds(dim: int, logits: int, gpu: GPU, objective: str) -> float:
    """The time that a GPU needs for the loss of this many logits and its gradient."""
    return logits * (2.0 * OBJECTIVES[objective].products * dim / gpu.loss_flops + gpu.logit)


def link_bytes(counts: Counts, choice: Choice) -> dict[str, float]:
    """The bytes that a GPU sends in one step, by their purpose.

    In the forward of the softmax loss, the texts travel around the ring; in its backward, the texts and their fp32
    gradients do. The sigmoid loss has one pass for both. If texts are gathered, they travel only once.
    """
    others, values = choice.gpus - 1, counts.dim * choice.rows
    passes = 1 if is_gathered(counts.dim, choice) else OBJECTIVES[counts.objective].passes
    return {
        "texts": 2.0 * values * others * passes,
        "gradients of the texts": 4.0 * values * others,
        "gradients of the weights": 2 * 4.0 * counts.trained * others / choice.gpus,
        **({"matrices of Muon": 2.0 * muon_values(counts) * others / choice.gpus} if choice.muon else {}),
    }


def hiding_bandwidth(choice: Choice, gpu: GPU) -> float:
    """Bytes per second in each direction above which the computation hides the ring's transfers.

    While a block of b × b logits is computed, one hop is transferred: 2 · b · D bytes during 2 · b² · D operations in
    the forward of the softmax loss, three times both in its backward, and three times both in the sigmoid loss. With b
    pairs on one GPU, each needs at most the rate of the products divided by b; less, because the kernels also spend
    time on each logit in addition to its products. Only the last transfer of gradients, which overlaps with half a
    block, needs a third more.
    """
    return gpu.loss_flops / choice.rows


def choices(
    counts: Mapping[bool, Counts],
    *,
    gpus: int,
    global_batch: int,
    gpu: GPU,
    memory_gib: float,
    compiled: bool = False,
    decided: Mapping[str, Any] | None = None,
) -> Iterator[tuple[float, Choice]]:
    """All choices that fit into memory, with their seconds per step.

    Args:
        counts: the counts with (True) and without (False) checkpointing of the activations.
        decided: the values of those attributes of `Choice` that are not to be chosen (micro_batch, accumulation,
            retain, offload, checkpointing), and those of `GIVEN`.

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
    decided = decided or {}
    sizes = [size for size in range(1, min(rows, 4096) + 1) if rows % size == 0]
    if "micro_batch" in decided or "accumulation" in decided:
        sizes = [decided["micro_batch"] if "micro_batch" in decided else rows // decided["accumulation"]]
    for checkpointing, of_model in counts.items():
        for size in sizes if decided.get("checkpointing", checkpointing) == checkpointing else ():
            for offload in (False, True) if "offload" not in decided else (decided["offload"],):
                choice = Choice(gpus, size, rows // size, decided.get("retain", 1), offload, compiled, checkpointing)
                others = {name: decided[name] for name in GIVEN if name in decided}
                choice = replace(choice, **others)
                rest_gib = USABLE * memory_gib - memory(of_model, choice).total / GIB
                if rest_gib < 0:
                    continue
                if "retain" in decided:
                    yield sum(seconds(of_model, choice, gpu).values()), choice
                    continue
                two = memory(of_model, replace(choice, retain=2)).total / GIB if choice.accumulation > 1 else 0.0
                graph = two + rest_gib - USABLE * memory_gib
                more = int(rest_gib / graph) if graph > 0 else 0
                kept = replace(choice, retain=max(1, min(choice.accumulation, 1 + more)))
                yield sum(seconds(of_model, kept, gpu).values()), kept


def best(found: Iterator[tuple[float, Choice]]) -> tuple[float, Choice] | None:
    """The fastest choice, or a simpler one that takes at most 2% longer: no offloading, larger micro-batches."""
    every = list(found)
    if not every:
        return None
    limit = 1.02 * min(time for time, _ in every)
    return min(
        ((time, choice) for time, choice in every if time <= limit),
        key=lambda pair: (pair[1].checkpointing, pair[1].offload, pair[1].accumulation),
    )
