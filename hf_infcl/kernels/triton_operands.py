"""Converts features to the form that the tensor-core kernels take, and finds the tiles that have to compare ids."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import triton_tiles
from .blocks import Block
from .triton_tiling import INTERPRETED, Tiling, boxes, cdiv, tiling_for

# The pairs of parts (of x, of y) that are multiplied. The largest product comes last, because the rounding error of
# each addition on tensor cores is proportional to the sum so far.
PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0)), 3: ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))}


@dataclass(frozen=True)
class Operands:
    """The operands of all kernels for a block of m images and n texts."""

    x: Tensor  # [m, pairs · D'], rows contiguous and a multiple of 16 bytes long
    y: Tensor  # [n, pairs · D']
    dimension: int  # D
    parts: int  # the number of parts that add up to an element; more than 1 for fp32 features
    ids_x: Tensor | None  # [m] int32
    ids_y: Tensor | None  # [n] int32
    equal: int  # the meaning of equal ids: one of the three constants of `triton_tiles`
    overlaps: Tensor | None  # [column blocks, 2] int32: where equal ids may be (`triton_tiles.id_overlaps`)
    diagonal: int
    tiling: Tiling

    @classmethod
    def of(cls, block: Block) -> Operands:
        x, y, parts = _features(block.x, block.y)
        tiling, dimension = tiling_for(x.device, parts), block.x.shape[1]
        place = triton_tiles.NOWHERE.value if block.diagonal is None else block.diagonal
        if block.ids_x is None or block.ids_y is None:
            return cls(x, y, dimension, parts, None, None, triton_tiles.NO_IDS.value, None, place, tiling)
        ids_x, ids_y = block.ids_x.contiguous(), block.ids_y.contiguous()
        blocks = cdiv(len(y), tiling.tile)
        overlaps = torch.empty(blocks, 2, dtype=torch.int32, device=x.device)
        triton_tiles.id_overlaps[(blocks,)](
            *(ids_x, ids_y, overlaps, len(x), len(y), place), BM=tiling.tile, BN=tiling.tile, STRIP=1024
        )
        equal = triton_tiles.POSITIVE if block.equal_are_positive else triton_tiles.EXCLUDED
        return cls(x, y, dimension, parts, ids_x, ids_y, equal.value, overlaps, place, tiling)

    def part(self, rows: slice, columns: slice) -> Operands:
        """The operands of a part of the block. The part begins at the first row and column of a tile."""
        tile = self.tiling.tile
        return dataclasses.replace(
            self,
            x=self.x[rows],
            y=self.y[columns],
            ids_x=None if self.ids_x is None else self.ids_x[rows],
            ids_y=None if self.ids_y is None else self.ids_y[columns],
            overlaps=None if self.overlaps is None else self.overlaps[columns.start // tile :] - rows.start // tile,
            diagonal=self.diagonal + rows.start - columns.start,
        )

    def features(self) -> tuple[Any, Any]:
        """x and y in the form in which kernels read boxes."""
        tile, step = self.tiling.tile, self.tiling.step
        return boxes(self.x, tile, step), boxes(self.y, tile, step)

    def constants(self) -> dict[str, Any]:
        """The compile-time constants of all kernels, and Triton's options."""
        # Triton 3.6 cannot pipeline a loop with a single step, so no loop of `triton_tiles.tile_product` has only one.
        # For short features the second step reads zeros, which follow the end of each row.
        length, step = self.x.shape[1], self.tiling.step
        steps = max(2, cdiv(length, step))
        careful = 0  # the number of last steps that contain all elements of the last pair of parts
        if self.parts > 1:
            careful = max(2, steps - (length - length // len(PAIRS[self.parts])) // step)
            careful += steps - careful == 1
        return {
            "CAREFUL": careful,
            "K": steps * step,
            "BK": step,
            "num_warps": self.tiling.warps,
            "num_stages": self.tiling.stages,
            "enable_fp_fusion": self.parts == 1,  # see triton_softmax.exp
        }


def _features(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
    """Features in the form that tensor cores and descriptors need, and the number of parts of each element.

    If there are several parts, they are concatenated along D such that a single product of x and y is the sum of the
    products of all pairs of parts.
    """
    if x.dtype != torch.float32:
        return _aligned(x), _aligned(y), 1
    # torch.get_float32_matmul_precision() raises an error if the precision was set through this newer attribute.
    parts = 2 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 3
    order_x, order_y = zip(*PAIRS[parts], strict=True)
    return in_parts(x, parts, order_x), in_parts(y, parts, order_y), parts


def in_parts(t: Tensor, parts: int, order: tuple[int, ...]) -> Tensor:
    """[m, D] fp32 to [m, len(order) · D'] bfloat16, where D' is D rounded up to a multiple of 8.

    Each element of t is rounded to a sum of ``parts`` bfloat16 numbers, from part 0, the largest, to the smallest.
    ``order`` lists the parts to concatenate.
    """
    m, dimension = t.shape
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    out = torch.zeros(m, len(order), cdiv(dimension, 8) * 8, dtype=dtype, device=t.device)
    for part in range(parts):
        rounded = t.to(torch.bfloat16)
        for i, wanted in enumerate(order):
            if wanted == part:
                out[:, i, :dimension] = rounded
        t = t - rounded
    return out.view(m, -1)


def _aligned(t: Tensor) -> Tensor:
    """``t`` itself if its rows are aligned to 16 bytes, as descriptors require; otherwise a copy padded with zeros."""
    if INTERPRETED and t.dtype == torch.bfloat16:
        t = t.float()  # the interpreter cannot multiply bfloat16
    m, dimension = t.shape
    unit = 16 // t.element_size()
    if t.stride(1) == 1 and t.stride(0) >= dimension and t.stride(0) % unit == 0 and t.data_ptr() % 16 == 0:
        return t
    out = t.new_zeros(m, cdiv(dimension, unit) * unit)
    out[:, :dimension] = t
    return out
