"""A checkpoint that lacks weights is refused, and adapters come with the model on which they were trained."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from helpers import models
from helpers.processors import clip_processor
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_infcl.models.adapters import has_adapters, with_adapters
from hf_infcl.models.open_clip import convert, load, load_readers
from hf_infcl.models.pretrained import base_of_adapters

Weights = dict[str, Tensor]


def saved(folder: Path, model: Any, change: Callable[[Weights], Weights] | None = None) -> str:
    """Saves a model and a processor, with changed weights if ``change`` is given."""
    model.save_pretrained(folder)
    clip_processor().save_pretrained(folder)
    if change is not None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})
    return str(folder)


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: weight for name, weight in weights.items() if part not in name}


@pytest.mark.parametrize("kind", models.BUILD)
def test_every_type_loads_complete_and_is_refused_without_a_weight(tmp_path, kind):
    model = models.BUILD[kind]()
    names = [*model.state_dict()]
    loaded = load(saved(tmp_path, model)).model
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    temperature = [name for name in ("logit_scale", "temperature") if name in names and kind != "tipsv2"]
    projections = [name for name in names if "projection.weight" in name and "." in name][:1]
    layers = [name for name in names if "mlp.fc1.weight" in name or "dense.weight" in name][:1]
    for name in temperature + projections + layers:
        if name in weights:  # otherwise the file has another name for it
            save_file({other: weights[other] for other in weights if other != name}, file, {"format": "pt"})
            with pytest.raises(ValueError, match=f"lacks weights of a {type(model).__name__}: {name}"):
                load(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (
            models.clip,
            lambda weights: {f"module.{name}": weight for name, weight in weights.items()},
            r"logit_scale, .* and \d+ others\. The names in its file begin with 'module\.', as those of a wrapper",
        ),
        (models.clip, without(".layers.0.mlp."), r"text_model\.encoder\.layers\.0\.mlp\.fc1\.bias, .* and 5 others"),
        (
            lambda: tf.CLIPForImageClassification(models.clip().config),
            None,
            r"saved as a CLIPForImageClassification\. Its file has other names, such as classifier\.bias\.",
        ),
        (
            models.clip,
            lambda weights: weights | {"text_projection.weight": torch.zeros(9, 16)},
            r"text_projection\.weight \(\(9, 16\) instead of \(12, 16\)\)\..* --new_weights text_projection`",
        ),
        (models.align, without("running_var"), r"running_var"),
    ],
    ids=["prefix", "layer", "head", "shape", "statistics"],
)
def test_weights_that_are_not_those_of_the_model_are_refused(tmp_path, model, change, message):
    checkpoint = saved(tmp_path, model(), change)
    with pytest.raises(ValueError, match=message):
        load(checkpoint)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named_and_neither_averaged_nor_converted(tmp_path, value):
    def spoil(weights: Weights) -> Weights:
        weights["text_projection.weight"][0, :3] = value
        return weights

    good, bad = saved(tmp_path / "good", models.clip()), saved(tmp_path / "bad", models.clip(), spoil)
    message = re.escape(f"{bad!r} holds weights that are NaN or infinite: text_projection.weight (3 of 192 values of")
    with pytest.raises(ValueError, match=message):
        load(bad)
    with pytest.raises(ValueError, match=message):
        convert(bad, tmp_path / "open_clip", to="open_clip")
    adapted(tmp_path / "adapter", good)
    file = tmp_path / "adapter/adapter_model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "lora_B" in name)
    weights[name][0, 0] = value
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"adapter' holds weights that are NaN or infinite: {re.escape(name)}"):
        load(str(tmp_path / "adapter"))


def test_buffers_and_other_heads_are_no_fault(tmp_path):
    ids = {f"{tower}.embeddings.position_ids": torch.arange(5)[None] for tower in ("text_model", "vision_model")}
    load(saved(tmp_path / "old", models.clip(), lambda weights: weights | ids))
    load(saved(tmp_path / "count", models.align(), without("num_batches_tracked")))
    config = models.BUILD["owlvit"]().config
    detector = tf.OwlViTForObjectDetection(config)
    inside = load(saved(tmp_path / "detector", detector)).model
    assert all(torch.equal(value, detector.owlvit.state_dict()[name]) for name, value in inside.state_dict().items())


@pytest.mark.parametrize("kind", ["clip", "siglip", "vision-text-dual-encoder", "groupvit", "blip"])
def test_new_weights_are_those_of_a_new_model_drawn_from_the_seed(tmp_path, kind):
    model = models.BUILD[kind]()
    new = [name for name in ("visual_projection", "logit_scale", "text_projection") if hasattr(model, name)]
    lacking = [name for name in model.state_dict() if name.startswith(tuple(new))]
    checkpoint = saved(tmp_path, model, lambda weights: {n: w for n, w in weights.items() if n not in lacking})
    found = []
    for seed in (1, 1, 2):
        torch.rand(seed)  # the state of the process does not count
        before = torch.get_rng_state()
        found.append(load(checkpoint, new_weights=new, seed=seed).model.state_dict())
        assert torch.equal(torch.get_rng_state(), before)
    first, again, other = found
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], model.state_dict()[name]) for name in first if name not in lacking)
    assert first["logit_scale"].item() == pytest.approx(model.logit_scale.item())
    drawn = [name for name in lacking if first[name].ndim > 1]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    with pytest.raises(ValueError, match="lacks weights of"):
        load(checkpoint, new_weights=new[1:])


def test_new_weights_that_the_checkpoint_has_are_refused(tmp_path):
    checkpoint = saved(tmp_path, models.clip(), without("logit_scale"))
    with pytest.raises(ValueError, match=r"--new_weights logit names no weights that .* lacks"):
        load(checkpoint, new_weights=["logit_scale", "logit"])


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_training_that_has_not_ended_names_its_newest_checkpoint(tmp_path, name):
    for step in (8, 12, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / name).touch()
    (tmp_path / "_partial-checkpoint-200" / "checkpoint-200").mkdir(parents=True)
    (tmp_path / "_partial-checkpoint-200" / "checkpoint-200" / name).touch()
    newest = re.escape(str(tmp_path / "checkpoint-100"))
    with pytest.raises(ValueError, match=f"its training has not ended. Write {newest}, its newest checkpoint, in its"):
        load(str(tmp_path))
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"^(?!.*has not ended)"):
        load(str(tmp_path))


# ---- Adapters ----


def adapted(folder: Path, base: str, **options: Any) -> peft.PeftModel:
    """Adapters that change something, on a copy of ``base``, saved into the folder with a changed logit_scale."""
    torch.manual_seed(1)
    model = peft.get_peft_model(
        tf.CLIPModel.from_pretrained(base), peft.LoraConfig(r=2, target_modules=["q_proj"], **options)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.logit_scale.data.fill_(1.5)
    model.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.logit_scale": model.logit_scale.data}, file, {"format": "pt"})
    return model.eval()


def test_adapters_come_with_their_model_and_train_on(tmp_path):
    base = saved(tmp_path / "base", models.clip())
    model = adapted(tmp_path / "adapter", base, modules_to_save=["text_projection"])
    assert base_of_adapters(str(tmp_path / "adapter")) == base
    assert base_of_adapters(base) is None
    batch = models.Pairs(3).batch()
    with torch.no_grad():
        expected = model(**batch)
    merged, processor, _ = load(str(tmp_path / "adapter"))
    assert type(merged) is tf.CLIPModel
    assert processor.tokenizer, "that of the model, since the adapters have none"
    kept = load(str(tmp_path / "adapter"), merges=False).model
    assert has_adapters(kept)
    for one in (merged, kept):
        with torch.no_grad():
            found = one(**batch)
        torch.testing.assert_close(found.logits_per_image, expected.logits_per_image)
        assert one.logit_scale.item() == 1.5
    trains = {name for name, parameter in kept.named_parameters() if parameter.requires_grad}
    before = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == before | {"base_model.model.logit_scale"}, "what was saved beside the adapters trains on"
    assert load_readers(str(tmp_path / "adapter"))[0].model_type == "clip"
    assert load_readers(str(tmp_path / "adapter"))[0].projection_dim == 12


def test_targets_that_the_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"lora_targets must be the names of modules, .*, got q_projection: "):
        with_adapters(models.clip(), 4, ["q_projection"], seed=0)


def test_adapters_that_are_incomplete_or_ambiguous_are_refused(tmp_path):
    base, adapter = saved(tmp_path / "base", models.clip()), tmp_path / "adapter"
    adapted(adapter, base)
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    weights, written = load_file(file), json.loads(config.read_text())
    lacking = next(name for name in weights if "lora_A" in name)
    save_file({name: weight for name, weight in weights.items() if name != lacking}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"The adapter {adapter} lacks {lacking}"):
        load(str(adapter))
    deeper = lacking.replace("layers.0", "layers.7")
    save_file(weights | {deeper: weights[lacking].clone()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"is not one of this model: it also has {deeper}"):
        load(str(adapter))
    save_file(weights, file, {"format": "pt"})
    saved(tmp_path / "broken", models.clip(), without("text_projection"))
    for name, message in {
        str(tmp_path / "broken"): r"holds adapters of .* cannot be loaded\. .* lacks weights of a CLIPModel: text_proj",
        str(adapter): r"holds adapters of .* cannot be loaded\. It holds adapters itself",
        "": "does not name their model",
    }.items():
        config.write_text(json.dumps(written | {"base_model_name_or_path": name}))
        with pytest.raises(ValueError, match=message):
            load(str(adapter))
    models.clip().save_pretrained(adapter)
    config.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"holds a whole model \(config.json\) and adapters"):
        load(str(adapter))
