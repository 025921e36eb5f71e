"""The layout of blocks on a device: tiles, the programs for them, and boxes of memory.

Nothing is tuned at run time: tiles are a function of the architecture. On Hopper they were chosen by measurement; on
other architectures they are as large as fits, which the tests compile for Ampere and for AMD's CDNA 3 but never run.
"""

from __future__ import annotations

import functools
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
    stages: int  # the number of steps whose features are in shared memory at a time
    slots: int  # programs that run at the same time

    @functools.lru_cache  # noqa: B019 (tilings live as long as the module)
    def split(self, m: int, n: int, longest: int, together: int = 1) -> tuple[int, int, int]:
        """The row tiles, the column blocks, and the run: row tiles of a program, so that the last wave is full.

        Args:
            longest: the longest run.
            together: the number of programs of one column block that one launched program does together.
        """
        tiles, blocks = cdiv(m, self.tile), cdiv(n, self.tile)

        def time(run: int) -> int:  # in tiles; to start a program takes as long as one tile
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
    # The sums of fp32 features take twice the registers (`triton_tiles.tile_product`), hence twice the threads.
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
    return -(-a // b)  # Triton's own cdiv takes microseconds of the host, a dozen times a block
