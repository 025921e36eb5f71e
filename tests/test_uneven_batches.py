"""Processes with different numbers of images, against plain torch on the whole batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_infcl.loss import contrastive_loss, reference

DIM, SCALE, BIAS = 12, 9.0, -3.0
COUNTS = {2: [5, 2], 3: [1, 4, 6]}  # images on each process
STRATEGIES = ("ring", "disco", "local", "gather")
KINDS = ("pairs", "ids", "captions")


def batch(rank: int, counts: list[int], kind: str) -> dict[str, Any]:
    """This process's part of a batch, or the whole batch with rank -1."""
    generator = torch.Generator().manual_seed(sum(counts))
    several = 2 if kind == "captions" else 1
    images = F.normalize(torch.randn(sum(counts), DIM, generator=generator), dim=1)
    texts = F.normalize(torch.randn(several * sum(counts), DIM, generator=generator), dim=1)
    negatives = F.normalize(torch.randn(2 * len(counts), DIM, generator=generator), dim=1)
    ids = torch.arange(sum(counts)) // 3
    first, last = (0, sum(counts)) if rank < 0 else (sum(counts[:rank]), sum(counts[: rank + 1]))
    part: dict[str, Any] = {"image_embeds": images[first:last], "text_embeds": texts[several * first : several * last]}
    part["negative_texts"] = negatives if rank < 0 else negatives[2 * rank : 2 * rank + 2]
    if kind == "ids":
        part["pair_ids"] = ids[first:last]
    if kind == "captions":
        part |= {"image_ids": ids[first:last], "text_ids": ids.repeat_interleave(2)[2 * first : 2 * last]}
    return part


def rank_gradients(rank: int, world_size: int) -> list[tuple[Tensor, ...]]:
    found = []
    for kind in KINDS:
        for objective in ("softmax", "sigmoid"):
            for strategy in STRATEGIES:
                part = batch(rank, COUNTS[world_size], kind)
                inputs = [part["image_embeds"], part["text_embeds"], part["negative_texts"]]
                scalars = [torch.tensor(SCALE), torch.tensor(BIAS)]
                for tensor in (*inputs, *scalars):
                    tensor.requires_grad_()
                loss = contrastive_loss(
                    **part, logit_scale=scalars[0], logit_bias=scalars[1], objective=objective, strategy=strategy
                )
                found.append((loss.detach(), *torch.autograd.grad(loss, (*inputs, *scalars))))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_may_have_different_numbers_of_images(ranks, world_size):
    by_rank = ranks.run(rank_gradients, world_size, always_ring=True)
    number = 0
    for kind in KINDS:
        for objective in ("softmax", "sigmoid"):
            whole = batch(-1, COUNTS[world_size], kind)
            inputs = [whole["image_embeds"], whole["text_embeds"], whole["negative_texts"]]
            scalars = [torch.tensor(SCALE), torch.tensor(BIAS)]
            for tensor in (*inputs, *scalars):
                tensor.requires_grad_()
            loss = reference.contrastive_loss(
                **whole, logit_scale=scalars[0], logit_bias=scalars[1], objective=objective
            )
            plain = torch.autograd.grad(loss, (*inputs, *scalars), allow_unused=True, materialize_grads=True)
            for strategy in STRATEGIES:
                parts = [results[number] for results in by_rank]
                number += 1
                torch.testing.assert_close(parts[0][0], loss.detach(), rtol=1e-5, atol=1e-6)
                # The gradient of the sum of the returned losses over the processes.
                for place, gradient in enumerate(plain, 1):
                    each = [part[place] for part in parts]
                    found = torch.cat(each) if place < 4 else torch.stack(each).sum()
                    error = (found / world_size - gradient).norm()
                    assert error <= 1e-5 * gradient.norm() + 1e-6, (kind, objective, strategy, place)
