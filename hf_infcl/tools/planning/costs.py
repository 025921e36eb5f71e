"""The one table of the planner: what each option changes in the model or costs, and what was measured of GPUs.

`infcl plan` keeps the options that have a row in `EFFECTS`, and lists them in its help. Nothing here imports torch
before a plan is made, so that the help is printed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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
# In optimizer.csv, a ViT-B/16 with 146 matrices takes 9.3 ms alone, and with two GPUs 12.9, where computing half of the
# products would take 4.7. Between them this comes within 25% of all rows.
MATRIX = 70e-6  # seconds of the host for a matrix that Muon updates
DECODED = 561  # images of 54 kB that a core decodes and crops in a second ("hf_infcl, random crop" of data.csv)
GIB = 1 << 30
USABLE = 0.92  # share of a GPU's memory; the rest is for CUDA, NCCL and fragmentation
COMPILED_GRAPH = 0.75  # share of the activations that a compiled model keeps; it recomputes the rest
LOSS_TILE = 8192, 16384  # the most images and texts whose coefficients the loss holds at once


AmountsT = TypeVar("AmountsT", bound="Amounts")


@dataclass(frozen=True)
class Amounts:
    """Amounts of a step, which add up one by one."""

    def __add__(self: AmountsT, other: AmountsT) -> AmountsT:
        return type(self)(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __mul__(self: AmountsT, times: float) -> AmountsT:
        return type(self)(*(times * getattr(self, one.name) for one in fields(self)))


@dataclass(frozen=True)
class Work(Amounts):
    """Floating point operations for each pair, and operators that the host launches for all pairs at once."""

    flops: float = 0.0
    launches: float = 0.0


@dataclass(frozen=True)
class Bytes(Amounts):
    """Memory that grows with the pairs: of each, and of all at once, such as copies of weights in bf16."""

    each: float = 0.0
    fixed: float = 0.0

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> Bytes:
        """The line through the bytes of two numbers of pairs."""
        each = (many[1] - few[1]) / (many[0] - few[0])
        return cls(each, few[1] - each * few[0])

    def of(self, pairs: float) -> float:
        return pairs * self.each + self.fixed


@dataclass(frozen=True)
class Tower(Amounts):
    """Memory and operations of a tower with its projection, as `counting` counts them; or of both towers."""

    graph: Bytes = Bytes()  # what a forward keeps for its backward
    forward: Work = Work()
    again: Work = Work()  # the forward of the second pass, in which a frozen tower does not run
    backward: Work = Work()


@dataclass(frozen=True)
class Counts:
    """The counted parameters, operations and bytes of a model."""

    parameters: int
    trained: int  # of the parameters
    dim: int  # of the embeddings
    pixels: int  # values of one image
    objective: str  # the one that the model was designed for
    image: Tower
    text: Tower
    peaks: tuple[Bytes, ...] = (Bytes(),)  # of the forwards and of each backward, without weights and gradients
    matrices: tuple[tuple[int, int], ...] = ()  # rows and columns of each matrix that Muon would update
    teachers: tuple[Counts, ...] = ()

    @property
    def both(self) -> Tower:
        """Both towers together."""
        return self.image + self.text

    def peak(self, pairs: float) -> float:
        """The most bytes that a micro-batch takes during its forward and its backward."""
        return max(peak.of(pairs) for peak in self.peaks)


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
    def dealt(self) -> int:
        """The micro-batches whose texts may be encoded together; with several GPUs the last one encodes its own."""
        return self.gradient_accumulation_steps - (self.gpus > 1)

    @property
    def in_graph(self) -> float:
        """The pairs of a micro-batch times the share of their activations that its graph keeps."""
        return self.per_device_train_batch_size * (COMPILED_GRAPH if self.options.get("torch_compile") else 1.0)


@dataclass(frozen=True)
class Cost(Amounts):
    """What a step takes on one GPU, or what an option adds to it: bytes at the peak of memory, and operations."""

    weights: float = 0.0  # parameters and gradients in fp32, under DDP the gradient buckets, and frozen copies
    optimizer: float = 0.0  # the moments of Adam in fp32, or for a matrix of Muon one, and the average of the weights
    activations: float = 0.0  # the kept graphs and, if the peak is in a backward, its temporary tensors
    images: float = 0.0  # of the window
    features: float = 0.0  # the embeddings of the window or their gradients, and those of teachers, in fp32
    loss: float = 0.0  # what it allocates, if the peak is in it
    first_pass: Work = Work()  # of a window
    second_pass: Work = Work()
    loss_flops: float = 0.0
    update_flops: float = 0.0
    updated_matrices: float = 0.0  # on the host, which updates all of them

    @property
    def memory(self) -> dict[str, float]:
        """Its bytes by what they are for."""
        return dict(list(vars(self).items())[:6])

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.memory.values())

    @property
    def words(self) -> str:
        """The parts of the memory, in GiB."""
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.memory.items())


class Effect(NamedTuple):
    """The effect of an option on a plan. Without a cost and a change of the model, the plan only keeps the option."""

    cost: Callable[[Counts, Choice, Any], Cost] | None = None  # of the option's value
    model: Callable[[DualEncoder, Any], object] | None = None  # changes the model that is counted or measured


def step_cost(counts: Counts, choice: Choice, *, pixel_bytes: int = 1) -> Cost:
    """What a step takes.

    The ``counts`` have the checkpointing of the choice. A value of an image has ``pixel_bytes``: 1 with the trainer's
    own collator, 4 with images in fp32.
    """
    pairs, count, towers = choice.per_device_train_batch_size, choice.gradient_accumulation_steps, counts.both
    images = pairs * min(2, count) if choice.options.get("offload_inputs") else choice.rows
    cost = Cost(
        weights=4.0 * (counts.parameters + counts.trained * (1 if choice.gpus == 1 else 2)),
        optimizer=8.0 * counts.trained,
        activations=choice.kept * towers.graph.of(choice.in_graph),
        # The images of the micro-batch that runs are in fp32.
        images=counts.pixels * (images * pixel_bytes + pairs * (4 - pixel_bytes)),
        features=pair_bytes(counts.dim, choice),
        first_pass=towers.forward * count,
        second_pass=towers.backward * count + towers.again * (count - choice.kept),
        loss_flops=loss_flops(counts.dim, choice, counts.objective),
    )
    for name, value in choice.options.items():
        if (of_option := EFFECTS[name].cost) is not None:
            cost += of_option(counts, choice, value)
    in_backward = counts.peak(choice.in_graph) - towers.graph.of(choice.in_graph)
    in_loss = _loss_bytes(counts.dim, choice)
    return cost + (Cost(activations=in_backward) if in_backward >= in_loss else Cost(loss=in_loss))


def seconds(cost: Cost, choice: Choice, gpu: GPU) -> dict[str, float]:
    """The time of a step by phase, where data is always available.

    A pass takes as long as its operations at the measured share of the GPU's peak, or as the host's launches; so does
    an update by Muon. The loss of few pairs on several GPUs takes up to 3 ms longer, and AdamW 2 ms for 150 million
    weights.
    """
    first, second = map(max, _passes(cost, choice, gpu))
    loss, update = gpu.seconds(cost.loss_flops, "loss"), gpu.seconds(cost.update_flops, "eager")
    update = max(update, cost.updated_matrices * MATRIX)
    return {"first pass": first, "loss": loss, "second pass": second, "optimizer": update}


def host_limits(cost: Cost, choice: Choice, gpu: GPU) -> bool:
    """Whether both passes of a step wait for the host's launches, and not for the GPU."""
    return all(launches > computes for computes, launches in _passes(cost, choice, gpu))


def _passes(cost: Cost, choice: Choice, gpu: GPU) -> list[tuple[float, float]]:
    """The seconds of the GPU and of the host's launches, in both passes."""
    kind, pairs = "compiled" if choice.options.get("torch_compile") else "eager", choice.per_device_train_batch_size
    works = cost.first_pass, cost.second_pass
    return [(gpu.seconds(pairs * work.flops, kind), work.launches * LAUNCHES[kind]) for work in works]


def pair_bytes(dim: int, choice: Choice) -> float:
    """The bytes of the embeddings of a window's images and texts, in fp32."""
    return 2 * 4.0 * dim * choice.rows


def loss_flops(dim: int, choice: Choice, objective: str) -> float:
    """The operations of one GPU's part of the loss and its gradient."""
    from ...loss import OBJECTIVES

    return 2.0 * OBJECTIVES[objective].products * dim * choice.rows * choice.global_batch


def _loss_bytes(dim: int, choice: Choice) -> float:
    """The bytes that the loss allocates with bf16 features: a tile of coefficients, gradients, texts of other GPUs."""
    from ...loss.strategies import GATHERED_BYTES, gathered_bytes

    tile = 2.0 * min(choice.rows, LOSS_TILE[0]) * min(choice.global_batch, LOSS_TILE[1])
    gradients = 12.0 * choice.rows * dim  # gradients of both sides, in fp32 and in bf16
    if choice.gpus == 1:
        return tile + gradients
    is_gathered = gathered_bytes(choice.global_batch, dim, 2, choice.gpus) <= GATHERED_BYTES
    return tile + gradients + (8.0 * choice.global_batch * dim if is_gathered else gradients)


def _keep_features(counts: Counts, choice: Choice, weight: float) -> Cost:
    start = counts.both.again * choice.gradient_accumulation_steps  # without what is frozen
    return Cost(weights=4.0 * counts.trained, features=pair_bytes(counts.dim, choice), first_pass=start)


def _matryoshka_dims(counts: Counts, choice: Choice, dims: Sequence[int]) -> Cost:
    # The normalised prefixes, the graph of their norms, and their gradients.
    flops = sum(loss_flops(dim, choice, counts.objective) for dim in dims)
    return Cost(features=3 * pair_bytes(sum(dims), choice), loss_flops=flops)


def _optimizer(counts: Counts, choice: Choice, name: str) -> Cost:
    """Muon has one buffer for a matrix; its steps compute m·n·m twice and m·m·m, and the GPUs share them."""
    from ...optimizers.newton_schulz import STEPS

    values = sum(rows * columns for rows, columns in counts.matrices)
    flops = sum(STEPS * (4.0 * m * m * n + 2.0 * m**3) for m, n in map(sorted, counts.matrices))
    matrices = float(len(counts.matrices))
    return Cost(optimizer=-4.0 * values, update_flops=flops / choice.gpus, updated_matrices=matrices)


def _teacher(counts: Counts, choice: Choice, names: Sequence[str]) -> Cost:
    """Frozen models, each with a forward in every micro-batch of which no activations are kept."""
    side, cost = choice.options.get("teacher_side", "both"), Cost()
    for teacher in counts.teachers:
        forward = getattr(teacher, side).forward * choice.gradient_accumulation_steps
        features = (1.0 if side == "both" else 0.5) * pair_bytes(teacher.dim, choice)
        cost += Cost(weights=4.0 * teacher.parameters, features=features, first_pass=forward)
    return cost


def _texts_at_once(counts: Counts, choice: Choice, at_once: int) -> Cost:
    """Fewer, larger forwards of the text tower; a graph that is kept may hold the texts of other micro-batches."""
    text, first = counts.text, min(choice.kept, choice.dealt)
    fewer, fewer_kept = choice.dealt - math.ceil(choice.dealt / at_once), first - math.ceil(first / at_once)
    # The kept graphs of texts are fewer, but each holds the texts of several micro-batches, also of such whose images
    # are encoded again in the second pass.
    more = min(choice.dealt, (first - fewer_kept) * at_once) - first
    again = Work(-more * text.again.flops, -(fewer - fewer_kept) * text.again.launches)
    return Cost(
        activations=choice.in_graph * more * text.graph.each,
        first_pass=Work(0.0, -fewer * text.forward.launches),
        second_pass=Work(0.0, -fewer * text.backward.launches) + again,
    )


def _patch_dropout(encoder: DualEncoder, share: float) -> None:
    from ...encoders.patch_dropout import PatchDropout

    if share:
        PatchDropout(encoder, share)


def _bf16_activations(encoder: DualEncoder, wanted: bool) -> None:
    from ...encoders.in_bf16 import compute_in_bf16

    compute_in_bf16(encoder.model, wanted=wanted)


def _gradient_checkpointing(encoder: DualEncoder, wanted: bool) -> None:
    from torch.overrides import _get_current_function_mode

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Those of a layer's forward and of its recomputation, which a count lets cast as the forward does."""
        return nullcontext(), _get_current_function_mode() or nullcontext()

    model: Any = encoder.model
    # The second name is that of transformers before 5.20.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts})
    encoder.stop_gradients_at_frozen_layers()


# Options that cost nothing, or that `step_cost` and the planner read themselves.
_NO_EFFECT = (
    *("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_schedule"),
    *("retain_graphs", "offload_inputs", "torch_compile", "activation_checkpointing", "num_train_epochs", "max_steps"),
    *("image_size", "image_size_schedule", "full_tokens_last", "max_text_tokens", "replay_share"),
    *("teacher_side", "ema_device"),
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
    "optimizer": Effect(_optimizer),
    "teacher": Effect(_teacher),
    "teacher_embeddings": Effect(lambda m, c, folders: Cost(features=len(folders) * pair_bytes(m.dim, c))),
    "texts_at_once": Effect(_texts_at_once),
    **dict.fromkeys(_NO_EFFECT, Effect()),
}
# Options that the prediction ignores, with the values that it ignores; without values, it ignores all.
LEFT_OUT: dict[str, Sequence[str]] = {
    "strategy": ("disco", "local", "gather"),
    "backend": ("torch",),
    **dict.fromkeys(("lora_rank", "cache_features", "ema_device", "fsdp", "deepspeed", "fp16"), ()),
}
