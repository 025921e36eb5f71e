"""OpenCLIP's own package, which only the processes of some tests import.

scripts/environment.sh installs it with torchvision into a folder of its own. transformers prepares images otherwise
where torchvision is found, and most tests have to run as they do without it.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(sys.prefix) / "open_clip"


def is_installed() -> bool:
    return FOLDER.is_dir() or importlib.util.find_spec("open_clip") is not None


def imported() -> Any:
    """The package. Call it in a process that serves no other tests."""
    if "open_clip" not in sys.modules and FOLDER.is_dir():
        sys.path.append(str(FOLDER))
        if not hasattr(torch.ops.torchvision, "nms"):
            # The operators of a torchvision for another torch are not loaded. It is imported if it finds the names of
            # these two, which nothing calls here.
            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            imported.library = library  # type: ignore[attr-defined]  # its names live as long as it does
    return importlib.import_module("open_clip")
