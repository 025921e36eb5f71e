"""Reads complete models of transformers and of OpenCLIP, and adapters with the model under them, or says why not.

transformers fills what a checkpoint lacks at random, or leaves it as it lies in memory, such as a logit_scale, and only
warns. Here such a checkpoint is refused, unless a training asks for new weights.
"""

import difflib
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import errors, hf_hub_download, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, cached_file, find_adapter_config_file

from ..files.hub import asks_hub_once, path_words
from ..files.text import listed
from ..files.whole import check_pulled, give_usual_modes
from .model_types import check_type_of_config, fit_tokenizer

CONFIG = "open_clip_config.json"
HUB = "hf-hub:"  # OpenCLIP's prefix of Hub repositories
WEIGHTS = "open_clip_model.safetensors"
PICKLED = "open_clip_pytorch_model.bin"
_ALL_WEIGHTS = (WEIGHTS, "open_clip_pytorch_model.safetensors", PICKLED, "open_clip_pytorch_model.pth")
_OF_TOKENIZERS = ("*token*", "vocab*", "merges*", "*.model", CONFIG)


def is_of_open_clip(source: str, open_clip_model: str | None = None) -> bool:
    """Whether it is a file, or a folder or a Hub repository with a model of OpenCLIP and none of transformers.

    With the name of its ``open_clip_model``, it is meant to be one.
    """
    path = Path(source)
    if open_clip_model is not None or path.is_file() or source.startswith(HUB):
        return True
    with suppress(Exception):  # of the Hub, or of a damaged file, which raises exceptions of any class
        if "model_type" in transformers.PretrainedConfig.get_config_dict(source)[0]:
            return False
    if path.is_dir():
        return (path / CONFIG).is_file() or (any(path.glob("*.pt")) and not (path / CONFIG_NAME).is_file())
    with suppress(OSError, ValueError):  # there is no such file, repository or name, or no network
        return bool(hf_hub_download(source, CONFIG))
    return False


def read(source: str | Path, open_clip_model: str | None = None) -> tuple[dict[str, Any], dict[str, Any], Path | None]:
    """The tensors and the config of a model of OpenCLIP, and the folder that holds them; None for a file.

    Arguments are those of `load_open_clip`. A Hub repository may also be "hf-hub:...".

    Raises:
        ValueError: the source does not hold a model of OpenCLIP, or its config is unknown.
    """
    config, folder = read_config(source, open_clip_model)  # first, since reading the weights takes longer
    if folder is None:
        return _weights(Path(source)), config, None
    if not Path(source).is_dir():
        with explained(str(source)):
            try:
                hf_hub_download(str(source).removeprefix(HUB), WEIGHTS)
            except errors.EntryNotFoundError:
                hf_hub_download(str(source).removeprefix(HUB), PICKLED)
    if not (found := [folder / name for name in _ALL_WEIGHTS if (folder / name).is_file()]):
        raise ValueError(f"{str(folder)!r} has a config of OpenCLIP and no weights, such as {WEIGHTS}. Add them.")
    return _weights(found[0]), config, folder


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


def write(target: str | Path, tensors: dict[str, Tensor], config: dict[str, Any], tokenizer: Any) -> None:
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
    """The newest checkpoint with a model in the folder of a training that has not written its final one."""
    configs = (CONFIG_NAME, ADAPTER_CONFIG_NAME)  # of a whole model, and of adapters
    if any((folder / name).is_file() for name in configs):
        return None
    # A folder of this name is complete: it gets its name when all its files are written.
    found = [path.parent for name in configs for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{name}")]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _explanation(checkpoint: str, error: BaseException, needed: str, kind: str) -> str:
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    kinds = {type(cause) for cause in causes}
    reason = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
    if newest := _newest_checkpoint(Path(checkpoint)):
        return (
            f"{checkpoint!r} holds no final model, because its training has not ended. Write {newest}, its newest "
            "checkpoint, in its place, or end the training (infcl train with --resume_from_checkpoint auto)."
        )
    for file in (Path(checkpoint), *Path(checkpoint).glob("*")):
        check_pulled(file)
    if Path(checkpoint).exists():
        parts = " with its config and its processor" if kind == "model" else ""
        return f"{checkpoint!r} does not hold a {kind} that can be loaded{parts}: {reason}"
    of_weights = Path(checkpoint).suffix in (".pt", ".pth", ".bin", ".safetensors")
    tried = f"There is no {'file' if of_weights else 'folder'} {checkpoint!r}"
    if words := path_words(checkpoint):
        return f"{tried} to load a {kind} from{words}"
    if errors.HFValidationError in kinds:
        return f"{tried}, and the name is not the id of a {kind} on the Hub, such as openai/clip-vit-base-patch32."
    if errors.LocalEntryNotFoundError in kinds:
        return (
            f"{tried}, no {kind} of this name was downloaded before, and the Hub could not be reached. Check the name. "
            f"Without a network, run `hf download {f'{checkpoint} {needed}'.strip()}` on a machine that has one, and "
            f"pass {'the folder of the printed file' if needed else 'the printed folder'}."
        )
    if errors.RepositoryNotFoundError in kinds:
        return (
            f"{tried}, and the Hub has no {kind} of this name that you may read. Check the name. If the {kind} is "
            "private, log in with `hf auth login`."
        )
    return f"The {kind} {checkpoint!r} cannot be loaded: {reason}"


_SPARE = 128  # tables of tokens are padded to multiples of up to this
_OF_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_SHOWN = 3


def load_model(
    checkpoint: str,
    *,
    dtype: torch.dtype | str = "auto",
    merges: bool = True,
    new_weights: Sequence[str] = (),
    seed: int = 0,
    tokenizer: str | None = None,
) -> tuple[Any, Any]:
    """Loads a complete model of transformers and its processor.

    Args:
        checkpoint: a folder or a Hub id of a model, or of adapters of peft, whose model is then loaded as well.
        dtype: of the weights; "auto" for that of the checkpoint.
        merges: whether adapters are merged into their model. Otherwise they stay around it, and train.
        new_weights: the names of weights, or of modules of these, that the checkpoint may lack. They are drawn as in a
            model that is created from the config, with this ``seed``.
        tokenizer: the folder or the Hub id of a tokenizer that replaces that of the processor.

    Raises:
        ValueError: they cannot be loaded; weights are missing, have other shapes, or are not finite; ``new_weights``
            names weights that are not missing; the tokenizer is not the model's.
    """
    base = base_of_adapters(checkpoint)
    if base is None:
        model = _complete(checkpoint, dtype, new_weights, seed)
    else:
        try:
            if base_of_adapters(base) is not None:
                raise ValueError(f"It holds adapters itself. Merge these first: infcl convert {base} MERGED.")
            model = _complete(base, dtype, new_weights, seed)
        except ValueError as error:
            raise ValueError(f"{checkpoint!r} holds adapters of {base!r}, which cannot be loaded. {error}") from error
        model = _with_trained_adapter(model, checkpoint)
        model = model.merge_and_unload() if merges else model
    return model.eval(), _processor(checkpoint, base, model.config, tokenizer)


def load_readers(checkpoint: str, tokenizer: str | None = None) -> tuple[transformers.PretrainedConfig, Any]:
    """The config of a dual encoder, or of that under adapters, and its processor; as `load_model`."""
    base = base_of_adapters(checkpoint)
    with explained(base or checkpoint, needed=CONFIG_NAME):
        config = transformers.AutoConfig.from_pretrained(base or checkpoint)
    check_type_of_config(config, checkpoint)
    return config, _processor(checkpoint, base, config, tokenizer)


def _processor(checkpoint: str, base: str | None, config: Any, tokenizer: str | None) -> Any:
    """The processor of a model, or of its adapters if they have one; a named tokenizer gets the old one's limit."""
    whether_or_not = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if base is not None and not any(cached_file(checkpoint, name, **whether_or_not) for name in _OF_PROCESSORS):
        checkpoint = base
    with explained(checkpoint):
        processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    if tokenizer is not None:
        new, rows = named_tokenizer(tokenizer), getattr(config.text_config, "vocab_size", None)
        if rows is not None:
            check_length(new, rows, exact=False)
        new.model_max_length = min(new.model_max_length, processor.tokenizer.model_max_length)
        processor.tokenizer = new
    fit_tokenizer(processor.tokenizer, config, is_of_model=tokenizer is None)
    return processor


@asks_hub_once
def named_tokenizer(name: str) -> Any:
    """The tokenizer in a folder, or of a Hub id; a ValueError says why it cannot be loaded."""
    with explained(name, kind="tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(name)


def check_length(tokenizer: Any, rows: int, *, exact: bool) -> None:
    """Raises ValueError if the tokenizer has more tokens than the model, or with ``exact`` many fewer."""
    extra = set(tokenizer.added_tokens_encoder) - {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    length = 1 + max(index for token, index in tokenizer.get_vocab().items() if token not in extra)
    if length > rows or (exact and length + _SPARE <= rows):
        raise ValueError(
            f"The tokenizer has {length:,} tokens and the text tower {rows:,} token embeddings, so they do not belong "
            "together. Take the tokenizer with which the model was trained."
        )


@asks_hub_once
def base_of_adapters(checkpoint: str) -> str | None:
    """The folder or Hub id of the model on which adapters of peft were trained; None for whatever is no adapters.

    Raises:
        ValueError: the adapters do not name it, or a whole model lies beside them.
    """
    if Path(checkpoint).is_file() or checkpoint.startswith(HUB):  # of OpenCLIP
        return None
    with explained(checkpoint):
        config_file = find_adapter_config_file(checkpoint)
        if config_file is None:
            return None
        base: str | None = json.loads(Path(config_file).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{checkpoint!r} holds adapters, and its {ADAPTER_CONFIG_NAME} does not name their model. Write the folder "
            "or the Hub id of that model there as base_model_name_or_path."
        )
    if Path(checkpoint, CONFIG_NAME).is_file():
        raise ValueError(
            f"{checkpoint!r} holds a whole model ({CONFIG_NAME}) and adapters ({ADAPTER_CONFIG_NAME}), so it is not "
            "clear which is meant. Move one of them to a folder of its own."
        )
    return base


def _with_trained_adapter(base: transformers.PreTrainedModel, adapter: str) -> Any:
    """The model with an adapter of peft. All that the adapter's file holds trains, such as a ``logit_scale``."""
    try:
        import peft
    except ImportError:
        raise ValueError(f"{adapter} is an adapter of the package peft: pip install peft.") from None
    try:
        model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True, torch_device="cpu")
        held = peft.load_peft_weights(adapter, device="cpu")
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{adapter} is not an adapter of the start, because it cannot be added: {error}") from error
    needed = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    parameters = dict(model.named_parameters())
    missing = [name for name in needed if name not in held]
    strange = [name for name in held if name not in needed and name not in parameters and "lora_" in name]
    for names, words in ((missing, "lacks"), (strange, "is not one of this model: it also has")):
        if names:
            raise ValueError(
                f"The adapter {adapter} {words} {listed(names, _SHOWN)}. Name the adapter as it was saved, and the "
                "model on which it was trained."
            )
    check_finite(adapter, held)
    for name in held.keys() & parameters.keys():
        parameters[name].requires_grad_(True)
    return model


def _complete(checkpoint: str, dtype: torch.dtype | str, new_weights: Sequence[str], seed: int) -> Any:
    with explained(checkpoint), torch.random.fork_rng(devices=()):  # it also draws what it reports as missing
        model, report = transformers.AutoModel.from_pretrained(
            checkpoint, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    state: dict[str, Tensor] = model.state_dict()
    # The tensors that the checkpoint lacks, or has in another shape. Whole numbers, such as position_ids, are no
    # weights: the model computes them.
    lacking = {name: "" for name in sorted(report["missing_keys"]) if state[name].is_floating_point()}
    lacking |= {name: f" ({tuple(has)} instead of {tuple(wanted)})" for name, has, wanted in report["mismatched_keys"]}
    named = {asked: [name for name in lacking if f"{name}.".startswith(f"{asked}.")] for asked in new_weights}
    new = {name for names in named.values() for name in names}
    if left := {name: how for name, how in lacking.items() if name not in new}:
        raise ValueError(_incomplete(checkpoint, model, left, report))
    for asked, names in named.items():
        if not names:
            which = f", which are {listed(sorted(new), _SHOWN)}" if new else ""
            raise ValueError(f"--new_weights {asked} names no weights that {checkpoint!r} lacks{which}. Omit it.")
    if new:  # as in a model that is created from the config
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            created = transformers.AutoModel.from_config(model.config).state_dict()
            model.load_state_dict({name: created[name] for name in new}, strict=False)
    check_finite(checkpoint, state)
    return model


def check_finite(checkpoint: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises a ValueError if a tensor of the checkpoint holds values that are not finite, which would spread."""
    # aminmax passes NaN on, and reads the weights once and without a copy.
    wrong = [name for name, one in tensors.items() if one.numel() and not all(end.isfinite() for end in one.aminmax())]
    if wrong:
        count = int((~tensors[wrong[0]].isfinite()).sum())
        raise ValueError(
            f"{checkpoint!r} holds weights that are NaN or infinite: {listed(wrong, _SHOWN)} ({count:,} of "
            f"{tensors[wrong[0]].numel():,} values of {wrong[0]}). Name a checkpoint that was saved before."
        )


def _incomplete(checkpoint: str, model: nn.Module, lacking: Mapping[str, str], report: Mapping[str, Any]) -> str:
    kind, saved_as = type(model).__name__, getattr(model.config, "architectures", None) or []
    unexpected = sorted(report["unexpected_keys"])
    shown = listed([name + how for name, how in lacking.items()], _SHOWN)
    words = f"{checkpoint!r} lacks weights of a {kind}: {shown}."
    if saved_as and kind not in saved_as:
        words += f" It was saved as a {' and '.join(saved_as)}."
    first = next(iter(lacking))
    prefix = next((name.removesuffix(first) for name in unexpected if name.endswith(first)), "")
    if prefix and all(prefix + name in unexpected for name in lacking):
        words += f" The names in its file begin with {prefix!r}, as those of a wrapper. Save the model inside it."
    elif unexpected:
        words += f" Its file has other names, such as {unexpected[0]}."
    tops = sorted({name.partition(".")[0] for name in lacking})
    words += " Name a checkpoint of the whole model, as save_pretrained writes it."
    if not any(top.endswith(("_model", "_encoder")) for top in tops):  # no tower
        words += f" `infcl train --new_weights {' '.join(tops)}` draws them anew for a training."
    return words
