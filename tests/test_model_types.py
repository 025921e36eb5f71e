"""Every model type trains: in each window the gradients are those of plain autograd on the whole global batch."""

from typing import Any, NamedTuple

import pytest
import torch
from helpers import models
from helpers.parity import FLOOR, TOLERANCE, Draws, key_of, set_random_state
from helpers.trainers import trainer_for
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainerCallback

from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder

WINDOWS, GLOBAL_BATCH = 2, 8
CPU = torch.device("cpu")
KINDS: dict[str, Any] = {**models.BUILD, **models.OWN}


class Rows(Dataset):
    """The rows of a batch, one by one."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.batch = models.batch_for(kind, WINDOWS * GLOBAL_BATCH)

    def __len__(self) -> int:
        return WINDOWS * GLOBAL_BATCH

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: values[row] for name, values in self.batch.items()}

    def micro_batch(self, key: bytes) -> dict[str, Tensor]:
        """The rows whose tokens have this key."""
        tokens = self.batch["input_ids"]
        rows = {key_of(tokens[i]): i for i in range(len(tokens))}
        width = len(key_of(tokens[0]))
        chosen = [rows[key[i : i + width]] for i in range(0, len(key), width)]
        return {name: values[chosen] for name, values in self.batch.items()}


class Window(NamedTuple):
    """The weights, gradients and micro-batches of one process before an optimizer step."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    draws: dict[bytes, list[Tensor]]  # for each micro-batch of the window, the random state of its forward


class Watch(TrainerCallback):
    def __init__(self, draws: Draws) -> None:
        self.draws, self.windows = draws, []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model = getattr(model, "module", model)
        seen = {key for window in self.windows for key in window.draws}
        self.windows.append(
            Window(
                {name: value.clone() for name, value in model.state_dict().items()},
                {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
                {key: state for key, state in self.draws.states.items() if key not in seen},
            )
        )


def rank_windows(rank: int, world_size: int, folder: str, kind: str) -> list[Window]:
    torch.manual_seed(0)
    model = KINDS[kind]()
    watch = Watch(Draws(model))
    options = {"max_steps": WINDOWS, "max_grad_norm": 0.0, "learning_rate": 0.01, "callbacks": [watch]}
    options["per_device_train_batch_size"] = GLOBAL_BATCH // world_size // 2
    trainer_for(folder, model, Rows(kind), **options).train()
    return watch.windows


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_two_windows_have_the_gradients_of_the_whole_batch(ranks, tmp_path, kind, world_size):
    by_rank = ranks.run(rank_windows, world_size, str(tmp_path), kind)
    model, data = KINDS[kind]().train(), Rows(kind)
    encoder = DualEncoder(model)
    encoder.freeze(None)
    encoded = []
    for windows in zip(*by_rank, strict=True):
        model.load_state_dict(windows[0].weights)
        model.zero_grad()
        embeds = []
        for key, state in (draw for window in windows for draw in window.draws.items()):
            set_random_state(state, CPU)
            encoded.append(data.micro_batch(key))
            embeds.append(encoder.embed(model, encoded[-1]))
        images, texts = (torch.cat(column) for column in zip(*embeds, strict=True))
        scale, bias = encoder.scale_and_bias()
        loss = reference.contrastive_loss(images, texts, scale, bias, objective=encoder.kind.objective)
        loss.sum().backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        assert whole > 1e-3, "nothing to be learnt: the test says nothing"
        for window in windows:
            assert window.gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                error = (window.gradients[name].reshape(gradient.shape) - gradient).norm()
                assert error <= TOLERANCE * gradient.norm() + FLOOR * whole, name
    assert len(by_rank[0]) == WINDOWS
    assert not all(torch.equal(*(window.weights[name] for window in by_rank[0])) for name in expected)
    tokens = torch.cat([batch["input_ids"] for batch in encoded])
    assert sorted(map(key_of, tokens)) == sorted(map(key_of, data.batch["input_ids"])), "each row once"
