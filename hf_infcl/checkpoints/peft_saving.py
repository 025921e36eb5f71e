"""Saves what trains beside the adapters of a peft model, such as logit_scale, in the adapter's file.

peft saves its adapters and whole modules (``modules_to_save``), but no single parameter of the model that they adapt.
When it loads an adapter, it also loads the values of any other parameter that the file contains. So
``PeftModel.from_pretrained``, a resumed training and the loading of the best model all restore them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, is_peft_available

if TYPE_CHECKING:
    from peft import PeftModel


def beside_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters that peft does not save with an adapter, by name; empty if ``model`` is not peft's."""
    if not is_peft_available():
        return {}
    import peft

    if not isinstance(model, peft.PeftModel):
        return {}
    named: dict[str, Any] = dict(model.named_parameters())
    saved = {
        id(value)
        for name in model.peft_config
        for value in peft.get_peft_model_state_dict(
            model, state_dict=named, adapter_name=name, save_embedding_layers=False
        ).values()
    }
    return {name: p for name, p in named.items() if p.requires_grad and id(p) not in saved}


def add_beside_adapters(folder: str | Path, model: PeftModel, state_dict: Mapping[str, Tensor]) -> None:
    """Adds the values of `beside_adapters` to the files of all adapters that ``save_pretrained`` has written.

    ``state_dict`` has the whole values of the parameters, by their names in the model.
    """
    values = {name: state_dict[name].detach().cpu().contiguous() for name in beside_adapters(model)}
    if not values:
        return
    for adapter in model.peft_config:
        file = Path(folder, "" if adapter == "default" else adapter, ADAPTER_SAFE_WEIGHTS_NAME)
        if file.is_file():  # a subclass may save some of the adapters only
            save_file({**load_file(file), **values}, file, metadata={"format": "pt"})
