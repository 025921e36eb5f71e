"""Images of another size than the model's: interpolated positions, which stock transformers loads."""

import copy
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from datasets import Dataset
from helpers import models
from helpers.processors import clip_processor, siglip2_processor, siglip_processor
from helpers.trainers import StopAt, parameters, trained, trainer_for
from PIL import Image
from torch import Tensor

from hf_infcl import ContrastiveCollator, ImageTextDataset
from hf_infcl.data.transforms import set_image_size
from hf_infcl.models.adapters import merge_adapters, resize_config, resize_images, with_adapters
from hf_infcl.models.counting import count_operations
from hf_infcl.models.dual_encoder import DualEncoder

KINDS: dict[str, Any] = {kind: build for kind, build in models.BUILD.items() if kind != "siglip2"}
KINDS["dinov2"] = models.vision_text_dinov2
WITHOUT_OPTION = ("aimv2", "groupvit")  # whose forward of both towers does not interpolate


def images_of(size: int) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))


def pairs() -> ImageTextDataset:
    drawn = np.random.default_rng(0)
    images = [Image.fromarray(drawn.integers(0, 256, (40, 48, 3), np.uint8)) for _ in range(16)]
    return ImageTextDataset(Dataset.from_dict({"image": images, "caption": list("abcdefghijklmnop")}))


# ---- Towers ----


@pytest.mark.parametrize("size", [32, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tower_is_that_of_transformers_for_this_size(tmp_path, kind, size):
    model, images = KINDS[kind]().eval(), images_of(size)
    encoder = DualEncoder(model)
    model.vision_model.requires_grad_(False)
    expected = None
    if kind not in WITHOUT_OPTION:
        with torch.no_grad():
            features = model.get_image_features(pixel_values=images, interpolate_pos_encoding=True)
        expected = torch.nn.functional.normalize(features.pooler_output, dim=-1)
    resize_images(encoder, size)
    assert not any(p.requires_grad for p in model.vision_model.parameters()), "what is frozen stays frozen"
    found = encoder.encode_images({"pixel_values": images})
    if expected is not None:
        torch.testing.assert_close(found, expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.config.vision_config.image_size == size
    torch.testing.assert_close(DualEncoder(loaded).encode_images({"pixel_values": images}), found)


def test_aimv2_is_interpolated_like_the_others():
    model = models.BUILD["aimv2"]()
    before = model.vision_model.embeddings.position_embedding.weight.detach().clone()
    other = models.clip().vision_model.embeddings
    resize_images(DualEncoder(model), 32)
    with torch.no_grad():
        other.position_embedding.weight[1:] = before
        expected = other.interpolate_pos_encoding(torch.empty(1, 17, 16), 32, 32)
    torch.testing.assert_close(model.vision_model.embeddings.position_embedding.weight, expected[0, 1:])


def swin() -> Any:
    vision = transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=4)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        vision, transformers.BertConfig(**models.BERT), projection_dim=12
    )
    return transformers.VisionTextDualEncoderModel(config)


@pytest.mark.parametrize(
    ("build", "size", "message"),
    [
        (models.clip, 20, r"image_size=20 is no multiple of the patches of the image tower, .* 8 × 8 .* Choose 16"),
        (models.BUILD["siglip2"], 32, r"Siglip2Model .* takes images of any size.*Leave image_size out.*max_num_pat"),
        (swin, 64, r"\(type 'swin'\) has position embeddings that cannot be interpolated to another image_size"),
        (models.two_towers, 32, r"The image tower of TwoTowers \(type None\) has position embeddings that cannot"),
        (
            lambda: peft.get_peft_model(models.clip(), peft.LoraConfig(target_modules="all-linear")),
            32,
            r"image_size=32 changes the position embeddings of the model, which is of 16 pixels, and the adapter",
        ),
    ],
    ids=["multiple", "naflex", "swin", "own", "adapter"],
)
def test_sizes_that_a_tower_cannot_take_are_refused(tmp_path, build, size, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, build(), image_size=size)


def test_adapters_that_are_merged_have_the_size(tmp_path):
    start = models.clip()
    resize_images(DualEncoder(start), 32)
    model = with_adapters(copy.deepcopy(start), 2, ["q_proj"], seed=0)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).fill_(0.1)
    expected = DualEncoder(model.eval()).encode_images({"pixel_values": images_of(32)})
    model.save_pretrained(tmp_path)
    merge_adapters(tmp_path, start)
    loaded = DualEncoder(transformers.CLIPModel.from_pretrained(tmp_path).eval())
    torch.testing.assert_close(loaded.encode_images({"pixel_values": images_of(32)}), expected)


# ---- Processors ----


def test_processors_return_the_size_with_what_they_crop_away():
    processor = clip_processor()
    processor.image_processor.size = {"shortest_edge": 20}  # as DINOv2's, which crops 224 of 256 pixels
    collator = ContrastiveCollator(processor)
    collator.set_image_size(32)
    assert dict(processor.image_processor.size) == {"shortest_edge": 40}
    assert collator(list(pairs())[:2])["pixel_values"].shape == (2, 3, 32, 32)
    others = siglip_processor()
    set_image_size(others.image_processor, 24)
    assert dict(others.image_processor.size) == {"height": 24, "width": 24}
    patches = siglip2_processor().image_processor
    patches.size = None
    with pytest.raises(ValueError, match="cannot be set for a Siglip2ImageProcessorPil, whose images have no fixed"):
        set_image_size(patches, 32)


# ---- Trainings ----


def test_a_training_saves_what_stock_transformers_loads(tmp_path):
    options = {"image_size": 32, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.01}
    options |= {"data": pairs(), "eval_dataset": pairs()}
    whole = trainer_for(tmp_path / "whole", **options)
    before = whole.evaluate()
    whole.train()
    assert whole.evaluate()["eval_loss"] < before["eval_loss"]
    whole.save_model(str(tmp_path / "saved"))
    model = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "saved")
    rows = list(pairs())
    prepared = processor(images=[Image.fromarray(row["image"]) for row in rows], return_tensors="pt")
    assert prepared["pixel_values"].shape[2:] == (32, 32)
    with torch.no_grad():
        features = torch.nn.functional.normalize(model.get_image_features(**prepared).pooler_output, dim=-1)
        ours = whole.dual_encoder.encode_images(whole._prepare_inputs(whole.data_collator(rows)))
    torch.testing.assert_close(features, ours, atol=0.02, rtol=0)  # PIL and torch differ by a grey level

    place = tmp_path / "half"
    trainer_for(place, callbacks=[StopAt(1)], **options).train()
    resumed = trained(trainer_for(place, models.clip(seed=3), **options), resume=True)
    assert torch.equal(parameters(resumed), parameters(whole))
    other = trainer_for(place, **options | {"image_size": 24})
    with pytest.raises(ValueError, match="image_size was 32 and is 24"):
        other.train(resume_from_checkpoint=True)


def test_a_given_collator_and_a_model_of_model_init_get_the_size(tmp_path):
    collator = ContrastiveCollator(clip_processor(), uint8=True)
    options = {"data": pairs(), "data_collator": collator, "image_size": 32, "model_init": lambda: models.clip()}
    trainer = trained(trainer_for(tmp_path, None, **options))
    assert trainer.model.config.vision_config.image_size == 32
    assert trainer.processing_class is collator.processor
    assert dict(collator.processor.image_processor.crop_size) == {"height": 32, "width": 32}


def test_the_tower_computes_as_much_as_images_of_this_size_take():
    config = transformers.CLIPConfig(
        vision_config={"patch_size": 16, "num_hidden_layers": 2}, text_config={"num_hidden_layers": 1}
    )
    counts = []
    for size in (112, None):
        changed = copy.deepcopy(config)
        resize_config(changed, size)
        side = changed.vision_config.image_size
        with torch.device("meta"):
            batch = {"pixel_values": torch.zeros(64, 3, side, side), "input_ids": torch.zeros(64, 77).long()}
            encoder = DualEncoder(transformers.CLIPModel(changed))
        counts.append(count_operations(encoder, batch))
    (small, texts), (whole, same_texts) = counts
    assert texts == same_texts
    assert small[0] < 0.26 * whole[0], "a quarter of the patches"
    assert config.vision_config.image_size == 224, "the config that was given stays as it is"
