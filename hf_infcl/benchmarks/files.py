"""The files of a benchmark, from a local copy or from the Hub, and the version that they are of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from .names import BENCHMARKS, folder_name

OWNER = "clip-benchmark"


@dataclass(frozen=True)
class Files:
    """The files of a benchmark on this machine.

    Attributes:
        name: the name of the benchmark.
        dataset: its Hub repository, or its name if it is in none.
        on_hub: whether ``dataset`` is a repository.
        folder: where the files are.
        revision: the commit of the repository, or a hash of what a local copy contains.
        captions: the file of the captions, for a subset of SugarCrepe.
    """

    name: str
    dataset: str
    on_hub: bool
    folder: Path
    revision: str
    captions: str = ""

    def lines(self, file: str) -> list[str]:
        """The lines of a text file without their outer spaces; empty ones count, as in CLIP_benchmark.

        Raises:
            ValueError: there is no such file.
        """
        try:
            return [line.strip() for line in (self.folder / file).read_text(encoding="utf-8").splitlines()]
        except FileNotFoundError as error:
            raise ValueError(f"{self.folder} has no {file}, which a benchmark of this kind needs.") from error

    @property
    def kind(self) -> str:
        """The content of ``dataset_type.txt``, or "classification" without this file.

        Raises:
            ValueError: it is of no known kind.
        """
        kind = "classification"
        if (self.folder / "dataset_type.txt").is_file():
            kind = " ".join(self.lines("dataset_type.txt")).strip().lower()
        if kind not in ("classification", "multilabel", "retrieval"):
            raise ValueError(
                f"{self.folder}/dataset_type.txt says {kind!r}, which is none of classification, multilabel, retrieval."
            )
        return kind

    def shards(self) -> list[Path]:
        """The tar files of the split test, of which ``test/nshards.txt`` says how many there are.

        Raises:
            ValueError: there is no such number, or a shard is missing.
        """
        stated = " ".join(self.lines("test/nshards.txt"))
        if not stated.isdecimal() or int(stated) < 1:
            raise ValueError(f"{self.folder}/test/nshards.txt must hold the number of shards, not {stated!r}.")
        shards = [self.folder / f"test/{number}.tar" for number in range(int(stated))]
        if missing := [path.name for path in shards if not path.is_file()]:
            raise ValueError(
                f"{self.folder}/test lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:5])}. Download "
                "the whole set again."
            )
        return shards


def files_of(name: str, folder: str | None) -> Files:
    """The files of a benchmark.

    Args:
        name: the name of the benchmark.
        folder: holds local copies, each in a folder such as ``wds_vtab-cifar10``. None reads from the Hub, whose
            client keeps the files in its cache and needs no network once they are there.

    Raises:
        ValueError: the folder has no copy, or the Hub returns none.
    """
    repository = f"{OWNER}/{folder_name(name)}"
    on_hub = name in BENCHMARKS
    if folder is not None:
        local = Path(folder, folder_name(name)).resolve()
        if not local.is_dir():
            raise ValueError(
                f"{folder} has no folder {local.name}. Fill it with `hf download {repository} --repo-type dataset "
                f"--local-dir {Path(folder, local.name)}`, or omit --benchmark_folder to read it from the Hub."
            )
        return Files(name, repository if on_hub else name, on_hub, local, _content(local))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(repository, repo_type="dataset", allow_patterns=["*.txt", "test/*"])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{repository} could not be downloaded from the Hub: {type(error).__name__}: {str(error).splitlines()[0]} "
            "Without a network, copy the set to a folder and name that with --benchmark_folder."
        ) from error
    return Files(name, repository, True, Path(snapshot), Path(snapshot).name)


def _content(folder: Path) -> str:
    """A hash of the text files and of the names and contents of the shards."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.txt"), *folder.glob("test/*")]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()[:16]}"


def sugarcrepe_files(name: str, folder: str | None) -> Files:
    """The files of a subset of SugarCrepe: its captions, and the images of COCO's val2017.

    Args:
        name: the name of the subset, such as "sugarcrepe/add_att".
        folder: holds ``sugarcrepe/data/add_att.json`` and the images in ``sugarcrepe/val2017``.

    Raises:
        ValueError: one of them is missing.
    """
    place = Path(folder or "DIR", "sugarcrepe").absolute()
    captions = f"data/{name.rpartition('/')[2]}.json"
    if folder is None or not ((place / captions).is_file() and (place / "val2017").is_dir()):
        raise ValueError(
            "SugarCrepe is read from a local copy alone. Copy the folder data of "
            f"https://github.com/RAIVNLab/sugar-crepe to {place / 'data'} and the images of "
            f"http://images.cocodataset.org/zips/val2017.zip to {place / 'val2017'}, and pass --benchmark_folder."
        )
    content = hashlib.sha256((place / captions).read_bytes()).hexdigest()[:16]
    return Files(name, name, False, place, f"sha256:{content}", captions)
