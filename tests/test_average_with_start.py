"""The average of the weights before and after a training that the same trainer saves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.trainers import trainer_for
from helpers.wrappers import FSDP, wrapped
from torch import Tensor

from hf_infcl import InfCLTrainer
from hf_infcl.quality.averages import Averaged, interpolated
from hf_infcl.trainer.model_files import average_with_start, checkpoint_of_end, main_weights

SAVED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
WRAPPERS: dict[str, dict[str, Any]] = {"one": {}, "ddp": {}, "fsdp": FSDP}


def sets() -> dict[str, Any]:
    return {"pairs": models.Pairs(13)}


def averaged(
    folder: Any, model: Any = None, alpha: float | None = 0.3, **options: Any
) -> tuple[InfCLTrainer, Averaged]:
    """Trains, moves the model to an average and saves it into last/."""
    trainer = trainer_for(folder, model, models.Pairs(64), eval_dataset=sets(), **{**SAVED, **options})
    halves = {"guard": models.Pairs(5)}, {"guard": models.Pairs(7)}
    start = main_weights(trainer)
    trainer.train()
    found = average_with_start(trainer, start, sets(), halves, alpha=alpha, tolerance=1.0)
    trainer.save_model(f"{folder}/last")
    return trainer, found


def rank_averaged(rank: int, world_size: int, folder: str, wrapper: str) -> tuple[Averaged, float]:
    trainer, found = averaged(folder, models.clip(), **WRAPPERS[wrapper])
    return found, trainer.evaluate()["eval_pairs_image_retrieval_recall@1"]


def state_of(folder: Any) -> dict[str, Tensor]:
    return models.tf.CLIPModel.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("wrapper", wrapped(WRAPPERS))
def test_the_saved_model_is_the_average_of_the_start_and_the_last_checkpoint(request, tmp_path, wrapper, backend):
    groups = request.getfixturevalue("ranks" if wrapper in ("one", "ddp") else "fresh_ranks")
    job = (rank_averaged, 1 if wrapper == "one" else 2, str(tmp_path), wrapper)
    found = groups.run(*job, backend=backend, always_ring=True)
    start, end, saved = models.clip().state_dict(), *map(state_of, (tmp_path / "checkpoint-4", tmp_path / "last"))
    changed = [name for name in end if not torch.equal(start[name], end[name])]
    assert len(changed) > 10
    for name, expected in interpolated(start, end, 0.3).items():
        torch.testing.assert_close(saved[name], expected, rtol=0, atol=0, msg=name)
    assert [one.alpha for one in found[0][0].measured] == [0.0, 0.3, 1.0]
    assert all(one == found[0] for one in found)
    # What was measured of an average is what a new trainer measures of it.
    alone = trainer_for(tmp_path / "alone", models.tf.CLIPModel.from_pretrained(tmp_path / "last"))
    metrics = alone.evaluate({"pairs": models.Pairs(13)})
    both = [metrics[f"eval_pairs_{way}_retrieval_recall@1"] for way in ("image", "text")]
    assert found[0][0].at(0.3).gained == pytest.approx(sum(both) / 2)
    assert found[0][1] == pytest.approx(both[0])


def test_the_best_checkpoint_is_the_end_if_it_is_loaded(tmp_path):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "pairs_loss", "greater_is_better": True}
    trainer, _ = averaged(tmp_path, alpha=1.0, eval_strategy="steps", eval_steps=2, eval_on_start=False, **options)
    best = checkpoint_of_end(trainer)
    assert best == Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-2", "the loss falls, and the greatest was asked for"
    for name, tensor in state_of(best).items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), name


def test_what_was_trained_is_not_replaced_without_a_checkpoint_of_it(tmp_path):
    with pytest.raises(ValueError, match="No checkpoint keeps the weights at the end of the training"):
        averaged(tmp_path, save_strategy="no")


def test_measuring_averages_is_not_logged(tmp_path):
    trainer, found = averaged(tmp_path, alpha=None)
    assert len(found.measured) == 11
    assert not any("eval_pairs_loss" in entry for entry in trainer.state.log_history)
