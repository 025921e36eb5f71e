"""The ring: each process visits every block once, and sums that travel with a block return to its owner."""

import itertools

import pytest
import test_contrastive
import test_several_positives
import torch
import torch.distributed as dist
from helpers.numerics import features, relative_error
from helpers.processes import on_ranks, ring_of

from hf_infcl import contrastive_loss
from hf_infcl.loss import reference, strategies
from hf_infcl.loss.strategies import Ring, RingReduction
from hf_infcl.processes.collectives import Processes


def rank_travel(rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
    ring = Ring(Processes(group))
    block = torch.full((3, 2), float(rank))
    ids = torch.full((3,), rank)
    visits = RingReduction(torch.add, 3)
    others = RingReduction(torch.add, 3)
    largest = RingReduction(torch.logaddexp, 2)
    sources, addresses = [], set()
    for source, (held, none, held_ids) in ring.rotate((block, None, ids), (visits, others, largest)):
        assert none is None
        assert (held == source).all()
        assert (held_ids == source).all()
        assert held_ids.dtype == torch.int64
        sources.append(source)
        addresses.add(held.data_ptr())
        if len(sources) > world_size:
            continue
        visits.add(torch.full((3,), 10.0**rank * (1 + source)))  # one digit for each process that holds the block
        if source != rank:
            others.add(torch.full((3,), 10.0**rank * (1 + source)))
        largest.add(torch.full((2,), -torch.inf if rank else float(source)))
    assert sources == [(rank - step) % world_size for step in range(world_size + (world_size > 1))], "and home again"
    assert len(addresses) <= 3, "this process's block and two in flight"
    assert (block == rank).all(), "the caller's tensor was written to"
    assert (visits.result == sum(10.0**r for r in range(world_size)) * (1 + rank)).all()
    if world_size > 1:
        assert (others.result == sum(10.0**r for r in range(world_size) if r != rank) * (1 + rank)).all()
    assert (largest.result == rank).all()


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


# ---- Rings of machines ----

OBJECTIVES = ("softmax", "sigmoid")


def rank_groupings(rank: int, world_size: int) -> None:
    """Unequal rows, ids, negatives, one direction, several positives, and a gradient for one side alone."""
    for gathered in (2, 3):
        if world_size % gathered:
            continue
        with ring_of(gathered, world_size):
            pairs = [
                (objective, "ring", b, torch.float64, with_ids, 2.0)
                for objective, b, with_ids in itertools.product(OBJECTIVES, (1, 7), (False, True))
            ]
            test_contrastive.rank_contract(rank, world_size, pairs)
            test_contrastive.rank_one_way(rank, world_size, ["ring"])
            kinds = itertools.product(test_several_positives.KINDS, OBJECTIVES)
            several = [(kind, objective, "ring", 5, 50.0, torch.float64) for kind, objective in kinds]
            test_several_positives.rank_contract(rank, world_size, several)
            x, y = features(3 * world_size, 8)
            for objective, side in itertools.product(OBJECTIVES, (0, 1)):
                whole = [x.clone(), y.clone()]
                whole[side].requires_grad_()
                reference.contrastive_loss(*whole, 9.0, objective=objective).backward()
                own = [t.detach().chunk(world_size)[rank].requires_grad_(t.requires_grad) for t in whole]
                contrastive_loss(*own, 9.0, objective=objective).backward()
                expected = world_size * whole[side].grad.chunk(world_size)[rank]
                assert relative_error(own[side].grad, expected) < 1e-5
            machines = strategies.machines_of(Processes(), torch.device("cpu"))
            assert machines.chosen == (world_size // gathered, gathered, 0.0)


@pytest.mark.parametrize("world_size", [4, 6])
def test_every_grouping_gives_the_loss_and_gradients_of_the_whole_batch(ranks, world_size):
    ranks.run(rank_groupings, world_size)
