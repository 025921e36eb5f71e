"""Gradient caching: the gradient of a loss over many micro-batches at the activation memory of one.

GradCache (arXiv 2101.06983), with random states replayed so that dropout draws the same masks in both passes. It
speaks of callables and tensors alone: a loss over features, and functions that compute the features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Features = tuple[Tensor, ...]


class CachedWindow:
    """One loss over the features of a window of micro-batches.

    Construction is the first pass: it encodes every micro-batch in order, evaluates the loss on the features of the
    whole window, and keeps the loss's gradient by the features. `surrogate` is the second pass for one micro-batch; the
    gradients of the surrogates of all micro-batches add up to the gradient of the loss, exactly.

    The first ``retain`` micro-batches are encoded with an autograd graph, which their surrogates use; the others are
    encoded again. So K micro-batches cost K - retain forwards more than one big batch would, a window of one costs
    none, and at most max(retain, 1) micro-batches' activations exist at a time, if the surrogates are taken and
    differentiated in order.

    Args:
        encode: ``encode(micro_batch, following)`` to the micro-batch's features, each [rows, ...]. ``following`` is the
            micro-batch that will be encoded next, or None, for whoever has to fetch it.
        micro_batches: the window, at least one.
        loss: ``loss(features, parameters)`` of the features of the whole window, each [all rows, ...], to a scalar.
        parameters: gives what else the loss depends on (logit_scale, logit_bias). ``loss`` gets detached copies; their
            gradients ride on the last micro-batch's surrogate, which is the one that DDP synchronises. Asked for anew
            after that micro-batch's forward, since FSDP exchanges the parameters' tensors.
        device: where the random state besides the CPU's lives.
        retain: how many graphs to keep, at least 1.
        keep_grad_mode: run the whole first pass with autograd enabled and drop the graphs. Compiled models need it,
            since their inference graph would draw other dropout masks than their training graph.

    Attributes:
        loss: the loss, detached.
    """

    def __init__(
        self,
        encode: Callable[[Any, Any], Features],
        micro_batches: Sequence[Any],
        loss: Callable[[Features, tuple[Tensor, ...]], Tensor],
        *,
        parameters: Callable[[], Sequence[Tensor]] = tuple,
        device: torch.device | None = None,
        retain: int = 1,
        keep_grad_mode: bool = False,
    ) -> None:
        assert retain >= 1
        self._encode, self._parameters = encode, parameters
        self._micro_batches: list[Any] = list(micro_batches)
        self._states: dict[int, RandomState] = {}
        self._graphs: dict[int, Features] = {}
        count = len(micro_batches)
        cached: list[Features] = []
        for index, micro_batch in enumerate(micro_batches):
            # After the first pass the second begins with the first micro-batch that has no graph.
            following = index + 1 if index + 1 < count else retain
            keep = index < retain
            if not keep:
                self._states[index] = RandomState(device)
            with torch.set_grad_enabled(keep or keep_grad_mode):
                features = encode(micro_batch, self._micro_batches[following] if following < count else None)
            if keep:
                self._graphs[index] = features
                self._micro_batches[index] = None  # its last use
            cached.append(tuple(f.detach() for f in features))
            del features  # and with it a graph that is not kept

        columns = list(zip(*cached, strict=True))
        # Whether a feature requires a gradient (a frozen tower's does not) is known from a graph alone.
        rows = [[len(part) for part in column] for column in columns]
        leaves = tuple(
            torch.cat(column).requires_grad_(graph.requires_grad)
            for column, graph in zip(columns, self._graphs[0], strict=True)
        )
        del cached, columns  # the leaves are copies
        copies = tuple(p.detach().clone().requires_grad_(p.requires_grad) for p in parameters())
        with torch.enable_grad():
            value = loss(leaves, copies)
        self.loss = value.detach()
        wanted = [t for t in (*leaves, *copies) if t.requires_grad]
        gradients = dict(zip(map(id, wanted), torch.autograd.grad(value, wanted), strict=True)) if wanted else {}
        self._parameter_gradients = [gradients.get(id(copy)) for copy in copies]
        self._feature_gradients: list[list[Tensor | None]] = [[] for _ in micro_batches]
        for leaf, sizes in zip(leaves, rows, strict=True):
            gradient = gradients.get(id(leaf))
            parts = gradient.split(sizes) if gradient is not None else [None] * count
            for of_micro_batch, part in zip(self._feature_gradients, parts, strict=True):
                of_micro_batch.append(part)

    def surrogate(self, index: int) -> Tensor | None:
        """A scalar whose gradient is micro-batch ``index``'s share of the loss's, or None if it has no share.

        Encodes the micro-batch again, with its random state of the first pass, unless its graph was kept. To be asked
        for in order, once for each index.
        """
        if index in self._graphs:
            features = self._graphs.pop(index)
        else:
            following = self._micro_batches[index + 1] if index + 1 < len(self._micro_batches) else None
            with self._states.pop(index).replay(), torch.enable_grad():
                features = self._encode(self._micro_batches[index], following)
            self._micro_batches[index] = None  # its last use
        terms = list(zip(features, self._feature_gradients[index], strict=True))
        if index == len(self._micro_batches) - 1:
            terms += list(zip(self._parameters(), self._parameter_gradients, strict=True))
        products = [(value * gradient).sum() for value, gradient in terms if gradient is not None]
        return torch.stack(products).sum() if products else None


class RandomState:
    """The state of torch's random generators now, of the CPU and of ``device`` if it has one of its own."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = None if device is None or device.type == "cpu" else device
        self._cpu = torch.get_rng_state()
        if self._device is not None:
            self._accelerator = torch.get_device_module(self._device).get_rng_state(self._device)

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Within the context the generators run from this state; afterwards they go on where they were."""
        device = self._device
        devices, kind = ((), "cuda") if device is None else ((device.index or 0,), device.type)
        with torch.random.fork_rng(devices=devices, device_type=kind):
            torch.set_rng_state(self._cpu)
            if device is not None:
                torch.get_device_module(device).set_rng_state(self._accelerator, device)
            yield
