"""Which parameters Muon updates, and which AdamW: by the role that a parameter has in its module, not by its name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

LAYERS, FUSED = "matrices of layers", "fused query, key and value"
EMBEDDINGS, ADAPTERS, VECTORS = "embeddings and convolutions", "adapters", "vectors and scalars"
BY_MUON = (LAYERS, FUSED)


@dataclass(frozen=True)
class Role:
    """What a parameter is in its model.

    Attributes:
        name: one of the words of this module.
        parts: the matrices of which it consists, one below the other.
    """

    name: str
    parts: int = 1


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of each trained parameter by its name.

    The weights of linear layers are matrices of layers, the projections among them. Those that compute query, key and
    value at once are three: ``in_proj_weight`` of `torch.nn.MultiheadAttention`, as in SigLIP's pooling head, and
    within a module of attention a linear layer with three times as many outputs as inputs, as in BLIP. Everything
    below a module whose class is called embeddings, such as the patches of SigLIP 2, every other parameter with two or
    more dimensions (tables, convolutions, tokens), and weights with a single row or column are left to AdamW, also if
    a linear layer shares them. So are PEFT's adapters.
    """
    modules = dict(model.named_modules())
    found: dict[int, Role] = {}
    for name, module in modules.items():
        words = name.split(".") if name else []
        path = [modules[".".join(words[:length])] for length in range(len(words) + 1)]  # from the model to the module
        for parameter in module.parameters(recurse=False):
            role = _role(path, parameter)
            if id(parameter) not in found or role.name not in BY_MUON:  # a table stays one that a layer shares
                found[id(parameter)] = role
    return {name: found[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def _role(path: Sequence[nn.Module], parameter: Tensor) -> Role:
    module, kinds = path[-1], [type(m).__name__ for m in path]
    if parameter.ndim < 2:
        return Role(VECTORS)
    if _is_adapter(path):
        return Role(ADAPTERS)
    embeds = any(re.search(r"(Embeddings?|PatchEmbed)$", kind) for kind in kinds)
    if embeds or parameter.ndim != 2 or min(parameter.shape) == 1:
        return Role(EMBEDDINGS)
    if isinstance(module, nn.MultiheadAttention) and parameter is module.in_proj_weight:
        return Role(FUSED, parts=3)
    if not isinstance(module, nn.Linear):
        return Role(EMBEDDINGS)
    in_attention = any(kind.endswith("Attention") for kind in kinds)
    return Role(FUSED, parts=3) if in_attention and parameter.size(0) == 3 * parameter.size(1) else Role(LAYERS)


def _is_adapter(path: Sequence[nn.Module]) -> bool:
    """Whether the last module of a path belongs to an adapter of PEFT, whose layers name the adapters in them."""
    names: Any
    for layer, part in pairwise(path):
        names = getattr(layer, "adapter_layer_names", ())
        is_layer = any(kind.__name__ == "BaseTunerLayer" for kind in type(layer).__mro__)
        if is_layer and any(part is getattr(layer, name, None) for name in names):
            return True
    return False


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    muon_learning_rate: float,
    weight_decay: float,
    decaying: Collection[str],
    to_muon: Sequence[str] = (),
    to_adamw: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The groups of a `MuonAdamW` for the trained parameters of a model, those of AdamW first.

    Args:
        model: unwrapped; PEFT adapters inside are fine.
        learning_rate, muon_learning_rate: the rates of AdamW's and of Muon's groups.
        weight_decay: of the parameters whose names are in ``decaying``; the others do not decay.
        to_muon, to_adamw: regular expressions. The parameters in whose names one of them is found are updated by that
            algorithm, whatever their role.

    Raises:
        ValueError: no parameter is left to Muon; a pattern is no regular expression or is found in no name; patterns of
            both algorithms are found in one name; a parameter that is moved to Muon is no matrix.
    """
    role_of = roles(model)
    moved = dict.fromkeys(_matching(role_of, "muon", to_muon), "muon")
    for name in _matching(role_of, "adamw", to_adamw):
        if name in moved:
            raise ValueError(
                f"{name} is to be updated by Muon and by AdamW. Let patterns of only one of them match it."
            )
        moved[name] = "adamw"
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if (role := role_of.get(name)) is None:
            continue
        algorithm = moved.get(name, "muon" if role.name in BY_MUON else "adamw")
        if algorithm == "muon" and parameter.ndim != 2:
            raise ValueError(
                f"{name} has the shape {tuple(parameter.shape)}, but Muon updates matrices only. Leave it to AdamW."
            )
        decays = name in decaying
        new = {
            "params": [],
            "name": role.name,
            "algorithm": algorithm,
            "lr": muon_learning_rate if algorithm == "muon" else learning_rate,
            "weight_decay": weight_decay if decays else 0.0,
            **({"parts": role.parts} if algorithm == "muon" else {}),
        }
        groups.setdefault((algorithm, role, decays), new)["params"].append(parameter)
    if not any(group["algorithm"] == "muon" for group in groups.values()):
        adapters = any(role.name == ADAPTERS for role in role_of.values())
        cure = "Adapters are left to AdamW; a pattern moves them to Muon" if adapters else "Train it with AdamW"
        raise ValueError(
            "Muon would update nothing: it updates matrices of layers, and no trained parameter of this model is one. "
            f"{cure}."
        )
    return sorted(groups.values(), key=lambda group: group["algorithm"])


def _matching(names: Iterable[str], algorithm: str, patterns: Sequence[str]) -> set[str]:
    matching = set()
    for pattern in patterns:
        try:
            found = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}.") from error
        if not found:
            raise ValueError(f"{pattern!r}, for {algorithm}, is found in the name of no trained parameter.")
        matching |= found
    return matching


NAMES = {"muon": "Muon", "adamw": "AdamW"}


def table_of_groups(groups: Iterable[dict[str, Any]]) -> str:
    """Which parameters the groups of a `MuonAdamW` hold, with their rates and weight decays: one line for each group.

    With a schedule, the rates are those that it starts from.
    """
    rows = [("parameters", "updated by", "tensors", "values", "learning rate", "weight decay")]
    for group in groups:
        if parameters := group["params"]:
            numbers = f"{len(parameters):,}", f"{sum(p.numel() for p in parameters):,}"
            rows.append(
                (group["name"], NAMES[group["algorithm"]], *numbers, _rate(group), f"{group['weight_decay']:g}")
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Words to the left, numbers to the right.
    form = "  ".join(f"{{:{'<' if n < 2 else '>'}{width}}}" for n, width in enumerate(widths))
    return "\n".join(form.format(*row) for row in rows)


def words_of_groups(groups: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What Muon and AdamW update, in words; nothing for the groups of another optimizer."""
    words: dict[str, list[str]] = {}
    for group in groups:
        if group["params"] and "algorithm" in group:
            count, title = len(group["params"]), f"updated by {NAMES[group['algorithm']]}"
            words.setdefault(title, []).append(f"{group['name']} ({count:,}, learning rate {_rate(group)})")
    return {title: "; ".join(named) for title, named in words.items()}


def _rate(group: dict[str, Any]) -> str:
    return f"{float(group.get('initial_lr', group['lr'])):g}"
