"""Datasets from real image folders with broken files, and the collator with every kind of processor."""

import itertools
import json
import random
import unicodedata
from typing import Any
from unittest import mock

import datasets
import huggingface_hub
import numpy as np
import pandas
import pyarrow
import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, DatasetDict, Features, NamedSplit, Value
from fsspec.implementations.local import LocalFileSystem
from helpers import models
from helpers.pictures import captioned, picture, write_folder
from helpers.processors import LENGTH, clip_processor, siglip2_processor, siglip_processor, tokenizer
from helpers.shards import number_of, pair, png, write_parquet, write_tar
from packaging.version import Version
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset

from hf_infcl.data import (
    ContrastiveCollator,
    ImageTextDataset,
    ImageTextStream,
    ZeroShotDataset,
    caption_pair_id,
    load_pairs,
)
from hf_infcl.data.images import find_column
from hf_infcl.data.labelled import captions_of_classes, names_by_label
from hf_infcl.data.tables import Table
from hf_infcl.shards.opening import find_shards


@pytest.fixture(autouse=True)
def _datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def row_of(item: dict) -> int:
    return int(item["image"][0, 0, 0])


class TestLoadPairs:
    def test_imagefolder_with_metadata(self, tmp_path):
        dataset = load_pairs(str(write_folder(tmp_path / "pairs", ["a", "b"])), split="train")
        assert set(dataset.column_names) == {"image", "caption"}
        assert dataset["caption"][:] == ["a", "b"]

    def test_saved_dataset_and_dataset_dict(self, tmp_path):
        saved = captioned(["a", "b"])
        saved.save_to_disk(tmp_path / "one")
        DatasetDict(train=saved, test=saved.select([1])).save_to_disk(tmp_path / "two")
        assert load_pairs(str(tmp_path / "one"), split="train")["caption"][:] == ["a", "b"]
        assert load_pairs(str(tmp_path / "two"), split="test")["caption"][:] == ["b"]

    def test_splits_of_a_saved_dataset_have_their_own_names_and_slices(self, tmp_path):
        rows = Dataset.from_dict({"image": list("abcd"), "caption": list("efgh")}, split="train")
        DatasetDict(train=rows.select([0, 1]), test=rows.select([2, 3])).save_to_disk(tmp_path / "saved")
        for split, captions in (("train", "ef"), ("test", "gh"), ("test[1:]", "h"), ("train[:50%]+test[:1]", "eg")):
            loaded = load_pairs(str(tmp_path / "saved"), split=split)
            assert (str(loaded.split), "".join(loaded["caption"])) == (split, captions)
        with pytest.raises(ValueError, match=r"no split 'tset'\. Its splits are \['train', 'test'\]"):
            load_pairs(str(tmp_path / "saved"), split="test+tset[:1]")

    def test_a_wrong_split_is_told_which_there_are(self, tmp_path):
        folder = write_folder(tmp_path / "pairs", ["a"])
        with pytest.raises(ValueError, match=r'"tset".*\[\'train\'\]'):
            load_pairs(str(folder), split="tset")
        DatasetDict(train=captioned(["a"]), test=captioned(["a"])).save_to_disk(tmp_path / "saved")
        with pytest.raises(ValueError, match=r"no split 'tset'\. Its splits are \['train', 'test'\]"):
            load_pairs(str(tmp_path / "saved"), split="tset")
        load_pairs(str(folder), split="train").save_to_disk(tmp_path / "train")
        with pytest.raises(ValueError, match=r"no split 'test'\. Its splits are \['train'\]"):
            load_pairs(str(tmp_path / "train"), split="test")

    def test_a_wrong_configuration_is_told_which_there_are(self, tmp_path):
        with pytest.raises(ValueError, match=r"'big' not found. Available: \['default'\]"):
            load_pairs(str(write_folder(tmp_path / "pairs", ["a"])), split="train", name="big")

    @pytest.mark.parametrize("captions", [[["a", "b"], "c"], ["c", ["a", "b"]]])
    def test_captions_of_two_types_are_told_where_and_what_to_do(self, tmp_path, captions):
        told = (
            r"'train' of .*pairs.*Column\(/caption\) changed from .* in row 1\. Where .*, write a list in every row\."
        )
        with pytest.raises(ValueError, match=told):
            load_pairs(str(write_folder(tmp_path / "pairs", captions)), split="train")

    @pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this version of datasets has no Json type")
    def test_what_to_do_about_a_table_of_captions_of_two_types_is_told(self):
        rows = captioned(["a"]).cast_column("caption", datasets.Json())
        with pytest.raises(ValueError, match=r"not Json.* If some rows have a list, write a list in every row\."):
            ImageTextDataset(rows)

    @pytest.mark.skipif(Version(datasets.__version__) < Version("5.1"), reason="datasets reads it before 5.1")
    def test_a_path_that_leads_out_of_the_folder_is_told(self, tmp_path):
        folder = write_folder(tmp_path / "pairs", ["a"])
        (folder / "metadata.jsonl").write_text('{"file_name": "../0.png", "caption": "a"}')
        with pytest.raises(
            ValueError, match=r"'train' of .*pairs.*cannot be loaded: Invalid metadata file_name '\.\./0"
        ):
            load_pairs(str(folder), split="train")

    def test_a_file_without_rows_is_told(self, tmp_path):
        folder = write_folder(tmp_path / "pairs", ["a"])
        (folder / "metadata.jsonl").rename(folder.parent / "gone")
        (folder / "0.png").rename(folder / "rows.jsonl")
        (folder / "rows.jsonl").write_text("")
        with pytest.raises(ValueError, match=r"'train' of .*pairs.*cannot be loaded: one of its files has no rows"):
            load_pairs(str(folder), split="train")

    @pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
    def test_a_damaged_folder_of_save_to_disk_is_named(self, tmp_path, name):
        captioned(["a", "b"]).save_to_disk(tmp_path / "saved")
        (tmp_path / "saved" / name).write_text("[]")
        with pytest.raises(ValueError, match=r"saved', a folder of save_to_disk, cannot be loaded: \w+: "):
            load_pairs(str(tmp_path / "saved"), split="train")

    def test_paths_in_a_csv(self, tmp_path):
        images = write_folder(tmp_path / "pairs", ["a", "b"])
        (tmp_path / "table").mkdir()
        rows = "".join(f"{images / f'{row}.png'},{caption}\n" for row, caption in enumerate("ab"))
        (tmp_path / "table" / "train.csv").write_text(f"filepath,title\n{rows}")
        table = load_pairs(str(tmp_path / "table"), split="train")
        item = ImageTextDataset(table, image_column="filepath", caption_column="title")[1]
        assert item["caption"] == ["b"]
        assert np.array_equal(item["image"], ImageTextDataset(load_pairs(str(images), split="train"))[1]["image"])

    @pytest.mark.parametrize("separator", [",", "\t", ";", "|"])
    @pytest.mark.parametrize("name", ["train.csv", "train.tsv"])
    def test_separators_of_a_csv(self, tmp_path, separator, name):
        """The captions hold the other separators; one begins with a quotation mark, as in OpenCLIP's tables."""
        captions = ["a, b; c | d\te", "two\u2028lines", '"quoted, twice"']
        lines = [
            separator.join(("filepath", "title, my")),
            *(f'0.png{separator}"{c.replace(chr(34), chr(34) * 2)}"' for c in captions),
        ]
        if separator == ",":
            lines[0] = 'filepath,"title, my"'
        (tmp_path / "table").mkdir()
        (tmp_path / "table" / name).write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
        (tmp_path / "table/0.png").write_bytes(png(3))
        rows = load_pairs(str(tmp_path / "table"), split="train")
        assert rows.column_names == ["filepath", "title, my"]
        assert rows["title, my"][:] == captions

    @pytest.mark.parametrize("name", ["train.csv", "train.tsv", "metadata.csv"])
    @pytest.mark.parametrize("line", [2, 4])
    def test_rows_wider_than_the_header_are_refused(self, tmp_path, name, line):
        """Of a row with a comma in its caption, pandas reads the first columns as an index, or no more."""
        mark, column = "\t" if name.endswith(".tsv") else ",", "file_name" if name == "metadata.csv" else "image"
        rows = [f"{column}{mark}caption", *(f"{number}.png{mark}a cat" for number in range(4))]
        rows[line - 1] += f" red{mark} and a dog"
        (tmp_path / name).write_text("\n".join(rows))
        for number in range(4):
            picture(number).save(tmp_path / f"{number}.png")
        told = (
            rf"line {line} of '.*{name}' has more values than the header has names \(2\)\. Write captions with commas"
        )
        with pytest.raises(ValueError, match=told):
            load_pairs(str(tmp_path), split="train")

    @pytest.mark.parametrize(
        "values", [['"a cat', "a dog", '"a bird', "a fox"], ['"Meow" it said'], ["a cat", '"a dog']]
    )
    def test_quotes_that_join_lines_or_are_lost_are_refused(self, tmp_path, values):
        """pandas makes one caption of all lines between two quotes that were left open."""
        (tmp_path / "table").mkdir()
        (tmp_path / "table/data.csv").write_text("image,caption\n" + "\n".join(f"0.png,{value}" for value in values))
        with pytest.raises(ValueError, match=r"line \d of '.*data.csv' has an open quote or one within a value"):
            load_pairs(str(tmp_path / "table"), split="train")

    def test_a_wide_row_below_the_part_that_shows_the_separator(self, tmp_path):
        rows = ["image,caption", *["0.png,a cat"] * 8000, "0.png,a cat, and a dog"]
        (tmp_path / "table").mkdir()
        (tmp_path / "table" / "data.csv").write_text("\n".join(rows))
        with pytest.raises(ValueError, match=r"line 8002, saw 3.*Write captions with commas in double quotes"):
            load_pairs(str(tmp_path / "table"), split="train")

    def test_separators_that_differ_or_cannot_be_used_are_named(self, tmp_path):
        for name, text in (("a/train.csv", "x,caption\n1,a"), ("a/test.csv", "x;caption\n1;a")):
            (tmp_path / "a").mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=r"train.csv separates the columns by ',', and .*test.csv by ';'\. Write"):
            load_pairs(str(tmp_path / "a"), split="train")
        write_folder(tmp_path / "b", ["a"])
        (tmp_path / "b/metadata.jsonl").unlink()
        (tmp_path / "b/metadata.csv").write_text("file_name\tcaption\n0.png\ta")
        with pytest.raises(ValueError, match=r"its metadata.csv separates the columns by '\\t'\. Write it with commas"):
            load_pairs(str(tmp_path / "b"), split="train")
        (tmp_path / "c").mkdir()
        (tmp_path / "c/train.csv").write_text("caption\na dog\n")
        assert load_pairs(str(tmp_path / "c"), split="train")["caption"][:] == ["a dog"]

    @pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
    def test_relative_paths_in_a_table_are_of_the_working_folder_or_of_the_file(self, tmp_path, name, monkeypatch):
        (tmp_path / "table").mkdir()
        rows = [{"filepath": f"images/{row}.png", "title": "a"} for row in range(3)]
        lines = ["filepath,title", *(",".join(row.values()) for row in rows)]
        lines = lines if name == "train.csv" else [json.dumps(row) for row in rows]
        (tmp_path / "table" / name).write_text("\n".join(lines))
        monkeypatch.chdir(tmp_path)

        def read() -> ImageTextDataset:
            return ImageTextDataset(load_pairs("table", split="train"), image_column="filepath", caption_column="title")

        missing = rf"none of its images is there, such as 'images/0.png', .* {tmp_path} or .*, {tmp_path}/table\. Use"
        with pytest.raises(ValueError, match=missing):
            read()
        for folder, number in ((tmp_path / "table/images", 5), (tmp_path / "images", 7)):
            folder.mkdir()
            (folder / "1.png").write_bytes(png(number))
            dataset = read()
            assert number_of(dataset[1]) == number
            with pytest.raises(ValueError, match=r"Row 0 .*images/0.png': FileNotFoundError"):
                dataset[0]

    @pytest.mark.parametrize("name", ["csv", "parquet", "json", "shards.parquet", "shards.tar"])
    def test_a_folder_with_the_name_of_a_format_is_a_folder(self, tmp_path, monkeypatch, name):
        write_parquet(tmp_path / name / "train.parquet", [3])
        monkeypatch.chdir(tmp_path)
        assert load_pairs(name, split="train")["caption"][:] == ["caption 3"]
        assert find_shards(name) == [str(tmp_path / name / "train.parquet")]

    @pytest.mark.parametrize("kind", ["tar", "parquet", "imagefolder", "csv", "card", "saved"])
    def test_a_folder_whose_name_is_a_pattern_is_taken_literally(self, tmp_path, kind):
        folder = tmp_path / "my [v1] *?{a,b}" / "train"
        decoy = tmp_path / "my v xy{a,b}" / "train"  # which the name would match
        for place, caption in ((decoy, "wrong"), (folder, "right")):
            if kind == "tar":
                write_tar(place / "0[a]*.tar", pair(3, caption=caption))
            elif kind == "imagefolder":
                write_folder(place, [caption])
            elif kind == "csv":
                place.mkdir(parents=True)
                (place / "train.csv").write_text(f"filepath,caption\n/x[1].png,{caption}\n")
            elif kind == "saved":
                captioned([caption]).save_to_disk(place)
            else:
                write_parquet(place / "more" / "0[a].parquet", [3], caption=[caption])
            if kind == "card":
                files = "data_files:\n  - split: train\n    path: more/*.parquet"
                (place / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {files}\n---\n")
        rows = load_pairs(str(folder), split="train")
        assert rows["caption"][:] == ["right"]
        if kind in ("tar", "parquet"):
            below = "0[a]*.tar" if kind == "tar" else "more/0[a].parquet"
            for name in ("", below, "**/*.*"):
                assert find_shards(str(folder / name)) == [str(folder / below)]

    def test_a_folder_is_listed_once(self, tmp_path):
        write_folder(tmp_path / "pairs", ["a", "b"])
        with mock.patch.object(LocalFileSystem, "ls", autospec=True, side_effect=LocalFileSystem.ls) as listed:
            assert len(load_pairs(str(tmp_path / "pairs"), split="train")) == 2
        folders = [call.args[1] for call in listed.call_args_list]
        assert len(folders) == len(set(folders)) > 0

    @pytest.mark.parametrize("kind", ["relative", "of both", "bytes alone", "paths alone", "large", "text"])
    def test_a_table_and_a_stream_read_the_same_parquet(self, tmp_path, kind):
        """None of the files has features of `datasets`."""
        folder = tmp_path / "table"
        (folder / "images").mkdir(parents=True)
        for number in range(3):
            (folder / "images" / f"{number}.png").write_bytes(png(number))
        paths = [f"images/{number}.png" for number in range(3)]
        images: Any = {
            "relative": [{"bytes": None, "path": path} for path in paths],
            "of both": [{"bytes": png(0), "path": "0.png"}, *({"bytes": None, "path": path} for path in paths[1:])],
            "bytes alone": [{"bytes": png(number)} for number in range(3)],
            "paths alone": [{"path": path} for path in paths],
            "large": pyarrow.array(map(png, range(3)), pyarrow.large_binary()),
            "text": paths,
        }[kind]
        write_parquet(folder / "train.parquet", range(3), image=images)
        table = ImageTextDataset(load_pairs(str(folder), split="train"))
        stream = ImageTextStream(str(folder))
        assert [number_of(item) for item in table] == [0, 1, 2]
        assert sorted(number_of(item) for item in itertools.islice(stream, 3)) == [0, 1, 2]

    def test_paths_in_parquet_are_relative_to_the_file_of_their_split(self, tmp_path):
        folder = tmp_path / "table"
        for number, split in enumerate(("train", "test")):
            write_parquet(folder / split / "0.parquet", [0], picture=["a.png"], title=["one"])
            (folder / split / "a.png").write_bytes(png(number))
        for number, split in enumerate(("train", "test[:100%]")):
            rows = load_pairs(str(folder), split=split, image_column="picture").select([0])
            assert number_of(ImageTextDataset(rows, image_column="picture", caption_column="title")[0]) == number
        write_parquet(folder / "train" / "more" / "1.parquet", [0], picture=["a.png"], title=["one"])
        with pytest.raises(ValueError, match=r"'train' of .* lie in several folders.*'a.png'.*absolute paths"):
            load_pairs(str(folder), split="train", image_column="picture")

    @pytest.mark.parametrize("name", ["train.txt", "*.tar", "{00000..00003}.tar"])
    def test_files_in_place_of_a_folder_are_told_at_once(self, tmp_path, name, monkeypatch):
        monkeypatch.setattr(datasets, "load_dataset", None)  # it would query the Hub for half a minute
        (tmp_path / "train.txt").write_text("a red circle\n")
        with pytest.raises(ValueError, match=r"names files, and a table is loaded from a folder.*--streaming"):
            load_pairs(str(tmp_path / name), split="train")

    @pytest.mark.parametrize("name", ["[x] train.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.tar"])
    def test_one_file_is_read_by_its_name(self, tmp_path, name):
        """Images that lie beside it do not hide it."""
        kind, paths = name.lower().rpartition(".")[2], ["0.png", "1.png"]
        for number, path in enumerate(paths):
            (tmp_path / path).write_bytes(png(number))
        table = datasets.Dataset.from_dict({"image": paths, "caption": ["a red, round one", "a square"]})
        if kind == "tar":
            write_tar(tmp_path / name, [*pair(0), *pair(1)])
        elif kind == "parquet":
            table.to_parquet(tmp_path / name)
        elif kind in ("csv", "tsv"):
            table.to_csv(tmp_path / name, index=False, sep="\t" if kind == "tsv" else ",")
        else:
            table.to_json(tmp_path / name)
        rows = load_pairs(str(tmp_path / name), split="train")
        pairs = ImageTextDataset(rows, caption_column="txt" if kind == "tar" else "caption")
        assert [number_of(pairs[row]) for row in range(2)] == [0, 1]
        assert Table(str(tmp_path / name)).split_to_evaluate() == "train"

    def test_captions_of_a_csv_may_be_words_for_what_is_missing(self, tmp_path):
        (tmp_path / "train.csv").write_text("image,caption,id\na.png,None,1\na.png,NA,\na.png,,3\na.png,null,4")
        picture(0).save(tmp_path / "a.png")
        rows = load_pairs(str(tmp_path / "train.csv"), split="train")
        assert rows["caption"] == ["None", "NA", None, "null"]
        assert rows["id"] == [1, None, 3, 4]

    def test_captions_of_a_metadata_csv_may_be_words_for_what_is_missing(self, tmp_path):
        folder = tmp_path / "[v1] pairs"
        folder.mkdir()
        (folder / "metadata.csv").write_text("file_name,caption,id\na.png,None,1\nb.png,NA,\nc.png,,3\nd.png,null,4")
        for number, name in enumerate("abcd"):
            picture(number).save(folder / f"{name}.png")
        rows = load_pairs(str(folder), split="train")
        assert rows["caption"] == ["None", "NA", None, "null"]
        assert rows["id"] == [1, None, 3, 4]
        (folder / "metadata.csv").write_bytes("file_name,caption\na.png,café".encode("latin-1"))
        with pytest.raises(ValueError, match=r"metadata\.csv' is not UTF-8"):
            load_pairs(str(folder), split="train")

    @pytest.mark.parametrize("extension", ["txt", "json"])
    def test_shards_all_of_whose_captions_are_in_another_encoding(self, tmp_path, extension):
        text = "café" if extension == "txt" else '{"caption": "café"}'
        files = [[(f"{n}.png", png(n)), (f"{n}.{extension}", text.encode("latin-1"))] for n in range(3)]
        write_tar(tmp_path / "0.tar", list(itertools.chain(*files)))

        def first() -> Any:
            rows = load_pairs(str(tmp_path), split="train")
            return ImageTextDataset(rows, caption_column=find_column("caption", rows.features))[0]

        with pytest.raises(ValueError, match="'utf-8' codec can't decode byte 0xe9"):
            first()

    @pytest.mark.parametrize("form", ["NFC", "NFD"])
    @pytest.mark.parametrize("name", ["é", "한국"])
    def test_a_folder_in_another_unicode_normalisation_is_told(self, tmp_path, form, name):
        there, asked = (unicodedata.normalize(one, name) for one in (form, {"NFC": "NFD", "NFD": "NFC"}[form]))
        write_folder(tmp_path / there, ["a"])
        told = rf"but there is '.*{there}', the same name in another Unicode normalisation: rename one"
        for folder in (asked, f"{asked}/"):
            with pytest.raises(ValueError, match=told):
                load_pairs(f"{tmp_path}/{folder}", split="train")

    @pytest.mark.parametrize("name", ["train.csv", "train.jsonl", "train.parquet", "train.tar", "train/metadata.jsonl"])
    def test_a_pointer_of_git_lfs_in_place_of_data_is_told(self, tmp_path, name):
        write_folder((tmp_path / "table" / name).parent, ["a"] if "metadata" in name else [])
        (tmp_path / "table" / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1\n")
        told = rf"{name} is a pointer of Git LFS in place of the file: run `git lfs pull`"
        with pytest.raises(ValueError, match=told):
            load_pairs(str(tmp_path / "table"), split="train")
        if name.endswith((".tar", ".parquet")):
            with pytest.raises(ValueError, match=told):
                next(iter(ImageTextStream(str(tmp_path / "table" / name))))

    @pytest.mark.parametrize("form", ["NFC", "NFD"])
    def test_names_in_another_unicode_normalisation_are_told(self, tmp_path, form):
        """macOS writes the same letters with other characters: neither is found by the name of the other."""
        there = unicodedata.normalize(form, "é")
        asked = unicodedata.normalize({"NFC": "NFD", "NFD": "NFC"}[form], "é")
        told = rf"but there is '.*{there}.*', the same name in another Unicode normalisation"
        folder = tmp_path / there
        folder.mkdir()
        picture(0).save(folder / f"{there}.png")
        (folder / "train.csv").write_text(f"image,{there}\n{asked}.png,a cat")
        with pytest.raises(ValueError, match=told):  # relative to the table
            load_pairs(str(folder), split="train")
        rows = Dataset.from_dict({"image": [str(folder / f"{asked}.png")], there: ["a cat"]})
        with pytest.raises(ValueError, match=told):
            ImageTextDataset(rows, caption_column=there)[0]
        with pytest.raises(ValueError, match=told):
            ImageTextDataset(rows, caption_column=asked)
        write_tar(tmp_path / "0.tar", [(f"{there}.png", png(0)), (f"{asked}.txt", b"a cat")])
        with pytest.raises(ValueError, match=told):
            ImageTextStream(str(tmp_path / "0.tar"))
        assert names_by_label([asked, "ant"], ["ant", there]) == ["ant", asked]

    def test_causes_that_end_in_a_full_stop_have_one(self, tmp_path, monkeypatch):
        write_tar(tmp_path / "0.tar", [*pair(0), *pair(1)])
        (tmp_path / "0.tar").write_bytes((tmp_path / "0.tar").read_bytes()[:3600])
        rows = load_pairs(str(tmp_path / "0.tar"), split="train")
        with pytest.raises(ValueError, match=r"file is missing\. Repair"):
            list(ImageTextDataset(rows, caption_column="txt"))
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
        with pytest.raises(ValueError, match=r"DOS attack\. Repair"):
            ImageTextDataset(captioned(["a"]))[0]

    def test_a_file_in_another_encoding_is_named(self, tmp_path):
        folder = tmp_path / "table"
        folder.mkdir()
        for name, caption in (("a.csv", b"a"), ("b.csv", "caf\xe9".encode("latin-1"))):
            (folder / name).write_bytes(b"image,caption\na.png," + caption)
        with pytest.raises(ValueError, match=r"b\.csv' is not UTF-8: 'utf-8' codec can't decode byte 0xe9"):
            load_pairs(str(folder), split="train")

    def test_a_data_url_is_not_printed_whole(self):
        rows = Dataset.from_dict({"image": ["data:image/png;base64," + "A" * 9000], "caption": ["a"]})
        with pytest.raises(ValueError, match="data:image") as error:
            ImageTextDataset(rows)[0]
        assert len(str(error.value)) < 1500

    @pytest.mark.parametrize("source", ["pipe:aws s3 cp s3://b/{00..10}.tar -", "a/{0..3}.tar::b/{0..3}.tar"])
    def test_sources_of_webdataset_are_told_how_they_are_written_here(self, source):
        with pytest.raises(ValueError, match=r"is written for webdataset\. .*several sources one after the other"):
            find_shards(source)

    def test_no_data(self, tmp_path, monkeypatch):
        with pytest.raises(ValueError, match=r"There is no dataset at '.*nothing'"):
            load_pairs(str(tmp_path / "nothing"), split="train")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=r"at '\./nothing': no such folder exists\. A path is relative"):
            load_pairs("./nothing", split="train")  # not a valid name on the Hub
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match=r"There is no dataset at '.*empty'.* doesn't contain any data files"):
            load_pairs(str(tmp_path / "empty"), split="train")

    def test_a_misspelt_folder_without_a_network(self, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ValueError, match=r"no local folder has this name, .* the Hub could not be reached") as told:
            load_pairs("my/imgaes", split="train")
        assert "on the Hub:" not in str(told.value), "which is not known"


LISTS = [[f"{row}{letter}" for letter in "abcd"] for row in range(12)]


class TestCaptions:
    def draw(self, dataset: ImageTextDataset, epoch: int, **loader) -> list[str]:
        dataset.set_epoch(epoch)
        return [item["caption"][0] for item in DataLoader(dataset, batch_size=None, **loader)]

    def test_one_string_per_row(self):
        item = ImageTextDataset(captioned(["zero", "one"]))[1]
        assert item.keys() == {"image", "caption"}
        assert item["caption"] == ["one"]
        assert row_of(item) == 1

    def test_a_drawn_caption_depends_on_seed_epoch_and_row_alone(self):
        rows = captioned(LISTS)
        first = self.draw(ImageTextDataset(rows, seed=5), epoch=2)
        again = ImageTextDataset(rows, seed=5)
        random.seed(1)
        torch.manual_seed(1)
        assert self.draw(again, epoch=2, num_workers=2) == first
        assert again[7]["caption"] == [first[7]]
        assert self.draw(again, epoch=3) != first
        assert self.draw(ImageTextDataset(rows, seed=6), epoch=2) != first
        letters = {caption[-1] for caption in first}
        assert len(letters) > 1, "every row drew the same place of its list"

    def test_every_caption_is_drawn_equally_often(self):
        dataset = ImageTextDataset(captioned(LISTS[:1]))
        drawn = [self.draw(dataset, epoch)[0] for epoch in range(400)]
        assert all(70 < drawn.count(caption) < 130 for caption in LISTS[0])  # 100 ± 3.5 standard deviations

    def test_persistent_workers_see_the_epoch(self):
        dataset = ImageTextDataset(captioned(LISTS))
        loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
        for epoch in range(3):
            expected = self.draw(ImageTextDataset(captioned(LISTS)), epoch)
            dataset.set_epoch(epoch)
            assert [item["caption"][0] for item in loader] == expected

    def test_several_captions_are_drawn_without_repeats(self):
        dataset = ImageTextDataset(captioned([*LISTS, ["a", " ", "b"]]), captions_per_image=3)
        drawn = set()
        for epoch in range(20):
            dataset.set_epoch(epoch)
            captions = dataset[0]["caption"]
            assert len(set(captions)) == 3
            assert sorted(dataset[len(LISTS)]["caption"]) == ["a", "b"]
            drawn.update(captions)
        assert drawn == set(LISTS[0])
        again = ImageTextDataset(captioned(LISTS), captions_per_image=3)
        again.set_epoch(19)
        assert again[0]["caption"] == captions

    def test_negative_captions(self):
        wrong = [["x", None, "y"], [], None]
        dataset = ImageTextDataset(captioned(["a", "b", "c"], wrong=wrong), negative_caption_column="wrong")
        drawn = set()
        for epoch in range(20):
            dataset.set_epoch(epoch)
            items = [dataset[row] for row in range(3)]
            assert [item["caption"] for item in items] == [["a"], ["b"], ["c"]]
            assert items[1]["negative_captions"] == items[2]["negative_captions"] == []
            drawn.add(*items[0]["negative_captions"])
        assert drawn == {"x", "y"}
        strings = ImageTextDataset(captioned(["a", "b"], wrong=["x", None]), negative_caption_column="wrong")
        assert [item["negative_captions"] for item in strings] == [["x"], []]

    def test_all_captions(self):
        dataset = ImageTextDataset(captioned([["a", None, "b"], ["c", " ", "d"]]), all_captions=True)
        assert [item["caption"] for item in dataset] == [["a", "b"], ["c", "d"]]


class TestPairIds:
    def test_caption_ids_are_fixed(self):
        """Ids may be stored, and are compared across processes, so the hash must never change."""
        assert caption_pair_id("a photo of a cat") == 7822443840191189839
        assert -(2**63) <= caption_pair_id("") < 2**63

    def test_the_fingerprint_of_ids_and_negatives_is_fixed(self):
        """A checkpoint holds it, and is resumed by later releases."""
        rows = captioned(["a", "b"], swapped=["c", "d"], id=[1, 2])
        dataset = ImageTextDataset(rows, negative_caption_column="swapped", pair_id_column="id")
        assert dataset.content_fingerprint() == "e24ecf606165459f"

    @pytest.mark.parametrize(
        "same",
        ["a  PHOTO of\na Café in a STRASSE ", "a photo of a cafe\u0301 in a straße", "ａ photo of a café in a straße"],
    )
    def test_captions_that_read_the_same_share_an_id(self, same):
        assert caption_pair_id(same) == caption_pair_id("a photo of a café in a straße")
        assert caption_pair_id(same) != caption_pair_id("a photo of a cafe in a straße")

    @pytest.mark.parametrize("column", ["caption", "url"])
    def test_of_the_caption_or_another_string(self, column):
        rows = captioned(["A cat", "a dog", "a cat"], url=["x/1", "x/2", "x/1"])
        ids = [item["pair_id"] for item in ImageTextDataset(rows, pair_id_column=column)]
        assert ids[0] == ids[2] != ids[1]
        assert torch.tensor(ids).dtype == torch.int64
        assert column == "url" or ids[0] == caption_pair_id("a cat")

    @pytest.mark.parametrize(
        ("dtype", "values"), [("int32", [3, -1]), ("uint64", [2**64 - 1, 5]), ("int64", [-(2**63), 0])]
    )
    def test_of_an_integer_column(self, dtype, values):
        rows = captioned(["a", "b"]).add_column("id", values, feature=Value(dtype))
        ids = [item["pair_id"] for item in ImageTextDataset(rows, pair_id_column="id")]
        assert ids == np.array(values, dtype).astype(np.int64).tolist()

    @pytest.mark.parametrize("held", [False, True])
    def test_images_are_ids_by_the_path_of_a_table_or_the_contents_that_it_holds(self, tmp_path, held):
        for row in range(2):
            picture(row).save(tmp_path / f"{row}.png")
        (tmp_path / "table").mkdir()
        (tmp_path / "table/train.csv").write_text("filepath,caption\n../0.png,a\n../1.png,b\n../0.png,c\n")
        rows = load_pairs(str(tmp_path / "table"), split="train", image_column="filepath")
        if held:
            images = [{"bytes": (tmp_path / f"{row}.png").read_bytes(), "path": "any.png"} for row in (0, 1, 0)]
            rows = Dataset.from_dict({"filepath": images, "caption": rows["caption"]})
        dataset = ImageTextDataset(rows, pair_id_column="filepath")
        items = [dataset[row] for row in range(3)]
        assert [row_of(item) for item in items] == [0, 1, 0]
        first, other, again = (item["pair_id"] for item in items)
        assert first == again != other
        assert [dataset.without_image(row)["pair_id"] for row in range(3)] == [first, other, again]

    @pytest.mark.parametrize("wrap", [lambda parts: parts, lambda parts: [Subset(part, range(8)) for part in parts]])
    def test_rows_of_several_datasets_have_ids_of_their_own(self, wrap):
        """The parts have the same numbers of rows, columns and captions. Only their images differ."""
        captions = [["a", "b", str(row)] for row in range(8)]
        parts = [
            Dataset.from_dict({"image": [picture(8 * part + row) for row in range(8)], "caption": captions})
            for part in range(2)
        ]
        options = {"captions_per_image": 2, "on_bad_sample": "skip"}
        whole = ConcatDataset(wrap([ImageTextDataset(part, **options) for part in parts]))
        ids = [whole[row]["pair_id"] for row in range(16)]
        assert len(set(ids)) == 16
        again = ImageTextDataset(datasets.concatenate_datasets(parts), seed=1, on_bad_sample="skip")
        assert [item["pair_id"] for item in again] == ids, "the id is that of the row, whatever the row is part of"

    def test_rows_with_the_same_image_and_other_captions_have_ids_of_their_own(self):
        rows = Dataset.from_dict({"image": [picture(0)] * 3, "caption": ["a", "b", "a"]})
        first, second, third = (item["pair_id"] for item in ImageTextDataset(rows, on_bad_sample="skip"))
        assert first == third != second


BAD = {"truncated": 2, "missing": 4, "no image file": 5, "never there": 7}


@pytest.fixture
def broken(tmp_path) -> Dataset:
    """Ten pairs of an image folder, in which three files are damaged and one was never there."""
    folder = write_folder(tmp_path / "broken", [f"caption {row}" for row in range(10)])
    (folder / f"{BAD['never there']}.png").unlink()
    dataset = load_pairs(str(folder), split="train")
    path = folder / f"{BAD['truncated']}.png"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (folder / f"{BAD['missing']}.png").unlink()
    (folder / f"{BAD['no image file']}.png").write_text("<html>404</html>")
    return dataset


class TestBadSamples:
    @pytest.mark.parametrize(
        ("kind", "cause"),
        [
            *[("truncated", OSError), ("no image file", Image.UnidentifiedImageError)],
            *[("missing", FileNotFoundError), ("never there", FileNotFoundError)],
        ],
    )
    def test_a_bad_image_is_named_and_harms_no_other(self, broken, kind, cause):
        dataset = ImageTextDataset(broken)
        row = BAD[kind]
        message = rf"Row {row} of the dataset with columns \['image', 'caption'\] is bad: column 'image': "
        message += rf"'[^']*{row}\.png': {cause.__name__}"
        with pytest.raises(ValueError, match=message) as error:
            dataset[row]
        assert type(error.value.__cause__) is cause
        good = [row for row in range(10) if row not in BAD.values()]
        assert [row_of(dataset[row]) for row in good] == good

    def test_no_image(self):
        features = Features(image=datasets.Image(), caption=Value("string"))
        rows = Dataset.from_dict({"image": [picture(0), None], "caption": ["a", "b"]}, features=features)
        with pytest.raises(ValueError, match=r"Row 1 .* no image in column 'image'"):
            ImageTextDataset(rows)[1]

    @pytest.mark.parametrize(
        "captions", [[None, "a"], ["", "a"], [" \n", "a"], [[], ["a"]], [[None, ""], ["a"]], [None, ["a"]]]
    )
    def test_no_caption(self, captions):
        dataset = ImageTextDataset(captioned(captions))
        assert dataset[1]["caption"] == ["a"]
        with pytest.raises(ValueError, match=r"Row 0 .* no caption in column 'caption'"):
            dataset[0]

    def test_no_pair_id(self):
        dataset = ImageTextDataset(captioned(["a", "b"], id=[None, 7]), pair_id_column="id")
        assert dataset[1]["pair_id"] == 7
        with pytest.raises(ValueError, match=r"Row 0 .* no pair id in column 'id'"):
            dataset[0]

    def test_skip_puts_a_good_row_in_its_place(self, broken):
        items = list(ImageTextDataset(broken, on_bad_sample="skip"))
        assert len(items) == 10
        for row, item in enumerate(items):
            assert item["caption"] == [f"caption {row_of(item)}"]
            assert item["pair_id"] == items[row_of(item)]["pair_id"], "a repeated row must not be its own negative"
            if row in BAD.values():
                assert row_of(item) not in BAD.values()
                assert item["skipped"] >= 1
            else:
                assert row_of(item) == row
                assert item["skipped"] == 0

    def test_skip_is_the_same_for_any_number_of_workers_and_changes_with_the_epoch(self, broken):
        dataset = ImageTextDataset(broken, on_bad_sample="skip")

        def epoch(number: int, workers: int) -> list[tuple[int, int]]:
            dataset.set_epoch(number)
            loader = DataLoader(dataset, batch_size=None, num_workers=workers)
            return [(row_of(item), item["skipped"]) for item in loader]

        assert epoch(0, workers=0) == epoch(0, workers=2)
        assert len({tuple(epoch(number, workers=0)) for number in range(5)}) > 1

    def test_skip_counts_every_bad_row_it_met(self):
        dataset = ImageTextDataset(captioned(["good"] + 9 * [None]), on_bad_sample="skip")
        counts = [item["skipped"] for item in dataset]
        assert counts[0] == 0
        assert all(row_of(item) == 0 for item in dataset)
        assert max(counts) > 1, "nine of ten rows are bad, so some replacement was also bad"

    def test_skip_keeps_the_pair_ids_asked_for(self, broken):
        for item in ImageTextDataset(broken, on_bad_sample="skip", pair_id_column="caption"):
            assert item["pair_id"] == caption_pair_id(f"caption {row_of(item)}")

    def test_skip_gives_up_when_everything_is_bad(self):
        with pytest.raises(ValueError, match=r"All of 100 rows .* were bad\. The last: Row . .* no caption"):
            ImageTextDataset(captioned([None, ""]), on_bad_sample="skip")[0]

    def test_skip_does_not_hide_a_row_out_of_range(self, broken):
        with pytest.raises(IndexError):
            ImageTextDataset(broken, on_bad_sample="skip")[10]


PAIRS = captioned(["a", "b"], id=[1, 2], score=[0.5, 0.5], tags=[[1], [2]])


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (
            PAIRS,
            {"image_column": "img"},
            r"no column 'img'\. Its columns are \['image', .* with image_column \(--image_column\)",
        ),
        (PAIRS, {"caption_column": "text"}, r"no column 'text'.* with caption_column \(--caption_column\)"),
        (PAIRS.select_columns("image"), {}, r"are \['image'\].* belong in its metadata.jsonl or metadata.csv"),
        (
            PAIRS,
            {"caption_column": ["en", "de"]},
            r"one column, got \['en', 'de'\]\. Join several into one of lists: rows",
        ),
        (PAIRS, {"image_column": ("a", "b")}, r"image_column must be the name of one column, got \('a', 'b'\)\.$"),
        (PAIRS, {"pair_id_column": "pair"}, r"no column 'pair'.* with pair_id_column \("),
        (PAIRS, {"image_column": "id"}, "image_column 'id' must hold images, .* not Value"),
        (PAIRS, {"image_column": "caption"}, "image_column and caption_column are both 'caption'. Name another"),
        (PAIRS, {"negative_caption_column": "image"}, "image_column and negative_caption_column are both 'image'."),
        (PAIRS, {"caption_column": "id"}, "caption_column 'id' must hold strings or lists of strings, not Value"),
        (PAIRS, {"caption_column": "tags"}, "caption_column 'tags' must hold strings or lists of strings, not List"),
        (PAIRS, {"pair_id_column": "score"}, "pair_id_column 'score' must hold integers or strings, not Value"),
        (PAIRS, {"pair_id_column": "tags"}, "must hold integers or strings, not lists, since a pair has one id"),
        (PAIRS, {"on_bad_sample": "ignore"}, "on_bad_sample must be .* got 'ignore'"),
        (PAIRS, {"on_bad_sample": "skip", "all_captions": True}, "would count other rows twice in place of"),
        (PAIRS, {"captions_per_image": 0}, "captions_per_image must be an integer of at least 1, got 0"),
        (captioned(LISTS), {"captions_per_image": 1.5}, "captions_per_image must be an integer of at least 1, got 1.5"),
        (PAIRS, {"captions_per_image": 2}, "captions_per_image is 2, but the caption_column 'caption' holds one str"),
        (captioned(LISTS), {"captions_per_image": 2, "all_captions": True}, r"\(all_captions=True\) uses exactly"),
        (PAIRS, {"negative_caption_column": "caption", "all_captions": True}, r"\(all_captions=True\) uses exactly"),
        (PAIRS, {"negative_caption_column": "caption"}, "are both 'caption', so every caption would be a negative"),
        (PAIRS, {"negative_caption_column": "wrong"}, r"no column 'wrong'.* with negative_caption_column \("),
        (
            PAIRS,
            {"negative_caption_column": "id"},
            "negative_caption_column 'id' must hold strings or lists of strings",
        ),
        (PAIRS.select([]), {}, "no rows"),
        (Dataset.from_dict({"image": [], "caption": []}), {}, "no rows"),
        (PAIRS.with_transform(lambda batch: batch), {}, "has a transform"),
        (DatasetDict(train=PAIRS, test=PAIRS), {}, r"is a DatasetDict\. Pass one of its splits: \['train', 'test'\]"),
        (PAIRS.to_iterable_dataset(), {}, "got IterableDataset. Pass a dataset of your own to InfCLTrainer"),
    ],
)
def test_a_wrong_dataset_or_option_is_refused_at_once(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        ImageTextDataset(dataset, **options)


class TestZeroShot:
    def rows(self, labels: list, feature=None) -> Dataset:
        feature = feature or ClassLabel(names=["cat", "dog", "owl"])
        return captioned([""] * len(labels)).add_column("label", labels, feature=feature)

    def test_items_and_prompts(self):
        dataset = ZeroShotDataset(self.rows([2, 0, 1]), templates=["a {c}.", "{} {0}"])
        assert [item.keys() for item in dataset] == [{"image", "label"}] * 3
        assert [(row_of(item), item["label"]) for item in dataset] == [(0, 2), (1, 0), (2, 1)]
        assert dataset.class_names == ["cat", "dog", "owl"]
        assert dataset.templates == ("a {}.", "{} {0}")
        assert dataset.prompts() == ["a cat.", "cat {0}", "a dog.", "dog {0}", "a owl.", "owl {0}"]

    def test_names_in_the_table_are_the_classes(self):
        rows = Dataset(self.rows(["owl", "cat", "owl"], Value("string")).data, split=NamedSplit("test"))
        dataset = ZeroShotDataset(rows.select([2, 1]))
        assert (dataset.class_names, dataset.known_names) == (["cat", "owl"], ["cat", "owl"])
        assert dataset.split == "test"
        assert [(row_of(item), item["label"]) for item in dataset] == [(2, 1), (1, 0)]
        assert captions_of_classes(rows.remove_columns("caption"), ["a {c}"])["caption"][:] == [
            ["a owl"],
            ["a cat"],
            ["a owl"],
        ]

    def test_equal_names_stay_two_classes(self):
        dataset = ZeroShotDataset(self.rows([0, 1], Value("int64")), class_names=("crane", "crane"))
        assert dataset.prompts() == ["a photo of a crane."] * 2

    @pytest.mark.parametrize("kind", [ClassLabel(names=["cat", "dog"]), Value("int64"), datasets.List(Value("int8"))])
    def test_names_may_come_from_what_is_read_once(self, kind):
        labels = [[0, 1], [1, 0]] if isinstance(kind, datasets.List) else [0, 1]
        assert ZeroShotDataset(self.rows(labels, kind), class_names=iter(["cat", "dog"])).class_names == ["cat", "dog"]

    def test_a_bad_image_is_named(self, broken):
        dataset = ZeroShotDataset(broken.add_column("label", [0] * 10), class_names=["only"])
        assert row_of(dataset[1]) == 1
        with pytest.raises(ValueError, match=r"Row 4 .*FileNotFoundError"):
            dataset[4]

    @pytest.mark.parametrize(
        ("labels", "feature", "options", "message"),
        [
            ([0], None, {"label_column": "class"}, r"no column 'class'.* with label_column \("),
            ([0.5], Value("float32"), {}, "must hold integers or strings, not Value"),
            ([0], Value("int64"), {}, "class_names must list .* got None"),
            ([0], None, {"class_names": []}, r"class_names must list .* got \[\]"),
            ([0], None, {"class_names": "cat"}, "class_names must list .* got 'cat'"),
            ([0], None, {"class_names": {0: "cat"}}, "class_names must list .* got {0: 'cat'}"),
            ([0], None, {"class_names": pandas.Series([], dtype=str)}, "class_names must list"),
            ([0], None, {"class_names": ["owl", None]}, r"class_names must list .* got \['owl', None\]"),
            ([0], None, {"class_names": [1]}, r"class_names must list .* got \[1\]"),
            ([0], None, {"class_names": {"owl"}}, "class_names must list .* got {'owl'}"),
            ([0], None, {"templates": str.title}, "templates must be .* got <method"),
            ([0], None, {"templates": None}, "templates must be .* got None"),
            ([0], None, {"templates": [str.title]}, "templates must be a list of texts"),
            (
                [0],
                None,
                {"class_names": ["owl", "cat", "dog"]},
                r"another order: .* instead of \['cat', 'dog', 'owl'\]",
            ),
            ([0], None, {"class_names": ["cat", "dog"]}, "There are 2 class_names .* for the 3 classes"),
            ([0], None, {"class_names": ["cat", "owl", "hen"]}, r"another order: .*, for example 'owl'"),
            ([0, 1, 3], Value("int64"), {"class_names": ["a", "b"]}, r"holds \[3\], but there are 2 class names"),
            ([0, -1], None, {}, r"holds \[-1\], but there are 3 class names"),
            ([0, None], None, {}, r"holds \[None\]"),
            ([0], None, {"templates": []}, r"templates must .* got \[\]"),
            ([0], None, {"templates": "a {}"}, "templates must .* got 'a {}'"),
            ([0], None, {"templates": ["a {}", "a {} {}"]}, "templates must be .* with one"),
        ],
    )
    def test_a_wrong_dataset_or_option_is_refused_at_once(self, labels, feature, options, message):
        with pytest.raises(ValueError, match=message):
            ZeroShotDataset(self.rows(labels, feature), **options)


def items(*captions: list[str], **values: list) -> list[dict]:
    rows = [{"image": picture(row, (20, 30)), "caption": caption} for row, caption in enumerate(captions)]
    return [row | {key: value[index] for key, value in values.items()} for index, row in enumerate(rows)]


class TestCollator:
    def test_clip(self):
        batch = ContrastiveCollator(clip_processor())(items(["a b c"], ["d"]))
        assert batch.keys() == {"pixel_values", "input_ids", "attention_mask"}
        assert batch["pixel_values"].shape == (2, 3, 16, 16)
        assert batch["pixel_values"].dtype == torch.float32
        assert batch["input_ids"].tolist() == [[2, 3, 4, 1], [5, 1, 0, 0]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]

    def test_several_captions_and_then_negative_ones(self):
        rows = items(["a b c", "d"], ["a"], negative_captions=[[], ["b"]])
        batch = ContrastiveCollator(clip_processor())(rows)
        assert batch["input_ids"].tolist() == [[2, 3, 4, 1], [5, 1, 0, 0], [2, 1, 0, 0], [3, 1, 0, 0]]
        assert batch["caption_image"].tolist() == [0, 0, 1, -1]
        assert batch["caption_image"].dtype == torch.int64
        assert len(batch["pixel_values"]) == 2
        single = ContrastiveCollator(clip_processor())(items(["a"], ["b"], negative_captions=[[], []]))
        assert "caption_image" not in single

    def test_siglip_is_padded_to_a_fixed_length(self):
        batch = ContrastiveCollator(siglip_processor())(items(["a b c"], ["d"]))
        assert batch["pixel_values"].shape == (2, 3, 16, 16)
        assert batch["input_ids"].shape == (2, LENGTH)

    def test_so_is_any_tokenizer_without_an_attention_mask(self):
        batch = ContrastiveCollator(clip_processor(model_input_names=["input_ids"]))(items(["a b c"]))
        assert batch.keys() == {"pixel_values", "input_ids"}
        assert batch["input_ids"].shape == (1, LENGTH)

    def test_siglip2_keeps_its_masks_and_shapes(self):
        batch = ContrastiveCollator(siglip2_processor())(items(["a"], ["b"]))
        assert batch["pixel_values"].shape == (2, 16, 4 * 4 * 3)
        assert batch["pixel_attention_mask"].shape == (2, 16)
        assert batch["spatial_shapes"].shape == (2, 2)
        assert batch["input_ids"].shape == (2, LENGTH)

    @pytest.mark.parametrize("kind", ["clip", "siglip"])
    def test_an_embedding_does_not_depend_on_the_other_captions_of_the_batch(self, kind):
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        special = {"vocab_size": 28, "max_position_embeddings": LENGTH, "eos_token_id": 1, "pad_token_id": 0}
        torch.manual_seed(0)
        build, config, processor = {
            "clip": (transformers.CLIPTextModel, transformers.CLIPTextConfig, clip_processor),
            "siglip": (transformers.SiglipTextModel, transformers.SiglipTextConfig, siglip_processor),
        }[kind]
        model, collator = build(config(**shape, **special)).eval(), ContrastiveCollator(processor())
        with torch.no_grad():
            alone = model(**collator.tokenize(["d e"])).pooler_output
            in_company = model(**collator.tokenize(["d e", "a b c d e"])).pooler_output[:1]
        torch.testing.assert_close(alone, in_company)

    @pytest.mark.parametrize("processor", [clip_processor, siglip_processor])
    def test_texts_become_the_tensors_of_the_tokenizer(self, processor):
        collator, texts = ContrastiveCollator(processor()), ["a", "", "b c d", " ".join("abcdefghijkl")]
        options = {**collator.text_options, "truncation": True, "return_tensors": "pt"}
        expected, tokens = processor().tokenizer(texts, **options), collator.tokenize(texts)
        assert tokens.keys() == expected.keys()
        for name, rows in tokens.items():
            assert rows.dtype == expected[name].dtype == torch.int64
            assert torch.equal(rows, expected[name])

    def test_captions_are_truncated(self):
        long = " ".join("abcdefghijkl")
        full = ContrastiveCollator(clip_processor())
        assert full.tokenize([long])["input_ids"].tolist() == [[2, 3, 4, 5, 6, 7, 8, 1]]
        short = ContrastiveCollator(clip_processor(), max_length=3)
        assert short.tokenize([long, "a"])["input_ids"].tolist() == [[2, 3, 1], [2, 1, 0]]

    def test_ids_and_counts_are_int64(self):
        batch = ContrastiveCollator(clip_processor())(items(["a"], ["b"], pair_id=[-(2**63), 7], skipped=[0, 2]))
        assert torch.equal(batch["pair_ids"], torch.tensor([-(2**63), 7]))
        assert torch.equal(batch["skipped"], torch.tensor([0, 2]))
        assert "caption_image" not in batch

    @pytest.mark.parametrize("key", ["caption", "pair_id", "skipped", "label", "image_features"])
    def test_items_of_different_kinds_are_refused(self, key):
        rows = [{"image": picture(0, (20, 30)), key: ["a"]}, {"image": picture(1, (20, 30))}]
        for mixed in (rows, rows[::-1]):
            with pytest.raises(ValueError, match=rf"{key!r} is in 1 of 2 items of a batch, and not in .*same options"):
                ContrastiveCollator(clip_processor())(mixed)

    def test_zero_shot_items(self):
        rows = captioned(["", ""]).add_column("label", [1, 0], feature=ClassLabel(names=["cat", "dog"]))
        batch = ContrastiveCollator(siglip2_processor())(list(ZeroShotDataset(rows)))
        assert batch.keys() == {"pixel_values", "pixel_attention_mask", "spatial_shapes", "labels"}
        assert torch.equal(batch["labels"], torch.tensor([1, 0]))

    def test_from_dataset_to_batch_in_workers(self, broken):
        dataset = ImageTextDataset(broken, on_bad_sample="skip")
        loader = DataLoader(dataset, batch_size=5, num_workers=2, collate_fn=ContrastiveCollator(clip_processor()))
        batches = list(loader)
        assert [batch["pixel_values"].shape for batch in batches] == [(5, 3, 16, 16)] * 2
        assert sum(int((batch["skipped"] > 0).sum()) for batch in batches) == len(BAD)

    def test_made_for_a_model_captions_fit_its_text_tower(self):
        processor = clip_processor(model_max_length=None)
        config = transformers.CLIPConfig(text_config={"max_position_embeddings": 3})
        collator = ContrastiveCollator.for_model(processor, config)
        assert collator.tokenize(["a b c d"])["input_ids"].tolist() == [[2, 3, 1]]
        assert ContrastiveCollator.for_model(clip_processor(model_max_length=2), config).max_length == 2

    def test_towers_like_roberta_have_fewer_positions_than_their_config_states(self):
        processor = clip_processor(model_max_length=None)
        vision = models.VISION
        for model in (
            models.BUILD["altclip"](),
            *(
                transformers.VisionTextDualEncoderModel(
                    transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
                        transformers.CLIPVisionConfig(**vision), kind(**models.BERT), projection_dim=12
                    )
                )
                for kind in (transformers.XLMRobertaConfig, transformers.CamembertConfig, transformers.MPNetConfig)
            ),
        ):
            collator = ContrastiveCollator.for_model(processor, model.config)
            assert collator.max_length == 14  # of 16 embeddings of positions
            texts = collator.tokenize(["a b c d e f g h i j k l m n o p q r s t"])
            model.get_text_features(input_ids=texts["input_ids"], attention_mask=texts["attention_mask"])
            with pytest.raises((IndexError, RuntimeError)):
                model.get_text_features(input_ids=torch.full((1, 15), 2))
        bert = models.BUILD["chinese_clip"]()
        assert ContrastiveCollator.for_model(processor, bert.config).max_length == 16

    def test_a_tokenizer_without_padding_is_refused(self):
        processor = clip_processor()
        processor.tokenizer.pad_token = None
        for make in (ContrastiveCollator, lambda one: ContrastiveCollator.for_model(one, models.clip().config)):
            with pytest.raises(ValueError, match=r"The tokenizer, a .*, has no pad_token.*pad_token_id"):
                make(processor)

    def test_made_for_siglip_captions_are_of_one_length_whatever_the_processor(self):
        config = transformers.SiglipConfig(text_config={"max_position_embeddings": 6})
        assert ContrastiveCollator.for_model(clip_processor(), config).tokenize(["a"])["input_ids"].shape == (1, 6)

    def test_rows_without_an_image_are_refused(self):
        with pytest.raises(ValueError, match=r"keys \['pixel_values', 'input_ids'\]\..*default_collate"):
            ContrastiveCollator(clip_processor())([{"pixel_values": torch.zeros(3, 16, 16), "input_ids": [1, 2]}])

    def test_a_tokenizer_without_a_limit_is_refused(self):
        processor = clip_processor(model_max_length=None)
        with pytest.raises(ValueError, match=r"The tokenizer, a .*, states no model_max_length\. Pass max_length"):
            ContrastiveCollator(processor)
        assert ContrastiveCollator(processor, max_length=5).tokenize(["a"])["input_ids"].tolist() == [[2, 1]]

    def test_a_processor_that_lacks_a_part_is_refused(self):
        with pytest.raises(ValueError, match="has no image_processor"):
            ContrastiveCollator(tokenizer())
        with pytest.raises(ValueError, match="has no image_processor and no tokenizer"):
            ContrastiveCollator(clip_processor().image_processor)


def test_rows_that_are_not_wrapped_are_refused():
    with pytest.raises(ValueError, match=r"list of captions.*'a dog'.*ImageTextDataset"):
        ContrastiveCollator(clip_processor())([{"image": Image.new("RGB", (8, 8)), "caption": "a dog"}])


@pytest.mark.parametrize("size", [{"longest_edge": 16}, {"shortest_edge": 16}])
def test_a_processor_whose_size_gives_no_batch_is_named(size):
    processor = clip_processor()
    processor.image_processor = transformers.CLIPImageProcessorPil(size=size, do_center_crop=False)
    items = [{"image": Image.new("RGB", (width, 20)), "caption": ["a"]} for width in (20, 30)]
    with pytest.raises(ValueError, match=r"(?s)The CLIPImageProcessorPil cannot prepare the images .* and crop_size\."):
        ContrastiveCollator(processor)(items)
