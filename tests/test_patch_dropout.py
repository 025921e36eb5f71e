"""Patches of images that training leaves out: the same ones in both passes, and none in evaluations."""

from typing import Any

import pytest
import torch
from helpers import models
from helpers.parity import MODELS, Draws, check
from helpers.trainers import StopAt, TowerTokens, parameters, trained, trainer_for
from helpers.usage import kept_bytes
from torch import Tensor

from hf_infcl.models.counting import count_operations
from hf_infcl.models.dual_encoder import DualEncoder, drop_patches
from hf_infcl.step import step as training_step

NONE = ("align", "siglip2")  # towers without patches that can be left out
KINDS = {kind: (build, kind) for kind, build in models.BUILD.items() if kind not in NONE}
KINDS["dinov2"] = models.vision_text_dinov2, "vision-text-dual-encoder"


class Tokens:
    """The tokens that leave the embeddings of the image tower, before any are dropped and as its layers get them."""

    def __init__(self, model: Any) -> None:
        self.whole: list[Tensor] = []
        self.left: list[Tensor] = []
        self._embeddings = model.vision_model.embeddings
        self._embeddings.register_forward_hook(lambda module, inputs, tokens: self.whole.append(tokens.detach()))

    def watch(self) -> None:
        """Call this once the tower drops patches, since hooks run in their order."""
        self._embeddings.register_forward_hook(lambda module, inputs, tokens: self.left.append(tokens.detach()))


@pytest.mark.parametrize(("build", "kind"), KINDS.values(), ids=KINDS)
def test_every_tower_takes_a_part_of_the_patches(build, kind):
    model = build()
    tokens = Tokens(model)
    dropout = drop_patches(DualEncoder(model), 0.5)
    tokens.watch()
    encoder, batch = DualEncoder(model), models.batch_for(kind)
    embeds = encoder.embed(model.train(), batch)
    assert all(e.isfinite().all() for e in embeds)
    (whole,), (left,) = tokens.whole, tokens.left
    patches = 4
    others = whole.shape[1] - patches
    assert left.shape[1] == others + patches // 2
    assert torch.equal(left[:, :others], whole[:, :others]), "class and register tokens stay"
    drawn = []
    for image, kept in zip(whole[:, others:], left[:, others:], strict=True):
        places = [(image == token).all(1).nonzero().flatten() for token in kept]
        assert all(len(place) == 1 for place in places), "each is one of the patches"
        drawn.append(frozenset(int(place) for place in places))
    assert all(len(places) == patches // 2 for places in drawn)
    assert len(set(drawn)) > 1, "each image has its own"
    model.eval()(**{n: v for n, v in batch.items() if n in ("pixel_values", "input_ids", "attention_mask")})
    assert torch.equal(tokens.left[-1], tokens.whole[-1]), "in evaluation mode all stay"
    dropout.remove()
    encoder.embed(model.train(), batch)
    assert tokens.left[-1].shape == tokens.whole[-1].shape


@pytest.mark.parametrize("kind", NONE)
def test_towers_without_such_patches_are_refused_before_the_training(tmp_path, kind):
    with pytest.raises(ValueError, match=r"patch_dropout leaves patches of images out, and .* Leave patch_dropout out"):
        trainer_for(tmp_path, models.BUILD[kind](), patch_dropout=0.5)


def test_one_s_own_towers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the image tower of TwoTowers \(type None\) is not known to take a part"):
        trainer_for(tmp_path, models.two_towers(), patch_dropout=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_dropout": 1.0}, "patch_dropout must be a number of at least 0 and less than 1, got 1.0"),
        ({"patch_dropout": -0.1}, "patch_dropout must be a number of at least 0 and less than 1, got -0.1"),
        (
            {"patch_dropout": 0.5, "freeze": "image"},
            "patch_dropout=0.5 and freeze=image exclude each other: a frozen tower",
        ),
    ],
)
def test_shares_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, **options)


# ---- Training ----


@pytest.mark.parametrize("options", [{"retain_graphs": "2"}, {"gradient_checkpointing": True}], ids=["retain", "again"])
def test_gradients_are_those_of_autograd_with_the_same_patches(ranks, options):
    """Those of a window without these options are among the cells of test_parity.py."""
    check(ranks, 1, [(objective, "patches", 4) for objective in MODELS], options)


def test_a_resumed_training_drops_the_same_patches_and_a_trained_model_none(tmp_path):
    options = {"patch_dropout": 0.75, "max_steps": 5, "learning_rate": 0.01}
    options |= {"save_steps": 1, "save_strategy": "steps"}
    model = models.clip(dropout=0.1)
    widths = TowerTokens()
    whole = trainer_for(tmp_path / "whole", model, callbacks=[widths], **options)
    whole.train()
    assert widths.steps == [{2}, {2}, {2}, {2}, {2}, set()]
    model.train()(**models.Pairs(4).batch())
    assert widths.steps[-1] == {5}, "after the training nothing is dropped"
    for step in (2, 4):
        place = tmp_path / str(step)
        trainer_for(place, models.clip(dropout=0.1), callbacks=[StopAt(step)], **options).train()
        resumed = trained(trainer_for(place, models.clip(dropout=0.1, seed=3), **options), resume=True)
        assert torch.equal(parameters(resumed), parameters(whole)), step


def test_a_compiled_model_drops_the_same_in_both_passes(tmp_path, monkeypatch):
    """`Draws` fails where the passes differ, also from the forward that asks a model with hooks for its loss."""
    monkeypatch.setattr(training_step, "check_own_loss", lambda context, batch: None)
    torch.manual_seed(0)
    model = models.clip(dropout=0.1)
    Draws(model)
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3}
    trainer_for(tmp_path, model, patch_dropout=0.5, **options).train()


def test_the_tower_computes_and_keeps_less():
    encoder, batch = (
        DualEncoder(models.clip_with({}, {"image_size": 32, "patch_size": 4}).train()),
        models.Pairs(8).batch(),
    )
    batch["pixel_values"] = torch.randn(8, 3, 32, 32)
    whole, kept = count_operations(encoder, batch), kept_bytes(encoder, batch)
    drop_patches(encoder, 0.5)
    half = count_operations(encoder, batch)
    assert half[0][0] == pytest.approx(0.5 * whole[0][0], rel=0.1)
    assert half[1] == whole[1], "the texts"
    assert kept_bytes(encoder, batch) < 0.7 * kept
