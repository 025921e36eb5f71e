"""Finds rows and parameters whose numbers are not finite, and describes them for all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..processes.collectives import Processes, by_rank

_MOST_NAMES = 8  # in a message
_KINDS = ("image embeddings", "text embeddings")

RowsOfDataset = Callable[[Sequence[tuple[int, int]]], list[int]]


def finite_rows(features: Iterable[Tensor]) -> list[Tensor]:
    """For each tensor [rows, ...] whether the values of each row are finite, [rows] bool."""
    return [feature.isfinite().flatten(1).all(1) for feature in features]


def describe_rows(finite: Sequence[Tensor], sizes: Sequence[Sequence[int]], rows_of_dataset: RowsOfDataset) -> str:
    """The rows of all processes' windows with values that are not finite, as a phrase; collective.

    Args:
        finite: for images and texts, whether the values of each row are finite, [rows of the window] bool.
        sizes: for images and texts, the number of rows in each micro-batch.
        rows_of_dataset: the rows of the training set for places (micro-batch, row); empty if they are not known. It is
            not asked for texts that are more than the images: several captions or negative ones.

    Returns:
        The same on every process, such as ``rank 1: image embeddings of micro-batch 0, row 3 (17 of the training
        set)``; empty if all rows are finite.
    """
    parts = []
    for kind, rows, sizes_of_kind in zip(_KINDS, finite, sizes, strict=True):
        bad = (~rows).nonzero().flatten().tolist()
        places_of_rows = [(index, row) for index, size in enumerate(sizes_of_kind) for row in range(size)]
        places = [places_of_rows[row] for row in bad[:_MOST_NAMES]]
        rows_known = rows_of_dataset(places) if sizes_of_kind == sizes[0] else []
        known = [f" ({row} of the training set)" for row in rows_known] or [""] * len(places)
        named = [f"micro-batch {index}, row {row}{name}" for (index, row), name in zip(places, known, strict=True)]
        if len(bad) > len(places):
            named.append(f"{len(bad) - len(places)} more rows")
        if bad:
            parts.append(f"{kind} of {'; '.join(named)}")
    return of_all_ranks(" and ".join(parts))


def all_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Whether all gradients are finite, bool []; those of FSDP on all processes, which is collective."""
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    norm: Any = nn.utils.get_total_norm([gradient for gradient in gradients if not isinstance(gradient, DTensor)])
    if sharded:
        norm_of_shards: Any = nn.utils.get_total_norm(sharded)
        norm = norm + norm_of_shards.full_tensor()
    return norm.isfinite()


def parameters_not_finite(model: nn.Module) -> str:
    """The first parameters whose gradient on this process is not finite, and the number of others."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    local = {name: g.to_local() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    names = [name for name, gradient in local.items() if not gradient.isfinite().all()]
    return ", ".join(names[:_MOST_NAMES]) + (
        f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    )


def of_all_ranks(text: str) -> str:
    """`by_rank` of every process's text; collective."""
    return by_rank(Processes().gather_objects(text))
