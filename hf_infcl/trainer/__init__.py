"""`InfCLTrainer` and its parts."""

import importlib
import importlib.util

import torch


def _check_torchvision() -> None:
    """Imports torchvision if it is installed.

    transformers imports it with Trainer, but if that fails its error does not name torchvision.

    Raises:
        ImportError: torchvision is installed but cannot be imported, usually because it needs another release of torch.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        raise ImportError(
            f"The installed torchvision does not fit torch {torch.__version__} ({type(error).__name__}: {error}), and "
            "transformers' Trainer imports it. Uninstall torchvision, which hf_infcl does not need (pip uninstall "
            "torchvision), or install the release for this torch from the same index."
        ) from error


_check_torchvision()
