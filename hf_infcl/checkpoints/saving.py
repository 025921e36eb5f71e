"""The checkpoints that one training writes, and a disk that is full when it writes its results."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME

from ..processes.collectives import Processes
from .files import Checkpoint
from .record import RunRecord

logger = logging.getLogger(__name__)


class Checkpoints:
    """Writes the checkpoints of a training, each completely or not at all.

    Args:
        completes: whether this process begins and completes checkpoints: one process, or one of each machine if every
            machine has its own.
        flushes: whether this process flushes what the processes of its machine have written.
        ends_on_failure: whether an error of one process ends the training, because writing is collective.

    Attributes:
        saved_step: the step of the last checkpoint that this training wrote, or -1.
        partial_dir: the folder of the checkpoint that is being written now, if any.
    """

    def __init__(self, *, completes: bool, flushes: bool, ends_on_failure: bool = False) -> None:
        self._completes, self._flushes, self._ends_on_failure = completes, flushes, ends_on_failure
        self.saved_step = -1
        self.partial_dir: str | None = None

    def save(
        self, output_dir: str, step: int, record: RunRecord, write: Callable[[Checkpoint], None]
    ) -> Checkpoint | None:
        """Writes a checkpoint, with ``write`` the files of this process into `Checkpoint.partial`; collective.

        If a process cannot write, for example because the disk is full, all processes log the error, and the training
        continues to the next save.

        Returns:
            The complete checkpoint, or None if it could not be written.
        """
        checkpoint = Checkpoint(output_dir, step)
        self.partial_dir = str(checkpoint.partial_dir)
        try:
            complete = self._write(checkpoint, record, write)
        finally:
            self.partial_dir = None
        if not complete:
            return None
        self.saved_step = step
        return checkpoint

    def _write(self, checkpoint: Checkpoint, record: RunRecord, write: Callable[[Checkpoint], None]) -> bool:
        """Whether all processes could write."""
        for acts, work in (
            (self._completes, partial(checkpoint.begin, record)),
            (True, partial(write, checkpoint)),
            (self._flushes, checkpoint.flush),
            (self._completes, checkpoint.complete),
        ):
            failure = ""
            try:
                if acts:
                    work()
            except (OSError, RuntimeError, SafetensorError) as error:
                if self._ends_on_failure:
                    raise
                failure = f"{type(error).__name__}: {error}"
            if failures := [text for text in Processes().gather_objects(failure) if text]:
                logger.error(
                    f"{checkpoint.folder} could not be written, and the training continues without it"
                    f"{_free_space(checkpoint.folder.parent)}. {' '.join(failures)}"
                )
                if self._completes:
                    checkpoint.abandon()
                return False
        return True


@contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """Removes partly written results if the disk is full, and says what to do.

    Raises:
        ValueError: the disk is full, or the user's share of it.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # A SafetensorError has no number, only the text of the operating system.
        if not any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT)):
            raise
        for path in (*folder.glob("*_results.json"), folder / TRAINER_STATE_NAME):
            path.unlink(missing_ok=True)
        raise ValueError(
            f"The results could not be written into {folder}{_free_space(folder)}: {error}. Free some space, and run "
            "the same command with --resume_from_checkpoint auto, which continues from the last checkpoint and writes "
            "the results."
        ) from error


def _free_space(folder: Path) -> str:
    """The free space of a folder in parentheses; empty if unknown, for example on a rank without that folder."""
    try:
        return f" ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there)"
    except OSError:
        return ""
