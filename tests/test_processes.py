"""Processes that share a batch: every collective gives the result of one process that holds the tensors of all."""

import logging
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.processes import on_ranks

from hf_infcl.processes.collectives import MOST_NUMBERS, Processes, alone, announce_failure, is_lost_connection
from hf_infcl.processes.signals import ended_with_launcher


def test_a_port_in_use_is_told_in_one_sentence(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        told = (
            rf"cannot meet at localhost:{port} \(MASTER_ADDR and MASTER_PORT\): another program uses that port\. Choose"
        )
        with pytest.raises(ValueError, match=told), ended_with_launcher():
            dist.TCPStore("localhost", port, is_master=True)


def rank_collectives(rank: int, world_size: int) -> None:
    processes = Processes()
    assert (processes.rank, processes.world_size) == (rank, world_size)
    g = torch.Generator().manual_seed(0)
    tensors = torch.randn(world_size, 2 * world_size, 3, generator=g, dtype=torch.float64)  # one for each rank
    mine, before, my_rows = tensors[rank], tensors[rank].clone(), slice(2 * rank, 2 * rank + 2)
    torch.testing.assert_close(processes.sum(mine), tensors.sum(0))
    assert torch.equal(processes.gather(mine), tensors)
    torch.testing.assert_close(processes.scatter_sum(mine), tensors.sum(0)[my_rows])
    both = processes.gather_all(mine, torch.tensor([rank]))
    assert torch.equal(both[0], tensors)
    assert both[1].tolist() == [[r] for r in range(world_size)]
    one, _ = processes.gather_all(torch.tensor(rank / 2).expand(1), mine)
    assert one.tolist() == [[r / 2] for r in range(world_size)]
    made: list[Any] = []
    with processes.redirected(lambda collective: made.append(collective) or collective(group=None)):
        numbers = torch.tensor([rank, -1], dtype=torch.int32)
        features, floats, ids = processes.gather_all(mine, numbers / 2, numbers)
    assert torch.equal(features, tensors)
    assert ids.tolist() == [[r, -1] for r in range(world_size)]
    assert floats.tolist() == [[r / 2, -0.5] for r in range(world_size)]
    tensors_sent = [len(collective.args[0]) for collective in made]
    assert tensors_sent == ([2] if world_size > 1 else []), "vectors of four bytes did not travel together"
    assert torch.equal(mine, before), "the caller's tensor was written to"
    assert processes.gather_objects(f"rank {rank}") == [f"rank {r}" for r in range(world_size)]
    assert processes.agree([rank, 0.5]) == [[r, 0.5] for r in range(world_size)]
    # A process may pass fewer numbers than the others, which then see zeros.
    assert processes.agree([7.0] * (1 + rank))[0] == [7.0] + [0.0] * rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives(ranks, world_size):
    ranks.run(rank_collectives, world_size)


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    rank_collectives(0, 1)


@on_ranks(2)
def test_alone_needs_no_other_process(rank, world_size):
    if rank == 0:  # a collective of the default group would wait for rank 1
        processes = Processes(alone=True)
        assert (processes.rank, processes.world_size) == (0, 1)
        assert processes.sum(torch.ones(1)).item() == 1
        assert processes.agree([3.0]) == [[3.0]]
        with alone():
            with alone():
                pass
            assert Processes().world_size == 1, "an inner context ends the outer one"
    assert Processes().world_size == world_size


@on_ranks(2)
def test_a_process_outside_the_group_is_refused(rank, world_size):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not a member"):
            Processes(group)
    else:
        assert Processes(group).world_size == 1


@pytest.mark.parametrize("announced", [False, True])
@on_ranks(3)
def test_a_failure_stops_every_process_with_its_reason(rank, world_size, announced):
    processes = Processes()
    if rank == 1 and announced:
        announce_failure(MemoryError("out of paper"))  # returns, so that its caller raises the error itself
    else:
        numbers = [] if rank == 1 else [1.0] * MOST_NUMBERS
        reason = r"^All ranks stop because of an error:\n  rank 1: MemoryError: out of paper$"
        with pytest.raises(RuntimeError, match=reason):
            processes.agree(numbers, failure="MemoryError: out of paper" if rank == 1 else "")
    assert processes.agree([]) == [[]] * world_size, "nothing is left hanging"


def test_errors_of_other_origin_are_not_taken_for_lost_connections():
    """`test_lost_processes.py` covers errors of lost connections."""
    assert not is_lost_connection(RuntimeError("the file gloomy.png is damaged"))
    assert is_lost_connection(RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:5] Connection closed by peer"))


def test_one_process_has_nobody_to_announce_a_failure_to(caplog):
    with caplog.at_level(logging.DEBUG):
        announce_failure(MemoryError("out of paper"))
    assert not caplog.records
