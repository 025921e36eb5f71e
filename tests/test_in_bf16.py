"""``bf16_activations``: forwards in bf16 that add up fp32 gradients of fp32 weights."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.utils import DistributedType
from helpers import models
from helpers.numerics import relative_error
from helpers.parity import MODELS, Gradients, check
from helpers.processes import on_ranks
from helpers.trainers import parameters, trained, trainer_for
from test_model_types import KINDS
from torch import Tensor, nn

from hf_infcl.models.dual_encoder import IMAGE_FEATURES, DualEncoder
from hf_infcl.models.layers import compute_in_bf16
from hf_infcl.models.sharding import check_in_bf16

IN_BF16: dict[str, Any] = {"bf16": True, "bf16_activations": True}
FP32_WITHIN = {"tipsv2"}  # whose pooling mask is in fp32, also if its weights are in bf16
CELLS = [(o, v, k) for o in MODELS for v in ("plain", "pair_ids", "frozen image", "frozen text") for k in (1, 4)]
CELLS += [("softmax", "lora", 2), ("softmax", "replay", 2), ("softmax", "lengths", 4)]


# ---- Forwards and gradients ----


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - FP32_WITHIN))
def test_every_activation_is_in_bf16_and_embeddings_have_length_1(kind):
    torch.manual_seed(0)
    model, batch = KINDS[kind]().eval(), models.batch_for(kind)
    encoder, seen = DualEncoder(model), set()
    expected = encoder.embed(model, batch)
    compute_in_bf16(model, wanted=True)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Embedding)):
            module.register_forward_hook(lambda _, inputs, output: seen.add(output.dtype))
    found = encoder.embed(model, batch)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for embeds, exact in zip(found, expected, strict=True):
        assert (embeds.norm(dim=1) - 1).abs().max() < 1e-6
        assert F.cosine_similarity(embeds, exact).min() > (0.9 if kind == "groupvit" else 0.995)
    compute_in_bf16(model, wanted=False)
    assert all(map(torch.equal, encoder.embed(model, batch), expected))


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_those_of_the_whole_batch_within_rounding(ranks, world_size):
    """As under autocast, whose bounds in test_gpu.py are the same."""
    check(ranks, world_size, CELLS, IN_BF16, tolerance=0.05, floor=5e-3)


def gradients(folder: Any, model: nn.Module | None = None, data: Any = None, **options: Any) -> dict[str, Tensor]:
    seen = Gradients()
    trainer_for(folder, model, data, max_steps=1, max_grad_norm=0.0, callbacks=[seen], **{**IN_BF16, **options}).train()
    return seen.seen


def test_the_gradients_of_micro_batches_are_summed_in_fp32(tmp_path):
    divisions = [{"per_device_train_batch_size": 32 // n, "gradient_accumulation_steps": n} for n in (1, 16)]
    whole, divided = (gradients(tmp_path, data=models.Pairs(32), **division) for division in divisions)
    name = "vision_model.encoder.layers.0.mlp.fc1.weight"
    assert torch.equal(whole[name], whole[name].bfloat16().float()), "of one backward"
    in_bf16 = divided[name] == divided[name].bfloat16().float()
    assert in_bf16.float().mean() < 0.1
    assert relative_error(divided[name], whole[name]) < 0.02


@pytest.mark.parametrize("options", [{}, {"optimizer": "muon"}], ids=str)
def test_updates_smaller_than_the_rounding_of_bf16_add_up(tmp_path, options):
    rates = {"learning_rate": 2e-7, "lr_scheduler_type": "constant", "max_steps": 20, "optim": "adamw_torch"}
    trainer = trainer_for(tmp_path, **IN_BF16, **rates, **options)
    start = parameters(trainer)
    trainer.train()
    change = (parameters(trainer) - start).abs()
    of_norm = trainer.model.vision_model.post_layernorm.weight
    assert (of_norm != 1).all()
    assert (of_norm.bfloat16() == 1).all(), "bf16 alone would have lost them"
    assert 1e-6 < change.max() < 1e-4
    assert (change > 0).float().mean() > 0.9


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_compiled_gradients_are_the_same(rank, world_size, tmp_path):
    data, breaks, found = models.Pairs(16 * world_size), [], []
    backend = "aot_eager" if world_size == 1 else "eager"  # DDP changes only what dynamo sees
    compiled = {"torch_compile": True, "torch_compile_backend": backend}
    under_autocast = {**compiled, "bf16_activations": False, "torch_compile_backend": "eager"}
    for options in (under_autocast, compiled):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        found.append(gradients(tmp_path, data=data, **options))
        breaks.append(sum(torch._dynamo.utils.counters["graph_break"].values()))
    assert breaks[1] == breaks[0], "those of DDP"
    eager = gradients(tmp_path, data=data)
    compiled = {name.replace("_orig_mod.", ""): gradient for name, gradient in found[1].items()}
    in_layers = models.clip()
    for layer in (*in_layers.vision_model.encoder.layers, *in_layers.text_model.encoder.layers):
        layer.compile(backend=backend, fullgraph=True)
    by_layer = gradients(tmp_path, in_layers, data)
    assert eager.keys() == compiled.keys() == by_layer.keys()
    for name, gradient in eager.items():
        assert relative_error(compiled[name], gradient) < 1e-3, name
        assert relative_error(by_layer[name], gradient) < 1e-3, name


def test_cached_features_of_a_frozen_tower_are_rounded():
    model, batch = models.clip(), models.Pairs(6).batch()
    encoder = DualEncoder(model)
    encoder.freeze("image")
    features = encoder.image_features(batch)
    compute_in_bf16(model, wanted=True)
    expected = encoder.embed(model, batch)
    cached = {**batch, IMAGE_FEATURES: features}
    del cached["pixel_values"]
    for found, embeds in zip(encoder.embed(model, cached), expected, strict=True):
        assert F.cosine_similarity(found, embeds).min() > 0.999


# ---- What is saved, copied and refused ----


def test_the_saved_model_and_copies_are_fp32(tmp_path):
    trainer = trained(trainer_for(tmp_path, **IN_BF16, learning_rate=1e-3))
    trainer.save_model(str(tmp_path / "saved"))
    saved = transformers.CLIPModel.from_pretrained(tmp_path / "saved")
    assert {p.dtype for p in saved.parameters()} == {torch.float32}
    assert torch.equal(nn.utils.parameters_to_vector(saved.parameters()), parameters(trainer))
    batch = models.Pairs(4).batch()
    copied = copy.deepcopy(models.clip())
    compute_in_bf16(copied, wanted=True)
    again = copy.deepcopy(copied)
    again.visual_projection.weight.data.neg_()
    with torch.no_grad():
        assert torch.equal(again(**batch).image_embeds, -copied(**batch).image_embeds), "a copy reads its own weights"


def test_a_model_is_in_bf16_only_with_the_option(tmp_path):
    model, plain = models.clip(), models.clip()
    trainer_for(tmp_path, model, **IN_BF16)
    for one in (model, plain):
        trainer_for(tmp_path, one, max_steps=2).train()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": False}, "bf16_activations needs bf16=True, but the mixed precision is 'no'"),
        ({"gradient_checkpointing": True}, "_checkpointing computes layers again outside of the forward"),
    ],
)
def test_what_does_not_work_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, **{**IN_BF16, **options})


def test_wrappers_with_weights_of_their_own_are_refused():
    accelerator: Any = SimpleNamespace(mixed_precision="bf16", distributed_type=DistributedType.FSDP)
    with pytest.raises(ValueError, match="FSDP divides and casts them"):
        check_in_bf16(accelerator, [])
    accelerator = SimpleNamespace(mixed_precision="fp16", distributed_type=DistributedType.NO)
    with pytest.raises(ValueError, match="needs bf16=True, but the mixed precision is 'fp16'"):
        check_in_bf16(accelerator, [])


@pytest.mark.parametrize("kind", FP32_WITHIN)
def test_models_that_compute_a_part_in_fp32_are_refused(kind):
    model = KINDS[kind]()
    compute_in_bf16(model, wanted=True)
    with pytest.raises(ValueError, match="A Tipsv2Model cannot be trained with bf16_activations"):
        DualEncoder(model).embed(model, models.batch_for(kind))
