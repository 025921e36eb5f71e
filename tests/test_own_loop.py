"""`cached_backward` in a plain loop gives the gradient of one process that holds the micro-batches of all processes."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from helpers import models
from helpers.guides import block_of, replaced
from helpers.numerics import relative_error
from helpers.pictures import picture
from helpers.processors import clip_processor
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_infcl import ImageTextDataset, cached_backward, contrastive_loss
from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder

ROWS = 24


README_LOOP = block_of("README.md", "cached_backward(")
GUIDE_LOOP = block_of("hf_infcl/loss/README.md", "DataLoader(")


def model_for(objective: str) -> Any:
    model = models.clip() if objective == "softmax" else models.siglip()
    DualEncoder(model).initialise_sigmoid()
    return model


def expected(objective: str) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of one process that holds all rows."""
    model = model_for(objective)
    encoder = DualEncoder(model)
    embeds = encoder.embed(model, models.Pairs(ROWS).batch())
    loss = reference.contrastive_loss(*embeds, *encoder.scale_and_bias(), objective=objective)
    loss.sum().backward()
    return loss.item(), gradients(model)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def windows(rank: int, world_size: int, count: int) -> list[dict[str, Tensor]]:
    """This process's micro-batches."""
    parts = torch.arange(ROWS).chunk(world_size)[rank].chunk(count)
    return [models.Pairs(ROWS).batch(part) for part in parts]


def check(seen: tuple[float, dict[str, Tensor]], objective: str) -> None:
    loss, truth = expected(objective)
    whole = torch.stack([g.norm() for g in truth.values()]).norm()
    assert seen[0] == pytest.approx(loss, rel=1e-5)
    assert seen[1].keys() == truth.keys()
    for name, gradient in truth.items():
        assert (seen[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * whole, name


def rank_readme(rank: int, world_size: int) -> tuple[float, dict[str, Tensor]]:
    model, steps = model_for("softmax"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: steps.append(gradients(model)))
    nothing = SimpleNamespace(set_epoch=lambda epoch: None)
    names = {
        "ddp": DistributedDataParallel(model),
        "loader": windows(rank, world_size, 4),
        "optimizer": optimizer,
        "epochs": 1,
        **{"sampler": nothing, "dataset": nothing},
    }
    exec(README_LOOP, names)
    (step,) = steps
    return names["value"].item(), step


def test_the_readme_s_loop(ranks):
    for seen in ranks.run(rank_readme, 2, always_ring=True):
        check(seen, "softmax")


def rank_guide(rank: int, world_size: int) -> list[list[str]]:
    """The captions, in their order, of two epochs of the guide's loop and then of two epochs of the README's loop."""
    captions = [[f"{'abcdef'[row // 4]} {'abcd'[row % 4]} {last}" for last in "stuvwxyz"] for row in range(24)]
    rows = {"image": [picture(row, (20, 24)) for row in range(24)], "caption": captions}
    names: dict[str, Any] = {
        "ddp": DistributedDataParallel(models.clip()),
        "dataset": ImageTextDataset(Dataset.from_dict(rows)),
        "processor": clip_processor(),
        "epochs": 2,
    }
    names["optimizer"] = torch.optim.SGD(names["ddp"].parameters(), lr=0.1)
    seen: list[list[str]] = [[]]

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            seen[-1] += names["processor"].tokenizer.batch_decode(kwargs["input_ids"], skip_special_tokens=True)

    names["ddp"].register_forward_pre_hook(note, with_kwargs=True)
    exec(replaced(GUIDE_LOOP, {"batch_size=64": "batch_size=3"}), names)
    seen.append([])
    exec(README_LOOP, names)
    return [epoch for loop in seen for epoch in (loop[:12], loop[12:])]


def test_the_guides_loops_draw_other_captions_in_each_epoch(ranks):
    epochs = [sorted(itertools.chain(*parts)) for parts in zip(*ranks.run(rank_guide, 2), strict=True)]
    for captions in epochs:
        assert len({caption[:3] for caption in captions}) == 24  # every image once
    assert epochs[0] != epochs[1]
    assert epochs[2:] == epochs[:2]


def rank_loop(
    rank: int, world_size: int, objective: str, count: int, retain: int, accelerated: bool
) -> tuple[float, dict[str, Tensor]]:
    model, options = model_for(objective), {}
    if accelerated:
        accelerator = Accelerator(cpu=True)
        wrapped = accelerator.prepare(model)
        options["backward"] = accelerator.backward
        assert isinstance(wrapped, DistributedDataParallel)
    else:
        wrapped = DistributedDataParallel(model)

    encode, loss = partial(outputs_of, wrapped), partial(with_exponential, objective=objective)
    options |= {"parameters": DualEncoder(model).temperature_parameters, "retain_graphs": retain}
    value = cached_backward(wrapped, windows(rank, world_size, count), encode, loss, **options)
    return value.item(), gradients(model)


@pytest.mark.parametrize(
    ("world_size", "objective", "count", "retain", "accelerated"),
    [
        (1, "softmax", 3, 1, False),
        (1, "sigmoid", 3, 3, True),
        (2, "softmax", 1, 1, False),
        (2, "sigmoid", 3, 9, False),
        (2, "softmax", 3, 2, True),
    ],
)
def test_a_window_s_gradient_is_that_of_one_process(ranks, world_size, objective, count, retain, accelerated):
    for seen in ranks.run(rank_loop, world_size, objective, count, retain, accelerated):
        check(seen, objective)


def with_exponential(images: Tensor, texts: Tensor, scale: Tensor, *bias: Tensor, **options: Any) -> Tensor:
    """The loss, as in the README."""
    return contrastive_loss(images, texts, scale.exp(), *bias, **options)


def outputs_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    outputs = model(**batch)
    return outputs.image_embeds, outputs.text_embeds


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.tower(x), self.tower(x.flip(0))


def test_wrong_uses_are_refused():
    towers, batches = Towers(), [torch.randn(5, 4), torch.randn(5, 4)]

    def forgets_the_scale(images: Tensor, texts: Tensor) -> Tensor:
        return contrastive_loss(images, texts, towers.scale.exp())

    with pytest.raises(ValueError, match=r"a tensor of shape \[\] that requires a gradient"):
        cached_backward(towers, batches, towers, forgets_the_scale)
    assert all(p.grad is None for p in towers.parameters())
    loss = partial(contrastive_loss, logit_scale=1.0)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        cached_backward(towers, [], towers, loss)
    with pytest.raises(ValueError, match="got a DataParallel"):
        cached_backward(nn.DataParallel(towers), batches, towers, loss)
    dividing = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps, which is 2"):
        cached_backward(towers, batches, towers, loss, backward=dividing.backward)


@pytest.mark.parametrize("name", ["pair_ids", "caption_image", "labels"])
def test_inputs_that_the_loss_does_not_get_are_refused(name):
    model = models.clip()
    batches = [{**models.Pairs(ROWS).batch(part), name: part // 2} for part in torch.arange(ROWS).chunk(2)]
    encode = partial(outputs_of, model)
    with pytest.raises(ValueError, match=f"The micro-batches have {name}, which the loss does not get"):
        cached_backward(model, batches, encode, with_exponential, [model.logit_scale])
    assert all(p.grad is None for p in model.parameters())


def test_pair_ids_may_be_a_feature():
    model, ids = models.clip(), torch.arange(ROWS) // 2
    batches = [{**models.Pairs(ROWS).batch(part), "pair_ids": ids[part]} for part in torch.arange(ROWS).chunk(3)]

    def encode(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        outputs = model(pixel_values=batch["pixel_values"], input_ids=batch["input_ids"])
        return outputs.image_embeds, outputs.text_embeds, batch["pair_ids"]

    def loss(images: Tensor, texts: Tensor, pair_ids: Tensor, scale: Tensor) -> Tensor:
        return contrastive_loss(images, texts, scale.exp(), pair_ids=pair_ids)

    value = cached_backward(model, batches, encode, loss, [model.logit_scale])
    embeds = DualEncoder(model).embed(model, models.Pairs(ROWS).batch())
    whole = contrastive_loss(*embeds, model.logit_scale.exp(), pair_ids=ids)
    assert value.item() == pytest.approx(whole.item(), rel=1e-5)


def test_a_token_without_an_embedding_is_refused():
    model = models.clip()
    batch = models.Pairs(ROWS).batch()
    batch["input_ids"][3, 1] = 78
    with pytest.raises(ValueError, match="has the token 78, but the model has 64 token embeddings, from 0 to 63"):
        cached_backward(model, [models.Pairs(ROWS).batch(), batch], lambda _: (), lambda: torch.zeros(()))


def test_a_scaled_backward_scales_every_gradient():
    towers, batches = Towers(), [torch.randn(5, 4), torch.randn(5, 4)]
    given = (towers, batches, towers, with_exponential, [towers.scale])
    cached_backward(*given)
    plain = gradients(towers)
    towers.zero_grad()
    cached_backward(*given, backward=lambda scalar: (8 * scalar).backward())
    for name, gradient in gradients(towers).items():
        assert relative_error(gradient, 8 * plain[name]) < 1e-6
