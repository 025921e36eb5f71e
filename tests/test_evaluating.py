"""`InfCLTrainer.evaluate`: metrics of the whole set, the same on every process and for any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import models
from helpers.evaluation import Captioned, LabelledImages, collate_captions, discerning, labelled
from helpers.trainers import trainer_for

from hf_infcl import ZeroShotDataset, reference
from hf_infcl.evaluation import retrieval_metrics, zero_shot_classifier, zero_shot_metrics
from hf_infcl.training.dual_encoder import DualEncoder

SIZES = range(1, 14)


def embeddings(model: torch.nn.Module, data: ZeroShotDataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all images and all prompts, at once."""
    encoder, collate = DualEncoder(model.eval()), LabelledImages()
    with torch.no_grad():
        images = encoder.encode_images(collate([data[i] for i in range(len(data))]))
        return images, encoder.encode_texts(collate.tokenize(data.prompts()))


def recognised(model: torch.nn.Module, n: int) -> ZeroShotDataset:
    """n images and n classes with a prompt each. The labels are those that the model finds, so its accuracy is 1."""
    images, prompts = embeddings(model, labelled(n, n, ("a {}",)))
    return labelled(n, n, ("a {}",), labels=(images @ prompts.T).argmax(1).tolist())


def rank_sizes(rank: int, world_size: int, folder: str) -> list[dict[str, float]]:
    """Metrics of n labelled images and of n images with captions, for each n in SIZES."""
    model, options = discerning(models.clip()), {"per_device_eval_batch_size": 2}
    zero_shot = trainer_for(folder, model, data_collator=LabelledImages(), **options)
    pairs = trainer_for(folder, model, data_collator=collate_captions, **options)
    measured = [zero_shot.evaluate(recognised(model, n)) | pairs.evaluate(Captioned(n)) for n in SIZES]
    kept = "acc1", "class_recall", "retrieval_recall", "loss"
    return [{name: value for name, value in m.items() if any(word in name for word in kept)} for m in measured]


def test_metrics_do_not_depend_on_the_number_of_processes(ranks, tmp_path):
    alone = ranks.run(rank_sizes, 1, str(tmp_path))[0]
    for world_size in range(1, 6):
        for found in ranks.run(rank_sizes, world_size, str(tmp_path)):
            for n, metrics, expected in zip(SIZES, found, alone, strict=True):
                assert metrics["eval_acc1"] == metrics["eval_mean_per_class_recall"] == 1, (n, world_size)
                # The loss is a sum of rounded numbers that depend on the micro-batches; the others are counts.
                assert metrics.pop("eval_loss") == pytest.approx(expected["eval_loss"], rel=1e-5), (n, world_size)
                assert metrics == {name: expected[name] for name in metrics}, (n, world_size)


def rank_evaluate(rank: int, world_size: int, folder: str, build: str) -> dict[str, float]:
    model = getattr(models, build)()
    trainer = trainer_for(
        folder, model, eval_dataset=Captioned(23), data_collator=collate_captions, per_device_eval_batch_size=4
    )
    return trainer.evaluate()


@pytest.mark.parametrize("build", ["clip", "siglip"])
def test_evaluation_is_of_the_whole_set_on_any_number_of_ranks(ranks, tmp_path, build):
    data, model = Captioned(23), getattr(models, build)().eval()
    encoder = DualEncoder(model)
    encoder.initialise_sigmoid()
    with torch.no_grad():
        images = encoder.encode_images({"pixel_values": data.pairs.images})
        owner = [row for row in range(23) for _ in data.captions(row)]
        tokens = torch.cat([data.captions(row) for row in range(23)])
        texts = encoder.encode_texts({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
        first = [owner.index(row) for row in range(23)]
        loss = reference.contrastive_loss(
            images.double(),
            texts[first].double(),
            *encoder.scale_and_bias(),
            objective=encoder.objective,
            pair_ids=torch.arange(23) // 2,
        )
    expected = {"loss": loss.item(), **retrieval_metrics(images, texts, torch.tensor(owner))}
    for world_size in (1, 2, 3):
        for metrics in ranks.run(rank_evaluate, world_size, str(tmp_path), build):
            for name, value in expected.items():
                assert metrics[f"eval_{name}"] == pytest.approx(value, rel=1e-5), (world_size, name)


def rank_zero_shot(rank: int, world_size: int, folder: str) -> dict[str, float]:
    trainer = trainer_for(
        folder, eval_dataset={"colours": labelled(17)}, data_collator=LabelledImages(), per_device_eval_batch_size=4
    )
    return trainer.evaluate()


def test_zero_shot_evaluation_on_any_number_of_ranks(ranks, tmp_path):
    data, encoder, collate = labelled(17), DualEncoder(models.clip().eval()), LabelledImages()
    batch = collate([data[i] for i in range(17)])
    with torch.no_grad():
        classifier = zero_shot_classifier(encoder.encode_texts(collate.tokenize(data.prompts())), 2)
        expected = zero_shot_metrics(encoder.encode_images(batch), classifier, batch["labels"])
    assert 0 < expected["acc5"] < 1
    for world_size in (1, 2, 3):
        for metrics in ranks.run(rank_zero_shot, world_size, str(tmp_path)):
            for name, value in expected.items():
                assert metrics[f"eval_colours_{name}"] == pytest.approx(value), (world_size, name)


def test_evaluation_during_training_and_compute_metrics(tmp_path):
    def compute_metrics(prediction: Any) -> dict[str, float]:
        images, texts = prediction.predictions
        assert images.shape == (9, 12)
        assert texts.shape == (9, 1, 12)
        assert prediction.label_ids.tolist() == [1] * 9
        return {"cosine": float((F.normalize(torch.tensor(images)) * torch.tensor(texts[:, 0])).sum(1).mean())}

    trainer = trainer_for(
        tmp_path,
        eval_dataset=models.Pairs(9),
        compute_metrics=compute_metrics,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    evaluations = [e for e in trainer.state.log_history if "eval_loss" in e]
    assert len(evaluations) == 2
    assert all(-1 <= e["eval_cosine"] <= 1 for e in evaluations)
    assert trainer.state.best_metric == min(e["eval_loss"] for e in evaluations)


def test_zero_shot_without_a_tokenizer_is_an_error(tmp_path):
    class ImagesOnly(LabelledImages):
        tokenize = property()

    trainer = trainer_for(tmp_path, eval_dataset=labelled(5), data_collator=ImagesOnly())
    with pytest.raises(ValueError, match="tokenize"):
        trainer.evaluate()


def test_images_with_labels_have_to_be_a_zero_shot_set(tmp_path):
    subset = torch.utils.data.Subset(labelled(9), range(5))
    with pytest.raises(ValueError, match="ZeroShotDataset itself, not a Subset"):
        trainer_for(tmp_path, eval_dataset=subset, data_collator=LabelledImages()).evaluate()
