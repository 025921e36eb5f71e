"""Time and memory of an optimizer's step: AdamW, torch's Muon, and this package's, on the parameters of whole models.

    python scripts/benchmark.py optimizer
    torchrun --nproc-per-node 2 scripts/benchmark.py optimizer

Nothing runs but the step: weights and gradients are random, and the same on every process, as after DDP. ``AdamW`` is
torch's fused AdamW. The others update the matrices with Muon and the rest with fused AdamW: ``torch Muon`` is
`torch.optim.Muon`; ``hf_infcl`` is `hf_infcl.optim.MuonAdamW`, whose processes share the matrices; with ``redundant``
each orthogonalises all, and with ``compiled`` the iteration runs under torch.compile. ``state_mib`` is the optimizer's
state, ``peak_mib`` the memory of a step beyond weights, gradients and state, ``difference`` the largest relative
difference of a matrix's first update from that of `torch.optim.Muon`.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from hf_infcl.optim import MuonAdamW, parameter_groups
from hf_infcl.optim import muon as muon_adamw
from hf_infcl.processes.collectives import Processes

from . import common, inputs
from .common import Row

COLUMNS = """
    date commit device torch world_size model matrices matrix_values values implementation steps ms ms_p10 ms_p90
    state_mib peak_mib difference note
""".split()
IMPLEMENTATIONS = ("AdamW", "torch Muon", "hf_infcl", "hf_infcl redundant", "hf_infcl compiled")
RATE, DECAY = 0.02, 0.1
SO400M = {
    "vision_config": inputs.tower(1152, 4304, 27, 16, patch_size=14, image_size=384),
    "text_config": inputs.tower(1152, 4304, 27, 16, vocab_size=32000, projection_size=1152),
}
MODELS = ("vit-b-32", "vit-b-16", "vit-l-14", "so400m-14", "tiny")

Group = dict[str, Any]


def run(args: argparse.Namespace) -> Iterator[Row]:
    device = common.start_processes()
    environment = common.environment(device) | {"world_size": common.world_size()}
    for name in args.models:
        groups = random_groups(name, device)
        matrices = matrices_of(groups)
        size: Row = {
            "model": name,
            "matrices": len(matrices),
            "matrix_values": sum(p.numel() for p in matrices),
            "values": sum(p.numel() for g in groups for p in g["params"]),
        }
        expected = first_updates(groups, Both)
        for implementation in args.implementations:
            if implementation == "hf_infcl redundant" and common.world_size() == 1:
                continue  # there is nobody to share with
            row = environment | size | {"implementation": implementation}
            yield row | measured(implementation, groups, expected, device, args.seconds)
        del groups, matrices, expected


def random_groups(name: str, device: torch.device) -> list[Group]:
    """The groups of a model's parameters, with random values and gradients that are the same on every process."""
    with torch.device("meta"):
        if name == "so400m-14":
            model: nn.Module = transformers.SiglipModel(transformers.SiglipConfig(**SO400M))
        else:
            model = transformers.CLIPModel(transformers.CLIPConfig(**inputs.MODELS[name]))
    model.to_empty(device=device)
    g = torch.Generator(device).manual_seed(0)
    for p in model.parameters():
        p.data.normal_(0, 0.02, generator=g)
        p.grad = torch.randn(p.shape, device=device, generator=g)
    decaying = {name for name, p in model.named_parameters() if p.ndim > 1}
    rates = {"learning_rate": RATE, "muon_learning_rate": RATE, "weight_decay": DECAY}
    return parameter_groups(model, **rates, decaying=decaying)


def copies(groups: list[Group]) -> list[Group]:
    """The groups with copies of the parameters, and the same gradients."""
    copied = [{**group, "params": [nn.Parameter(p.detach().clone()) for p in group["params"]]} for group in groups]
    for group, new in zip(groups, copied, strict=True):
        for p, q in zip(group["params"], new["params"], strict=True):
            q.grad = p.grad
    return copied


class Both:
    """torch's Muon, one matrix after the other, and its fused AdamW."""

    def __init__(self, groups: list[Group]) -> None:
        parts = []
        for group in (g for g in groups if g["algorithm"] == "muon"):
            for p in group["params"]:
                for part, gradient in zip(p.detach().chunk(group["parts"]), p.grad.chunk(group["parts"]), strict=True):
                    parts.append(nn.Parameter(part))  # a view
                    parts[-1].grad = gradient
        self.muon = torch.optim.Muon(parts, RATE, DECAY, adjust_lr_fn="match_rms_adamw")
        rest = [g["params"] for g in groups if g["algorithm"] == "adamw"]
        self.adamw = torch.optim.AdamW([p for params in rest for p in params], RATE, fused=True)
        self.state = {**self.muon.state, **self.adamw.state}

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()
        self.state = {**self.muon.state, **self.adamw.state}


def optimizer(implementation: str, groups: list[Group]) -> Any:
    if implementation == "AdamW":
        return torch.optim.AdamW([p for g in groups for p in g["params"]], RATE, weight_decay=DECAY, fused=True)
    if implementation == "torch Muon":
        return Both(groups)
    shares = implementation != "hf_infcl redundant"
    return MuonAdamW(groups, RATE, DECAY, fused=True, processes=Processes() if shares else None)


def matrices_of(groups: list[Group]) -> list[nn.Parameter]:
    return [p for g in groups if g["algorithm"] == "muon" for p in g["params"]]


def first_updates(groups: list[Group], make: Callable[[list[Group]], Any]) -> list[Tensor]:
    """The change of each matrix by a step of the optimizer that is made."""
    copied = copies(groups)
    make(copied).step()
    return [q.detach() - p.detach() for p, q in zip(matrices_of(groups), matrices_of(copied), strict=True)]


def measured(
    implementation: str, groups: list[Group], expected: list[Tensor], device: torch.device, seconds: float
) -> Row:
    """The columns of an implementation; a note if memory did not suffice."""
    function = muon_adamw.orthogonalised
    if implementation == "hf_infcl compiled":
        function = torch.compile(function, dynamic=False)
    row: Row = {}
    torch._dynamo.reset()
    limit = torch._dynamo.config.patch(recompile_limit=100)  # one compilation for each shape of a stack
    with limit, mock.patch.object(muon_adamw, "orthogonalised", function):
        try:
            if implementation != "AdamW":
                found = first_updates(groups, lambda copied: optimizer(implementation, copied))
                differences = [(a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
                row["difference"] = f"{torch.stack(differences).max().item():.2g}"
                del found, differences
            own = optimizer(implementation, copies(groups))
            own.step()
            tensors = (value for s in own.state.values() for value in s.values() if isinstance(value, Tensor))
            row["state_mib"] = round(sum(value.nbytes for value in tensors) / common.MIB, 3)
            peak = common.peak_bytes(own.step, device)
            row["peak_mib"] = "" if peak is None else round(peak / common.MIB, 1)
            times = common.slowest_seconds(own.step, device, seconds)
        except torch.OutOfMemoryError:
            return {"note": "out of memory"}
    return row | {"steps": len(times)} | common.quantiles(times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=MODELS[:-1], choices=MODELS)
    parser.add_argument("--implementations", nargs="+", default=IMPLEMENTATIONS[:-1], choices=IMPLEMENTATIONS)
    parser.add_argument("--seconds", type=float, default=1.0, help="of repetitions for each row")
