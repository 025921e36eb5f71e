"""Counts the floating point operations of a model in training, and knows how many of them a chip can do.

The share of the chip's peak that a training reaches is its model FLOPs utilisation (Chowdhery et al. 2022, PaLM, arXiv
2204.02311, appendix B): the products that its model needs, whatever is computed again to save memory.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from .dual_encoder import NO_TEXTS, DualEncoder

# TFLOP/s of bf16 products with sums in fp32, without sparsity, by a part of the name that torch gives a GPU; the first
# that matches counts. They are those of the data sheets of NVIDIA (whose figures "with sparsity" are twice as high)
# and AMD, for RTX those of the white papers of the GA102, AD102 and GB202 architectures.
PEAKS = (
    ("GB200", 2500),
    ("B200", 2250),
    ("H200 NVL", 835),
    ("H200", 989),
    ("H100 NVL", 835),
    ("H100 PCIe", 756),
    ("H100", 989),
    ("A100", 312),
    ("L40S", 362),
    ("L4", 121),
    ("A10", 125),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165),
    ("RTX 3090", 71),
    ("MI300X", 1307),
)


def peak_of(name: str) -> float | None:
    """FLOP/s of the GPU that torch gives this name; None if the table has none."""
    return next((peak * 1e12 for part, peak in PEAKS if re.search(rf"\b{part}\b", name)), None)


def count_operations(encoder: DualEncoder, batch: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """Counts the operations of the image tower and of the text tower, as the model trains a micro-batch.

    They are those of the products in the forward and in the backward of each, with its projection; a frozen tower has
    no backward.

    What is computed again counts once. The model and the batch are only looked at: the products are of tensors without
    content, as if on a CPU, so that both may be on any device, the meta device included.

    Raises:
        ValueError: the forward of the model needs the content of tensors.
    """
    model = encoder.model
    try:
        with ExitStack() as stack:
            for module in model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    stack.enter_context(mock.patch.object(module, "gradient_checkpointing", False))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # fused attention computes products again
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(_Numbers())
            state = {name: _fake(one) for name, one in (*model.named_parameters(), *model.named_buffers())}
            inputs = {name: _fake(one) for name, one in batch.items()}
            trained = [one for one in state.values() if one.requires_grad]
            # As functional_call of torch.func, which calls nothing but forward.
            stack.enter_context(_reparametrize_module(model, state, tie_weights=True))
            stack.enter_context(torch.enable_grad())
            counts = []
            for encode in (encoder.encode_images, partial(encoder.encode_texts, checked=True)):
                with FlopCounterMode(display=False) as forward:
                    embeds = encode(inputs)
                with FlopCounterMode(display=False) as backward:
                    if embeds.requires_grad:
                        torch.autograd.grad(embeds.sum(), trained, allow_unused=True)
                counts.append((forward.get_total_flops(), backward.get_total_flops()))
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"The operations of a {type(model).__name__} cannot be counted: {type(error).__name__}: {error}"
        ) from error
    return counts


def count_window(encoder: DualEncoder, batches: Iterable[Mapping[str, Any]]) -> int:
    """The operations of the micro-batches of a window, of which each shape is counted once."""
    counts: dict[tuple[Any, ...], int] = {}
    total = 0
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        key = batch.get(NO_TEXTS), *((name, value.shape) for name, value in inputs.items())
        if key not in counts:
            images, texts = count_operations(encoder, inputs)
            counts[key] = sum(images) + (0 if NO_TEXTS in batch else sum(texts))
        total += counts[key]
    return total


def shapes_of(batches: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The batches without the content of their tensors, for `count_window`."""
    return [{name: v.to("meta") if isinstance(v, Tensor) else v for name, v in batch.items()} for batch in batches]


class _Numbers(TorchDispatchMode):
    """Answers models that read a number: whether all tokens are to be attended to, or the patches of an image."""

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        return 1 if function is torch.ops.aten._local_scalar_dense.default else function(*args, **(kwargs or {}))


def _fake(tensor: Tensor) -> Tensor:
    """Such a tensor without content; of images in uint8 one in fp32, as they are normalised on the device."""
    dtype = torch.float32 if tensor.dtype == torch.uint8 else tensor.dtype
    return torch.empty_like(tensor, dtype=dtype, device="cpu").requires_grad_(tensor.requires_grad)
