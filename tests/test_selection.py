"""A selection of pairs: the gradient of a step is that of one batch of the pairs that it keeps."""

from typing import Any, ClassVar

import pytest
import torch
from helpers import models
from helpers.numerics import descend
from helpers.trainers import trained, trainer_for
from torch import Tensor

from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.step.extensions import PairSelection
from hf_infcl.step.grad_cache import Features
from hf_infcl.step.window import Window

BUILD = {"softmax": models.clip, "sigmoid": models.siglip}
RATE, ROWS, LONGEST = 5e-3, 48, 12
PLAIN = {"max_steps": 2, "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0, "optim": "sgd"}


class Marked(PairSelection):
    """Lets pairs take part that their ids mark: two of three, or one of three."""

    name = "marked"

    def __init__(self, of_three: int) -> None:
        self.of_three = of_three

    def select(self, window: Window, features: Features, logit_scale: Tensor, logit_bias: Tensor | None) -> Tensor:
        return torch.cat([batch["mark"] for batch in window.batches]).cpu() < self.of_three


class Pairs(models.Pairs):
    """Each image with one or several captions, and a mark from 0 to 2 that is no regular pattern.

    With ``names`` pairs have equal ids, so many different ones.
    """

    def __init__(self, captions: int = 1, names: int = 0) -> None:
        super().__init__(ROWS, longest=LONGEST)
        self.captions, self.names = captions, names
        self.others = models.Pairs(ROWS * captions, longest=LONGEST, seed=1)
        self.marks = torch.randint(0, 3, (ROWS,), generator=torch.Generator().manual_seed(2))

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"row": row, "mark": self.marks[row]}

    def collate(self, items: list[Any]) -> dict[str, Any]:
        rows = torch.tensor([item["row"] for item in items])
        texts = (rows[:, None] * self.captions + torch.arange(self.captions)).flatten()
        batch = {"pixel_values": self.images[rows], "mark": self.marks[rows]}
        batch |= {"input_ids": self.others.tokens[texts], "attention_mask": self.others.mask[texts]}
        if self.names:
            batch["pair_ids"] = rows % self.names
        if self.captions > 1:
            batch["caption_image"] = torch.arange(len(rows)).repeat_interleave(self.captions)
        return batch


class Collator:
    """`Pairs.collate`, which tells how captions are padded, so that texts are dealt out by their length."""

    text_padding: ClassVar = {"input_ids": models.TEXT["pad_token_id"], "attention_mask": 0}

    def __init__(self, data: Pairs) -> None:
        self.data = data

    def __call__(self, items: list[Any]) -> dict[str, Any]:
        return self.data.collate(items)


def train(
    folder: Any, objective: str, captions: int, of_three: int, sorts: bool, world_size: int = 1, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after two steps, and their losses."""
    data = Pairs(captions, options.pop("names", 0))
    batch: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": ROWS // 4 // world_size}
    batch |= {"texts_at_once": 1, "retain_graphs": "1"}
    more = {"equal_ids": "positive"} if captions > 1 else {}
    options = {**PLAIN, "max_logit_scale": 1e6, **batch, **more, **options, "extensions": [Marked(of_three)]}
    options["data_collator"] = Collator(data) if sorts else data.collate
    trainer = trained(trainer_for(folder, BUILD[objective](), data, **options))
    logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: p.detach().cpu().clone() for name, p in trainer.model.named_parameters()}
    return weights, logs


def expected(
    objective: str, captions: int, of_three: int, freeze: str | None = None, names: int = 0
) -> tuple[dict, list[float]]:
    model, data = BUILD[objective](), Pairs(captions, names)
    encoder = DualEncoder(model)
    encoder.initialise_sigmoid()
    encoder.freeze(freeze)
    whole = data.collate([data[row] for row in range(ROWS)])
    chosen = whole["mark"] < of_three
    losses = []
    for _ in range(2):
        images, texts = encoder.embed(model, whole)
        ids = torch.arange(ROWS)
        of_texts = ids.repeat_interleave(captions)
        kept = chosen[of_texts]
        given = {"image_ids": ids[chosen], "text_ids": of_texts[kept]} if captions > 1 else {}
        if names:
            given = {"pair_ids": whole["pair_ids"][chosen]}
        loss = reference.contrastive_loss(
            images[chosen], texts[kept], *encoder.scale_and_bias(), objective=objective, **given
        ).sum()
        loss.backward()
        losses.append(loss.item())
        descend(model.parameters(), RATE)
    return dict(model.named_parameters()), losses


def check(found: tuple, objective: str, captions: int, of_three: int, **options: Any) -> None:
    weights, losses = found
    plain, plain_losses = expected(objective, captions, of_three, **options)
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    begin = dict(BUILD[objective]().named_parameters())
    for name, parameter in plain.items():
        moved = (parameter - begin[name]).norm()
        assert (weights[name].reshape(parameter.shape) - parameter).norm() <= 1e-4 * moved + 2e-7, name


@pytest.mark.parametrize("captions", [1, 3])
@pytest.mark.parametrize(("objective", "sorts"), [("softmax", False), ("softmax", True), ("sigmoid", False)])
def test_steps_are_those_of_autograd(tmp_path, objective, captions, sorts):
    for of_three in (1, 2):
        check(train(tmp_path, objective, captions, of_three, sorts), objective, captions, of_three)


@pytest.mark.parametrize(
    "options",
    [{"freeze": "image"}, {"freeze": "text"}, {"offload_inputs": True}, {"retain_graphs": "4"}, {"texts_at_once": 3}],
    ids=str,
)
def test_other_options_of_a_step_compose(tmp_path, options):
    found = train(tmp_path, "softmax", 1, 1, True, **options)
    check(found, "softmax", 1, 1, **{name: value for name, value in options.items() if name == "freeze"})


def rank_names(rank: int, world_size: int, folder: str) -> list[tuple]:
    return [train(folder, objective, 1, 2, False, world_size, names=10) for objective in BUILD]


@pytest.mark.parametrize("world_size", [1, 2])
def test_equal_ids_of_the_pairs_that_take_part_are_excluded(ranks, tmp_path, world_size):
    for by_objective in ranks.run(rank_names, world_size, str(tmp_path)):
        for objective, found in zip(BUILD, by_objective, strict=True):
            check(found, objective, 1, 2, names=10)


def rank_train(rank: int, world_size: int, folder: str, cells: list[tuple]) -> list[tuple]:
    return [train(folder, *cell, world_size, strategy=strategy) for *cell, strategy in cells]


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_keep_different_numbers_of_pairs(ranks, tmp_path, backend, world_size):
    cells = [("softmax", 1, 1, True, "ring"), ("sigmoid", 1, 2, False, "disco"), ("softmax", 3, 2, True, "local")]
    cells += [("softmax", 1, 2, False, "gather")]
    for by_cell in ranks.run(rank_train, world_size, str(tmp_path), cells, backend=backend, always_ring=True):
        for (objective, captions, of_three, *_), found in zip(cells, by_cell, strict=True):
            check(found, objective, captions, of_three)
