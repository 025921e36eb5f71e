"""Which process orthogonalises which matrices, and how all processes get the results.

`orthogonalise_alone`, `orthogonalise_shared` and `orthogonalise_sharded` return equal results. They are generators: at
a ``yield`` a transfer is under way, during which the caller can advance other generators (see `interleaved`). The
processes exchange bfloat16, the dtype of the iteration, so that nothing is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..processes.collectives import Processes, gather_into

Transfers = Generator[None, None, Tensor]
Updates = Callable[[slice], Sequence[Tensor]]  # the matrices of a range, [rows, columns] each, or this process's rows
Orthogonalise = Callable[[Tensor], Tensor]  # [n, rows, columns] to the same in bfloat16


def local_part(tensor: Any) -> Tensor:
    """The rows of a tensor on this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def interleaved(tasks: Iterable[Generator[None, None, None]]) -> None:
    """Runs generators to their ends, each one ``yield`` ahead of the one that was started before it.

    What a generator does between two transfers thus overlaps with transfers of its neighbours, while only as many
    generators are alive as one of them yields.
    """
    running: list[Generator[None, None, None]] = []
    for task in tasks:
        running = [t for t in (task, *running) if _advances(t)]
    while running:
        running = [t for t in running if _advances(t)]


def _advances(task: Generator[None, None, None]) -> bool:
    return next(task, True) is None


def orthogonalise_alone(updates: Updates, count: int, shape: tuple[int, int], function: Orthogonalise) -> Transfers:
    """All ``count`` matrices, [count, rows, columns], on this process."""
    yield from ()
    return function(torch.stack(list(updates(slice(0, count)))))


def orthogonalise_shared(
    updates: Updates, count: int, shape: tuple[int, int], function: Orthogonalise, processes: Processes
) -> Transfers:
    """Orthogonalises matrices that all processes hold: each process computes its share and receives the rest."""
    each = -(-count // processes.world_size)
    first = min(count, processes.rank * each)
    mine = updates(slice(first, min(count, first + each)))
    done = torch.zeros((each, *shape), dtype=torch.bfloat16, device=updates(slice(0, 1))[0].device)
    if mine:
        done[: len(mine)] = function(torch.stack(list(mine)))
    everything = done.new_empty((processes.world_size * each, *shape))
    transfer = gather_into(everything, done, group=processes.group, async_op=True)
    yield
    transfer.wait()
    return everything[:count]


def orthogonalise_sharded(
    updates: Updates, count: int, shape: tuple[int, int], function: Orthogonalise, group: dist.ProcessGroup
) -> Transfers:
    """Orthogonalises matrices of which each process holds some rows, split as `torch.chunk` does.

    Each process receives the rows of its share of the matrices, orthogonalises these as a whole and returns the rows.

    Returns:
        The rows of this process, [count, its rows, columns].
    """
    rows, columns = shape
    ranks, parts = dist.get_world_size(group), updates(slice(0, count))
    each, height, have = -(-count // ranks), -(-rows // ranks), parts[0].size(0)
    # The shares and the rows are padded to equal sizes; what is padded is never orthogonalised.
    sent = torch.zeros((ranks * each, height, columns), dtype=torch.bfloat16, device=parts[0].device)
    sent[:count, :have] = torch.stack(list(parts))
    received = torch.empty_like(sent)  # [ranks (of the rows), each, height, columns]
    transfer = dist.all_to_all_single(received, sent, group=group, async_op=True)
    yield
    transfer.wait()
    whole = received.view(ranks, each, height, columns).transpose(0, 1).reshape(each, ranks * height, columns)
    mine = max(0, min(each, count - dist.get_rank(group) * each))
    done = torch.zeros_like(whole)
    if mine:
        done[:mine, :rows] = function(whole[:mine, :rows])
    sent = done.view(each, ranks, height, columns).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)  # [ranks (of the matrices), each, height, columns]
    transfer = dist.all_to_all_single(received, sent, group=group, async_op=True)
    yield
    transfer.wait()
    return received.view(ranks * each, height, columns)[:count, :have]
