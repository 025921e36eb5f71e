"""LoRA adapters on either tower."""

from __future__ import annotations

import peft
import pytest
import torch
from accelerate.utils import DistributedType
from helpers import models
from helpers.trainers import trainer_for

from hf_infcl.training.dual_encoder import DualEncoder
from hf_infcl.training.wrappers import prepare_for_wrapper, stock_shapes


def lora(tower: str) -> peft.PeftModel:
    config = peft.LoraConfig(r=2, target_modules=rf".*{tower}.*(q_proj|v_proj)", modules_to_save=["visual_projection"])
    return peft.get_peft_model(models.clip(), config)


@pytest.mark.parametrize("tower", ["vision_model", "text_model"])
def test_adapters_train_and_everything_else_stays(tmp_path, tower):
    model = lora(tower)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = trainer_for(tmp_path, model, max_steps=2, learning_rate=0.1, eval_dataset=models.Pairs(9))
    trainer.train()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(f".{tower}." in name or "visual_projection" in name for name in changed)
    assert trainer.evaluate()["eval_loss"] > 0
    # The adapter can be loaded on the stock model, with the same results.
    trainer.save_model(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(models.clip(), tmp_path / "adapter").eval()
    batch = models.Pairs(3).batch()
    model.eval()
    with torch.no_grad():
        for seen, expected in zip(
            DualEncoder(loaded).embed(loaded, batch), DualEncoder(model).embed(model, batch), strict=True
        ):
            torch.testing.assert_close(seen, expected)


def test_preparation_for_fsdp_reaches_the_model_inside(tmp_path):
    model = lora("vision_model")
    encoder = DualEncoder(model)
    prepare_for_wrapper(encoder, DistributedType.FSDP)
    assert all(p.ndim >= 1 for p in model.parameters())
    state = stock_shapes(DualEncoder(model), model.state_dict())
    assert state["base_model.model.logit_scale"].shape == ()
