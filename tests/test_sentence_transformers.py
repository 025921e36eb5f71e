"""sentence-transformers loads what a training saves, and encodes to the embeddings of the model."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import models
from helpers.pictures import picture
from helpers.processors import clip_processor, siglip_processor
from helpers.trainers import trainer_for
from sentence_transformers import SentenceTransformer
from test_feature_cache import rows

from hf_infcl import ImageTextDataset, InfCLTrainer

# Of different lengths, and the second one longer than the model reads.
TEXTS = ["a", "b c d e f g h i j k l", "x y"]


def saved(folder: Path, kind: str) -> InfCLTrainer:
    """A trainer that has saved its model, after one step."""
    processor = clip_processor() if kind == "clip" else siglip_processor()
    if kind == "siglip":  # as those of published checkpoints
        processor.tokenizer.model_input_names = processor.tokenizer.init_kwargs["model_input_names"] = ["input_ids"]
    model = models.clip(end=processor.tokenizer.eos_token_id) if kind == "clip" else models.siglip()
    options = {"processing_class": processor, "data_collator": None, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_for(folder, model, ImageTextDataset(rows()), max_steps=1, **options)
    for parameter in trainer.model.parameters():  # random weights that tell texts and images apart
        parameter.data += 0.1 * torch.randn_like(parameter)
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("place", [".", "checkpoint-1"])
def test_its_embeddings_are_those_of_the_model(tmp_path, kind, place):
    trainer = saved(tmp_path, kind)
    images = [picture(n, (20, 24)) for n in range(3)]
    encoder, processor = trainer.dual_encoder, trainer.processing_class
    with torch.no_grad():
        expected_images = encoder.encode_images(processor.image_processor(images, return_tensors="pt"))
        expected_texts = encoder.encode_texts(trainer.data_collator.tokenize(TEXTS))
    loaded = SentenceTransformer(str(tmp_path / place), device="cpu")
    np.testing.assert_allclose(loaded.encode(images), expected_images.numpy(), rtol=0, atol=1e-7)
    alone = loaded.encode(TEXTS, batch_size=1)  # where only padding to the whole length is that of the training
    np.testing.assert_allclose(alone, expected_texts.numpy(), rtol=0, atol=3e-7)
    torch.testing.assert_close(
        loaded.similarity(loaded.encode(images), loaded.encode(TEXTS)), expected_images @ expected_texts.T
    )
    cut = SentenceTransformer(str(tmp_path / place), device="cpu", truncate_dim=4)
    first = [F.normalize(whole[:, :4], dim=1) for whole in (expected_images, expected_texts)]
    torch.testing.assert_close(cut.similarity(cut.encode(images), cut.encode(TEXTS)), first[0] @ first[1].T)
    again = transformers.AutoModel.from_pretrained(tmp_path / place)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in trainer.model.state_dict().items())


def test_without_the_collator_s_padding_nothing_is_claimed(tmp_path):
    trainer_for(tmp_path, max_steps=1).save_model()
    assert not (tmp_path / "modules.json").exists()
