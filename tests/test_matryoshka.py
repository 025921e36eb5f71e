"""Embeddings that can be cut: the mean of the losses over prefixes, what is saved of it, and evaluations."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import models
from helpers.demo import infcl
from helpers.parity import MODELS, TOLERANCE, Gradients
from helpers.processors import END
from helpers.shards import numbered
from helpers.trainers import StopAt, parameters, trained, trainer_for
from torch import Tensor

from hf_infcl.evaluation.metrics import score
from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder

DIMS, ROWS = [4, 8], 24


def prefix(features: Tensor, width: int) -> Tensor:
    return F.normalize(features[:, :width], dim=-1)


def rank_gradients(rank: int, world_size: int, folder: str, objective: str, options: dict[str, Any]) -> Any:
    callback = Gradients()
    options |= {"per_device_train_batch_size": ROWS // world_size // 2, "callbacks": [callback]}
    options |= {"max_steps": 1, "max_grad_norm": 0, "matryoshka_dims": DIMS}
    trainer = trained(trainer_for(folder, MODELS[objective](), models.Pairs(ROWS, repeats=3), **options))
    return trainer.state.log_history[0]["loss"], callback.seen


def truth(objective: str, equal_ids: str) -> tuple[float, dict[str, Tensor]]:
    model, data = MODELS[objective](), models.Pairs(ROWS, repeats=3)
    encoder = DualEncoder(model)
    encoder.initialise_sigmoid()
    images, texts = encoder.embed(model, data.batch())
    ids = {"pair_ids": data.ids} if equal_ids == "exclude" else {"image_ids": data.ids, "text_ids": data.ids}
    losses = [
        reference.contrastive_loss(
            prefix(images, width), prefix(texts, width), *encoder.scale_and_bias(), objective=objective, **ids
        ).sum()
        for width in (*DIMS, images.shape[1])
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (2, {"strategy": "disco", "equal_ids": "positive"}),
        (2, {"strategy": "local"}),
        (3, {"strategy": "gather"}),
        (3, {"strategy": "ring", "equal_ids": "positive"}),
    ],
    ids=["one", "disco", "local", "gather", "ring"],
)
def test_gradients_are_those_of_the_mean_over_prefixes(ranks, tmp_path, objective, world_size, options):
    loss, expected = truth(objective, options.get("equal_ids", "exclude"))
    whole = torch.stack([g.norm() for g in expected.values()]).norm()
    for found_loss, found in ranks.run(rank_gradients, world_size, str(tmp_path), objective, options, always_ring=True):
        assert found_loss == pytest.approx(loss, rel=TOLERANCE)
        for name, gradient in expected.items():
            error = (found[name].reshape(gradient.shape) - gradient).norm()
            assert error <= TOLERANCE * gradient.norm() + 1e-6 * whole, name


def test_a_resumed_training_is_the_same_and_the_model_names_its_prefixes(tmp_path):
    options = {"matryoshka_dims": DIMS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trained(trainer_for(tmp_path / "whole", models.clip(0.1), **options))
    trainer_for(tmp_path, models.clip(0.1), **options, callbacks=[StopAt(2)]).train()
    resumed = trained(trainer_for(tmp_path, models.clip(0.1), **options), resume=True)
    assert torch.equal(parameters(resumed), parameters(whole))
    saved = json.loads((tmp_path / "checkpoint-4" / "config.json").read_text(encoding="utf-8"))
    assert saved["matryoshka_dims"] == DIMS
    other = trainer_for(tmp_path, models.clip(0.1), **{**options, "matryoshka_dims": [4], "max_steps": 6})
    with pytest.raises(ValueError, match=r"matryoshka_dims was \[4, 8\] and is \[4\]"):
        other.train(resume_from_checkpoint=True)


def test_an_encoder_returns_the_first_dimensions_normalised():
    model, batch = models.clip().eval(), models.Pairs(5).batch()
    whole, cut = DualEncoder(model), DualEncoder(model, dims=4)
    with torch.no_grad():
        for name in ("encode_images", "encode_texts"):
            torch.testing.assert_close(getattr(cut, name)(batch), prefix(getattr(whole, name)(batch), 4))
    assert (whole.width(), cut.width(), DualEncoder(models.siglip()).width()) == (12, 12, 16)


def test_evaluations_and_saved_files_know_the_dimensions(tmp_path):
    data = [models.Pairs(12)[row] for row in range(12)]
    trainer = trainer_for(tmp_path, models.clip(), eval_dataset=data, matryoshka_dims=DIMS, dims=4)
    encoder = DualEncoder(trainer.model)
    with torch.no_grad():
        batch = models.Pairs(12).batch()
        embeds = [prefix(encode(batch), 4) for encode in (encoder.encode_images, encoder.encode_texts)]
        expected = reference.contrastive_loss(*embeds, *encoder.scale_and_bias()).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    whole = trainer_for(tmp_path, models.clip(), eval_dataset=data).evaluate()["eval_loss"]
    assert abs(whole - expected) > 1e-3
    trainer_for(tmp_path / "saved", models.clip(end=END), numbered(range(8)), matryoshka_dims=DIMS).save_model()
    saved = json.loads((tmp_path / "saved" / "config_sentence_transformers.json").read_text(encoding="utf-8"))
    assert saved["matryoshka_dims"] == DIMS


def test_the_card_has_a_line_for_each_width(small, tmp_path, capsys):
    """With the score that an evaluation of this width has; the results of the training are those of the whole."""
    sets = ["--eval_dataset", tmp_path / "pairs"]
    infcl(*small, *sets, "--matryoshka_dims", 8, 32, "--max_steps", 2)
    results = json.loads((tmp_path / "out/eval_results.json").read_text(encoding="utf-8"))
    rows = [line for line in (tmp_path / "out/README.md").read_text(encoding="utf-8").splitlines() if "pairs" in line]
    for width, shown in (8, "first 8"), (32, "first 32"), (64, "as above"):
        words = ["--model", tmp_path / "out", *sets, "--output_dir", tmp_path / "cut", "--use_cpu"]
        infcl("evaluate", *words, "--dims", width)
        cut = json.loads((tmp_path / "cut/eval_results.json").read_text(encoding="utf-8"))
        assert cut["eval_dims"] == width
        value = score(cut, "eval_pairs_")
        assert f"with the first {width} dimensions of the embeddings" in capsys.readouterr().out
        assert any(f"| {shown} | {value:.4f} |" in row for row in rows)
        assert width < 64 or value == score(results, "eval_pairs_")
    text = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "The score is the recall@1 of pairs (the mean of both directions)." in text
    infcl("card", tmp_path / "out")
    assert (tmp_path / "out/README.md").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matryoshka_dims": [8, 4]}, r"whole numbers from 1 on that rise, got \[8, 4\]"),
        ({"matryoshka_dims": [0, 4]}, r"whole numbers from 1 on that rise, got \[0, 4\]"),
        (
            {"matryoshka_dims": [4, 12]},
            r"matryoshka_dims=\[4, 12\] must be less than the 12 dimensions .* Leave 12 out",
        ),
        ({"dims": 13}, "^dims=13 is more than the 12 dimensions of the embeddings. Choose at most 12"),
    ],
)
def test_dimensions_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, **options)
