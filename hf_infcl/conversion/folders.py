"""Folders, files and Hub repositories that hold models of OpenCLIP."""

from __future__ import annotations

import difflib
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..readable import give_usual_modes
from .explaining import explained
from .tokenizing import clip_tokenizer, named_tokenizer

CONFIG = "open_clip_config.json"
HUB = "hf-hub:"  # OpenCLIP's prefix of Hub repositories
WEIGHTS = "open_clip_model.safetensors"
OTHER_WEIGHTS = ("open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin", "open_clip_pytorch_model.pth")
OF_TOKENIZERS = ("*token*", "vocab*", "merges*", "*.model", CONFIG)


@dataclass
class OpenClipSource:
    """What was read of a model of OpenCLIP: its tensors, its config, and the folder of a tokenizer if there is one."""

    tensors: dict[str, Any]
    config: dict[str, Any]
    folder: Path | None

    def tokenizer(self, named: str | None = None) -> Any:
        """The tokenizer of this name, or the one beside the weights, or the one that the config names, or CLIP's."""
        if named:
            return named_tokenizer(named)
        if self.folder and any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            return transformers.AutoTokenizer.from_pretrained(self.folder)
        name = self.config["model_cfg"]["text_cfg"].get("hf_tokenizer_name")
        return transformers.AutoTokenizer.from_pretrained(name) if name else clip_tokenizer()


def is_of_open_clip(source: str) -> bool:
    """Whether it is a file, or a folder or a Hub repository with a model of OpenCLIP and none of transformers."""
    path = Path(source)
    if path.is_file() or source.startswith(HUB):
        return True
    if path.is_dir():
        names = {file.name for file in path.iterdir()}
        checkpoints = any(name.endswith(".pt") for name in names) and "config.json" not in names
        return (CONFIG in names or checkpoints) and not _is_of_transformers(source)
    return not _is_of_transformers(source) and _is_on_hub(source)


def _is_of_transformers(source: str) -> bool:
    try:
        return "model_type" in transformers.PretrainedConfig.get_config_dict(source)[0]
    except Exception:  # of the Hub, or of a damaged file, which raises exceptions of any class
        return False


def _is_on_hub(repository: str) -> bool:
    try:
        hf_hub_download(repository, CONFIG)
    except (OSError, ValueError):  # there is no such file, repository or name, or no network
        return False
    return True


def read(source: str | Path, open_clip_model: str | None = None) -> OpenClipSource:
    """Reads a model of OpenCLIP; arguments as for `load_open_clip`. A Hub repository may also be "hf-hub:...".

    Raises:
        ValueError: the source does not hold a model of OpenCLIP, or its config is unknown.
    """
    config, folder = read_config(source, open_clip_model)  # first, since reading the weights takes longer
    if folder is not None and not Path(source).is_dir():
        with explained(str(source)):
            _download_weights(_repository(source))
    path = Path(source) if folder is None else _file_of_weights(folder)
    return OpenClipSource(_weights(path), config, folder)


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
    folder = path
    if not path.is_dir():
        with explained(str(source)):
            folder = Path(snapshot_download(_repository(source), allow_patterns=list(OF_TOKENIZERS)))
    return _config(folder / CONFIG), folder


def _repository(source: str | Path) -> str:
    return str(source).removeprefix(HUB)


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


def _file_of_weights(folder: Path) -> Path:
    for name in (WEIGHTS, *OTHER_WEIGHTS):
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{str(folder)!r} has a config of OpenCLIP and no weights, such as {WEIGHTS}. Add them.")


def _download_weights(repository: str) -> None:
    try:
        hf_hub_download(repository, WEIGHTS)
    except EntryNotFoundError:
        hf_hub_download(repository, "open_clip_pytorch_model.bin")


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
