"""Pushes to the Hub, which Trainer starts in the background, and a resume from what was pushed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import logging

from ..options.arguments import InfCLTrainingArguments
from ..processes.collectives import Processes
from ..shards.urls import without_secrets

LAST_CHECKPOINT = "last-checkpoint"  # where hub_strategy="checkpoint" puts the newest checkpoint
NOT_PUSHED = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*")  # of an output_dir

logger = logging.get_logger(__name__)


class Pushes:
    """The pushes that Trainer starts while it trains; one that fails is logged, and does not end the training.

    Trainer uploads ``output_dir`` itself, into which the next push copies the model, and files must not change while
    they are uploaded. A save therefore starts no push while an earlier one runs or, with ``hub_always_push``, waits for
    that one.
    """

    def __init__(self, args: InfCLTrainingArguments) -> None:
        self._args = args
        self._jobs: dict[Future[Any], Path] = {}  # of the last push, with its checkpoint

    def uploading(self) -> list[Path]:
        """The checkpoint whose push runs now, if any."""
        return [checkpoint for job, checkpoint in self._jobs.items() if not job.done()]

    def finish(self) -> float:
        """Waits for the push that runs: a later training could replace the files that it reads.

        Returns:
            The seconds of the wait, which are no part of the training's time.
        """
        begin = time.monotonic()
        if self.uploading():
            logger.info("Waiting for the push to the Hub, which may take some minutes.")
            wait(self._jobs)
        return time.monotonic() - begin

    def push_checkpoint(
        self,
        checkpoint: Path,
        step: int,
        push: Callable[[str], Sequence[Future[Any]]],
        save: Callable[[], None] | None = None,
    ) -> None:
        """Pushes the model of a checkpoint and, if ``hub_strategy`` asks for it, the checkpoint.

        Args:
            push: as Trainer's method, which copies transformers' files of the model; returns the jobs of the push.
            save: saves the model in ``output_dir``, if the checkpoint has no whole model; collective.
        """
        args = self._args
        if args.hub_strategy == HubStrategy.END:
            return
        if args.hub_always_push:
            self.finish()
        starts = not self.uploading()
        if save is not None:
            starts = bool(Processes().agree([starts])[0][0])  # only the main process knows
            if starts:
                save()
        if args.process_index > 0 or not starts:
            return
        try:
            for path in checkpoint.glob("open_clip_*"):
                shutil.copy(path, str(args.output_dir))
            self._jobs = dict.fromkeys(push(str(checkpoint)), checkpoint)
        except Exception as error:  # a full disk is reported differently by files, torch.save and tokenizers
            logger.error(f"The push of step {step} could not start: {cause(error)}.")
            return
        for job in self._jobs:
            job.add_done_callback(partial(_report_failure, step))

    def push_output_dir(self, repository: str | None, message: str, delete: tuple[str, ...]) -> None:
        """Pushes the current ``output_dir`` without its checkpoints in one commit, after the push that runs.

        Args:
            delete: patterns of files that the commit removes from the repository.

        Raises:
            OSError: on the main process, if the push has failed; the message contains the reason.
        """
        args, folder = self._args, str(self._args.output_dir)
        if args.process_index > 0:
            return
        assert repository is not None
        self.finish()
        try:
            HfApi().upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=message,
                token=args.hub_token,
                revision=args.hub_revision,
                ignore_patterns=list(NOT_PUSHED),
                delete_patterns=list(delete) or None,
            )
        except Exception as error:  # of the Hub's client, of its HTTP library or of the file system
            options = [f"--exclude '{pattern}'" for pattern in NOT_PUSHED]
            if args.hub_revision is not None:
                options.append(f"--revision {args.hub_revision}")
            raise OSError(
                f"{folder} could not be pushed to {repository}: {cause(error)}. It is complete on this machine; push "
                f"it with `hf upload {repository} {folder} . {' '.join(options)}`."
            ) from error


def _report_failure(step: int, job: Future[Any]) -> None:
    if not job.cancelled() and (error := job.exception()) is not None:
        logger.error(f"The push of step {step} has failed: {cause(error)}. The next save pushes again.")


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
