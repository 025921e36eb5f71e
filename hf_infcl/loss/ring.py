"""A ring of processes: blocks travel around it while each process computes on the block that it holds.

Transfers are point-to-point. Each one starts before the computation that hides it and is waited for afterwards. With
NCCL, waiting only orders streams and never blocks the host. A single process is a ring of one, without transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..processes.collectives import Processes


class Ring:
    """The processes in the order of their ranks: each sends to the next, and the last one to the first."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        if processes.world_size > 1:
            group = processes.group or dist.group.WORLD
            assert group is not None
            # Point-to-point calls take ranks of the default group.
            self._next = dist.get_global_rank(group, (processes.rank + 1) % processes.world_size)
            self._previous = dist.get_global_rank(group, (processes.rank - 1) % processes.world_size)

    def rotate(self, *tensors: Tensor | None) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yields every process's tensors once, as (rank, tensors), beginning with those of this process.

        The next block travels while the caller computes on the current one. The tensors of a block are valid until the
        next iteration and must not be written to. Their shapes and dtypes are the same on all processes (see `padded`);
        None stays None.
        """
        rank, world_size = self.processes.rank, self.processes.world_size
        first = held = tuple(None if t is None else t.contiguous() for t in tensors)
        spare = None
        for step in range(world_size):
            transfer = None
            if step + 1 < world_size:
                arriving = spare or tuple(None if t is None else torch.empty_like(t) for t in held)
                transfer = self.exchange(held, arriving)
            yield (rank - step) % world_size, held
            if transfer is not None:
                transfer.wait()
                spare = None if held is first else held  # never receive into the caller's tensors
                held = arriving

    def exchange(self, sent: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...]) -> Transfer:
        """Starts sending tensors to the next process and receiving tensors from the previous one."""
        # Every process sends before it receives and issues its exchanges in the same order, by which NCCL pairs them.
        group = self.processes.group
        operations = [dist.P2POp(dist.isend, t, self._next, group) for t in sent if t is not None]
        operations += [dist.P2POp(dist.irecv, t, self._previous, group) for t in received if t is not None]
        return Transfer(dist.batch_isend_irecv(operations), sent)


class Transfer:
    """A started exchange. It keeps the sent tensors alive until `wait`."""

    def __init__(self, works: list[dist.Work], sent: tuple[Tensor | None, ...]) -> None:
        self._works, self._sent = works, sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._sent = ()


class RingReduction:
    """Combines the processes' parts for each block of a `Ring.rotate` loop while they travel along with the blocks.

    In every step of the loop, or in every step except the first, each process calls `add` once with its part for the
    block that it holds. After the loop, `result` returns the combined parts for this process's own block. The transfer
    of one step overlaps with the computation of the next.

    Args:
        ring: the ring that the blocks travel around.
        combine: ``combine(a, b, out=a)``, associative and commutative: `torch.add` or `torch.logaddexp`.
        rows: the number of rows of the largest part. Smaller parts are padded with zeros.
    """

    def __init__(self, ring: Ring, combine: Callable[..., object], rows: int) -> None:
        self._ring, self._combine, self._rows = ring, combine, rows
        self._transfer: Transfer | None = None
        self._sent: Tensor | None = None
        self._arriving: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Combines this process's part, a contiguous tensor that is overwritten, with those received for the block."""
        total = part = padded(part, self._rows)
        if self._transfer is not None:
            total = self.result()
            self._combine(total, part, out=total)
        if self._ring.processes.world_size == 1:
            self._arriving = total
            return
        free = self._sent if self._sent is not None else torch.empty_like(total)
        self._transfer = self._ring.exchange((total,), (free,))
        self._sent, self._arriving = total, free

    def result(self) -> Tensor:
        """The combination that has arrived. After the loop it is the complete one for the block of this process."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        assert self._arriving is not None, "add was never called"
        return self._arriving


def padded(tensor: Tensor, rows: int) -> Tensor:
    """Pads the tensor with zero rows at its end; returns the tensor itself if it already has that many rows."""
    if len(tensor) == rows:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, rows - len(tensor)))
