"""The one table of the planner: what was measured of GPUs, and what each option changes in the model or costs.

`infcl plan` keeps the options that have a row in `EFFECTS`, and lists them in its help. Nothing here imports torch, so
that the help is printed at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .counts import NOTHING, Counts, Work

if TYPE_CHECKING:
    from ...encoders.dual_encoder import DualEncoder


class GPU(NamedTuple):
    """A GPU: what CUDA and its data sheet say of it, and the measured shares of its peak."""

    name: str
    memory_gib: float
    peak: float  # FLOP/s (bf16, dense)
    shares: Mapping[str, float]  # by the kind of step; an optimizer computes as eager steps do

    def seconds(self, flops: float, kind: str) -> float:
        return flops / (self.peak * self.shares[kind])


# The shares, and the seconds in which a host launches an operator of the eager model, are medians of the rows of
# scripts/benchmarks/results. `scripts/benchmark.py plan` computes them again.
GPUS = {
    "h100": GPU("H100", 79.6, 989e12, {"eager": 0.19, "compiled": 0.30, "loss": 0.61}),
    "h200": GPU("H200", 140.4, 989e12, {"eager": 0.23, "compiled": 0.27, "loss": 0.61}),
}
LAUNCHES = {"eager": 45e-6, "compiled": 32e-6}
GIB = 1 << 30
USABLE = 0.92  # share of a GPU's memory; the rest is for CUDA, NCCL and fragmentation
COMPILED_GRAPH = 0.75  # share of the activations that a compiled model keeps; it recomputes the rest


@dataclass(frozen=True)
class Choice:
    """The composition of a global batch on GPUs that each hold the whole model: the options of these names."""

    gpus: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    retain_graphs: int = 1
    offload_inputs: bool = False
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    # By name, the other options that have a row in `EFFECTS` and do not have their default.
    options: Mapping[str, Any] = field(default_factory=dict)

    def divided(self, micro_batch: int, accumulation: int) -> Choice:
        """The same choice with other micro-batches."""
        return replace(self, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=accumulation)

    @property
    def rows(self) -> int:
        """Pairs of a window on one GPU."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def global_batch(self) -> int:
        return self.rows * self.gpus

    @property
    def kept(self) -> int:
        """The micro-batches whose graphs are kept."""
        return min(self.retain_graphs, self.gradient_accumulation_steps)

    @property
    def dealt(self) -> int:
        """The micro-batches whose texts may be encoded together; with several GPUs the last one encodes its own."""
        return self.gradient_accumulation_steps - (self.gpus > 1)


@dataclass(frozen=True)
class Cost:
    """What an option adds to a step on one GPU: bytes as in `prediction.Memory`, and operations."""

    weights: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    features: float = 0.0
    first_pass: Work = NOTHING  # of a window
    second_pass: Work = NOTHING
    loss: float = 0.0  # floating point operations, as those of the optimizer
    update: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True)
class Effect:
    """The effect of an option on a plan. Without a cost and a change of the model, the plan only keeps the option."""

    cost: Callable[[Counts, Choice, Any], Cost] | None = None  # of the option's value
    model: Callable[[DualEncoder, Any], object] | None = None  # changes the model that is counted or measured


def total_cost(counts: Counts, choice: Choice) -> Cost:
    """The sum of what all options of a choice cost."""
    costs = ((EFFECTS[name].cost, value) for name, value in choice.options.items())
    return sum((cost(counts, choice, value) for cost, value in costs if cost is not None), Cost())


def pair_bytes(dim: int, choice: Choice) -> float:
    """The bytes of the embeddings of a window's images and texts, in fp32."""
    return 2 * 4.0 * dim * choice.rows


def loss_flops(dim: int, choice: Choice, objective: str) -> float:
    """The operations of one GPU's part of the loss and its gradient."""
    from ...loss import OBJECTIVES

    return 2.0 * OBJECTIVES[objective].products * dim * choice.rows * choice.global_batch


def _keep_features(counts: Counts, choice: Choice, weight: float) -> Cost:
    start = (counts.image.again + counts.text.again) * choice.gradient_accumulation_steps  # without what is frozen
    return Cost(weights=4.0 * counts.trained, features=pair_bytes(counts.dim, choice), first_pass=start)


def _matryoshka_dims(counts: Counts, choice: Choice, dims: Sequence[int]) -> Cost:
    # The normalised prefixes, the graph of their norms, and their gradients.
    loss = sum(loss_flops(dim, choice, counts.objective) for dim in dims)
    return Cost(features=3 * pair_bytes(sum(dims), choice), loss=loss)


def _optimizer(counts: Counts, choice: Choice, name: str) -> Cost:
    """Muon has one buffer for a matrix; its steps compute m·n·m twice and m·m·m, and the GPUs share them."""
    from ...optimizers.newton_schulz import STEPS

    values = sum(rows * columns for rows, columns in counts.matrices)
    update = sum(STEPS * (4.0 * m * m * n + 2.0 * m**3) for m, n in map(sorted, counts.matrices))
    return Cost(optimizer=-4.0 * values, update=update / choice.gpus)


@functools.cache
def _count_teacher(name: str) -> Counts:
    import torch

    from ...conversion.models import load_config
    from .operations import ROWS, count_encoder, new_encoder

    try:
        return count_encoder(*new_encoder(load_config(name), ROWS, torch.device("meta")))
    except ValueError as error:
        raise ValueError(f"The teacher {name} cannot be planned. {error}") from error


def _teacher(counts: Counts, choice: Choice, names: Sequence[str]) -> Cost:
    """Frozen models, each with a forward in every micro-batch of which no activations are kept."""
    side, cost = choice.options.get("teacher_side", "both"), Cost()
    for teacher in map(_count_teacher, names):
        towers = [getattr(teacher, tower) for tower in ("image", "text") if side in ("both", tower)]
        forward = sum((tower.forward for tower in towers), NOTHING) * choice.gradient_accumulation_steps
        features = len(towers) / 2 * pair_bytes(teacher.dim, choice)
        cost += Cost(weights=4.0 * teacher.parameters, features=features, first_pass=forward)
    return cost


def _texts_at_once(counts: Counts, choice: Choice, at_once: int) -> Cost:
    """Fewer, larger forwards of the text tower; a graph that is kept may hold the texts of other micro-batches."""
    text, first = counts.text, min(choice.kept, choice.dealt)
    fewer, fewer_kept = choice.dealt - math.ceil(choice.dealt / at_once), first - math.ceil(first / at_once)
    # The kept graphs of texts are fewer, but each holds the texts of several micro-batches, also of such whose images
    # are encoded again in the second pass.
    more = min(choice.dealt, (first - fewer_kept) * at_once) - first
    return Cost(
        activations=more * choice.per_device_train_batch_size * text.graph,
        first_pass=Work(0.0, -fewer * text.forward.launches),
        second_pass=Work(0.0, -fewer * text.backward.launches)
        + Work(-more * text.again.flops, -(fewer - fewer_kept) * text.again.launches),
    )


def _patch_dropout(encoder: DualEncoder, share: float) -> None:
    from ...encoders.patch_dropout import PatchDropout

    if share:
        PatchDropout(encoder, share)


def _bf16_activations(encoder: DualEncoder, wanted: bool) -> None:
    from ...encoders.in_bf16 import compute_in_bf16

    compute_in_bf16(encoder.model, wanted=wanted)


# Options that a plan keeps, and that cost nothing or are read by the planner itself.
_NO_EFFECT = (
    *("global_batch_size", "global_batch_schedule", "activation_checkpointing", "num_train_epochs", "max_steps"),
    *("image_size", "image_size_schedule", "full_tokens_last", "max_text_tokens", "replay_share"),
    *("teacher_side", "ema_device"),
)
# The options of a training that a plan keeps, by their names.
EFFECTS = {
    "freeze": Effect(model=lambda encoder, tower: encoder.freeze(tower)),
    "freeze_layers": Effect(model=lambda encoder, layers: encoder.freeze_layers(layers)),
    "patch_dropout": Effect(model=_patch_dropout),
    "bf16_activations": Effect(model=_bf16_activations),
    "ema_decay": Effect(lambda m, c, _: Cost(optimizer=0.0 if "ema_device" in c.options else 4.0 * m.trained)),
    "keep_features": Effect(_keep_features),
    # A start that is kept for its features has the weights, too.
    "keep_weights": Effect(lambda m, c, _: Cost(weights=0.0 if "keep_features" in c.options else 4.0 * m.trained)),
    "matryoshka_dims": Effect(_matryoshka_dims),
    "optimizer": Effect(_optimizer),
    "teacher": Effect(_teacher),
    "teacher_embeddings": Effect(lambda m, c, folders: Cost(features=len(folders) * pair_bytes(m.dim, c))),
    "texts_at_once": Effect(_texts_at_once),
    **dict.fromkeys(_NO_EFFECT, Effect()),
}
OF_CHOICE = tuple(one.name for one in fields(Choice))[1:-1]  # options that are attributes of a choice
PLANNED = {*EFFECTS, *OF_CHOICE}
# Options that the prediction ignores, with the values that it ignores; without values, it ignores all.
LEFT_OUT: dict[str, Sequence[str]] = {
    "strategy": ("disco", "local", "gather"),
    "backend": ("torch",),
    **dict.fromkeys(("lora_rank", "cache_features", "ema_device", "fsdp", "deepspeed", "fp16"), ()),
}
