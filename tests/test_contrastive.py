"""`contrastive_loss` gives the loss and gradients of the whole batch, with any strategy and number of processes."""

import inspect
import itertools
import os
from collections.abc import Iterable
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from helpers.numerics import LargestTensor, features, relative_error, run
from helpers.processes import on_ranks

from hf_infcl import ContrastiveLoss, contrastive_loss
from hf_infcl.kernels import torch_backend as tiled
from hf_infcl.loss import contrastive, reference, strategies
from hf_infcl.loss.contrastive import local_contrastive_loss
from hf_infcl.loss.strategies import STRATEGIES, Ring
from hf_infcl.processes.collectives import Processes


def shard(t: Any, rank: int, world_size: int) -> Any:
    """This rank's rows of a tensor of the whole batch."""
    return None if t is None else t.chunk(world_size)[rank]


def weighted(function: Any, *args: Any, weight: float, **options: Any) -> Any:
    return weight * function(*args, **options)


def rank_contract(rank: int, world_size: int, cases: list[tuple]) -> None:
    """On every rank the loss is that of the whole batch, and so is a parameter's gradient when averaged over the ranks.

    The gradient of an embedding is that of the sum of the losses: world_size times that of the whole batch.
    """
    for objective, strategy, b, dtype, with_ids, weight in cases:
        x, y = features(b * world_size, 24, dtype=dtype)
        ids = torch.arange(len(x)) // 2 * 3 if with_ids else None  # every id occurs twice, sometimes on two processes
        options = {"objective": objective, "pair_ids": ids, "weight": weight}
        whole_batch = x, y, 50.0, -5.0, torch.float64
        truth, (grad_x, grad_y, *scalars) = run(partial(weighted, reference.contrastive_loss), *whole_batch, **options)
        options |= {"pair_ids": shard(ids, rank, world_size), "strategy": strategy}
        mine = shard(x, rank, world_size), shard(y, rank, world_size), 50.0, -5.0, dtype
        loss, gradients = run(partial(weighted, contrastive_loss), *mine, **options)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-10
        assert relative_error(loss, truth) < tolerance
        for gradient, whole in zip(gradients[:2], (grad_x, grad_y), strict=True):
            error = gradient.double() / world_size - shard(whole, rank, world_size)
            assert error.norm() <= tolerance * whole.norm(), (objective, strategy, b, dtype, with_ids)
        for gradient, exact in zip(gradients[2:], scalars, strict=True):
            mean = gradient.clone()
            dist.all_reduce(mean)
            assert abs(mean / world_size - exact) <= 2 * tolerance * max(1, abs(exact))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_loss_and_gradients_are_those_of_the_whole_batch(ranks, world_size):
    cases = [
        (objective, strategy, b, dtype, with_ids, weight)
        for objective in ("softmax", "sigmoid")
        for strategy in STRATEGIES
        for b, weight in ((1, 1.0), (7, 3.0))
        for dtype in (torch.float32, torch.float64)
        for with_ids in (False, True)
    ]
    ranks.run(rank_contract, world_size, cases, always_ring=True)


def rank_one_way(rank: int, world_size: int, strategies: Iterable[str] = STRATEGIES) -> None:
    """Processes of unequal rows and negatives, against one process with all of them."""
    rows, hard = [3 + 2 * r for r in range(world_size)], [2 * r for r in range(world_size)]
    x, y = features(sum(rows), 24)
    negatives, _ = features(sum(hard), 24, seed=9)
    ids = torch.arange(sum(rows)) // 2
    for strategy, with_ids, with_negatives in itertools.product(strategies, (False, True), (False, True)):
        whole = [t.double().requires_grad_() for t in (x, y, torch.tensor(30.0), negatives)]
        options: dict[str, Any] = {"directions": "image_to_text"}
        extra = {"negative_texts": whole[3]} if with_negatives else {}
        truth = reference.contrastive_loss(*whole[:3], pair_ids=ids if with_ids else None, **options, **extra)
        wanted = whole if with_negatives and sum(hard) else whole[:3]
        expected = torch.autograd.grad(truth, wanted)
        of_rank = [x.split(rows)[rank], y.split(rows)[rank], torch.tensor(30.0), negatives.split(hard)[rank]]
        leaves = [t.clone().requires_grad_() for t in of_rank]
        options |= {"strategy": strategy, "pair_ids": ids.split(rows)[rank] if with_ids else None}
        extra = {"negative_texts": leaves[3]} if with_negatives else {}
        loss = contrastive_loss(*leaves[:3], **options, **extra)
        assert relative_error(loss, truth) < 1e-6
        got = torch.autograd.grad(loss, leaves[: len(wanted)])
        parts = [(0, rows), (1, rows), (3, hard)]
        for place, counts in parts[: 3 if len(wanted) == 4 else 2]:
            error = got[place].double() / world_size - expected[place].split(counts)[rank]
            assert error.norm() <= 1e-5 * expected[place].norm(), (strategy, with_ids, with_negatives, place)
        mean = got[2].clone()
        dist.all_reduce(mean)
        assert abs(mean / world_size - expected[2]) < 1e-5


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_direction_alone(ranks, world_size):
    """Only images have a cross entropy, as anchors of embedders of text do."""
    ranks.run(rank_one_way, world_size, always_ring=True)


def test_the_mean_of_each_direction_is_the_loss_of_both():
    x, y = features(8, 16)
    one, back = (contrastive_loss(a, b, 20.0, directions="image_to_text") for a, b in ((x, y), (y, x)))
    torch.testing.assert_close((one + back) / 2, contrastive_loss(x, y, 20.0))
    assert abs(one - back) > 1e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_fp64_keeps_its_digits_where_the_loss_is_large(objective, strategy):
    """Terms log(1 + exp(o)) with o from 20 to 35, which differ from o in fp64 but not in fp32."""
    x, y = features(12, 16, dtype=torch.float64)
    batch = (x, -y, 40.0, 0.0) if objective == "softmax" else (x, y, 1.0, 25.0)
    loss, gradients = run(contrastive_loss, *batch, torch.float64, objective=objective, strategy=strategy)
    truth, expected = run(reference.contrastive_loss, *batch, torch.float64, objective=objective)
    assert 20 < truth < 35 * len(x)
    assert relative_error(loss, truth) < 1e-14
    for gradient, exact in zip(gradients[:3], expected[:3], strict=True):
        assert relative_error(gradient, exact) < 1e-14


@on_ranks(2)
def test_a_ring_gathers_small_texts(rank, world_size):
    # The bytes of three texts on each process, of their gradients and of each process's statistics.
    limit = world_size * 3 * (24 * (16 + 4) + 4 * world_size)
    for b, travels in ((4, True), (3, False)):
        rotate = mock.patch.object(Ring, "rotate", autospec=True, side_effect=Ring.rotate)
        with mock.patch.object(strategies, "GATHERED_BYTES", limit), rotate as rotated:
            rank_contract(rank, world_size, [("softmax", "ring", b, torch.float32, True, 1.0)])
        assert rotated.called == travels


@on_ranks(4)
def test_a_ring_gathers_what_fits_on_machines_of_two(rank, world_size):
    def choice(limit: int, machine: str = "2") -> tuple[int, int]:
        environment = mock.patch.dict(os.environ, HF_INFCL_RING_GROUP=machine)
        unknown = mock.patch.object(strategies, "_machines", WeakKeyDictionary())
        with environment, unknown, mock.patch.object(strategies, "GATHERED_BYTES", limit):
            rank_contract(rank, world_size, [("softmax", "ring", 4, torch.float32, True, 1.0)])
            return strategies.machines_of(Processes(), torch.device("cpu")).chosen[:2]

    of_two, of_four = (w * 4 * (24 * (16 + 4) + 4 * w) for w in (2, 4))
    assert [choice(limit) for limit in (of_two - 1, of_two, of_four - 1, of_four)] == [(4, 1), (2, 2), (2, 2), (1, 4)]
    assert choice(of_two, str(1 + rank // 2)) == (4, 1), "machines of one and of two"
    assert choice(of_two, "3") == (4, 1)
    with pytest.raises(RuntimeError, match=r"rank 1: HF_INFCL_RING_GROUP .* number of processes, got 'two'"):
        choice(of_two, "two" if rank == 1 else "2")
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    for group, processes in ((groups[rank // 2], 2), (groups[2 + rank % 2], 1)):
        with mock.patch.dict(os.environ, HF_INFCL_RING_GROUP="2"):
            assert strategies.machines_of(Processes(group), torch.device("cpu")).processes == processes


@on_ranks(4, always_ring=True)
def test_groups_smaller_than_the_default_group(rank, world_size):
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]  # their ranks differ from those of the default group
    group = groups[0 if rank % 2 else 1]
    x, y = features(6, 8, seed=rank % 2)
    member = rank // 2
    expected = reference.contrastive_loss(x, y, 10.0)
    loss = contrastive_loss(shard(x, member, 2), shard(y, member, 2), 10.0, process_group=group)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks(always_ring=True)
def test_only_wanted_gradients(rank, world_size):
    x, y = features(4 * world_size, 8)
    for objective, strategy in itertools.product(("softmax", "sigmoid"), STRATEGIES):
        leaves = [t.clone().requires_grad_() for t in (x, y, torch.tensor(9.0))]
        expected = torch.autograd.grad(reference.contrastive_loss(*leaves, objective=objective), leaves)
        mine = shard(x, rank, world_size), shard(y, rank, world_size), torch.tensor(9.0)
        options = {"objective": objective, "strategy": strategy}
        for wanted in itertools.product((False, True), repeat=3):
            inputs = [t.clone().requires_grad_(want) for t, want in zip(mine, wanted, strict=True)]
            with torch.no_grad():
                loss = contrastive_loss(*inputs, **options)
            if not any(wanted):
                assert not contrastive_loss(*inputs, **options).requires_grad
                continue
            seen = contrastive_loss(*inputs, **options)
            torch.testing.assert_close(seen, loss)
            seen.backward()
            assert [t.grad is not None for t in inputs] == list(wanted)
            for t, whole in zip(inputs[:2], expected[:2], strict=True):
                assert t.grad is None or relative_error(t.grad, world_size * shard(whole, rank, world_size)) < 1e-5
            if wanted[2]:
                mean = inputs[2].grad / world_size
                dist.all_reduce(mean)
                torch.testing.assert_close(mean, expected[2])


def rank_memory(rank: int, world_size: int, objective: str) -> int:
    x, y = (t.requires_grad_() for t in features(32, 64, seed=rank))
    with mock.patch.object(tiled, "TILE_ELEMENTS", 64), LargestTensor() as seen:
        contrastive_loss(x, y, 10.0, 0.0, objective=objective).backward()
    return seen.elements


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_memory_per_process_does_not_grow_with_the_ring(ranks, objective):
    for world_size in (1, 2, 4):
        elements = ranks.run(rank_memory, world_size, objective, always_ring=True)
        assert max(elements) == 32 * 64, "O(b·D), never O(B·D)"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["softmax_gradients", "sigmoid_block"])
def test_no_gradients_are_computed_without_grad_mode(monkeypatch, mode, name):
    asked, compute = [], getattr(tiled, name)

    def watched(*arguments: Any) -> Any:
        given = inspect.signature(compute).bind(*arguments).arguments
        asked.extend((given["gradients"].grad_x, given["gradients"].grad_y))
        return compute(*arguments)

    monkeypatch.setattr(tiled, name, watched)
    leaves = [t.requires_grad_() for t in (*features(6, 8), torch.tensor(9.0), torch.tensor(-3.0))]
    objective = name.partition("_")[0]
    with mode():
        contrastive_loss(*leaves, objective=objective)
    assert not any(isinstance(t, torch.Tensor) for t in asked)
    contrastive_loss(*leaves, objective=objective)
    assert any(isinstance(t, torch.Tensor) for t in asked)


def test_autocast_does_not_touch_the_loss():
    x, y = features(64, 16)
    expected = contrastive_loss(x, y, 100.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert contrastive_loss(x, y, 100.0).item() == expected.item()
        inputs = [t.clone().requires_grad_() for t in (x, y)]
        loss = contrastive_loss(*inputs, 100.0)
        loss.backward()
    plain = [t.clone().requires_grad_() for t in (x, y)]
    contrastive_loss(*plain, 100.0).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, plain, strict=True))


@pytest.mark.parametrize("loss", [contrastive_loss, local_contrastive_loss, ContrastiveLoss()])
def test_a_gradient_of_the_gradient_is_refused(loss):
    x, y = (t.requires_grad_() for t in features(6, 4, dtype=torch.float64))
    value, again = loss(x, y, 2.0), loss(x, y, 2.0)
    first = torch.autograd.grad(value, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*reference\.contrastive_loss"):
        torch.autograd.grad(again, x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(value, x), first)
    # The loss that the message names gives the gradient of a penalty on the gradient.
    (gradient,) = torch.autograd.grad(reference.contrastive_loss(x, y, 2.0), x, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), x)[0].norm() > 0


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_gradient_of_the_gradient_of_a_compiled_loss_is_refused(wanted):
    torch._dynamo.reset()
    inputs = features(6, 4, dtype=torch.float64)
    inputs[wanted].requires_grad_()
    loss = torch.compile(contrastive_loss, backend="aot_eager", fullgraph=True)(*inputs, 2.0)
    (gradient,) = torch.autograd.grad(loss, inputs[wanted], create_graph=True)
    (expected,) = torch.autograd.grad(reference.contrastive_loss(*inputs, 2.0), inputs[wanted])
    torch.testing.assert_close(gradient, expected)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(loss + gradient.square().sum(), inputs[wanted])


@on_ranks(2)
def test_the_local_loss_needs_no_other_process(rank, world_size):
    if rank == 0:
        x, y = features(5, 8)

        def shared(*settings: Any) -> Any:
            assert Processes().world_size == world_size, "a loss in another thread would lack rank 1"
            return strategies.select_strategy(*settings)

        with mock.patch.object(contrastive, "select_strategy", shared):
            torch.testing.assert_close(local_contrastive_loss(x, y, 10.0), reference.contrastive_loss(x, y, 10.0))
        with pytest.raises(TypeError, match="process_group"):
            local_contrastive_loss(x, y, 10.0, process_group=dist.group.WORLD)


@on_ranks(2)
def test_the_loss_of_several_processes_can_be_compiled(rank, world_size):
    x, y = features(5, 8, seed=rank)
    loss, gradients = run(contrastive_loss, x, y, 20.0, -5.0, torch.float32)
    compiled, others = run(torch.compile(contrastive_loss, backend="eager"), x, y, 20.0, -5.0, torch.float32)
    for tensor, expected in zip((compiled, *others), (loss, *gradients), strict=True):
        torch.testing.assert_close(tensor, expected)
