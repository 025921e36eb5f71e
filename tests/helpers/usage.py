"""Memory, files, threads and tensors of a process while it trains, to find leaks."""

import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_infcl.models.dual_encoder import DualEncoder

ALLOWED_GROWTH = {"resident MiB": 8.0, "allocated MiB": 0.1}  # nothing else may grow


class Usage(TrainerCallback):
    """Measures the process's `usage` during a training, and ends the training after a time limit.

    Args:
        steps: the number of steps of the training.
        notes: the number of measurements, spread evenly over the steps.
        minutes: the time limit.
    """

    def __init__(self, steps: int, notes: int = 100, minutes: float = float("inf")) -> None:
        self.every = max(1, steps // notes)
        self.end = time.monotonic() + 60 * minutes
        self.seen: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= time.monotonic() > self.end
        if state.global_step % self.every == 0:
            gc.collect()
            self.seen.append(usage())

    def growth(self) -> dict[str, float]:
        """For each measure, its maximum in the second half of the training minus that in the second quarter."""
        quarter = len(self.seen) // 4
        early, late = self.seen[quarter : 2 * quarter], self.seen[2 * quarter :]
        return {name: max(s[name] for s in late) - max(s[name] for s in early) for name in late[0]}

    def grown(self) -> dict[str, float]:
        """The growth of the measures that have grown by more than `ALLOWED_GROWTH`."""
        return {name: more for name, more in self.growth().items() if more > ALLOWED_GROWTH.get(name, 0)}


def usage() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held: dict[str, float] = {
        "resident MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "Python threads": threading.active_count(),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
    }
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        held["allocated MiB"] = torch.cuda.memory_allocated() / 2**20
        held["reserved MiB"] = torch.cuda.memory_reserved() / 2**20
    return held


def kept_bytes(encoder: DualEncoder, batch: dict[str, torch.Tensor]) -> int:
    """The bytes that a forward keeps for its backward, without those of the weights."""
    weights = {one.untyped_storage().data_ptr() for one in encoder.model.parameters()}
    kept: list[weakref.ref[torch.Tensor]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        same = tensor.detach()  # its graph alone holds it
        kept.append(weakref.ref(same))
        return same

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        embeds = encoder.encode_images(batch), encoder.encode_texts(batch)
    storages = [tensor.untyped_storage() for one in kept if (tensor := one()) is not None]
    assert all(one.isfinite().all() for one in embeds)
    sizes = {one.data_ptr(): one.nbytes() for one in storages}
    return sum(size for place, size in sizes.items() if place not in weights)
