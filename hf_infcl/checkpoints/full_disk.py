"""A disk that is full when the results of a training are written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME


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
            f"The results could not be written into {folder} ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are "
            f"free there): {error}. Free some space, and run the same command with --resume_from_checkpoint auto, "
            "which continues from the last checkpoint and writes the results."
        ) from error
