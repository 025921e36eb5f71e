"""`InfCLTrainer.evaluate`: metrics of the whole set, the same on every process and for any number of processes."""

import json
import random
import time
from contextlib import nullcontext
from multiprocessing import Event, Value
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from helpers import models
from helpers.evaluation import Captioned, LabelledImages, collate_captions, discerning, labelled
from helpers.processes import on_ranks
from helpers.processors import END, clip_processor
from helpers.shards import write_tars
from helpers.streams import stream_of
from helpers.trainers import arguments, parameters, trained, trainer_for
from torch.utils.data import ChainDataset, DataLoader, Dataset
from transformers.utils import logging

from hf_infcl import ContrastiveCollator, InfCLTrainer, ZeroShotDataset
from hf_infcl.evaluation import retrieval_metrics, tasks, zero_shot_classifier, zero_shot_metrics
from hf_infcl.evaluation.metrics import score
from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.processes.collectives import AnnouncingDataLoader, OtherRankFailedError, gather_rows
from hf_infcl.trainer import evaluating
from hf_infcl.trainer import evaluating as prompts

SIZES = range(1, 14)


def embeddings(model: torch.nn.Module, data: ZeroShotDataset) -> tuple[torch.Tensor, torch.Tensor]:
    """The embeddings of all images and of all prompts, each computed as one batch."""
    encoder, collate = DualEncoder(model.eval()), LabelledImages()
    with torch.no_grad():
        images = encoder.encode_images(collate([data[i] for i in range(len(data))]))
        return images, encoder.encode_texts(collate.tokenize(data.prompts()))


def recognised(model: torch.nn.Module, n: int) -> ZeroShotDataset:
    """n images and n classes with one prompt each. The labels are the model's own predictions, so its accuracy is 1."""
    images, prompts = embeddings(model, labelled(n, n, ("a {}",)))
    return labelled(n, n, ("a {}",), labels=(images @ prompts.T).argmax(1).tolist())


def rank_sizes(rank: int, world_size: int, folder: str, sets: list[ZeroShotDataset]) -> list[dict[str, float]]:
    """Metrics of labelled images, and of as many images with captions."""
    model, options = discerning(models.clip()), {"per_device_eval_batch_size": 2}
    zero_shot = trainer_for(folder, model, data_collator=LabelledImages(), **options)
    pairs = trainer_for(folder, model, data_collator=collate_captions, **options)
    measured = [zero_shot.evaluate(labels) | pairs.evaluate(Captioned(len(labels))) for labels in sets]
    kept = "acc1", "class_recall", "retrieval_recall", "loss"
    return [{name: value for name, value in m.items() if any(word in name for word in kept)} for m in measured]


def test_metrics_do_not_depend_on_the_number_of_processes(ranks, tmp_path):
    sets = [recognised(discerning(models.clip()), n) for n in SIZES]
    runs = {w: ranks.run(rank_sizes, w, str(tmp_path), sets) for w in (1, 2, 3, 5)}
    alone = runs[1][0]
    for world_size, found_by_ranks in runs.items():
        for found in found_by_ranks:
            for n, metrics, expected in zip(SIZES, found, alone, strict=True):
                assert metrics["eval_acc1"] == metrics["eval_mean_per_class_recall"] == 1, (n, world_size)
                # The loss is a sum whose rounding depends on the micro-batches; the other metrics are counts.
                loss = pytest.approx(expected["eval_loss"], rel=1e-5)
                assert metrics == {**expected, "eval_loss": loss}, (n, world_size)


def rank_measures_otherwise(rank: int, world_size: int, folder: str) -> tuple[float | None, float]:
    """A metric that rises on rank 0 only decides about checkpoints and the learning rate."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "greater_is_better": True}
    options |= {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}}
    options["metric_for_best_model"] = "own"
    measured = iter(range(10))
    options["compute_metrics"] = lambda prediction: {"own": (1 - 2 * rank) * next(measured)}
    run = trained(trainer_for(folder, eval_dataset=models.Pairs(8), max_steps=3, **options))
    return run.state.best_metric, run.optimizer.param_groups[0]["lr"]


def test_what_differs_between_processes_decides_nothing(ranks, tmp_path):
    assert ranks.run(rank_measures_otherwise, 2, str(tmp_path)) == [(2, 5e-5)] * 2
    assert (tmp_path / "checkpoint-3").is_dir()


METRIC_IS_USED = [
    {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1},
    {"save_strategy": "best"},
    {"lr_scheduler_type": "reduce_lr_on_plateau"},
    {"lr_scheduler_type": "greedy"},
    {},
]


@pytest.mark.parametrize("options", METRIC_IS_USED, ids=lambda options: "-".join(map(str, options.values())))
def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(tmp_path, options):
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_los", **options}
    run = trainer_for(tmp_path, eval_dataset=models.Pairs(8), **options)
    with pytest.raises(ValueError, match=r"metric_for_best_model(, which)? must be one of loss, .*, got 'los'"):
        run.train()
    assert run.state.global_step == 0
    run.eval_dataset = {"pairs": models.Pairs(8)}
    run.args.metric_for_best_model = "loss"
    with pytest.raises(ValueError, match=r"must be one of pairs_loss, .*, got 'loss'"):
        run.train()


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_by_a_metric_that_should_rise_knows_it(tmp_path, schedule):
    options = {"eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_type": schedule, "max_steps": 1}
    for metric, mode in (("image_retrieval_recall@1", "max"), ("loss", "min"), (None, "min")):
        run = trained(trainer_for(tmp_path, eval_dataset=models.Pairs(8), metric_for_best_model=metric, **options))
        assert run.lr_scheduler.mode == mode


def rank_cannot_measure(rank: int, world_size: int, folder: str) -> str:
    options = {"compute_metrics": lambda prediction: {"own": 1 / (1 - rank)}}
    with pytest.raises((ZeroDivisionError, OtherRankFailedError)) as told:
        trainer_for(folder, **options).evaluate(models.Pairs(8))
    return str(told.value)


def test_an_error_of_one_process_s_metrics_reaches_all(ranks, tmp_path):
    here, there = ranks.run(rank_cannot_measure, 2, str(tmp_path))
    assert there == "division by zero"
    assert here.endswith("  rank 1: ZeroDivisionError: division by zero")


def rank_evaluate(rank: int, world_size: int, folder: str, build: str) -> dict[str, float]:
    options = {"data_collator": collate_captions, "per_device_eval_batch_size": 4}
    return trainer_for(folder, getattr(models, build)(), eval_dataset=Captioned(23), **options).evaluate()


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
        options = {"objective": encoder.kind.objective, "pair_ids": torch.arange(23) // 2}
        embeds = images.double(), texts[first].double()
        loss = reference.contrastive_loss(*embeds, *encoder.scale_and_bias(), **options)
    expected = {"loss": loss.item(), **retrieval_metrics(images, texts, torch.tensor(owner))}
    for world_size in (1, 2, 3):
        for metrics in ranks.run(rank_evaluate, world_size, str(tmp_path), build):
            for name, value in expected.items():
                assert metrics[f"eval_{name}"] == pytest.approx(value, rel=1e-5), (world_size, name)


def rank_zero_shot(rank: int, world_size: int, folder: str) -> dict[str, float]:
    options = {"data_collator": LabelledImages(), "per_device_eval_batch_size": 4}
    return trainer_for(folder, eval_dataset={"colours": labelled(17)}, **options).evaluate()


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


def test_compute_metrics_has_to_return_a_dict(tmp_path):
    for wrong, kind in ((0.5, "float"), (None, "NoneType")):
        trainer = trainer_for(tmp_path, compute_metrics=lambda prediction, wrong=wrong: wrong)
        with pytest.raises(ValueError, match=rf"compute_metrics must return a dict, .* got a {kind}\."):
            trainer.evaluate(models.Pairs(8))


# ---- Several captions ----


def rank_predictions(rank: int, world_size: int, folder: str, collator: Any) -> list[tuple]:
    found = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        found.append((*prediction.predictions, *prediction.label_ids, prediction.inputs))
        return {"captions": len(prediction.predictions[1])}

    options = {"include_for_metrics": ["inputs"], "per_device_eval_batch_size": 2}
    trainer = trainer_for(folder, data_collator=collator, compute_metrics=compute_metrics, **options)
    assert trainer.evaluate(Captioned(7))["eval_captions"] == 13
    return found


def unsorted(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that puts the captions of the last image first."""
    batch = collate_captions(items)
    order = torch.argsort(batch["caption_image"], descending=True, stable=True)
    texts = {name: batch[name][order] for name in ("input_ids", "attention_mask", "caption_image")}
    return {**batch, **texts}


@pytest.mark.parametrize("collator", [collate_captions, unsorted])
def test_compute_metrics_gets_every_caption_once_in_the_order_of_the_images(ranks, tmp_path, collator):
    data, encoder = Captioned(7), DualEncoder(models.clip().eval())
    tokens = torch.cat([data.captions(row) for row in range(7)])
    with torch.no_grad():
        expected_images = encoder.encode_images({"pixel_values": data.pairs.images})
        expected_texts = encoder.encode_texts({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    for world_size in (1, 2, 3):
        for ((images, texts, counts, ids, pair_ids, inputs),) in ranks.run(
            rank_predictions, world_size, str(tmp_path), collator
        ):
            assert images == pytest.approx(expected_images.numpy(), abs=1e-6)
            assert texts == pytest.approx(expected_texts.numpy(), abs=1e-6), "13 rows, with no padding between them"
            assert counts.tolist() == [1, 2, 3, 1, 2, 3, 1]
            assert len(set(ids)) == 13
            assert pair_ids.tolist() == [0, 0, 1, 1, 2, 2, 3]
            assert inputs.tolist() == tokens.tolist()


class Repeating(models.Pairs):
    """Images that alternate between the captions of the first two images."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.tokens = self.tokens[torch.arange(rows) % 2]


def test_recalls_that_cannot_reach_1_are_given_with_their_ceiling(tmp_path, caplog):
    metrics = trainer_for(tmp_path, eval_dataset=Repeating(30)).evaluate()
    for k in (1, 5, 10):
        for kind in ("image", "text"):
            assert metrics[f"eval_{kind}_retrieval_recall@{k}_ceiling"] == k / 15
            assert metrics[f"eval_{kind}_retrieval_recall@{k}"] <= k / 15
    assert "eval_*, as the model reads them, belong to several images, so some recalls cannot reach 100%" in caplog.text
    assert "can reach: image_retrieval_recall@1 6.67%, text_retrieval_recall@1 6.67%, image" in caplog.text
    assert not [name for name in trainer_for(tmp_path, eval_dataset=models.Pairs(9)).evaluate() if "ceiling" in name]


def test_a_training_tells_once_which_recalls_are_out_of_reach(tmp_path, caplog):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"eval_dataset": Repeating(32)}
    trainer_for(tmp_path, max_steps=3, **options).train()
    assert caplog.text.count("some recalls cannot reach 100%") == 1
    logging.warning_once.cache_clear()  # as in a new process
    trainer_for(tmp_path, max_steps=3, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert caplog.text.count("some recalls cannot reach 100%") == 1


# ---- Results and what is saved ----


def test_results_hold_no_number_that_json_does_not_have(tmp_path):
    trainer = trainer_for(tmp_path, eval_dataset=labelled(6, classes=3), data_collator=LabelledImages())
    metrics = trainer.evaluate()
    assert "eval_acc1" in metrics
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    for name in ("eval_results.json", "trainer_state.json"):
        json.loads((tmp_path / name).read_text(), parse_constant=pytest.fail)


def test_a_collator_s_processor_is_saved_with_the_model(tmp_path):
    collator = ContrastiveCollator(clip_processor())
    trainer_for(tmp_path, data_collator=collator).save_model()
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    assert type(processor).__name__ == "CLIPProcessor"
    assert processor.tokenizer("a b")["input_ids"] == collator.processor.tokenizer("a b")["input_ids"]


# ---- Errors ----


class ImagesOnly(LabelledImages):
    tokenize = property()


def test_prompts_are_tokenized_by_the_collator_or_else_by_the_processor(tmp_path):
    def metrics(data_collator: Any, processing_class: Any) -> dict[str, float]:
        args = arguments(tmp_path)
        trainer = InfCLTrainer(models.clip(end=END), args, data_collator, processing_class=processing_class)
        return trainer.evaluate(labelled(5))

    processor = clip_processor()
    assert metrics(ImagesOnly(), processor)["eval_acc1"] >= 0
    message = (
        r"ImagesOnly, has no method tokenize.* processing_class, a {}, has no tokenizer\. "
        "Pass processing_class=AutoProcessor"
    )
    for other in (None, processor.image_processor):
        with pytest.raises(ValueError, match=message.format(type(other).__name__)):
            metrics(ImagesOnly(), other)


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda items: {"pixel_values": torch.zeros(1, 3, 16, 16)}, r"must have .* got keys \['pixel_values'\]"),
        (
            lambda items: {**collate_captions(items), "caption_image": torch.tensor([0, 0, 2, 2, 2, 2])},
            "Image 1 of a batch has no caption",
        ),
        (
            lambda items: {k: v for k, v in collate_captions(items).items() if k != "caption_image"},
            "6 captions for 3 images",
        ),
    ],
    ids=["images alone", "no caption", "no caption_image"],
)
def test_batches_that_cannot_be_evaluated_are_refused(tmp_path, collate, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, eval_dataset=Captioned(3), data_collator=collate).predict(Captioned(3))


def rank_failure(rank: int, world_size: int, folder: str, place: str) -> list[str]:
    """The errors of two evaluations, of pairs and of labelled images, in which rank 1 fails at its second batch."""
    errors = []
    for data, collator in ((Captioned(23), collate_captions), (labelled(23), LabelledImages())):
        model, calls = models.clip(), iter(range(1, 100))

        def fails(*args: Any, calls: Any = calls) -> None:
            if rank == 1 and next(calls) == 2:
                raise MemoryError("no room")

        def collate(items: Any, collator: Any = collator, fails: Any = fails) -> Any:
            if place == "data":
                fails()
            return collator(items)

        if place == "model":
            model.vision_model.register_forward_pre_hook(fails)
        if place == "prompts":
            model.text_model.register_forward_pre_hook(fails)
        collate.tokenize = getattr(collator, "tokenize", None)
        trainer = trainer_for(folder, model, data_collator=collate, per_device_eval_batch_size=3)
        with pytest.raises((MemoryError, RuntimeError)) as error:
            trainer.evaluate(data)
        errors.append(f"{type(error.value).__name__}: {error.value}")
    return errors


@pytest.mark.parametrize("place", ["data", "model", "prompts"])
def test_a_failure_of_one_process_stops_all_with_its_reason(ranks, tmp_path, place):
    healthy, failed, other = ranks.run(rank_failure, 3, str(tmp_path), place)
    assert failed == ["MemoryError: no room"] * 2
    for error in healthy + other:
        assert error.startswith("OtherRankFailedError: All ranks stop")
        assert "rank 1: MemoryError: no room" in error


def test_images_with_labels_have_to_be_a_zero_shot_set(tmp_path):
    subset = torch.utils.data.Subset(labelled(9), range(5))
    with pytest.raises(ValueError, match="needs a ZeroShotDataset, not a Subset"):
        trainer_for(tmp_path, eval_dataset=subset, data_collator=LabelledImages()).evaluate()


def random_numbers(prediction: Any) -> dict[str, float]:
    return {"own": sum(draw_each())}


def draw_each() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]  # noqa: NPY002 - the one that is kept


def test_an_evaluation_leaves_the_training_as_it_is(tmp_path):
    """With dropout, whose masks come from the same generators as the seeds of the evaluation's workers."""
    weights, drawn = [], []
    for options in ({}, {"eval_strategy": "steps", "eval_steps": 1, "compute_metrics": random_numbers}):
        torch.manual_seed(3)
        model = models.clip(dropout=0.3)
        trainer = trainer_for(tmp_path, model, eval_dataset=models.Pairs(8), learning_rate=1e-2, max_steps=3, **options)
        trainer.train()
        weights.append(parameters(trainer))
        drawn.append(draw_each())
    assert torch.equal(*weights)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("wrap", [lambda stream: stream, lambda stream: {"a": stream}, lambda s: ChainDataset([s])])
def test_a_stream_without_end_is_not_evaluated(tmp_path, wrap):
    write_tars(tmp_path / "shards", [8])
    stream = wrap(stream_of(tmp_path / "shards", lanes=1, samples_per_epoch=8))
    with pytest.raises(ValueError, match="cannot be evaluated, since processes cannot"):
        trainer_for(tmp_path, eval_dataset=stream)
    with pytest.raises(ValueError, match="cannot be evaluated, since processes cannot"):
        trainer_for(tmp_path).evaluate(stream)


def test_an_empty_evaluation_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"The evaluation set of eval_\* is empty"):
        trainer_for(tmp_path).evaluate(models.Pairs(0))


# ---- Intervals ----


def test_a_training_knows_the_interval_of_its_change_also_after_a_resume(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "save_strategy": "steps"}
    options |= {"save_steps": 1, "learning_rate": 0.03, "max_steps": 3, "eval_dataset": {"pairs": models.Pairs(40)}}
    whole = trained(trainer_for(tmp_path, **options))
    entries = {e["step"]: e for e in whole.state.log_history if "eval_pairs_loss" in e}
    assert entries.keys() == {0, 1, 2, 3}
    assert "eval_pairs_score_change_low" not in entries[0]
    scores = {step: score(entry, "eval_pairs_") for step, entry in entries.items()}
    assert len({*scores.values()}) > 1
    for step, entry in entries.items():
        name = "eval_pairs_image_retrieval_recall@10"
        assert entry[f"{name}_low"] < entry[name] < entry[f"{name}_high"]
        if step > 0:
            low, high = (entry[f"eval_pairs_score_change_{end}"] for end in ("low", "high"))
            assert low <= scores[step] - scores[0] <= high
            assert low < high
    again = trained(trainer_for(tmp_path, **options), resume=str(tmp_path / "checkpoint-2"))
    resumed = next(e for e in reversed(again.state.log_history) if "eval_pairs_loss" in e)
    for end in ("low", "high"):
        name = f"eval_pairs_score_change_{end}"
        assert resumed[name] == pytest.approx(entries[3][name], abs=1e-5)
    other = models.Pairs(40)  # another set of the same name and size
    other.tokens = other.tokens.flip(0)
    of_other = trainer_for(tmp_path, **{**options, "eval_dataset": {"pairs": other}})
    of_other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    of_set = [e for e in of_other.state.log_history if any(name.startswith("eval_pairs_") for name in e)]
    assert 0 not in [e["step"] for e in of_set], "what the first set had is not compared with this one"
    assert of_set[-1]["step"] == 3
    assert not any("eval_pairs_score_change_low" in e for e in of_set)
    options |= {"learning_rate": 0.0, "max_steps": 1, "eval_dataset": {"pairs": models.Pairs(7)}}
    still = trained(trainer_for(tmp_path / "still", **options))
    (entry,) = [e for e in still.state.log_history if "eval_pairs_score_change_low" in e]
    assert (entry["eval_pairs_score_change_low"], entry["eval_pairs_score_change_high"]) == (0, 0)


@pytest.mark.parametrize("rows", [4, 12])
def test_images_are_loaded_while_the_prompts_are_encoded(tmp_path, rows):
    """The worker loads its first batch once the prompts are begun, which wait for the worker to load."""
    loading, encoding, loaded = Event(), Event(), Value("i", 0)

    class Meeting(LabelledImages):
        def __call__(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            loading.set()
            loaded.value += 1
            assert encoding.wait(60), "the prompts wait for the first batch"
            return super().__call__(items)

        def tokenize(self, texts: list[str]) -> dict[str, torch.Tensor]:
            encoding.set()
            assert loading.wait(60), "no worker loads while the prompts are encoded"
            return super().tokenize(texts)

    found = []
    for collator, workers in ((Meeting(), 1), (LabelledImages(), 0)):
        options = {"per_device_eval_batch_size": 4, "dataloader_num_workers": workers}
        predicted = trainer_for(tmp_path, data_collator=collator, **options).predict(labelled(rows))
        found.append(predicted.predictions.tolist())
    assert loaded.value == rows // 4, "each batch is loaded once"
    assert found[0] == found[1]


@pytest.mark.parametrize("most", [1, prompts.MOST_PROMPTS])
def test_short_prompts_are_encoded_several_batches_at_once(tmp_path, monkeypatch, most):
    """As many as have the tokens of a batch of the longest captions, which have 8; each batch has its own padding."""
    monkeypatch.setattr(prompts, "MOST_PROMPTS", most)
    model, processor, shapes = discerning(models.clip(end=END)), clip_processor(), []
    model.text_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    args = arguments(tmp_path, per_device_eval_batch_size=3)
    data = labelled(9, 7, ("{}", "b {}", "c {}", "d {}", "e {}", "f g {}"))
    predicted = InfCLTrainer(model, args, processing_class=processor).predict(data)
    assert shapes == ([(3, 3), (3, 4)] * 7 if most == 1 else [(6, 4)] * 7)
    embeds = []
    with torch.no_grad():
        for prompt in data.prompts():
            tokens = processor.tokenizer([prompt], return_tensors="pt")
            embeds.append(DualEncoder(model).encode_texts(dict(tokens)))
    classifier = zero_shot_classifier(torch.cat(embeds), 6)
    images = DualEncoder(model).encode_images(ContrastiveCollator(processor)([data[i] for i in range(9)]))
    cosines = images @ classifier.T
    own = cosines.gather(1, torch.as_tensor(predicted.label_ids)[:, None])
    assert predicted.predictions.tolist() == (cosines > own).sum(1).tolist()


def test_classes_with_equal_prompts_have_equal_vectors(tmp_path, monkeypatch):
    """However their embeddings would be rounded in two batches: here, every row of a forward is another one."""
    data = labelled(4, 4, ("see {}", "buy {}"))
    data.class_names = ["a", "b", "a", "c"]
    trainer = trainer_for(tmp_path, models.clip(), data_collator=LabelledImages(), per_device_eval_batch_size=3)
    encoder = trainer.dual_encoder
    monkeypatch.setattr(encoder, "encode_texts", lambda batch, **_: torch.randn(len(batch["input_ids"]), 8))
    vectors = prompts.class_vectors(data, trainer.context, None)
    assert [[torch.equal(one, other) for other in vectors] for one in vectors[:2]] == [
        [True, False, True, False],
        [False, True, False, False],
    ]


def test_a_tokenizer_of_ones_own_may_return_more_than_rows_of_tokens(tmp_path):
    class Counting(LabelledImages):
        def tokenize(self, texts):
            return super().tokenize(texts) | {"lengths": torch.tensor([len(text) for text in texts])}

    class Measuring(ContrastiveCollator):
        def tokenize(self, texts):
            return super().tokenize(texts) | {"lengths": torch.tensor([len(text) for text in texts])}

    collators = (
        (Counting(), LabelledImages(), models.clip()),
        (Measuring(clip_processor()), ContrastiveCollator(clip_processor()), models.clip(end=END)),
    )
    for own, usual, model in collators:
        options = {"per_device_eval_batch_size": 2}
        runs = [trainer_for(tmp_path, model, data_collator=one, **options) for one in (own, usual)]
        found = [run.predict(labelled(5)).predictions.tolist() for run in runs]
        assert found[0] == found[1]


def test_few_batches_lie_in_pinned_memory(tmp_path, monkeypatch):
    """Of those that the workers have loaded: torch's thread would pin all of them."""
    pinned: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(torch.utils.data._utils.pin_memory, "pin_memory", lambda x, _: pinned.append(1) or x)
    options = {"num_workers": 2, "prefetch_factor": 5, "pin_memory": True}
    unbounded = iter(DataLoader(range(12), **options))
    bounded = AnnouncingDataLoader(DataLoader(range(12), **options))
    ahead = []
    for begin in (lambda: next(unbounded), bounded.begin):
        pinned.clear()
        begin()
        for _ in range(100):  # until nothing is pinned any more
            before = len(pinned)
            time.sleep(0.3)
            if before == len(pinned) > 0:
                break
        ahead.append(len(pinned))
    assert ahead[0] >= 10
    assert ahead[1] == 3, "one is being handed over"
    assert [int(batch) for batch in bounded] == list(range(12))


class Epochs(Dataset):
    """Rows that are the epoch in which they are read."""

    def __init__(self) -> None:
        self.epoch = torch.full((), 7).share_memory_()  # that of a training with the same set
        self.read = Event()

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> torch.Tensor:
        epoch = self.epoch.clone()
        self.read.set()
        return epoch


@pytest.mark.parametrize("early", [False, True])
def test_workers_that_start_early_read_the_epoch_of_the_evaluation(tmp_path, early):
    data = Epochs()
    loader = trainer_for(tmp_path).accelerator.prepare(DataLoader(data, num_workers=1, persistent_workers=True))
    batches = AnnouncingDataLoader(loader)
    for epoch in range(2):
        if early:
            data.read.clear()
            batches.begin()
            assert data.read.wait(60)
        assert [int(batch) for batch in batches] == [epoch] * 4
        assert isinstance(loader.base_dataloader, DataLoader), "it is as it was"


@on_ranks(2)
def test_no_worker_starts_before_all_processes_shuffle_alike(rank, world_size, tmp_path):
    trainer = trainer_for(tmp_path, accelerator_config={"use_seedable_sampler": False})
    loader = DataLoader(range(8), shuffle=True, generator=torch.Generator().manual_seed(rank))
    batches = AnnouncingDataLoader(trainer.accelerator.prepare(loader))
    with mock.patch.object(DataLoader, "__iter__", side_effect=AssertionError("it starts")):
        batches.begin()
    assert gather_rows(torch.cat(list(batches))).sort().values.tolist() == list(range(8))


@pytest.mark.parametrize("inputs", [False, True])
def test_no_process_asks_for_the_width_of_what_others_have(tmp_path, monkeypatch, inputs):
    """It would wait for the device after each batch; tokens that a metric wants may be of other widths."""
    calls, pad = [], Accelerator.pad_across_processes
    monkeypatch.setattr(
        Accelerator, "pad_across_processes", lambda *args, **more: calls.append(1) or pad(*args, **more)
    )
    wanted = {"include_for_metrics": ["inputs"]} if inputs else {}
    trainer = trainer_for(tmp_path, models.clip(), per_device_eval_batch_size=4, **wanted)
    trainer.evaluate(models.Pairs(9))
    assert bool(calls) == inputs


def test_texts_are_read_on_the_host(tmp_path):
    trainer = trainer_for(tmp_path, models.clip(), data_collator=collate_captions, per_device_eval_batch_size=4)
    data, loader = Captioned(9), trainer.get_eval_dataloader(Captioned(9))
    names = next(iter(loader)).keys()
    read, metrics = [], []
    apart = tasks.taken_apart
    with mock.patch.object(tasks, "taken_apart", lambda batch: read.append(apart(batch)) or read[-1]):
        metrics.append(trainer.evaluation_loop(loader, "Evaluation").metrics)
    assert len(read) == 3
    for batch, texts in read:
        assert batch.keys() == names, "what the trainer and a subclass of it get is that of the collator"
        assert texts.keys() == names - {"pixel_values"}
        assert all(torch.equal(value, batch[name]) for name, value in texts.items())
    assert next(iter(loader)).keys() == names
    with mock.patch.object(evaluating, "_texts_kept", return_value=nullcontext()):
        metrics.append(trainer.evaluate(data))
    for name, value in metrics[0].items():
        if "recall" in name or "loss" in name:
            assert metrics[1][name] == value, name


def test_of_labelled_images_ranks_are_gathered_instead_of_embeddings(tmp_path):
    trainer = trainer_for(tmp_path, discerning(models.clip()), data_collator=LabelledImages())
    data = labelled(17)
    predicted = trainer.predict(data)
    images, prompts = embeddings(trainer.model, data)
    classifier = zero_shot_classifier(prompts, len(data.templates))
    ranks = torch.as_tensor(predicted.predictions)
    cosines = images @ classifier.T
    labels = torch.as_tensor(predicted.label_ids)
    own = cosines.gather(1, labels[:, None])
    assert ranks.tolist() == (cosines > own).sum(1).tolist()
