"""What the given options of a training decide about its plan: choices that are kept, and the global batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...loading.batch_plan import BatchPlan
from ...options.batch_schedule import BatchSchedule, divided_batch
from ...options.combinations import CHECKPOINTING
from .prediction import Choice

FACTORS = ("per_device_train_batch_size", "gradient_accumulation_steps")


def kept_choices(options: Any, given: Collection[str]) -> dict[str, Any]:
    """The attributes of `Choice` that the given options of the training decide."""
    kept = {
        "per_device_train_batch_size": ("micro_batch", options.per_device_train_batch_size),
        "gradient_accumulation_steps": ("accumulation", options.gradient_accumulation_steps),
        "offload_inputs": ("offload", options.offload_inputs),
        **{name: ("checkpointing", bool(getattr(options, name))) for name in CHECKPOINTING if name in options},
    }
    found = {attribute: value for name, (attribute, value) in kept.items() if name in given}
    if "retain_graphs" in given and options.retain_graphs != "auto":
        found["retain"] = max(1, int(options.retain_graphs))
    if options.optimizer == "muon":
        found["muon"] = True
    found |= {name: True for name in ("keep_features", "keep_weights") if getattr(options, name)}
    if options.texts_at_once not in ("auto", "1"):
        found["texts"] = int(options.texts_at_once)
    if options.matryoshka_dims:
        found["prefixes"] = tuple(options.matryoshka_dims)
    if options.teacher_embeddings:
        found["stored"] = len(options.teacher_embeddings)
    if options.ema_decay is not None and options.ema_device is None:
        found["ema"] = True
    return found


def global_batch_of(options: Any, kept: Mapping[str, Any]) -> int:
    """The global batch that is given, or the product of its factors.

    Raises:
        ValueError: neither is given, or they contradict each other.
    """
    factors = kept.get("micro_batch"), kept.get("accumulation")
    least = options.gpus * (factors[0] or 1) * (factors[1] or 1)
    words = " × ".join(
        [f"--gpus {options.gpus}"]
        + [f"--{name} {getattr(options, name)}" for name, value in zip(FACTORS, factors, strict=True) if value]
    )
    if options.global_batch is None:
        if None in factors:
            raise ValueError(f"Give --global_batch, or both --{' and --'.join(FACTORS)}, whose product it is.")
        return int(least)
    if None not in factors and options.global_batch != least:
        raise ValueError(f"{words} is {least:,}, but --global_batch is {options.global_batch:,}. Omit one of them.")
    if any(factors) and options.global_batch % least:
        near = max(least, round(options.global_batch / least) * least)
        raise ValueError(
            f"--global_batch {options.global_batch:,} is no multiple of {words}, which is {least:,}. Choose {near:,}."
        )
    return int(options.global_batch)


def last_batch_of(schedule: BatchSchedule, options: Any, kept: dict[str, Any]) -> int:
    """The last global batch, which needs the most memory.

    Raises:
        ValueError: another global batch is given, or micro-batches that would follow from the schedule.
    """
    if options.global_batch not in (None, schedule.sizes[-1]):
        raise ValueError(
            f"--global_batch is {options.global_batch:,}, but --global_batch_schedule ends with "
            f"{schedule.sizes[-1]:,}. Omit one of them."
        )
    if kept.get("accumulation", 1) > 1:
        raise ValueError("--gradient_accumulation_steps follows from --global_batch_schedule. Omit it.")
    kept.pop("accumulation", None)
    if "micro_batch" in kept:
        kept["micro_batch"] = min(kept["micro_batch"], schedule.sizes[-1] // options.gpus)
    return schedule.sizes[-1]


def stages_of_plan(
    schedule: BatchSchedule, options: Any, choice: Choice, epochs: float
) -> list[tuple[int, int, int, int]]:
    """The stages, as `BatchPlan.stages`, without steps if the length of the training is not given."""
    division = [(size, *divided_batch(size, choice.micro_batch, choice.gpus)) for size in schedule.sizes]
    if options.dataset_size is None and options.max_steps < 1:
        return [(*divided, 0) for divided in division]
    length = {"epochs": epochs, "max_steps": options.max_steps}
    plan = BatchPlan(schedule, options.dataset_size, micro_batch=choice.micro_batch, processes=choice.gpus, **length)
    return list(plan.stages())
