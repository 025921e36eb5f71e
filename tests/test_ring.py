"""The ring: each process visits every block once, and sums that travel with a block return to its owner."""

import pytest
import torch
import torch.distributed as dist
from helpers.processes import on_ranks

from hf_infcl.loss.strategies import Ring, RingReduction
from hf_infcl.processes.collectives import Processes


def rank_travel(rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
    ring = Ring(Processes(group))
    block = torch.full((3, 2), float(rank))
    ids = torch.full((3,), rank)
    visits = RingReduction(ring, torch.add, 3)
    others = RingReduction(ring, torch.add, 3)
    largest = RingReduction(ring, torch.logaddexp, 2)
    sources, addresses = [], set()
    for source, (held, none, held_ids) in ring.rotate(block, None, ids):
        assert none is None
        assert (held == source).all()
        assert (held_ids == source).all()
        assert held_ids.dtype == torch.int64
        sources.append(source)
        addresses.add(held.data_ptr())
        visits.add(torch.full((3,), 10.0**rank * (1 + source)))  # one digit for each process that holds the block
        if source != rank:
            others.add(torch.full((3,), 10.0**rank * (1 + source)))
        largest.add(torch.full((2,), -torch.inf if rank else float(source)))
    assert sources == [(rank - step) % world_size for step in range(world_size)]
    assert len(addresses) <= 3, "this process's block and two in flight"
    assert (block == rank).all(), "the caller's tensor was written to"
    assert (visits.result() == sum(10.0**r for r in range(world_size)) * (1 + rank)).all()
    if world_size > 1:
        assert (others.result() == sum(10.0**r for r in range(world_size) if r != rank) * (1 + rank)).all()
    assert (largest.result() == rank).all()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_blocks_visit_every_process_and_reductions_return(ranks, world_size):
    ranks.run(rank_travel, world_size)


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    rank_travel(0, 1)


@on_ranks(4)
def test_a_group_smaller_than_the_default_group(rank, world_size):
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]  # their ranks differ from those of the default group
    rank_travel(rank // 2, 2, groups[0 if rank % 2 else 1])
