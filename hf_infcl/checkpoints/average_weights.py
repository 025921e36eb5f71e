"""Weights between the start and the end of a fine-tuning, on one of two paths that join both.

``"line"`` (WiSE-FT, arXiv 2109.01903) scales every change alike: start + α·(end − start).

``"depth"`` (LiNeS, arXiv 2410.17146) scales the change of a layer by λ, which grows linearly with its depth, because
early layers hold what many tasks share. From α = 0.5 on, the last layer of a tower keeps its whole change and the first
one 2α − 1 of it, as in the paper; below, all changes of α = 0.5 shrink together, down to the start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from ..encoders.depth import depths
from ..shards.values import counted

Path = Literal["line", "depth"]
PATHS: tuple[str, ...] = get_args(Path)
_FACTORS_A, _FACTORS_B = {"lora_A", "lora_embedding_A"}, {"lora_B", "lora_embedding_B"}  # peft's names of B·A


def interpolated(
    start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float, path: str = "line"
) -> dict[str, Tensor]:
    """The weights at ``alpha`` on a path from ``start`` to ``end``; at 0 and 1, exactly those.

    What did not change stays as it is to the bit, as does all that was frozen. Changes are scaled in fp32 or a more
    exact dtype and rounded once. Running statistics of batch norms move like the weights; what is not floating, such as
    the counters of batch norms, is that of the end, or that of the start at 0.

    Args:
        start, end: tensors by name, with the same names and shapes; those of the end decide about order and dtypes.
        alpha: from 0, the start, to 1, the end.
        path: one of `PATHS`.

    Returns:
        New tensors for what changed, and those of ``end`` for the rest.

    Raises:
        ValueError: alpha or path is none; start and end differ in names or shapes; a path by depth has no layers.
    """
    check_alpha(alpha)
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}.")
    _check_same_model(start, end)
    scales = dict.fromkeys(end, alpha) if path == "line" else scales_by_depth(end, alpha)
    return {name: _between(start[name], tensor, scales[name], alpha) for name, tensor in end.items()}


def check_alpha(alpha: float) -> None:
    """Raises a ValueError unless alpha is in [0, 1]."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0, the weights of the start, to 1, those of the end, got {alpha}.")


def _check_same_model(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> None:
    if different := sorted(start.keys() ^ end.keys()):
        side = "start" if different[0] in start else "end"
        raise ValueError(
            f"Start and end are not the same model: {counted(len(different), 'weight')} without a counterpart, such "
            f"as {different[0]} of the {side}. Name the checkpoint from which the training began as the start."
        )
    for name, tensor in end.items():
        if start[name].shape != tensor.shape:
            raise ValueError(
                f"Start and end are not the same model: {name} has the shape {tuple(start[name].shape)} at the start "
                f"and {tuple(tensor.shape)} at the end. Name the checkpoint from which the training began as the start."
            )


def _between(start: Tensor, end: Tensor, scale: float, alpha: float) -> Tensor:
    start = start.to(end.device)
    if torch.equal(start, end):  # also of equal infinities, whose difference is no number
        return end
    if not end.is_floating_point():
        return start if alpha == 0 else end
    if scale == 0:
        return start.to(end.dtype, copy=True)  # torch.lerp would turn -0.0 into 0.0
    exact = torch.promote_types(end.dtype, torch.float32)
    return torch.lerp(start.to(exact), end.to(exact), scale).to(end.dtype)


def scales_by_depth(names: Iterable[str], alpha: float) -> dict[str, float]:
    """λ of each parameter at ``alpha`` on the path by depth.

    Layer l of L (see `hf_infcl.encoders.depth.depths`) has the depth (l − 1) / (L − 1). What comes before the layers of
    its tower has the depth 0. What comes after them, projections, and what belongs to no tower have the depth 1. The
    names are those of all parameters, in the order of their modules.

    Raises:
        ValueError: no tower has two layers.
    """
    towers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        towers[name.removeprefix("base_model.model.").partition(".")[0]].append(name)
    of_first, of_last = max(2 * alpha - 1, 0), min(2 * alpha, 1)
    scales: dict[str, float] = {}
    has_layers = False
    for tower in towers.values():
        of_tower, count = depths(tower)
        has_layers |= count > 1
        for name, depth in of_tower.items():
            relative = float(depth > 0) if count < 2 else min(max(depth - 1, 0) / (count - 1), 1.0)
            scales[name] = of_first + (of_last - of_first) * relative
    if not has_layers:
        raise ValueError(
            "The change cannot grow with the depth, because no tower of the model has two numbered layers, such as "
            "vision_model.encoder.layers.0 and .1. Take the path 'line', which scales every change alike."
        )
    return scales


def adapters_of_zero(end: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The start of a LoRA training, from its end: the same adapters with B = 0, which change nothing.

    LoRA adds B·A to a weight, so the adapters at α on the line between both change it by α times as much. Their tensors
    are named as peft saves them.

    Raises:
        ValueError: something else was trained with the adapters, of which the adapter does not hold the start.
    """
    if extras := [name for name in end if not (_FACTORS_A | _FACTORS_B) & set(name.split("."))]:
        raise ValueError(
            f"Only LoRA's factors A and B can be scaled, but the adapter also holds {', '.join(extras[:3])}. Merge it "
            "into the weights (infcl train --lora_merge) and average the whole models."
        )
    return {
        name: torch.zeros_like(tensor) if _FACTORS_B & set(name.split(".")) else tensor for name, tensor in end.items()
    }


def with_factors_of_end(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The start of a LoRA training, with the factors A of its end where B is 0, so that they change nothing.

    On the line from there to the end, an adapter changes a weight by α times B·A of the end. The tensors of a model
    without adapters stay as they are.
    """
    tensors = dict(start)
    for name in start:
        parts = name.split(".")
        if _FACTORS_A & set(parts):
            other = ".".join(part.replace("_A", "_B") if part in _FACTORS_A else part for part in parts)
            if not start[other].any():
                tensors[name] = end[name]
    return tensors


def check_new_adapters(start: Mapping[str, Tensor]) -> None:
    """Raises a ValueError if a training starts from adapters that change something, which have no line to their end.

    The average of the weights is that of the products B·A, which the average of the factors is not.
    """
    if any(_FACTORS_B & set(name.split(".")) and bool(tensor.any()) for name, tensor in start.items()):
        raise ValueError(
            "The adapters of the model were trained before, and the average of their factors is not that of the "
            "weights. Average both adapters after the training with `infcl average`, which merges them; or merge these "
            "into their model first (infcl convert) and train new ones (--lora_rank)."
        )


def running_statistics(state: Mapping[str, Tensor]) -> list[str]:
    """The names of the running means and variances of batch norms."""
    return [name for name in state if name.endswith((".running_mean", ".running_var"))]
