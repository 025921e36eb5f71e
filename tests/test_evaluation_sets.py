"""The data sets of a command may have other columns, splits and formats than each other."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers.demo import infcl
from helpers.pictures import picture
from helpers.shards import number_of, png, write_parquet, write_tar
from helpers.trainers import arguments

from hf_infcl import ImageTextDataset, ImageTextStream, InfCLTrainingArguments, ZeroShotDataset, load_pairs
from hf_infcl.cli import datasets as opening
from hf_infcl.cli.defaults import chooses_model
from hf_infcl.data import sets as set_specs
from hf_infcl.data.images import find_column
from hf_infcl.data.tables import Table
from hf_infcl.options.commands import ColumnOptions, DataOptions, EvaluationOptions, GuardOptions, StartOptions

NUMBERS = ("n00000003", "n00000007")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A CSV file with OpenCLIP's columns."""
    for row in range(3):
        picture(row).save(tmp_path / f"{row}.png")
    lines = ["filepath,title,product", *(f"{tmp_path}/{row}.png,caption {row},{row}" for row in range(3))]
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/train.csv").write_text("\n".join(lines))
    return tmp_path / "tables"


def write_classes(folder: Path, names: tuple[str, ...] = NUMBERS) -> Path:
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        picture(number).save(folder / name / "0.png")
    return folder


def write_images(folder: Path) -> Path:
    """An image folder, whose columns are image and caption."""
    folder.mkdir(parents=True)
    picture(5).save(folder / "5.png")
    (folder / "metadata.csv").write_text("file_name,caption\n5.png,a caption")
    return folder


def trained_on(table: Path, **options: Any) -> DataOptions:
    return DataOptions(dataset=[str(table)], **options)


def test_documented_csv_trains_beside_folders_that_evaluate(table, tmp_path):
    columns = ColumnOptions(image_column="filepath", caption_column="title", pair_id_column="product")
    pairs, classes = write_images(tmp_path / "pairs/test"), write_classes(tmp_path / "classes/test", ("cat", "dog"))
    data, guards = trained_on(table), GuardOptions(guard_dataset=[str(pairs.parent), str(classes.parent)])
    evaluation = EvaluationOptions(eval_dataset=str(pairs.parent), zero_shot_dataset=str(classes.parent))
    rows = opening.training_set(data, columns, InfCLTrainingArguments(str(tmp_path), use_cpu=True))
    assert rows[2]["caption"] == ["caption 2"]
    sets = opening.evaluation_datasets(columns, evaluation, data)
    sets |= opening.guard_datasets(columns, guards, evaluation, data)
    assert [type(s) for s in sets.values()] == [ImageTextDataset, ZeroShotDataset] * 2
    assert sets["pairs"].columns == {"image_column": "image", "caption_column": "caption"}
    assert [s[0]["image"][0, 0, 0] for s in sets.values()] == [5, 0, 5, 0]
    lines = list(opening.describe_sets(sets))
    assert lines[0] == (
        f"pairs is --eval_dataset {pairs.parent}: 1 image of the split test; image_column image, "
        "caption_column caption."
    )
    assert lines[1].endswith("The prompts begin with 'a photo of a cat.', 'a photo of a dog.'.")


def test_usual_columns_are_found_in_every_table(table, tmp_path):
    args = InfCLTrainingArguments(str(tmp_path), use_cpu=True)
    rows = opening.training_set(trained_on(table), ColumnOptions(pair_id_column="caption"), args)
    assert rows.columns == {"image_column": "filepath", "caption_column": "title", "pair_id_column": "title"}
    with pytest.raises(ValueError, match=r"--dataset .*tables: The dataset has no column 'picture'"):
        opening.training_set(trained_on(table), ColumnOptions(image_column="picture"), args)


def test_columns_of_a_set_are_named_by_its_own_options(tmp_path):
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}/0.parquet", [3], photo=["a"], caption=["no"], words=["yes"])
    evaluation = EvaluationOptions(eval_dataset=f"{tmp_path}?image_column=image&caption_column=words")
    (rows,) = opening.evaluation_datasets(ColumnOptions(image_column="photo"), evaluation).values()
    assert rows[0]["caption"] == ["yes"]
    wrong = EvaluationOptions(zero_shot_dataset=f"{tmp_path}?image_column=photos")
    with pytest.raises(
        ValueError, match=r"^--zero_shot_dataset /.*: It has no column 'photos'.*--image_column, or .*image_column=NAME"
    ):
        opening.evaluation_datasets(ColumnOptions(), wrong)
    with pytest.raises(ValueError, match=r"No data set has a column 'nope', which --image_column names"):
        opening.check_columns(ColumnOptions(image_column="nope"), {"pairs": rows})


def test_a_bad_row_is_told_with_its_set(tmp_path):
    write_images(tmp_path / "pairs/test")
    (tmp_path / "pairs/test/5.png").write_bytes(b"no image")
    evaluation = EvaluationOptions(eval_dataset=str(tmp_path / "pairs"))
    (rows,) = opening.evaluation_datasets(ColumnOptions(), evaluation).values()
    with pytest.raises(
        ValueError, match=r"Row 0 of --eval_dataset .*pairs is bad: .*\. Repair or drop it\. `infcl check` lists"
    ):
        rows[0]


@pytest.mark.parametrize("fields", [{"txt": b"a caption"}, {"json": json.dumps({"caption": "a caption"}).encode()}])
def test_tar_shards_evaluate_without_names_of_columns(tmp_path, fields):
    write_tar(tmp_path / "shards/0.tar", [("a.png", png(7)), *((f"a.{name}", fields[name]) for name in fields)])
    evaluation = EvaluationOptions(eval_dataset=str(tmp_path / "shards"))
    (rows,) = opening.evaluation_datasets(ColumnOptions(), evaluation).values()
    assert (number_of(rows[0]), rows[0]["caption"]) == (7, ["a caption"])


def test_json_fields_of_tar_shards_are_columns_beside_their_files(tmp_path):
    fields = json.dumps({"caption": "a", "txt": "b", "width": 3}).encode()
    write_tar(tmp_path / "0.tar", [("a.png", png(7)), ("a.txt", b"c"), ("a.json", fields)])
    row = load_pairs(str(tmp_path), split="train").remove_columns("png")[0]
    assert {name: row[name] for name in ("caption", "txt", "json.txt", "width")} == {
        **{"caption": "a", "txt": "c"},
        **{"json.txt": "b", "width": 3},
    }


def test_a_column_is_only_guessed_if_one_comes_into_question():
    text, image = datasets.Value("string"), datasets.Image()
    assert find_column("image", {"a": image, "path": text}) == "a"
    assert find_column("image", {"a": image, "b": image}) == "image"
    assert find_column("image", {"a": image, "path": text}, "path") == "path"
    assert find_column("caption", {"text": text, "title": text}) == "caption"
    assert find_column("caption", {"text": datasets.List(text), "title": datasets.Value("int64")}) == "text"
    assert find_column("label", {"fine": datasets.ClassLabel(names=["a"]), "id": datasets.Value("int64")}) == "fine"


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (("test", "validation", "train"), "test"),
        (("val", "train"), "validation"),
        (("train",), "train"),
        (("train", "unseen"), "test"),
        ((), "train"),
        (("nothing/there",), "train"),
    ],
)
def test_the_split_to_evaluate_on_is_found(tmp_path, folders, expected):
    for folder in folders or [""]:
        write_classes(tmp_path / "imnet" / folder, ("cat", "dog"))
    source = str(tmp_path / "imnet")
    if folders == ("train", "unseen"):
        tables = {name: datasets.Dataset.from_dict({"image": ["a"]}) for name in folders}
        datasets.DatasetDict(tables).save_to_disk(source := str(tmp_path / "saved"))
    assert Table(source).split_to_evaluate() == expected
    assert Table(str(tmp_path / "absent")).split_to_evaluate() == "test"


def test_a_set_saved_alone_is_evaluated_by_its_own_split(tmp_path):
    datasets.Dataset.from_dict({"image": ["a"]}, split="validation").save_to_disk(tmp_path / "one")
    datasets.Dataset.from_dict({"image": ["a"]}).save_to_disk(tmp_path / "two")
    assert [Table(str(tmp_path / name)).split_to_evaluate() for name in ("one", "two")] == ["validation", "test"]


@pytest.mark.parametrize(
    ("options", "chooses"),
    [
        ({}, False),
        ({"eval_strategy": "epoch"}, False),
        ({"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}, True),
        ({"eval_strategy": "epoch", "lr_scheduler_type": "greedy"}, True),
        ({"average_with_start": "auto"}, True),
        ({"average_with_start": "0.5"}, False),
    ],
)
def test_what_chooses_the_model_is_measured_on_the_validation_split(tmp_path, options, chooses, monkeypatch):
    average = options.pop("average_with_start", None)
    args = arguments(tmp_path / "out", metric_for_best_model="pairs_loss" if options and chooses else None, **options)
    keep = StartOptions(average_with_start=average)
    assert chooses_model(args, keep) == chooses
    said: list[str] = []
    monkeypatch.setattr(set_specs.logger, "warning_once", said.append)
    for folder, splits in (("both", ("train", "test", "validation")), ("only", ("train", "test"))):
        for split in splits:
            write_parquet(tmp_path / folder / f"{split}/0.parquet", [3], caption=[split])
        evaluation = EvaluationOptions(eval_dataset=str(tmp_path / folder))
        guards = GuardOptions(guard_dataset=[str(tmp_path / folder)])
        for sets in (
            opening.evaluation_datasets(ColumnOptions(), evaluation, chooses=chooses),
            opening.guard_datasets(ColumnOptions(), guards, evaluation, chooses=chooses),
        ):
            (rows,) = sets.values()
            assert rows.split == ("validation" if chooses and folder == "both" else "test")
    assert len(said) == 2 * chooses
    assert all("has no split 'validation', so the split 'test' chooses the model" in line for line in said)


def test_the_training_set_is_not_taken_for_that_of_the_evaluation(table):
    columns, data = ColumnOptions(), trained_on(table)
    with pytest.raises(ValueError, match=r"--eval_dataset .*: Its only split, 'train', is trained on"):
        opening.evaluation_datasets(columns, EvaluationOptions(eval_dataset=str(table)), data)
    meant = EvaluationOptions(eval_dataset=f"{table}?split=train")
    assert len(opening.evaluation_datasets(columns, meant, data)["pairs"]) == 3


def test_folders_named_by_numbers_are_told_and_take_names_from_a_file(tmp_path, caplog):
    folder = write_classes(tmp_path / "imnet/val")
    options = {"zero_shot_dataset": str(folder)}
    with caplog.at_level(logging.WARNING):
        sets = opening.evaluation_datasets(ColumnOptions(), EvaluationOptions(**options))
    assert "The names of the 2 classes are numbers, so that the prompts say 'a photo of a n00000003.'" in caplog.text
    prompts = ["a photo of a n00000003.", "a photo of a n00000007."]
    assert opening.what_was_measured(sets) == {"eval_zero_shot_prompts": prompts}

    caplog.clear()
    (tmp_path / "names.txt").write_text("cat\ndog, or hound\n\n")
    (tmp_path / "templates.txt").write_text("a {}.\nsome {}s.\n")
    files = {"class_names": [str(tmp_path / "names.txt")], "templates": [str(tmp_path / "templates.txt")]}
    sets = opening.evaluation_datasets(ColumnOptions(), EvaluationOptions(**options, **files))
    assert sets["zero_shot"].prompts() == ["a cat.", "some cats.", "a dog, or hound.", "some dog, or hounds."]
    assert "numbers" not in caplog.text
    for option in files:
        with pytest.raises(ValueError, match=r"There is no file 'gone\.txt' in the working folder /"):
            opening.evaluation_datasets(
                ColumnOptions(), EvaluationOptions(**options, **{**files, option: ["gone.txt"]})
            )


@pytest.mark.parametrize(
    ("folders", "names", "expected"),
    [
        (("ant", "bee", "cat"), "cat ant bee", "ant bee cat"),
        (("ant", "honey_bee", "cat"), "Cat Ant honey-bee", "Ant Cat honey-bee"),
        (("ant", "bee", "cat"), "ant wasp cat", "ant wasp cat"),
        (("1", "10", "2"), "one two ten", "one ten two"),
        (("n1", "n10", "n2"), "one two ten", "one ten two"),
        (("0", "1", "2"), "2 1 0", "0 1 2"),
        (("ant", "bee", "cat"), "cat ant", "There are 2 class_names ['cat', 'ant'] for the 3 classes"),
        (("ant", "bee"), "ant bee cat", "There are 3 class_names ['ant', 'bee', 'cat'] for the 2 classes"),
        (("ant", "bee", "cat"), "cat wasp ant", "another order: ['cat', 'wasp', 'ant'] instead of ['ant', "),
    ],
)
def test_names_of_classes_meet_their_folders(tmp_path, folders, names, expected):
    write_classes(tmp_path / "data/test", folders)
    (tmp_path / "names.txt").write_text(names.replace(" ", "\n"))
    options = EvaluationOptions(zero_shot_dataset=str(tmp_path / "data"), class_names=[str(tmp_path / "names.txt")])
    if "class" in expected or "order" in expected:
        with pytest.raises(ValueError, match=re.escape(expected)):
            opening.evaluation_datasets(ColumnOptions(), options)
        return
    sets = opening.evaluation_datasets(ColumnOptions(), options)
    assert sets["zero_shot"].class_names == expected.split()
    (line,) = opening.describe_sets(sets)
    known = sorted(folders)
    shown = f"The classes begin with {', '.join(f'{k} = {n}' for k, n in zip(known, expected.split(), strict=True))}."
    assert (shown in line) == (known != expected.split())


def test_tar_files_whose_samples_cannot_be_read_are_told_in_a_few_words(tmp_path):
    many = [(f"photo.{n:04d}.{kind}", png(1)) for n in range(500) for kind in ("png", "txt")]
    apart = [(f"{n:03d}.{kind}", png(1)) for kind in ("png", "txt") for n in range(150)]
    listing = [("all.json", json.dumps({f"picture_{n}.jpg": "a" for n in range(2000)}).encode())]
    for name, files, message in (
        ("dots", many, "and 990 others. The name of a sample ends at the first dot, so 'photo.0000.png' belongs to"),
        (
            "apart",
            apart,
            "The files of a sample must follow each other, but those of '000' are apart. `tar --sort=name`",
        ),
        ("long", [("x" * 44_000 + ".png", png(1))], "'xxx"),
        ("fields", [*listing, ("all.png", png(1))], "and 1,990 others"),
    ):
        write_tar(tmp_path / f"{name}.tar", files)
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            ImageTextStream(str(tmp_path / f"{name}.tar"))
        assert len(str(error.value)) < 900


@pytest.mark.parametrize("kind", ["txt", "json"])
def test_captions_in_files_beside_the_images_are_told(tmp_path, kind):
    (tmp_path / "train").mkdir()
    for row in range(3):
        picture(row).save(tmp_path / f"train/{row}.png")
        (tmp_path / f"train/{row}.{kind}").write_text('{"caption": "a"}')
    with pytest.raises(ValueError, match=rf'0.png lies beside 0.{kind}, .*{{"file_name": "0.png", "caption": "..."}}'):
        load_pairs(str(tmp_path), split="train")


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_captions_above_the_folders_of_the_splits_are_told(tmp_path, name):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        picture(1).save(tmp_path / f"{split}/0.png")
    is_csv = name.endswith("csv")
    lines = ["file_name,caption", "train/0.png,a"] if is_csv else ['{"file_name": "train/0.png", "caption": "a"}']
    (tmp_path / name).write_text("\n".join(lines))
    rows = load_pairs(str(tmp_path), split="test")
    with pytest.raises(ValueError, match=rf"{tmp_path}/{name} lies above: move its lines into {tmp_path}/test/{name}"):
        ImageTextDataset(rows)


def test_results_and_output_of_an_evaluation_say_the_what_was_measured(demo, tmp_path, capfd):
    folder = write_classes(tmp_path / "imnet/val")
    words = ["--use_cpu", "--report_to", "none", "--output_dir", tmp_path / "out", "--bf16"]
    infcl("evaluate", "--model", demo / "clip-init", "--zero_shot_dataset", folder, *words)
    results = json.loads((tmp_path / "out/eval_results.json").read_text())
    assert results["eval_zero_shot_prompts"] == ["a photo of a n00000003.", "a photo of a n00000007."]
    assert results["eval_precision"] == "bf16 autocast"
    printed = capfd.readouterr().out
    assert "images of the split train; image_column image, label_column label. The prompts begin with 'a" in printed
    assert "Measured in bf16 autocast; " in printed
