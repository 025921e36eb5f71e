"""The files of a benchmark, from a local copy or from the Hub, and the version that they are of."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...hub import hub_answers, hub_asked_once
from .names import BENCHMARKS, folder_name

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
    on_hub = name in BENCHMARKS
    repository = name if "/" in name and not on_hub else f"{OWNER}/{folder_name(name)}"
    if folder is not None:
        local = Path(folder, folder_name(name)).resolve()
        if not local.is_dir():
            raise ValueError(
                f"{folder} has no folder {local.name}. Fill it with `hf download {repository} --repo-type dataset "
                f"--local-dir {Path(folder, local.name)}`, or omit --benchmark_folder to read it from the Hub."
            )
        files = [*local.glob("*.txt"), *local.glob("test/*")]
        return Files(name, repository if on_hub else name, on_hub, local, _content(files))
    snapshot = _snapshot(repository, ["*.txt", "test/*"])
    return Files(name, repository, True, snapshot, snapshot.name)


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
    for path in sorted(files):
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
            f"It is read from a local copy alone. Copy the folder data of {_SOURCES[family]} to {local / 'data'} and "
            f"the images of http://images.cocodataset.org/zips/val2017.zip to {local / 'val2017'}, and pass "
            "--benchmark_folder."
        )
    return Files(name, name, False, local, _content([local / captions]), (captions,))


def xm3600_files(name: str, folder: str | None) -> Files:
    """The tables of a language of Crossmodal-3600 (Thapliyal et al. 2022, arXiv 2205.12522), such as "xm3600/de".

    The ``folder`` holds a copy of the repository in ``xm3600``. None reads from the Hub.
    """
    tables = f"data/{name.partition('/')[2]}-*.parquet"
    local = Path(folder, "xm3600").resolve() if folder is not None else _snapshot(OF_XM3600, [tables])
    rows = sorted(local.glob(tables))
    if not rows:
        raise ValueError(
            f"{local} has no {tables}. Fill it with `hf download {OF_XM3600} --repo-type dataset --local-dir {local}`, "
            "or omit --benchmark_folder to read it from the Hub."
        )
    revision = local.name if folder is None else _content(rows)
    return Files(name, OF_XM3600, True, local, revision, tuple(str(path.relative_to(local)) for path in rows))
