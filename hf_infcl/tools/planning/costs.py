"""The one table of the planner: what each option changes in the model or costs, and what was measured of GPUs.

`infcl plan` keeps the options that have a row in `EFFECTS`, and lists them in its help. Nothing here imports torch
before a plan is made, so that the help is printed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from ...encoders.dual_encoder import DualEncoder


class GPU(NamedTuple):
    """A GPU: what CUDA and its data sheet say of it, and the measured shares of its peak."""

    name: str
    memory_gib: float
    peak: float  # FLOP/s (bf16, dense)
    shares: Mapping[str, float]  # by the kind of step

    def seconds(self, flops: float, kind: str) -> float:
        return flops / (self.peak * self.shares[kind])


# The shares, and the seconds in which a host launches an operator of the eager model, are medians of the rows of
# scripts/benchmarks/results. `scripts/benchmark.py plan` computes them again.
GPUS = {
    "h100": GPU("H100", 79.6, 989e12, {"eager": 0.22, "compiled": 0.30, "loss": 0.61}),
    "h200": GPU("H200", 140.4, 989e12, {"eager": 0.27, "compiled": 0.27, "loss": 0.61}),
}
LAUNCHES = {"eager": 43e-6, "compiled": 32e-6}
DECODED = 561  # images of 54 kB that a core decodes and crops in a second ("hf_infcl, random crop" of data.csv)
GIB = 1 << 30
USABLE = 0.92  # share of a GPU's memory; the rest is for CUDA, NCCL and fragmentation
COMPILED_GRAPH = 0.75  # share of the activations that a compiled model keeps; it recomputes the rest
MEMORY = ("weights", "optimizer", "activations", "images", "features")  # the bytes of a `Cost`

AmountsT = TypeVar("AmountsT", bound="Amounts")


@dataclass(frozen=True)
class Amounts:
    """Amounts of a step, which add up one by one."""

    def __add__(self: AmountsT, other: AmountsT) -> AmountsT:
        return type(self)(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __sub__(self: AmountsT, other: AmountsT) -> AmountsT:
        return self + other * -1

    def __mul__(self: AmountsT, times: float) -> AmountsT:
        return type(self)(*(getattr(self, one.name) * times for one in fields(self)))


@dataclass(frozen=True)
class Work(Amounts):
    """Floating point operations, and operators that the host launches."""

    flops: float = 0.0
    launches: float = 0.0


@dataclass(frozen=True)
class Tower(Amounts):
    """A micro-batch of a tower with its projection, as `counting` counts it; or of both towers."""

    graph: float = 0.0  # bytes that the forward keeps for its backward
    forward: Work = Work()
    again: Work = Work()  # the forward of the second pass, in which a frozen tower does not run
    backward: Work = Work()


@dataclass(frozen=True)
class Counts:
    """A model and one of its micro-batches, counted."""

    parameters: int
    trained: int  # of the parameters
    by_muon: int  # of the parameters, those that Muon would update
    dim: int  # of the embeddings
    pixels: int  # values of one image
    objective: str  # the one that the model was designed for
    image: Tower
    text: Tower
    peak: float = 0.0  # the most bytes that are in use in its forward and backward, without weights and gradients
    teachers: tuple[Counts, ...] = ()

    @property
    def both(self) -> Tower:
        """Both towers together."""
        return self.image + self.text


@dataclass(frozen=True)
class Choice:
    """The composition of a global batch on GPUs that each hold the whole model, and the options that a plan keeps."""

    gpus: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    options: dict[str, Any] = field(default_factory=dict)  # that have a row in `EFFECTS`, by name; others have none

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
        return min(self.options.get("retain_graphs", 1), self.gradient_accumulation_steps)

    @property
    def texts_at_once(self) -> int:
        """The micro-batches whose texts are encoded together."""
        return max(1, min(self.options.get("texts_at_once", 1), self.dealt))

    @property
    def dealt(self) -> int:
        """The micro-batches whose texts may be encoded together; with several GPUs the last one encodes its own."""
        return self.gradient_accumulation_steps - (self.gpus > 1)

    @property
    def kind(self) -> str:
        """The kind of its passes in `GPU.shares` and `LAUNCHES`."""
        return "compiled" if self.options.get("torch_compile") else "eager"

    @property
    def graph_share(self) -> float:
        """The share of the activations that a graph keeps."""
        return COMPILED_GRAPH if self.kind == "compiled" else 1.0


@dataclass(frozen=True)
class Cost(Amounts):
    """What a step takes on one GPU, or what an option adds to it: bytes at the peak of memory, and operations."""

    weights: float = 0.0  # parameters and gradients in fp32, under DDP the gradient buckets, and frozen copies
    optimizer: float = 0.0  # the moments of Adam in fp32, or for a matrix of Muon one, and the average of the weights
    activations: float = 0.0  # the kept graphs, and the temporary tensors of the micro-batch that runs
    images: float = 0.0  # of the window
    features: float = 0.0  # the embeddings of the window and of teachers in fp32, their gradients, copies in bf16
    passes: Work = Work()  # of both passes over a window
    loss_flops: float = 0.0

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(getattr(self, name) for name in MEMORY)

    @property
    def words(self) -> str:
        """The parts of the memory, in GiB."""
        return ", ".join(f"{name} {getattr(self, name) / GIB:.1f}" for name in MEMORY)


class Effect(NamedTuple):
    """The effect of an option on a plan. Without a cost and a change of the model, the plan only keeps the option."""

    cost: Callable[[Counts, Choice, Any], Cost] | None = None  # of the option's value
    model: Callable[[DualEncoder, Any], object] | None = None  # changes the model that is counted or measured


def step_cost(counts: Counts, choice: Choice, *, pixel_bytes: int = 1) -> Cost:
    """What a step takes.

    The ``counts`` are of a micro-batch of the choice, with its checkpointing. A value of an image has ``pixel_bytes``:
    1 with the trainer's own collator, 4 with images in fp32.
    """
    pairs, count, both = choice.per_device_train_batch_size, choice.gradient_accumulation_steps, counts.both
    images = pairs * min(2, count) if choice.options.get("offload_inputs") else choice.rows
    cost = Cost(
        weights=4.0 * (counts.parameters + counts.trained * (1 if choice.gpus == 1 else 2)),
        optimizer=8.0 * counts.trained,
        activations=choice.graph_share * (counts.peak + (choice.kept - 1) * both.graph),
        # The images of the micro-batch that runs are in fp32.
        images=counts.pixels * (images * pixel_bytes + pairs * (4 - pixel_bytes)),
        # With gradients in fp32 and bf16, which the GPUs exchange.
        features=(2.5 if choice.gpus == 1 else 4.0) * pair_bytes(counts.dim, choice),
        passes=(both.forward + both.backward) * count + both.again * (count - choice.kept),
        loss_flops=loss_flops(counts.dim, choice, counts.objective),
    )
    for name, value in choice.options.items():
        if (of_option := EFFECTS[name].cost) is not None:
            cost += of_option(counts, choice, value)
    return cost


def seconds(cost: Cost, choice: Choice, gpu: GPU) -> dict[str, float]:
    """The time of a step by phase, where data is always available.

    The passes take as long as their operations at the measured share of the GPU's peak, or as the host's launches. The
    loss of few pairs on several GPUs takes up to 3 ms longer, and an optimizer some ms, which are left out.
    """
    passes = max(gpu.seconds(cost.passes.flops, choice.kind), cost.passes.launches * LAUNCHES[choice.kind])
    return {"passes": passes, "loss": gpu.seconds(cost.loss_flops, "loss")}


def pair_bytes(dim: int, choice: Choice) -> float:
    """The bytes of the embeddings of a window's images and texts, in fp32."""
    return 2 * 4.0 * dim * choice.rows


def loss_flops(dim: int, choice: Choice, objective: str) -> float:
    """The operations of one GPU's part of the loss and its gradient."""
    from ...loss import OBJECTIVES

    return 2.0 * OBJECTIVES[objective].products * dim * choice.rows * choice.global_batch


def _keep_features(counts: Counts, choice: Choice, weight: float) -> Cost:
    start = counts.both.again * choice.gradient_accumulation_steps  # without what is frozen
    return Cost(weights=4.0 * counts.trained, features=pair_bytes(counts.dim, choice), passes=start)


def _matryoshka_dims(counts: Counts, choice: Choice, dims: Sequence[int]) -> Cost:
    # The normalised prefixes, the graph of their norms, and their gradients.
    flops = sum(loss_flops(dim, choice, counts.objective) for dim in dims)
    return Cost(features=3 * pair_bytes(sum(dims), choice), loss_flops=flops)


def _teacher(counts: Counts, choice: Choice, names: Sequence[str]) -> Cost:
    """Frozen models, each with a forward in every micro-batch of which no activations are kept."""
    side, cost = choice.options.get("teacher_side", "both"), Cost()
    for teacher in counts.teachers:
        forward = getattr(teacher, side).forward * choice.gradient_accumulation_steps
        features = (1.0 if side == "both" else 0.5) * pair_bytes(teacher.dim, choice)
        cost += Cost(weights=4.0 * teacher.parameters, features=features, passes=forward)
    return cost


def _texts_at_once(counts: Counts, choice: Choice, at_once: int) -> Cost:
    """Fewer, larger forwards of the text tower; the kept ones may hold texts of which the images are encoded again."""
    text, kept = counts.text, min(choice.kept, choice.dealt)
    calls, kept_calls = math.ceil(choice.dealt / at_once), math.ceil(kept / at_once)
    more = min(choice.dealt, kept_calls * at_once) - kept
    saved, saved_again = choice.dealt - calls, (choice.dealt - kept) - (calls - kept_calls)
    launches = saved * (text.forward + text.backward).launches + saved_again * text.again.launches
    activations = choice.graph_share * more * text.graph
    return Cost(activations=activations, passes=Work(-more * text.again.flops, -launches))


def _patch_dropout(encoder: DualEncoder, share: float) -> None:
    from ...encoders.patch_dropout import PatchDropout

    if share:
        PatchDropout(encoder, share)


def _bf16_activations(encoder: DualEncoder, wanted: bool) -> None:
    from ...encoders.in_bf16 import compute_in_bf16

    compute_in_bf16(encoder.model, wanted=wanted)


def _gradient_checkpointing(encoder: DualEncoder, wanted: bool) -> None:
    model: Any = encoder.model
    # The second name is that of transformers before 5.20.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": False})
    encoder.stop_gradients_at_frozen_layers()


# Options that cost nothing, or that `step_cost` and the planner read themselves.
_NO_EFFECT = tuple(
    """
    global_batch_size per_device_train_batch_size gradient_accumulation_steps global_batch_schedule retain_graphs
    offload_inputs torch_compile activation_checkpointing num_train_epochs max_steps image_size image_size_schedule
    full_tokens_last max_text_tokens replay_share teacher_side ema_device
    """.split()
)
# The options of a training that a plan keeps, by their names. They change the model in this order.
EFFECTS = {
    "freeze": Effect(model=lambda encoder, tower: encoder.freeze(tower)),
    "freeze_layers": Effect(model=lambda encoder, layers: encoder.freeze_layers(layers)),
    "patch_dropout": Effect(model=_patch_dropout),
    "bf16_activations": Effect(model=_bf16_activations),
    "gradient_checkpointing": Effect(model=_gradient_checkpointing),
    "ema_decay": Effect(lambda m, c, _: Cost(optimizer=0.0 if "ema_device" in c.options else 4.0 * m.trained)),
    "keep_features": Effect(_keep_features),
    # A start that is kept for its features has the weights, too.
    "keep_weights": Effect(lambda m, c, _: Cost(weights=0.0 if "keep_features" in c.options else 4.0 * m.trained)),
    "matryoshka_dims": Effect(_matryoshka_dims),
    "optimizer": Effect(lambda m, c, _: Cost(optimizer=-4.0 * m.by_muon)),  # one moment instead of two
    "teacher": Effect(_teacher),
    "teacher_embeddings": Effect(lambda m, c, folders: Cost(features=len(folders) * pair_bytes(m.dim, c))),
    "texts_at_once": Effect(_texts_at_once),
    **dict.fromkeys(_NO_EFFECT, Effect()),
}
# Options that the prediction ignores.
LEFT_OUT = ("lora_rank", "cache_features", "ema_device", "fsdp", "fp16")
