"""Benchmarks as evaluation sets: tar shards in the layout of CLIP_benchmark, files of SugarCrepe, tables of XM3600."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import datasets
import numpy as np

from ...data import ImageTextDataset, ZeroShotDataset
from ...data.pairs import usable_captions
from ...shards.names import IMAGE_EXTENSIONS
from ...shards.opening import existing_paths_are_literal
from ...shards.readers import Columns, TarReader
from ...shards.tar_layout import DamagedShardError
from .files import Files, benchmark_files, sugarcrepe_files, xm3600_files
from .names import SUGARCREPE, SUGARCREPE_PP, XM3600, benchmark_key, expanded

_OTHER_SETS = ("pairs", "zero_shot")  # the keys of --eval_dataset and --zero_shot_dataset
_LABELS = {"classification": "cls", "multilabel": "npy", "retrieval": "txt"}  # the file beside an image
_COLUMNS = {
    "classification": ("label", datasets.Value("int64")),
    "multilabel": ("label", datasets.List(datasets.Value("int64"))),
    "retrieval": ("caption", datasets.List(datasets.Value("string"))),
}


class CaptionChoiceDataset(ImageTextDataset):
    """An `ImageTextDataset` with ``all_captions``, of which the first are right and the rest are wrong.

    ``right`` is the number of right captions of each image: 1 as in SugarCrepe, 2 as in SugarCrepe++. A row with an
    empty caption or no wrong one is refused with a ValueError.
    """

    kind = "choices"  # of its metrics, see `hf_infcl.evaluation.metrics.Metric`

    def __init__(self, dataset: datasets.Dataset, *, right: int = 1) -> None:
        super().__init__(dataset, all_captions=True)
        self.right = right
        for row, captions in enumerate(self._texts["caption"]):
            if not isinstance(captions, list) or len(captions) <= right or usable_captions(captions) != captions:
                of_right = "its right caption" if right == 1 else f"its {right} right captions"
                raise ValueError(
                    f"Each row needs {of_right} and at least one wrong one, but row {row} has {captions!r}."
                )


def benchmark_sets(
    names: Sequence[str] | None,
    folder: str | None = None,
    prefix: str = "",
    select: Callable[[datasets.Dataset], datasets.Dataset] | None = None,
) -> dict[str, ImageTextDataset | ZeroShotDataset]:
    """The evaluation sets of benchmarks by the names of their metrics.

    Each has an attribute ``benchmark``, its `Files`, which name its repository and revision.

    Args:
        names, folder: as for `expanded` and `benchmark_files`.
        prefix: begins all keys.
        select: takes the rows to evaluate out of all; by default, all are evaluated.

    Raises:
        ValueError: a name or the files of a benchmark are not as they should be; the message names it.
    """
    evaluation_sets: dict[str, ImageTextDataset | ZeroShotDataset] = {}
    for name in expanded(names or (), folder):
        key = prefix + benchmark_key(name)
        try:
            if key in evaluation_sets or key in _OTHER_SETS:
                raise ValueError(
                    f"Its metrics would have the names eval_{key}_... of another set's. Measure both by two commands."
                )
            files = _OF_FILES.get(name, benchmark_files)(name, folder)
            rows = _OF_ROWS.get(name, _rows)(files)
            dataset = _make_set(files, rows if select is None else select(rows))
        except ValueError as error:
            raise ValueError(f"The benchmark {name}: {error}") from error
        dataset.name = f"the benchmark {name} ({files.dataset} at {files.revision[:23]})"
        dataset.benchmark = files
        evaluation_sets[key] = dataset
    return evaluation_sets


def _make_set(files: Files, rows: datasets.Dataset) -> ImageTextDataset | ZeroShotDataset:
    if files.name in (*SUGARCREPE, *SUGARCREPE_PP):
        return CaptionChoiceDataset(rows, right=1 if files.name in SUGARCREPE else 2)
    if files.name in XM3600:
        return ImageTextDataset(rows, caption_column="captions", all_captions=True)
    if files.kind == "retrieval":
        return ImageTextDataset(rows, all_captions=True)
    templates = files.lines("zeroshot_classification_templates.txt")
    if wrong := [template for template in templates if template.count("{c}") != 1]:
        raise ValueError(
            f"Each line of {files.folder}/zeroshot_classification_templates.txt must have one {{c}} for the name of "
            f"the class, but there is {wrong[0]!r}."
        )
    return ZeroShotDataset(rows, class_names=files.lines("classnames.txt"), templates=templates)


def _rows(files: Files) -> datasets.Dataset:
    """The samples of all shards, in the cache of `datasets`, which a set with the same revision shares."""
    column, values = _COLUMNS[files.kind]
    shards = tuple(str(path) for path in files.shards())
    return _cached(_samples, column, values, shards=shards, kind=files.kind, revision=files.revision)


def _choices(files: Files) -> datasets.Dataset:
    values = datasets.List(datasets.Value("string"))
    captions = str(files.folder / files.rows[0])
    return _cached(_sugarcrepe, "caption", values, captions=captions, revision=files.revision)


def _tables(files: Files) -> datasets.Dataset:
    paths = [str(files.folder / table) for table in files.rows]
    with existing_paths_are_literal():
        rows = datasets.Dataset.from_parquet(paths, split=datasets.NamedSplit(files.name.rpartition("/")[2]))
    # Its images are structs of bytes and path, not of the type of images.
    return rows.select_columns(["image", "captions"]).cast_column("image", datasets.Image(decode=False))


def _cached(
    generate: Callable[..., Iterator[dict[str, object]]],
    column: str,
    values: datasets.List | datasets.Value,
    **options: object,
) -> datasets.Dataset:
    """The rows of a generator, in a cache that its options tell apart: hence the revision among them."""
    features = datasets.Features({"image": datasets.Image(decode=False), column: values})
    try:
        return datasets.Dataset.from_generator(
            generate, features=features, gen_kwargs=options, split=datasets.Split.TEST
        )
    except datasets.exceptions.DatasetGenerationError as error:  # its own message gives no reason
        raise ValueError(str(error.__cause__ or error)) from error


def _samples(shards: tuple[str, ...], kind: str, revision: str) -> Iterator[dict[str, object]]:
    label = _LABELS[kind]
    reader = TarReader(Columns("image", label, None, None), shards)
    for shard in shards:
        for _, key, sample in reader.samples(shard):
            if isinstance(sample, DamagedShardError):
                raise sample
            images = [sample[extension] for extension in sorted(IMAGE_EXTENSIONS & sample.keys())]
            if len(images) != 1 or label not in sample:
                raise ValueError(
                    f"Sample {key!r} of {shard} must have one image and a .{label}, but it has {sorted(sample)}."
                )
            yield {"image": {"bytes": images[0], "path": None}, **_label(kind, sample[label], f"{key!r} of {shard}")}


def _label(kind: str, content: bytes, where: str) -> dict[str, object]:
    try:
        if kind == "retrieval":
            return {"caption": content.decode("utf-8").splitlines()}
        if kind == "multilabel":
            return {"label": np.load(io.BytesIO(content), allow_pickle=False).astype(np.int64).tolist()}
        return {"label": int(content)}
    except (ValueError, MemoryError) as error:  # the second for a header that states a huge array
        raise ValueError(f"Sample {where} has a .{_LABELS[kind]} that cannot be read: {error}") from error


def _sugarcrepe(captions: str, revision: str) -> Iterator[dict[str, object]]:
    images = Path(captions).parent.parent / "val2017"
    for key, entry in json.loads(Path(captions).read_text(encoding="utf-8")).items():
        path = images / entry["filename"]
        if not path.is_file():
            raise ValueError(f"Entry {key!r} of {captions} is about {path.name}, which is not in {images}.")
        yield {
            "image": {"bytes": None, "path": str(path)},
            # SugarCrepe++ has a second right caption.
            "caption": [entry[name] for name in ("caption", "caption2", "negative_caption") if name in entry],
        }


_OF_FILES = dict.fromkeys((*SUGARCREPE, *SUGARCREPE_PP), sugarcrepe_files) | dict.fromkeys(XM3600, xm3600_files)
_OF_ROWS = dict.fromkeys((*SUGARCREPE, *SUGARCREPE_PP), _choices) | dict.fromkeys(XM3600, _tables)
