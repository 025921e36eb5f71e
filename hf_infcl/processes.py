"""The processes that share a batch: their collectives, their agreements, and how the error of one reaches the others.

One process is a group of one: callers need not ask whether there are several.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST_NUMBERS = 15  # the most numbers that `agree` exchanges

_logger = logging.getLogger(__name__)


class OtherRankFailedError(RuntimeError):
    """Another process cannot continue, and so neither can this one; the message holds the rank and the reason."""


class Processes:
    """The processes of a group. Its methods are collective: every process of the group has to call them.

    Args:
        process_group: the group; None is the default group, or this process alone if none is initialised.
        alone: this process is a group of its own, even if a default group is initialised.

    Attributes:
        group: the group as the functions of torch.distributed take it.
        rank: the rank of this process within the group.
        world_size: the number of processes.
        device: the device on which the group exchanges small tensors that come from the host.

    Raises:
        ValueError: this process is not a member of the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.group = process_group
        self.rank, self.world_size = 0, 1
        self.device = torch.device("cpu")
        # torch may have been built without torch.distributed.
        if alone or (process_group is None and not (dist.is_available() and dist.is_initialized())):
            return
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("This process is not a member of process_group: call the loss on its members alone.")
        if dist.get_backend(process_group) == dist.Backend.NCCL:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum over the processes, the same on each; for one process the tensor itself, not a copy."""
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        """[world_size, *shape]: every process's tensor, all of one shape and dtype."""
        if self.world_size == 1:
            return tensor[None]
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        # torch 2.13 renames the collectives of single tensors and deprecates the old names.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(gathered, tensor.contiguous()[None], group=self.group)
        return gathered

    def scatter_sum(self, tensor: Tensor) -> Tensor:
        """[b, ...]: the elementwise sum over the processes of the b rows that belong to this rank.

        Args:
            tensor: [world_size · b, ...], of the same shape on every process; rows r·b to (r + 1)·b belong to rank r.
        """
        if self.world_size == 1:
            return tensor
        total = tensor.new_empty(len(tensor) // self.world_size, *tensor.shape[1:])
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(total, tensor.contiguous(), group=self.group)
        return total

    def scatter_logaddexp(self, tensor: Tensor) -> Tensor:
        """As `scatter_sum`, with the logarithm of the sum of exponentials in place of the sum."""
        if self.world_size == 1:
            return tensor
        largest = tensor.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)  # subtracted first, so that nothing overflows
        anchor = largest.clamp_min(torch.finfo(tensor.dtype).min)  # -inf - -inf is not a number
        b = len(tensor) // self.world_size
        return self.scatter_sum(torch.exp(tensor - anchor)).log() + anchor[self.rank * b : (self.rank + 1) * b]

    def gather_text(self, text: str) -> list[str]:
        """Every process's text, in the order of the ranks."""
        if self.world_size == 1:
            return [text]
        texts = [""] * self.world_size
        dist.all_gather_object(texts, text, group=self.group)
        return texts

    def agree(self, numbers: Sequence[float], failure: str = "") -> list[list[float]]:
        """Exchanges numbers, so that all processes can draw the same conclusion from them.

        A process that cannot continue passes the reason as ``failure``. The others learn of it in their next call, for
        any purpose, instead of waiting for a collective that the failed process will never join. If they never call
        `agree` again, the timeout of the group ends the wait.

        Args:
            numbers: up to `MOST_NUMBERS`.
            failure: why this process cannot continue; empty if it can.

        Returns:
            Every process's numbers, in the order of the ranks, as many as this process passed. A number that another
            process did not pass is 0.

        Raises:
            OtherRankFailedError: on every process, if one of them failed; the message holds the rank and the reason.
        """
        # The row has a fixed length, because a failed process does not know how many numbers the others exchange.
        row = torch.zeros(1 + MOST_NUMBERS, dtype=torch.float64)
        row[0] = bool(failure)
        row[1 : 1 + len(numbers)] = torch.tensor(list(numbers), dtype=torch.float64)
        rows = self.gather(row.to(self.device)).tolist()
        if any(failed for failed, *_ in rows):
            reasons = [f"  rank {rank}: {text}" for rank, text in enumerate(self.gather_text(failure)) if text]
            raise OtherRankFailedError("All ranks stop because of an error:\n" + "\n".join(reasons))
        return [values[: len(numbers)] for _, *values in rows]


def announce_failure(error: Exception) -> None:
    """Lets all other processes of the default group stop with this error in their next `Processes.agree`."""
    processes = Processes()
    if processes.world_size == 1:
        return
    failure = f"{type(error).__name__}: {error}"
    # Logged first, because the others may be stuck elsewhere and this process may wait for them until the timeout.
    _logger.error("All ranks stop because of an error on rank %d: %s", processes.rank, failure)
    with suppress(RuntimeError):  # `agree` raises here as on the others, but the caller raises the error itself
        processes.agree([], failure)


@contextmanager
def failures_announced() -> Iterator[None]:
    """Announces an error raised in the context, which the other processes receive in their next `Processes.agree`."""
    try:
        yield
    except Exception as error:
        announce_failure(error)
        raise


class Phases:
    """The phases of the work of all processes of the default group, by which a process that has ended is described.

    Each process writes its own phase into the store of the group. torchrun keeps that store, so it outlives a process.
    """

    def __init__(self) -> None:
        processes = Processes()
        self._rank, self._world_size = processes.rank, processes.world_size
        self._store: Any = None
        if processes.world_size > 1:
            self._store = dist.PrefixStore("infcl", dist.distributed_c10d._get_default_store())

    def enter(self, phase: str) -> None:
        """Tells the other processes what this one does from now on."""
        try:
            if self._store is not None:
                self._store.set(f"phase/{self._rank}", phase)
        except RuntimeError:  # the launcher that kept the store has ended, and this process may still save a checkpoint
            self._store = None

    def describe_lost(self, seconds: float = 3.0) -> str:
        """A sentence about the processes that do not answer, for a message after a collective has failed.

        Every process that is left has to call it: those that do not within so many seconds count as lost.
        """
        unreachable = "The process that keeps the group's store does not answer, which is rank 0 or the launcher."
        if self._store is None:
            return unreachable
        lost = []
        try:
            self._store.set(f"left/{self._rank}", "")
            end = time.monotonic() + seconds
            for rank in range(self._world_size):
                while not self._store.check([f"left/{rank}"]) and time.monotonic() < end:
                    time.sleep(0.05)
                if not self._store.check([f"left/{rank}"]):
                    known = self._store.check([f"phase/{rank}"])
                    phase = self._store.get(f"phase/{rank}").decode() if known else "the start"
                    lost.append(f"Rank {rank} does not answer; its last phase was {phase}.")
        except RuntimeError:
            return unreachable
        return " ".join(lost) or "All processes are left, but cannot reach each other."


def is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed because another process has ended or does not answer within the timeout."""
    if isinstance(error, OtherRankFailedError) or not dist.is_available():
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)
