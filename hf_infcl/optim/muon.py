"""`MuonAdamW`, an optimizer with groups of two algorithms: Muon's iteration, and which process computes it.

`orthogonalise_shared` and `orthogonalise_sharded` return equal results. They are generators: at a ``yield`` a transfer
is under way, during which the caller can advance other generators (see `interleaved`). The processes exchange bfloat16,
the dtype of the iteration, so that nothing is rounded on the way.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import ParamsT

from ..processes.collectives import Processes, gather_into
from .groups import Group

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x³ and x⁵: the steepest at zero that stay near one
STEPS = 5
EPSILON = 1e-7
Transfers = Generator[None, None, Tensor]
Updates = Callable[[slice], Sequence[Tensor]]  # the matrices of a range, [rows, columns] each, or this process's rows
Orthogonalise = Callable[[Tensor], Tensor]  # [n, rows, columns] to the same in bfloat16
_ENDED = object()
MOST_VALUES = 2**26  # that a process orthogonalises at a time: each of a few temporary stacks takes 128 MiB in bf16


def orthogonalised(stack: Tensor, steps: int = STEPS, parts: int = 1) -> Tensor:
    """The nearly orthogonal matrices to those of a stack, with singular values between about 0.7 and 1.2.

    The same operations in the same order as in `torch.optim.Muon`, for all matrices of the stack at once: a quintic
    Newton-Schulz iteration in bf16 (https://kellerjordan.github.io/posts/muon).

    Args:
        stack: [n, rows, columns] in any floating point dtype.
        parts: the matrices, one below the other, of which each one of the stack consists.

    Returns:
        [n, rows, columns] in bfloat16.
    """
    a, b, c = COEFFICIENTS
    X = stack.reshape(len(stack) * parts, stack.size(1) // parts, stack.size(2)).to(torch.bfloat16)
    tall = X.size(1) > X.size(2)
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)  # no singular value above one
    X = X.mT if tall else X  # X @ X.mT is then the smaller of the two products
    for _ in range(steps):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return (X.mT if tall else X).reshape(stack.shape)


# ---- Which process orthogonalises which matrices, and how all processes get the results ----


def local_part(tensor: Any) -> Tensor:
    """The rows of a tensor on this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def interleaved(tasks: Iterable[Generator[None, None, None]]) -> None:
    """Runs generators to their ends, each one ``yield`` ahead of the one that was started before it.

    What a generator does between two transfers thus overlaps with transfers of its neighbours, while only as many
    generators are alive as one of them yields.
    """
    running: list[Generator[None, None, None]] = []
    for task in tasks:
        running = [t for t in (task, *running) if next(t, _ENDED) is not _ENDED]
    while running:
        running = [t for t in running if next(t, _ENDED) is not _ENDED]


def orthogonalise_shared(
    updates: Updates, count: int, shape: tuple[int, int], function: Orthogonalise, processes: Processes
) -> Transfers:
    """Orthogonalises matrices that all processes hold: each process computes its share and receives the rest."""
    if processes.world_size == 1:
        return function(torch.stack(list(updates(slice(count)))))
    each = -(-count // processes.world_size)
    mine = updates(slice(processes.rank * each, (processes.rank + 1) * each))
    done = torch.zeros((each, *shape), dtype=torch.bfloat16, device=updates(slice(1))[0].device)
    if mine:
        done[: len(mine)] = function(torch.stack(list(mine)))
    everything = done.new_empty((processes.world_size * each, *shape))
    transfer = gather_into(everything, done, group=processes.group, async_op=True)
    yield
    transfer.wait()
    return everything[:count]


def orthogonalise_sharded(
    updates: Updates, count: int, shape: tuple[int, int], function: Orthogonalise, processes: Processes
) -> Transfers:
    """Orthogonalises matrices of which each process holds some rows, split as `torch.chunk` does.

    Each process receives the rows of its share of the matrices, orthogonalises these as a whole and returns the rows.
    The result is the rows of this process, [count, its rows, columns].
    """
    rows, columns = shape
    ranks, group, parts = processes.world_size, processes.group, updates(slice(count))
    each, height, have = -(-count // ranks), -(-rows // ranks), parts[0].size(0)
    # The shares and the rows are padded to equal sizes; what is padded is never orthogonalised.
    sent = torch.zeros((ranks * each, height, columns), dtype=torch.bfloat16, device=parts[0].device)
    sent[:count, :have] = torch.stack(list(parts))
    received = torch.empty_like(sent)  # [ranks (of the rows), each, height, columns]
    transfer = dist.all_to_all_single(received, sent, group=group, async_op=True)
    yield
    transfer.wait()
    whole = received.view(ranks, each, height, columns).transpose(0, 1).reshape(each, ranks * height, columns)
    mine = max(0, min(each, count - processes.rank * each))
    done = torch.zeros_like(whole)
    if mine:
        done[:mine, :rows] = function(whole[:mine, :rows])
    sent = done.view(each, ranks, height, columns).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)  # [ranks (of the matrices), each, height, columns]
    transfer = dist.all_to_all_single(received, sent, group=group, async_op=True)
    yield
    transfer.wait()
    return received.view(ranks * each, height, columns)[:count, :have]


# ---- The optimizer ----


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the groups with ``algorithm="muon"``, AdamW for the others.

    A group of Muon equals `torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"``, momentum 0.95 and Nesterov's
    momentum (arXiv 2502.16982), but matrices of one shape are orthogonalised together, which takes a fifth of the time.
    `torch.optim.AdamW` updates the other groups. Both read the settings of their groups, so schedules, clipping, a
    GradScaler and checkpoints need nothing else than with any other optimizer.

    FSDP2's sharded parameters are orthogonalised as whole matrices: each process gathers its share of them. The result
    is that of one process.

    Args:
        params: parameters, or groups of them. Besides AdamW's settings a group has ``algorithm``, "muon" or "adamw"
            (the default), and in a group of Muon:
            momentum (float): the weight of the past in the average of the gradients.
            ns_steps (int): the steps of the iteration that orthogonalises.
            parts (int): the matrices of which each parameter consists, one below the other, such as the 3 of the
            weight of a fused query, key and value; each of them is orthogonalised by itself.
        lr: the learning rate of groups without one.
        weight_decay: the decoupled weight decay of groups without one.
        betas, eps, fused: as in `torch.optim.AdamW`.
        momentum, ns_steps: the defaults of the groups of Muon.
        processes: processes that hold equal parameters and gradients (DDP). They divide the matrices among themselves
            and exchange the results in bfloat16. None orthogonalises all matrices on every process.

    Raises:
        ValueError: a parameter of a group of Muon is not a matrix, or cannot be divided into its parts; a setting is
            out of range; the algorithm is unknown.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
        momentum: float = 0.95,
        ns_steps: int = STEPS,
        processes: Processes | None = None,
    ) -> None:
        adamw = torch.optim.AdamW([torch.empty(0)], lr, betas, eps, weight_decay, fused=fused)
        self._defaults: dict[str, Group] = {
            "adamw": adamw.defaults,
            "muon": {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_steps": ns_steps, "parts": 1},
        }
        self._processes = processes or Processes(alone=True)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "algorithm": "adamw"})

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group; raises the errors of the constructor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if group["algorithm"] not in self._defaults:
                known = " or ".join(map(repr, self._defaults))
                raise ValueError(f"The algorithm of a group must be {known}, got {group['algorithm']!r}.")
            for name, value in self._defaults[group["algorithm"]].items():
                group.setdefault(name, value)
            if group["algorithm"] == "muon":
                _check(group)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Updates all parameters that have a gradient. With several processes, all of them have to call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muon, others = ([g for g in self.param_groups if g["algorithm"] == name] for name in ("muon", "adamw"))
        interleaved(batch for group in muon for batch in self._batches(group))
        if others:
            # accelerate replaces groups and parameters, so a second optimizer borrows them only for the step.
            adamw = torch.optim.AdamW([torch.empty(0)])
            adamw.param_groups, adamw.state = others, self.state
            adamw.step()
        return loss

    def _batches(self, group: Group) -> Iterator[Generator[None, None, None]]:
        """The updates of the matrices of a group, for as many of one shape at a time as memory should be used for."""
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is None:
                continue
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad, memory_format=torch.preserve_format)
            layout = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
            alike[tuple(p.shape), p.dtype, p.device, layout].append(p)
        for parameters in alike.values():
            if isinstance(parameters[0], DTensor):
                orthogonalise, processes = orthogonalise_sharded, Processes(_sharding_group(parameters[0]))
            else:
                orthogonalise, processes = orthogonalise_shared, self._processes
            most = max(1, MOST_VALUES // parameters[0].numel()) * processes.world_size
            for first in range(0, len(parameters), most):
                yield self._update(group, parameters[first : first + most], partial(orthogonalise, processes=processes))

    def _update(
        self, group: Group, parameters: list[Tensor], orthogonalise: Callable[..., Transfers]
    ) -> Generator[None, None, None]:
        """One step for parameters of one shape; at each ``yield`` a transfer is under way."""
        lr, momentum = float(group["lr"]), group["momentum"]
        shape = tuple(parameters[0].shape)
        weights = [local_part(p) for p in parameters]
        gradients = [local_part(p.grad) for p in parameters]
        averages = [local_part(self.state[p]["momentum_buffer"]) for p in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)

        def updates(chosen: slice) -> Sequence[Tensor]:
            mine = gradients[chosen], averages[chosen]
            return torch._foreach_lerp(*mine, momentum) if mine[0] else ()

        function = partial(orthogonalised, steps=group["ns_steps"], parts=group["parts"])
        orthogonal = yield from orthogonalise(updates, len(parameters), shape, function)
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        rate = lr * 0.2 * math.sqrt(max(shape[0] // group["parts"], shape[1]))
        # Of equal dtypes, the addition is one kernel for all matrices.
        torch._foreach_add_(weights, list(orthogonal.to(weights[0].dtype).unbind()), alpha=-rate)


def _check(group: Group) -> None:
    """Raises a ValueError if Muon cannot update the parameters of a group."""
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"Muon's momentum must be at least 0 and less than 1, got {group['momentum']}.")
    for name in ("ns_steps", "parts"):
        if not (isinstance(group[name], int) and group[name] >= 1):
            raise ValueError(f"Muon's {name} must be an integer of at least 1, got {group[name]!r}.")
    if wrong := [tuple(p.shape) for p in group["params"] if p.ndim != 2 or p.size(0) % group["parts"]]:
        raise ValueError(
            f"Muon updates matrices that consist of {group['parts']} matrices with as many rows each, but got "
            f"parameters of shape {', '.join(map(str, wrong))}. Leave these to a group of AdamW."
        )


def _sharding_group(parameter: DTensor) -> dist.ProcessGroup:
    """The processes that hold the rows of a parameter."""
    split = {n: placement for n, placement in enumerate(parameter.placements) if not placement.is_replicate()}
    if [(type(placement), placement) for placement in split.values()] != [(Shard, Shard(0))]:
        raise ValueError(
            "Muon needs parameters whose rows are divided among processes in one way, as by FSDP2, got "
            f"{parameter.placements}."
        )
    (dimension,) = split
    return parameter.device_mesh.get_group(dimension)
