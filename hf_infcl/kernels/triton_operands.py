"""Converts features to the form that the kernels on tensor cores take, and finds the tiles that have to compare ids."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import triton_tiles
from .triton_tiling import INTERPRETED, Tiling, boxes, cdiv, tiling_for

# Pairs of parts (of x, of y), the largest product last: tensor cores round an addition by the size of the sum so far.
PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0)), 3: ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))}


@dataclass(frozen=True)
class Operands:
    """The operands of all kernels for a block of m images and n texts."""

    x: Tensor  # [m, pairs · D'], contiguous rows of a multiple of 16 bytes
    y: Tensor  # [n, pairs · D']
    parts: int  # each number is the sum of so many parts; above 1 for fp32 features
    ids_x: Tensor | None  # [m] int32
    ids_y: Tensor | None  # [n] int32
    equal: int  # the meaning of equal ids: one of the three constants of `triton_tiles`
    overlaps: Tensor | None  # [column blocks, 2] int32: where equal ids may be (`triton_tiles.id_overlaps`)
    diagonal: int
    tiling: Tiling

    @classmethod
    def of(
        cls,
        x: Tensor,
        y: Tensor,
        ids_x: Tensor | None = None,
        ids_y: Tensor | None = None,
        diagonal: int | None = None,
        equal_are_positive: bool = False,
    ) -> Operands:
        x, y, parts = _features(x, y)
        tiling = tiling_for(x.device, parts)
        place = triton_tiles.NOWHERE.value if diagonal is None else diagonal
        if ids_x is None or ids_y is None:
            return cls(x, y, parts, None, None, triton_tiles.NO_IDS.value, None, place, tiling)
        ids_x, ids_y = ids_x.contiguous(), ids_y.contiguous()
        blocks = cdiv(len(y), tiling.tile)
        overlaps = torch.empty(blocks, 2, dtype=torch.int32, device=x.device)
        triton_tiles.id_overlaps[(blocks,)](
            *(ids_x, ids_y, overlaps, len(x), len(y), place), BM=tiling.tile, BN=tiling.tile, STRIP=1024
        )
        equal = triton_tiles.POSITIVE if equal_are_positive else triton_tiles.EXCLUDED
        return cls(x, y, parts, ids_x, ids_y, equal.value, overlaps, place, tiling)

    def part(self, rows: slice, columns: slice) -> Operands:
        """The operands of a part of the block, which begins with a tile."""
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
        """x and y to be read in boxes."""
        tile, step = self.tiling.tile, self.tiling.step
        return boxes(self.x, tile, step), boxes(self.y, tile, step)

    def constants(self) -> dict[str, Any]:
        """The compile-time constants of all kernels, and Triton's options."""
        # Triton 3.6 cannot pipeline loops of one step: short features are read into the zeros beyond their end, and
        # no loop of `triton_tiles.tile_product` has a single step.
        length, step = self.x.shape[1], self.tiling.step
        steps = max(2, cdiv(length, step))
        careful = 0  # the last steps, which hold all numbers of the last pair of parts
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
    """Features in the form for tensor cores and descriptors, and the number of parts that each of them is the sum of.

    With several parts, one product of the concatenations along D is the sum of the products of all pairs of parts.
    """
    if x.dtype != torch.float32:
        return _aligned(x), _aligned(y), 1
    # get_float32_matmul_precision() would raise where this setting has been made by its present name.
    parts = 2 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 3
    order_x, order_y = zip(*PAIRS[parts], strict=True)
    return split(x, parts, order_x), split(y, parts, order_y), parts


def split(t: Tensor, parts: int, order: tuple[int, ...]) -> Tensor:
    """[m, D] fp32 to [m, len(order)·D'] bfloat16 with D' a multiple of 8: parts of t, the largest first, by order."""
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
    """``t`` itself if its rows lie as descriptors need them (16-byte aligned), or else a copy padded with zeros."""
    if INTERPRETED and t.dtype == torch.bfloat16:
        t = t.float()  # the interpreter cannot multiply bfloat16
    m, dimension = t.shape
    unit = 16 // t.element_size()
    if t.stride(1) == 1 and t.stride(0) >= dimension and t.stride(0) % unit == 0 and t.data_ptr() % 16 == 0:
        return t
    out = t.new_zeros(m, cdiv(dimension, unit) * unit)
    out[:, :dimension] = t
    return out
