"""The command that writes the embeddings which a training lacks."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from ...options.files import FILES


def check_embedded(folders: Sequence[str] | None, words: Sequence[str], of_pairs: Collection[str]) -> None:
    """Raises a ValueError if a folder of a teacher's embeddings does not exist, with the command that writes it.

    Args:
        folders: of ``teacher_embeddings``.
        words: the command line of the training.
        of_pairs: the options that say which pairs it has and how they are read.
    """
    missing = next((folder for folder in folders or () if not Path(folder).exists()), None)
    if missing is None:
        return
    command, is_of_pairs = [*(word for word in words[:1] if word.endswith(FILES)), "TEACHER"], False
    for word in words:
        if word.startswith("--"):
            is_of_pairs = word[2:].partition("=")[0].replace("-", "_") in of_pairs
        command += [word] * is_of_pairs
    raise ValueError(
        f"--teacher_embeddings: there is no folder {missing}. With the folder or Hub id of the large model in place of "
        f"TEACHER, this writes it: infcl embed {shlex.join([*command, '--output_dir', missing])}"
    )
