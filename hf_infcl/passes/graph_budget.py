"""For how many micro-batches of a window the autograd graph is kept from the first pass for the second."""

from __future__ import annotations

import torch

from ..processes.collectives import Processes

# Share of the memory that stays free, for texts of other lengths that do not fit into the gaps that earlier ones have
# left. Where it is not enough, the step is repeated with fewer graphs, or with smaller micro-batches.
MARGIN = 0.05


class GraphBudget:
    """Decides for how many micro-batches of a window the autograd graph is kept.

    Args:
        wanted: the number, or None for as many as fit into the memory of the GPU. This is measured in the second
            window, because the optimizer's state is created at the end of the first, and again in the third, which
            keeps so many that the size of one is known; until then, one graph is kept.

    Attributes:
        kept: the number of graphs of the last window.
    """

    def __init__(self, wanted: int | None, device: torch.device) -> None:
        self._wanted, self._device = wanted, device
        self._windows = 0
        self._peak_of_one = 0  # bytes, of the second window
        self._affordable = 1
        self.kept = 1

    def graphs(self, most: int) -> int:
        """The number of graphs for the window that begins now, from 1 to ``most``."""
        if self._wanted is None and self._device.type == "cuda" and self._windows <= 3:
            if self._windows == 2 or (self._windows == 3 and self.kept > 1):
                self._measure()
            if self._windows < 3:
                torch.cuda.reset_peak_memory_stats(self._device)
        self._windows += 1
        self.kept = max(1, min(self._wanted or self._affordable, most))
        return self.kept

    def _measure(self) -> None:
        peak = torch.cuda.max_memory_allocated(self._device)
        if self.kept == 1:
            # The peak of a window above its resting state is an upper bound for one graph.
            self._peak_of_one, graph = peak, peak - torch.cuda.memory_allocated(self._device)
        else:
            graph = (peak - self._peak_of_one) // (self.kept - 1)
        free, total = torch.cuda.mem_get_info(self._device)
        unused = free + torch.cuda.memory_reserved(self._device) - peak - int(MARGIN * total)
        # Wrappers need the same number of forwards on every process.
        fits = Processes().agree([self.kept + unused // max(1, graph)])
        self._affordable = int(min(number for (number,) in fits))
