"""Named benchmarks: their files from a local copy or the Hub, as evaluation sets, and their scores.

Sets are tar shards in the layout of CLIP_benchmark, files of SugarCrepe and tables of XM3600. The scores are the main
metric of each, and the means of the groups that were named."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from ..data import ImageTextDataset, ZeroShotDataset
from ..data.images import ImageDataset, find_error, with_errors
from ..data.pairs import usable_captions
from ..evaluation.metrics import METRICS, SCORES
from ..files.hub import hub_answers, hub_asked_once
from ..files.text import aligned
from ..shards.opening import existing_paths_are_literal
from ..shards.tar_tables import KEY, SHARD, tar_table
from . import benchmark_names as known
from .benchmark_names import benchmark_key, expanded, folder_name

OWNER = "clip-benchmark"
_DIGITS = 18  # of a number in a file that anyone may have written
OF_XM3600 = "floschne/xm3600"


@dataclass(frozen=True)
class Files:
    """The files of a benchmark on this machine."""

    name: str  # of the benchmark
    dataset: str  # its Hub repository, or its name if it is in none
    on_hub: bool  # whether ``dataset`` is a repository
    folder: Path
    revision: str  # the commit of the repository, or a hash of what a local copy contains
    # The files of the rows, relative to ``folder``, if they are not shards: the captions of a subset of SugarCrepe or
    # SugarCrepe++, the tables of a language of XM3600.
    rows: tuple[str, ...] = ()

    def lines(self, file: str) -> list[str]:
        """The lines of a text file without their outer spaces; empty ones count, as in CLIP_benchmark."""
        try:
            return [line.strip() for line in (self.folder / file).read_text(encoding="utf-8").splitlines()]
        except FileNotFoundError as error:
            raise ValueError(f"{self.folder} has no {file}, which a benchmark of this kind needs.") from error

    @property
    def kind(self) -> str:
        """The content of ``dataset_type.txt``, or "classification" without this file."""
        if not (self.folder / "dataset_type.txt").is_file():
            return "classification"
        kind = " ".join(self.lines("dataset_type.txt")).strip().lower()
        if kind not in ("classification", "multilabel", "retrieval"):
            raise ValueError(
                f"{self.folder}/dataset_type.txt says {kind!r}, which is none of classification, multilabel, retrieval."
            )
        return kind

    def shards(self) -> list[Path]:
        """The tar files of the split test, of which ``test/nshards.txt`` says how many there are."""
        stated = " ".join(self.lines("test/nshards.txt"))
        if not (stated.isdecimal() and len(stated) <= _DIGITS and int(stated) > 0):
            raise ValueError(
                f"{self.folder}/test/nshards.txt must hold the number of shards, not {stated[: 2 * _DIGITS]!r}."
            )
        count = int(stated)  # anyone may have written it, so no list may get this long
        numbers = {int(path.stem) for path in self.folder.glob("test/*.tar") if path.stem.isdecimal()}
        present = [n for n in sorted(numbers) if n < count and (self.folder / f"test/{n}.tar").is_file()]
        if len(present) < count:
            missing = itertools.islice((n for n in range(count) if n not in numbers), 5)
            raise ValueError(
                f"{self.folder}/test lacks {count - len(present):,} of {count:,} shards: "
                f"{', '.join(f'{n}.tar' for n in missing)}. Download the whole set again."
            )
        return [self.folder / f"test/{n}.tar" for n in present]


def benchmark_files(name: str, folder: str | None) -> Files:
    """The files of a benchmark.

    The ``folder`` holds local copies, each in a folder such as ``wds_vtab-cifar10``. None reads from the Hub, whose
    client keeps the files in its cache and needs no network once they are there.
    """
    is_known = name in known.BENCHMARKS
    repository = name if "/" in name and not is_known else f"{OWNER}/{folder_name(name)}"
    local, _, revision = _copy(repository, folder, folder_name(name), ["*.txt", "test/*"])
    on_hub = is_known or folder is None
    return Files(name, repository if on_hub else name, on_hub, local, revision)


def _copy(repository: str, folder: str | None, name: str, patterns: list[str]) -> tuple[Path, list[Path], str]:
    """Where the files of a repository are, in a folder of copies or in the cache; these files; and their revision."""
    local = _snapshot(repository, patterns) if folder is None else Path(folder, name).resolve()
    files = sorted(path for pattern in patterns for path in local.glob(pattern))
    if not files:
        raise ValueError(
            f"{local} has no {' or '.join(patterns)}. Fill it with `hf download {repository} --repo-type dataset "
            f"--local-dir {local}`, or omit --benchmark_folder to read it from the Hub."
        )
    return local, files, local.name if folder is None else _content(files)


def _snapshot(repository: str, patterns: list[str]) -> Path:
    """The folder, named after the commit, in the cache of the Hub's client."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        with hub_asked_once(repository):
            return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = f"could not be downloaded from the Hub: {type(error).__name__}: {str(error).splitlines()[0]}"
        if not hub_answers():
            why = "was not downloaded before, and the Hub could not be reached."
        raise ValueError(
            f"{repository} {why} Without a network, copy the set to a folder and name that with --benchmark_folder."
        ) from error


def _content(files: Iterable[Path]) -> str:
    """A hash of the names and contents of files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()[:16]}"


_SOURCES = {
    "sugarcrepe": "https://github.com/RAIVNLab/sugar-crepe",
    "sugarcrepe++": "https://huggingface.co/datasets/Aman-J/SugarCrepe_pp",
}


def sugarcrepe_files(name: str, folder: str | None) -> Files:
    """The files of a subset of SugarCrepe or SugarCrepe++: its captions, and the images of COCO's val2017.

    For "sugarcrepe/add_att", the folder holds ``sugarcrepe/data/add_att.json`` and images in ``sugarcrepe/val2017``.
    """
    family, _, subset = name.partition("/")
    local = Path(folder or "DIR", family).absolute()
    captions = f"data/{subset}.json"
    if folder is None or not ((local / captions).is_file() and (local / "val2017").is_dir()):
        raise ValueError(
            f"It is read from --benchmark_folder alone. Copy the folder data of {_SOURCES[family]} to "
            f"{local / 'data'} and http://images.cocodataset.org/zips/val2017.zip to {local / 'val2017'}."
        )
    return Files(name, name, False, local, _content([local / captions]), (captions,))


def xm3600_files(name: str, folder: str | None) -> Files:
    """The tables of a language of Crossmodal-3600 (Thapliyal et al. 2022, arXiv 2205.12522), such as "xm3600/de".

    The ``folder`` holds a copy of the repository in ``xm3600``. None reads from the Hub.
    """
    tables = f"data/{name.partition('/')[2]}-*.parquet"
    local, rows, revision = _copy(OF_XM3600, folder, "xm3600", [tables])
    return Files(name, OF_XM3600, True, local, revision, tuple(str(path.relative_to(local)) for path in rows))


_OTHER_SETS = ("pairs", "zero_shot")  # the keys of --eval_dataset and --zero_shot_dataset
_LABELS = {"classification": "cls", "multilabel": "npy", "retrieval": "txt"}  # the file beside an image


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
            family = name.partition("/")[0] if name in known.BENCHMARKS else ""
            find, read, make = _FAMILIES.get(family, (benchmark_files, _rows, None))
            rows = read(files := find(name, folder))
            rows = rows if select is None else select(rows)
            dataset = _make_set(files, rows) if make is None else make(rows)
        except ValueError as error:
            raise ValueError(f"The benchmark {name}: {error}") from error
        dataset.name = f"the benchmark {name} ({files.dataset} at {files.revision[:23]})"
        dataset.benchmark = files
        evaluation_sets[key] = dataset
    return evaluation_sets


def _make_set(files: Files, rows: datasets.Dataset) -> ImageTextDataset | ZeroShotDataset:
    if files.kind == "retrieval":
        return ImageTextDataset(rows, all_captions=True)
    templates = files.lines("zeroshot_classification_templates.txt")
    if wrong := [template for template in templates if template.count("{c}") != 1]:
        raise ValueError(
            f"Each line of {files.folder}/zeroshot_classification_templates.txt must have one {{c}}, not {wrong[0]!r}."
        )
    names = files.lines("classnames.txt")
    return ZeroShotDataset(rows, label_column=_LABELS[files.kind], class_names=names, templates=templates)


def _rows(files: Files) -> datasets.Dataset:
    """The samples of all shards, whose images stay there."""
    rows, label = tar_table([(str(path), str(path)) for path in files.shards()], "image", "test"), _LABELS[files.kind]
    images = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    if len(images) != 1 or label not in rows.column_names:
        raise ValueError(f"Each sample must have one image and a .{label}, but there are {rows.column_names}.")
    for value in rows.select_columns(with_errors(rows, [label, KEY, SHARD])):
        if error := find_error(value) or ("" if value[label] is not None else "there is none"):
            what = f"Sample {value[KEY]!r} of {value[SHARD]} has a .{label} that cannot be read: "
            raise ValueError(f"{what if value[KEY] else ''}{error}")  # without a key it is the rest of a shard
    if files.kind == "retrieval":
        captions = [text.splitlines() for text in rows[label]]
        return rows.select_columns(images).add_column("caption", captions)
    return rows.select_columns([*images, label])


def _choices(files: Files) -> datasets.Dataset:
    """The entries of a subset, whose right captions come first; SugarCrepe++ has two."""
    captions, images = files.folder / files.rows[0], files.folder / "val2017"
    rows: dict[str, list[Any]] = {"image": [], "caption": []}
    for key, entry in json.loads(captions.read_text(encoding="utf-8")).items():
        path = images / entry["filename"]
        if not path.is_file():
            raise ValueError(f"Entry {key!r} of {captions} is about {path.name}, which is not in {images}.")
        rows["image"].append(str(path))
        rows["caption"].append([entry[name] for name in ("caption", "caption2", "negative_caption") if name in entry])
    return datasets.Dataset.from_dict(rows, split=datasets.Split.TEST)


def _tables(files: Files) -> datasets.Dataset:
    paths = [str(files.folder / table) for table in files.rows]
    with existing_paths_are_literal():
        rows = datasets.Dataset.from_parquet(paths, split=datasets.NamedSplit(files.name.rpartition("/")[2]))
    # Its images are structs of bytes and path, not of the type of images.
    return rows.select_columns(["image", "captions"]).cast_column("image", datasets.Image(decode=False))


# By the beginnings of their names: what finds the files, what reads their rows, and what makes a set of these.
_FAMILIES: dict[str, tuple[Callable[[str, str | None], Files], Callable[[Files], datasets.Dataset], Callable[..., Any]]]
_FAMILIES = {
    "sugarcrepe": (sugarcrepe_files, _choices, CaptionChoiceDataset),
    "sugarcrepe++": (sugarcrepe_files, _choices, partial(CaptionChoiceDataset, right=2)),
    "xm3600": (xm3600_files, _tables, partial(ImageTextDataset, caption_column="captions", all_captions=True)),
}


def scores(metrics: Mapping[str, float], sets: Mapping[str, ImageDataset]) -> dict[str, tuple[str, float]]:
    """(main metric, its value) of each benchmark by its name.

    The metrics are named ``eval_{key}_...`` by the keys of the sets, some of which may be no benchmarks.
    """
    results = {}
    for key, dataset in sets.items():
        if (files := getattr(dataset, "benchmark", None)) is not None:
            names = known.MAIN_METRICS.get(files.name, SCORES[getattr(dataset, "kind", "pairs")])
            values = [metrics[f"eval_{key}_{name}"] for name in names]
            words = "mean recall@1" if len(names) > 1 else METRICS[names[0]].words
            results[files.name] = words, sum(values) / len(values)
    return results


def means_of_groups(
    metrics: Mapping[str, float], sets: Mapping[str, ImageDataset], named: Sequence[str] | None
) -> dict[str, float]:
    """``eval_mean_{group}``: the mean score of each group that was named."""
    values = {name: value for name, (_, value) in scores(metrics, sets).items()}
    groups = [name for name in dict.fromkeys(named or ()) if name in known.GROUPS]
    means = {name: [values[one] for one in known.GROUPS[name]] for name in groups}
    return {f"eval_mean_{benchmark_key(name)}": sum(of_group) / len(of_group) for name, of_group in means.items()}


def lines_of_scores(
    metrics: Mapping[str, float], sets: Mapping[str, ImageDataset], means: Mapping[str, float]
) -> Iterator[str]:
    """Lines with the main metric of each benchmark and the means of `means_of_groups`, in per cent."""
    results = scores(metrics, sets)
    of_groups = {name.removeprefix("eval_"): value for name, value in means.items()}
    rows = [(name, f"{100 * value:6.2f}%", words) for name, (words, value) in results.items()]
    of_mean = "mean of the scores above that belong to it"
    yield from aligned([*rows, *((name, f"{100 * value:6.2f}%", of_mean) for name, value in of_groups.items())])
