"""For how many micro-batches of a window the autograd graph is kept from the first pass for the second."""

from __future__ import annotations

import torch

from ..processes.collectives import Processes


class GraphBudget:
    """Decides for how many micro-batches of a window the autograd graph is kept.

    Args:
        wanted: the number, or None for as many as fit into the memory of the GPU. This is measured in the second
            window, because the optimizer's state is created at the end of the first; until then, one graph is kept.
    """

    def __init__(self, wanted: int | None, device: torch.device) -> None:
        self._wanted, self._device = wanted, device
        self._windows = 0
        self.affordable: int | None = None  # the number of graphs that fit, once it was measured

    def graphs(self, most: int) -> int:
        """The number of graphs for the window that begins now, from 1 to ``most``."""
        wanted = self._wanted
        if wanted is None and self.affordable is None and self._device.type == "cuda":
            if self._windows == 2:
                self.affordable = self._measure()
            else:
                torch.cuda.reset_peak_memory_stats(self._device)
        self._windows += 1
        if wanted is None:
            wanted = self.affordable or 1
        return max(1, min(wanted, most))

    def _measure(self) -> int:
        device = self._device
        # The peak of a window above its resting state is an upper bound for one graph. A tenth stays free.
        graph = max(1, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))
        free, _ = torch.cuda.mem_get_info(device)
        unused = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        fits = 1 + int(0.9 * unused) // graph
        # Wrappers need the same number of forwards on every process.
        return int(min(number for (number,) in Processes().agree([fits])))
