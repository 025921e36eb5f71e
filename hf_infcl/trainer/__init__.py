"""`InfCLTrainer` and its parts."""

import importlib.util

import torch

if importlib.util.find_spec("torchvision") is not None:
    # transformers imports it with Trainer, but if that fails, mostly as it needs another torch, its error does not name
    # torchvision.
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        raise ImportError(
            f"The installed torchvision does not fit torch {torch.__version__} ({type(error).__name__}: {error}), and "
            "transformers' Trainer imports it. Uninstall torchvision, which hf_infcl does not need (pip uninstall "
            "torchvision), or install the release for this torch from the same index."
        ) from error
