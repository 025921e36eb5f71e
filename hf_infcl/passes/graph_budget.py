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
        wanted: the number, or None for as many as fit into the memory of the GPU. Until this is known, one graph is
            kept. It is measured in the second window, because the optimizer's state is created at the end of the
            first, and again in the third, whose further graphs show how large one is.

    Attributes:
        kept: the number of graphs of the last window.
    """

    def __init__(self, wanted: int | None, device: torch.device) -> None:
        self._wanted, self._device = wanted, device
        self._measures = wanted is None and device.type == "cuda"
        self._trained = 0  # windows
        self._resting, self._peak_of_one, self._most_of_one = 0, 0, 0  # bytes
        self.kept = 1

    def graphs(self, most: int) -> int:
        """The number of graphs for the window that begins now, from 1 to ``most``."""
        if self._measures:
            self._resting = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self.kept = max(1, min(self._wanted or 1, most))
        return self.kept

    def keep_fewer(self) -> None:
        """Keeps one graph fewer from now on, because memory ran out."""
        self.kept = self._wanted = self.kept - 1
        self._measures = False

    def end_window(self) -> None:
        """Measures the window that has been trained, before the optimizer or an evaluation takes memory; collective."""
        self._trained += 1
        first = self._peak_of_one == 0
        if not self._measures or self._trained == 1 or (self.kept == 1 and not first):
            return
        peak = torch.cuda.max_memory_allocated(self._device)
        if first:
            # The peak of a window above its resting state is an upper bound for one graph.
            self._peak_of_one, graph = peak, peak - self._resting
            self._most_of_one = graph
        else:  # the later window may have had shorter texts
            graph = max((peak - self._peak_of_one) // (self.kept - 1), int(0.9 * self._most_of_one))
        free, total = torch.cuda.mem_get_info(self._device)
        unused = free + torch.cuda.memory_reserved(self._device) - peak - int(MARGIN * total)
        # Wrappers need the same number of forwards on every process.
        fits = Processes().agree([self.kept + unused // max(1, graph)])
        self._wanted = max(1, int(min(number for (number,) in fits)))
        self._measures = first and self._wanted > 1
