"""Complete models of transformers, and adapters of peft with the model under them.

transformers fills what a checkpoint lacks at random, or leaves it as it lies in memory, such as a logit_scale, and only
warns. Here such a checkpoint is refused, unless a training asks for new weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoProcessor, PretrainedConfig, PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, find_adapter_config_file

from ..hub import asks_hub_once
from ..shards.values import listed
from .folders import HUB, explained

_OF_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_SHOWN = 3


def load_pretrained(
    checkpoint: str,
    *,
    dtype: torch.dtype | str = "auto",
    merges: bool = True,
    new_weights: Sequence[str] = (),
    seed: int = 0,
) -> tuple[Any, Any]:
    """Loads a complete model of transformers and its processor.

    Args:
        checkpoint: a folder or a Hub id of a model, or of adapters of peft, whose model is then loaded as well.
        dtype: of the weights; "auto" for that of the checkpoint.
        merges: whether adapters are merged into their model. Otherwise they stay around it, and train.
        new_weights: the names of weights, or of modules of these, that the checkpoint may lack. They are drawn as in a
            model that is created from the config, with this ``seed``.

    Raises:
        ValueError: they cannot be loaded; weights are missing, have other shapes, or are not finite; ``new_weights``
            names weights that are not missing.
    """
    base = base_of_adapters(checkpoint)
    model = _complete(base or checkpoint, dtype, new_weights, seed, adapters=checkpoint if base else None)
    if base is not None:
        model = with_trained_adapter(model, checkpoint)
        model = model.merge_and_unload() if merges else model
    return model.eval(), load_processor(checkpoint, base)


def load_pretrained_config(checkpoint: str, base: str | None) -> PretrainedConfig:
    """The config of a model of transformers, or of the model ``base`` under adapters; raises as `load_pretrained`."""
    with explained(base or checkpoint, needed=CONFIG_NAME):
        return AutoConfig.from_pretrained(base or checkpoint)


def load_processor(checkpoint: str, base: str | None) -> Any:
    """The processor of a model of transformers; with adapters theirs or, if they have none, that of their model."""
    if base is not None and not any(_has_file(checkpoint, name) for name in _OF_PROCESSORS):
        checkpoint = base
    with explained(checkpoint):
        return AutoProcessor.from_pretrained(checkpoint)


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


def with_trained_adapter(base: PreTrainedModel, adapter: str) -> Any:
    """The model with a trained adapter of peft, in which everything trains that the adapter's file holds.

    That is the adapter, and what was trained beside it, such as ``logit_scale``.

    Raises:
        ValueError: peft is not installed, the adapter is not one of this model, or its file lacks tensors or holds some
            that are not finite.
    """
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


def _complete(
    checkpoint: str, dtype: torch.dtype | str, new_weights: Sequence[str], seed: int, adapters: str | None
) -> Any:
    try:
        if adapters is not None and base_of_adapters(checkpoint) is not None:
            raise ValueError(f"It holds adapters itself. Merge these first: infcl convert {checkpoint} MERGED.")
        with explained(checkpoint), torch.random.fork_rng(devices=()):  # it also draws what it reports as missing
            model, report = AutoModel.from_pretrained(
                checkpoint, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
        lacking = _lacking(model, report)
        new = [name for name in lacking if any(f"{name}.".startswith(f"{asked}.") for asked in new_weights)]
        _check_complete(checkpoint, model, {name: lacking[name] for name in lacking if name not in new}, report)
        for asked in new_weights:
            if not any(f"{name}.".startswith(f"{asked}.") for name in new):
                which = f", which are {listed(sorted(new), _SHOWN)}" if new else ""
                raise ValueError(f"--new_weights {asked} names no weights that {checkpoint!r} lacks{which}. Omit it.")
    except ValueError as error:
        if adapters is None:
            raise
        raise ValueError(f"{adapters!r} holds adapters of {checkpoint!r}, which cannot be loaded. {error}") from error
    state: dict[str, Tensor] = model.state_dict()
    if new:  # as in a model that is created from the config
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            created = AutoModel.from_config(model.config).state_dict()
            for name in new:
                state[name].copy_(created[name])
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
            f"{tensors[wrong[0]].numel():,} values of {wrong[0]}). Leave this checkpoint out, and name one that was "
            "saved before."
        )


def _lacking(model: nn.Module, report: Mapping[str, Any]) -> dict[str, str]:
    """What the checkpoint lacks, by name: "", or in which shape it has it instead.

    Whole numbers, such as position_ids, are no weights: the model computes them.
    """
    state: dict[str, Tensor] = model.state_dict()
    lacking = {name: "" for name in sorted(report["missing_keys"]) if state[name].is_floating_point()}
    for name, shape, wanted in report["mismatched_keys"]:
        lacking[name] = f" ({tuple(shape)} instead of {tuple(wanted)})"
    return lacking


def _check_complete(checkpoint: str, model: nn.Module, lacking: Mapping[str, str], report: Mapping[str, Any]) -> None:
    """Raises a ValueError if the checkpoint lacks weights."""
    if not lacking:
        return
    kind, saved_as = type(model).__name__, getattr(model.config, "architectures", None) or []
    unexpected = sorted(report["unexpected_keys"])
    words = (
        f"{checkpoint!r} lacks weights of a {kind}: {listed([name + how for name, how in lacking.items()], _SHOWN)}."
    )
    if saved_as and kind not in saved_as:
        words += f" It was saved as a {' and '.join(saved_as)}."
    if prefix := _prefix_of_all(unexpected, lacking):
        words += f" The names in its file begin with {prefix!r}, as those of a wrapper. Save the model inside it."
    elif unexpected:
        words += f" Its file has other names, such as {unexpected[0]}."
    tops = sorted({name.partition(".")[0] for name in lacking})
    words += " Name a checkpoint of the whole model, as save_pretrained writes it."
    if not any(top.endswith(("_model", "_encoder")) for top in tops):  # no tower
        words += f" `infcl train --new_weights {' '.join(tops)}` draws them anew for a training."
    raise ValueError(words)


def _prefix_of_all(unexpected: Sequence[str], lacking: Mapping[str, str]) -> str | None:
    """What stands before the name of every weight that is missing, if the file has all of them with it."""
    for name in lacking:
        for other in unexpected:
            if other.endswith(name):
                prefix = other.removesuffix(name)
                return prefix if prefix and all(prefix + one in unexpected for one in lacking) else None
    return None


def _has_file(checkpoint: str, name: str) -> bool:
    if Path(checkpoint).is_dir():
        return Path(checkpoint, name).is_file()
    try:
        hf_hub_download(checkpoint, name)
    except EntryNotFoundError:
        return False
    return True
