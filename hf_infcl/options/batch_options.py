"""The global batch of a training, and the memory and time that its windows take."""

from __future__ import annotations

from dataclasses import dataclass

from .declaring import FROM_1, option

DIVISION = ("per_device_train_batch_size", "gradient_accumulation_steps")  # of a global batch among the processes
SEARCHED = ("texts_at_once", "retain_graphs")  # what a training finds for its micro-batches, in this order


def auto_or_number(name: str, value: object, least: int) -> str:
    """The value of an option as text, which is ``"auto"`` or a whole number; a ValueError says that it is neither."""
    text = str(value)
    if text != "auto" and not (text.isdecimal() and int(text) >= least):
        raise ValueError(f"{name} must be 'auto' or an integer of at least {least}, got {text!r}.")
    return text


@dataclass
class BatchOptions:
    global_batch_size: int | None = option(
        "Pairs of one optimizer step, on all processes together. This number decides the result. How it is divided "
        "into micro-batches only takes time and memory: without per_device_train_batch_size that is tried before the "
        "first step on a GPU, and a later step that runs out of memory is repeated with smaller micro-batches. By "
        "default the product of per_device_train_batch_size, gradient_accumulation_steps and the processes.",
        decides=False,  # a checkpoint's run has it, whichever options it follows from
        within=FROM_1,
    )
    per_device_train_batch_size: int = option(
        "Pairs of a micro-batch, which a process encodes at once. By default it follows from global_batch_size, or is "
        "8.",
        decides=False,
        within=FROM_1,
    )
    gradient_accumulation_steps: int = option(
        "Micro-batches of ONE contrastive batch on each process: its loss compares all their pairs with each other. By "
        "default it follows from global_batch_size, or is 1.",
        decides=False,
        within=FROM_1,
    )
    retain_graphs: str | None = option(
        "Micro-batches of a step whose autograd graph is kept, which saves their second forward. Each takes the "
        "activation memory of a micro-batch. The gradient stays the same, and 0 means 1, which is needed in any case. "
        "By default ('auto') as many as fit on a GPU, which is tried before the first step, or measured in the second "
        "if graphs vary in size or the model is compiled. Sharded models keep 1 by default.",
        decides=False,
        one_machine=True,
    )
    texts_at_once: str | None = option(
        "Micro-batches whose texts are encoded at once. More of them save time and take memory. By default "
        "('auto') as many as fit on a GPU, at most 4, which is tried before the first step; 1 of a sharded or a "
        "compiled model.",
        decides=False,
    )
    offload_inputs: bool = option(
        "Keep the inputs of a step in host memory, and copy them to the GPU one micro-batch ahead. GPU memory then "
        "grows with gradient_accumulation_steps only by the embeddings.",
        default=False,
        decides=False,
        one_machine=True,
    )
    bf16_activations: bool = option(
        "With bf16: keep all activations in bf16, also those that autocast keeps in fp32. Forwards read all weights "
        "but the temperature rounded to bf16. The weights themselves stay fp32, like their gradients, what the "
        "optimizer keeps and all that is saved; evaluations use autocast.",
        default=False,
        decides=True,
    )
