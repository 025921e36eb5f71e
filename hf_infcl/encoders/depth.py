"""How deep a parameter is in its tower, by which the first layers are frozen."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import nn

_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.")  # the outermost numbered module of a parameter


def depths(names: Iterable[str]) -> tuple[dict[str, int], int]:
    """The depth of each parameter of a tower, and the number of layers of the tower.

    The layers are the numbered modules (``layers.0.``, ``blocks.1.``) of which there are most; in a GroupViT they are
    its stages. The parameters of layer l of L, counted from 1, have the depth l. What comes before the layers, such as
    embeddings, has the depth 0, and what comes after them, such as the last norm and the pooling, L + 1.

    Args:
        names: of the parameters, in the order of their modules.
    """
    names = list(names)
    layers = _layers(names)
    count = max(layers.values(), default=0)
    depth_of: dict[str, int] = {}
    is_before = bool(layers)
    for name in names:
        is_before &= name not in layers
        depth_of[name] = 0 if is_before else layers.get(name, count + 1)
    return depth_of, count


def _layers(names: Iterable[str]) -> dict[str, int]:
    """The number of its layer, from 1, by the name of each parameter in one."""
    numbered: dict[str, dict[str, int]] = defaultdict(dict)
    for name in names:
        if match := _NUMBERED.match(name):
            numbered[match[1]][name] = int(match[2]) + 1
    return max(numbered.values(), key=lambda layers: len(set(layers.values())), default={})


def frozen_begin(tower: nn.Module) -> Iterator[nn.Module]:
    """The largest modules up to the last of the frozen first layers of a tower; none if its first layer trains."""
    if any(p.requires_grad for p in itertools.islice(tower.parameters(), 1)):
        return  # the usual case
    depth_of, layers = depths(dict(tower.named_parameters()))
    first_trained = min((depth_of[n] for n, p in tower.named_parameters() if p.requires_grad), default=layers + 1)
    if first_trained < 2:
        return
    waiting = dict(tower.named_children())
    while waiting:
        name, module = waiting.popitem()
        depths_within = [depth for n, depth in depth_of.items() if n.startswith(f"{name}.")]
        if depths_within and max(depths_within) < first_trained:
            yield module
        elif depths_within and min(depths_within) < first_trained:
            waiting |= {f"{name}.{child}": part for child, part in module.named_children()}
