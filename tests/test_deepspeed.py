"""DeepSpeed's ZeRO stages 1 and 2: the contract of test_parity.py, and checkpoints. Skipped without deepspeed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import models
from helpers.open_clip_models import same_of_open_clip
from helpers.parity import MODELS, Gradients, check
from helpers.processes import on_ranks
from helpers.processors import clip_processor
from helpers.shards import write_tars
from helpers.streams import collate, stream_of
from helpers.trainers import StopAt, trained, trainer_for
from helpers.wrappers import zero
from torch.utils.data import default_collate

from hf_infcl import InfCLTrainer

pytest.importorskip("deepspeed")

CELLS = [
    ("softmax", "plain", 1),
    ("sigmoid", "plain", 2),
    ("softmax", "dropout", 4),
    ("sigmoid", "frozen image", 4),
    ("softmax", "frozen text", 2),
    ("softmax", "pair_ids", 2),
    ("softmax", "patches", 2),
    ("sigmoid", "replay", 4),
    ("softmax", "replay own", 2),
]

RATES = {"layer_decay": 0.7, "image_learning_rate": 5e-3}  # groups with rates of their own


def config(stage: int) -> dict[str, Any]:
    # The default initial loss scale, 2^16, is meant to overflow and to be halved; here it must not overflow.
    fp16 = {"enabled": "auto", "initial_scale_power": 9}
    return zero(stage, bf16={"enabled": "auto"}, fp16=fp16)["deepspeed"]


class ZeroGradients(Gradients):
    """Keeps what ZeRO's optimizer is about to step with: it steps within the last backward of a window."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
        from deepspeed.utils import safe_get_full_grad

        zero = optimizer.optimizer
        assert isinstance(zero, DeepSpeedZeroOptimizer), type(zero)
        step = zero.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
            self.seen = {name: safe_get_full_grad(p).detach() / zero.loss_scale for name, p in parameters.items()}
            return step(*args, **kwargs)

        zero.step = watched

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


def check_zero(fresh_ranks: Any, backend: str, stage: int, world_size: int, cells: list[tuple], **options: Any) -> None:
    bounds = {"tolerance": 5e-5, "floor": 1e-6} if backend == "nccl" else {}
    bounds |= {name: options.pop(name) for name in ("tolerance", "floor") if name in options}
    options |= {"deepspeed": config(stage), "use_cpu": False, "gradients": ZeroGradients}
    check(fresh_ranks, world_size, cells, options, backend=backend, **bounds)


@pytest.mark.parametrize(("stage", "world_size"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_gradients_equal_one_process_with_the_whole_batch(fresh_ranks, backend, stage, world_size):
    check_zero(fresh_ranks, backend, stage, world_size, CELLS)


@pytest.mark.parametrize("world_size", [1, 2])
def test_texts_of_several_micro_batches_may_be_encoded_together(fresh_ranks, backend, world_size):
    cells = [(objective, variant, 4) for objective in MODELS for variant in ("plain", "frozen image")]
    check_zero(fresh_ranks, backend, 2, world_size, cells, texts_at_once=2)


def test_retained_graphs_change_nothing(fresh_ranks, backend):
    check_zero(fresh_ranks, backend, 2, 2, [(objective, "plain", 4) for objective in MODELS], retain_graphs="3")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_half_precision_is_within_its_rounding(fresh_ranks, stage, precision):
    # Unlike in test_gpu.py, the parameters are in half precision here, so logit_scale itself is rounded.
    cells = [cell for cell in CELLS if cell[1] != "dropout"]  # attention draws different masks than in fp32
    check_zero(fresh_ranks, "nccl", stage, 2, cells, tolerance=0.1, floor=0.02, **{precision: True})


# ---- Several steps ----


def trajectory(folder: str, shards: str, deepspeed: dict | None, seed: int = 0, **options: Any) -> InfCLTrainer:
    """A trainer for four clipped steps, with logit_scale above its limit before the first step.

    It trains on the shards, or on a map-style data set if there are none.
    """
    model = models.clip(seed=seed)
    model.logit_scale.data.fill_(4.6)
    options |= {"max_steps": 4, "learning_rate": 1e-2, "max_grad_norm": 1.0, "deepspeed": deepspeed}
    options |= {"max_logit_scale": 90}
    options |= {"eval_dataset": models.Pairs(9), **({"use_cpu": False} if deepspeed else {})}
    if shards:
        return trainer_for(folder, model, stream_of(shards), data_collator=numbered, **options)
    return trainer_for(folder, model, models.Pairs(40), **options)


def numbered(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collates items of the stream, which are images, or pairs of the evaluation set."""
    return collate(items) if "image" in items[0] else default_collate(items)


def outcome(trainer: InfCLTrainer) -> tuple[list[tuple], dict[str, torch.Tensor], float]:
    history = [(e["loss"], e["grad_norm"], e["logit_scale"]) for e in trainer.state.log_history if "loss" in e]
    parameters = {name: p.detach().cpu().reshape(-1) for name, p in trainer.model.named_parameters()}
    return history, parameters, trainer.evaluate()["eval_loss"]


def rank_plain(rank: int, world_size: int, folder: str, shards: str, more: dict[str, Any]) -> tuple:
    trainer = trained(trajectory(folder, shards, None, **RATES, **more))
    return outcome(trainer)


def rank_zero(rank: int, world_size: int, folder: str, shards: str, more: dict[str, Any], stage: int) -> tuple:
    """Stops after two steps and resumes with another trainer."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, **RATES, **more}
    options |= {"processing_class": clip_processor(), "save_formats": ["transformers", "open_clip"]}
    trajectory(folder, shards, config(stage), callbacks=[StopAt(2)], **options).train()
    trainer = trained(trajectory(folder, shards, config(stage), seed=5, **options), resume=True)
    trainer.save_model(f"{folder}/last")
    return outcome(trainer)


@pytest.mark.parametrize(("stage", "data"), [(1, "pairs"), (2, "stream"), (2, "growing batch")])
def test_steps_and_checkpoints_are_those_without_deepspeed(ranks, fresh_ranks, tmp_path, backend, stage, data):
    shards = str(tmp_path / "shards") if data == "stream" else ""
    if shards:
        write_tars(Path(shards), [10] * 8)
    grows = {"global_batch_schedule": ["8:0.3", "16"], "gradient_accumulation_steps": 1}
    more = grows if data == "growing batch" else {}
    job = (rank_plain, 2, f"{tmp_path}/plain", shards, more)
    history, parameters, loss = ranks.run(*job, backend=backend, always_ring=True)[0]
    assert history[0][2] == pytest.approx(90)
    assert history[-1][2] < 89.9, "it did not go on from the limit: the test says nothing of it"
    job = (rank_zero, 2, f"{tmp_path}/zero", shards, more, stage)
    for seen_history, seen, seen_loss in fresh_ranks.run(*job, backend=backend, always_ring=True):
        for step, expected in zip(seen_history, history, strict=True):
            assert step == pytest.approx(expected, rel=1e-4)
        # The gradient of a key's bias is only rounding, which Adam turns into steps.
        for name in [name for name in parameters if not name.endswith("k_proj.bias")]:
            torch.testing.assert_close(seen[name], parameters[name], rtol=0, atol=1e-4, msg=name)
        assert seen_loss == pytest.approx(loss, rel=1e-4)

    model, info = transformers.CLIPModel.from_pretrained(tmp_path / "zero/last", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert model.logit_scale.shape == ()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.reshape(-1), seen[name], rtol=0, atol=0, msg=name)
    assert same_of_open_clip(tmp_path / "zero/last", model)


@on_ranks(1, fresh=True)
def test_other_stages_and_learning_rates_of_deepspeed_s_own_optimizer_are_refused(rank, world_size, tmp_path):
    for stage in (0, 3):
        with pytest.raises(ValueError, match=f"ZeRO stages 1 and 2, not {stage}"):
            trajectory(tmp_path, "", config(stage))
    of_deepspeed = config(2) | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    for name, value in (
        ("logit_scale_learning_rate", 1e-4),
        ("layer_decay", 0.5),
        ("no_decay_parameters", ["text_model"]),
    ):
        with pytest.raises(ValueError, match=f"DeepSpeed's config names an optimizer.*without {name}"):
            trajectory(tmp_path, "", of_deepspeed, **{name: value})
        trajectory(tmp_path, "", config(2), **{name: value})
    trajectory(tmp_path, "", of_deepspeed)
    for teacher in (models.clip(seed=1), models.siglip()):
        with pytest.raises(ValueError, match=r"Teachers teach in fp32, but DeepSpeed casts .* Use DDP, or --fsdp"):
            trajectory(tmp_path, "", config(2), teacher=teacher)
