"""Opens a dataset by name: a Hub id, a local folder, or a folder written by `save_to_disk`."""

import csv
import io
import itertools
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
from datasets.utils.file_utils import xexists
from huggingface_hub.errors import HFValidationError

from ..files.hub import not_there
from ..files.text import Url, written_otherwise
from ..files.whole import check_pulled
from ..shards import opening
from ..shards.layout import IMAGE_EXTENSIONS
from ..shards.opening import KINDS_OF_FILES, dataset_builder, existing_part, kind_of_file, open_shard
from ..shards.readers import holds_images, is_value
from ..shards.tar_tables import tar_table
from .images import find_column

_NONE_IS_TEXT: Any = {"keep_default_na": False, "na_values": [""]}  # for pandas, which reads CSV files
_PROBED = 2**16  # bytes of a CSV file whose rows show the separator
_QUOTE = 'Write captions with commas in double quotes: "a cat, and a dog".'
_LOOKED_FOR, _LOOKED_FOR_REMOTELY = 10_000, 10  # images whose relative paths are tried
_LOOKED_AT = 100  # files that may lie beside images


class Table:
    """A dataset as for `load_pairs`, whose files are looked for once, which takes long in a folder of many images."""

    def __init__(self, source: str, name: str | None = None) -> None:
        self._source, self._name = source, name

    def load(self, split: str, image_column: str = "image") -> datasets.Dataset:
        """`load_pairs` of this dataset."""
        source = self._source
        if "://" in source and not source.startswith("hf://"):
            raise ValueError(
                f"{Url(source)!r} is a URL, and a table is loaded from a folder or from the Hub. Shards behind a URL "
                "can be streamed as training data (--streaming, or ImageTextStream in Python)."
            )
        is_other = Path(source).is_file() and kind_of_file(source) is None
        if is_other or set(source[len(existing_part(source)) :]) & set("*?{["):
            raise ValueError(
                f"{source!r} names files, and a table is loaded from a folder or from one file of "
                f"{', '.join(KINDS_OF_FILES)}. Name the folder that holds them. "
                "Training data in tar or parquet shards can be streamed (--streaming, or ImageTextStream in Python)."
            )
        if (saved := self._saved) is None:
            return self._load_files(split, image_column)
        if isinstance(saved, datasets.Dataset):
            # A dataset saved by itself may not know what split it was.
            saved = datasets.DatasetDict({str(saved.split or split_names(split)[0]): saved})
        if unknown := [name for name in split_names(split) if name not in saved]:
            raise ValueError(f"{source!r} has no split {unknown[0]!r}. Its splits are {list(saved)}.")
        return _selected(saved, split)

    def split_to_evaluate(self, *, chooses: bool = False) -> str:
        """The split to evaluate on if none was named: "test", or else "validation", or else the only one.

        An evaluation that ``chooses`` a model prefers "validation". It is "test" where `load` has to say what is wrong
        with the source. A folder whose files belong to no split, such as ``imnet/val`` with a folder for each class, is
        one split, "train".
        """
        try:
            if (saved := self._saved) is None:
                splits = list(self._files) or [*map(str, self._builder.info.splits or ())]
            else:
                splits = list(saved) if isinstance(saved, dict) else [str(saved.split or "test")]
        except (OSError, ValueError):  # `load` meets it again
            return "test"
        order = ("validation", "test") if chooses else ("test", "validation")
        preferred = [split for split in order if split in splits]
        return [*preferred, *(splits if len(splits) == 1 else []), "test"][0]

    @cached_property
    def _saved(self) -> datasets.Dataset | datasets.DatasetDict | None:
        """The datasets in a folder of `save_to_disk`; None for any other source."""
        files = datasets.config.DATASET_STATE_JSON_FILENAME, datasets.config.DATASETDICT_JSON_FILENAME
        if not any((Path(self._source) / file).is_file() for file in files):
            return None
        try:
            return datasets.load_from_disk(self._source)
        except Exception as error:  # a damaged file makes the libraries raise exceptions of any class
            told = f"{self._source!r}, a folder of save_to_disk, cannot be loaded"
            raise ValueError(f"{told}: {type(error).__name__}: {error}") from error

    @cached_property
    def _builder(self) -> Any:
        return dataset_builder(self._source, self._name)

    @cached_property
    def _files(self) -> dict[str, list[str]]:
        """The files of each split, of data that has files."""
        return {str(split): [*map(str, files)] for split, files in (self._builder.config.data_files or {}).items()}

    def _load_files(self, split: str, image_column: str) -> datasets.Dataset:
        source = self._source
        try:
            builder, kind = self._builder, self._builder.info.builder_name
            separator = _separator([*itertools.chain(*self._files.values())])
            if separator not in (None, ",") and kind == "imagefolder":
                raise ValueError(f"its metadata.csv separates the columns by {separator!r}. Write it with commas.")
            if separator and kind == "csv":
                builder = dataset_builder(source, self._name, sep=separator, **_NONE_IS_TEXT)
            if separator and kind == "imagefolder":
                builder = _image_folder_builder(source, self._name)
            if kind == "webdataset":
                return _of_tar_files(self._files, split, image_column)
            builder.download_and_prepare()
            rows = builder.as_dataset(split=split)
            files = [file for name in split_names(split) for file in self._files.get(name, ())]
            _check_no_pairs_of_files(rows, files)
            return _with_whole_paths(rows, files, find_column("image", rows.features, image_column))
        except (ConnectionError, FileNotFoundError, HFValidationError) as error:
            raise ValueError(not_there("There is no dataset", source, error)) from error
        except (ValueError, StopIteration, datasets.exceptions.DatasetGenerationError) as error:
            raise ValueError(f"The split {split!r} of {source!r} cannot be loaded: {self._cause(error)}") from error

    def _cause(self, error: Exception) -> str:
        """Why files cannot be loaded: there is no such split or configuration, or what is wrong in a file."""
        if isinstance(error, StopIteration):  # JSON without a line
            return "one of its files has no rows"
        within = None if isinstance(error, ValueError) else error.__cause__  # the outer error gives no reason
        cause = str(within or error).strip()
        if isinstance(within, UnicodeDecodeError):
            file = next(filter(_is_not_utf_8, itertools.chain(*self._files.values())), self._source)
            cause = f"{Url(file)!r} is not UTF-8: {within}"
        if re.search(r"changed from (string to array|array to string)", cause):  # in the metadata of images
            cause = f"{cause.rstrip('.')}. Where some rows have a list, such as several captions, write a list in "
            cause += "every row."
        if "Error tokenizing data" in cause:  # of pandas, which names the line
            cause += f". {_QUOTE}"
        return cause


def _image_folder_builder(source: str, name: str | None) -> Any:
    """The builder of a folder of images, which reads "None" and "NA" in a metadata.csv as texts."""
    # Without any effect on the rows, the option parts what it stores from what its own method would read.
    builder = dataset_builder(source, name, drop_metadata=False)
    own = builder._read_metadata

    def read(file: str, metadata_ext: str) -> Any:
        if metadata_ext != ".csv":
            return own(file, metadata_ext=metadata_ext)
        with opening.existing_paths_are_literal():
            return [datasets.Dataset.from_csv(file, keep_in_memory=True, **_NONE_IS_TEXT).data.table]

    builder._read_metadata = read
    return builder


def _is_not_utf_8(file: str) -> bool:
    if file.rpartition(".")[2].lower() in IMAGE_EXTENSIONS:
        return False
    with open_shard(file) as opened:
        return "\ufffd" in opened.read().decode("utf-8", "replace")


def _selected(tables: Mapping[str, datasets.Dataset], split: str) -> datasets.Dataset:
    """The rows of such as "train[:10%]+test" among the tables of the splits."""
    lengths = {name: len(rows) for name, rows in tables.items()}
    parts = [
        tables[part.splitname].select(range(part.from_ or 0, lengths[part.splitname] if part.to is None else part.to))
        for part in datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    ]
    # Tables that were selected from one dataset, as by `train_test_split`, all call themselves by its split.
    return datasets.concatenate_datasets(parts, split=datasets.NamedSplit(split))


def _check_no_pairs_of_files(rows: datasets.Dataset, files: Sequence[str]) -> None:
    """Raises a ValueError if the rows are of text files that lie beside images of the same names."""
    if rows.info.builder_name not in ("text", "json"):
        return
    for file, kind in itertools.product(files[:_LOOKED_AT], sorted(IMAGE_EXTENSIONS)):
        if os.path.isfile(image := f"{posixpath.splitext(file)[0]}.{kind}"):
            raise ValueError(
                f"{os.path.basename(image)} lies beside {os.path.basename(file)}, but captions of a folder are not "
                "read from such files. Write them into a metadata.jsonl there, with lines such as "
                f'{{"file_name": "{os.path.basename(image)}", "caption": "..."}}, or pack the folder with '
                "`tar --sort=name` into shards and stream these (--streaming)."
            )


def _of_tar_files(files: Mapping[str, Sequence[str]], split: str, image_column: str) -> datasets.Dataset:
    """The rows of tar files; ``files`` lists them by split."""
    tables: dict[str, datasets.Dataset] = {}
    for name in dict.fromkeys(split_names(split)):
        if name not in files:
            raise ValueError(f"there is no such split. Its splits are {[*files]}.")
        if wrong := [Url(file) for file in files[name] if not file.endswith(".tar")]:
            raise ValueError(f"{wrong[0]!r} is compressed. Compressed tar files have to be unpacked once to .tar.")
        local = datasets.DownloadManager().download(files[name])
        tables[name] = tar_table(list(zip(local, map(Url, files[name]), strict=True)), image_column, name)
    return _selected(tables, split)


def _separator(files: Sequence[str]) -> str | None:
    """What separates the columns of CSV files; None if there are none, or if they have one column.

    A ValueError says which of them, or which lines of one, do not agree.
    """
    examples: dict[str, str] = {}
    for file in files:
        if kind_of_file(file):
            check_pulled(file)
        if file.lower().endswith((".csv", ".tsv")) and (separator := _separator_of(file)):
            examples.setdefault(separator, file)
    if len(examples) > 1:
        (one, first), (other, second), *_ = examples.items()
        raise ValueError(f"{first} separates the columns by {one!r}, and {second} by {other!r}. Write all with commas.")
    return next(iter(examples), None)


def _separator_of(file: str) -> str | None:
    with open_shard(file, buffer=_PROBED) as opened:
        text = opened.read(_PROBED).decode("utf-8-sig", "replace")
    whole = text if len(text) < _PROBED else text[: text.rfind("\n") + 1]
    found: dict[str, dict[int, int]] = {}  # by the separators of several columns and the line, the number of values
    for separator in "\t,;|" if file.lower().endswith(".tsv") else ",\t;|":
        reader = csv.reader(io.StringIO(whole, newline=None), delimiter=separator)
        widths = [(reader.line_num, len(row)) for row in reader if row]
        if widths and widths[0][1] > 1:
            found[separator] = dict(widths)
    if not found:
        return None
    separator = min(found, key=lambda one: len({*found[one].values()}) > 1)  # the first, if any, of even lines
    strict = csv.reader(io.StringIO(whole, newline=None), delimiter=separator, strict=True)
    try:
        list(strict)
    except csv.Error as error:  # pandas would read the lines up to another quote as one caption
        if whole == text or "end of data" not in str(error):
            raise ValueError(
                f"line {strict.line_num} of {Url(file)!r} has an open quote or one within a value: {error}. "
                "Write a quote within a caption twice, in quotes."
            ) from error
    header, *_ = found[separator].values()
    if wide := [line for line, width in found[separator].items() if width > header]:
        line = f"line {wide[0]} of {Url(file)!r}"  # pandas would take the first columns for an index
        raise ValueError(f"{line} has more values than the header has names ({header}). {_QUOTE}")
    return separator


def _with_whole_paths(rows: datasets.Dataset, files: Sequence[str], image_column: str) -> datasets.Dataset:
    """The rows, with the paths of their images joined to the folder of the files, if they are relative to it."""
    kind, feature = rows.info.builder_name, rows.features.get(image_column)
    is_encoded = is_value(feature, "binary", "large_binary")
    if kind not in ("parquet", "csv", "json") or not holds_images(feature) or is_encoded:
        return rows
    images = rows.cast_column(image_column, datasets.Image(decode=False))
    relative = list(itertools.islice(_relative_paths(images, image_column), _LOOKED_FOR))
    folders = sorted({*map(posixpath.dirname, files)})
    if not relative or not folders or (kind != "parquet" and not _are_beside(relative, folders)):
        return rows
    if len(folders) > 1:
        raise ValueError(
            "its files lie in several folders, so that it is not known to which of them the path of the image "
            f"{relative[0]!r} is relative. Use absolute paths, or one folder."
        )
    (folder,) = folders

    def join(image: dict[str, Any] | None) -> dict[str, Any]:
        if image is not None and image["bytes"] is None and _is_relative(image["path"]):
            image = {"bytes": None, "path": posixpath.join(folder, image["path"])}
        return {image_column: image}

    return images.map(join, input_columns=[image_column], desc="Paths of images")


def split_names(split: str) -> list[str]:
    """The names of the splits in "train[:10%]+test"."""
    return [part.partition("[")[0].strip() for part in split.split("+")]


def _are_beside(paths: Sequence[str], folders: Sequence[str]) -> bool:
    """Whether images are relative to one of the folders, not to the working folder.

    A ValueError says that none of them is there.
    """
    if any(map(os.path.exists, paths)):
        return False
    for folder in folders:
        # A look over the network takes long.
        some = paths[:_LOOKED_FOR_REMOTELY] if "://" in folder else paths
        if any(xexists(posixpath.join(folder, path)) for path in some):
            return True
    alike = "".join(written_otherwise(posixpath.join(folder, paths[0]), os.path.exists) for folder in folders)
    raise ValueError(
        f"none of its images is there, such as {paths[0]!r}, relative to the working folder {os.getcwd()} or to the "
        f"folder of the table, {' or '.join(folders[:3])}{alike}. Use absolute paths, or another working folder."
    )


def _relative_paths(images: datasets.Dataset, column: str) -> Iterator[str]:
    for chunk in images.data.column(column).chunks:  # of which only the paths of images without bytes are read
        yield from filter(_is_relative, chunk.field("path").filter(chunk.field("bytes").is_null()).to_pylist())


def _is_relative(path: str | None) -> bool:
    return path is not None and "://" not in path and not os.path.isabs(path)
