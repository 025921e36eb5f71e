"""The trainer on GPUs: the same parity as on CPUs, over NCCL, in fp32 and bf16. Run with ``pytest -m gpu``."""

from __future__ import annotations

import models
import pytest
import torch
from conftest import Ranks
from test_parity import MODELS, VARIANTS, check
from test_trainer import trainer_for
from transformers import AutoModel

pytestmark = pytest.mark.gpu

CELLS = [(objective, variant, steps) for objective in MODELS for variant in VARIANTS for steps in (1, 2)]


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fp32_gradients_equal_one_process(ranks, world_size, backend):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    check(ranks, world_size, CELLS, {"use_cpu": False, "backend": backend}, backend="nccl", tolerance=5e-5, floor=1e-6)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bf16_gradients_are_within_its_rounding(ranks, world_size, backend):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    options = {"use_cpu": False, "bf16": True, "backend": backend}
    cells = [cell for cell in CELLS if cell[1] != "dropout"]  # attention draws other masks in bf16 than in fp32
    check(ranks, world_size, cells, options, backend="nccl", tolerance=0.05, floor=5e-3)


@pytest.mark.parametrize("options", [{"retain_graphs": "3"}, {"retain_graphs": "auto"}, {"offload_window": True}])
def test_options_do_not_change_gradients(ranks, options):
    world_size = min(2, torch.cuda.device_count())
    cells = [(objective, variant, 4) for objective in MODELS for variant in ("plain", "dropout", "frozen image")]
    check(ranks, world_size, cells, {"use_cpu": False, **options}, backend="nccl", tolerance=5e-5, floor=1e-6)


@pytest.fixture
def fresh_ranks():
    """DTensor remembers groups by name, and finds none in processes that have left one."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize("retain", ["1", "3"])
def test_fsdp2_gradients_equal_one_process(fresh_ranks, retain):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    cells = [(objective, variant, steps) for objective in MODELS for variant in VARIANTS for steps in (1, 4)]
    cells = [cell for cell in cells if cell[1] != "dropout"]  # FSDP's own forwards come without the batch's name
    options = {"use_cpu": False, "fsdp": True, "retain_graphs": retain}
    check(fresh_ranks, 2, cells, options, backend="nccl", tolerance=5e-5, floor=1e-6)


def rank_fsdp_checkpoint(rank: int, world_size: int, folder: str, name: str) -> float:
    trainer = trainer_for(
        f"{folder}/{name}",
        getattr(models, name)(),
        models.Pairs(64),
        use_cpu=False,
        fsdp=True,
        learning_rate=1e-2,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        eval_dataset=models.Pairs(13),
    )
    trainer.train()
    trainer.save_model(f"{folder}/{name}/last")
    metrics = trainer.evaluate()
    return metrics["eval_loss"]


def rank_evaluate(rank: int, world_size: int, folder: str) -> float:
    model = AutoModel.from_pretrained(f"{folder}/last")
    trainer = trainer_for(f"{folder}/plain", model, eval_dataset=models.Pairs(13), use_cpu=False)
    return trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_fsdp2_checkpoints_have_the_stock_shapes(fresh_ranks, tmp_path, name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    expected, other = fresh_ranks.run(rank_fsdp_checkpoint, 2, str(tmp_path), name, backend="nccl")
    assert expected == other
    fresh = getattr(models, name)(seed=3)
    loaded, info = type(fresh).from_pretrained(tmp_path / name / "last", output_loading_info=True)
    assert not info["mismatched_keys"]
    assert not info["missing_keys"]
    assert loaded.logit_scale.shape == fresh.logit_scale.shape
    assert fresh_ranks.run(rank_evaluate, 1, str(tmp_path / name), backend="nccl") == [
        pytest.approx(expected, rel=1e-4)
    ]
