"""The strategies by which processes share the logits of a batch, and the ring in which blocks travel around them.

Transfers of the ring are point-to-point. Each one starts before the computation that hides it and is waited for
afterwards. With NCCL, waiting only orders streams and never blocks the host. A single process is a ring of one, without
transfers.

How processes share the logits of a batch: which logits each process computes and what the processes exchange.

Each of W processes holds some of the images and some of the texts of the batch, its `Side`s. Every strategy computes
the same statistics and gradients for them; strategies differ in memory and traffic. With b images and b texts on each
process and B = W·b:

| strategy | logits of a process | communication | memory beside tiles |
|---|---|---|---|
| ring (Inf-CL, arXiv 2410.17243) | W blocks of b×b, one after another | texts and gradients, around the ring | O(b·D) |
| disco (DisCo-CLIP, arXiv 2304.08480) | one block of b×B | texts gathered, their gradients reduced | O(B·D) |
| local (OpenCLIP's local loss) | b×B for images, B×b for texts | both gathered, both gradients reduced | O(B·D) |
| gather (CLIP) | all B×B | both gathered, no gradients | O(B·D) |

`select_strategy` computes a ring of small texts as disco. The words block, diagonal and log-odds are explained in
`hf_infcl.kernels`. The losses in `hf_infcl.loss.one_positive` and `hf_infcl.loss.several_positives` pass the function
that computes a block.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..kernels.torch_backend import accumulate_dtype
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


GATHERED_BYTES = 256 << 20  # a ring gathers its texts up to this size, a constant, so that its memory stays O(b·D)

Rows = tuple[Any, ...]  # features [b, D], and vectors [b] or None that the kernels take beside them
Statistics = tuple[Tensor, ...]  # [b] each
Combine = Callable[..., Any]  # combine(a, b, out=a): `torch.add` or `torch.logaddexp`


class Side(NamedTuple):
    """The images of this process, or its texts: the rows or the columns of blocks."""

    rows: Rows
    counts: tuple[int, ...]  # the number of rows on each process


class StatisticsBlock(Protocol):
    """Computes the statistics of a block's rows and of its columns."""

    def __call__(self, x: Rows, y: Rows, diagonal: int | None) -> tuple[Statistics, Statistics]: ...


class GradientsBlock(Protocol):
    """Computes the gradients of a block's rows and columns (None: not wanted), and returns some scalars.

    The gradients replace the content of grad_x and grad_y, or are added to it if ``accumulate``.
    """

    def __call__(
        self, x: Rows, y: Rows, diagonal: int | None, grad_x: Tensor | None, grad_y: Tensor | None, accumulate: bool
    ) -> tuple[Tensor, ...]: ...


class Gradients(NamedTuple):
    """The gradients of this process's rows and columns, in fp32 or fp64."""

    scalars: tuple[Tensor, ...]  # sums over this process's blocks; the processes' sums add up to the whole
    x: Tensor | None  # [b, D]; None if not wanted
    y: Tensor | None


class Sides(Protocol):
    """The sides for the gradients of the cross entropies of x (``losses_x``), of y (``losses_y``), or of both."""

    def __call__(self, losses_x: bool = True, losses_y: bool = True) -> tuple[Side, Side]: ...


class Strategy(ABC):
    """Computes statistics and gradients together with the other processes, which must make the same calls.

    Where a method takes or returns columns y or their statistics, these are the columns that `columns` returns.

    Attributes:
        transposes: whether the texts are the rows of blocks as well.
        recordable: whether `Processes.perform` makes all collectives, so that the kernels between them can be recorded.
    """

    transposes = False
    recordable = True

    def __init__(self, processes: Processes, backend: str) -> None:
        self.processes, self.backend = processes, backend

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
    def statistics(
        self, block: StatisticsBlock, combine: Sequence[Combine], x: Side, y: Side, want_y: bool = True
    ) -> tuple[Statistics, Statistics]:
        """The statistics of this process's rows x over the columns of all processes, and of the columns y.

        Args:
            combine: for each statistic, the function that combines its values from two blocks.
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


class RingStrategy(Strategy):
    """Inf-CL: texts travel around a ring, one block at a time. One trip serves both directions of the loss.

    The statistics and gradients of a block travel with it and return to its process; that process adds its own part of
    the gradients at the end. Transfers overlap with the computation of the current block. All blocks are padded to the
    size of the largest.

    The softmax loss takes four products of matrices: one for the statistics, one that recomputes the logits, and two
    for the gradients. The sigmoid loss takes three.
    """

    recordable = False

    def __init__(self, processes: Processes, backend: str) -> None:
        super().__init__(processes, backend)
        self._ring = Ring(processes)

    def _blocks(self, side: Side) -> Iterator[tuple[int | None, Rows]]:
        """Blocks of all processes' texts, as (the ``diagonal`` of the block, its rows)."""
        size = max(side.counts)
        for source, held in self._ring.rotate(*(None if t is None else padded(t, size) for t in side.rows)):
            rows = tuple(None if t is None else t[: side.counts[source]] for t in held)
            yield (0 if source == self.processes.rank else None), rows

    def statistics(
        self, block: StatisticsBlock, combine: Sequence[Combine], x: Side, y: Side, want_y: bool = True
    ) -> tuple[Statistics, Statistics]:
        stats_x: Statistics = ()
        reductions = [RingReduction(self._ring, c, max(y.counts)) for c in combine] if want_y else []
        for diagonal, columns in self._blocks(y):
            parts_x, parts_y = block(x.rows, columns, diagonal)
            stats_x = tuple(c(a, b) for c, a, b in zip(combine, stats_x, parts_x, strict=True)) if stats_x else parts_x
            for reduction, part in zip(reductions, parts_y, strict=False):
                reduction.add(part)
        return stats_x, tuple(reduction.result()[: len(y.rows[0])] for reduction in reductions)

    def gradients(self, block: GradientsBlock, x: Side, y: Side, want_x: bool, want_y: bool) -> Gradients:
        several = self.processes.world_size > 1
        grad_x, grad_y = (_empty(side.rows[0]) if want else None for side, want in ((x, want_x), (y, want_y)))
        scalars = []

        def own_block(start: int, stop: int) -> None:
            rows = tuple(None if t is None else t[start:stop] for t in x.rows)
            part = None if grad_x is None else grad_x[start:stop]
            scalars.append(block(rows, y.rows, start, part, grad_y, start > 0))

        # The first half of this process's block overlaps the first transfer of texts, and the second half overlaps the
        # last transfer of gradients, which bring the sums of the other processes home. A lone process has no halves.
        images = len(x.rows[0])
        half = (images + 1) // 2 if several else images
        if grad_x is not None and several:
            grad_x[half:] = 0  # the first half overwrites grad_y and its own rows of grad_x; all else is added
        travelling = RingReduction(self._ring, torch.add, max(y.counts))
        for diagonal, columns in self._blocks(y):
            if diagonal is not None:
                own_block(0, half)
                continue
            part = _zeros(columns[0]) if want_y else None
            scalars.append(block(x.rows, columns, None, grad_x, part, True))
            if part is not None:
                travelling.add(part)
        if half < images:
            own_block(half, images)
        if grad_y is not None and several:
            grad_y += travelling.result()[: len(grad_y)]
        return Gradients(tuple(_total(parts) for parts in zip(*scalars, strict=True)), grad_x, grad_y)


class DiscoStrategy(Strategy):
    """DisCo-CLIP: all texts form one block. The gradients of images are complete at once; those of texts are reduced.

    The paper all-reduces the gradients of all embeddings. A reduce-scatter instead gives each process only the rows of
    its own texts, which suffices, at half the traffic. This strategy takes as many matrix products as the ring.
    """

    def columns(self, side: Side) -> Side:
        return Side(self.gather(side), side.counts)

    def of_this_process(self, values: Tensor, counts: tuple[int, ...]) -> Tensor:
        return values[self.place(counts)]

    def statistics(
        self, block: StatisticsBlock, combine: Sequence[Combine], x: Side, y: Side, want_y: bool = True
    ) -> tuple[Statistics, Statistics]:
        stats_x, stats_y = block(x.rows, y.rows, self.place(y.counts).start)
        if self.processes.world_size == 1 or not want_y:
            return stats_x, stats_y if want_y else ()
        # Gathering the parts of all processes takes less time than reducing them and gathering the results.
        parts = self.processes.gather_all(*stats_y)  # [world_size, B] each
        return stats_x, tuple(_REDUCED[c](part, 0) for c, part in zip(combine, parts, strict=True))

    def gradients(self, block: GradientsBlock, x: Side, y: Side, want_x: bool, want_y: bool) -> Gradients:
        grad_x, part = (_empty(side.rows[0]) if want else None for side, want in ((x, want_x), (y, want_y)))
        scalars = block(x.rows, y.rows, self.place(y.counts).start, grad_x, part, False)
        return Gradients(scalars, grad_x, None if part is None else self._scatter(part, y.counts))

    def _scatter(self, part: Tensor, counts: tuple[int, ...]) -> Tensor:
        """[b, D]: the sum over the processes of their parts [B, D] for this process's columns."""
        if min(counts) != max(counts):
            part = torch.cat([padded(rows, max(counts)) for rows in part.split(counts)])
        return self.processes.scatter_sum(part)[: counts[self.processes.rank]]


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

    def statistics(
        self, block: StatisticsBlock, combine: Sequence[Combine], x: Side, y: Side, want_y: bool = True
    ) -> tuple[Statistics, Statistics]:
        def row_statistics(rows: Side, columns: Side) -> Statistics:
            return block(rows.rows, self.gather(columns), self.place(rows.counts).start)[0]

        return row_statistics(x, y), row_statistics(y, x) if want_y else ()

    def softmax_gradients(self, block: GradientsBlock, sides: Sides, want_x: bool, want_y: bool) -> Gradients:
        x, y = sides(losses_y=False)
        from_x = self.gradients(block, x, y, want_x, want_y)
        x, y = sides(losses_x=False)
        from_y = self.gradients(block, y, x, want_y, want_x)  # with x and y exchanged
        return Gradients(
            tuple(a + b for a, b in zip(from_x.scalars, from_y.scalars, strict=True)),
            from_x.x + from_y.y if from_x.x is not None and from_y.y is not None else None,
            from_x.y + from_y.x if from_x.y is not None and from_y.x is not None else None,
        )


class GatherStrategy(Strategy):
    """CLIP: every process gathers all images and texts and computes the whole loss, so no gradients travel.

    The gradients and the sigmoid loss use only the rows and columns of this process's images and texts.
    """

    transposes = True

    def statistics(
        self, block: StatisticsBlock, combine: Sequence[Combine], x: Side, y: Side, want_y: bool = True
    ) -> tuple[Statistics, Statistics]:
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


def select_strategy(name: str, processes: Processes, backend: str, texts: Tensor, count: int) -> Strategy:
    """Selects the strategy by name, with disco in place of a ring whose texts and gradients fit `GATHERED_BYTES`.

    A small block takes longer to launch than to compute, and a ring of W processes launches W blocks.

    Args:
        texts: the texts of this process, in the form in which they are exchanged.
        count: the number of texts on all processes.
    """
    gathered = gathered_bytes(count, texts.shape[1], texts.element_size(), processes.world_size)
    if name == "ring" and processes.world_size > 1 and gathered <= GATHERED_BYTES:
        name = "disco"
    return STRATEGIES[name](processes, backend)


def gathered_bytes(texts: int, dim: int, itemsize: int, world_size: int) -> int:
    """The bytes that a process needs to gather all texts, [texts, dim], with their gradients and statistics.

    Args:
        itemsize: bytes of one value of the features.
    """
    # Triton multiplies fp32 features as six parts in bf16, which it holds in addition: 4 + 6 · 2 bytes.
    feature_bytes = 16 if itemsize == 4 else itemsize
    return texts * (dim * (feature_bytes + 4) + 4 * world_size)  # gradients in fp32; a statistic from each process


_REDUCED: dict[Combine, Callable[[Tensor, int], Tensor]] = {torch.add: torch.sum, torch.logaddexp: torch.logsumexp}


def _joined(gathered: Tensor, counts: tuple[int, ...]) -> Tensor:
    """[B, ...]: the rows of all processes, without the padding of `padded`."""
    if min(counts) == max(counts):
        return gathered.flatten(0, 1)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def _total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of scalars. For a single scalar it launches no kernel."""
    return functools.reduce(torch.add, parts)


def _empty(features: Tensor) -> Tensor:
    """Memory for the gradient of the features, in the dtype of the logits."""
    return torch.empty(features.shape, dtype=accumulate_dtype(features), device=features.device)


def _zeros(features: Tensor) -> Tensor:
    return _empty(features).zero_()
