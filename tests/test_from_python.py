"""What a program does with the trainer beside the command: streams of `datasets`, metrics of its own, features."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from helpers import models, processors
from helpers.pictures import picture
from helpers.trainers import arguments, trainer_for

from hf_infcl import ContrastiveCollator, ImageTextDataset, InfCLTrainer
from hf_infcl.data import captions_of_classes

ROWS = 16


def rows() -> datasets.Dataset:
    letters = [chr(ord("a") + number) for number in range(ROWS)]
    table = {"image": [picture(number) for number in range(ROWS)], "text": [f"{one} b" for one in letters]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    return datasets.Dataset.from_dict(table, features)


def as_item(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": np.asarray(row["image"].convert("RGB")), "caption": [row["text"]]}


def losses(tmp_path: Path, train_dataset: Any, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model, processor = models.clip(), processors.clip_processor()
    args = arguments(
        tmp_path,
        **{"max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "logging_steps": 1},
        train_sampling_strategy="sequential",
        **options,
    )
    collator = ContrastiveCollator.for_model(processor, model.config)
    trainer = InfCLTrainer(model, args, train_dataset=train_dataset, data_collator=collator, processing_class=processor)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_streamed_dataset_of_the_hub_s_library_trains(tmp_path, caplog):
    """As `load_dataset(..., streaming=True)` returns it, with a `map` to items."""
    stream = rows().to_iterable_dataset().map(as_item, remove_columns=["text"])
    table = ImageTextDataset(rows(), caption_column="text")
    assert losses(tmp_path / "a", stream) == pytest.approx(losses(tmp_path / "b", table), rel=1e-5)
    assert "holds no position" not in caplog.text, "nothing is saved"
    losses(tmp_path / "c", stream, save_strategy="steps", save_steps=1)
    assert caplog.text.count("Of a IterableDataset, a checkpoint holds no position") == 1


def test_features_of_transformers_are_in_an_object():
    """Since release 5 it is no tensor; ``pooler_output`` holds the projected embedding."""
    model = models.clip().eval()
    batch = models.batch_for("clip")
    with torch.no_grad():
        images = model.get_image_features(pixel_values=batch["pixel_values"])
        texts = model.get_text_features(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))
        both = model(**batch)
    for found, expected in ((images, both.image_embeds), (texts, both.text_embeds)):
        assert not isinstance(found, torch.Tensor)
        assert found.pooler_output.shape == expected.shape
        normalised = torch.nn.functional.normalize(found.pooler_output, dim=-1)
        torch.testing.assert_close(normalised, expected)


# ---- Captions of classes ----


def classes(label: Any = None) -> datasets.Dataset:
    table = {"image": [picture(number) for number in range(3)], "label": [1, 0, 1]}
    label = label or datasets.ClassLabel(names=["cat", "big_dog"])
    return datasets.Dataset.from_dict(table, datasets.Features({"image": datasets.Image(), "label": label}))


def test_captions_are_made_of_the_names_of_classes():
    made = captions_of_classes(classes(), ["a photo of a {c}", "the {}"])
    assert made["caption"][:2] == [["a photo of a big_dog", "the big_dog"], ["a photo of a cat", "the cat"]]
    dataset = ImageTextDataset(made, pair_id_column="label")
    drawn = set()
    for epoch in range(8):
        dataset.set_epoch(epoch)
        drawn |= {dataset[0]["caption"][0], dataset[2]["caption"][0]}
    assert drawn == {"a photo of a big_dog", "the big_dog"}
    assert dataset[0]["pair_id"] == dataset[2]["pair_id"] != dataset[1]["pair_id"]
    integers = captions_of_classes(classes(datasets.Value("int64")), ["{c}"], class_names=["a", "b"])
    assert integers["caption"] == [["b"], ["a"], ["b"]]
    renamed = captions_of_classes(classes(), ["{c}"], class_names=["big dog", "cat"])
    assert renamed["caption"] == [["big dog"], ["cat"], ["big dog"]], "matched by name"


@pytest.mark.parametrize(
    ("dataset", "templates", "options", "message"),
    [
        (classes(), ["a photo"], {}, r"one \{c\} each"),
        (classes(), "a {c}", {}, r"one \{c\} each"),
        (classes(), [], {}, r"one \{c\} each"),
        (classes(datasets.Value("int64")), ["{c}"], {}, "without names of classes"),
        (
            classes(datasets.Value("int64")),
            ["{c}"],
            {"class_names": ["a"]},
            r"holds \[1\], but there are 1 class names",
        ),
        (classes(), ["{c}"], {"label_column": "kind"}, "there is no 'kind'"),
        (classes().add_column("caption", ["a", "b", "c"]), ["{c}"], {}, "a column 'caption' already"),
    ],
)
def test_classes_that_make_no_captions_are_refused(dataset, templates, options, message):
    with pytest.raises(ValueError, match=message):
        captions_of_classes(dataset, templates, **options)


@pytest.mark.parametrize("kind", [dict, datasets.DatasetDict])
def test_several_sets_are_no_training_set(tmp_path, kind):
    sets = kind(train=datasets.Dataset.from_dict({"a": [1]}), test=datasets.Dataset.from_dict({"a": [1]}))
    told = (
        rf"train_dataset is a {kind.__name__}\. Pass one dataset, such as train_dataset\['train'\], or a .* of several"
    )
    with pytest.raises(ValueError, match=told):
        trainer_for(tmp_path, data=sets)


@pytest.mark.parametrize("data", ["my/images", [models.Pairs(2), models.Pairs(3)], pandas.DataFrame({"a": [1]})])
def test_what_is_no_dataset_is_no_training_set(tmp_path, data):
    told = rf"train_dataset is a {type(data).__name__}\. Pass one dataset, such as ImageTextDataset\(load_pairs\("
    with pytest.raises(ValueError, match=told):
        trainer_for(tmp_path, data=data)
