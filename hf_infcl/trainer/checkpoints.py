"""Checkpoints that count only if they are complete: how they are written, chosen, removed and copied to a store.

A checkpoint is written into a folder ``_partial-checkpoint-N``. Once all processes have written and flushed their part,
a manifest of all files is added and the folder is renamed to ``checkpoint-N``. Whenever a process or a machine stops,
it leaves either a complete checkpoint or a folder from which no run ever resumes. Checksums reveal files that are
damaged later.
"""

import errno
import json
import logging
import os
import posixpath
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files.text import without_secrets
from ..files.whole import describe
from ..options.record import RECORD_NAME, RunRecord
from ..processes.collectives import Processes

MANIFEST_NAME = "infcl_manifest.json"
_PARTIAL, _REMOVED = "_partial-", "_removed-"  # Trainer does not regard names that begin with an underscore

logger = logging.getLogger(__name__)


class Checkpoint:
    """A checkpoint while it is written, after ``step`` trained optimizer steps, completely or not at all.

    `save` calls `begin`, lets the processes write its files, and calls `flush` and `complete`. Every process has to
    return from one before any process calls the next.

    Attributes:
        folder: the location of the complete checkpoint.
        partial: its location while it is written, in ``partial_dir``, which replaces ``output_dir`` meanwhile.
    """

    def __init__(self, output_dir: str | Path, step: int) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
        self.folder = Path(output_dir, name)
        self.partial_dir = Path(output_dir, _PARTIAL + name)
        self.partial = self.partial_dir / name

    def save(
        self, record: RunRecord, write: Callable[[], None], *, completes: bool, flushes: bool, ends_on_failure: bool
    ) -> bool:
        """Writes the checkpoint, with ``write`` the files of this process into `partial`; collective.

        If a process cannot write, for example because the disk is full, all processes log the error, the result is
        False, and the training continues to the next save.

        Args:
            completes: whether this process begins and completes it: one process, or one of each machine if every
                machine has its own.
            flushes: whether this process flushes what the processes of its machine have written.
            ends_on_failure: whether an error of one process ends the training, because writing is collective.
        """
        stages: list[tuple[bool, Callable[[], None]]] = [
            (completes, partial(self.begin, record)),
            (True, write),
            (flushes, self.flush),
            (completes, self.complete),
        ]
        for acts, work in stages:
            failure = ""
            try:
                if acts:
                    work()
            except (OSError, RuntimeError, SafetensorError) as error:
                if ends_on_failure:
                    raise
                failure = f"{type(error).__name__}: {error}"
            if failures := [text for text in Processes().gather_objects(failure) if text]:
                logger.error(
                    f"{self.folder} could not be written, and the training continues without it"
                    f"{_free_space(self.folder.parent)}. {' '.join(failures)}"
                )
                if completes:
                    _remove(self.partial_dir)
                return False
        return True

    def begin(self, record: RunRecord) -> None:
        """Creates the folder to write into, with the record, and removes incomplete folders of earlier saves."""
        for prefix in (_PARTIAL, _REMOVED):
            for left in self.folder.parent.glob(f"{prefix}{PREFIX_CHECKPOINT_DIR}-*"):
                logger.warning(f"{left} was left by an interrupted save and is removed.")
                _remove(left)
        self.partial.mkdir(parents=True)
        record.write(self.partial)

    def flush(self) -> None:
        """Flushes all written files to the disk, so that they survive a power failure."""
        _flush(*self.partial_dir.rglob("*"), self.partial_dir)

    def complete(self) -> None:
        """Adds the manifest and gives the checkpoint its final name, replacing an older checkpoint of that name."""
        files = [path for path in sorted(self.partial.rglob("*")) if path.is_file()]
        described = _described(self.partial, [str(path.relative_to(self.partial)) for path in files])
        manifest = self.partial / MANIFEST_NAME
        # The newest of all, also where the clock was set back, or that of the machine before was fast.
        written = max([time.time_ns(), *(_written(folder) + 1 for folder in _folders(self.folder.parent))])
        manifest.write_text(json.dumps({"written": written, "files": described}, indent=2), encoding="utf-8")
        _flush(manifest, self.partial)
        _put_in_place(self.partial, self.folder)
        _remove(self.partial_dir)


def _described(folder: Path, names: Collection[str]) -> dict[str, dict[str, int]]:
    """The sizes and the checksums of files in a folder."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(describe, [folder / name for name in names]), strict=True))


def _put_in_place(partial: Path, folder: Path) -> None:
    """Gives a complete checkpoint its final name, replacing an older checkpoint of that name."""
    replaced = folder.with_name(_REMOVED + folder.name)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    _flush(folder.parent)
    _remove(replaced)


def _remove(path: Path) -> None:
    """Removes a folder, or a file or a link in its place, as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # it was a folder
        path.unlink()


def _flush(*paths: Path) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:  # some file systems cannot flush folders
            if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)


def damage(checkpoint: str | Path, *, checksums: bool = True) -> str | None:
    """A sentence that names the file of a checkpoint that is damaged, missing or unreadable, or None if none is.

    Without ``checksums``, for which all files are read, only presence and sizes are checked.
    """
    manifest = Path(checkpoint, MANIFEST_NAME)
    try:
        if not manifest.is_file():
            return f"{manifest} is missing: the checkpoint is incomplete, or was written by another trainer."
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        for name, described in files.items():
            path = Path(checkpoint, name)
            if not path.is_file():
                return f"{path} is missing."
            if (size := path.stat().st_size) != described["bytes"]:
                return f"{path} has {size} bytes, but had {described['bytes']} when it was written."
        if checksums:
            for name, now in _described(Path(checkpoint), files).items():
                if now != files[name]:
                    return f"{Path(checkpoint, name)} has changed since it was written: its checksum differs."
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{manifest} is damaged ({error})."
    except OSError as error:
        return f"{checkpoint} cannot be read: {error}."
    try:
        RunRecord.read(checkpoint)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def obstacle(checkpoint: str | Path) -> str | None:
    """A sentence that says why no run can resume from a checkpoint, or None: it is damaged, or only a model."""
    if (reason := damage(checkpoint)) is not None:
        return reason
    record = RunRecord.read(checkpoint)
    if record is not None and record.only_model:
        return f"{checkpoint} was saved with save_only_model, without the optimizer state that resuming needs."
    return None


def _folders(output_dir: str | Path) -> list[Path]:
    """The folders named as checkpoints, the last written first; those without a manifest come last."""
    paths = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    steps = {f: int(f.name.rpartition("-")[2]) for f in paths if f.is_dir() and f.name.rpartition("-")[2].isdecimal()}
    return sorted(steps, key=lambda folder: (_written(folder), steps[folder]), reverse=True)


def _written(folder: Path) -> int:
    """The time in nanoseconds at which a checkpoint was written, later than that of all before it; 0 if unknown."""
    try:
        return int(json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))["written"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def rotate(output_dir: str | Path, limit: int | None, keep: Collection[Path]) -> None:
    """Removes all complete checkpoints except the ``limit`` newest ones and those to ``keep``.

    Folders that are not complete checkpoints, or cannot be read, are neither counted nor removed.
    """
    if limit is None or limit <= 0:
        return
    complete = [folder for folder in _folders(output_dir) if damage(folder, checksums=False) is None]
    removable = [folder for folder in complete if folder not in keep]
    kept = len(complete) - len(removable)
    for folder in removable[max(0, limit - kept) :]:
        logger.info(f"{folder} is removed: save_total_limit is {limit}.")
        # Under another name, a folder that a kill leaves half removed is removed at the next save.
        removed = folder.with_name(_REMOVED + folder.name)
        with suppress(OSError):
            folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def choose(output_dir: str, wanted: str | bool | None, *, looks: bool = True) -> str | None:
    """The checkpoint to resume from, the same on all processes; collective.

    Args:
        wanted: the folder of an undamaged checkpoint; True for the newest complete one; ``"auto"`` for the newest
            complete one, or a new start if there is no checkpoint yet; None or False to start anew.
        looks: whether this process looks for damage, as the main one does. If every machine has its own checkpoints,
            one process of each machine must look, and a checkpoint has to be complete on every one.

    Returns:
        Its folder, or None to start anew.

    Raises:
        ValueError: on every process, if the checkpoint is damaged or there is none.
    """
    if not wanted:
        return None
    processes = Processes()
    is_main = processes.rank == 0

    def problem_on_any(find: Callable[[str], str | None], folder: str) -> str:
        problem = "" if looks or Path(folder).is_dir() else f"Rank {processes.rank} finds no folder {folder}."
        try:
            problem = (looks and find(folder)) or problem
        except (OSError, ValueError) as error:  # raised here, it would end this process while the others wait
            problem = f"{folder} cannot be read: {error}"
        return next(filter(None, processes.gather_objects(problem)), "")

    if isinstance(wanted, str) and wanted != "auto":
        if problem := problem_on_any(_not_resumable, wanted):
            raise ValueError(problem)
        return wanted
    skipped = []
    names = [str(folder) for folder in _folders(output_dir)] if is_main else []
    for folder in processes.gather_objects(names)[0]:
        if not (reason := problem_on_any(obstacle, folder)):
            return folder
        skipped.append(reason)
        if is_main:
            logger.warning(f"A checkpoint is skipped: {reason}")
    if skipped:
        raise ValueError(
            f"No checkpoint in {output_dir} is complete: {' '.join(skipped)} Remove them or begin from --model {folder}"
        )
    if wanted != "auto":
        raise ValueError(f"{output_dir} has no checkpoint to resume from.")
    return None


def _not_resumable(checkpoint: str) -> str | None:
    """A sentence that says why a run cannot resume from the named checkpoint, or None."""
    if not Path(checkpoint).is_dir():
        return f"There is no checkpoint {checkpoint}."
    if not (Path(checkpoint, MANIFEST_NAME).exists() or Path(checkpoint, RECORD_NAME).exists()):
        if Path(checkpoint, TRAINER_STATE_NAME).is_file():
            if any(Path(checkpoint).glob("optimizer*")):  # as Trainer and FSDP (in shards) name its files
                return None  # another trainer's, which `Resumption.check` refuses
            inside = ", ".join(folder.name for folder in _folders(checkpoint)) or "none here"
            return (
                f"{checkpoint} holds a model and the log of its training, but no optimizer, so it is no checkpoint. "
                f"Name one of its checkpoints ({inside}), or start a new run from its model."
            )
        return (
            f"{checkpoint} is not the checkpoint of a training: it has no {TRAINER_STATE_NAME}. Name a folder "
            f"{PREFIX_CHECKPOINT_DIR}-N, or start a new run from this model."
        )
    reason = obstacle(checkpoint)
    return reason and f"The checkpoint cannot be resumed from: {reason} Name another one, or leave it out."


# ---- Copies in an object store ----


def cause(error: BaseException) -> str:
    """The error in one line, as a part of a sentence, without the signatures of the URLs that the Hub hands out."""
    return f"{type(error).__name__}: {' '.join(without_secrets(str(error)).split())}".rstrip(".")


class CheckpointStore:
    """Copies of complete checkpoints at a URL of fsspec, such as s3://bucket/run, made in the background.

    A copy counts if it has the manifest, which is written last and removed first. While a checkpoint is copied, only
    the newest one waits. An error is logged, and the next checkpoint is copied again.

    Attributes:
        jobs: the copies that run or wait, with their checkpoints, and those that have ended since the last `copy`.
    """

    def __init__(self, url: str) -> None:
        if without_secrets(url) != url:
            raise ValueError("checkpoint_store would store a key beside the model. Set the protocol's own variables.")
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"checkpoint_store={url} cannot be opened: {error}") from error
        self._root, self._thread = root.rstrip("/"), ThreadPoolExecutor(1)
        self.jobs: dict[Future[Any], Path] = {}

    def copy(self, folder: Path, *, limited: bool) -> None:
        """Begins to copy a checkpoint; with ``limited``, those that are no longer beside it are then removed."""
        self.jobs = {job: copied for job, copied in self.jobs.items() if not (job.cancel() or job.done())}
        self.jobs[self._thread.submit(self._copy, folder, limited)] = folder

    def _copy(self, folder: Path, limited: bool) -> None:
        try:
            self._remove(folder.name)  # of an earlier run
            paths = [path for path in folder.rglob("*") if path.is_file()]
            for path in sorted(paths, key=lambda path: path.name == MANIFEST_NAME):
                place = f"{self._root}/{path.relative_to(folder.parent).as_posix()}"
                self._files.makedirs(posixpath.dirname(place), exist_ok=True)
                self._files.put_file(str(path), place)
            for name in set(self._written()) - {other.name for other in _folders(folder.parent)} if limited else ():
                self._remove(name)
        except Exception as error:  # libraries of protocols raise exceptions of any class
            logger.error(f"{folder} could not be copied to {self._root}: {cause(error)}.")

    def _remove(self, name: str) -> None:
        for place in (f"{self._root}/{name}/{MANIFEST_NAME}", f"{self._root}/{name}"):
            if self._files.exists(place):
                self._files.rm(place, recursive=True)

    def _written(self) -> dict[str, int]:
        """When the complete checkpoints were written, by their names."""
        found = self._files.glob(f"{self._root}/{PREFIX_CHECKPOINT_DIR}-*/{MANIFEST_NAME}")
        return {place.split("/")[-2]: json.loads(self._files.cat_file(place))["written"] for place in found}

    def fetch(self, output_dir: Path) -> None:
        """Fetches the newest checkpoint, unless the folder has it or a newer one, and the best that it names."""
        self._files.invalidate_cache()
        written = self._written()
        newest = max(written, key=written.__getitem__, default="")
        if written.get(newest, 0) <= max(map(_written, _folders(output_dir)), default=0):
            return
        state = json.loads(self._files.cat_file(f"{self._root}/{newest}/{TRAINER_STATE_NAME}"))
        best = Path(state["best_model_checkpoint"] or newest).name
        for name in dict.fromkeys([best, newest]) if best in written else [newest]:
            partial = output_dir / f"{_PARTIAL}{name}"
            _remove(partial)
            partial.mkdir(parents=True)
            self._files.get(f"{self._root}/{name}/", f"{partial}/", recursive=True)
            _put_in_place(partial, output_dir / name)


# ---- A full disk ----


# The words of the operating system, and what numpy, PIL and torch say instead.
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
_FULL += (" requested and ", "encoder error", "PytorchStreamWriter", "inline_container", "iostream error")
GOES_ON = "with --resume_from_checkpoint auto, which continues from the last checkpoint and writes the results"


def _is_full(error: BaseException | None) -> bool:
    """Whether a disk, the user's share of it or a file may not grow, by the text of an error or of its cause."""
    return error is not None and (any(words in str(error) for words in _FULL) or _is_full(error.__cause__))


def _times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*") if path.is_file()}


@contextmanager
def full_disk_explained(folder: Path, again: str = GOES_ON, *, keeps: bool = False) -> Iterator[None]:
    """Removes what was written into a folder if not all could be, and says what to do.

    Args:
        again: how the same command is run again.
        keeps: keep the files that were written whole; see `written_whole`.

    Raises a ValueError if the disk is full, or the user's share of it, or files may not be so large.
    """
    is_new, before = not folder.exists(), _times(folder)
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not _is_full(error):
            raise
        for path, time in _times(folder).items():
            if before.get(path) != time and (not keeps or path.name.startswith(f"_{os.getpid()}.")):
                path.unlink()
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        cure = "Allow larger files" if os.strerror(errno.EFBIG) in str(error) else "Free some space"
        raise ValueError(
            f"The results could not be written into {folder}{_free_space(folder)}: {error}. {cure}, and run the same "
            f"command {'again' if again == GOES_ON and not _folders(folder) else again}."
        ) from error


def _free_space(folder: Path) -> str:
    """The free space of a folder in parentheses; empty if unknown, for example on a rank without that folder."""
    with suppress(OSError):
        return f" ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there)"
    return ""
