"""The ring's moves, told apart from any loss."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_infcl.loss.ring import Ring


def rank_travel(rank: int, world_size: int) -> None:
    ring = Ring()
    own = torch.full((3, 2), float(rank))
    ids = torch.full((3,), rank)
    counts = ring.traveller(torch.add)
    largest = ring.traveller(torch.logaddexp)
    sources, addresses = [], set()
    for source, (block, none, block_ids) in ring.rotate(own, None, ids):
        assert none is None
        assert (block == source).all()
        assert (block_ids == source).all()
        assert block_ids.dtype == torch.int64
        sources.append(source)
        addresses.add(block.data_ptr())
        counts.add(torch.full((3,), 10.0**rank * (1 + source)))  # who visited, and whom
        largest.add(torch.full((2,), -torch.inf if rank else float(source)))
    assert sources == [(rank - step) % world_size for step in range(world_size)]
    assert len(addresses) <= 3, "this process's block and two in flight"
    assert (own == rank).all(), "the caller's tensor was written to"
    visits = sum(10.0**r for r in range(world_size))
    assert (counts.home() == visits * (1 + rank)).all()
    assert (largest.home() == rank).all()
    before = torch.tensor([1.0, rank])
    assert ring.sum(before).tolist() == [world_size, sum(range(world_size))]
    assert before.tolist() == [1.0, rank]
    assert ring.gather(ids).tolist() == [[r] * 3 for r in range(world_size)]
    assert ring.gather_text(f"rank {rank}") == [f"rank {r}" for r in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_blocks_visit_everyone_and_sums_come_home(ranks, world_size):
    ranks.run(rank_travel, world_size)


def test_one_process_without_a_group():
    assert not dist.is_initialized()
    rank_travel(0, 1)


def rank_alone(rank: int, world_size: int) -> None:
    ring = Ring.alone()
    assert (ring.rank, ring.world_size) == (0, 1)
    if rank == 0:  # nobody else takes part
        assert ring.sum(torch.ones(1)).item() == 1


def test_alone_needs_nobody(ranks):
    ranks.run(rank_alone, 2)


def rank_outside(rank: int, world_size: int) -> None:
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not a member"):
            Ring(group)
    else:
        assert Ring(group).world_size == 1


def test_a_process_outside_the_group_is_told(ranks):
    ranks.run(rank_outside, 2)


def rank_agree(rank: int, world_size: int) -> None:
    ring = Ring()
    assert ring.agree([rank, 0.5]) == [[r, 0.5] for r in range(world_size)]
    with pytest.raises(RuntimeError, match=r"a process cannot go on:\n  rank 1: out of paper$"):
        ring.agree([1.0] if rank != 1 else (), failure="out of paper" if rank == 1 else "")
    assert ring.agree([]) == [[]] * world_size, "everyone has heard, and could go on"


def test_a_failure_reaches_whoever_agrees_next(ranks):
    ranks.run(rank_agree, 3)
