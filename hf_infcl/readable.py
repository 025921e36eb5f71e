"""The usual modes for files of safetensors, which version 0.6 and newer let only their owner read."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def give_usual_modes(place: str | Path) -> None:
    """Gives a file of safetensors, or those in a folder, the mode that the umask gives to all other files."""
    umask = os.umask(0o077)  # cannot be read without being set; meanwhile files are those of their owner
    os.umask(umask)
    place, usual = Path(place), 0o666 & ~umask
    for path in place.glob("*.safetensors") if place.is_dir() else [place]:
        if stat.S_IMODE(path.stat().st_mode) == 0o600 != usual:
            path.chmod(usual)
