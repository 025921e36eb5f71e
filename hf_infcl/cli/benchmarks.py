"""Named benchmarks: their files from a local copy or the Hub, as evaluation sets, and their scores.

Sets are tar shards in the layout of CLIP_benchmark, files of SugarCrepe and tables of XM3600. The scores are the main
metric of each, and the means of the groups that were named. Names and groups are those of CLIP_benchmark
(https://github.com/LAION-AI/CLIP_benchmark), whose own files say nothing about metrics. These follow DataComp's list of
tasks (https://github.com/mlfoundations/datacomp, ``tasklist.yml``).
"""

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import yaml

from ..data import ImageTextDataset, ZeroShotDataset
from ..data.images import ImageDataset, find_error, with_errors
from ..data.pairs import usable_captions
from ..evaluation.metrics import METRICS, SCORES
from ..files.hub import hub_answers, hub_asked_once
from ..files.text import aligned
from ..shards.opening import existing_paths_are_literal
from ..shards.tar_tables import KEY, SHARD, tar_table

GROUPS: dict[str, tuple[str, ...]] = {}
for _group, _names in yaml.safe_load(Path(__file__).with_name("benchmarks.yaml").read_text(encoding="utf-8")).items():
    GROUPS[_group] = tuple(dict.fromkeys(one for name in _names.split() for one in GROUPS.get(name, (name,))))
_ALONE = ("imagenet-o", "vtab/dsprites_label_y_position")
OF_CLIP_BENCHMARK = tuple(dict.fromkeys((*GROUPS["vtab+"], *GROUPS["retrieval"], *GROUPS["sugarcrepe"], *_ALONE)))
BENCHMARKS = (*OF_CLIP_BENCHMARK, *GROUPS["sugarcrepe++"], *GROUPS["xm3600"])
# The benchmarks that a name means: a group, one benchmark, or one of CLIP_benchmark by the last part of its name.
_MEANT = (
    {name.rpartition("/")[2]: (name,) for name in OF_CLIP_BENCHMARK} | {name: (name,) for name in BENCHMARKS} | GROUPS
)

# The metrics whose mean is the score of a benchmark, where its kind has a different one.
MAIN_METRICS = dict.fromkeys(
    ("vtab/caltech101", "vtab/flowers", "vtab/pets", "fgvc_aircraft"), ("mean_per_class_recall",)
)


def expanded(names: Iterable[str], folder: str | None = None) -> list[str]:
    """The benchmarks of names and groups, each once.

    Args:
        names: benchmarks, also by the last part of the names of CLIP_benchmark ("cifar10"); groups; and repositories of
            the Hub in the layout of CLIP_benchmark ("djghosh/wds_cars_test").
        folder: the folder of local copies, which may hold other benchmarks than the known ones.

    Raises:
        ValueError: there is none of a name; the message has the nearest ones.
    """
    benchmarks: list[str] = []
    for name in names:
        if name in _MEANT:
            benchmarks += _MEANT[name]
        elif _is_repository(name) if folder is None else Path(folder, folder_name(name)).is_dir():
            benchmarks.append(name)
        else:
            nearest = difflib.get_close_matches(name, _MEANT, n=3, cutoff=0.5)
            known = ", ".join(OF_CLIP_BENCHMARK)
            hint = f"Did you mean {' or '.join(nearest)}?" if nearest else f"There are {known}."
            raise ValueError(
                f"There is no benchmark {name!r}. {hint} The groups are {', '.join(GROUPS)}. A set of your own is the "
                f"folder {folder_name(name)!r} in --benchmark_folder, or a repository OWNER/NAME of the Hub."
            )
    return list(dict.fromkeys(benchmarks))


def _is_repository(name: str) -> bool:
    """Whether it can be a repository of the Hub; ``vtab/...`` is none, but a family of benchmarks."""
    families = {known.partition("/")[0] for known in BENCHMARKS}
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and name.partition("/")[0] not in families


def folder_name(name: str) -> str:
    """The last part of the repository of a benchmark, and the name of the folder of a local copy."""
    return f"wds_{name.replace('/', '-')}"


def benchmark_key(name: str) -> str:
    """The name of a benchmark within its metrics: "vtab/cifar10" is measured as ``eval_vtab_cifar10_acc1``."""
    return re.sub(r"\W+", "_", name.replace("+", "_plus"))


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


# A benchmark's files, the rows in them, and what makes a set of all or some of these rows.
Opened = tuple[Files, datasets.Dataset, Callable[[datasets.Dataset], ImageTextDataset | ZeroShotDataset]]


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

    try:
        with hub_asked_once(repository):
            return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=patterns))
    except OSError as error:
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


def benchmark_sets(
    names: Sequence[str] | None,
    folder: str | None = None,
    prefix: str = "",
    select: Callable[[datasets.Dataset], datasets.Dataset] | None = None,
) -> dict[str, ImageTextDataset | ZeroShotDataset]:
    """The evaluation sets of benchmarks by the names of their metrics.

    Each has an attribute ``benchmark``, its `Files`, which name its repository and revision.

    Args:
        names: as for `expanded`.
        folder: holds local copies, each in a folder such as ``wds_vtab-cifar10``. None reads from the Hub, whose client
            keeps the files in its cache and needs no network once they are there.
        prefix: begins all keys.
        select: takes the rows to evaluate out of all; by default, all are evaluated.

    Raises:
        ValueError: a name or the files of a benchmark are not as they should be; the message names it.
    """
    evaluation_sets: dict[str, ImageTextDataset | ZeroShotDataset] = {}
    for name in expanded(names or (), folder):
        key = prefix + benchmark_key(name)
        try:
            # The names of --eval_dataset and --zero_shot_dataset are taken.
            if key in (*evaluation_sets, "pairs", "zero_shot"):
                raise ValueError(
                    f"Its metrics would have the names eval_{key}_... of another set's. Measure both by two commands."
                )
            family = name.partition("/")[0] if name in BENCHMARKS else ""
            files, rows, make = _FAMILIES.get(family, _shards)(name, folder)
            dataset = make(rows if select is None else select(rows))
        except ValueError as error:
            raise ValueError(f"The benchmark {name}: {error}") from error
        dataset.name = f"the benchmark {name} ({files.dataset} at {files.revision[:23]})"
        dataset.benchmark = files
        evaluation_sets[key] = dataset
    return evaluation_sets


# ---- Tar shards in the layout of CLIP_benchmark ----


_LABELS = {"classification": "cls", "multilabel": "npy", "retrieval": "txt"}  # the file beside an image


def _shards(name: str, folder: str | None) -> Opened:
    """The split test of a set of tar shards, beside which text files say what they hold, and name classes and prompts.

    ``dataset_type.txt`` names the kind, which is "classification" without this file.
    """
    is_known = name in BENCHMARKS
    repository = name if "/" in name and not is_known else f"clip-benchmark/{folder_name(name)}"
    local, found, revision = _copy(repository, folder, folder_name(name), ["*.txt", "test/*"])
    on_hub = is_known or folder is None
    files = Files(name, repository if on_hub else name, on_hub, local, revision)
    kind = "classification"
    if (stated := local / "dataset_type.txt") in found:
        kind = " ".join(_lines(stated)).strip().lower()
    if kind not in _LABELS:
        raise ValueError(f"{stated} says {kind!r}, which is none of {', '.join(_LABELS)}.")
    rows = _samples(local / "test", label := _LABELS[kind])
    if kind == "retrieval":
        captions = [text.splitlines() for text in rows[label]]
        rows = rows.remove_columns(label).add_column("caption", captions)
        return files, rows, partial(ImageTextDataset, all_captions=True)
    templates = _lines(local / "zeroshot_classification_templates.txt")
    if wrong := [template for template in templates if template.count("{c}") != 1]:
        raise ValueError(
            f"Each line of {local}/zeroshot_classification_templates.txt must have one {{c}}, not {wrong[0]!r}."
        )
    names = _lines(local / "classnames.txt")
    return files, rows, partial(ZeroShotDataset, label_column=label, class_names=names, templates=templates)


def _lines(file: Path) -> list[str]:
    """The lines of a text file without their outer spaces; empty ones count, as in CLIP_benchmark."""
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError as error:
        raise ValueError(f"{file.parent} has no {file.name}, which a benchmark of this kind needs.") from error


def _samples(folder: Path, label: str) -> datasets.Dataset:
    """The samples of the tar files of a split, of which ``nshards.txt`` says how many there are; the images stay there.

    Each has one image and a ``label``, the ending of a file.
    """
    stated = " ".join(_lines(folder / "nshards.txt"))
    if not (stated.isdecimal() and len(stated) <= _DIGITS and int(stated) > 0):
        raise ValueError(f"{folder}/nshards.txt must hold the number of shards, not {stated[: 2 * _DIGITS]!r}.")
    count = int(stated)  # anyone may have written it, so no list may get this long
    numbers = {int(path.stem) for path in folder.glob("*.tar") if path.stem.isdecimal()}
    present = {n: str(folder / f"{n}.tar") for n in sorted(numbers) if n < count and (folder / f"{n}.tar").is_file()}
    if len(present) < count:
        missing = itertools.islice((n for n in range(count) if n not in present), 5)
        raise ValueError(
            f"{folder} lacks {count - len(present):,} of {count:,} shards: "
            f"{', '.join(f'{n}.tar' for n in missing)}. Download the whole set again."
        )
    rows = tar_table([(file, file) for file in present.values()], "image", "test")
    images = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    if len(images) != 1 or label not in rows.column_names:
        raise ValueError(f"Each sample must have one image and a .{label}, but there are {rows.column_names}.")
    for value in rows.select_columns(with_errors(rows, [label, KEY, SHARD])):
        if error := find_error(value) or ("" if value[label] is not None else "there is none"):
            what = f"Sample {value[KEY]!r} of {value[SHARD]} has a .{label} that cannot be read: "
            raise ValueError(f"{what if value[KEY] else ''}{error}")  # without a key it is the rest of a shard
    return rows.select_columns([*images, label])


# ---- Files of other benchmarks ----


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


_SOURCES = {
    "sugarcrepe": "https://github.com/RAIVNLab/sugar-crepe",
    "sugarcrepe++": "https://huggingface.co/datasets/Aman-J/SugarCrepe_pp",
}


def _sugarcrepe(name: str, folder: str | None, *, right: int) -> Opened:
    """A subset of SugarCrepe or SugarCrepe++: its captions, the ``right`` ones first, and images of COCO's val2017.

    For "sugarcrepe/add_att", the folder holds ``sugarcrepe/data/add_att.json`` and images in ``sugarcrepe/val2017``.
    """
    family, _, subset = name.partition("/")
    local = Path(folder or "DIR", family).absolute()
    captions, images = local / f"data/{subset}.json", local / "val2017"
    if folder is None or not (captions.is_file() and images.is_dir()):
        raise ValueError(
            f"It is read from --benchmark_folder alone. Copy the folder data of {_SOURCES[family]} to "
            f"{captions.parent} and http://images.cocodataset.org/zips/val2017.zip to {images}."
        )
    rows: dict[str, list[Any]] = {"image": [], "caption": []}
    for key, entry in json.loads(captions.read_text(encoding="utf-8")).items():
        path = images / entry["filename"]
        if not path.is_file():
            raise ValueError(f"Entry {key!r} of {captions} is about {path.name}, which is not in {images}.")
        rows["image"].append(str(path))
        rows["caption"].append([entry[name] for name in ("caption", "caption2", "negative_caption") if name in entry])
    table = datasets.Dataset.from_dict(rows, split=datasets.Split.TEST)
    return Files(name, name, False, local, _content([captions])), table, partial(CaptionChoiceDataset, right=right)


def _xm3600(name: str, folder: str | None) -> Opened:
    """A language of Crossmodal-3600 (Thapliyal et al. 2022, arXiv 2205.12522), such as "xm3600/de": its tables.

    The ``folder`` holds a copy of the repository in ``xm3600``.
    """
    language = name.partition("/")[2]
    local, tables, revision = _copy(OF_XM3600, folder, "xm3600", [f"data/{language}-*.parquet"])
    with existing_paths_are_literal():
        rows = datasets.Dataset.from_parquet([*map(str, tables)], split=datasets.NamedSplit(language))
    # Its images are structs of bytes and path, not of the type of images.
    rows = rows.select_columns(["image", "captions"]).cast_column("image", datasets.Image(decode=False))
    make = partial(ImageTextDataset, caption_column="captions", all_captions=True)
    return Files(name, OF_XM3600, True, local, revision), rows, make


# The functions that open benchmarks, by the beginning of their names; `_shards` opens all others.
_FAMILIES: dict[str, Callable[[str, str | None], Opened]] = {
    "sugarcrepe": partial(_sugarcrepe, right=1),
    "sugarcrepe++": partial(_sugarcrepe, right=2),
    "xm3600": _xm3600,
}


def scores_and_means(
    metrics: Mapping[str, float], sets: Mapping[str, ImageDataset], named: Sequence[str] | None
) -> tuple[list[str], dict[str, float]]:
    """Lines with the main metric of each benchmark and the mean of each group that was named, in per cent; these means.

    The metrics are named ``eval_{key}_...`` by the keys of the sets, some of which may be no benchmarks, and the means
    ``eval_mean_{group}``.
    """
    results: dict[str, tuple[float, str]] = {}  # the score of each benchmark, and its words
    for key, dataset in sets.items():
        if dataset.benchmark is not None:
            names = MAIN_METRICS.get(dataset.benchmark.name, SCORES[getattr(dataset, "kind", "pairs")])
            words = "mean recall@1" if len(names) > 1 else METRICS[names[0]].words
            results[dataset.benchmark.name] = fmean(metrics[f"eval_{key}_{name}"] for name in names), words
    groups = [group for group in dict.fromkeys(named or ()) if group in GROUPS]
    means = {f"eval_mean_{benchmark_key(g)}": fmean(results[one][0] for one in GROUPS[g]) for g in groups}
    of_mean = "mean of the scores above that belong to it"
    of_groups = {name.removeprefix("eval_"): (value, of_mean) for name, value in means.items()}
    rows = [(name, f"{100 * value:6.2f}%", words) for name, (value, words) in (results | of_groups).items()]
    return aligned(rows), means
