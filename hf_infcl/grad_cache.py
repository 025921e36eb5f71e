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

    Construction is the first pass: it encodes every micro-batch, evaluates the loss on the features of the whole
    window, and keeps the loss's gradient by the features. `surrogate` is the second pass for one micro-batch; the
    gradients of the surrogates of all micro-batches add up to the gradient of the loss, exactly.

    Only micro-batch 0 is encoded with an autograd graph, last in the first pass, and its surrogate uses that graph. So
    K micro-batches cost K - 1 forwards more than one big batch would, a window of one costs none, and no more than one
    micro-batch's activations exist at a time as long as the surrogates are taken and differentiated in order.

    Args:
        encode: from a micro-batch to its features, each [rows, ...].
        micro_batches: the window, at least one.
        loss: ``loss(features, parameters)`` of the features of the whole window, each [all rows, ...], to a scalar.
        parameters: what else the loss depends on (logit_scale, logit_bias). ``loss`` gets detached copies; their
            gradients ride on the last micro-batch's surrogate, which is the one that DDP synchronises.
        device: where the random state besides the CPU's lives.
        keep_grad_mode: run the whole first pass with autograd enabled and drop the graphs. Compiled models need it,
            since their inference graph would draw other dropout masks than their training graph.

    Attributes:
        loss: the loss, detached.
    """

    def __init__(
        self,
        encode: Callable[[Any], Features],
        micro_batches: Sequence[Any],
        loss: Callable[[Features, tuple[Tensor, ...]], Tensor],
        *,
        parameters: Sequence[Tensor] = (),
        device: torch.device | None = None,
        keep_grad_mode: bool = False,
    ) -> None:
        self._encode, self._parameters = encode, tuple(parameters)
        self._micro_batches: list[Any] = list(micro_batches)
        self._states: dict[int, RandomState] = {}
        cached: dict[int, Features] = {}
        for index in range(1, len(micro_batches)):
            self._states[index] = RandomState(device)
            with torch.set_grad_enabled(keep_grad_mode):
                cached[index] = tuple(f.detach() for f in encode(micro_batches[index]))
        # Whether a feature requires a gradient (a frozen tower's does not) is known from the graph alone.
        with torch.enable_grad():
            self._graph: Features | None = encode(micro_batches[0])
        self._micro_batches[0] = None
        cached[0] = tuple(f.detach() for f in self._graph)

        columns = list(zip(*(cached[index] for index in range(len(micro_batches))), strict=True))
        features = tuple(
            torch.cat(column).requires_grad_(graph.requires_grad)
            for column, graph in zip(columns, self._graph, strict=True)
        )
        copies = tuple(p.detach().clone().requires_grad_(p.requires_grad) for p in self._parameters)
        with torch.enable_grad():
            value = loss(features, copies)
        self.loss = value.detach()
        leaves = [t for t in (*features, *copies) if t.requires_grad]
        gradients = dict(zip(map(id, leaves), torch.autograd.grad(value, leaves), strict=True)) if leaves else {}
        self._parameter_gradients = [gradients.get(id(copy)) for copy in copies]
        self._feature_gradients: list[list[Tensor | None]] = [[] for _ in micro_batches]
        for feature, column in zip(features, columns, strict=True):
            gradient = gradients.get(id(feature))
            parts = gradient.split([len(part) for part in column]) if gradient is not None else [None] * len(column)
            for of_micro_batch, part in zip(self._feature_gradients, parts, strict=True):
                of_micro_batch.append(part)

    def surrogate(self, index: int) -> Tensor | None:
        """A scalar whose gradient is micro-batch ``index``'s share of the loss's, or None if it has no share.

        Encodes the micro-batch again, with its random state of the first pass, unless its graph was kept. Each index is
        to be asked for once.
        """
        if index == 0:
            features, self._graph = self._graph, None
            assert features is not None, "the graph of micro-batch 0 serves one surrogate only"
        else:
            with self._states[index].replay(), torch.enable_grad():
                features = self._encode(self._micro_batches[index])
            self._micro_batches[index] = None  # its last use
        terms = list(zip(features, self._feature_gradients[index], strict=True))
        if index == len(self._micro_batches) - 1:
            terms += list(zip(self._parameters, self._parameter_gradients, strict=True))
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
        if self._device is None:
            with torch.random.fork_rng(devices=()):
                torch.set_rng_state(self._cpu)
                yield
            return
        with torch.random.fork_rng(devices=(self._device.index or 0,), device_type=self._device.type):
            torch.set_rng_state(self._cpu)
            torch.get_device_module(self._device).set_rng_state(self._accelerator, self._device)
            yield
