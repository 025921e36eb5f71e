"""The one table of the planner: what was measured of GPUs, and what each option of a training costs.

A plan keeps every option that is declared with ``plans=True``. One that takes memory or time has a row in `COSTS`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ...conversion.models import load_config
from ...loss import OBJECTIVES
from ...optimizers.newton_schulz import STEPS
from .counting import Counts, Work, count


@dataclass(frozen=True)
class GPU:
    """A GPU: its printed name, the memory that CUDA reports, and the FLOP/s of its data sheet (bf16, dense)."""

    name: str
    memory_gib: float
    peak: float


GPUS = {"h100": GPU("H100", 79.6, 989e12), "h200": GPU("H200", 140.4, 989e12)}


@dataclass(frozen=True)
class Rate:
    """A kind of step: the share of the peak where the GPU limits it, the seconds of a launch where the host does."""

    share: float
    launch: float = 0.0


# Medians of rows in scripts/benchmarks/results; `scripts/benchmark.py plan` computes them again. A launch is that of an
# operator of the eager model, and the optimizer's share is that of the steps.
RATES = {"eager": Rate(0.23, 45e-6), "compiled": Rate(0.27, 32e-6), "loss": Rate(0.61)}
USABLE = 0.92  # share of a GPU's memory; the rest is for CUDA, NCCL and fragmentation
COMPILED_GRAPH = 0.75  # share of the activations that a compiled model keeps; it recomputes the rest


@dataclass(frozen=True)
class Choice:
    """The composition of a global batch on GPUs that each hold the whole model.

    Attributes:
        gpus: the number of processes.
        micro_batch, accumulation: ``per_device_train_batch_size`` and ``gradient_accumulation_steps``.
        retain, offload: ``retain_graphs`` and ``offload_inputs``.
        checkpointing, compiled: ``gradient_checkpointing`` and ``torch_compile``.
        options: by name, the other options that are declared with ``plans=True`` and do not have their default.
    """

    gpus: int
    micro_batch: int
    accumulation: int
    retain: int = 1
    offload: bool = False
    checkpointing: bool = False
    compiled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Pairs of a window on one GPU."""
        return self.micro_batch * self.accumulation

    @property
    def global_batch(self) -> int:
        return self.rows * self.gpus

    @property
    def kept(self) -> int:
        """The micro-batches whose graphs are kept."""
        return min(self.retain, self.accumulation)

    @property
    def dealt(self) -> int:
        """The micro-batches whose texts may be encoded together; with several GPUs the last one encodes its own."""
        return self.accumulation - (self.gpus > 1)


@dataclass(frozen=True)
class Cost:
    """What an option adds to a step on one GPU.

    Attributes:
        weights, optimizer, activations, features: bytes, see `prediction.Memory`.
        first_pass, second_pass: operations of a window.
        loss, update: floating point operations of the loss and of the optimizer.
    """

    weights: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    features: float = 0.0
    first_pass: Work = Work()  # noqa: RUF009  # frozen
    second_pass: Work = Work()  # noqa: RUF009
    loss: float = 0.0
    update: float = 0.0


def total_cost(counts: Counts, choice: Choice) -> Cost:
    """The sum of what all options of a choice cost."""
    costs = [COSTS[name](counts, choice, value) for name, value in choice.options.items() if name in COSTS]
    parts = {one.name: [getattr(cost, one.name) for cost in (Cost(), *costs)] for one in fields(Cost)}
    return Cost(**{name: functools.reduce(operator.add, values) for name, values in parts.items()})


def pair_bytes(dim: int, choice: Choice) -> float:
    """The bytes of the embeddings of a window's images and texts, in fp32."""
    return 2 * 4.0 * dim * choice.rows


def loss_flops(dim: int, choice: Choice, objective: str) -> float:
    """The operations of one GPU's part of the loss and its gradient."""
    return 2.0 * OBJECTIVES[objective].products * dim * choice.rows * choice.global_batch


def _keep_features(counts: Counts, choice: Choice, weight: float) -> Cost:
    start = (counts.image.again + counts.text.again) * choice.accumulation  # without what is frozen
    return Cost(weights=4.0 * counts.trained, features=pair_bytes(counts.dim, choice), first_pass=start)


def _matryoshka_dims(counts: Counts, choice: Choice, dims: Sequence[int]) -> Cost:
    # The normalised prefixes, the graph of their norms, and their gradients.
    loss = sum(loss_flops(dim, choice, counts.objective) for dim in dims)
    return Cost(features=3 * pair_bytes(sum(dims), choice), loss=loss)


def _optimizer(counts: Counts, choice: Choice, name: str) -> Cost:
    """Muon has one buffer for a matrix; its steps compute m·n·m twice and m·m·m, and the GPUs share them."""
    values = sum(rows * columns for rows, columns in counts.matrices)
    update = sum(STEPS * (4.0 * m * m * n + 2.0 * m**3) for m, n in map(sorted, counts.matrices))
    return Cost(optimizer=-4.0 * values, update=update / choice.gpus)


@functools.cache
def _count_teacher(name: str) -> Counts:
    try:
        return count(load_config(name))
    except ValueError as error:
        raise ValueError(f"The teacher {name} cannot be planned. {error}") from error


def _teacher(counts: Counts, choice: Choice, names: Sequence[str]) -> Cost:
    """Frozen models, each with a forward in every micro-batch of which no activations are kept."""
    side, weights, features, forward = choice.options.get("teacher_side", "both"), 0.0, 0.0, Work()
    for teacher in map(_count_teacher, names):
        towers = [getattr(teacher, tower) for tower in ("image", "text") if side in ("both", tower)]
        weights += 4.0 * teacher.parameters
        features += len(towers) / 2 * pair_bytes(teacher.dim, choice)
        forward = sum((tower.forward for tower in towers), forward)
    return Cost(weights=weights, features=features, first_pass=forward * choice.accumulation)


def _texts_at_once(counts: Counts, choice: Choice, at_once: int) -> Cost:
    """Fewer, larger forwards of the text tower; a graph that is kept may hold the texts of other micro-batches."""
    text, first = counts.text, min(choice.kept, choice.dealt)
    fewer, fewer_kept = choice.dealt - math.ceil(choice.dealt / at_once), first - math.ceil(first / at_once)
    # The kept graphs of texts are fewer, but each holds the texts of several micro-batches, also of such whose images
    # are encoded again in the second pass.
    more = min(choice.dealt, (first - fewer_kept) * at_once) - first
    return Cost(
        activations=more * choice.micro_batch * text.graph,
        first_pass=Work(0.0, -fewer * text.forward.launches),
        second_pass=Work(0.0, -fewer * text.backward.launches)
        + Work(-more * text.again.flops, -(fewer - fewer_kept) * text.again.launches),
    )


# By the name of the option: what it costs, from the counts of the model, the choice and the value of the option.
COSTS: dict[str, Callable[[Counts, Choice, Any], Cost]] = {
    "ema_decay": lambda m, c, _: Cost(optimizer=0.0 if "ema_device" in c.options else 4.0 * m.trained),
    "keep_features": _keep_features,
    # A start that is kept for its features has the weights, too.
    "keep_weights": lambda m, c, _: Cost(weights=0.0 if "keep_features" in c.options else 4.0 * m.trained),
    "matryoshka_dims": _matryoshka_dims,
    "optimizer": _optimizer,
    "teacher": _teacher,
    "teacher_embeddings": lambda m, c, folders: Cost(features=len(folders) * pair_bytes(m.dim, c)),
    "texts_at_once": _texts_at_once,
}
# Options that the prediction ignores, with the values that it ignores; without values, it ignores all.
LEFT_OUT: dict[str, Sequence[Any]] = {
    "strategy": ("disco", "local", "gather"),
    "backend": ("torch",),
    **dict.fromkeys(("lora_rank", "cache_features", "ema_device", "fsdp", "deepspeed", "fp16"), ()),
}
