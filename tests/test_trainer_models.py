"""Models in the trainer: what it refuses, fixes or warns about before training, and the buffers after training."""

import math
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from helpers import models
from helpers.processors import clip_processor
from helpers.trainers import arguments, trained, trainer_for
from torch.utils.data import default_collate
from transformers.trainer_utils import HPSearchBackend

from hf_infcl import InfCLTrainer


def init_of(model: Any) -> Callable[[], Any]:
    return lambda: model


# ---- Buffers ----


def rank_buffers(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    """The running means before each forward with autograd, in order: three for each of two windows."""
    torch.manual_seed(0)
    model, seen = models.groupvit(), []
    trainer = trainer_for(folder, model, data=models.Pairs(48), gradient_accumulation_steps=3)
    model.register_forward_pre_hook(
        lambda *args: seen.append(model.visual_projection[1].running_mean.clone()) if torch.is_grad_enabled() else None
    )
    trainer.train()
    return seen


def test_ranks_begin_each_window_with_the_buffers_of_rank_0(ranks, tmp_path):
    zero, one = ranks.run(rank_buffers, 2, str(tmp_path))
    assert len(zero) == len(one) == 6
    same = [torch.equal(a, b) for a, b in zip(zero, one, strict=True)]
    assert same == [True, False, False, True, False, False]
    assert not torch.equal(zero[3], zero[2]), "the third forward of the first window counts"


def test_batch_norm_is_warned_of(tmp_path, caplog):
    trainer_for(tmp_path, models.groupvit())
    assert "normalise over a micro-batch" in caplog.text


# ---- Refused ----


def test_a_model_that_was_split_while_it_was_loaded_is_refused(tmp_path):
    splits: list[dict[str, Any]] = [
        {"hf_device_map": {"vision_model": 0, "text_model": 1}},
        {"hf_device_map": {"vision_model": 0, "text_model": "cpu"}},
        {"_tp_size": 2},
    ]
    if hasattr(models.tf.CLIPModel, "is_distributed_loading_by_transformers"):  # in newer releases of transformers
        splits.append({"_is_distributed_loading_by_transformers": True})
    for attributes in splits:
        model = models.clip()
        vars(model).update(attributes)
        with pytest.raises(ValueError, match=r"CLIPModel was split while it was loaded .*train with --fsdp"):
            trainer_for(tmp_path, model)
        with pytest.raises(ValueError, match="was split"):
            trainer_for(tmp_path, model_init=init_of(model))
    model = models.clip()
    model.hf_device_map = {"": "cpu"}
    trainer_for(tmp_path, model)


@pytest.mark.parametrize(
    ("method", "instead"), [("_get_train_sampler", "get_train_dataloader"), ("compute_loss", "training_step")]
)
def test_a_subclass_s_sampler_and_loss_are_refused(tmp_path, method, instead):
    own = type("Own", (InfCLTrainer,), {method: lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match=rf"would never call Own\.{method}\. Override {instead}"):
        own(models.clip(), arguments(tmp_path), default_collate, train_dataset=models.Pairs(8))


@pytest.mark.parametrize("optimizer", ["lomo", "adalomo"])
def test_optimizers_that_step_within_the_backward_are_refused(tmp_path, optimizer):
    with pytest.raises(ValueError, match=f"optim={optimizer} is not supported: it changes the weights in every"):
        arguments(tmp_path, optim=optimizer)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"retain_graphs": "all"}, "retain_graphs must be"),
        ({"objective": "clip"}, "objective must be"),
        ({"optim": "lomo"}, "optim=lomo"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_of_a_hyperparameter_search_are_checked(tmp_path, values, message):
    trainer = trainer_for(tmp_path, model_init=init_of(models.clip()))
    trainer.hp_search_backend = HPSearchBackend.WANDB
    with pytest.raises(ValueError, match=message):
        trainer._hp_search_setup(values)  # what a search calls; the searches are other packages


# ---- Objectives and temperatures ----


def test_either_objective_trains_a_siglip(tmp_path):
    losses = {}
    for objective in (None, "softmax", "sigmoid"):
        trainer = trained(trainer_for(tmp_path, models.siglip(), objective=objective, max_steps=1))
        losses[objective] = trainer.state.log_history[0]["loss"]
    assert losses[None] == losses["sigmoid"] != losses["softmax"]


def test_the_sigmoid_objective_needs_a_bias(tmp_path):
    with pytest.raises(ValueError, match=r"CLIPModel has no logit_bias.*model\.logit_bias = torch\.nn\.Parameter"):
        trainer_for(tmp_path, objective="sigmoid")
    model = models.clip()
    model.logit_bias = torch.nn.Parameter(torch.full((1,), -10.0))
    model.logit_scale.data.fill_(math.log(10))
    trainer = trained(trainer_for(tmp_path, model, objective="sigmoid", max_steps=1, learning_rate=1e-2))
    entry = trainer.state.log_history[0]
    assert entry["loss"] < 20, "a loss of one pair among few, not of all negatives"
    assert entry["logit_bias"] != -10
    trainer.save_model(tmp_path / "saved")
    _, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert info["unexpected_keys"] == {"logit_bias"}
    assert not info["missing_keys"]


def test_a_frozen_logit_scale_is_told(tmp_path, caplog):
    model = models.clip()
    model.logit_scale.requires_grad_(False)
    trainer_for(tmp_path, model)
    assert "logit_scale is frozen, so logit_scale stays 14.28" in caplog.text
    assert ". To train it, call model.logit_scale.requires_grad_(True)." in caplog.text
    assert "peft" not in caplog.text
    caplog.clear()
    trainer_for(tmp_path, peft.get_peft_model(models.clip(), peft.LoraConfig(r=2, target_modules=["q_proj"])))
    assert "as with all that peft does not adapt. To train it beside new adapters, pass --lora_log" in caplog.text
    caplog.clear()
    trainer_for(tmp_path, models.clip())
    assert "frozen" not in caplog.text


def test_model_init_gets_the_collator_that_a_model_gets(tmp_path):
    processor = clip_processor(model_max_length=10**30)  # a tokenizer without a limit; the models accept 16 tokens
    for build in (models.clip, models.siglip):
        trainers = [
            InfCLTrainer(build(), arguments(tmp_path), processing_class=processor),
            InfCLTrainer(None, arguments(tmp_path), processing_class=processor, model_init=init_of(build())),
        ]
        for trainer in trainers:
            assert trainer.data_collator.max_length == 16
            length = trainer.data_collator.tokenize(["a"])["input_ids"].shape[1]
            assert (length == 16) == (build is models.siglip)
