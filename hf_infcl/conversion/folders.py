"""Folders, files and Hub repositories that hold models of OpenCLIP, and why a checkpoint cannot be loaded."""

from __future__ import annotations

import difflib
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ..hub import path_words
from ..readable import give_usual_modes

CONFIG = "open_clip_config.json"
HUB = "hf-hub:"  # OpenCLIP's prefix of Hub repositories
WEIGHTS = "open_clip_model.safetensors"
PICKLED = "open_clip_pytorch_model.bin"
_ALL_WEIGHTS = (WEIGHTS, "open_clip_pytorch_model.safetensors", PICKLED, "open_clip_pytorch_model.pth")
_OF_TOKENIZERS = ("*token*", "vocab*", "merges*", "*.model", CONFIG)


class OpenClipSource(NamedTuple):
    """What was read of a model of OpenCLIP: its tensors, its config, and the folder if there is one."""

    tensors: dict[str, Any]
    config: dict[str, Any]
    folder: Path | None


def is_of_open_clip(source: str, open_clip_model: str | None = None) -> bool:
    """Whether it is a file, or a folder or a Hub repository with a model of OpenCLIP and none of transformers.

    With the name of its ``open_clip_model``, it is meant to be one.
    """
    path = Path(source)
    if open_clip_model is not None or path.is_file() or source.startswith(HUB):
        return True
    if path.is_dir():
        names = {file.name for file in path.iterdir()}
        checkpoints = any(name.endswith(".pt") for name in names) and CONFIG_NAME not in names
        if not (CONFIG in names or checkpoints):
            return False
    with suppress(Exception):  # of the Hub, or of a damaged file, which raises exceptions of any class
        if "model_type" in transformers.PretrainedConfig.get_config_dict(source)[0]:
            return False
    try:
        return path.is_dir() or bool(hf_hub_download(source, CONFIG))
    except (OSError, ValueError):  # there is no such file, repository or name, or no network
        return False


def read(source: str | Path, open_clip_model: str | None = None) -> OpenClipSource:
    """Reads a model of OpenCLIP; arguments as for `load_open_clip`. A Hub repository may also be "hf-hub:...".

    Raises:
        ValueError: the source does not hold a model of OpenCLIP, or its config is unknown.
    """
    config, folder = read_config(source, open_clip_model)  # first, since reading the weights takes longer
    if folder is None:
        return OpenClipSource(_weights(Path(source)), config, None)
    if not Path(source).is_dir():
        with explained(str(source)):
            try:
                hf_hub_download(str(source).removeprefix(HUB), WEIGHTS)
            except EntryNotFoundError:
                hf_hub_download(str(source).removeprefix(HUB), PICKLED)
    if not (found := [folder / name for name in _ALL_WEIGHTS if (folder / name).is_file()]):
        raise ValueError(f"{str(folder)!r} has a config of OpenCLIP and no weights, such as {WEIGHTS}. Add them.")
    return OpenClipSource(_weights(found[0]), config, folder)


def read_config(source: str | Path, open_clip_model: str | None = None) -> tuple[dict[str, Any], Path | None]:
    """The config of a model of OpenCLIP, and the folder that holds it; None for a file. Raises as `read` does."""
    path = Path(source)
    if path.is_file():
        if open_clip_model is None:
            raise ValueError(
                f"{str(source)!r} is a file. A model of transformers is named by its folder. Weights of OpenCLIP's "
                "training need --open_clip_model beside them, such as ViT-B-32: the --model of that training."
            )
        return named_config(open_clip_model), None
    if open_clip_model is not None:
        if not path.exists():
            raise ValueError(f"There is no file {str(source)!r}. Check the path.")
        raise ValueError(f"--open_clip_model is for a file of weights, and {str(source)!r} is none. Omit it.")
    if not path.is_dir():
        with explained(str(source)):
            path = Path(snapshot_download(str(source).removeprefix(HUB), allow_patterns=list(_OF_TOKENIZERS)))
    return _config(path / CONFIG), path


def named_config(name: str) -> dict[str, Any]:
    """The config of a JSON file, or the one that OpenCLIP has under the name."""
    if Path(name).is_file():
        return _config(Path(name))
    try:
        import open_clip
    except ModuleNotFoundError as error:
        raise ValueError(
            f"The config of {name!r} is in OpenCLIP, which cannot be imported ({error}). Run `pip install "
            "open_clip_torch`, or pass the JSON file of the config as --open_clip_model."
        ) from None
    known = open_clip.list_models()
    if name not in known:
        similar = difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(similar)}?" if similar else "open_clip.list_models() lists its models."
        raise ValueError(f"OpenCLIP {open_clip.__version__} has no model {name!r}, and there is no such file. {hint}")
    return {"model_cfg": open_clip.get_model_config(name)}


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(
            f"{str(path.parent)!r} has no {CONFIG}, so it holds no model of OpenCLIP. For a checkpoint of its "
            "training, name the .pt file itself and pass --open_clip_model."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged, or is no config of OpenCLIP: {error}.") from error
    return config if "model_cfg" in config else {"model_cfg": config}


def _weights(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, SafetensorError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read as a file of tensors, as OpenCLIP's training writes them (OpenAI's own "
            f"files hold programs, and the Hub has these models in transformers' format): {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{str(path)!r} holds a {type(loaded).__name__}, and a dictionary of tensors was expected.")
    return loaded


def write(
    target: str | Path, tensors: dict[str, Tensor], config: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Writes a folder that OpenCLIP loads as "local-dir:...", also beside the files of transformers."""
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    if config["model_cfg"]["text_cfg"].get("hf_tokenizer_name"):
        tokenizer.save_pretrained(folder)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    give_usual_modes(folder)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def explained(checkpoint: str, *, needed: str = "", kind: str = "model") -> Iterator[None]:
    """Turns any error into a ValueError that says why the checkpoint, a folder or a Hub id, cannot be loaded.

    ``needed`` is the one file that is needed of a Hub repository; by default, all are. ``kind`` is "model" or
    "tokenizer".
    """
    try:
        yield
    except Exception as error:  # a damaged file makes the libraries raise exceptions of any class
        raise ValueError(_explanation(checkpoint, error, needed, kind)) from error


def _newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint with a model in the folder of a training that has not written its final one.

    A folder of this name is complete: it gets its name when all its files are written.
    """
    configs = (CONFIG_NAME, ADAPTER_CONFIG_NAME)  # of a whole model, and of adapters
    if any((folder / name).is_file() for name in configs):
        return None
    found = [path.parent for name in configs for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{name}")]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _explanation(checkpoint: str, error: BaseException, needed: str, kind: str) -> str:
    causes: list[type[BaseException]] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(type(cause))
        cause = cause.__cause__ or cause.__context__
    reason = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
    if newest := _newest_checkpoint(Path(checkpoint)):
        return (
            f"{checkpoint!r} holds no final model, because its training has not ended. Write {newest}, its newest "
            "checkpoint, in its place, or end the training (infcl train with --resume_from_checkpoint auto)."
        )
    if Path(checkpoint).exists():
        parts = " with its config and its processor" if kind == "model" else ""
        return f"{checkpoint!r} does not hold a {kind} that can be loaded{parts}: {reason}"
    of_weights = Path(checkpoint).suffix in (".pt", ".pth", ".bin", ".safetensors")
    tried = f"There is no {'file' if of_weights else 'folder'} {checkpoint!r}"
    if words := path_words(checkpoint):
        return f"{tried} to load a {kind} from{words}"
    if HFValidationError in causes:
        return f"{tried}, and the name is not the id of a {kind} on the Hub, such as openai/clip-vit-base-patch32."
    if LocalEntryNotFoundError in causes:
        return (
            f"{tried}, no {kind} of this name was downloaded before, and the Hub could not be reached. Check the name. "
            f"Without a network, run `hf download {f'{checkpoint} {needed}'.strip()}` on a machine that has one, and "
            f"pass {'the folder of the printed file' if needed else 'the printed folder'}."
        )
    if RepositoryNotFoundError in causes:
        return (
            f"{tried}, and the Hub has no {kind} of this name that you may read. Check the name. If the {kind} is "
            "private, log in with `hf auth login`."
        )
    return f"The {kind} {checkpoint!r} cannot be loaded: {reason}"
