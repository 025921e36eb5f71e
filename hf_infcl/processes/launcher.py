"""The launcher of this process, torchrun or accelerate, and whether it has ended.

The package imports this module before torch, because importing torch takes seconds in which the launcher may end.
"""

import os
from pathlib import Path

_PREFIX = "TORCHELASTIC_"  # of variables that torchrun sets anew for each process


def _variables(process: int) -> dict[str, str]:
    """The launcher's variables with which a process was started; empty if the system does not say."""
    try:
        lines = os.fsdecode(Path(f"/proc/{process}/environ").read_bytes()).split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition("=") for line in lines) if name.startswith(_PREFIX)}


_parent = os.getppid()
_inherited = _variables(_parent)


def _note() -> None:
    global _parent, _inherited
    _parent = os.getppid()
    _inherited = _variables(_parent)


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_note)


def is_launched() -> bool:
    """Whether the parent of this process is a launcher, and no shell that has inherited a launcher's variables."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    return "TORCHELASTIC_RUN_ID" in variables and variables != _inherited


def has_gone() -> bool:
    """Whether this process was launched, and its launcher has ended since the package was imported."""
    return os.getppid() != _parent and is_launched()
