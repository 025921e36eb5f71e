"""Pushes to the Hub: they are repeated if they fail, and runs resume from what they have pushed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import ProcessorMixin
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import logging

from ..conversion import folders
from ..options.arguments import InfCLTrainingArguments
from ..processes.collectives import Processes
from ..shards.urls import without_secrets

LAST_CHECKPOINT = "last-checkpoint"  # where hub_strategy="checkpoint" puts the newest checkpoint
NOT_PUSHED = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*")  # of an output_dir
SNAPSHOT = "_push-"  # the prefix of the snapshots of output_dir, which lie in it
# The files of the model in a checkpoint, in any of save_formats.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    folders.CONFIG,
    "*.safetensors",
    "*.safetensors.index.json",
)

logger = logging.get_logger(__name__)


class Pushes:
    """The pushes of a run from its main process: which checkpoints have arrived, and which are pushed again.

    They run in the background, one after the other. Files must not change while they are uploaded. Trainer uploads
    ``output_dir`` itself, and meanwhile copies the next model into it. Here a snapshot of ``output_dir`` is uploaded.

    Trainer itself does not report a push that fails during the training, and never pushes a checkpoint that is saved
    while an earlier push is running. Both are pushed at the next save, and at the latest with the final push, which
    raises an error if it fails.
    """

    def __init__(self, args: InfCLTrainingArguments) -> None:
        self._args = args
        self._hub = HfApi()  # runs its jobs in the background one after the other
        # For each folder of the repository that holds a checkpoint: the checkpoint that belongs there, and its upload.
        self._checkpoints: dict[str, tuple[Path, Future[None] | None]] = {}
        # All pushes that were started. Where one reads a checkpoint, the checkpoint must stay until it has ended.
        self._pushes: dict[Future[None], Path | None] = {}

    def push_checkpoint(
        self,
        checkpoint: Path,
        step: int,
        repository: str | None,
        processor: Any,
        tell: Callable[[], None],
        save: Callable[[], None] | None = None,
    ) -> None:
        """Pushes the model in the background, and the checkpoint if ``hub_strategy`` asks for checkpoints.

        While earlier pushes wait or run, none is started, except with ``hub_always_push``.

        Args:
            repository: its id; None on other processes than the main one.
            processor: the processor that is pushed with the model, or None.
            save: saves the model in ``output_dir``, if the checkpoint has no whole model; collective.
        """
        if self._args.hub_strategy == HubStrategy.END:
            return
        starts = self._args.hub_always_push or not self._unfinished()
        if save is not None:
            starts = bool(Processes().agree([starts])[0][0])  # only the main process knows
            if starts:
                save()
        if self._args.process_index > 0:
            return
        assert repository is not None
        names = {HubStrategy.CHECKPOINT: LAST_CHECKPOINT, HubStrategy.ALL_CHECKPOINTS: checkpoint.name}
        name = names.get(HubStrategy(self._args.hub_strategy))
        if name is not None:
            self._checkpoints[name] = checkpoint, None
        if not starts:
            return
        try:
            tell()
            snapshot = self._snapshot(checkpoint, processor)
        except Exception as error:  # a full disk is reported differently by files, torch.save and tokenizers
            logger.error(f"The push of step {step} could not start: {cause(error)}.")
            return
        message = f"Training in progress, step {step}"
        self._start(step, repository, partial(self._push_snapshot, repository, snapshot, message))
        for place, folder in self._not_on_hub().items():
            if folder.is_dir():
                summary = f"{message}, checkpoint" if folder == checkpoint else f"{folder.name}, pushed again"
                push = partial(self._push_folder, repository, folder, summary, place=place)
                self._checkpoints[place] = folder, self._start(step, repository, push, stays=folder)

    def _snapshot(self, checkpoint: Path, processor: ProcessorMixin | None) -> Path:
        """Copies the model of a checkpoint into ``output_dir``, and what is pushed of ``output_dir`` into a folder."""
        output_dir = Path(str(self._args.output_dir))
        if not self._pushes:  # snapshots here are left from a run that was killed
            for left in output_dir.glob(f"{SNAPSHOT}*"):
                shutil.rmtree(left, ignore_errors=True)
        models = {path.name: path for path in checkpoint.iterdir() if _matches(path.name, MODEL_FILES)}
        for path in models.values():
            shutil.copy(path, output_dir)
        if processor is not None:
            processor.save_pretrained(output_dir)
        torch.save(self._args, output_dir / TRAINING_ARGS_NAME)
        files = list(_pushed_files(output_dir))
        snapshot = Path(tempfile.mkdtemp(prefix=SNAPSHOT, dir=output_dir))
        try:
            for name in files:
                (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # a temporary file, which has been renamed meanwhile
                    _link_or_copy(models.get(str(name)), output_dir / name, snapshot / name)
        except BaseException:
            shutil.rmtree(snapshot, ignore_errors=True)
            raise
        return snapshot

    def _push_snapshot(self, repository: str, snapshot: Path, message: str) -> None:
        try:
            self._push_folder(repository, snapshot, message)
        finally:
            shutil.rmtree(snapshot, ignore_errors=True)

    def _push_folder(
        self,
        repository: str,
        folder: Path,
        message: str,
        place: str | None = None,
        *,
        ignore: Sequence[str] = (),
        delete: Sequence[str] = (),
    ) -> None:
        """Pushes a folder into a folder of the repository, or into its root."""
        self._hub.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            path_in_repo=place,
            commit_message=message,
            token=self._args.hub_token,
            revision=self._args.hub_revision,
            ignore_patterns=list(ignore) or None,
            delete_patterns=list(delete) or None,
        )

    def _start(self, step: int, repository: str, push: Callable[[], None], stays: Path | None = None) -> Future[None]:
        """Lets a push run after those that have been started before; the checkpoint ``stays`` until it has ended."""

        def report_failure(job: Future[None]) -> None:
            if not job.cancelled() and (error := job.exception()) is not None:
                reason = f"A push of step {step} to {repository} has failed: {cause(error)}"
                logger.error(f"{reason}. It is repeated at the next save.")

        job = self._hub.run_as_future(push)
        self._pushes[job] = stays
        job.add_done_callback(report_failure)
        return job

    def _unfinished(self) -> list[Future[None]]:
        return [job for job in self._pushes if not job.done()]

    def finish(self) -> None:
        """Waits for the pushes that have been started: a later training could replace the files that they read."""
        if jobs := self._unfinished():
            logger.info("Waiting for the pushes to the Hub, which may take some minutes.")
            wait(jobs)

    def finish_before_removals(self) -> float:
        """With ``save_total_limit=1``, waits like `finish`, because Trainer then removes all checkpoints but the best.

        Returns:
            the seconds of the wait, which are no part of the training's time.
        """
        begin = time.monotonic()
        if self._args.save_total_limit == 1:
            self.finish()
        return time.monotonic() - begin

    def uploading(self) -> list[Path]:
        """The checkpoints whose push waits or runs."""
        return [checkpoint for job in self._unfinished() if (checkpoint := self._pushes[job]) is not None]

    def _not_on_hub(self) -> dict[str, Path]:
        """The checkpoints whose push has failed or never started, keyed by their folder in the repository."""

        def failed(job: Future[None] | None) -> bool:
            return job is None or (job.done() and (job.cancelled() or job.exception() is not None))

        return {name: folder for name, (folder, job) in self._checkpoints.items() if failed(job)}

    def push_missing(self, repository: str | None) -> None:
        """Waits for the pushes that have been started, and pushes the checkpoints that the Hub lacks."""
        self.finish()
        for name, folder in self._not_on_hub().items():
            assert repository is not None
            if folder.is_dir():
                self._push_folder(repository, folder, f"{folder.name}, pushed again", place=name)
            else:
                logger.warning(f"{folder} was removed because of save_total_limit before it could be pushed.")
            del self._checkpoints[name]

    def push_output_dir(
        self, repository: Callable[[], str | None], create: Callable[[], None], message: str, delete: tuple[str, ...]
    ) -> None:
        """Pushes the current ``output_dir`` without its checkpoints in one commit, after what the Hub lacks.

        Args:
            repository: returns the id of the repository; None before it is created, without ``push_to_hub``.
            delete: patterns of files that the commit removes from the repository.

        Raises:
            OSError: on the main process, if the push has failed; the message contains the reason.
        """
        if self._args.process_index > 0:
            return
        folder = str(self._args.output_dir)
        try:
            if repository() is None:
                create()
            self.push_missing(repository())
            self._push_folder(str(repository()), Path(folder), message, ignore=NOT_PUSHED, delete=delete)
        except Exception as error:  # of the Hub's client, of its HTTP library or of the file system
            name, options = repository(), [f"--exclude '{pattern}'" for pattern in NOT_PUSHED]
            if self._args.hub_revision is not None:
                options.append(f"--revision {self._args.hub_revision}")
            raise OSError(
                f"{folder} could not be pushed to {name}: {cause(error)}. It is complete on this machine; push it with "
                f"`hf upload {name} {folder} . {' '.join(options)}`."
            ) from error


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _pushed_files(output_dir: Path) -> Iterator[Path]:
    """The files that are pushed, relative to ``output_dir``; without linked folders, as in the Hub's client.

    Folders that are not pushed are not read: some are snapshots, which are removed as soon as their push has ended.
    """
    for path in output_dir.iterdir():
        if not _matches(path.name, NOT_PUSHED):
            inside = () if path.is_symlink() else path.rglob("*")
            yield from (file.relative_to(output_dir) for file in (path, *inside) if file.is_file())


def _link_or_copy(unchanging: Path | None, file: Path, target: Path) -> None:
    """Links to a file of the same content that never changes, if there is one and the file system can; else copies."""
    if unchanging is not None:
        with suppress(OSError):
            os.link(unchanging, target)
            return
    shutil.copy(file, target)


@contextmanager
def errors_of_repository(args: InfCLTrainingArguments) -> Iterator[None]:
    """Within the context, an error while a repository is created becomes an OSError that says what to do.

    The Hub may be unreachable, or reject the token or the name. Trainer's constructor creates the repository, so this
    is reported before the first step.
    """
    try:
        yield
    except Exception as error:  # of the Hub's client or of its HTTP library
        name = args.hub_model_id or Path(str(args.output_dir)).absolute().name
        cure = (
            "Name another one with hub_model_id."
            if isinstance(error, HFValidationError)
            else "Check the network and the token (hub_token, or that of `hf auth login`), or train without "
            f"push_to_hub and push later with `hf upload {name} {args.output_dir} .`."
        )
        raise OSError(
            f"The repository {name} of the Hub could not be created or found: {cause(error)}. {cure}"
        ) from error


def create_branch(args: InfCLTrainingArguments, repository: str | None, token: str | None) -> None:
    """Creates the branch ``hub_revision`` if this option is set, unless the branch exists; on the main process."""
    branch = args.hub_revision
    if branch is not None and not branch.startswith("refs/") and args.process_index == 0:
        assert repository is not None
        HfApi().create_branch(repository, branch=branch, token=token or args.hub_token, exist_ok=True)


def has_own_card(output_dir: str) -> bool:
    """Whether the folder has a card that `hf_infcl.tools.publishing` updates."""
    card = Path(output_dir, "README.md")
    return card.is_file() and "hf_infcl" in (ModelCard.load(card).data.tags or [])


def checkpoint_of_hub_if_named(
    resumes: str | bool | None, args: InfCLTrainingArguments, repository: str | None
) -> str | bool | None:
    """Returns ``resumes``, or for ``last-checkpoint`` its folder, which is downloaded once per machine; collective.

    Raises:
        ValueError: on every process, if no repository is named, it has no such folder, or it is unreachable.
    """
    if resumes != LAST_CHECKPOINT:
        return resumes
    processes, folder, problem = Processes(), "", ""
    # A folder of this name is taken if every process finds it, so that all go the same way.
    if all(here for (here,) in processes.agree([Path(LAST_CHECKPOINT).is_dir()])):
        return resumes
    repository = processes.gather_objects(repository or args.hub_model_id or "")[0]
    if not repository:
        problem = f"{LAST_CHECKPOINT} is in a repository on the Hub: name the repository with hub_model_id."
    elif args.local_process_index == 0:
        try:
            token, revision = args.hub_token, args.hub_revision
            # By its hash, because an older snapshot of the branch may lie in the cache.
            newest = HfApi().model_info(repository, revision=revision, token=token).sha
            snapshot = snapshot_download(
                repository, revision=newest, token=token, allow_patterns=f"{LAST_CHECKPOINT}/*"
            )
            folder = str(Path(snapshot, LAST_CHECKPOINT))
            if not Path(folder).is_dir():
                problem = f'{repository} has no {LAST_CHECKPOINT}, which hub_strategy="checkpoint" pushes.'
        except Exception as error:  # as above
            problem = f"{LAST_CHECKPOINT} of {repository} could not be downloaded: {cause(error)}."
    if problems := [text for text in processes.gather_objects(problem) if text]:
        raise ValueError(problems[0])
    return processes.gather_objects(folder)[0]


def cause(error: BaseException) -> str:
    """The error in one line, as a part of a sentence, without the signatures of the URLs that the Hub hands out."""
    return f"{type(error).__name__}: {' '.join(without_secrets(str(error)).split())}".rstrip(".")
