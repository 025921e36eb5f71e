"""How blocks are laid out on a device and its kernels launched: tiles, boxes, launches.

Nothing is tuned at run time: tiles are a function of the architecture. They were measured on Hopper; on others they are
what fits, compiled in the tests for Ampere and for AMD's CDNA 3, but never run.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Tiling:
    """The shape of tiles, and how many programs a device runs."""

    tile: int  # rows and columns of a tile
    step: int  # numbers of a row of features that are multiplied at a time
    warps: int
    stages: int  # steps of which the features are in shared memory
    slots: int  # programs that run at the same time

    @functools.lru_cache  # noqa: B019 (tilings live as long as the module)
    def split(self, m: int, n: int, longest: int, together: int = 1) -> tuple[int, int, int]:
        """The row tiles, the column blocks, and the run: row tiles of a program, so that the last wave is full.

        Args:
            longest: the longest run.
            together: how many programs' work, of one column block, starts and ends as one.
        """
        tiles, blocks = cdiv(m, self.tile), cdiv(n, self.tile)

        def time(run: int) -> int:  # a program takes as long as a tile to start
            return cdiv(blocks * cdiv(tiles, run * together), self.slots // together) * (run * together + 1)

        return tiles, blocks, min(range(1, min(longest, cdiv(tiles, together)) + 1), key=time)


@functools.lru_cache
def tiling_for(device: torch.device, parts: int) -> Tiling:
    """The tiling of a device for features of so many parts (`triton_operands.split`)."""
    if INTERPRETED:
        return Tiling(tile=32, step=32, warps=1, stages=1, slots=4)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is not None:
        return Tiling(tile=64, step=64, warps=4, stages=2, slots=4 * processors)
    if torch.cuda.get_device_capability(device)[0] < 9:
        return Tiling(tile=128, step=32, warps=8, stages=4, slots=processors)
    # From Hopper on: 3 stages of 32 KiB, so that a processor's shared memory holds two programs.
    if parts == 1:
        return Tiling(tile=128, step=64, warps=4, stages=3, slots=2 * processors)
    # The sums of fp32 features take twice the registers (`triton_kernels._product`), hence twice the threads.
    return Tiling(tile=128, step=64, warps=8, stages=3, slots=processors)


def boxes(matrix: Tensor, rows: int, columns: int) -> Any:
    """A matrix to be read or written in boxes [rows, columns]: from Hopper on by the tensor memory accelerator."""
    if has_descriptors(matrix.device):
        return TensorDescriptor(matrix, matrix.shape, matrix.stride(), [rows, columns])
    # Triton emulates descriptors elsewhere, but does not know their alignment: it would load single elements.
    return matrix, len(matrix), matrix.shape[1], matrix.stride(0)


@functools.lru_cache
def has_descriptors(device: torch.device) -> bool:
    return INTERPRETED or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)  # Triton's own takes microseconds of the host, a dozen times a block


_compiled: dict[Hashable, tuple[Any, list[Any]]] = {}


def launch(kernel: Any, programs: int, arguments: Sequence[Any], constants: dict[str, Any]) -> None:
    """Launches so many programs of a kernel on the current device.

    To find the kernel that it has compiled for arguments of these kinds, Triton inspects them at every launch, which
    takes longer than the launch itself. The kinds that occur here are few, so that is done once for each of them.

    Args:
        arguments: tensors, descriptors, None, and integers for which the kernel is not specialised.
        constants: the kernel's compile-time constants and Triton's options.
    """
    grid = (programs, 1, 1)
    if INTERPRETED or isinstance(arguments[0], tuple):  # no descriptors: Triton specialises kernels for strides
        kernel[grid](*arguments, **constants)
        return
    key = (kernel.fn, arguments[0].base.device, tuple(constants.items()), tuple(map(_kind, arguments)))
    if key not in _compiled:
        compiled = kernel[grid](*arguments, **constants)
        _compiled[key] = compiled, [constants[name] for name in kernel.arg_names[len(arguments) :]]
        return
    compiled, values = _compiled[key]
    compiled[grid](*arguments, *values)


def _kind(argument: Any) -> Hashable:
    """What Triton specialises kernels for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return int
    return None if argument is None else (argument.base.dtype, *argument.block_shape)
