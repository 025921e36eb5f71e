"""Learning rates by tower, frozen layers, and parameters without weight decay."""

import re
from typing import Any

import pytest
import torch
import transformers
from helpers import models
from helpers.demo import infcl
from helpers.trainers import StopAt, arguments, parameters, trained, trainer_for
from helpers.usage import kept_bytes
from torch.utils.flop_counter import FlopCounterMode

from hf_infcl import InfCLTrainer
from hf_infcl.models.dual_encoder import DualEncoder

RATE = 1e-3


def deep_clip(image_layers: int = 3, text_layers: int = 2) -> transformers.CLIPModel:
    return models.clip_with({"num_hidden_layers": text_layers}, {"num_hidden_layers": image_layers})


def rates(trainer: InfCLTrainer) -> dict[str, float]:
    """The learning rate of each parameter by its name."""
    names = {p: name for name, p in trainer.model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    found = {names[p]: group["lr"] for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups), "each parameter is in one group"
    return found


# Names of parameters before, in and after the layers of both towers, and the number of layers.
BERT = ("embeddings.word_embeddings.weight", "encoder.layer.0.output.dense.weight", None, 1)
CLIP_TEXT = ("embeddings.token_embedding.weight", "encoder.layers.0.mlp.fc1.weight", "final_layer_norm.weight", 1)
CLIP_IMAGE = ("embeddings.patch_embedding.weight", "encoder.layers.0.mlp.fc1.weight", "post_layernorm.weight", 1)
PLACES: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("clip", "clipseg", "metaclip_2", "owlv2", "owlvit"), (CLIP_IMAGE, CLIP_TEXT)),
    "aimv2": (
        ("embeddings.patch_embed.weight", "encoder.layers.0.ffn.up_proj.weight", "head.cls_token", 1),
        ("embeddings.token_embedding.weight", "encoder.layers.0.ffn.up_proj.weight", "rms_norm.weight", 1),
    ),
    "align": (("embeddings.batchnorm.weight", "encoder.blocks.0.projection.project_conv.weight", None, 1), BERT),
    "altclip": (
        CLIP_IMAGE,
        (
            "roberta.embeddings.word_embeddings.weight",
            "roberta.encoder.layers.0.output.dense.weight",
            "transformation.weight",
            1,
        ),
    ),
    "blip": (("embeddings.class_embedding", *CLIP_IMAGE[1:]), (*BERT[:2], "pooler.dense.weight", 1)),
    "chinese_clip": (CLIP_IMAGE, BERT),
    "groupvit": (
        ("embeddings.layernorm.weight", "encoder.stages.0.layers.0.mlp.fc1.weight", "layernorm.weight", 2),
        CLIP_TEXT,
    ),
    **dict.fromkeys(
        ("siglip", "siglip2"),
        (("embeddings.patch_embedding.weight", *CLIP_IMAGE[1:2], "head.probe", 1), (*CLIP_TEXT[:2], "head.weight", 1)),
    ),
    "tipsv2": (("embeddings.cls_token", "encoder.layer.0.mlp.fc1.weight", "layernorm.weight", 1), CLIP_TEXT),
    "vision-text-dual-encoder": (CLIP_IMAGE, (*BERT[:2], "pooler.dense.weight", 1)),
}


@pytest.mark.parametrize("kind", models.BUILD)
def test_the_first_layers_of_every_type_of_model_can_be_frozen(kind, tmp_path):
    """What is frozen gets no gradient and runs in evaluation mode; everything above it trains."""
    torch.manual_seed(0)
    model = models.BUILD[kind]().train()
    encoder = DualEncoder(model)
    encoder.freeze(None)
    before = {name for name, p in model.named_parameters() if p.requires_grad}
    encoder.freeze_layers(1)
    encoder.eval_frozen_parts()
    for tower, (first, within, after, _) in zip(("vision_model", "text_model"), PLACES[kind], strict=True):
        frozen = {n for n, p in getattr(model, tower).named_parameters() if not p.requires_grad}
        assert {first, within} <= frozen
        assert after not in frozen
        layer = getattr(model, tower).get_submodule(re.match(r".*?\.\d+", within)[0])
        assert not any(module.training for module in layer.modules())
    images, texts = encoder.embed(model, models.batch_for(kind))
    (images @ texts.t()).exp().sum().backward()
    training = {name for name, p in model.named_parameters() if p.requires_grad}
    assert training < before
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name in training if not name.startswith(("logit_", "temperature"))}


def test_towers_have_rates_of_their_own(tmp_path):
    options = {"image_learning_rate": 1e-4, "text_learning_rate": 2e-3}
    options |= {"logit_scale_learning_rate": 1e-5}
    trainer = trainer_for(tmp_path, deep_clip(), learning_rate=RATE, **options)
    found = rates(trainer)
    assert found["visual_projection.weight"] == pytest.approx(1e-4)
    assert found["vision_model.encoder.layers.2.mlp.fc1.bias"] == pytest.approx(1e-4)
    assert found["vision_model.pre_layrnorm.weight"] == pytest.approx(1e-4)
    assert found["text_projection.weight"] == pytest.approx(2e-3)
    assert found["text_model.encoder.layers.0.mlp.fc1.weight"] == pytest.approx(2e-3)
    assert found["logit_scale"] == 1e-5


def test_muon_s_matrices_follow(tmp_path):
    options = {"optimizer": "muon", "learning_rate": RATE, "image_learning_rate": RATE / 2}
    trainer = trainer_for(tmp_path, deep_clip(), **options)
    found = rates(trainer)
    assert found["text_model.encoder.layers.1.mlp.fc1.weight"] == pytest.approx(4 * RATE)
    assert found["vision_model.encoder.layers.0.mlp.fc1.weight"] == pytest.approx(4 * RATE / 2)
    assert found["vision_model.encoder.layers.0.mlp.fc1.bias"] == pytest.approx(RATE / 2)
    assert found["text_projection.weight"] == pytest.approx(4 * RATE)
    lines = [line.split("  ")[0] for line in trainer.optimization.table_of_groups.splitlines()]
    assert "image tower, matrices of layers" in lines
    assert len(lines) == len(set(lines)) == 8, "one line for each role in a tower"
    assert lines[-1] == "Besides: vectors and scalars (1 value, learning rate 0.001).", "logit_scale"


def test_the_table_adds_up_and_the_log_shows_the_full_rate(tmp_path):
    options = {"learning_rate": RATE, "image_learning_rate": RATE / 2, "weight_decay": 0.1, "max_steps": 1}
    trainer = trained(trainer_for(tmp_path, deep_clip(), **options))
    assert trainer.state.log_history[0]["learning_rate"] == RATE
    *lines, besides = trainer.optimization.table_of_groups.splitlines()[1:]
    assert besides == "Besides: others (1 value, learning rate 0.001).", "logit_scale has no row"
    rows = [re.split(r"  +", line) for line in lines]
    assert sum(int(row[3].replace(",", "")) for row in rows) + 1 == sum(p.numel() for p in trainer.model.parameters())
    named = [p for name, p in trainer.model.named_parameters() if name.startswith(("vision_model", "visual"))]
    decays = sum(p.numel() for p in named if p.ndim > 1)
    assert [row[0] for row in rows] == ["image tower", "text tower"]
    assert (rows[0][1], *rows[0][4:]) == ("AdamW", "0.0005", f"0.1 for {decays:,}")


def test_parameters_without_weight_decay_are_chosen_by_name(tmp_path):
    def decaying(**options: Any) -> set[str]:
        trainer = trainer_for(tmp_path, deep_clip(), weight_decay=0.1, **options)
        names = {p: name for name, p in trainer.model.named_parameters()}
        groups = trainer.create_optimizer().param_groups
        return {names[p] for group in groups if group["weight_decay"] for p in group["params"]}

    every = decaying()
    for optimizer in (None, "muon"):
        left = decaying(optimizer=optimizer, no_decay_parameters=["vision_model", r"text_model.*layers\.0"])
        assert left == {n for n in every if not re.search(r"vision_model|text_model.*layers\.0", n)} != every
    with pytest.raises(ValueError, match="'nowhere', for no_decay_parameters, is found in the name of no trained"):
        decaying(no_decay_parameters=["nowhere"])


def test_a_training_steps_each_part_at_its_rate(tmp_path):
    """One step of plain gradient descent, beside the gradient of a training at one rate."""
    options = {
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_steps": 1,
        "max_grad_norm": 0,
        "lr_scheduler_type": "constant",
    }
    changes = []
    for further in ({}, {"image_learning_rate": 2.0, "text_learning_rate": 0.25}):
        trainer = trainer_for(tmp_path, deep_clip(), **options, **further)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        changes.append({name: p.detach() - before[name] for name, p in trainer.model.named_parameters()})
    for name, factor in {
        "vision_model.embeddings.patch_embedding.weight": 4.0,
        "vision_model.encoder.layers.1.mlp.fc1.weight": 4.0,
        "visual_projection.weight": 4.0,
        "text_model.encoder.layers.1.mlp.fc1.weight": 1 / 2,
        "logit_scale": 1.0,
    }.items():
        torch.testing.assert_close(changes[1][name], changes[0][name] * factor, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("optimizer", [None, "muon"])
def test_a_stopped_training_goes_on_and_changed_rates_are_noticed(tmp_path, optimizer):
    options = {"optimizer": optimizer, "freeze_layers": 1, "image_learning_rate": RATE / 2}
    options |= {"learning_rate": RATE, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    options |= {"lr_scheduler_type": "cosine", "no_decay_parameters": ["text_model"], "weight_decay": 0.1}
    whole = trained(trainer_for(tmp_path / "whole", deep_clip(), **options))
    trainer_for(tmp_path, deep_clip(), **options, callbacks=[StopAt(2)]).train()
    resumed = trained(trainer_for(tmp_path, deep_clip(), **options), resume=True)
    assert torch.equal(parameters(resumed), parameters(whole))
    changed = trainer_for(tmp_path, deep_clip(), **{**options, "image_learning_rate": RATE / 4, "max_steps": 6})
    with pytest.raises(ValueError, match=r"image_learning_rate was 0\.0005 and is 0\.00025"):
        changed.train(resume_from_checkpoint=True)


def test_adapters_have_the_rates_of_their_tower(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(deep_clip(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    found = rates(trainer_for(tmp_path, model, image_learning_rate=RATE / 2, freeze_layers=1))
    of_layer = {int(re.search(r"layers\.(\d+)", n)[1]): r for n, r in found.items() if "vision_model" in n}
    assert of_layer == pytest.approx({1: RATE / 2, 2: RATE / 2})


@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_layers_cost_neither_graph_nor_backward(tmp_path, checkpointing):
    def cost(frozen: int) -> tuple[float, ...]:
        encoder, batch = DualEncoder(deep_clip(4, 4).train()), models.Pairs(8).batch()
        if checkpointing:
            encoder.model.gradient_checkpointing_enable({"use_reentrant": False})
        encoder.freeze_layers(frozen)
        encoder.stop_gradients_at_frozen_layers()
        trained = sum(one.numel() for one in encoder.model.parameters() if one.requires_grad)
        backwards = []
        for encode in (encoder.encode_images, encoder.encode_texts):
            embeds = encode(batch)
            with FlopCounterMode(display=False) as counter:  # with what is computed again
                embeds.sum().backward()
            backwards.append(counter.get_total_flops())
        return trained, kept_bytes(encoder, batch), *backwards

    every, half = cost(0), cost(2)
    assert all(less < 0.75 * more for less, more in zip(half, every, strict=True))
    # In the training itself, transformers' checkpointing would make the embeddings require a gradient.
    trainer = trainer_for(tmp_path, deep_clip(), freeze_layers=1, max_steps=1, gradient_checkpointing=checkpointing)
    seen = []
    layers = trainer.model.vision_model.encoder.layers
    layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
    trainer.train()
    assert seen
    assert not any(output.requires_grad for output in seen)


@pytest.mark.parametrize("reentrant", ['{"use_reentrant": false}', '{"use_reentrant": true}'])
@pytest.mark.parametrize("adapts", [False, True])
def test_a_frozen_tower_gets_no_backward_with_checkpointing(tmp_path, adapts, reentrant):
    """Checkpointing makes the embeddings of tokens require a gradient."""
    model: Any = deep_clip()
    text = model.text_model
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": reentrant, "max_steps": 2}
    if adapts:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=r"vision_model.*q_proj"))
        model.enable_input_require_grads()  # as some scripts do
    else:
        options["freeze"] = "text"
    backwards, forwards = [], []
    for layer in text.encoder.layers:
        layer.register_forward_hook(lambda module, args, output: forwards.append(output))
        layer.mlp.register_full_backward_hook(lambda *args: backwards.append(args))
    trainer = trainer_for(tmp_path, model, **options)
    start = parameters(trainer)
    trainer.train()
    assert forwards
    assert not backwards
    assert not any(output.requires_grad for output in forwards)
    assert not torch.equal(parameters(trainer), start)


@pytest.mark.parametrize("text", ["true", "{", "[1]"])
def test_options_that_hold_json_are_read_before_they_are_looked_at(tmp_path, text):
    of_text, of_dict = (
        arguments(tmp_path, freeze_layers=1, gradient_checkpointing=True, gradient_checkpointing_kwargs=settings)
        for settings in ('{"use_reentrant": "false"}', {"use_reentrant": False})
    )
    assert of_text.gradient_checkpointing_kwargs == of_dict.gradient_checkpointing_kwargs == {"use_reentrant": False}
    with pytest.raises(ValueError, match="lr_scheduler_kwargs must be a JSON object such as"):
        arguments(tmp_path, lr_scheduler_type="cosine", lr_scheduler_kwargs=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze_layers": -1}, "freeze_layers must be a whole number of at least 0, got -1"),
        ({"freeze_layers": 3}, "freeze_layers=3, but the text tower has 2 layers"),
        ({"freeze": "image", "image_learning_rate": 1.0}, "image_learning_rate=1 and freeze=image exclude"),
        (
            {"learning_rate": 0.0, "text_learning_rate": 1.0},
            "rate=1 and learning_rate=0 exclude .*: it is relative",
        ),
        (
            {"optim": "galore_adamw", "optim_target_modules": ["mlp"], "text_learning_rate": 0.5},
            "text_learning_rate=0.5 and optim_target_modules=.* exclude each other: each divides",
        ),
        (
            {
                "freeze_layers": 1,
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            "use_reentrant=True loses the gradient",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, deep_clip(), **options)


def test_a_module_that_names_no_towers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="freeze_layers=1 needs vision_model, the image tower, which Own does not"):
        trainer_for(tmp_path, models.Own(), freeze_layers=1)


def test_rates_of_an_optimizer_that_was_passed_are_refused(tmp_path):
    model = deep_clip()
    options = {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None), "image_learning_rate": 0.5}
    with pytest.raises(ValueError, match="image_learning_rate, no_decay_parameters apply only to an optimizer that"):
        trainer_for(tmp_path, model, **options, no_decay_parameters=["text"])


def test_the_command_prints_the_groups_of_any_optimizer(small, capsys):
    infcl(*small, "--image_learning_rate", 0.5, "--freeze_layers", 0, "--max_steps", 1, "--warmup_steps", 1)
    said = capsys.readouterr().out
    assert re.search(r"image tower +AdamW +[0-9,]+ +[0-9,]+ +\S", said), said


@pytest.mark.parametrize("value", ["missing.json", '{"unknown": 1}'])
def test_an_error_in_a_dict_of_options_names_the_option(tmp_path, value):
    with pytest.raises(ValueError, match=r"accelerator_config: .*(missing\.json|unknown)"):
        arguments(tmp_path, accelerator_config=value)
