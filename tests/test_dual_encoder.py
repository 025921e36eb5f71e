"""Every supported model class of transformers, built small from its config."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from helpers import models
from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig

from hf_infcl.training.dual_encoder import SIGMOID_MODELS, SOFTMAX_MODELS, DualEncoder

TEXT, VISION = models._TEXT, models._VISION
BERT = {**TEXT, "type_vocab_size": 2}


def _siglip2() -> tf.Siglip2Model:
    vision = {k: v for k, v in VISION.items() if k != "image_size"}
    return tf.Siglip2Model(
        tf.Siglip2Config(text_config={**TEXT, "projection_size": 16}, vision_config={**vision, "num_patches": 4})
    )


def _vision_text() -> tf.VisionTextDualEncoderModel:
    config = tf.VisionTextDualEncoderConfig.from_vision_text_configs(
        CLIPVisionConfig(**VISION), tf.BertConfig(**BERT), projection_dim=12
    )
    return tf.VisionTextDualEncoderModel(config)


def _align() -> tf.AlignModel:
    vision = {
        "image_size": 32,
        "width_coefficient": 0.1,
        "depth_coefficient": 0.1,
        "kernel_sizes": [3],
        "in_channels": [32],
        "out_channels": [16],
        "strides": [1],
        "num_block_repeats": [1],
        "expand_ratios": [1],
        "depthwise_padding": [],
        "hidden_dim": 16,
    }
    return tf.AlignModel(tf.AlignConfig(text_config=BERT, vision_config=vision, projection_dim=8))


def _groupvit() -> tf.GroupViTModel:
    vision = {**VISION, "depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 2]}
    config = tf.GroupViTConfig(text_config=TEXT, vision_config=vision)
    config.projection_dim, config.projection_intermediate_dim = 12, 16
    return tf.GroupViTModel(config)


def _vision_text_dinov2() -> tf.VisionTextDualEncoderModel:
    config = tf.VisionTextDualEncoderConfig.from_vision_text_configs(
        tf.Dinov2Config(**VISION), tf.BertConfig(**BERT), projection_dim=12
    )
    return tf.VisionTextDualEncoderModel(config)


BUILD = {
    "aimv2": lambda: tf.Aimv2Model(tf.Aimv2Config(text_config=TEXT, vision_config=VISION, projection_dim=12)),
    "align": _align,
    "altclip": lambda: tf.AltCLIPModel(
        tf.AltCLIPConfig(text_config={**BERT, "project_dim": 16}, vision_config=VISION, projection_dim=12)
    ),
    "blip": lambda: tf.BlipModel(tf.BlipConfig(text_config=TEXT, vision_config=VISION, projection_dim=12)),
    "chinese_clip": lambda: tf.ChineseCLIPModel(
        tf.ChineseCLIPConfig(text_config=BERT, vision_config=VISION, projection_dim=12)
    ),
    "clip": models.clip,
    "clipseg": lambda: tf.CLIPSegModel(tf.CLIPSegConfig(text_config=TEXT, vision_config=VISION, projection_dim=12)),
    "groupvit": _groupvit,
    "metaclip_2": lambda: tf.MetaClip2Model(
        tf.MetaClip2Config(text_config=TEXT, vision_config=VISION, projection_dim=12)
    ),
    "owlvit": lambda: tf.OwlViTModel(tf.OwlViTConfig(text_config=TEXT, vision_config=VISION, projection_dim=12)),
    "siglip": models.siglip,
    "siglip2": _siglip2,
    "vision-text-dual-encoder": _vision_text,
}


def batch_for(kind: str, rows: int = 5) -> dict[str, torch.Tensor]:
    batch = models.Pairs(rows).batch()
    if kind == "siglip2":  # patches instead of images
        batch["pixel_values"] = torch.randn(rows, 4, 3 * 8 * 8)
        batch["pixel_attention_mask"] = torch.ones(rows, 4, dtype=torch.long)
        batch["spatial_shapes"] = torch.tensor([[2, 2]] * rows)
    if kind == "align":
        batch["pixel_values"] = torch.randn(rows, 3, 32, 32)
    return batch


def test_every_type_is_tested():
    assert sorted(BUILD) == sorted(SOFTMAX_MODELS + SIGMOID_MODELS)


@pytest.mark.parametrize("kind", BUILD)
def test_embeddings_and_temperature_make_the_model_s_own_logits(kind):
    torch.manual_seed(0)
    model = BUILD[kind]().eval()
    encoder, batch = DualEncoder(model), batch_for(kind)
    assert model.config.model_type == kind
    encoder.initialise_sigmoid()
    with torch.no_grad():
        images, texts = encoder.embed(model, {**batch, "pair_ids": torch.arange(5)})
        scale, bias = encoder.scale_and_bias()
        logits = scale * images @ texts.t() + (0 if bias is None else bias)
        torch.testing.assert_close(logits, model(**batch).logits_per_image, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(images.norm(dim=1), torch.ones(5))
        # What evaluation uses is the same, tower by tower.
        torch.testing.assert_close(encoder.encode_images(batch), images, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(encoder.encode_texts(batch), texts, rtol=1e-4, atol=1e-5)
    assert encoder.objective == ("sigmoid" if kind.startswith("siglip") else "softmax")
    assert len(encoder.temperature_parameters) == (2 if kind.startswith("siglip") else 1)
    assert bool(encoder.batch_norms()) == (kind in ("align", "groupvit"))


@pytest.mark.parametrize("kind", BUILD)
def test_what_trains_takes_part_in_the_loss(kind):
    model = BUILD[kind]().train()
    encoder = DualEncoder(model)
    encoder.freeze_unused()
    images, texts = encoder.embed(model, batch_for(kind))
    scale, bias = encoder.scale_and_bias()
    (scale * images @ texts.t() + (0 if bias is None else bias)).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_what_stands_for_masked_patches_does_not_train():
    model = _vision_text_dinov2().train()
    DualEncoder(model).freeze_unused()
    images, texts = DualEncoder(model).embed(model, batch_for("vision-text-dual-encoder"))
    (model.logit_scale * images @ texts.t()).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["vision_model.embeddings.mask_token"]


def test_batch_norms_count_unless_all_around_them_is_frozen():
    model = _align()
    encoder = DualEncoder(model)
    every = encoder.batch_norms()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.requires_grad_(False)
    assert encoder.batch_norms() == every, "they go on normalising over the micro-batch"
    encoder.freeze("image")
    assert encoder.batch_norms() == []

    model = _groupvit()
    encoder = DualEncoder(model)
    assert len(encoder.batch_norms()) == 2, "one in each projection"
    encoder.freeze("image")
    assert encoder.batch_norms() == ["text_projection.1"]
    assert encoder.frozen_parts() == [model.vision_model, model.visual_projection]


@pytest.mark.parametrize("tower", ["image", "text"])
@pytest.mark.parametrize("kind", BUILD)
def test_a_frozen_tower_runs_once(kind, tower):
    torch.manual_seed(0)
    model = BUILD[kind]().train()
    encoder, batch = DualEncoder(model), batch_for(kind)
    assert not encoder.frozen_towers()
    encoder.freeze(tower)
    assert list(encoder.frozen_towers()) == [tower]
    frozen = encoder.frozen_towers()[tower].eval()
    runs = []
    frozen.register_forward_pre_hook(lambda *args: runs.append(1))
    next(frozen.children()).register_forward_pre_hook(lambda *args: runs.append(1))
    outputs = {}
    first = encoder.embed(model, batch, outputs)
    before = len(runs)
    second = encoder.embed(model, batch, outputs)
    assert len(runs) == before + 1, "the tower was called, and computed nothing"
    index = 0 if tower == "image" else 1
    assert torch.equal(first[index], second[index])
    assert not second[index].requires_grad
    assert second[1 - index].requires_grad
    assert torch.equal(encoder.embed(model, batch)[index], first[index]), "and computes again afterwards"


@pytest.mark.parametrize("kind", ["clip", "align"])
def test_clamp_limits_the_multiplier(kind):
    encoder = DualEncoder(BUILD[kind]())
    for start, expected in ((1e3, 50.0), (0.5, 1.0), (7.0, 7.0)):
        with torch.no_grad():
            encoder.temperature_parameters[0].fill_(1 / start if kind == "align" else math.log(start))
        encoder.clamp_logit_scale(50)
        assert encoder.scale_and_bias()[0].item() == pytest.approx(expected)


def test_siglip_from_config_starts_where_the_paper_does_and_a_trained_one_is_left_alone():
    encoder = DualEncoder(models.siglip())
    assert encoder.initialise_sigmoid()
    scale, bias = encoder.scale_and_bias()
    assert (scale.item(), bias.item()) == (pytest.approx(10), -10)
    with torch.no_grad():
        encoder.temperature_parameters[0].zero_()
    assert not encoder.initialise_sigmoid()
    assert encoder.temperature_parameters[0] == 0
    assert not DualEncoder(models.clip()).initialise_sigmoid()


@pytest.mark.parametrize("kind", ["clip", "siglip", "align"])
def test_preparation_for_fsdp_leaves_the_model_what_it_was(kind):
    model, batch = BUILD[kind]().eval(), batch_for(kind)
    encoder = DualEncoder(model)
    before, stock = model(**batch).logits_per_image, {n: t.shape for n, t in model.state_dict().items()}
    encoder.prepare_for_fsdp()
    torch.testing.assert_close(model(**batch).logits_per_image, before)
    assert all(p.ndim >= 1 for p in model.parameters()), "a scalar cannot be sharded"
    assert not any(name.endswith("Embeddings") for name in model._no_split_modules)
    model.get_input_embeddings()
    assert {n: t.shape for n, t in DualEncoder(model).stock_shapes(model.state_dict()).items()} == stock


def test_other_models_are_refused_by_name():
    xclip = tf.XCLIPModel(
        tf.XCLIPConfig(text_config=TEXT, vision_config={**VISION, "mit_hidden_size": 16}, projection_dim=16)
    )
    clap = tf.ClapModel(tf.ClapConfig(projection_dim=16))
    tower = tf.CLIPVisionModel(CLIPVisionConfig(**VISION))
    text = tf.CLIPTextModelWithProjection(CLIPTextConfig(**TEXT))
    bert = tf.BertModel(tf.BertConfig(**BERT))
    for model in (xclip, clap, tower, text, bert, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=f"{type(model).__name__} .*not a dual encoder.*clip"):
            DualEncoder(model)
    assert CLIPConfig.model_type in SOFTMAX_MODELS


def test_gradients_reach_both_towers_through_the_embeddings():
    model = models.clip()
    images, texts = DualEncoder(model).embed(model, batch_for("clip"))
    (images * F.normalize(torch.randn_like(images))).sum().backward(retain_graph=True)
    assert model.visual_projection.weight.grad is not None
    assert model.text_projection.weight.grad is None
    texts[:, 0].sum().backward()
    assert model.text_projection.weight.grad is not None
