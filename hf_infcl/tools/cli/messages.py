"""How a command tells a mistake: in one line, once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from ...shards.urls import without_secrets


def print_error(command: str, message: str, *, below: bool = False) -> None:
    """Prints an error as one line, only on the first launched process that calls this.

    That process prints before it ends. The launcher then ends the other processes, whether they had the error or not.
    With ``below``, a new line begins before, because a progress bar may stand in the present one.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch.distributed import TCPStore  # here, because importing torch takes seconds

        # This is the launcher's store. The processes need not have joined a group yet.
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if store.add(f"infcl/{attempt}/{message}", 1) > 1:
            return
    line = f"{command}: error: {' '.join(without_secrets(message).split())}"
    print(f"\n{line}" if below else line, file=sys.stderr, flush=True)


def missing_package(error: Exception) -> str | None:
    """A sentence if a library needs a package that is not installed; Trainer's trackers raise a RuntimeError then."""
    is_missing = isinstance(error, (ImportError, RuntimeError)) and "install" in str(error)
    if is_missing or isinstance(error, ModuleNotFoundError):
        return f"An option needs a package that is not installed: {error}"
    return None


def about_words(left: Sequence[str], words: Sequence[str], positionals: Mapping[str, str]) -> str:
    """Says what the ``left`` words of a command line could have been, which belong to no option.

    ``positionals`` says what the words mean that stand before the options, by their names.
    """
    before = next((i for i, word in enumerate(words) if word == left[0] and not words[i - 1].startswith("--")), 0)
    option = next((word for word in reversed(words[:before]) if word.startswith("--")), "=")
    start = f"{' '.join(map(repr, left))} belong{'s' if len(left) == 1 else ''} to no option"
    if positionals:
        meanings = " ".join(f"{name.strip('[]').upper()}: {meaning}" for name, meaning in positionals.items())
        return f"{start}. Before the options stand {meanings}"
    if "=" in option:  # of a file, or none
        return f"{start}. Every value follows its option: --NAME VALUE."
    return f"{start}: {option} takes one value.{instead_of_several(option)}"


def instead_of_several(option: str) -> str:
    """Advice for an option that takes one value and got several, as the end of a message; empty without any."""
    if option.endswith("eval_dataset"):
        return " Measure each set with `infcl evaluate`, or name the others of a training as --guard_dataset."
    joined = "rows.map(lambda row: {'captions': [row['a'], row['b']]})"
    return f" Join several columns into one of lists: {joined} in Python." if option.endswith("caption_column") else ""
