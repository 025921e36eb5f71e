"""Training on several captions per image and on negative captions has the gradient of the definition."""

from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from helpers import models
from helpers.evaluation import Captioned, collate_captions
from helpers.numerics import relative_error
from helpers.parity import FLOOR, MODELS, TOLERANCE, Gradients
from helpers.pictures import picture
from helpers.processes import on_ranks
from helpers.processors import END, clip_processor
from helpers.shards import png, write_parquet
from helpers.trainers import StopAt, arguments, parameters, trained, trainer_for
from torch.utils.data import ConcatDataset, IterableDataset, Subset, default_collate
from transformers import TrainerCallback

from hf_infcl import ImageTextDataset, ImageTextStream, InfCLTrainer
from hf_infcl.loss import reference
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.step.window import Window

ROWS = 24


class WithNegatives(Captioned):
    """Images with one to ``most`` captions; every third also has a negative caption. Two images share each pair id."""

    def __init__(self, rows: int, most: int) -> None:
        super().__init__(rows)
        self.most, self.captions_per_image, self.negatives = most, most, models.Pairs(rows, seed=9).tokens

    def captions(self, row: int) -> torch.Tensor:
        return super().captions(row)[: self.most]

    def __getitem__(self, row: int) -> dict[str, Any]:
        return super().__getitem__(row) | {"negatives": self.negatives[row : row + (row % 3 == 0)]}


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    captions, negatives = ([item[name] for item in items] for name in ("texts", "negatives"))
    tokens = torch.cat(captions + negatives)
    of_captions = torch.arange(len(items)).repeat_interleave(torch.tensor(list(map(len, captions))))
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "caption_image": torch.cat((of_captions, torch.full((sum(map(len, negatives)),), -1))),
        "pair_ids": torch.tensor([item["pair_id"] for item in items]),
    }


def in_any_order(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The same batch with captions and negative captions shuffled together."""
    batch = collate(items)
    order = torch.randperm(len(batch["input_ids"]), generator=torch.Generator().manual_seed(0))
    mixed = ("input_ids", "attention_mask", "caption_image")
    return {name: value[order] if name in mixed else value for name, value in batch.items()}


def without_ids(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in collate(items).items() if name != "pair_ids"}


def truth(objective: str, most: int, equal_ids: str, with_ids: bool) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss and gradients by the definition, for one process that holds the whole batch."""
    model = MODELS[objective]().train()
    encoder = DualEncoder(model)
    encoder.initialise_sigmoid()
    batch = collate([WithNegatives(ROWS, most)[row] for row in range(ROWS)])
    images, texts = encoder.embed(model, batch)
    of_captions = batch["caption_image"][batch["caption_image"] >= 0]
    captions, negatives = texts[: len(of_captions)], texts[len(of_captions) :]
    ids = batch["pair_ids"] if with_ids else torch.arange(ROWS)
    options = {"pair_ids": ids} if equal_ids == "exclude" else {"image_ids": ids, "text_ids": ids[of_captions]}
    scale, bias = encoder.scale_and_bias()
    loss = reference.contrastive_loss(
        images, captions, scale, bias, objective=objective, negative_texts=negatives, **options
    )
    loss.sum().backward()
    cosines = (images[of_captions] * captions).sum(1).detach()
    cosine = torch.stack([cosines[of_captions == image].mean() for image in range(ROWS)]).mean()
    return loss.item(), cosine.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def rank_gradients(rank: int, world_size: int, folder: str, cells: list[tuple]) -> None:
    for objective, most, equal_ids, with_ids, steps, options in cells:
        where = (objective, most, equal_ids, with_ids, steps, options, rank)
        gradients = Gradients()
        given = {"data_collator": in_any_order if with_ids else without_ids, "equal_ids": equal_ids, **options}
        given |= {"per_device_train_batch_size": ROWS // world_size // steps, "gradient_accumulation_steps": steps}
        given |= {"max_steps": 1, "max_grad_norm": 0.0, "callbacks": [gradients]}
        trainer = trained(trainer_for(folder, MODELS[objective](), WithNegatives(ROWS, most), **given))
        loss, cosine, expected = truth(objective, most, trainer.context.equal_ids, with_ids)
        entry = trainer.state.log_history[0]
        assert entry["loss"] == pytest.approx(loss, rel=TOLERANCE), where
        if world_size == steps == 1:
            assert entry["positive_cosine"] == pytest.approx(cosine, rel=1e-5)
        if with_ids or world_size == 1:
            assert entry["texts_per_image"] == pytest.approx((2 if most == 3 else 1) + 1 / 3, abs=1e-3)
        whole = torch.stack([g.norm() for g in expected.values()]).norm()
        frozen = options.get("freeze")
        for name, gradient in expected.items():
            if frozen and name not in gradients.seen:
                assert name.startswith(("vision_model", "visual_projection"))
                continue
            error = (gradients.seen[name].reshape(gradient.shape) - gradient).norm()
            assert error <= TOLERANCE * gradient.norm() + FLOOR * whole, (where, name)


def test_gradients_equal_one_process_with_the_whole_batch(ranks, tmp_path):
    cells = [
        *((objective, most, None, True, 2, {}) for objective in MODELS for most in (1, 3)),
        ("softmax", 3, "positive", False, 1, {}),
        ("softmax", 1, "positive", True, 1, {}),  # UniCL: labels as pair ids
        ("softmax", 3, None, True, 4, {"retain_graphs": "2", "offload_inputs": True}),
        *((objective, 3, None, True, 4, {"texts_at_once": 2, "offload_inputs": True}) for objective in MODELS),
        ("softmax", 3, None, True, 2, {"freeze": "image", "strategy": "local"}),
    ]
    ranks.run(rank_gradients, 1, str(tmp_path), [("sigmoid", 3, None, True, 1, {})])
    ranks.run(rank_gradients, 3, str(tmp_path), cells, always_ring=True)


def pictures(**options: Any) -> ImageTextDataset:
    """Twelve images with three captions each. Every other image has negative captions."""
    rows = {
        "image": [picture(row, (20, 24)) for row in range(12)],
        "caption": [[" ".join("abcdefghijklmno"[row : row + 1 + k]) for k in range(3)] for row in range(12)],
        "wrong": [["p q", "r"] if row % 2 else [] for row in range(12)],
    }
    options = {"captions_per_image": 2, "negative_caption_column": "wrong", **options}
    return ImageTextDataset(datasets.Dataset.from_dict(rows), **options)


def trainer_of_pictures(folder: Any, seed: int = 0, data: Any = None, **options: Any) -> InfCLTrainer:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2, **options}
    options |= {"per_device_train_batch_size": 3, "processing_class": clip_processor(), "data_collator": None}
    return trainer_for(folder, models.clip(seed=seed, end=END), pictures() if data is None else data, **options)


def test_a_run_is_resumed_with_the_captions_that_it_would_have_drawn(tmp_path):
    """There are two windows per epoch; the run stops in the middle of the second epoch."""
    whole = trained(trainer_of_pictures(tmp_path / "whole", save_strategy="no"))
    trainer_of_pictures(tmp_path / "parts", callbacks=[StopAt(3)]).train()
    resumed = trained(trainer_of_pictures(tmp_path / "parts", seed=5), resume=True)
    assert torch.equal(parameters(whole), parameters(resumed))
    for changes, message in (
        ({"data": pictures(captions_per_image=3)}, "2 captions per image.*3 captions per image"),
        ({"data": pictures(captions_per_image=1)}, "equal_ids was 'positive' and is 'exclude'"),
        ({"data": pictures(negative_caption_column=None)}, "data was '.*, negative captions wrong, .* and is '"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of_pictures(tmp_path / "parts", max_steps=8, **changes).train(resume_from_checkpoint=True)


def rank_stops(rank: int, world_size: int, folder: str) -> None:
    trainer_of_pictures(folder, optim="sgd", gradient_accumulation_steps=1, callbacks=[StopAt(3)]).train()


def test_another_number_of_processes_goes_on_with_the_same_captions(ranks, tmp_path):
    ranks.run(rank_stops, 2, str(tmp_path / "parts"))
    whole, resumed = (trainer_of_pictures(tmp_path / name, optim="sgd") for name in ("whole", "parts"))
    whole.train()
    resumed.train(resume_from_checkpoint=True)
    assert relative_error(parameters(resumed), parameters(whole)) < 1e-5


def test_cached_features_of_a_frozen_tower_train_on_the_same_captions(tmp_path):
    cached, plain = (
        trainer_of_pictures(tmp_path, save_strategy="no", freeze="image", cache_features=folder)
        for folder in (str(tmp_path / "_features"), None)
    )
    cached.train()
    plain.train()
    assert torch.equal(parameters(cached), parameters(plain))
    assert cached.context.equal_ids == "positive"
    assert cached.state.log_history[0]["texts_per_image"] > 2


def test_a_stream_of_the_same_captions_has_the_same_loss_and_is_resumed_with_them(tmp_path):
    """A window is one pass over the shard. Each image has two captions and a negative one, so no caption is drawn."""
    rows = {"image": [png(row, 20) for row in range(6)], "caption": [[*"abcdef"[row:], "z"][:2] for row in range(6)]}
    rows["wrong"] = list("uvwxyz")
    path = write_parquet(tmp_path / "0.parquet", range(6), **rows)

    def stream(column: str | None = "wrong") -> ImageTextStream:
        return ImageTextStream(str(path), captions_per_image=2, negative_caption_column=column)

    table = ImageTextDataset(datasets.Dataset.from_dict(rows), captions_per_image=2, negative_caption_column="wrong")
    losses = []
    for name, data in (("stream", stream()), ("table", table)):
        trainer = trained(trainer_of_pictures(tmp_path / name, data=data, max_steps=1, save_steps=1))
        losses.append(trainer.state.log_history[0]["loss"])
        assert trainer.state.log_history[0]["texts_per_image"] == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    with pytest.raises(ValueError, match=r"captions per image, negative captions wrong' and is .*captions per image'"):
        trainer_of_pictures(tmp_path / "stream", data=stream(None)).train(resume_from_checkpoint=True)


class Items(IterableDataset):
    """The items of a data set as a stream."""

    def __init__(self, data: Any) -> None:
        self.dataset = data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.dataset[row] for row in range(len(self.dataset)))


@on_ranks(2, timeout=60)
def test_processes_share_a_stream_with_several_captions(rank, world_size, tmp_path):
    data = pictures(captions_per_image=2)
    whole, stream = (
        trained(trainer_of_pictures(tmp_path, data=one, train_sampling_strategy="sequential", save_strategy="no"))
        for one in (data, Items(data))
    )
    assert torch.equal(parameters(whole), parameters(stream))


@pytest.mark.parametrize("wrapped", [False, True])
def test_several_captions_are_not_excluded(tmp_path, wrapped):
    data = Subset(pictures(), range(12)) if wrapped else pictures()
    with pytest.raises(ValueError, match=r"draws 2 captions per image.*equal_ids is 'exclude'"):
        trainer_of_pictures(tmp_path, data=data, equal_ids="exclude")
    with pytest.raises(ValueError, match="equal_ids must be one of None, 'exclude', 'positive', got 'same'"):
        arguments(tmp_path, equal_ids="same")


@pytest.mark.parametrize(
    ("caption_image", "message"),
    [
        ([0, 0, 1, -1], "Image 2 of a batch has no caption"),
        ([0, 1, 2, 4], r"caption_image must lie in \[0, 4\), got values from 0 to 4"),
        ([0, 1, 2], r"integer tensor of shape \(4,\), got shape \(3,\)"),
        ([0, 1, 2, -2], r"got values from -2 to 2"),
    ],
)
def test_captions_of_no_image_are_refused(tmp_path, caption_image, message):
    def wrong(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return default_collate(items) | {"caption_image": torch.tensor(caption_image)}

    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, data_collator=wrong, equal_ids="positive").train()


def test_micro_batches_of_pairs_and_of_several_captions_make_one_window():
    """`ContrastiveCollator` gives no caption_image if each image has one caption and no caption is negative."""
    window = [
        {"pixel_values": torch.zeros(2, 3), "input_ids": torch.zeros(2, 4)},
        {"pixel_values": torch.zeros(2, 3), "input_ids": torch.zeros(4, 4)},
        {"pixel_values": torch.zeros(2), "input_ids": torch.zeros(2, 4)},
    ]
    assert Window(window).caption_image() is None
    window[1]["caption_image"] = torch.tensor([0, 1, 1, -1])
    assert Window(window).caption_image().tolist() == [0, 1, 2, 3, 3, -1, 4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.ones(3, 6, dtype=torch.int64)}, "3 captions for 4 images. The data collator must return"),
        ({"pair_ids": torch.arange(3), "caption_image": torch.arange(4)}, r"pair_ids as \[4\] int64.*got \[3\]"),
    ],
)
def test_a_batch_of_other_sizes_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, data_collator=lambda items: default_collate(items) | changes).train()


def test_datasets_that_are_trained_together_have_ids_of_their_own(tmp_path):
    """Both parts have twelve rows, whose numbers would be equal ids: 12 instead of 24 in this global batch."""
    rows = [{"image": [picture(row, (20, 24)) for row in range(first, first + 12)]} for first in (0, 12)]
    captions = [["a b", "c"] for _ in range(12)]
    parts = [datasets.Dataset.from_dict({**part, "caption": captions}) for part in rows]
    options = {"captions_per_image": 2, "on_bad_sample": "skip"}
    data = ConcatDataset([ImageTextDataset(part, **options) for part in parts])
    trainer = trainer_of_pictures(tmp_path, data=data, gradient_accumulation_steps=8, max_steps=1, save_strategy="no")
    seen = []
    trainer.add_callback(Ids(trainer, seen))
    trainer.train()
    assert len(set(seen)) == len(seen) == 24


class Ids(TrainerCallback):
    def __init__(self, trainer: InfCLTrainer, seen: list[int]) -> None:
        self.trainer, self.seen = trainer, seen

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        for batch in self.trainer.training_data.window.batches:
            self.seen += batch["pair_ids"].tolist()


def test_parts_with_and_without_ids_are_refused(tmp_path):
    data = ConcatDataset([pictures(), pictures(on_bad_sample="skip")])
    with pytest.raises(ValueError, match=r"'pair_id' is in \d of 3 items of a batch, and not in the others"):
        trainer_of_pictures(tmp_path, data=data, gradient_accumulation_steps=8).train()
    without = iter([False, True])

    def sometimes(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return (without_ids if next(without) else collate)(items)

    with pytest.raises(ValueError, match="pair_ids are in 1 of the 2 micro-batches of a global batch"):
        trainer_for(tmp_path, data=WithNegatives(ROWS, 1), data_collator=sometimes).train()


def test_pairs_need_a_processor_however_they_are_wrapped(tmp_path):
    for data in (ConcatDataset([Subset(pictures(), [0])]), Items(pictures())):
        with pytest.raises(ValueError, match="Images and captions must be prepared for the model"):
            InfCLTrainer(models.clip(), arguments(tmp_path), train_dataset=data)


def test_a_caption_whose_embedding_is_not_finite_is_named(tmp_path):
    """The message gives the caption's row among the texts of its micro-batch, and no row of the training set."""

    def broken(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate(items)
        batch["input_ids"][-1, 1] = models.VOCABULARY - 2
        return batch

    model = models.clip()
    with torch.no_grad():
        model.text_model.embeddings.token_embedding.weight[models.VOCABULARY - 2] = torch.nan
    trainer = trainer_for(tmp_path, model, WithNegatives(ROWS, 3), data_collator=broken)
    with pytest.raises(ValueError, match=r"text embeddings of micro-batch 0, row \d+; [^(]*(?!.*of the training set)"):
        trainer.train()


def test_the_loss_of_an_evaluation_is_that_of_all_captions(tmp_path):
    data = WithNegatives(7, 3)
    batch = collate([data[row] for row in range(7)])
    encoder = DualEncoder(models.clip().eval())
    count = int((batch["caption_image"] >= 0).sum())
    with torch.no_grad():
        images, texts = encoder.encode_images(batch), encoder.encode_texts(batch)[:count]
    ids = batch["pair_ids"]
    scale, _ = encoder.scale_and_bias()
    both = {"image_ids": ids, "text_ids": ids[batch["caption_image"][:count]]}
    expected = {
        "positive": reference.contrastive_loss(images, texts, scale, **both).item(),
        "exclude": reference.contrastive_loss(images, texts[[0, 1, 3, 6, 7, 9, 12]], scale, pair_ids=ids).item(),
    }
    for equal_ids, loss in expected.items():
        recalls = []
        for collator in (collate_captions, collate):  # the second one gives negative captions
            metrics = trainer_for(tmp_path, data_collator=collator, equal_ids=equal_ids).evaluate(data)
            assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
            recalls.append({name: value for name, value in metrics.items() if "recall" in name})
        assert recalls[0] == recalls[1]
