"""Tar shards as a table: the same samples, and the same messages about bad ones, as the stream of these shards."""

import io
import json
import pickle
import re
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from helpers.processes import context
from helpers.shards import number_of, pair, png, write_tar
from torch.utils.data import DataLoader

from hf_infcl.cli import datasets as opening
from hf_infcl.data import ImageTextDataset, ImageTextStream, ZeroShotDataset, load_pairs
from hf_infcl.data.images import BadSampleError
from hf_infcl.options.arguments import InfCLTrainingArguments
from hf_infcl.options.commands import ColumnOptions, DataOptions, EvaluationOptions

Files = list[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def _datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def sample(number: int, image: str = "png", **fields: Any) -> Files:
    return [(f"{number:03d}.{image}", png(number)), (f"{number:03d}.json", json.dumps(fields).encode())]


def shards(folder: Path, *parts: Files | bytes) -> str:
    """Writes a shard for each of the parts, which are the files of a tar file, or something else in its place."""
    for number, part in enumerate(parts):
        path = folder / "shards" / f"{number}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(part, bytes):
            path.write_bytes(part)
        else:
            write_tar(path, part)
    return str(folder / "shards")


def outcome(read: Any) -> Any:
    try:
        item = read()
    except BadSampleError as error:
        # Both name the column, which a table may call otherwise, and a table the file of an image.
        cause = re.sub(
            r"^column '[\w.]+': (?:'.*\.tar [\w.]+': )?|^it has (?=no )| in column '[\w.]+'$", "", error.cause
        )
        return re.sub(r"^the caption nan is neither a string nor a list of strings", "no caption", cause)
    return number_of(item), item["caption"], item.get("pair_id")


def of_table(source: str, **columns: Any) -> list[Any]:
    rows = load_pairs(source, split="train", image_column=columns.get("image_column", "image"))
    table = ImageTextDataset(rows, **columns)
    return [outcome(lambda row=row: table[row]) for row in range(len(table))]


def of_stream(source: str, **columns: Any) -> list[Any]:
    stream, found = ImageTextStream(source, **columns), []
    with_ids = columns.get("pair_id_column")
    for number, shard in enumerate(stream.shards):
        try:
            for _, key, raw in shard.reader.samples(shard.url):
                found.append(outcome(lambda raw=raw, key=key, number=number: stream.item(0, number, key, raw)))
        except ValueError as error:  # noqa: PERF203
            found.append(str(error))
    return [one if isinstance(one, str) or with_ids else (*one[:2], None) for one in found]


GOOD = sample(1, caption="one")
CAPTIONS = [
    "two",
    None,
    float("nan"),
    3,
    ["four"],
    [],
    ["five", None, "\ud800"],
    ["six", 6],
    "\ud800",
    {"a": 1},
    True,
    " ",
]
CASES: dict[str, list[Files | bytes]] = {
    "captions of every type": [GOOD, [f for n, c in enumerate(CAPTIONS) for f in sample(n + 2, caption=c)]],
    "lists in one shard, strings in the next": [sample(2, caption=["a"]), GOOD],
    "strings and a number": [[*GOOD, *sample(2, caption=2)], sample(3, caption=4.5)],
    "strings and NaN": [[*GOOD, *sample(2, caption=float("nan"))]],
    "no field": [[*GOOD, *sample(2, title="x")]],
    "extensions": [GOOD, sample(2, "jpg", caption="two"), sample(3, "webp", caption="three")],
    "capitals": [[("1.PNG", png(1)), ("1.TXT", b"one")], [("2.Png", png(2)), ("2.txt", b"two ")]],
    "texts that are no UTF-8": [pair(1), [("2.png", png(2)), ("2.txt", b"\xff\xfe")]],
    "no image": [pair(1), [("2.txt", b"two")]],
    "no image format": [pair(1), [("2.png", b"<html>"), ("2.txt", b"two")]],
    "names that repeat": [[*pair(1), *pair(2), pair(2)[0], *pair(3)]],
    "unreadable JSON": [[*GOOD, ("2.png", png(2)), ("2.json", b"{"), ("3.png", png(3)), ("3.json", b"[1]")]],
    "unreadable JSON beside texts": [[*pair(1), *pair(2), ("000002.json", b"{")]],
    "an empty shard": [pair(1), b"", pair(2)],
    "an empty archive": [pair(1), [], pair(2)],
    "a page in place of a shard": [b"<html>Not found</html>" * 100, pair(1), pair(2)],
    "folders and hidden files": [[("a/1.png", png(1)), ("a/1.txt", b"x"), ("b/.1.txt", b"y"), ("b/1.png", png(2))]],
}


@pytest.mark.parametrize("case", CASES)
def test_a_table_and_a_stream_read_the_same_tar_files(tmp_path, case):
    source = shards(tmp_path, *CASES[case])
    found = of_table(source)
    assert found == of_stream(source)
    assert any(isinstance(one, tuple) for one in found)


def test_a_shard_that_is_cut_off_is_the_same_to_both(tmp_path):
    source = shards(tmp_path, [file for n in range(5) for file in pair(n)])
    whole = Path(source, "0.tar").read_bytes()
    for length in (700, 3000, 5200, 6000, len(whole) // 2):
        Path(source, "0.tar").write_bytes(whole[:length])
        if length == 700:
            with pytest.raises(
                ValueError, match=r"'train' of .* cannot be loaded: The shard '.*0.tar' is truncated: byte"
            ):
                load_pairs(source, split="train")
            continue
        found = of_table(source)
        assert found == of_stream(source)
        assert "is truncated: byte" in found[-1]


def test_links_are_the_same_to_both(tmp_path):
    source = shards(tmp_path, pair(1))
    with tarfile.open(Path(source, "0.tar"), "a") as tar:
        for name, kind, data in (("2.png", tarfile.SYMTYPE, b""), ("2.txt", tarfile.REGTYPE, b"two")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "000001.png", len(data)
            tar.addfile(info, io.BytesIO(data))
    found = of_table(source)
    assert found == of_stream(source)
    assert "holds '2.png' as a link" in found[1]


@pytest.mark.parametrize("ids", [[7, -1, 7], [2**63 - 1, float("nan"), 0], ["a", "b", "a"], [*range(30), "c"]])
def test_pair_ids_are_the_same_to_both(tmp_path, ids):
    files = [file for n, value in enumerate(ids) for file in sample(n, caption="a", id=value)]
    source = shards(tmp_path, files[:2], files[2:])
    table, stream = (read(source, pair_id_column="id") for read in (of_table, of_stream))
    good = [row for row, value in enumerate(ids) if type(value) is type(ids[0])]
    assert [table[row] for row in good] == [stream[row] for row in good]
    assert all(isinstance(table[row], tuple) == (row in good) for row in range(len(ids)))


def test_usual_columns_need_not_be_named(tmp_path):
    source = shards(tmp_path, [("1.jpg", png(1)), ("1.txt", b"a"), ("1.cls", b"0")])
    rows = load_pairs(source, split="train")
    columns = {"image_column": "jpg", "caption_column": "txt", "pair_id_column": "txt"}
    assert ImageTextDataset(rows, pair_id_column="caption").columns == columns
    assert ZeroShotDataset(rows, class_names=["a"]).columns == {"image_column": "jpg", "label_column": "cls"}


def test_an_image_may_be_named_by_its_extension(tmp_path):
    files = [[("1.png", png(1)), ("1.jpg", png(2)), ("1.left.png", png(3)), ("1.bin", png(4)), ("1.txt", b"a")]]
    source = shards(tmp_path, *files, [("2.jpg", png(5)), ("2.txt", b"a")])
    for column in ("png", "jpg", "left.png", "bin"):
        assert of_table(source, image_column=column) == of_stream(source, image_column=column)
    with pytest.raises(ValueError, match="several images: name one"):
        ImageTextStream(source)
    with pytest.raises(ValueError, match=r"no column 'image'.*'png', 'jpg'"):
        of_table(source)


def test_bad_samples_are_skipped_and_only_those_that_are_used_count(tmp_path):
    source = shards(tmp_path, [*sample(1, caption="a", note="x"), *sample(2, caption=3, note=["y"])], b"<html>" * 99)
    rows = load_pairs(source, split="train")
    dataset = ImageTextDataset(rows, image_column="png", on_bad_sample="skip")
    assert [number_of(dataset[row]) for row in range(3)] == [1, 1, 1]
    noted = ImageTextDataset(rows, image_column="png", caption_column="note")
    assert noted[1]["caption"] == ["y"]
    with pytest.raises(ValueError, match=r"Row 2 of .* is bad: The shard '.*1.tar' is damaged: there is no tar header"):
        noted[2]
    with pytest.raises(
        ValueError, match=r"Row 1 of .* is bad: the caption 3 is neither a string nor a list of strings"
    ):
        ImageTextDataset(rows, image_column="png")[1]


def test_columns_of_other_types(tmp_path):
    array = io.BytesIO()
    np.save(array, np.array([0, 1, 1]))
    more = [("1.cls", b"7"), ("1.npy", array.getvalue()), ("1.mp3", b"\xff\xfb" * 9), ("1.big", b"a" * 70_000)]
    fields = {"width": 3, "aspect": 1, "nsfw": False, "meta": {"url": "u", "tags": ["t"]}, "txt": "f", "png": "p"}
    other = {"width": 2.5, "aspect": None, "nsfw": None, "meta": {"url": None}, "odd": {"a": [1]}, "none": None}
    first = [("1.png", png(1)), ("1.txt", b"a"), ("1.json", json.dumps(fields).encode()), *more]
    rows = load_pairs(
        shards(tmp_path, first, [("2.png", png(2)), ("2.json", json.dumps(other).encode())]), split="train"
    )
    names = ["png", "txt", "json.txt", "json.png", "width", "aspect", "nsfw", "meta.url", "meta.tags", "cls", "npy"]
    assert {*rows.column_names} == {*names, "odd.a", "none", "__key__", "__url__"}
    values = rows.select_columns(names[1:]).to_list()
    assert values[0] == {
        **{"txt": "a", "json.txt": "f", "json.png": "p", "width": 3, "aspect": 1, "nsfw": False, "meta.url": "u"},
        **{"meta.tags": ["t"], "cls": 7, "npy": [0, 1, 1]},
    }
    assert values[1]["width"] == 2.5
    assert ZeroShotDataset(rows.select([0]), image_column="png", label_column="npy", class_names=[*"abc"])[0][
        "label"
    ] == [0, 1, 1]


def test_zero_shot_classes_of_a_damaged_shard_are_told(tmp_path):
    source = shards(tmp_path, [("1.png", png(1)), ("1.cls", b"0")], b"<html>" * 99)
    rows = load_pairs(source, split="train")
    with pytest.raises(ValueError, match=r"Row 1 of .*1.tar' is damaged"):
        ZeroShotDataset(rows, image_column="png", label_column="cls", class_names=["a"])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([b""], "0.tar' is truncated: byte 0"),
        ([b"<html>" * 99], "0.tar' is damaged: there is no tar header at byte 0"),
        ([[]], "0.tar' holds no samples"),
    ],
)
def test_shards_without_any_sample_are_refused_by_both(tmp_path, parts, words):
    source = shards(tmp_path, *parts)
    for read in (of_table, of_stream):
        with pytest.raises(ValueError, match=words):
            read(source)


def test_compressed_shards_are_refused_by_both(tmp_path):
    source = Path(shards(tmp_path, pair(1)))
    (source / "1.tar.gz").write_bytes(b"")
    for read in (of_table, of_stream):
        with pytest.raises(ValueError, match=r"1.tar.gz.* Compressed tar files have to be unpacked once"):
            read(str(source))


def test_splits_and_their_parts(tmp_path):
    for split, numbers in (("train", range(10)), ("test", range(10, 14))):
        write_tar(tmp_path / f"shards/{split}-0.tar", [file for number in numbers for file in pair(number)])
    source = str(tmp_path / "shards")
    for split, expected in (
        ("train", range(10)),
        ("test", range(10, 14)),
        ("train[:20%]", range(2)),
        ("train[-2:]+test[1:3]", [8, 9, 11, 12]),
    ):
        rows = load_pairs(source, split=split)
        assert str(rows.split) == split.partition("[")[0] or "+" in split or "[" in split
        assert rows["txt"][:] == [f"caption {number}" for number in expected]
    with pytest.raises(ValueError, match=r"'tset' of .* no such split\. Its splits are \['train', 'test'\]"):
        load_pairs(source, split="tset")


def _numbers(dataset: ImageTextDataset, results: Any) -> None:
    results.put([number_of(dataset[row]) for row in range(len(dataset))])


def test_images_stay_in_the_shards_and_are_read_by_any_process(tmp_path):
    numbers = list(range(300, 340))
    source = shards(tmp_path, [file for number in numbers for file in pair(number)])
    rows = load_pairs(source, split="train")
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    assert rows[3]["png"].size == (4, 4), "a row as users look at it"
    dataset = ImageTextDataset(rows.select(range(0, 40, 2)), image_column="png", caption_column="txt")
    assert [number_of(item) for item in DataLoader(dataset, batch_size=None, num_workers=2)] == numbers[::2]
    assert number_of(pickle.loads(pickle.dumps(dataset))[5]) == numbers[10]
    assert dict(dataset.file_sizes()) == dict.fromkeys(range(20), len(png(300)))
    results = context().Queue()
    process = context().Process(target=_numbers, args=(dataset, results))
    process.start()
    assert results.get(timeout=120) == numbers[::2]
    process.join()
    rows.save_to_disk(tmp_path / "saved")
    assert load_pairs(str(tmp_path / "saved"), split="train")[39]["png"].size == (4, 4)
    Path(source, "0.tar").unlink()
    with pytest.raises(BadSampleError, match=r"Row 0 .*0.tar.* cannot be opened"):
        dataset[0]


def test_a_changed_shard_has_another_fingerprint(tmp_path):
    source = shards(tmp_path, pair(1), pair(2))
    read = [ImageTextDataset(load_pairs(source, split="train"), image_column="png", caption_column="txt") for _ in "ab"]
    assert read[0].image_fingerprint() == read[1].image_fingerprint()
    changed = [("000002.png", png(3)), ("000002.txt", b"caption 2")]
    write_tar(Path(source, "1.tar"), changed)
    again = ImageTextDataset(load_pairs(source, split="train"), image_column="png", caption_column="txt")
    assert again.image_fingerprint() != read[0].image_fingerprint()


def test_samples_whose_files_have_names_in_two_unicode_normalisations_are_told(tmp_path):
    apart = [("cafe\u0301.png", png(1)), ("caf\u00e9.txt", b"a caption")]
    source = shards(tmp_path, [*pair(2), *apart, *pair(3)])
    rows = ImageTextDataset(load_pairs(source, split="train"), image_column="png", caption_column="txt")
    assert [rows[row]["caption"] for row in (0, 3)] == [["caption 2"], ["caption 3"]]
    for row in (1, 2):
        with pytest.raises(BadSampleError, match=r"but there is 'cafe\u0301', the same name in another Unicode norm"):
            rows[row]
    whole = ("png", png(1)), ("txt", b"a caption")
    source = shards(tmp_path / "two", [(f"caf{e}.{kind}", data) for e in ("\u00e9", "e\u0301") for kind, data in whole])
    assert load_pairs(source, split="train")["txt"][:] == ["a caption"] * 2, "two samples that are whole"


def test_the_command_trains_and_evaluates_on_them(tmp_path):
    source = shards(
        tmp_path, [*sample(1, caption="a"), *sample(2, "jpg", caption=["b", "c"])], sample(3, "JPG", caption=None)
    )
    columns = ColumnOptions()
    rows = opening.training_set(
        DataOptions(dataset=[source], on_bad_sample="skip"),
        columns,
        InfCLTrainingArguments(str(tmp_path), use_cpu=True),
    )
    assert rows.columns == {"image_column": "image", "caption_column": "caption"}
    assert {number_of(rows[row]) for row in range(3)} <= {1, 2}
    evaluated = opening.evaluation_datasets(
        ColumnOptions(image_column="filepath"), EvaluationOptions(eval_dataset=source)
    )
    assert [evaluated["pairs"][row]["caption"] for row in range(2)] == [["a"], ["b", "c"]]
    with pytest.raises(ValueError, match=r"Row 2 of --eval_dataset .* is bad: it has no caption in column 'caption'"):
        evaluated["pairs"][2]
