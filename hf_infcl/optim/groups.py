"""Which parameters Muon updates, and which AdamW: by the role that a parameter has in its module, not by its name."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

# The role of a parameter in its model.
LAYERS, FUSED = "matrices of layers", "fused query, key and value"
EMBEDDINGS, ADAPTERS, VECTORS = "embeddings and convolutions", "adapters", "vectors and scalars"
BY_MUON = (LAYERS, FUSED)

Group = dict[str, Any]  # the parameters of an optimizer that share settings, as torch holds them
NAMES = {"muon": "Muon", "adamw": "AdamW"}
_ALL = "all parameters"  # the name of a group that has none


def roles(model: nn.Module) -> dict[str, str]:
    """The role of each trained parameter by its name.

    The weights of linear layers are matrices of layers, the projections among them. Those that compute query, key and
    value at once are three: ``in_proj_weight`` of `torch.nn.MultiheadAttention`, as in SigLIP's pooling head, and
    within a module of attention a linear layer with three times as many outputs as inputs, as in BLIP. Everything
    below a module whose class is called embeddings, such as the patches of SigLIP 2, every other parameter with two or
    more dimensions (tables, convolutions, tokens), and weights with a single row or column are left to AdamW, also if
    a linear layer shares them. So are PEFT's adapters.
    """
    modules = dict(model.named_modules())
    role_of: dict[int, str] = {}
    for name, module in modules.items():
        words = name.split(".") if name else []
        path = [modules[".".join(words[:length])] for length in range(len(words) + 1)]  # from the model to the module
        for parameter in module.parameters(recurse=False):
            role = _role(path, parameter)
            if id(parameter) not in role_of or role not in BY_MUON:  # a table stays one that a layer shares
                role_of[id(parameter)] = role
    return {name: role_of[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def _role(path: Sequence[nn.Module], parameter: Tensor) -> str:
    module, kinds = path[-1], [type(m).__name__ for m in path]
    if parameter.ndim < 2:
        return VECTORS
    if _is_adapter(path):
        return ADAPTERS
    embeds = any(re.search(r"(Embeddings?|PatchEmbed)$", kind) for kind in kinds)
    if embeds or parameter.ndim != 2 or min(parameter.shape) == 1:
        return EMBEDDINGS
    if isinstance(module, nn.MultiheadAttention) and parameter is module.in_proj_weight:
        return FUSED
    if not isinstance(module, nn.Linear):
        return EMBEDDINGS
    in_attention = any(kind.endswith("Attention") for kind in kinds)
    return FUSED if in_attention and parameter.size(0) == 3 * parameter.size(1) else LAYERS


def _is_adapter(path: Sequence[Any]) -> bool:
    """Whether the last module of a path belongs to an adapter of PEFT, whose layers name the adapters in them."""
    return any(
        any(kind.__name__ == "BaseTunerLayer" for kind in type(layer).__mro__)
        and any(part is getattr(layer, name, None) for name in layer.adapter_layer_names)
        for layer, part in pairwise(path)
    )


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    muon_learning_rate: float,
    weight_decay: float,
    decaying: Collection[str],
    to_muon: Sequence[str] = (),
    to_adamw: Sequence[str] = (),
) -> list[Group]:
    """The groups of a `MuonAdamW` for the trained parameters of a model, AdamW's before Muon's.

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
    by_muon, by_adamw = matching(role_of, "muon", to_muon), matching(role_of, "adamw", to_adamw)
    if both := by_muon & by_adamw:
        raise ValueError(f"{min(both)} is to be updated by Muon and by AdamW. Let patterns of only one match it.")
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, role in role_of.items():
        parameter = model.get_parameter(name)
        of_muon = name in by_muon or (role in BY_MUON and name not in by_adamw)
        algorithm = "muon" if of_muon else "adamw"
        if of_muon and parameter.ndim != 2:
            raise ValueError(
                f"{name} has the shape {tuple(parameter.shape)}, but Muon updates matrices only. Leave it to AdamW."
            )
        decays = name in decaying
        new: Group = {
            "params": [],
            "name": role,
            "algorithm": algorithm,
            "lr": muon_learning_rate if of_muon else learning_rate,
            "weight_decay": weight_decay if decays else 0.0,
            **({"parts": 3 if role == FUSED else 1} if of_muon else {}),
        }
        groups.setdefault((algorithm, role, decays), new)["params"].append(parameter)
    if not any(group["algorithm"] == "muon" for group in groups.values()):
        adapters = ADAPTERS in role_of.values()
        cure = "Train it with AdamW, which is the default of optimizer"
        cure = f"Adapters are left to AdamW, unless muon_parameters names them ('lora_'). {cure}" if adapters else cure
        raise ValueError(
            "Muon would update nothing: it updates matrices of layers, and no trained parameter of this model is one. "
            f"{cure}."
        )
    return sorted(groups.values(), key=lambda group: group["algorithm"])


def matching(names: Iterable[str], use: str, patterns: Sequence[str]) -> set[str]:
    """The names in which one of the regular expressions is found.

    Raises a ValueError, which names ``use``, if a pattern is no regular expression, or is found in no name.
    """
    every, chosen = list(names), set()
    for pattern in patterns:
        try:
            matches = {name for name in every if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}.") from error
        if not matches:
            raise ValueError(f"{pattern!r}, for {use}, is found in the name of no trained parameter.")
        chosen |= matches
    return chosen


def divided(groups: Iterable[Group], parts: Mapping[nn.Parameter, tuple[str, float]]) -> list[Group]:
    """The groups of any optimizer before its first step, divided by parts of the model with rates of their own.

    ``parts`` has, for a parameter, the name of its part and the factor of its learning rate; others keep their rate.
    Groups at the full rate come first, because it is the rate of the first one that is logged.
    """
    pairs = []
    for group in groups:
        of_part: dict[tuple[str, float], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            of_part.setdefault(parts.get(parameter, ("", 1.0)), []).append(parameter)
        for (part, factor), parameters in of_part.items():
            name = ", ".join(word for word in (part, group.get("name", "")) if word)
            pairs.append((factor, {**group, "params": parameters, "name": name, "lr": group["lr"] * factor}))
    return [group for _, group in sorted(pairs, key=lambda pair: pair[0] != 1)]


# ---- Groups in words ----


def table_of_groups(groups: Iterable[Group], optimizer: str = "AdamW") -> str:
    """Which parameters the groups of an optimizer hold, with their rates and weight decays.

    Groups with one name, such as the layers of a tower with their rates, or the matrices and the biases of which only
    the former decay, share a line. A last sentence tells of single numbers, such as logit_scale. With a schedule, the
    rates are those that it starts from. The optimizer updates the groups that name no algorithm.
    """
    rows = [("parameters", "updated by", "tensors", "values", "learning rate", "weight decay")]
    single = []
    for (name, algorithm), alike in sorted(_alike(groups, optimizer).items(), key=_by_tower_and_rate):
        parameters = [p for group in alike for p in group["params"]]
        values = sum(p.numel() for p in parameters)
        if values <= len(parameters):
            what = "others" if name == _ALL else name
            single.append(f"{what} ({values} value{'s' if values > 1 else ''}, learning rate {_rates(alike)})")
        else:
            rows.append((name, algorithm, f"{len(parameters):,}", f"{values:,}", _rates(alike), _decays(alike)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Words to the left, numbers to the right.
    form = "  ".join(f"{{:{'<' if n < 2 else '>'}{width}}}" for n, width in enumerate(widths))
    table = [form.format(*row) for row in rows] if len(rows) > 1 else []
    return "\n".join([*table, *([f"Besides: {'; '.join(single)}."] if single else [])])


def words_of_groups(groups: Iterable[Group]) -> dict[str, str]:
    """What Muon and AdamW update, in words; nothing for the groups of another optimizer."""
    words: dict[str, list[str]] = {}
    for (name, algorithm), alike in _alike((g for g in groups if "algorithm" in g), "").items():
        count = sum(len(group["params"]) for group in alike)
        words.setdefault(f"updated by {algorithm}", []).append(f"{name} ({count:,}, learning rate {_rates(alike)})")
    return {title: "; ".join(named) for title, named in words.items()}


def _alike(groups: Iterable[Group], optimizer: str) -> dict[tuple[str, str], list[Group]]:
    """The groups that are not empty, by name and algorithm."""
    groups_by_name: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        if group["params"]:
            algorithm = NAMES[group["algorithm"]] if "algorithm" in group else optimizer
            groups_by_name.setdefault((group.get("name") or _ALL, algorithm), []).append(group)
    return groups_by_name


def _by_tower_and_rate(named: tuple[tuple[str, str], list[Group]]) -> tuple[str, float]:
    (name, _), groups = named
    tower = name.split()[0]
    return tower if tower in ("image", "text") else "", min(map(_rate, groups))


def _rate(group: Group) -> float:
    return float(group["initial_lr"] if "initial_lr" in group else group["lr"])


def _rates(groups: Iterable[Group]) -> str:
    rates = sorted(set(map(_rate, groups)))
    return " to ".join(f"{rate:g}" for rate in (rates if len(rates) < 2 else (rates[0], rates[-1])))


def _decays(groups: Iterable[Group]) -> str:
    """The weight decays, with the number of values that have each if they differ."""
    values = Counter[float]()
    for group in groups:
        values[group.get("weight_decay", 0.0)] += sum(p.numel() for p in group["params"])
    if len(values) == 1:
        return f"{next(iter(values)):g}"
    return ", ".join(f"{decay:g} for {count:,}" for decay, count in sorted(values.items(), reverse=True) if decay)
