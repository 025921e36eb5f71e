"""How several processes evaluate together: rows gathered in unequal numbers, and errors that reach every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor

from ..processes import Processes, announce_failure


def gather_rows(tensors: Any) -> Any:
    """Every process's rows, in the order of the ranks, of one tensor or a tuple of them.

    Args:
        tensors: [n, ...] each; n may differ between the processes and may be 0.

    Raises:
        OtherRankFailedError: on every process, if one of them announced a failure instead.
    """
    several = tensors if isinstance(tensors, tuple) else (tensors,)
    processes = Processes()
    numbers = processes.agree([len(tensor) for tensor in several])  # [world_size][tensors]
    gathered = []
    for index, tensor in enumerate(several):
        rows = [int(of_rank[index]) for of_rank in numbers]
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        blocks = processes.gather(padded)
        gathered.append(torch.cat([block[:n] for block, n in zip(blocks, rows, strict=True)]))
    return tuple(gathered) if isinstance(tensors, tuple) else gathered[0]


def rows_to_keep(batch_size: int, rank: int) -> int:
    """How many rows of this rank's batch are rows of the data set.

    accelerate gives all ranks batches of one size and repeats rows to fill the last ones. The rows that are not
    repeated come first: those of rank 0, then those of rank 1 and so on.
    """
    state = GradientState()
    if not state.end_of_dataloader or state.remainder <= 0:
        return batch_size
    return min(max(state.remainder - rank * batch_size, 0), batch_size)


def encode_share(prompts: list[str], encode: Callable[[list[str]], Tensor], batch_size: int) -> Tensor:
    """This rank's share of the embeddings of all prompts, as many rows on every rank.

    All ranks encode equally often, since under FSDP a forward communicates. The shares follow each other in the order
    of the ranks, and the last prompt is repeated to fill the last ones: gathered, the first ``len(prompts)`` rows are
    the embeddings of all prompts in their order.
    """
    processes = Processes()
    size = -(-len(prompts) // processes.world_size)
    filled = prompts + prompts[-1:] * (size * processes.world_size - len(prompts))
    share = filled[processes.rank * size : (processes.rank + 1) * size]
    return torch.cat([encode(share[start : start + batch_size]) for start in range(0, size, batch_size)])


@contextmanager
def failures_announced() -> Iterator[None]:
    """The other processes learn of an error inside in their next `Processes.agree`."""
    try:
        yield
    except Exception as error:
        announce_failure(error)
        raise


class AnnouncingDataLoader:
    """A data loader whose errors stop all processes, which must come to `Processes.agree` once for each batch."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader

    def __iter__(self) -> Iterator[Any]:
        with failures_announced():
            batches = iter(self._dataloader)
        while True:
            with failures_announced():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)
