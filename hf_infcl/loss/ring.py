"""A ring of processes: blocks travel around it while each process computes on the one that it holds.

One process is a ring of one: callers need not ask whether there are several. Transfers are point to point, started
before the computation that they overlap and waited for after it. On NCCL waiting only orders streams: the host never
stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ring:
    """The processes of a group in the order of their ranks, each sending to the next and the last to the first.

    Args:
        process_group: the group; None is the default group, or this process alone where none is initialised.

    Raises:
        ValueError: this process is not a member of the group.
    """

    group: dist.ProcessGroup | None = None
    rank, world_size = 0, 1
    device = torch.device("cpu")  # where small tensors of host values are exchanged

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = process_group
        if process_group is None and not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("This process is not a member of process_group: call the loss on its members alone.")
        group = process_group or dist.group.WORLD
        assert group is not None
        # Point-to-point calls take ranks of the world, not of the group.
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.world_size)
        self._previous = dist.get_global_rank(group, (self.rank - 1) % self.world_size)
        if dist.get_backend(group) == dist.Backend.NCCL:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def alone(cls) -> Ring:
        """A ring of this process only, also where a default group exists."""
        return cls.__new__(cls)

    def rotate(self, *tensors: Tensor | None) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yields every process's tensors once, as (rank they come from, tensors), beginning with this process's own.

        The next block travels while the caller computes on the present one. What is yielded is valid until the next
        iteration and must not be written to. Tensors have the same shape and dtype on every process; None stays None.
        """
        held = tuple(None if t is None else t.contiguous() for t in tensors)
        own, free = held, None
        for step in range(self.world_size):
            transfer = None
            if step + 1 < self.world_size:
                arriving = free or tuple(None if t is None else torch.empty_like(t) for t in held)
                transfer = self._exchange(held, arriving)
            yield (self.rank - step) % self.world_size, held
            if transfer is not None:
                transfer.wait()
                free = None if held is own else held  # two buffers in flight; the caller's own are never written
                held = arriving

    def traveller(self, combine: Callable[..., Any]) -> Traveller:
        """The sum that goes along with the blocks of `rotate`; see `Traveller`."""
        return Traveller(self, combine)

    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum over the ring, the same on every process; of one process the tensor itself."""
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        """[world_size, *shape]: every process's tensor, all of one shape."""
        if self.world_size == 1:
            return tensor[None]
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        # torch 2.13 renames the collectives of single tensors and deprecates the old names.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(gathered, tensor.contiguous()[None], group=self.group)
        return gathered

    def scatter_sum(self, tensor: Tensor) -> Tensor:
        """From [world_size · b, ...] on every process, the elementwise sum of this process's own b rows."""
        if self.world_size == 1:
            return tensor
        own = tensor.new_empty(len(tensor) // self.world_size, *tensor.shape[1:])
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(own, tensor.contiguous(), group=self.group)
        return own

    def scatter_logaddexp(self, tensor: Tensor) -> Tensor:
        """As `scatter_sum` with `torch.logaddexp` for the sum; the maximum goes ahead, so nothing overflows."""
        if self.world_size == 1:
            return tensor
        largest = tensor.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        anchor = largest.clamp_min(torch.finfo(tensor.dtype).min)  # -inf - -inf is no number
        rows = len(tensor) // self.world_size
        return self.scatter_sum(torch.exp(tensor - anchor)).log() + anchor[self.rank * rows : (self.rank + 1) * rows]

    def gather_text(self, text: str) -> list[str]:
        """Every process's text."""
        if self.world_size == 1:
            return [text]
        texts: list[str] = [""] * self.world_size
        dist.all_gather_object(texts, text, group=self.group)
        return texts

    def agree(self, numbers: Sequence[float], failure: str = "") -> list[list[float]]:
        """Every process's numbers, at most 15, for all processes to draw the same conclusion from.

        A process that cannot go on says in ``failure`` what stopped it. Whatever the others come to agree on next, they
        learn of it instead of waiting for a process that will never come. If they never agree on anything again, the
        group's timeout ends the wait.

        Raises:
            RuntimeError: on every process, if one of them failed; it names who and why.
        """
        row = torch.zeros(16, dtype=torch.float64)
        row[0] = bool(failure)
        row[1 : 1 + len(numbers)] = torch.tensor(list(numbers), dtype=torch.float64)
        rows = self.gather(row.to(self.device)).tolist()
        if any(failed for failed, *_ in rows):
            reasons = [f"  rank {r}: {text}" for r, text in enumerate(self.gather_text(failure)) if text]
            raise RuntimeError("Stopped together, since a process cannot go on:\n" + "\n".join(reasons))
        return [values[: len(numbers)] for _, *values in rows]

    def _exchange(self, sent: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...]) -> Transfer:
        # Every process sends before it receives and issues its exchanges in the same order: NCCL pairs them by order.
        operations = [dist.P2POp(dist.isend, t, self._next, self.group) for t in sent if t is not None]
        operations += [dist.P2POp(dist.irecv, t, self._previous, self.group) for t in received if t is not None]
        return Transfer(dist.batch_isend_irecv(operations), sent)


class Transfer:
    """A started exchange. Holds what is being sent until it has been waited for."""

    def __init__(self, works: list[dist.Work], sent: tuple[Tensor | None, ...]) -> None:
        self._works, self._sent = works, sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._sent = ()


class Traveller:
    """What the processes have to say about a block, combined along its way and brought home.

    In every step of a `rotate` loop `add` is called once with this process's part for the block at hand. After the loop
    `home` returns the combination of every process's part for this process's own block. The transfer of a step overlaps
    the next step's computation.

    Args:
        ring: the ring.
        combine: ``combine(a, b, out=a)``, associative and commutative: `torch.add`, `torch.logaddexp`.
    """

    def __init__(self, ring: Ring, combine: Callable[..., Any]) -> None:
        self._ring, self._combine = ring, combine
        self._transfer: Transfer | None = None
        self._sent: Tensor | None = None
        self._arriving: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Combines this process's part for the block at hand; takes ``part`` over, which must be contiguous."""
        total = part
        if self._transfer is not None:
            total = self.home()
            self._combine(total, part, out=total)
        if self._ring.world_size == 1:
            self._arriving = total
            return
        free = self._sent if self._sent is not None else torch.empty_like(total)
        self._transfer = self._ring._exchange((total,), (free,))
        self._sent, self._arriving = total, free

    def home(self) -> Tensor:
        """What has arrived: after the loop, this process's own block, complete."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        assert self._arriving is not None, "add was never called"
        return self._arriving
