"""LoRA adapters on either tower."""

import peft
import pytest
import torch
from helpers import models
from helpers.trainers import parameters, trained, trainer_for
from safetensors.torch import load_file

from hf_infcl.models.adapters import beside_adapters
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.models.sharding import prepare_for_fsdp, stock_shapes


def lora(tower: str) -> peft.PeftModel:
    config = peft.LoraConfig(r=2, target_modules=rf".*{tower}.*(q_proj|v_proj)", modules_to_save=["visual_projection"])
    return peft.get_peft_model(models.clip(), config)


@pytest.mark.parametrize("tower", ["vision_model", "text_model"])
def test_adapters_train_and_everything_else_stays(tmp_path, tower):
    model = lora(tower)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = trained(trainer_for(tmp_path, model, max_steps=2, learning_rate=0.1, eval_dataset=models.Pairs(9)))
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


def with_trained_scale() -> peft.PeftModel:
    model = lora("text_model")
    model.logit_scale.requires_grad_(True)
    return model


SAVED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}


def test_a_trained_logit_scale_is_resumed_and_loaded_with_the_adapter(tmp_path):
    whole = trained(trainer_for(tmp_path, with_trained_scale(), **SAVED))
    resumed = trained(trainer_for(tmp_path, with_trained_scale(), **SAVED), resume=str(tmp_path / "checkpoint-2"))
    assert resumed.model.logit_scale.item() == whole.model.logit_scale.item()
    assert torch.equal(parameters(resumed), parameters(whole))
    whole.save_model(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(models.clip(), tmp_path / "adapter")
    assert loaded.logit_scale.item() == whole.model.logit_scale.item() != models.clip().logit_scale.item()


def test_adapters_are_resumed_on_the_weights_that_they_were_trained_on(tmp_path):
    trained(trainer_for(tmp_path, with_trained_scale(), **SAVED))
    other = with_trained_scale()
    other.text_model.embeddings.token_embedding.weight.data.mul_(2)
    with pytest.raises(ValueError, match=r"fingerprint of the adapted weights was '[0-9a-f]{16}' and is"):
        trainer_for(tmp_path, other, **SAVED).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_trained_logit_scale_returns_with_the_best_model(tmp_path):
    options = {**SAVED, "eval_dataset": models.Pairs(9), "eval_strategy": "steps", "eval_steps": 2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer = trained(trainer_for(tmp_path, with_trained_scale(), **options))
    for step in (2, 4):
        saved = load_file(tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors")["base_model.model.logit_scale"]
        trainer.model.logit_scale.data.zero_()
        trainer.state.best_model_checkpoint = str(tmp_path / f"checkpoint-{step}")
        trainer._load_best_model()  # what Trainer calls at the end of a training, here for either checkpoint
        assert trainer.model.logit_scale.item() == saved.item()


def test_only_what_peft_leaves_out_is_beside_the_adapters():
    assert beside_adapters(models.clip()) == {}
    assert beside_adapters(lora("text_model")) == {}
    assert [*beside_adapters(with_trained_scale())] == ["base_model.model.logit_scale"]


def test_several_adapters_are_saved_with_the_scale(tmp_path):
    model = peft.get_peft_model(models.clip(), peft.LoraConfig(target_modules=["q_proj"]), adapter_name="words")
    model.logit_scale.requires_grad_(True)
    trainer = trained(trainer_for(tmp_path, model, max_steps=1, learning_rate=0.1))
    trainer.save_model(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(models.clip(), tmp_path / "adapter" / "words")
    assert loaded.logit_scale.item() == model.logit_scale.item() != models.clip().logit_scale.item()


def test_preparation_for_fsdp_reaches_the_model_inside(tmp_path):
    model = lora("vision_model")
    encoder = DualEncoder(model)
    prepare_for_fsdp(encoder)
    assert all(p.ndim >= 1 for p in model.parameters())
    state = stock_shapes(DualEncoder(model), model.state_dict())
    assert state["base_model.model.logit_scale"].shape == ()
