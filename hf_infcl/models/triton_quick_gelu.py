"""QuickGELU, x·σ(1.702x), and its gradient, each in one pass over memory.

They compute in fp32 and round once, so that they are at least as precise as operators that round one after another.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 2048, 8  # 16 bytes of bf16 for each thread


def forward(x: Tensor) -> Tensor:
    """x·σ(1.702x) for a contiguous tensor of at most 32 bits each, with its shape and dtype."""
    return _computed(_forward, x)


def backward(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient by x, from that by the output; both are contiguous and have the same shape and dtype."""
    return _computed(_backward, x, grad)


def _computed(kernel: Any, *inputs: Tensor) -> Tensor:
    result, count = torch.empty_like(inputs[0]), inputs[0].numel()
    with torch.cuda.device_of(result):
        kernel[(triton.cdiv(count, _BLOCK),)](*inputs, result, count, block=_BLOCK, num_warps=_WARPS)
    return result


@triton.jit
def _forward(x, y, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, at < count).to(tl.float32)
    tl.store(y + at, value * tl.sigmoid(1.702 * value), at < count)


@triton.jit
def _backward(x, grad, grad_x, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, at < count).to(tl.float32)
    gate = tl.sigmoid(1.702 * value)
    slope = gate * (1 + 1.702 * value * (1 - gate))
    tl.store(grad_x + at, tl.load(grad + at, at < count).to(tl.float32) * slope, at < count)
