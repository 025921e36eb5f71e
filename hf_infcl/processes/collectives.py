"""The processes that share a batch: collectives and agreements, errors that reach the others, batches read in step.

A single process is a group of one, so callers need no special case for it.
"""

import functools
import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

MOST_NUMBERS = 15  # the most numbers that `agree` exchanges

T = TypeVar("T")
Collective = Callable[..., Any]  # collective(group=...): reads and writes tensors that are bound to it

_logger = logging.getLogger(__name__)
_alone = False  # see `alone`
_PINNED = 2  # batches that lie ready in pinned memory


class OtherRankFailedError(RuntimeError):
    """Another process cannot continue, and so neither can this one; the message holds the rank and the reason."""


class Processes:
    """The processes of a group. Its methods are collective: every process of the group has to call them.

    Args:
        process_group: the group; None is the default group, or this process alone if none is initialised.
        alone: this process is a group of its own, even if a default group is initialised.

    Attributes:
        group: the group, in the form that the functions of torch.distributed take.
        rank: the rank of this process within the group.
        world_size: the number of processes.
        grouped: whether there is a process group, be it of one process.
        device: the device on which several processes exchange small tensors that come from the host.

    Raises:
        ValueError: this process is not a member of the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.group = process_group
        self.rank, self.world_size, self.grouped = 0, 1, False
        self.device = torch.device("cpu")
        self._instead: Callable[[Collective], None] | None = None  # see `redirected`
        self._memory: dict[Any, Tensor] | None = None  # see `part`
        # torch may have been built without torch.distributed.
        exists = dist.is_available() and dist.is_initialized()
        if alone or (process_group is None and (_alone or not exists)):
            return
        self.grouped = True
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("This process is not a member of process_group. Call the loss on its members only.")
        if self.world_size > 1 and dist.get_backend(process_group) == dist.Backend.NCCL:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def perform(self, collective: Collective) -> None:
        """Runs a collective. `sum`, `gather`, `gather_all` and `scatter_sum` run theirs through this method."""
        if self._instead is None:
            collective(group=self.group)
        else:
            self._instead(collective)

    @contextmanager
    def redirected(self, instead: Callable[[Collective], None]) -> Iterator[None]:
        """A context in which `perform` hands collectives to ``instead``, which may run them later or not at all."""
        self._instead = instead
        try:
            yield
        finally:
            self._instead = None

    def part(self, group: dist.ProcessGroup) -> "Processes":
        """The processes of another group, this one among them; `redirected` redirects their collectives as well.

        Their results lie in the memory of the previous results of that shape, so that a recording of many collectives,
        which keeps the tensors of each, does not grow with their number.
        """
        part = Processes(group)
        part._instead = lambda collective: self.perform(lambda group: collective(group=part.group))
        part._memory = {}
        return part

    def _empty(self, like: Tensor, *shape: int) -> Tensor:
        memory, key = {} if self._memory is None else self._memory, (shape, like.dtype)
        if key not in memory:
            memory[key] = like.new_empty(shape)
        return memory[key]

    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum over the processes, the same on each; for one process the tensor itself, not a copy."""
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        self.perform(functools.partial(dist.all_reduce, total))
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        """[world_size, *shape]: every process's tensor, all of one shape and dtype."""
        (gathered,) = self.gather_all(tensor)
        return gathered

    def gather_all(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`gather` for several tensors. Tensors of equal shape and element size are stacked and travel together."""
        if self.world_size == 1:
            return tuple(tensor[None] for tensor in tensors)
        alike: dict[Any, list[int]] = {}
        for place, tensor in enumerate(tensors):
            alike.setdefault((tensor.shape, tensor.element_size()), []).append(place)
        parts = [_stacked([tensors[place] for place in places]) for places in alike.values()]
        gathered = [self._empty(part, self.world_size * len(part), *part.shape[1:]) for part in parts]
        self.perform(functools.partial(_all_gather, gathered, parts))
        results = list(tensors)
        for places, stacked in zip(alike.values(), gathered, strict=True):
            separate = stacked.view(self.world_size, len(places), *stacked.shape[1:]).unbind(1)
            for place, rows in zip(places, separate, strict=True):
                results[place] = rows.view(tensors[place].dtype)
        return tuple(results)

    def scatter_sum(self, tensor: Tensor) -> Tensor:
        """[b, ...]: the elementwise sum over the processes of the b rows that belong to this rank.

        Args:
            tensor: [world_size · b, ...], of the same shape on every process; rows r·b to (r + 1)·b belong to rank r.
        """
        if self.world_size == 1:
            return tensor
        total = self._empty(tensor, len(tensor) // self.world_size, *tensor.shape[1:])
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self.perform(functools.partial(reduce_scatter, total, tensor.contiguous()))
        return total

    def gather_objects(self, value: T) -> list[T]:
        """Every process's value, which must be one that can be pickled, in the order of the ranks."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, numbers: Sequence[float], failure: str = "") -> list[list[float]]:
        """Exchanges numbers, so that all processes can make the same decision.

        A process that cannot continue passes the reason as ``failure``. The others learn of it in their next call of
        `agree`, whatever its purpose, instead of waiting for a collective that the failed process will never join. If
        they never call `agree` again, the timeout of the group ends the wait.

        Args:
            numbers: up to `MOST_NUMBERS`.
            failure: why this process cannot continue; empty if it can.

        Returns:
            Every process's numbers, in the order of the ranks. Each list is as long as this process's; a number that
            another process did not pass is 0.

        Raises:
            OtherRankFailedError: on every process, if one of them failed; the message holds the rank and the reason.
        """
        # The row has a fixed length, because a failed process does not know how many numbers the others exchange.
        assert len(numbers) <= MOST_NUMBERS
        unused = [0.0] * (MOST_NUMBERS - len(numbers))
        row = torch.tensor([bool(failure), *numbers, *unused], dtype=torch.float64)
        # Numbers from the host do not wait for kernels that are still queued, with which the device goes on.
        # Collectives of a group run in the order of their calls, even on different streams.
        with _side_stream(self.device) if self.device.type == "cuda" else nullcontext():
            rows = self.gather_all(row.to(self.device))[0].tolist()
        if any(failed for failed, *_ in rows):
            reasons = [f"  rank {rank}: {text}" for rank, text in enumerate(self.gather_objects(failure)) if text]
            raise OtherRankFailedError("All ranks stop because of an error:\n" + "\n".join(reasons))
        return [values[: len(numbers)] for _, *values in rows]


@contextmanager
def alone() -> Iterator[None]:
    """A context in which the default group is this process alone, so that what it computes waits for no other."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


class Arriving:
    """Numbers that are copied from the device to the host. `tolist` does not wait for kernels that are queued later."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.current_stream().record_event() if tensor.is_cuda else None

    def tolist(self) -> list[Any]:
        """The numbers, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.tolist()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stacks the bits of tensors of one shape, in the dtype of the first; a single contiguous tensor is not copied."""
    if len(tensors) == 1:
        return tensors[0].contiguous()[None]
    return torch.stack([tensor.view(tensors[0].dtype) for tensor in tensors])


def gather_into(gathered: Tensor, part: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """`torch.distributed.all_gather_into_tensor`, which torch 2.13 renames; the old name is then deprecated."""
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return all_gather(gathered, part, group=group, async_op=async_op)


def _all_gather(gathered: Sequence[Tensor], parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    for out, part in zip(gathered, parts, strict=True):
        gather_into(out, part, group=group)


# ---- Errors of one process ----


def announce_failure(error: Exception, *, ends: bool = True) -> None:
    """Makes all other processes of the default group stop with this error in their next `Processes.agree`.

    Unless it ``ends`` the program, all processes have to catch it, and nothing is logged.
    """
    processes = Processes()
    if processes.world_size == 1:
        return
    failure = f"{type(error).__name__}: {error}"
    # Logged first, because the others may be stuck elsewhere and this process may wait for them until the timeout.
    if ends:
        _logger.error("All ranks stop because of an error on rank %d: %s", processes.rank, failure)
    with suppress(RuntimeError):  # `agree` raises here as on the others, but the caller raises the error itself
        processes.agree([], failure)


@contextmanager
def failures_announced(*, repeats: bool = False) -> Iterator[None]:
    """Announces an error raised in the context, which the other processes receive in their next `Processes.agree`.

    With ``repeats`` all processes repeat the step if memory runs out.
    """
    try:
        yield
    except Exception as error:
        announce_failure(error, ends=not (repeats and isinstance(error, torch.OutOfMemoryError)))
        raise


def by_rank(texts: Sequence[str]) -> str:
    """Joins the texts of all ranks, in their order, each with its ranks. Empty ones are left out, equal ones merged."""
    ranks_of: dict[str, list[int]] = {}
    for rank, said in enumerate(texts):
        if said:
            ranks_of.setdefault(said, []).append(rank)
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {said}"
        for said, ranks in ranks_of.items()
    )


def is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed because another process has ended or does not answer within the timeout."""
    if isinstance(error, OtherRankFailedError) or not dist.is_available():
        return False
    # Gloo raises a plain RuntimeError whose message names the source file of its transport.
    return isinstance(error, dist.DistError) or "gloo/transport/" in str(error)


# ---- Rows of all processes, and batches that they read in step ----


def gather_rows(tensors: object, processes: Processes | None = None) -> Any:
    """Gathers the rows of all processes, in the order of the ranks, for one tensor or a tuple of tensors.

    Args:
        tensors: [n, ...] each; n may differ between the processes and may be 0.
        processes: None is the default group.

    Raises:
        OtherRankFailedError: on every process, if one of them announced a failure instead.
    """
    processes = processes or Processes()
    if processes.world_size == 1:
        return tensors
    several = tensors if isinstance(tensors, tuple) else (tensors,)
    numbers = processes.agree([len(tensor) for tensor in several])  # [world_size][tensors]
    gathered = []
    for index, tensor in enumerate(several):
        rows = [int(lengths[index]) for lengths in numbers]
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        blocks = processes.gather(padded)
        gathered.append(torch.cat([block[:n] for block, n in zip(blocks, rows, strict=True)]))
    return tuple(gathered) if isinstance(tensors, tuple) else gathered[0]


class AnnouncingDataLoader:
    """A data loader that announces its errors to all processes; each process calls `Processes.agree` once per batch.

    Args:
        dataloader: torch's or accelerate's loader.
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._is_of_accelerate = hasattr(dataloader, "base_dataloader")  # it has torch's within
        self._workers = _EarlyLoader(dataloader.base_dataloader if self._is_of_accelerate else dataloader)

    def begin(self) -> None:
        """Starts the workers of the next iteration, and does not wait for a batch of theirs."""
        with failures_announced():
            if self._is_of_accelerate:
                if self._dataloader.rng_types:  # accelerate makes all processes shuffle alike before the first batch
                    return
                self._dataloader.set_epoch(self._dataloader.iteration)  # as accelerate does for the first batch
            self._workers.begin()

    def __iter__(self) -> Iterator[Any]:
        batches = self._on_device() if self._is_of_accelerate else iter(self._workers)
        while True:
            with failures_announced():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _on_device(self) -> Iterator[Any]:
        """The batches of accelerate's loader, which moves those of the workers to the device."""
        with patch.object(self._dataloader, "base_dataloader", self._workers):
            yield from self._dataloader

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)


class _EarlyLoader:
    """A loader of torch whose workers can be started before it is iterated over."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self._loader = loader
        self._begun: Iterator[Any] | None = None

    def begin(self) -> Iterator[Any]:
        self._begun = begun = iter(self._loader)
        # Otherwise torch's thread would pin all batches that the workers have loaded ahead, and allocate memory for
        # each, of up to twice its size, because the sizes of pinned blocks are powers of two. There is no option for
        # this, so the queue into which it puts them is bounded.
        if isinstance(ready := getattr(begun, "_data_queue", None), queue.Queue):
            ready.maxsize = _PINNED
        return begun

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self.begin() if self._begun is None else self._begun, None
        return begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
