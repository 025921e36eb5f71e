"""The memory of the device during a window: kept graphs, arriving inputs, and what is let go of."""

from __future__ import annotations

import gc

from accelerate.utils.memory import clear_device_cache

from ..options.arguments import InfCLTrainingArguments
from ..passes.graph_budget import GraphBudget
from ..passes.offload import Fetcher
from .window import Window


class WindowMemory:
    """Decides what windows keep on the device."""

    def __init__(self, args: InfCLTrainingArguments, *, compiled: bool) -> None:
        self._args = args
        self.fetcher = Fetcher(args.device) if args.offload_inputs else None
        self._compiles = compiled  # until the first window has been trained
        retain = args.retain_graphs
        self.graph_budget = GraphBudget(None if retain == "auto" else int(retain or 1), args.device)

    def keep_fewer_graphs(self) -> None:
        """Keeps one graph fewer from now on, because memory ran out."""
        fewer = self.graph_budget.kept - 1
        self.graph_budget = GraphBudget(fewer, self._args.device)
        if self._args.retain_graphs != "auto":  # which is measured anew where graphs take another amount of memory
            self._args.retain_graphs = self._args.found["retain_graphs"] = str(fewer)

    def after_backward(self, window: Window, index: int, step: int) -> None:
        """Lets go of a micro-batch after its backward."""
        window.release(index)
        every = self._args.torch_empty_cache_steps
        if every is not None and step % every == 0:
            clear_device_cache()
        if index in (0, len(window) - 1):
            self.collect_after_compiling()

    def collect_after_compiling(self) -> None:
        """Frees activations in the first window of a compiled model.

        Compilation leaves reference cycles that hold the activations of a micro-batch, so the window would hold the
        activations of two micro-batches. This is called after the first forward, the first backward and the last one.
        """
        if self._compiles:
            gc.collect()

    def end_window(self) -> None:
        """Called when a window has been trained; collective."""
        self._compiles = False
        self.graph_budget.end_window()
