"""FSDP2: the contract of test_parity.py, and checkpoints."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import models
from helpers.open_clip_models import same_of_open_clip
from helpers.parity import MODELS, Gradients, check
from helpers.processes import on_ranks
from helpers.processors import clip_processor
from helpers.shards import write_tars
from helpers.streams import collate, stream_of
from helpers.trainers import StopAt, trained, trainer_for
from helpers.wrappers import needs_fsdp
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModel, Trainer

from hf_infcl import InfCLTrainer
from hf_infcl.trainer.checkpoints import MANIFEST_NAME

pytestmark = needs_fsdp

# Without dropout: FSDP's own forwards do not pass the tokens by which recorded random states are found.
CELLS = [
    ("softmax", "plain", 1),
    ("sigmoid", "plain", 4),
    ("softmax", "pair_ids", 4),
    ("sigmoid", "frozen image", 2),
    ("softmax", "frozen text", 4),
    ("softmax", "replay", 2),
    ("sigmoid", "replay", 4),
]
CELLS += [(*cell, {"texts_at_once": 2}) for cell in CELLS if cell[2] > 2]
CELLS += [(objective, "lora", 2) for objective in MODELS]
OPTIONS = [
    {"retain_graphs": "3"},
    {"gradient_checkpointing": True},
    {"fsdp_config": {"activation_checkpointing": True}},
]
CELLS += [(objective, "plain", 4, options) for options in OPTIONS for objective in MODELS]


class PlainNames(Gradients):
    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        assert all(isinstance(p, DTensor) for p in model.parameters()), "nothing was sharded"
        super().on_pre_optimizer_step(*args, model=model, **kwargs)
        self.seen = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in self.seen.items()}


def test_gradients_equal_one_process_with_the_whole_batch(fresh_ranks, backend):
    bounds = {"tolerance": 5e-5, "floor": 1e-6} if backend == "nccl" else {}
    options = {"use_cpu": False, "fsdp": True, "gradients": PlainNames}
    check(fresh_ranks, 2, CELLS, options, backend=backend, **bounds)


def rank_losses(
    rank: int, world_size: int, folder: str, sharded: bool, options: dict[str, Any]
) -> list[tuple[float, float]]:
    wrapper = {"fsdp": True, "use_cpu": False} if sharded else {}
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": models.Pairs(10)}
    options = {"learning_rate": 0.01, "max_steps": 4, **evaluating, **options, **wrapper}
    trainer = trained(trainer_for(folder, models.clip(), models.Pairs(64), **options))
    assert all(isinstance(p, DTensor) == sharded for p in trainer.model.parameters()), "an evaluation leaves them whole"
    return [(logs["loss"], logs["grad_norm"]) for logs in trainer.state.log_history if "loss" in logs]


def test_steps_are_those_of_ddp(fresh_ranks, ranks, tmp_path, backend):
    """If both passes left out other patches, the weights and the next losses would differ."""
    sharded, whole = (
        group.run(rank_losses, 2, str(tmp_path), group is fresh_ranks, {"patch_dropout": 0.5}, backend=backend)[0]
        for group in (fresh_ranks, ranks)
    )
    assert len(whole) == 4
    assert sum(sharded, ()) == pytest.approx(sum(whole, ()), rel=1e-4)


def rank_checkpoint(rank: int, world_size: int, folder: str, name: str) -> float:
    """Trains without and with evaluations and checkpoints, which change nothing."""
    losses = []
    for strategy in ("no", "steps"):
        options = {
            "use_cpu": False,
            "fsdp": True,
            "learning_rate": 1e-2,
            "max_steps": 4,
            "eval_dataset": models.Pairs(13),
        }
        options |= {"eval_strategy": strategy, "eval_steps": 1, "save_strategy": strategy, "save_steps": 2}
        trainer = trained(trainer_for(f"{folder}/{name}", getattr(models, name)(), models.Pairs(64), **options))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
    trainer.save_model(f"{folder}/{name}/last")
    return trainer.evaluate()["eval_loss"]


def rank_evaluate(rank: int, world_size: int, folder: str) -> float:
    model = AutoModel.from_pretrained(f"{folder}/last")
    trainer = trainer_for(f"{folder}/plain", model, eval_dataset=models.Pairs(13), use_cpu=False)
    return trainer.evaluate()["eval_loss"]


@on_ranks(2, fresh=True)
def test_the_temperature_alone_and_a_model_of_one_s_own_are_refused(rank, world_size, tmp_path):
    model = models.clip().requires_grad_(False)
    model.logit_scale.requires_grad_(True)
    with pytest.raises(ValueError, match="No embedding depends on a trained parameter"):
        trainer_for(tmp_path, model, use_cpu=False, fsdp=True)
    for build in models.OWN.values():
        with pytest.raises(ValueError, match="is not a model of transformers"):
            trainer_for(tmp_path, build(), use_cpu=False, fsdp=True)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_evaluations_change_nothing_and_checkpoints_have_the_stock_shapes(fresh_ranks, tmp_path, backend, name):
    expected, other = fresh_ranks.run(rank_checkpoint, 2, str(tmp_path), name, backend=backend, always_ring=True)
    assert expected == other
    fresh = getattr(models, name)(seed=3)
    loaded, info = type(fresh).from_pretrained(tmp_path / name / "last", output_loading_info=True)
    assert not info["mismatched_keys"]
    assert not info["missing_keys"]
    assert loaded.logit_scale.shape == fresh.logit_scale.shape
    evaluated = fresh_ranks.run(rank_evaluate, 1, str(tmp_path / name), backend=backend)
    assert evaluated == [pytest.approx(expected, rel=1e-4)]


# Every process writes its part of the checkpoint.
SHARDED = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


def rank_resume(rank: int, world_size: int, folder: str, shards: str = "") -> list[str]:
    """Trains on the shards, or on a map-style data set if there are none."""
    data = {"data_collator": collate} if shards else {}

    def run(seed: int) -> InfCLTrainer:
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2, **data}
        options |= {"processing_class": clip_processor(), "save_formats": ["transformers", "open_clip"]}
        pairs = stream_of(shards) if shards else models.Pairs(64)
        return trainer_for(folder, models.clip(0.3, seed), pairs, use_cpu=False, **SHARDED, **options)

    def weights(trainer: InfCLTrainer) -> list[torch.Tensor]:
        return [p.full_tensor() for p in trainer.model.parameters()]

    whole = trained(run(seed=0))
    expected = weights(whole)
    resumed = trained(run(seed=5), resume=f"{folder}/checkpoint-2")
    assert resumed.steps_trained == 2
    assert [e.get("stream_samples") for e in whole.state.log_history] == [
        e.get("stream_samples") for e in resumed.state.log_history
    ]
    assert all(torch.equal(now, before) for now, before in zip(weights(resumed), expected, strict=True))
    with mock.patch.object(Trainer, "_save", autospec=True, side_effect=Trainer._save) as written:
        resumed.save_model(f"{folder}/last")
    assert written.called == (rank == 0), "older releases write on every process that calls it"
    files = sorted(json.loads(Path(folder, "checkpoint-4", MANIFEST_NAME).read_text())["files"])
    shard = next(name for name in files if name.endswith("__1_0.distcp"))
    torch.distributed.barrier()
    if rank == 0:
        path = Path(folder, "checkpoint-4", shard)
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    torch.distributed.barrier()
    with pytest.raises(ValueError, match=f"cannot be resumed from: .*{shard} has changed"):
        run(seed=5).train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    return files


def test_a_checkpoint_holds_every_rank_s_files_and_goes_on(fresh_ranks, tmp_path, backend):
    files, _ = fresh_ranks.run(rank_resume, 2, str(tmp_path), backend=backend, always_ring=True)
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(files)
    model, info = models.tf.CLIPModel.from_pretrained(tmp_path / "last", output_loading_info=True)
    assert not info["missing_keys"], "the model that is saved at the end is whole"
    assert same_of_open_clip(tmp_path / "last", model)


def test_a_stream_goes_on_where_it_was_interrupted(fresh_ranks, tmp_path, backend):
    write_tars(tmp_path / "shards", [20] * 8)
    job = (rank_resume, 2, str(tmp_path / "run"), str(tmp_path / "shards"))
    fresh_ranks.run(*job, backend=backend, always_ring=True)


def rank_adapters(rank: int, world_size: int, folder: str) -> None:
    """Adapters with a trained logit_scale are resumed, or refused where accelerate saves the adapters only."""
    import peft

    def run(**sharding: Any) -> InfCLTrainer:
        torch.manual_seed(0)
        model = peft.get_peft_model(models.clip(), peft.LoraConfig(r=2, target_modules=r".*text_model.*q_proj"))
        model.logit_scale.requires_grad_(True)
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
        return trainer_for(folder, model, models.Pairs(64), use_cpu=False, **sharding, **options)

    whole, resumed = run(fsdp=True), run(fsdp=True)
    whole.train()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    for now, before in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(now.full_tensor(), before.full_tensor())
    with pytest.raises(ValueError, match=r"saves the adapters of peft only, .* train as well: \S*logit_scale\."):
        run(**SHARDED)


def test_adapters_are_resumed_with_a_trained_logit_scale(fresh_ranks, tmp_path, backend):
    pytest.importorskip("peft")
    fresh_ranks.run(rank_adapters, 2, str(tmp_path), backend=backend)
    saved = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors")["base_model.model.logit_scale"]
    assert saved.shape == ()
    assert saved != models.clip().logit_scale


@on_ranks(2, fresh=True)
def test_a_window_that_is_not_finite_is_skipped(rank, world_size, tmp_path):
    options = {"fsdp": True, "max_steps": 3, "learning_rate": 1e-2, "train_sampling_strategy": "sequential"}
    bad, good = models.Pairs(48), models.Pairs(48)
    bad.images[19] = torch.nan  # in the second of three windows, which the other run lacks
    for name in ("images", "tokens"):
        values = getattr(good, name)
        setattr(good, name, torch.cat([values[:16], values[32:], values[:16]]))
    trainer = trainer_for(tmp_path, data=bad, use_cpu=False, skip_nonfinite=1, **options)
    expected = trainer_for(tmp_path, data=good, use_cpu=False, callbacks=[StopAt(2)], **options)
    for run in (trainer, expected):
        run.train()
    assert trainer.window_step.checks.skipped == 1
    assert trainer.lr_scheduler.last_epoch == expected.lr_scheduler.last_epoch == 2
    for one, other in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
