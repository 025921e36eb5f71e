"""The strategies by which processes share the logits of a batch: which each computes, and what they exchange.

Each of W processes holds some of the images and some of the texts of the batch, its `Side`s. Every strategy computes
the same statistics and gradients for them; strategies differ in memory and traffic. With b images and b texts on each
process and B = W·b:

| strategy | logits of a process | communication | memory beside tiles |
|---|---|---|---|
| ring (Inf-CL, arXiv 2410.17243) | W blocks of b×b, one after another | texts and gradients, around the ring | O(b·D) |
| ring of machines, of g processes each | W/g blocks of b×(g·b) | the same, and gathered in a machine | O(g·b·D) |
| disco (DisCo-CLIP, arXiv 2304.08480) | one block of b×B | texts gathered, their gradients reduced | O(B·D) |
| local (OpenCLIP's local loss) | b×B for images, B×b for texts | both gathered, both gradients reduced | O(B·D) |
| gather (CLIP) | all B×B | both gathered, no gradients | O(B·D) |

`choose_exchange` decides which of the first three computes a ring. The words block, diagonal and log-odds are
explained in `hf_infcl.kernels`. The losses in `hf_infcl.loss.objectives` pass the function that computes a block.

Transfers of the ring are point-to-point. Each one starts before the computation that hides it and is waited for
afterwards. With NCCL, waiting only orders streams and never blocks the host. A single process is a ring of one, without
transfers.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..kernels.torch_backend import accumulate_dtype
from ..processes.collectives import Processes


class Ring:
    """The machines in the order of their ranks: each process sends to that of its place in the next machine.

    Args:
        width: the number of processes of a machine; 1 is a ring of all processes.

    Attributes:
        size: the number of machines.
        place: the place of this machine among them.
        peers: the ranks, in the default group, of the processes that this one sends to and receives from.
    """

    def __init__(self, processes: Processes, width: int = 1) -> None:
        self.processes = processes
        self.size, self.place = processes.world_size // width, processes.rank // width
        self.peers: tuple[int, ...] = ()
        if self.size > 1:
            group = processes.group or dist.group.WORLD
            assert group is not None
            # Point-to-point calls take ranks of the default group.
            ranks = ((processes.rank + step) % processes.world_size for step in (width, -width))
            self.peers = tuple(dist.get_global_rank(group, rank) for rank in ranks)

    def rotate(
        self, tensors: Sequence[Tensor | None], travelling: Sequence[RingReduction] = ()
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yields every machine's tensors once, as (place, tensors), beginning with those of this process.

        If there are several machines, this process's tensors come once more at the end, while the last sums travel
        home. In each iteration but this last one the caller may add its part for the yielded block to ``travelling``.

        The next block travels while the caller computes on the current one. The tensors of a block are valid until the
        next iteration and must not be written to. Their shapes and dtypes are the same on all processes (see `padded`);
        None stays None.
        """
        first = held = tuple(None if t is None else t.contiguous() for t in tensors)
        spare: tuple[Tensor | None, ...] = ()
        for step in range(self.size + (self.size > 1)):
            arriving: tuple[Tensor | None, ...] = ()
            if step + 1 < self.size:
                arriving = spare or tuple(None if t is None else torch.empty_like(t) for t in held)
            pairs = list(zip(held, arriving, strict=True)) if arriving else []
            wait = self._exchange([*pairs, *(pair for reduction in travelling for pair in reduction.depart())])
            yield (self.place - step) % self.size, held
            wait()
            if arriving:
                spare = () if held is first else held  # never receive into the caller's tensors
            held = arriving or first

    def _exchange(self, pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> Callable[[], None]:
        """Starts sending the first tensor of each pair and receiving the second; returns the function that waits.

        The caller keeps the tensors alive until then. All tensors of a step travel in one batch, because starting one
        takes the host longer than launching a kernel.
        """
        works: list[dist.Work] = []

        def start(group: dist.ProcessGroup | None) -> None:
            # Every process sends before it receives and starts exchanges in the same order, by which NCCL pairs them.
            sent = [dist.P2POp(dist.isend, t, self.peers[0], group) for t, _ in pairs if t is not None]
            received = [dist.P2POp(dist.irecv, t, self.peers[1], group) for _, t in pairs if t is not None]
            works.extend(dist.batch_isend_irecv(sent + received))

        def wait(group: dist.ProcessGroup | None) -> None:
            while works:
                works.pop().wait()

        if not pairs:
            return lambda: None
        self.processes.perform(start)
        return functools.partial(self.processes.perform, wait)


class RingReduction:
    """Combines the processes' parts for each block of a `Ring.rotate` loop while they travel along with the blocks.

    In every step of the loop, in every step except the first, or in none, each process calls `add` once with its part
    for the block that it holds. After the loop, `result` is the combination for this process's own block. The transfer
    of one step overlaps with the computation of the next.

    Args:
        combine: ``combine(a, b, out=a)``, associative and commutative: `torch.add` or `torch.logaddexp`.
        rows: the number of rows of the largest part. Smaller parts are padded with zeros.
    """

    def __init__(self, combine: Callable[..., object], rows: int) -> None:
        self._combine, self._rows = combine, rows
        self._part: Tensor | None = None
        self._sent: Tensor | None = None
        self._arrived: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Takes this process's part, a contiguous tensor that is read until the next step."""
        self._part = padded(part, self._rows)

    def depart(self) -> Iterator[tuple[Tensor, Tensor]]:
        """If a part was added: combines it with what has arrived for its block; yields that and memory for the next."""
        if self._part is None:
            return
        if self._arrived is None:
            total = self._part.clone()
        else:
            total = self._arrived
            self._combine(total, self._part, out=total)
        self._part = None
        self._arrived = torch.empty_like(total) if self._sent is None else self._sent
        self._sent = total
        yield total, self._arrived

    @property
    def result(self) -> Tensor:
        """The combination for the block of this process, once the loop has ended."""
        result = self._part if self._arrived is None else self._arrived  # a lone machine's part never travels
        assert result is not None, "add was never called"
        return result


def padded(tensor: Tensor, rows: int) -> Tensor:
    """Pads the tensor with zero rows at its end; returns the tensor itself if it already has that many rows."""
    if len(tensor) == rows:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, rows - len(tensor)))


Rows = tuple[Any, ...]  # features [b, D], and vectors [b] or None that the kernels take beside them
Statistics = tuple[Tensor, ...]  # [b] each
BothStatistics = tuple[Statistics, Statistics]  # of rows, and of columns

# The functions that combine statistics, in the order of `hf_infcl.kernels.softmax_statistics`: those of two blocks, and
# those of all.
_COMBINE: tuple[Callable[..., Tensor], ...] = (torch.logaddexp, torch.logaddexp, torch.add)
_REDUCE: tuple[Callable[[Tensor, int], Tensor], ...] = (torch.logsumexp, torch.logsumexp, torch.sum)

# block(x, y, diagonal) computes the statistics of a block's rows and of its columns.
StatisticsBlock = Callable[[Rows, Rows, int | None], BothStatistics]
# block(x, y, diagonal, grad_x, grad_y, accumulate) returns some scalars, and computes the gradients of a block's rows
# and columns (None: not wanted), which replace the content of grad_x and grad_y or, if ``accumulate``, are added to it.
GradientsBlock = Callable[[Rows, Rows, int | None, Tensor | None, Tensor | None, bool], tuple[Tensor, ...]]


class Side(NamedTuple):
    """The images of this process, or its texts: the rows or the columns of blocks."""

    rows: Rows
    counts: tuple[int, ...]  # the number of rows on each process


# sides(losses_x=True, losses_y=True): those for the gradients of the cross entropies of x, of y, or of both
Sides = Callable[..., tuple[Side, Side]]


class Gradients(NamedTuple):
    """The gradients of this process's rows and columns, in fp32 or fp64."""

    scalars: tuple[Tensor, ...]  # sums over this process's blocks; the processes' sums add up to the whole
    x: Tensor | None  # [b, D]; None if not wanted
    y: Tensor | None

    def plus(self, other: Gradients) -> Gradients:
        """The sums of both, and None where one is None."""
        scalars = tuple(a + b for a, b in zip(self.scalars, other.scalars, strict=True))
        x, y = (None if a is None or b is None else a + b for a, b in zip(self[1:], other[1:], strict=True))
        return Gradients(scalars, x, y)


class Strategy(ABC):
    """Computes statistics and gradients together with the other processes, which must make the same calls.

    Where a method takes or returns columns y or their statistics, these are the columns that `columns` returns.

    Attributes:
        transposes: whether the texts are the rows of blocks as well.
        blocks: the number of blocks, which are computed one after another.
        key: equal for strategies that run the same collectives on the same arguments.
    """

    transposes = False
    blocks = 1

    def __init__(self, processes: Processes, backend: str) -> None:
        self.processes, self.backend = processes, backend
        self.key: tuple[Hashable, ...] = (type(self), backend, processes.rank)

    def columns(self, side: Side) -> Side:
        """The columns y for the other methods: this process's columns, or those of all processes, gathered here.

        Gathering lets every process compute the numbers of all columns, such as their log-sum-exps, without a further
        exchange.
        """
        return side

    def of_this_process(self, values: Tensor, counts: tuple[int, ...]) -> Tensor:
        """From values for all of `columns`, selects those of this process's columns: [b, ...]."""
        return values

    @abstractmethod
    def statistics(self, block: StatisticsBlock, x: Side, y: Side, want_y: bool = True) -> BothStatistics:
        """The statistics of this process's rows x over the columns of all processes, and of the columns y.

        Args:
            want_y: whether to compute the statistics of the columns; if False, the second tuple is empty.
        """

    @abstractmethod
    def gradients(self, block: GradientsBlock, x: Side, y: Side, want_x: bool, want_y: bool) -> Gradients:
        """The gradients of this process's rows x, over the columns of all processes, and of its columns y."""

    def softmax_gradients(self, block: GradientsBlock, sides: Sides, want_x: bool, want_y: bool) -> Gradients:
        """The gradients of the cross entropies of x and of y."""
        return self.gradients(block, *sides(), want_x, want_y)

    def gather(self, *sides: Side) -> Rows:
        """The rows of each side on all processes, in the order of the ranks; None stays None."""
        sent = [(t, side.counts) for side in sides for t in side.rows]
        gathered = iter(self.processes.gather_all(*(padded(t, max(counts)) for t, counts in sent if t is not None)))
        return tuple(None if t is None else _joined(next(gathered), counts) for t, counts in sent)

    def place(self, counts: tuple[int, ...]) -> slice:
        """The position of this process's rows among the rows of all processes."""
        start = sum(counts[: self.processes.rank])
        return slice(start, start + counts[self.processes.rank])


class DiscoStrategy(Strategy):
    """DisCo-CLIP: all texts form one block. The gradients of images are complete at once; those of texts are reduced.

    The paper all-reduces the gradients of all embeddings. A reduce-scatter instead gives each process only the rows of
    its own texts, which suffices, at half the traffic. This strategy takes as many matrix products as the ring.
    """

    def columns(self, side: Side) -> Side:
        return Side(self.gather(side), side.counts)

    def of_this_process(self, values: Tensor, counts: tuple[int, ...]) -> Tensor:
        return values[self.place(counts)]

    def statistics(self, block: StatisticsBlock, x: Side, y: Side, want_y: bool = True) -> BothStatistics:
        stats_x, stats_y = block(x.rows, y.rows, self.place(y.counts).start)
        return stats_x, self.combined(stats_y) if want_y else ()

    def combined(self, parts: Statistics) -> Statistics:
        """Combines the processes' parts of the statistics of all columns."""
        if self.processes.world_size == 1:
            return parts
        # Gathering the parts of all processes takes less time than reducing them and gathering the results.
        gathered = self.processes.gather_all(*parts)  # [world_size, B] each
        return tuple(reduce(part, 0) for reduce, part in zip(_REDUCE, gathered, strict=False))

    def gradients(self, block: GradientsBlock, x: Side, y: Side, want_x: bool, want_y: bool) -> Gradients:
        grad_x, part = (_empty(side.rows[0]) if want else None for side, want in ((x, want_x), (y, want_y)))
        scalars = block(x.rows, y.rows, self.place(y.counts).start, grad_x, part, False)
        return Gradients(scalars, grad_x, None if part is None else self.scatter(part, y.counts))

    def scatter(self, part: Tensor, counts: tuple[int, ...]) -> Tensor:
        """[b, D]: the sum over the processes of their parts [B, D] for this process's columns."""
        if min(counts) != max(counts):
            part = torch.cat([padded(rows, max(counts)) for rows in part.split(counts)])
        return self.processes.scatter_sum(part)[: counts[self.processes.rank]]


class RingStrategy(Strategy):
    """Inf-CL: texts travel around a ring, one block at a time. One trip serves both directions of the loss.

    The statistics and gradients of a block travel with it and return to its process; that process adds its own part of
    the gradients at the end. Transfers overlap with the computation of the current block. All blocks are padded to the
    size of the largest.

    Several processes of a machine may share a block, as in disco: each sends its own texts to the process of its place
    in the next machine and gathers those of its machine; the parts for them are reduced before they travel on.

    The softmax loss takes four products of matrices: one for the statistics, one that recomputes the logits, and two
    for the gradients. The sigmoid loss takes three.

    Args:
        machine: the processes that share a block, this one among them; None is this process alone.
    """

    def __init__(self, processes: Processes, backend: str, machine: Processes | None = None) -> None:
        super().__init__(processes, backend)
        self._machine = DiscoStrategy(machine or Processes(alone=True), backend)
        self._ring = Ring(processes, self._machine.processes.world_size)
        self.blocks = self._ring.size
        self.key += (self._ring.peers, self._machine.processes.group)

    def _rotate(self, side: Side, travelling: Sequence[RingReduction]) -> Iterator[tuple[Side, int | None]]:
        """`Ring.rotate`: the columns that this process holds for each machine, and the ``diagonal`` of its block."""
        size, machine = max(side.counts), self._machine.processes
        padded_rows = [None if t is None else padded(t, size) for t in side.rows]
        for source, held in self._ring.rotate(padded_rows, travelling):
            counts = side.counts[source * machine.world_size : (source + 1) * machine.world_size]
            rows = tuple(None if t is None else t[: counts[machine.rank]] for t in held)
            yield Side(rows, counts), self._machine.place(counts).start if source == self._ring.place else None

    def statistics(self, block: StatisticsBlock, x: Side, y: Side, want_y: bool = True) -> BothStatistics:
        stats_x: Statistics = ()
        # For every statistic that there can be. Those that the loss lacks get no part, and nothing of them travels.
        reductions = [RingReduction(combine, max(y.counts)) for combine in _COMBINE] if want_y else []
        for held, diagonal in self._rotate(y, reductions):
            if diagonal is not None and stats_x:  # home again, where only the sums had to arrive
                continue
            columns = self._machine.columns(held)
            parts_x, parts_y = block(x.rows, columns.rows, diagonal)
            combined = (combine(*parts) for combine, *parts in zip(_COMBINE, stats_x, parts_x, strict=False))
            stats_x = tuple(combined) if stats_x else parts_x
            if want_y:
                parts_y = self._machine.combined(parts_y)
            for reduction, part in zip(reductions, parts_y, strict=False):
                reduction.add(self._machine.of_this_process(part, columns.counts))
        return stats_x, tuple(reduction.result[: len(y.rows[0])] for reduction in reductions[: len(stats_x)])

    def gradients(self, block: GradientsBlock, x: Side, y: Side, want_x: bool, want_y: bool) -> Gradients:
        several, images = self._ring.size > 1, len(x.rows[0])
        travelling = RingReduction(torch.add, max(y.counts))
        grad_x = _empty(x.rows[0]) if want_x else None
        grad_y: Tensor | None = None  # of the columns of this machine
        part: Tensor | None = None  # of those of another
        scalars: list[tuple[Tensor, ...]] = []
        # The first half of this machine's block overlaps the first transfer of texts, and the second half overlaps the
        # last transfer of gradients, which bring the sums of the others home. A lone machine has no halves.
        half = (images + 1) // 2 if several else images
        if grad_x is not None and several:
            grad_x[half:] = 0  # the first half overwrites grad_y and its own rows of grad_x; all else is added
        for held, diagonal in self._rotate(y, [travelling] if want_y else []):
            columns = self._machine.columns(held)
            if diagonal is None:
                if want_y:
                    if part is None or len(part) != len(columns.rows[0]):
                        part = _empty(columns.rows[0])
                    part.zero_()
                scalars.append(block(x.rows, columns.rows, None, grad_x, part, True))
                if part is not None:
                    travelling.add(self._machine.scatter(part, columns.counts))
                continue
            own = slice(half, images) if scalars else slice(0, half)
            if want_y and grad_y is None:
                grad_y = _empty(columns.rows[0])
            if own.start < own.stop:
                rows = tuple(None if t is None else t[own] for t in x.rows)
                of_rows = None if grad_x is None else grad_x[own]
                scalars.append(block(rows, columns.rows, diagonal + own.start, of_rows, grad_y, own.start > 0))
        if grad_y is not None:
            grad_y = self._machine.scatter(grad_y, columns.counts)
            if several:
                grad_y = travelling.result[: len(grad_y)].add_(grad_y)
        # The sum of a single block's scalars launches no kernel.
        sums = tuple(functools.reduce(torch.add, parts) for parts in zip(*scalars, strict=True))
        return Gradients(sums, grad_x, grad_y)


class LocalStrategy(DiscoStrategy):
    """OpenCLIP's local loss with gradients through the gather, for softmax; sigmoid is computed as in disco.

    Each process computes the cross entropies of its images from its images and all texts, and those of its texts from
    its texts and all images. No statistics have to be reduced, but each logit is computed twice.
    """

    transposes = True

    def columns(self, side: Side) -> Side:
        return side

    def of_this_process(self, values: Tensor, counts: tuple[int, ...]) -> Tensor:
        return values

    def gradients(self, block: GradientsBlock, x: Side, y: Side, want_x: bool, want_y: bool) -> Gradients:
        return super().gradients(block, x, super().columns(y), want_x, want_y)

    def statistics(self, block: StatisticsBlock, x: Side, y: Side, want_y: bool = True) -> BothStatistics:
        def row_statistics(rows: Side, columns: Side) -> Statistics:
            return block(rows.rows, self.gather(columns), self.place(rows.counts).start)[0]

        return row_statistics(x, y), row_statistics(y, x) if want_y else ()

    def softmax_gradients(self, block: GradientsBlock, sides: Sides, want_x: bool, want_y: bool) -> Gradients:
        x, y = sides(losses_y=False)
        from_x = self.gradients(block, x, y, want_x, want_y)
        x, y = sides(losses_x=False)
        scalars, grad_y, grad_x = self.gradients(block, y, x, want_y, want_x)
        return from_x.plus(Gradients(scalars, grad_x, grad_y))


class GatherStrategy(Strategy):
    """CLIP: every process gathers all images and texts and computes the whole loss, so no gradients travel.

    The gradients and the sigmoid loss use only the rows and columns of this process's images and texts.
    """

    transposes = True

    def statistics(self, block: StatisticsBlock, x: Side, y: Side, want_y: bool = True) -> BothStatistics:
        stats_x, stats_y = block(self.gather(x), self.gather(y), 0)
        place_x, place_y = self.place(x.counts), self.place(y.counts)
        return tuple(t[place_x] for t in stats_x), tuple(t[place_y] for t in stats_y) if want_y else ()

    def gradients(self, block: GradientsBlock, x: Side, y: Side, want_x: bool, want_y: bool) -> Gradients:
        def row_gradients(rows: Side, columns: Side, want: bool) -> tuple[tuple[Tensor, ...], Tensor | None]:
            grad = _empty(rows.rows[0]) if want else None
            return block(rows.rows, self.gather(columns), self.place(rows.counts).start, grad, None, False), grad

        grad_x = grad_y = None
        if want_y:  # the scalars of the images' rows and those of the texts' rows both add up to the whole
            scalars, grad_y = row_gradients(y, x, want=True)
        if want_x or not want_y:
            scalars, grad_x = row_gradients(x, y, want_x)
        return Gradients(scalars, grad_x, grad_y)


STRATEGIES: dict[str, type[Strategy]] = {
    "ring": RingStrategy,
    "disco": DiscoStrategy,
    "local": LocalStrategy,
    "gather": GatherStrategy,
}


# ---- The exchange of a ring ----

# The costs of a forward and backward, measured on one machine or, between machines, assumed: the host's time for a loss
# and for each replayed block (0.1 ms of one process, 0.3 of eight, without NCCL's share); the rate of products; the
# latency of an exchange and the rate at which a process sends; a process's step in a gather. They are constants, so
# that all processes decide alike, and a resumed training as before.
LOSS_SECONDS, HOST_SECONDS, FLOPS = 1e-3, 0.3e-3, 600e12
BETWEEN, INSIDE, STEP_SECONDS = (60e-6, 40e9), (20e-6, 250e9), 3e-6
GATHERED_BYTES = 256 << 20  # texts of up to this size are gathered in any case, and on CPUs no larger ones
# The share of the memory of a GPU that gathered texts may take. What happens to be free would be a better bound, but
# exchanges differ by rounding, and a resumed training must decide as the one before it, to resume to the bit.
GATHERED_SHARE = 1 / 32


class Exchange(NamedTuple):
    """How a ring exchanges texts, and its predicted time."""

    blocks: int  # 1: the texts of all processes are gathered
    gathered: int  # the processes whose texts form a block: 1, those of a machine, or all
    seconds: float  # of a forward and backward of the loss

    def __str__(self) -> str:
        if self.blocks == 1:
            return "all texts gathered"
        return f"a ring of {self.blocks} {'processes' if self.gathered == 1 else 'machines'}"


class Machines:
    """The machines on which the processes of a group run; collective.

    Attributes:
        processes: the number of processes of each machine; 1 if the machines cannot form a ring.
        memory: the bytes of the smallest GPU; 0 on CPUs.
        chosen: how the last ring of these processes exchanged texts; None before the first.
    """

    chosen: Exchange | None = None

    def __init__(self, all_processes: Processes, group: dist.ProcessGroup, device: torch.device) -> None:
        told = os.environ.get("HF_INFCL_RING_GROUP") or os.environ.get("LOCAL_WORLD_SIZE", "1")
        failure = ""
        if not told.isdigit() or int(told) == 0:
            failure = f"HF_INFCL_RING_GROUP or LOCAL_WORLD_SIZE must be a machine's number of processes, got {told!r}."
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        sizes, memories = zip(*all_processes.agree([0 if failure else int(told), memory], failure), strict=True)
        ranks, size = dist.get_process_group_ranks(group), int(sizes[0]) if len(set(sizes)) == 1 else 1
        self.memory = min(memories)
        if len({rank // size for rank in ranks}) == 1:
            self.processes = len(ranks)
        else:  # NCCL may not split the group of all processes unless all of them take part
            self.processes = size if ranks == [*range(dist.get_world_size())] and len(ranks) % size == 0 else 1
        self._group: dist.ProcessGroup | None = None

    def of_this_process(self, all_processes: Processes) -> Processes:
        """The processes of this machine."""
        if self._group is None:
            first = all_processes.rank // self.processes * self.processes
            self._group = dist.new_group(range(first, first + self.processes), use_local_synchronization=True)
        assert self._group is not None
        return all_processes.part(self._group)


_machines: WeakKeyDictionary[dist.ProcessGroup, Machines] = WeakKeyDictionary()


def machines_of(processes: Processes, device: torch.device) -> Machines:
    """The machines of several processes, which exchange their numbers in the first call; collective."""
    group = processes.group or dist.group.WORLD
    assert group is not None
    if group not in _machines:
        _machines[group] = Machines(processes, group, device)
    return _machines[group]


def select_strategy(name: str, processes: Processes, backend: str, texts: Tensor, rows: int, columns: int) -> Strategy:
    """Selects the strategy by name, with another in place of a ring where `choose_exchange` chooses it.

    Args:
        texts: the texts of this process, in the form in which they are exchanged.
        rows, columns: their numbers on all processes. The columns are exchanged.
    """
    if name != "ring" or processes.world_size == 1:
        return STRATEGIES[name](processes, backend)
    machines, sizes = machines_of(processes, texts.device), (rows, columns, texts.shape[1], texts.element_size())
    exchange = choose_exchange(processes.world_size, machines.processes, machines.memory, *sizes)
    machines.chosen = exchange
    if exchange.blocks == 1:
        return DiscoStrategy(processes, backend)
    return RingStrategy(processes, backend, machines.of_this_process(processes) if exchange.gathered > 1 else None)


def choose_exchange(
    world_size: int, machine: int, memory: float, rows: int, columns: int, dim: int, itemsize: int
) -> Exchange:
    """The exchange with the least predicted time among those whose gathered texts fit.

    Args:
        machine: the number of processes of each machine.
        memory: the bytes of the smallest GPU.
        rows, columns: their numbers on all processes.
        itemsize: bytes of one value of the features.
    """

    def predicted(gathered: int) -> Exchange:
        blocks, texts = world_size // gathered, columns / world_size
        # Texts travel for the statistics and for the gradients, which come back in fp32.
        of_text = dim * (2 * itemsize + 4)
        work = 8 * rows / world_size * gathered * texts * dim * (6 if itemsize == 4 else 1) / FLOPS
        latency, rate = INSIDE if machine == world_size else BETWEEN
        travel = 2 * latency + texts * of_text / rate if blocks > 1 else 0.0
        gather = 0.0
        if gathered > 1:  # between machines all their links work in parallel
            rate = INSIDE[1] if gathered <= machine else min(INSIDE[1], machine * BETWEEN[1])
            gather = 3 * gathered * STEP_SECONDS + gathered * texts * (of_text + 4 * gathered) / rate
        # The next texts travel while those of a block are gathered and multiplied.
        return Exchange(blocks, gathered, LOSS_SECONDS + blocks * max(HOST_SECONDS, travel, gather + work))

    def size(gathered: int) -> float:
        """The bytes that a process needs for gathered texts with their gradients and statistics."""
        # Triton multiplies fp32 features as six parts in bf16, which it holds in addition: 4 + 6 · 2 bytes.
        feature_bytes = 16 if itemsize == 4 else itemsize
        # Gradients are in fp32, and each process has a statistic of every text.
        return gathered * columns // world_size * (dim * (feature_bytes + 4) + 4 * gathered)

    if size(world_size) <= GATHERED_BYTES:
        return predicted(world_size)
    most = max(GATHERED_BYTES, GATHERED_SHARE * memory)
    fitting = [1, *(gathered for gathered in (machine, world_size) if size(gathered) <= most)]
    return min(map(predicted, fitting), key=lambda exchange: exchange.seconds)


def _joined(gathered: Tensor, counts: tuple[int, ...]) -> Tensor:
    """[B, ...]: the rows of all processes, without the padding of `padded`."""
    if min(counts) == max(counts):
        return gathered.flatten(0, 1)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def _empty(features: Tensor) -> Tensor:
    """Memory for the gradient of the features, in the dtype of the logits."""
    return torch.empty(features.shape, dtype=accumulate_dtype(features), device=features.device)
