"""`infcl check`: every planted fault is found by name, none is invented, however the data are stored."""

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas
import pytest
import torch
import transformers
from helpers.demo import exit_code, infcl, mistake
from helpers.pictures import file_of
from helpers.shards import write_parquet, write_tar
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from hf_infcl import ContrastiveCollator, ImageTextDataset, load_pairs
from hf_infcl.cli.checking import Inspector, copies, read
from hf_infcl.files.text import counted
from hf_infcl.quality.ledger import lines_of

WORDS = [*"abcdefgh", *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")]


class Row(NamedTuple):
    image: bytes
    caption: str


def scene(number: int, size: tuple[int, int] = (48, 40), kind: str = "png", **options: Any) -> bytes:
    """An encoded picture of coloured clouds, which differ from number to number."""
    rng = np.random.default_rng(number)
    coarse = np.clip(rng.integers(0, 256, (6, 6, 1)) + rng.integers(-30, 30, (6, 6, 3)), 0, 255)
    image = Image.fromarray(coarse.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    return file_of(image, kind, **options)


def plain(colour: tuple[int, int, int]) -> bytes:
    return file_of(Image.new("RGB", (48, 40), colour))


def sentence(number: int) -> str:
    return f"the {WORDS[number % 18]} and {WORDS[number // 18 % 18]} of picture {number}"


def clean(count: int = 40) -> list[Row]:
    return [Row(scene(number), sentence(number)) for number in range(count)]


@functools.cache
def planted() -> tuple[list[Row], dict[str, set[int]]]:
    """Rows with each fault, and the numbers of the faulty rows."""
    rows = clean()
    faults = {
        "broken": {3: Row(b"no image", "a broken file"), 7: Row(scene(7)[:900], "half a file")},
        "captionless": {5: Row(scene(5), " ")},
        "tiny": {8: Row(scene(8, (1, 30)), "a line")},
        "huge": {9: Row(scene(9, (4800, 3500), "jpeg"), "a huge one")},
        "one_colour": {11: Row(plain((255, 255, 255)), "white"), 12: Row(plain((9, 9, 9)), "black")},
        "cut": {14: Row(scene(14), "a long caption " * 60)},
        "foreign": {16: Row(scene(16), "Жёлтая бабочка на цветке"), 17: Row(scene(17), "一只黄色的蝴蝶")},
        "file_name": {19: Row(scene(19), "IMG_2231.jpg"), 20: Row(scene(20), "00020")},
        "number": {22: Row(scene(22), "217"), 23: Row(scene(23), "n01440764")},
        "repeated_captions": {25: Row(scene(25), "The same  words"), 26: Row(scene(26), "the same words")},
        "repeated_images": {
            28: Row(scene(900), "the first of two"),
            29: Row(scene(900, kind="jpeg", quality=60), "the second of two"),
            30: Row(scene(900, (96, 80)), "a larger one"),
        },
    }
    for replaced in faults.values():
        for number, row in replaced.items():
            rows[number] = row
    return rows, {kind: set(replaced) for kind, replaced in faults.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CLIP with a byte-level tokenizer that knows English, of up to 77 tokens and images of 8 × 8 pixels."""
    folder = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*map(sentence, range(40)), "a handwritten long caption"] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=77, **special)
    sides = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    transformers.CLIPProcessor(transformers.CLIPImageProcessorPil(**sides), tokenizer).save_pretrained(folder)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 600, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    return folder


# ---- Ways to store them; each returns the words of a training ----


def as_folder(folder: Path, rows: list[Row]) -> list[Any]:
    (folder / "train").mkdir(parents=True)
    lines = []
    for number, row in enumerate(rows):
        (folder / f"train/{number:05d}.png").write_bytes(row.image)
        lines.append(json.dumps({"file_name": f"{number:05d}.png", "caption": row.caption}))
    (folder / "train/metadata.jsonl").write_text("\n".join(lines))
    return ["--dataset", folder]


def as_csv(folder: Path, rows: list[Row]) -> list[Any]:
    as_folder(folder / "images", rows)
    paths = [folder / f"images/train/{number:05d}.png" for number in range(len(rows))]
    (folder / "table").mkdir()
    captions = [row.caption for row in rows]
    pandas.DataFrame({"filepath": paths, "title": captions}).to_csv(folder / "table/train.csv", index=False)
    return ["--dataset", folder / "table"]


def as_saved(folder: Path, rows: list[Row]) -> list[Any]:
    columns = {"image": [row.image for row in rows], "caption": [row.caption for row in rows]}
    images = [{"bytes": row.image, "path": f"{number:05d}.png"} for number, row in enumerate(rows)]
    features = datasets.Features(image=datasets.Image(decode=False), caption=datasets.Value("string"))
    datasets.DatasetDict(train=datasets.Dataset.from_dict({**columns, "image": images}, features)).save_to_disk(folder)
    return ["--dataset", folder]


def as_shards(folder: Path, rows: list[Row]) -> list[Any]:
    """Tar files and a parquet file, which are two sets."""
    files = [
        [(f"{number:05d}.png", row.image), (f"{number:05d}.txt", row.caption.encode())]
        for number, row in enumerate(rows)
    ]
    for shard in range(3):
        write_tar(folder / f"{shard}.tar", [file for sample in files[shard * 10 : shard * 10 + 10] for file in sample])
    images = [{"bytes": row.image, "path": f"{number:05d}.png"} for number, row in enumerate(rows)]
    rest = slice(30, None)
    captions = [row.caption for row in rows]
    write_parquet(folder / "rest.parquet", range(len(rows))[rest], image=images[rest], caption=captions[rest])
    return ["--streaming", "--dataset", folder / "{0..2}.tar", folder / "rest.parquet"]


FORMS = {"folder": as_folder, "csv": as_csv, "saved": as_saved, "shards": as_shards}


def check(model: Path, folder: Path, *words: Any) -> tuple[int, dict[str, dict[str, set[str]]], str]:
    """The exit code, the rows by set and kind of finding, and the options to add."""
    base = ["--model", model, "--output_dir", folder, "--use_cpu", "--dataloader_num_workers", 0]
    code = exit_code("check", *base, *words)
    found = json.loads((folder / "_check.json").read_text())
    sets = {
        name: {finding["kind"]: set(finding["rows"]) for finding in of_set["findings"]}
        for name, of_set in found["sets"].items()
    }
    return code, sets, found["options"]


@pytest.mark.parametrize("form", FORMS)
def test_each_planted_fault_is_found_and_no_other(form, model, tmp_path, capsys):
    rows, faults = planted()
    code, found, options = check(model, tmp_path / "out", *FORMS[form](tmp_path / "data", rows), "--all")
    last = {name: int(name.split()[-1]) for names in found["train"].values() for name in names}
    if form == "shards":  # rows of the parquet file begin at 0
        last = {name: number + 30 * name.startswith("1/") for name, number in last.items()}
    numbers = {kind: {last[name] for name in names} for kind, names in found["train"].items()}
    assert numbers == faults
    assert code == 1
    assert "--on_bad_sample skip" in options
    assert "--min_side 16" in options
    printed = capsys.readouterr().out
    what = "sample" if form == "shards" else "row"
    assert f"SPOILS: 2 of 40 pairs (5.00%) cannot be read: {what}" in printed
    assert f"--pair_id_column {'title' if form == 'csv' else 'caption'}" in options
    assert ("--samples_per_epoch 37" in options) == (form == "shards")


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_invented_about_a_clean_set(form, model, tmp_path, capsys, caplog):
    words = FORMS[form](tmp_path / "data", clean())
    as_folder(tmp_path / "test", [Row(scene(number), f"another {number} picture") for number in range(100, 130)])
    code, found, options = check(model, tmp_path / "out", *words, "--eval_dataset", tmp_path / "test")
    assert code == 0
    assert found == {"train": {}, "pairs": {}}
    assert "on_bad_sample" not in options
    assert ("--samples_per_epoch 40" in options) == (form == "shards"), "read to the end without --all"
    printed = capsys.readouterr().out
    assert "Nothing wrong was found." in printed
    assert printed.count("It was not checked whether captions fit their images. `infcl score` checks that.") == 1
    if form != "shards":
        short = ["--leave_out", "noisy", "--max_steps", 2, "--global_batch_size", 20]
        check(model, tmp_path / "out", *words, *short)
        assert caplog.text.count("this training sees each pair 1.0 times, and the rule begins after 3") == 1
    if form == "shards":
        assert "samples_per_epoch" not in check(model, tmp_path / "out", *words, "--check_samples", 20)[2]


def test_copies_between_training_and_evaluation_are_found(model, tmp_path):
    as_folder(tmp_path / "train", clean(30))
    both = [Row(scene(4, (96, 80), "jpeg"), "seen before"), *[Row(scene(n), sentence(n)) for n in range(100, 110)]]
    as_folder(tmp_path / "test", both)
    words = ["--dataset", tmp_path / "train", "--eval_dataset", tmp_path / "test"]
    code, found, _ = check(model, tmp_path / "out", *words)
    assert (code, found) == (1, {"train": {}, "pairs": {"overlap": {"0"}}})


def test_copies_with_equal_pair_ids_are_nothing_wrong(model, tmp_path):
    """For they are not each other's negatives."""
    again = [Row(scene(number, (96, 80), "jpeg"), f"once more {number}") for number in (4, 5)]
    _, saved = as_saved(tmp_path / "saved", [*clean(30), *again])
    rows = datasets.load_from_disk(saved)["train"].add_column("product", [*range(30), 4, 31])
    rows.save_to_disk(tmp_path / "data")
    words = ["--dataset", tmp_path / "data"]
    assert check(model, tmp_path / "out", *words)[1] == {"train": {"repeated_images": {"4", "30", "5", "31"}}}
    words += ["--pair_id_column", "product"]
    assert check(model, tmp_path / "out", *words)[1] == {"train": {"repeated_images": {"5", "31"}}}


def test_old_pairs_are_checked_like_new_ones(model, tmp_path, capsys):
    words = as_folder(tmp_path / "data", clean())
    broken = Row(b"no image", "a broken picture")
    for number in (1, 2):
        old = [Row(scene(100 * number + row), f"the old picture {row} of {number}") for row in range(20)]
        as_folder(tmp_path / f"old{number}", [*old, broken][: 19 + number])
    as_folder(tmp_path / "test", [Row(scene(number), f"another {number} picture") for number in (103, 400, 401)])
    words += ["--replay_dataset", tmp_path / "old1", tmp_path / "old2"]
    words += ["--guard_dataset", f"{tmp_path / 'test'}?split=train"]
    _, found, options = check(model, tmp_path / "out", *words)
    assert found == {**{"train": {}, "replay1": {}, "replay2": {"broken": {"20"}}}, "guard1_test": {"overlap": {"0"}}}
    assert "--on_bad_sample skip" in options
    assert f"looks like an image of --replay_dataset {tmp_path / 'old1'}: row 0 like row 3." in capsys.readouterr().out


def test_captions_that_no_recall_can_tell_apart_are_told_as_a_training_tells_them(model, tmp_path, capsys):
    words = as_folder(tmp_path / "data", clean())
    few = [Row(scene(800 + row), f"caption {row % 21}" + " and more" * 80 * (row < 2)) for row in range(40)]
    as_folder(tmp_path / "test", few)
    words += ["--eval_dataset", f"{tmp_path / 'test'}?split=train"]
    code, found, _ = check(model, tmp_path / "out", *words)
    said = capsys.readouterr().out
    assert code == 1
    assert "ceiling" in found["pairs"]
    infcl("evaluate", "--model", model, *words[2:], "--output_dir", tmp_path / "measured", "--use_cpu")
    results = json.loads((tmp_path / "measured/eval_results.json").read_text())
    for way in ("image", "text"):
        highest = results[f"eval_pairs_{way}_retrieval_recall@1_ceiling"]
        assert 0.5 < highest < 0.6
        assert f"{way}_retrieval_recall@1 of {highest:.2%}" in said
    as_folder(tmp_path / "unique", clean())
    _, found, _ = check(model, tmp_path / "out", *words[:2], "--eval_dataset", f"{tmp_path / 'unique'}?split=train")
    assert "ceiling" not in found["pairs"]


def test_old_pairs_in_shards_have_a_name(model, tmp_path, capsys):
    words = as_folder(tmp_path / "data", clean())
    as_shards(tmp_path / "old", [Row(scene(500 + row), f"old {sentence(row)}") for row in range(40)])
    old = ["--replay_dataset", f"{tmp_path}/old/{{0..2}}.tar?streaming=true"]
    assert check(model, tmp_path / "out", *words, *old)[1].keys() == {"train", "replay1"}
    printed = capsys.readouterr().out
    assert f"--replay_dataset {tmp_path}/old/{{0..2}}.tar: 30 pairs, all read" in printed
    assert "the training set, split train: 40 pairs, all read." in printed


@pytest.mark.parametrize("recipe", [[], ["--recipe", "finetune_alone"]])
def test_a_check_without_a_folder_writes_nothing(model, tmp_path, capsys, monkeypatch, recipe):
    words = as_folder(tmp_path / "data", clean())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words += [*recipe, "--eval_dataset", f"{words[1]}?split=train"]
    assert exit_code("check", "--model", model, "--use_cpu", *words) in (0, 1)
    assert "With --output_dir, it also writes all rows." in capsys.readouterr().out
    assert not list((tmp_path / "here").iterdir())


def test_a_folder_that_cannot_be_written_is_told_before_the_reading(model, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        infcl("check", "--model", model, "--output_dir", tmp_path / "file", *as_folder(tmp_path / "data", clean()))
    printed = capsys.readouterr()
    assert "Nothing can be written to output_dir" in printed.err
    assert "pairs" not in printed.out


def test_pairs_of_one_caption_stand_beside_each_other(model, tmp_path):
    said = {3: "one word", 7: "two words", 12: "one word", 20: "two words", 31: "two words"}
    rows = [row._replace(caption=said.get(number, row.caption)) for number, row in enumerate(clean())]
    check(model, tmp_path / "out", *as_folder(tmp_path / "data", rows))
    (finding,) = json.loads((tmp_path / "out/_check.json").read_text())["sets"]["train"]["findings"]
    assert (finding["kind"], finding["rows"]) == ("repeated_captions", ["7", "20", "31", "3", "12"])
    what = "5 of 40 pairs (12.50%) have a caption that another one also has, such as 'two words' (3 times)"
    assert finding["text"].startswith(what)


def test_a_caption_of_most_pairs_spoils_the_training(model, tmp_path):
    rows = [row._replace(caption="untitled") if number % 3 else row for number, row in enumerate(clean(30))]
    code, found, _ = check(model, tmp_path / "out", *as_folder(tmp_path / "data", rows), "--pair_id_column", "caption")
    assert code == 1
    assert found["train"].keys() == {"same_caption"}


@pytest.mark.parametrize(
    ("count", "word", "words"),
    [
        (1, "pair", "1 pair"),
        (0, "pair", "0 pairs"),
        (2000, "step", "2,000 steps"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (3, "full batch", "3 full batches"),
    ],
)
def test_what_is_counted_has_its_number(count, word, words):
    assert counted(count, word) == words


def test_a_pair_is_named_by_its_row_in_the_table_that_was_not_yet_thinned_out(model, tmp_path, capsys):
    words = as_folder(tmp_path / "data", [*clean(39), Row(b"no image", "a broken file")])
    infcl("score", model, words[1], "--use_cpu", "--on_bad_sample", "skip", "--output_dir", tmp_path / "scores")
    words += ["--exclude", tmp_path / "scores/_ledger.parquet:10%"]
    capsys.readouterr()
    _, found, _ = check(model, tmp_path / "out", *words)
    assert found == {"train": {"broken": {"39"}}}
    file = sorted(path.name for path in (tmp_path / "data").rglob("*.png"))[-1]
    assert re.search(rf"row 39 \(column 'image': '[^']*{file}': UnidentifiedImageError", capsys.readouterr().out)


def test_bad_pairs_that_are_skipped_spoil_nothing(model, tmp_path, capsys):
    rows = [*clean(39), Row(b"no image", "a broken file")]
    words = [*as_folder(tmp_path / "data", rows), "--on_bad_sample", "skip", "--augmentation", "flip_crop"]
    code, found, options = check(model, tmp_path / "out", *words)
    assert (code, found) == (0, {"train": {"broken": {"39"}}})
    assert "on_bad_sample" not in options
    assert "The training leaves them out." in capsys.readouterr().out


def test_the_rest_of_a_damaged_shard_is_one_bad_pair(model, tmp_path):
    words = as_shards(tmp_path, clean())
    whole = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(whole[: len(whole) // 2 + 100])
    code, found, _ = check(model, tmp_path / "out", *words, "--all")
    assert (code, found) == (1, {"train": {"broken": {"the rest of 0/1.tar"}}})


def inspector_of(model: Path, **text: Any) -> Inspector:
    config = transformers.AutoConfig.from_pretrained(model)
    config.text_config.update(text)
    return Inspector(ContrastiveCollator(transformers.AutoProcessor.from_pretrained(model), uint8=True), config)


def test_workers_read_what_one_process_reads(model, tmp_path):
    as_folder(tmp_path / "data", planted()[0])
    data = ImageTextDataset(load_pairs(str(tmp_path / "data"), split="train"))
    inspector = inspector_of(model)
    first, second = (read(data, inspector, None, workers=n)[0] for n in (0, 2))
    assert len(first) == 40
    assert first == second
    sampled, again = ([pair.name for pair in read(data, inspector, 12)[0]] for _ in range(2))
    assert len(set(sampled)) == 12
    assert sampled == again, "always the same"


@pytest.mark.parametrize(
    ("text", "file", "expected"),
    [
        ("a red circle.", "a red circle.png", (False, False, False)),
        ("Ein schöner Garten in Köln", "", (False, False, False)),
        ("DSC_0001.JPG", "7.png", (False, True, False)),
        ("b7_left", "b7_left.png", (False, True, False)),
        ("12", "0012.png", (False, False, True)),
        ("12 men", "", (False, False, False)),
        ("Собака бежит", "", (True, False, False)),
    ],
)
def test_what_counts_as_foreign_a_file_name_or_a_number(text, file, expected, model):
    faults: dict[str, str] = {}
    inspector_of(model).caption(text, file, faults)
    assert tuple(fault in faults for fault in ("foreign", "file_name", "number")) == expected


def test_a_tokenizer_of_another_model_is_an_error(model):
    with pytest.raises(ValueError, match="token embeddings"):
        inspector_of(model, vocab_size=5).caption("a handwritten seven", "", {})


def test_what_a_picture_cuts_ends_with_an_ellipsis():
    assert lines_of("a cat and a dog", 8, 2) == ["a cat", "and a …"]
    assert lines_of("a cat and a dog", 8, 3) == ["a cat", "and a", "dog"]
    assert lines_of("猫" * 20, 8, 2) == ["猫" * 8, "猫" * 6 + " …"], "no spaces"
    assert lines_of("abcdefgh ij", 8, 1) == ["abcdef …"]
    assert lines_of("", 8, 1) == []
    assert lines_of("0/shards-of-the-left-side.tar 00000123", 19, 2) == ["0/shards-of-the-", "left-side.tar …"]


def test_copies_are_those_of_comparing_all_pairs():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, (30, 200), dtype=np.uint8)
    rows = base[rng.integers(0, 30, 400)]
    for row in rows:  # up to three other bits of the hash, and up to 14 other levels
        row[rng.integers(0, 8, 3)] ^= 1 << rng.integers(0, 8, 3).astype(np.uint8) * (rng.random(3) < 0.6)
        row[8:] = np.clip(row[8:].astype(int) + rng.integers(0, 2) * rng.integers(0, 15), 0, 255)
    hashes = [row.tobytes() for row in rows]
    bits = np.unpackbits(rows[:, :8], axis=1).astype(int)
    differing = (bits[:, None] != bits).sum(axis=2)
    levels = np.abs(rows[:, None, 8:].astype(int) - rows[:, 8:]).max(axis=2)
    expected = np.argwhere(np.triu((differing <= 3) & (levels <= 12), 1))
    assert 100 < len(expected) < (np.triu(differing <= 6, 1)).sum()
    assert copies(hashes).tolist() == expected.tolist()
    assert copies([]).shape == copies(hashes[:1]).shape == (0, 2)


# ---- Mistakes, and the check before a training ----


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--check_samples", "0"], 2, "--check_samples must be at least 1"),
        (["--check_samples", "-1"], 2, "check_samples must be a whole number of at least 0, got -1"),
        (["--al"], 2, "There is no option --al"),
        (["--dataset", __file__], 1, "names files"),
        (["--max_text_tokens", "1"], 1, "max_text_tokens must be from"),
        (["--image_size", "7"], 1, "image_size=7 is no multiple of the patches"),
    ],
)
def test_mistakes_end_with_one_line(words, code, message, small, capsys):
    assert message in mistake(capsys, "check", *small[1:], *words, code=code)


def test_a_training_begins_with_a_short_check_that_changes_nothing(small, tmp_path, capsys):
    broken = tmp_path / "pairs/train"
    lines = [json.loads(line) for line in (broken / "metadata.jsonl").read_text().splitlines()]
    Image.new("L", (8, 8), 90).save(broken / lines[3]["file_name"])
    losses = []
    for samples in (None, 0):
        words = [] if samples is None else ["--check_samples", samples]
        infcl(*small, "--output_dir", tmp_path / f"out{samples}", "--logging_steps", 1, *words)
        state = json.loads((tmp_path / f"out{samples}/trainer_state.json").read_text())
        losses.append([entry["loss"] for entry in state["log_history"] if "loss" in entry])
        printed = capsys.readouterr().out
        assert ("26 pairs of the training set were checked." in printed) == (samples is None)
        assert ("1 of 26 pairs (3.85%) has an image of a single colour: row 3 (8 × 8)" in printed) == (samples is None)
        assert "have a caption that another one" not in printed, "which the trainer tells"
    assert losses[0] == losses[1]
