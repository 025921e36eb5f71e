"""``optimizer="muon"``: trainings with Muon, their resumption, and what the option cannot be combined with."""

import logging
import re
import shutil
from typing import Any

import pytest
import torch
from helpers import models
from helpers.demo import infcl
from helpers.trainers import StopAt, arguments, parameters, trained, trainer_for
from helpers.wrappers import needs_fsdp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from hf_infcl import InfCLTrainer
from hf_infcl.optim import MuonAdamW

MUON = {"optimizer": "muon", "learning_rate": 1e-3, "weight_decay": 0.1, "max_steps": 4}
RATES = {"text_learning_rate": 2e-3}  # groups with rates of their own
SAVING = {"save_strategy": "steps", "save_steps": 2}
SHORT = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


def rates(trainer: InfCLTrainer) -> dict[str, float]:
    return {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}


def weights(trainer: InfCLTrainer) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in trainer.model.parameters()]


# ---- The optimizer of a training ----


def test_one_word_selects_muon_for_the_matrices(tmp_path):
    trainer = trainer_for(tmp_path, **MUON, adam_beta2=0.98, optim_args="momentum=0.9")
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, MuonAdamW)
    assert rates(trainer) == {
        "vectors and scalars": 1e-3,
        "embeddings and convolutions": 1e-3,
        "matrices of layers": 4e-3,
    }
    settings = [(g["weight_decay"], g.get("betas"), g.get("fused"), g.get("momentum")) for g in optimizer.param_groups]
    assert settings == [(0.0, (0.9, 0.98), True, None), (0.1, (0.9, 0.98), True, None), (0.1, None, None, 0.9)]


def test_matrices_and_logit_scale_have_rates_of_their_own(tmp_path):
    own = {"logit_scale_learning_rate": 1e-5, "muon_learning_rate": 3e-3}
    trainer = trainer_for(tmp_path, **MUON, **own, optim="adamw_torch")
    assert trainer.create_optimizer().param_groups[0]["fused"] is False
    assert rates(trainer) == {
        "vectors and scalars": 1e-3,
        "embeddings and convolutions": 1e-3,
        "matrices of layers": 3e-3,
        "temperature": 1e-5,
    }


def test_patterns_and_frozen_towers(tmp_path):
    options = {"freeze": "image", "adamw_parameters": ["_projection"], "muon_parameters": ["position_embedding"]}
    trainer = trainer_for(tmp_path, **MUON, **options)
    groups = {g["name"]: (g["algorithm"], len(g["params"])) for g in trainer.create_optimizer().param_groups[1:]}
    names = [g["name"] for g in trainer.optimizer.param_groups if g["algorithm"] == "muon"]
    assert sorted(names) == ["embeddings and convolutions", "matrices of layers"]
    assert groups["matrices of layers"] == ("muon", 6)


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True}, {"torch_compile": True, "torch_compile_backend": "eager"}],
    ids=["", "bf16", "compiled"],
)
def test_a_training_changes_every_parameter_and_logs_the_rate_of_adamw(tmp_path, options):
    trainer = trainer_for(tmp_path, models.siglip(), **{**MUON, "max_steps": 2}, **options)
    before = weights(trainer)
    trainer.train()
    assert all(not torch.equal(a, b) for a, b in zip(weights(trainer), before, strict=True) if a.ndim == 2)
    assert trainer.state.log_history[0]["learning_rate"] == 1e-3


def test_matrices_are_trained_as_by_torch_muon(tmp_path):
    """The same training with torch's two optimizers, stepped one after the other."""

    class Both(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            muon.step()

    ours = trained(trainer_for(tmp_path / "ours", **MUON, lr_scheduler_type="constant"))
    model = models.clip()
    trainer = trainer_for(tmp_path, model)  # names the parameters
    groups = trainer_for(tmp_path, model, **MUON).create_optimizer().param_groups
    muon = torch.optim.Muon(
        [p for g in groups if g["algorithm"] == "muon" for p in g["params"]], 4e-3, 0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = Both([{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups[:-1]], 1e-3, fused=True)
    constant = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1.0)
    trainer = trained(trainer_for(tmp_path, model, max_steps=4, optimizers=(adamw, constant)))
    start = torch.nn.utils.parameters_to_vector(models.clip().parameters())
    change = parameters(trainer) - start
    assert (parameters(ours) - parameters(trainer)).norm() <= 0.02 * change.norm()


def test_a_skipped_window_changes_nothing(tmp_path):
    bad, good = models.Pairs(24), models.Pairs(24)
    bad.images[11] = torch.nan  # in the second of three windows, which the other run lacks
    for name in ("images", "tokens"):
        values = getattr(good, name)
        setattr(good, name, torch.cat([values[:8], values[16:], values[:8]]))
    options = {**MUON, "train_sampling_strategy": "sequential", "max_steps": 3, "lr_scheduler_type": "constant"}
    skipping = trainer_for(tmp_path / "a", data=bad, skip_nonfinite=1, **options)
    expected = trainer_for(tmp_path / "b", data=good, callbacks=[StopAt(2)], **options)
    for trainer in (skipping, expected):
        trainer.train()
    assert torch.equal(parameters(skipping), parameters(expected))


def test_the_command_prints_the_groups_and_its_card_names_them(small, tmp_path, capsys):
    infcl(*small, "--optimizer", "muon", "--learning_rate", 1e-3, "--max_steps", 1, "--warmup_steps", 1)
    printed = capsys.readouterr().out
    assert re.search(r"^parameters +updated by +tensors +values +learning rate +weight decay$", printed, re.MULTILINE)
    assert re.search(r"^matrices of layers +Muon +\d+ +[\d,]+ +0.004 +0$", printed, re.MULTILINE)
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "Muon and adamw_torch" in card
    assert re.search(r"updated by Muon \| matrices of layers \(\d+, learning rate 0.004\)", card)
    assert re.search(r"updated by AdamW \| vectors and scalars \(\d+, learning rate 0.001\); embeddings and conv", card)


# ---- Resuming, other numbers of processes ----


@pytest.mark.parametrize("first", [{}, MUON], ids=["from-adamw", "from-muon"])
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, first):
    options = {**first, **SAVING, "max_steps": 2}
    trainer_for(tmp_path, **options).train()
    other = {} if first else MUON
    with pytest.raises(ValueError, match=r"optimizer|does not fit"):
        trainer_for(tmp_path, **{**other, **SAVING, "max_steps": 4}).train(resume_from_checkpoint=True)


def rank_train(rank: int, world_size: int, folder: str, resume: bool, options: dict[str, Any]) -> list[Tensor]:
    """Trains two of four steps, or the other two, on windows of 8 pairs whatever the number of processes."""
    options = {**MUON, **SAVING, "per_device_train_batch_size": 4 // world_size, **options}
    model = models.siglip(seed=3 if resume else 0)
    trainer = trainer_for(folder, model, **options, callbacks=[] if resume else [StopAt(2)])
    trainer.train(resume_from_checkpoint=resume or None)
    assert trainer.steps_trained == 2
    return weights(trainer)


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    """Within a twentieth of the training's change: Muon's iteration magnifies the last bits of a gradient."""
    start = torch.cat([p.detach().flatten() for p in models.siglip().parameters()])
    now, then = (torch.cat([p.flatten() for p in each]) for each in (found, expected))
    assert (now - then).norm() <= 0.05 * (then - start).norm()


def test_processes_train_as_one_and_continue_its_training(ranks, tmp_path):
    one, two, both = (str(tmp_path / name) for name in ("one", "two", "both"))
    (expected,) = ranks.run(rank_train, 1, one, False, {})
    shutil.copytree(one, both)
    for folder, resume in ((two, False), (both, True)):
        if resume:
            (expected,) = ranks.run(rank_train, 1, one, True, {})
        first, second = ranks.run(rank_train, 2, folder, resume, {})
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "processes must not drift apart"
        assert_near(first, expected)


def rank_fsdp(rank: int, world_size: int, folder: str, kind: str) -> list[Tensor]:
    """Trains two steps, and the second one once more from the checkpoint."""
    options = {**MUON, **SHORT, **RATES, "use_cpu": False, "fsdp": True, "fsdp_config": {"state_dict_type": kind}}
    options["per_device_train_batch_size"] = 2
    whole, resumed = (trainer_for(folder, models.siglip(seed=seed), **options) for seed in (0, 3))
    whole.train()
    matrices = [p for g in whole.optimizer.param_groups if g["algorithm"] == "muon" for p in g["params"]]
    assert len(matrices) == 17
    assert all(isinstance(p, DTensor) for p in matrices), "nothing was sharded"
    encoder = whole.dual_encoder
    assert isinstance(encoder.temperature_parameters[0], DTensor)
    assert not encoder.looks_random(), "it was trained"
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    assert resumed.steps_trained == 1
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(whole), strict=True))
    return weights(whole)


@needs_fsdp
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_sharded_training_equals_one_process_and_goes_on_to_the_bit(fresh_ranks, tmp_path, kind):
    sharded, _ = fresh_ranks.run(rank_fsdp, 2, str(tmp_path / "sharded"), kind)
    one = trained(trainer_for(tmp_path / "one", models.siglip(), **{**MUON, **SHORT, **RATES}))
    expected = weights(one)
    assert_near([p.reshape(q.shape) for p, q in zip(sharded, expected, strict=True)], expected)


# ---- What Muon cannot be combined with ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer must be one of None, 'muon', got 'sgd'"),
        ({"muon_learning_rate": 1e-3}, "muon_learning_rate=0.001 has no effect without optimizer=muon: add"),
        ({**MUON, "optim": "sgd"}, "optim=sgd exclude each other: adamw_torch_fused or adamw_torch updates"),
        ({**MUON, "muon_learning_rate": -1.0}, "muon_learning_rate must be a finite number of at least 0, got -1.0"),
        ({**MUON, "optim_args": "momentun=0.9"}, r"takes momentum \(float\) and ns_steps \(int\).*'momentun=0.9'"),
        ({**MUON, "optim_args": "ns_steps=many"}, "got 'ns_steps=many'"),
    ],
    ids=["unknown", "without", "optim", "rate", "name", "value"],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


def test_settings_out_of_range_and_models_without_a_matrix_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"momentum must be at least 0 and less than 1, got 1\.5"):
        trainer_for(tmp_path, **MUON, optim_args="momentum=1.5").create_optimizer()
    model = models.clip().requires_grad_(False)
    model.logit_scale.requires_grad_(True)
    with pytest.raises(ValueError, match="Muon would update nothing"):
        trainer_for(tmp_path, model, **MUON).train()


def test_an_optimizer_that_was_passed_is_not_replaced(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    options = {"args": arguments(tmp_path, **MUON), "data_collator": default_collate}
    with pytest.raises(ValueError, match="optimizer apply only to an optimizer that the trainer creates"):
        InfCLTrainer(models.clip(), **options, train_dataset=models.Pairs(8), optimizers=(optimizer, None))


@pytest.mark.parametrize("build", [models.clip, models.siglip])
def test_rates_that_are_too_high_and_pretrained_weights_are_told(tmp_path, caplog, build):
    model = build()
    model.config.name_or_path = "someone/clip"
    with caplog.at_level(logging.WARNING):
        trainer_for(tmp_path, model, **MUON).create_optimizer()
    assert "was loaded" not in caplog.text, "random weights"
    torch.nn.init.constant_(model.logit_scale, 3.0)
    with caplog.at_level(logging.WARNING):
        trainer_for(tmp_path, model, **{**MUON, "learning_rate": 0.03}).create_optimizer()
    assert "Muon's learning rate of 0.12 changes every matrix by a large part" in caplog.text
    assert "was loaded from someone/clip and was trained" in caplog.text


def test_a_resumed_training_is_not_told_that_its_weights_were_trained(tmp_path, caplog):
    for resume in (None, f"{tmp_path}/checkpoint-1"):
        model = models.clip()
        model.config.name_or_path = "someone/clip"
        trainer_for(tmp_path, model, **{**MUON, **SHORT, "max_steps": 2}).train(resume_from_checkpoint=resume)
    assert "was loaded" not in caplog.text


def rank_refused(rank: int, world_size: int, folder: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_for(folder, use_cpu=False, **MUON, **options)


@needs_fsdp
def test_offloaded_parameters_are_refused(fresh_ranks, tmp_path):
    options = {"fsdp": True, "fsdp_config": {"cpu_offload": True}}
    fresh_ranks.run(rank_refused, 2, str(tmp_path), options, "would orthogonalise the parameters that FSDP offloads")
