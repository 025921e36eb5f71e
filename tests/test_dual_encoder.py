"""Every supported model class of transformers, as a small model built from its config."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from helpers import models
from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig

from hf_infcl.models.dual_encoder import IMAGE_INPUTS, DualEncoder
from hf_infcl.models.model_types import MODEL_TYPES
from hf_infcl.models.sharding import prepare_for_fsdp, stock_shapes


def test_every_type_is_tested():
    assert {*models.BUILD, "tipsv2"} == set(MODEL_TYPES)


@pytest.mark.parametrize("kind", models.BUILD)
def test_embeddings_and_temperature_make_the_model_s_own_logits(kind):
    torch.manual_seed(0)
    model = models.BUILD[kind]().eval()
    encoder, batch = DualEncoder(model), models.batch_for(kind)
    assert model.config.model_type == kind
    encoder.initialise_sigmoid()
    with torch.no_grad():
        images, texts = encoder.embed(model, {**batch, "pair_ids": torch.arange(5)})
        scale, bias = encoder.scale_and_bias()
        logits = scale * images @ texts.t() + (0 if bias is None else bias)
        torch.testing.assert_close(logits, model(**batch).logits_per_image, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(images.norm(dim=1), torch.ones(5))
        # Evaluation encodes with each tower separately, and gets the same embeddings.
        torch.testing.assert_close(encoder.encode_images(batch), images, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(encoder.encode_texts(batch), texts, rtol=1e-4, atol=1e-5)
    assert encoder.kind.objective == ("sigmoid" if kind.startswith("siglip") else "softmax")
    assert len(encoder.temperature_parameters) == (2 if kind.startswith("siglip") else 1)
    assert bool(encoder.batch_norms()) == (kind in ("align", "groupvit"))


@pytest.mark.parametrize("kind", models.BUILD)
def test_what_trains_takes_part_in_the_loss(kind):
    model = models.BUILD[kind]().train()
    encoder = DualEncoder(model)
    encoder.freeze(None)
    images, texts = encoder.embed(model, models.batch_for(kind))
    scale, bias = encoder.scale_and_bias()
    (scale * images @ texts.t() + (0 if bias is None else bias)).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_what_stands_for_masked_patches_does_not_train():
    model = models.vision_text_dinov2().train()
    DualEncoder(model).freeze(None)
    images, texts = DualEncoder(model).embed(model, models.batch_for("vision-text-dual-encoder"))
    (model.logit_scale * images @ texts.t()).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["vision_model.embeddings.mask_token"]


def test_batch_norms_count_unless_all_around_them_is_frozen():
    model = models.align()
    encoder = DualEncoder(model)
    every = encoder.batch_norms()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.requires_grad_(False)
    assert encoder.batch_norms() == every, "they go on normalising over the micro-batch"
    encoder.freeze("image")
    assert encoder.batch_norms() == []

    model = models.groupvit()
    encoder = DualEncoder(model)
    assert len(encoder.batch_norms()) == 2, "one in each projection"
    encoder.freeze("image")
    assert encoder.batch_norms() == ["text_projection.1"]
    assert encoder.frozen_parts() == [model.vision_model, model.visual_projection]


@pytest.mark.parametrize("kind", models.BUILD)
def test_cached_features_take_the_place_of_images(kind):
    torch.manual_seed(0)
    model = models.BUILD[kind]().eval()
    encoder, batch = DualEncoder(model), models.batch_for(kind)
    encoder.freeze("image")
    with torch.no_grad():
        expected = encoder.embed(model, batch)
        features = {"image_features": encoder.image_features(batch)}
        part = next(model.vision_model.children())
        part.register_forward_pre_hook(lambda *args: pytest.fail("the image tower ran"))
        embeds = encoder.embed(model, features | {k: v for k, v in batch.items() if k not in IMAGE_INPUTS})
    torch.testing.assert_close(embeds, expected)


@pytest.mark.parametrize("tower", ["image", "text"])
@pytest.mark.parametrize("kind", models.BUILD)
def test_a_frozen_tower_runs_once(kind, tower):
    torch.manual_seed(0)
    model = models.BUILD[kind]().train()
    encoder, batch = DualEncoder(model), models.batch_for(kind)
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
    encoder = DualEncoder(models.BUILD[kind]())
    for start, expected in ((1e3, 50.0), (0.5, 1.0), (7.0, 7.0)):
        with torch.no_grad():
            encoder.temperature_parameters[0].fill_(1 / start if kind == "align" else math.log(start))
        encoder.clamp_temperature(50)
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


@pytest.mark.parametrize("kind", models.BUILD)
def test_preparation_for_fsdp_is_undone_in_what_is_saved(kind):
    model, batch = models.BUILD[kind]().eval(), models.batch_for(kind)
    encoder = DualEncoder(model)
    before, stock = model(**batch).logits_per_image, {n: t.shape for n, t in model.state_dict().items()}
    prepare_for_fsdp(encoder)
    torch.testing.assert_close(model(**batch).logits_per_image, before)
    assert all(p.ndim >= 1 for p in model.parameters()), "a scalar cannot be sharded"
    assert not any(name.endswith("Embeddings") for name in model._no_split_modules)
    model.get_input_embeddings()
    # The shapes are found by the model's class, because the model has no record of the change.
    assert {n: t.shape for n, t in stock_shapes(DualEncoder(model), model.state_dict()).items()} == stock


def test_other_models_are_refused_by_name():
    xclip = tf.XCLIPModel(
        tf.XCLIPConfig(
            text_config=models.TEXT, vision_config={**models.VISION, "mit_hidden_size": 16}, projection_dim=16
        )
    )
    audio = {"patch_embeds_hidden_size": 16, "hidden_size": 32, "depths": [1, 1], "num_attention_heads": [1, 2]}
    clap = tf.ClapModel(tf.ClapConfig(text_config=models.BERT, audio_config=audio, projection_dim=16))
    with pytest.raises(ValueError, match="text embeddings: it has a scale for each direction, and encodes sounds"):
        DualEncoder(clap)
    tower = tf.CLIPVisionModel(CLIPVisionConfig(**models.VISION))
    text = tf.CLIPTextModelWithProjection(CLIPTextConfig(**models.TEXT))
    bert = tf.BertModel(tf.BertConfig(**models.BERT))
    for model in (xclip, clap, tower, text, bert, torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=f"{type(model).__name__} .*not a dual encoder.*clip"):
            DualEncoder(model)
    assert CLIPConfig.model_type in MODEL_TYPES


def test_gradients_reach_both_towers_through_the_embeddings():
    model = models.clip()
    images, texts = DualEncoder(model).embed(model, models.batch_for("clip"))
    (images * F.normalize(torch.randn_like(images))).sum().backward(retain_graph=True)
    assert model.visual_projection.weight.grad is not None
    assert model.text_projection.weight.grad is None
    texts[:, 0].sum().backward()
    assert model.text_projection.weight.grad is not None
