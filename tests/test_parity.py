"""The contract: however a global batch is split, the gradients are those of one process that holds the whole batch.

Every cell of the table runs the real `InfCLTrainer` for one step, under real DDP if there are several ranks, and
compares the gradients that reach the optimizer with plain autograd through `reference.contrastive_loss`.
"""

import pytest
import torch
from helpers.parity import MODELS, VARIANTS, check, train
from torch import Tensor, nn

from hf_infcl.loss.strategies import STRATEGIES

CELLS = [(o, v, k) for o in MODELS for v in VARIANTS for k in (1, 2, 4)]
CELLS += [("softmax", "lengths", 4), ("softmax", "lengths", 2)]
CELLS += [(o, v, k) for o in MODELS for v, k in (("replay", 2), ("replay", 4))]
CELLS += [("softmax", "patches", 1), ("sigmoid", "patches", 4), ("softmax", "lora patches", 2)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_equal_one_process_with_the_whole_batch(ranks, world_size):
    check(ranks, world_size, CELLS, {})


TOGETHER = [(o, v, 4) for o in MODELS for v in ("plain", "frozen image", "frozen text")]
TOGETHER += [("softmax", "pair_ids", 4), ("softmax", "lengths", 4), ("softmax", "replay", 4)]


@pytest.mark.parametrize(("world_size", "at_once", "graphs"), [(1, 2, "1"), (1, 4, "2"), (2, 2, "1"), (3, 4, "2")])
def test_texts_of_several_micro_batches_may_be_encoded_together(ranks, world_size, at_once, graphs):
    check(ranks, world_size, TOGETHER, {"texts_at_once": at_once, "retain_graphs": graphs})


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "ring"])
def test_every_strategy_gives_the_same_gradients(ranks, strategy):
    check(ranks, 2, [(o, v, 2) for o in MODELS for v in ("pair_ids", "frozen image")], {"strategy": strategy})


def rank_trajectory(rank: int, world_size: int, objective: str, steps: int) -> tuple[list[float], Tensor]:
    trainer = train(objective, "plain", world_size, steps, max_steps=4, optim="sgd", learning_rate=0.1, max_grad_norm=1)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


@pytest.mark.parametrize("objective", MODELS)
def test_one_trajectory_for_every_split_of_the_global_batch(ranks, objective):
    # Two windows per epoch, reshuffled in the second epoch: the rows of a window must not depend on the split.
    splits = [(1, 1), (1, 4), (2, 1), (2, 3), (4, 2)]
    runs = [ranks.run(rank_trajectory, size, objective, steps, always_ring=True)[0] for size, steps in splits]
    first_losses, first_parameters = runs[0]
    assert len(first_losses) == 4
    assert first_losses[0] != pytest.approx(first_losses[-1], rel=1e-3), "nothing was learnt: the test says nothing"
    for split, (losses, parameters) in zip(splits, runs, strict=True):
        assert losses == pytest.approx(first_losses, rel=1e-5), split
        torch.testing.assert_close(parameters, first_parameters, rtol=0, atol=1e-5, msg=str(split))
