"""Pushes to the Hub: they are repeated if they fail, and runs resume from what they have pushed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import logging

from ..options.arguments import InfCLTrainingArguments
from ..processes.collectives import Processes
from ..shards.urls import without_secrets
from .formats import copy_other_formats

LAST_CHECKPOINT = "last-checkpoint"  # where hub_strategy="checkpoint" puts the newest checkpoint
NOT_PUSHED = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*")  # of an output_dir

logger = logging.get_logger(__name__)


class Pushes:
    """The pushes of a run from its main process: which checkpoints have arrived, and which are pushed again.

    Trainer itself does not report a push that fails during the training, and never pushes a checkpoint that is saved
    while an earlier push is running. Both are pushed at the next save, and at the latest with the final push, which
    raises an error if it fails.

    Args:
        args: the arguments of the training.
    """

    def __init__(self, args: InfCLTrainingArguments) -> None:
        self._args = args
        # For each folder of the repository that holds a checkpoint: the checkpoint that belongs there, and its upload.
        self._pushed: dict[str, tuple[Path, Future[Any] | None]] = {}
        self._uploads: dict[Future[Any], Path] = {}  # the uploads of checkpoints, also those that have ended

    def push_checkpoint(
        self,
        checkpoint: Path,
        step: int,
        repository: str | None,
        push: Callable[[], None],
        in_progress: Callable[[], Any],
        save: Callable[[], None] | None = None,
    ) -> None:
        """Pushes the model in the background, and the checkpoint if ``hub_strategy`` asks for checkpoints.

        Args:
            checkpoint: its folder.
            step: its step.
            repository: the id of the repository; None on other processes than the main one.
            push: Trainer's own push, which starts up to two uploads.
            in_progress: returns Trainer's ``push_in_progress``, in which the uploads of earlier checkpoints are noted
                that are started as well.
            save: saves the model in ``output_dir``, if the checkpoint has no whole model; collective.
        """
        if self._args.hub_strategy == HubStrategy.END:
            return
        if save is not None:
            save()
        if self._args.process_index > 0:
            return
        assert repository is not None

        def jobs() -> list[Future[Any]]:
            return [] if (current := in_progress()) is None else list(current.jobs)

        missing = self._not_on_hub()
        names = {HubStrategy.CHECKPOINT: LAST_CHECKPOINT, HubStrategy.ALL_CHECKPOINTS: checkpoint.name}
        name = names.get(HubStrategy(self._args.hub_strategy))
        before = set(jobs())
        try:
            copy_other_formats(checkpoint, str(self._args.output_dir))
            push()
        except OSError as error:  # a file could not be copied; an upload fails in the background
            logger.error(f"The push of step {step} could not start: {cause(error)}.")
        started = [job for job in jobs() if job not in before]  # none while an earlier push is running
        for job in started:
            _report_failure(job, step, repository)
        if name is not None:
            missing.pop(name, None)
            self._note(name, checkpoint, started[1] if len(started) == 2 else None)
        for name, folder in missing.items() if started else ():
            if folder.is_dir():
                repeated = HfApi().upload_folder(**self._upload(repository, name, folder), run_as_future=True)
                _report_failure(repeated, step, repository)
                self._note(name, folder, repeated)
                in_progress().jobs.append(repeated)

    def _note(self, name: str, checkpoint: Path, job: Future[Any] | None) -> None:
        self._pushed[name] = checkpoint, job
        if job is not None:
            self._uploads[job] = checkpoint

    def uploading(self) -> list[Path]:
        """The checkpoints that are being pushed."""
        return [checkpoint for job, checkpoint in self._uploads.items() if not job.done()]

    def _not_on_hub(self) -> dict[str, Path]:
        """The checkpoints whose push has failed or never started, keyed by their folder in the repository."""

        def failed(job: Future[Any] | None) -> bool:
            return job is None or (job.done() and (job.cancelled() or job.exception() is not None))

        return {name: folder for name, (folder, job) in self._pushed.items() if failed(job)}

    def _upload(self, repository: str, name: str, checkpoint: Path) -> dict[str, Any]:
        return {
            "repo_id": repository,
            "folder_path": str(checkpoint),
            "path_in_repo": name,
            "commit_message": f"{checkpoint.name}, pushed again",
            "token": self._args.hub_token,
            "revision": self._args.hub_revision,
        }

    def push_missing(self, repository: str | None, finish: Callable[[], None]) -> None:
        """Pushes the checkpoints that the Hub lacks.

        Args:
            repository: as above.
            finish: waits for the pushes under way.
        """
        finish()
        for name, folder in self._not_on_hub().items():
            assert repository is not None
            if folder.is_dir():
                HfApi().upload_folder(**self._upload(repository, name, folder))
            else:
                logger.warning(f"{folder} was removed because of save_total_limit before it could be pushed.")
            del self._pushed[name]

    def push_output_dir(
        self,
        repository: Callable[[], str | None],
        create: Callable[[], None],
        finish: Callable[[], None],
        message: str,
        delete: tuple[str, ...],
    ) -> None:
        """Pushes the current ``output_dir`` without its checkpoints in one commit, after what the Hub lacks.

        Args:
            repository: returns the id of the repository; None before it is created, without ``push_to_hub``.
            create: creates it.
            finish: as above.
            message: the summary of the commit.
            delete: patterns of files that the commit removes from the repository.

        Raises:
            OSError: on the main process, if the push has failed; the message contains the reason.
        """
        if self._args.process_index > 0:
            return
        with _errors_of_push(self._args, repository):
            if repository() is None:
                create()
            self.push_missing(repository(), finish)
            HfApi().upload_folder(
                repo_id=str(repository()),
                folder_path=str(self._args.output_dir),
                commit_message=message,
                token=self._args.hub_token,
                revision=self._args.hub_revision,
                ignore_patterns=list(NOT_PUSHED),
                delete_patterns=list(delete) or None,
            )


def _report_failure(job: Future[Any], step: int, repository: str) -> None:
    def report(job: Future[Any]) -> None:
        if not job.cancelled() and (error := job.exception()) is not None:
            logger.error(
                f"A push of step {step} to {repository} has failed: {cause(error)}. It is repeated at the next save."
            )

    job.add_done_callback(report)


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
    """Creates the branch ``hub_revision`` if it is given, unless it exists; on the main process."""
    branch = args.hub_revision
    if branch is not None and not branch.startswith("refs/") and args.process_index == 0:
        assert repository is not None
        HfApi().create_branch(repository, branch=branch, token=token or args.hub_token, exist_ok=True)


@contextmanager
def _errors_of_push(args: InfCLTrainingArguments, repository: Callable[[], str | None]) -> Iterator[None]:
    """Within the context, an error while ``output_dir`` is pushed becomes an OSError that says how to push it later."""
    try:
        yield
    except Exception as error:  # of the Hub's client, of its HTTP library or of the file system
        options = [f"--exclude '{pattern}'" for pattern in NOT_PUSHED]
        if args.hub_revision is not None:
            options.append(f"--revision {args.hub_revision}")
        folder, name = str(args.output_dir), str(repository())
        raise OSError(
            f"{folder} could not be pushed to {name}: {cause(error)}. It is complete on this machine; push it with "
            f"`hf upload {name} {folder} . {' '.join(options)}`."
        ) from error


def has_own_card(output_dir: str) -> bool:
    """Whether the folder has a card that `hf_infcl.publishing` updates."""
    card = Path(output_dir, "README.md")
    return card.is_file() and "hf_infcl" in (ModelCard.load(card).data.tags or [])


def checkpoint_of_hub_if_named(
    resumes: str | bool | None, args: InfCLTrainingArguments, repository: str | None
) -> str | bool | None:
    """What to resume from, with ``last-checkpoint`` of the repository in place of that name; collective."""
    if resumes != LAST_CHECKPOINT:
        return resumes
    # A folder of this name is taken if every process finds it, so that all go the same way.
    found = Processes().agree([Path(LAST_CHECKPOINT).is_dir()])
    return resumes if all(here for (here,) in found) else checkpoint_of_hub(args, repository)


def checkpoint_of_hub(args: InfCLTrainingArguments, repository: str | None) -> str:
    """Downloads ``last-checkpoint`` from the repository, once per machine, and returns its folder; collective.

    Raises:
        ValueError: on every process, if no repository is named, it has no such folder, or it is unreachable.
    """
    processes, folder, problem = Processes(), "", ""
    repository = processes.gather_text(repository or args.hub_model_id or "")[0]
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
    if problems := [text for text in processes.gather_text(problem) if text]:
        raise ValueError(problems[0])
    return processes.gather_text(folder)[0]


def cause(error: BaseException) -> str:
    """The error in one line, as a part of a sentence, without the signatures of the URLs that the Hub hands out."""
    return f"{type(error).__name__}: {' '.join(without_secrets(str(error)).split())}".rstrip(".")
