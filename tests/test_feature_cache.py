"""Training from cached features of a frozen image tower equals training from the images; features are never stale."""

import os
import signal
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset, Features, Value
from helpers import models
from helpers.pictures import picture
from helpers.processors import END, clip_processor, siglip_processor
from helpers.trainers import arguments, parameters, trainer_for

from hf_infcl import ImageTextDataset
from hf_infcl.data import sources
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.processes.signals import Preempted
from hf_infcl.quality import embedding
from hf_infcl.step import terms

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def rows(count: int = 20, first: int = 0) -> Dataset:
    numbers = range(first, first + count)
    captions = [[LETTERS[n % 26] + " " + LETTERS[n // 2], LETTERS[n % 7]] for n in numbers]
    return Dataset.from_dict({"image": [picture(n, (20, 24)) for n in numbers], "caption": captions, "id": [*numbers]})


class Run:
    """A training with a frozen image tower that counts the images that the tower has seen."""

    def __init__(self, folder: Path, kind: str = "clip", data: Any = None, **options: Any) -> None:
        model, processor = models.clip(end=END), clip_processor()
        if kind == "siglip":
            model, processor = models.siglip(), siglip_processor()
        model = options.pop("model", model)
        if change := options.pop("change", None):
            change(model, processor)
        self.seen: list[int] = []
        # Counts inside of the tower, because calls of the tower itself may return cached features.
        model.vision_model.embeddings.register_forward_hook(lambda *call: self.seen.append(len(call[-1])))
        data = ImageTextDataset(rows(), pair_id_column="id") if data is None else data
        options = {"freeze": "image", "max_steps": 4, "cache_features": str(folder / "features"), **options}
        options |= {"processing_class": processor, "data_collator": None}
        self.trainer = trainer_for(folder / "run", model, data, **options)

    def train(self) -> torch.Tensor:
        self.trainer.train()
        return parameters(self.trainer)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(sources, "ROWS_OF_PART", 8)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_trains_as_from_the_images_and_computes_each_image_once(tmp_path, kind):
    """Two epochs with different captions. A second run computes no features."""
    from_images = Run(tmp_path, kind, cache_features=None).train()
    first, second = Run(tmp_path, kind), Run(tmp_path, kind)
    torch.testing.assert_close(first.train(), from_images, rtol=0, atol=1e-6)
    assert torch.equal(second.train(), parameters(first.trainer))
    assert (sum(first.seen), sum(second.seen)) == (20, 0)
    assert (from_images - parameters(Run(tmp_path, kind).trainer)).norm() > 1e-3, "it has trained"


@pytest.mark.parametrize(
    "options", [{}, {"freeze": "image"}, {"captions": 2, "replay": True}, {"max_text_tokens": 3}], ids=str
)
def test_the_start_runs_once_per_row(tmp_path, monkeypatch, options):
    """keep_features from a cache is that of the frozen copy, which a second run does not run at all."""
    captions, frozen = options.get("captions", 1), options.get("freeze")
    runs = []

    class Counted(DualEncoder):
        def embed(self, model: Any, inputs: Any, *others: Any) -> Any:
            runs.append(len(inputs["input_ids"]))
            return super().embed(model, inputs, *others)

        def encode_texts(self, batch: Any, **options: Any) -> Any:
            runs.append(len(batch["input_ids"]))
            return super().encode_texts(batch, **options)

    monkeypatch.setattr(terms, "DualEncoder", Counted)  # of the copy

    def trained(*, cached: bool) -> torch.Tensor:
        data = ImageTextDataset(rows(), pair_id_column="id", captions_per_image=captions)
        old = ImageTextDataset(rows(8, first=30), pair_id_column="id", captions_per_image=captions)
        given = {"keep_features": 30.0, "replay_dataset": old if options.get("replay") else None}
        given |= {"max_text_tokens": options.get("max_text_tokens")}
        given |= {"learning_rate": 1e-2, "freeze": frozen, "optim": "sgd", "equal_ids": "positive"}
        return Run(tmp_path, data=data, **given, **({} if cached else {"cache_features": None})).train()

    plain = trained(cached=False)
    assert len(runs) == 8, "two micro-batches in each of four steps"
    runs.clear()
    torch.testing.assert_close(trained(cached=True), plain, rtol=0, atol=1e-6)
    assert sum(runs) == (56 if options.get("replay") else 40), "all captions of all rows, and nothing in the training"
    runs.clear()
    torch.testing.assert_close(trained(cached=True), plain, rtol=0, atol=1e-6)
    assert not runs

    def without_start(items: embedding.CachedItems, row: int) -> dict[str, Any]:
        item = whole(items, row)
        del item["at_start"]
        return item

    whole = embedding.CachedItems.__getitem__
    monkeypatch.setattr(embedding.CachedItems, "__getitem__", without_start)
    assert (trained(cached=True) - plain).norm() == 0
    assert len(runs) == 8, "without the cache, the copy runs"


def test_features_of_new_and_old_pairs_are_computed(tmp_path):
    """A replay trains as from the images: 5 new and 3 old pairs in each step, in two passes over the old ones."""

    def run(**options: Any) -> Run:
        old = ImageTextDataset(rows(8, first=30), pair_id_column="id")
        return Run(tmp_path, replay_dataset=old, replay_share=0.4, **options)

    cached = run()
    torch.testing.assert_close(cached.train(), run(cache_features=None).train(), rtol=0, atol=1e-6)
    assert sum(cached.seen) == 28


def test_the_training_does_not_depend_on_whether_features_were_computed(tmp_path):
    run = Run(tmp_path)
    before = torch.get_rng_state()
    run.trainer.get_train_dataloader()
    assert sum(run.seen) == 20
    assert torch.equal(torch.get_rng_state(), before), "dropout draws from it"


def test_a_run_is_resumed_from_a_checkpoint(tmp_path):
    whole = Run(tmp_path, save_strategy="steps", save_steps=2).train()
    resumed = Run(tmp_path)
    resumed.trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(parameters(resumed.trainer), whole)
    assert resumed.seen == []


def test_an_interrupted_run_goes_on_with_the_next_shard(tmp_path):
    Run(tmp_path).trainer.get_train_dataloader()
    (place,) = (tmp_path / "features").iterdir()
    shards = sorted(place.glob("images-*.npy"))
    assert [shard.name for shard in shards] == [f"images-0000{n}-of-00003.npy" for n in range(3)]
    kept = shards[0].read_bytes()
    shards[1].unlink()
    (place / "_77.images-00001-of-00003.npy").write_bytes(b"half")
    again = Run(tmp_path)
    again.trainer.get_train_dataloader()
    assert sum(again.seen) == 8
    assert shards[0].read_bytes() == kept


def test_a_signal_ends_the_run_after_the_shard(tmp_path):
    run = Run(tmp_path)
    embeddings = run.trainer.model.vision_model.embeddings
    embeddings.register_forward_hook(lambda *call: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match="143"):
        run.trainer.train()
    assert len(list((tmp_path / "features").glob("*/images-*.npy"))) == 1


@pytest.mark.parametrize("damage", ["changed", "cut", "without its checksum"])
def test_a_damaged_shard_is_computed_again(tmp_path, damage, caplog):
    Run(tmp_path).trainer.get_train_dataloader()
    shard = next((tmp_path / "features").glob("*/images-00001-*.npy"))
    content = shard.read_bytes()
    if damage == "changed":
        shard.write_bytes(content[:-100] + bytes(100))
    elif damage == "cut":
        shard.write_bytes(content[:300])
    else:
        shard.with_suffix(".json").unlink()
    again = Run(tmp_path)
    again.trainer.get_train_dataloader()
    assert sum(again.seen) == 8
    assert shard.read_bytes() == content
    assert "images-00001-of-00003.npy is damaged, or has no checksum. It is computed again." in caplog.text


CHANGES = ["weights", "hidden_act", "layer_norm_eps", "module", "processor", "rows", "order", "decoding"]


@pytest.mark.parametrize("changed", CHANGES)
def test_whatever_the_features_depend_on_gives_others(tmp_path, changed):
    Run(tmp_path).trainer.get_train_dataloader()
    options: dict[str, Any] = {}
    if changed == "weights":
        options["change"] = lambda model, _: model.vision_model.post_layernorm.bias.data.add_(1e-3)
    elif changed in ("hidden_act", "layer_norm_eps"):
        value = {"hidden_act": "gelu", "layer_norm_eps": 1e-2}[changed]
        options["model"] = models.clip_with({}, {changed: value})
        options["model"].load_state_dict(models.clip(end=END).state_dict())
    elif changed == "module":
        options["change"] = lambda model, _: setattr(model.vision_model.post_layernorm, "eps", 1e-2)
    elif changed == "processor":
        options["change"] = lambda _, processor: setattr(processor.image_processor, "image_mean", (0.1, 0.2, 0.3))
    elif changed == "decoding":
        options["data"] = ImageTextDataset(rows(), pair_id_column="id", min_side=8)
    else:
        data = rows(first=1) if changed == "rows" else rows().select([*range(1, 20), 0])
        options["data"] = ImageTextDataset(data, pair_id_column="id")
    other = Run(tmp_path, **options)
    other.trainer.get_train_dataloader()
    assert sum(other.seen) == 20
    assert len(list((tmp_path / "features").iterdir())) == 2


@pytest.mark.parametrize("folder", [".", "features", "a/b"])
def test_a_folder_that_would_be_pushed_is_refused(tmp_path, folder):
    with pytest.raises(ValueError, match=r"is inside output_dir .*Choose a folder outside, or .*_features\."):
        arguments(tmp_path, freeze="image", cache_features=str(tmp_path / folder))
    for other in (tmp_path / "_features", tmp_path.parent):
        arguments(tmp_path, freeze="image", cache_features=str(other))


def test_a_file_that_changed_gives_others(tmp_path):
    for n in range(16):
        picture(n, (20, 24)).save(tmp_path / f"{n}.png")
    data = Dataset.from_dict({"image": [str(tmp_path / f"{n}.png") for n in range(16)], "caption": ["a"] * 16})
    pairs = ImageTextDataset(data)
    before = pairs.image_fingerprint()
    assert ImageTextDataset(data).image_fingerprint() == before
    picture(99, (24, 20)).save(tmp_path / "3.png")
    assert pairs.image_fingerprint() != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": None}, "the image tower trains. Freeze it"),
        ({"data": models.Pairs(20)}, "the training set is a Pairs"),
        ({"data": {"augmentation": "crop"}}, "may differ from epoch to epoch"),
        ({"data": {"on_bad_sample": "skip"}}, "may differ from epoch to epoch"),
        ({"torch_compile": True}, "torch_compile is on"),
        (
            {"data": {"negative_caption_column": "wrong"}, "keep_features": 3.0},
            "needs the embeddings of negative captions",
        ),
    ],
)
def test_what_cannot_be_cached_is_refused(tmp_path, options, message):
    if isinstance(options.get("data"), dict):
        table = rows().add_column("wrong", ["b"] * 20)
        options = {**options, "data": ImageTextDataset(table, **options["data"])}
    run = Run(tmp_path, **options)
    with pytest.raises(ValueError, match=f"cache_features computes .*, but .*{message}"):
        run.trainer.get_train_dataloader()


def _cached_by(rank: int, world_size: int, folder: str) -> tuple[list[int], str]:
    """The images that this process has encoded, and the error for a second data set with a bad row in its shard 1."""
    sources.ROWS_OF_PART = 8
    run = Run(Path(folder), per_device_train_batch_size=2)
    run.trainer.train()
    images = {"image": [None if n == 9 else picture(n) for n in range(20)], "caption": ["a"] * 20}
    features = Features(image=datasets.Image(), caption=Value("string"))
    bad = ImageTextDataset(Dataset.from_dict(images, features=features))
    try:
        Run(Path(folder), data=bad, per_device_train_batch_size=2).trainer.get_train_dataloader()
    except (RuntimeError, ValueError) as error:
        return run.seen, f"{type(error).__name__}: {error}"
    return run.seen, ""


def test_processes_share_the_shards_and_a_failure(ranks, tmp_path):
    (first, first_error), (second, second_error) = ranks.run(_cached_by, 2, str(tmp_path))
    assert (sum(first), sum(second)) == (12, 8)
    assert second_error.startswith("BadSampleError: Row 9 of the dataset")
    assert first_error.startswith("OtherRankFailedError: ")
    assert "rank 1: BadSampleError: Row 9 of the dataset" in first_error
