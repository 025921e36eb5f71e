"""Names of data sets that carry facts of their own."""

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from datasets import Dataset
from helpers import processors
from helpers.demo import infcl, mistake
from helpers.pictures import picture
from helpers.shards import number_of, write_parquet

from hf_infcl import ImageTextDataset, InfCLTrainingArguments, ZeroShotDataset
from hf_infcl.cli import commands
from hf_infcl.cli import datasets as opening
from hf_infcl.data.labelled import captions_of_classes
from hf_infcl.data.sets import STATED, SetSpec, read_sets
from hf_infcl.options.commands import ColumnOptions, DataOptions, EvaluationOptions, GuardOptions

FOLDER = Path(__file__).parent  # any that exists


@pytest.mark.parametrize(
    ("text", "path", "facts"),
    [
        ("my/tables", "my/tables", {}),
        (
            "my/tables?split=validation&caption_column=title",
            "my/tables",
            {"split": "validation", "caption_column": "title"},
        ),
        ("a?split=train[:10%]+test", "a", {"split": "train[:10%]+test"}),
        ("shards/{00000..00127}.tar?split=train", "shards/{00000..00127}.tar", {"split": "train"}),
        ("shards/0000?.tar", "shards/0000?.tar", {}),
        ("shards/0000?.tar?name=b", "shards/0000?.tar", {"name": "b"}),
        ("a?b", "a?b", {}),
        ("https://host/a.tar?token=b&split=c", "https://host/a.tar?token=b&split=c", {}),
        ("https://host/a.tar?token=b?split=c", "https://host/a.tar?token=b", {"split": "c"}),
        ("hf://datasets/a/b?split=c", "hf://datasets/a/b", {"split": "c"}),
        ("a?weight=0.5", "a", {"weight": 0.5}),
    ],
)
def test_facts_are_read_behind_a_question_mark_that_is_no_part_of_the_name(text, path, facts):
    found = SetSpec.read("dataset", text)
    columns = {name: fact for name, fact in facts.items() if name.endswith("_column")}
    assert found == SetSpec(path, "dataset", columns=columns, **{k: v for k, v in facts.items() if k not in columns})


def test_a_folder_whose_name_has_a_question_mark_keeps_it(tmp_path):
    (tmp_path / "a?split=b").mkdir()
    assert SetSpec.read("dataset", f"{tmp_path}/a?split=b").split is None
    assert SetSpec.read("dataset", f"{tmp_path}/a?split=b?split=c").split == "c"


def test_a_mapping_says_the_same():
    found = SetSpec.read("zero_shot_dataset", {"path": "a?b=c", "split": "val", "templates": ["a {}", "the {}"]})
    assert found == SetSpec("a?b=c", "zero_shot_dataset", split="val", templates=["a {}", "the {}"])
    assert SetSpec.read("replay_dataset", {"path": "a", "streaming": True}).streaming
    assert SetSpec.read("dataset", {"path": "a", "weight": 0.5}).weight == 0.5


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "eval_dataset",
            "a?colour=b",
            r"--eval_dataset a: colour is unknown\. A set here can have caption_column, .*split",
        ),
        ("zero_shot_dataset", "a?caption_column=b", "caption_column is unknown.*label_column"),
        ("dataset", "a?weight=much", "weight must be a number, got 'much'"),
        ("replay_dataset", "a?streaming=yes", "streaming must be true or false, got 'yes'"),
        ("eval_dataset", "a?split=", "split must be a text, got ''"),
        ("eval_dataset", "a?split=b&name=d&split=c", r"'a\?split=b&name=d&split=c' states split more than once"),
        ("eval_dataset", {"split": "b"}, "a mapping without a path"),
        ("eval_dataset", f"{FOLDER}?split", f"'{FOLDER}.split' states 'split' behind the folder {FOLDER}. Write FACT="),
        ("dataset", f"{FOLDER}?", "states '' behind the folder"),
        ("dataset", f"{FOLDER}?=x", "states '=x' behind the folder"),
    ],
)
def test_facts_that_make_no_sense_are_refused(option, value, message):
    with pytest.raises(ValueError, match=message):
        SetSpec.read(option, value)


def test_every_option_that_names_a_set_reads_facts():
    parsers = [commands.PARSERS["train"](), commands.PARSERS["embed"]()]
    known = {action.dest for parser in parsers for action in parser._actions}
    assert STATED.keys() <= known
    named = {name for name in known if name.endswith("dataset")}
    assert named <= STATED.keys()


def test_a_file_of_options_names_sets_by_texts_and_mappings(tmp_path):
    file = {
        **{"model": "m", "output_dir": "o", "dataset": {"path": "a", "split": "b"}, "eval_dataset": "c?split=d"},
        "guard_dataset": ["e", {"path": "f", "class_names": ["g", "h"]}],
        "replay_dataset": {"path": "i", "streaming": True},
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(file))
    namespace = (parser := commands.PARSERS["train"]()).read([str(tmp_path / "a.yaml")])
    sets = {role: read_sets(role, getattr(namespace, role)) for role in STATED if role != "data"}
    assert sets["dataset"] == [SetSpec("a", "dataset", split="b")]
    assert sets["eval_dataset"] == [SetSpec("c", split="d")]
    assert [(one.path, one.class_names) for one in sets["guard_dataset"]] == [("e", None), ("f", ["g", "h"])]
    assert sets["replay_dataset"] == [SetSpec("i", "replay_dataset", streaming=True)]
    assert sets["zero_shot_dataset"] == []
    assert {"dataset", "eval_dataset", "guard_dataset"} <= parser.given


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two splits of images with two columns of captions and one of classes."""
    for number, split in enumerate(("train", "val")):
        columns: dict[str, Any] = {"words": ["one", "two"], "others": ["three", "four"], "kind": [0, 1]}
        write_parquet(tmp_path / f"tables/{split}/0.parquet", [10 * number, 10 * number + 1], **columns)
    return tmp_path / "tables"


def test_sets_of_one_command_are_read_each_in_its_own_way(table, tmp_path):
    args = InfCLTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    data = DataOptions([f"{table}?caption_column=words&pair_id_column=kind"])
    trained = opening.training_set(data, ColumnOptions(), args)
    assert trained.columns == {"image_column": "image", "caption_column": "words", "pair_id_column": "kind"}
    evaluation = EvaluationOptions(
        eval_dataset=f"{table}?split=validation&caption_column=others",
        zero_shot_dataset=f"{table}?split=train&label_column=kind&templates=a {{}}",
        class_names=["cat", "dog"],
    )
    guards = GuardOptions(
        guard_dataset=[
            f"{table}?split=validation&caption_column=words",
            {"path": str(table), "split": "train", "label_column": "kind", "class_names": ["a", "b"]},
        ],
    )
    pairs, classes = opening.evaluation_datasets(ColumnOptions(), evaluation, data).values()
    assert (number_of(pairs[0]), pairs[0]["caption"]) == (10, ["three"])
    assert (number_of(classes[1]), classes[1]["label"]) == (1, 1)
    assert classes.prompts() == ["a cat", "a dog"]
    first, second = opening.guard_datasets(ColumnOptions(), guards, evaluation, data).values()
    assert isinstance(first, ImageTextDataset)
    assert (number_of(first[1]), first[1]["caption"]) == (11, ["two"])
    assert isinstance(second, ZeroShotDataset)
    assert (number_of(second[0]), second.class_names) == (0, ["a", "b"])


def test_one_folder_is_split_into_training_and_evaluation(tmp_path):
    """As the guide says."""
    write_parquet(tmp_path / "tables/train.parquet", range(20))
    args = InfCLTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    data = DataOptions([f"{tmp_path / 'tables'}?split=train[:90%]"])
    rest = EvaluationOptions(eval_dataset=f"{tmp_path / 'tables'}?split=train[90%:]")
    trained = opening.training_set(data, ColumnOptions(), args)
    (evaluated,) = opening.evaluation_datasets(ColumnOptions(), rest, data).values()
    assert [number_of(trained[row]) for row in range(len(trained))] == list(range(18))
    assert [number_of(evaluated[row]) for row in range(len(evaluated))] == [18, 19]


def test_old_pairs_and_streams_have_facts(table, tmp_path):
    args = InfCLTrainingArguments(str(tmp_path / "out"), use_cpu=True, replay_share=0.5)

    def old(*facts: str) -> Any:
        named = [f"{table}?{one}" for one in facts]
        return opening.replay_set(DataOptions(["new"], replay_dataset=named), ColumnOptions(), args)

    both = old("caption_column=words", "split=validation&caption_column=others")
    assert [both[row]["caption"] for row in (0, 2)] == [["one"], ["three"]]
    assert old("caption_column=words&streaming=True").caption_column == "words"
    with pytest.raises(ValueError, match="tables and streams"):
        old("caption_column=words&streaming=true", "caption_column=words")
    with pytest.raises(ValueError, match=r"let all state the same, not .*words.* and .*others"):
        old("caption_column=words&streaming=true", "caption_column=others&streaming=true")


def test_sets_of_a_stream_state_their_weights(table, tmp_path):
    def weights(*facts: str, **others: Any) -> Any:
        return opening.mixture_weights(DataOptions([f"a?{one}" for one in facts], **others))

    assert weights("weight=2", "weight=1") == [2, 1]
    assert weights("split=a", "split=a", dataset_weights=[3.0, 1.0]) == [3, 1]
    assert weights("weight=0") == [0], "which the stream refuses"
    for wrong in ({}, {"dataset_weights": [1.0, 1.0]}):
        with pytest.raises(ValueError, match="Give every --dataset its weight"):
            weights("weight=2", "weight=1" if wrong else "split=a", **wrong)
    args = InfCLTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    with pytest.raises(ValueError, match="several sets that are streamed"):
        opening.training_set(DataOptions([f"{table}?weight=2"]), ColumnOptions(), args)


def test_what_a_set_states_comes_before_the_options():
    options = {"image_column": "photo", "caption_column": "title", "pair_id_column": "title"}
    wanted = SetSpec.read("dataset", "a?caption_column=words").wanted(options)
    assert wanted == {"image_column": "photo", "caption_column": "words", "pair_id_column": "words"}
    assert SetSpec.read("dataset", "a").wanted(options) == options


def test_a_set_is_opened_in_python(table):
    pairs = SetSpec.read("eval_dataset", f"{table}?split=validation&caption_column=others").evaluated()
    assert isinstance(pairs, ImageTextDataset)
    assert (number_of(pairs[1]), pairs[1]["caption"]) == (11, ["four"])
    classes = {"path": str(table), "label_column": "kind", "class_names": ["a", "b"], "split": "train"}
    labelled = SetSpec.read("zero_shot_dataset", classes).evaluated()
    assert isinstance(labelled, ZeroShotDataset)
    assert labelled.prompts() == ["a photo of a a.", "a photo of a b."]


def test_commands_read_the_facts_of_their_data(demo, table, tmp_path, capsys):
    model = demo / "clip-init"
    words = ["--output_dir", tmp_path / "out", "--use_cpu", "--report_to", "none"]
    infcl("embed", model, f"{table}?split=validation&caption_column=others", *words)
    assert "2 images and 2 texts were embedded" in capsys.readouterr().out
    assert "has no column 'nothing', which --caption_column names" in mistake(
        capsys, "embed", model, f"{table}?split=validation&caption_column=nothing", *words
    )
    infcl("score", model, f"{table}?split=validation&caption_column=others", *words[:1], tmp_path / "two", *words[2:])
    with pytest.raises(SystemExit):
        infcl("evaluate", "--model", model, "--eval_dataset", f"{table}?kolumn=others", *words)
    assert "--eval_dataset" in (line := capsys.readouterr().err)
    assert "kolumn is unknown. A set here can have caption_column, image_column, name, pair_id_column, split." in line


def test_class_folders_train_with_captions_of_templates(demo, tmp_path, capsys):
    for name, numbers in {"cat": (1, 2, 3), "dog": (4, 5, 6)}.items():
        (tmp_path / "folders" / name).mkdir(parents=True)
        for number in numbers:
            picture(number).save(tmp_path / "folders" / name / f"{number}.png")
    words = ["--model", demo / "clip-init", "--dataset", tmp_path / "folders", "--output_dir", tmp_path / "out"]
    words += ["--use_cpu", "--report_to", "none", "--max_steps", 1, "--per_device_train_batch_size", 4]
    infcl("train", *words, "--caption_templates", "a photo of a {c}", "the {c}")
    assert "have a caption that another one" not in capsys.readouterr().err
    card = (tmp_path / "out/README.md").read_text()
    assert "except those with equal `label`" in card
    args = InfCLTrainingArguments(str(tmp_path / "two"), use_cpu=True)
    named = {"path": str(tmp_path / "folders"), "class_names": ["Kater", "Hund"]}
    rows = opening.training_set(DataOptions([named], caption_templates=["{c}"]), ColumnOptions(), args)
    assert [rows[row]["caption"] for row in (0, 5)] == [["Kater"], ["Hund"]]
    with pytest.raises(ValueError, match=r"There is a column 'caption' already\. Leave caption_templates out, or"):
        captions_of_classes(Dataset.from_dict({"caption": ["a"], "label": [0]}), ["a {c}"])
    with pytest.raises(ValueError, match="--caption_templates is for tables"):
        opening.training_set(
            DataOptions(["a"], streaming=True, samples_per_epoch=1, caption_templates=["{c}"]), ColumnOptions(), args
        )


def test_a_training_takes_another_tokenizer(demo, small, tmp_path, capsys):
    tokenizer = processors.tokenizer()
    tokenizer.save_pretrained(tmp_path / "letters")
    infcl(*small, "--max_steps", 1, "--tokenizer", tmp_path / "letters")
    saved, own = (transformers.AutoTokenizer.from_pretrained(of) for of in (tmp_path / "out", demo / "clip-init"))
    assert saved("a b")["input_ids"] == tokenizer("a b")["input_ids"] != own("a b")["input_ids"]
    words = ["--model", demo / "clip-init", "--eval_dataset", tmp_path / "pairs", "--output_dir", tmp_path / "two"]
    words += ["--use_cpu", "--report_to", "none", "--tokenizer"]
    infcl("evaluate", *words, tmp_path / "letters")
    assert re.search(r"^pairs +loss", capsys.readouterr().out, re.MULTILINE)
    (tmp_path / "empty").mkdir()
    for place, said in {
        "none": "to load a tokenizer from",
        "empty": "does not hold a tokenizer",
    }.items():
        line = mistake(capsys, "evaluate", *words, tmp_path / place)
        assert str(tmp_path / place) in line
        assert said in line
