"""Gradient caching: the gradient of a loss over many micro-batches in the activation memory of one.

The method is GradCache (arXiv 2101.06983). Each micro-batch has its own random seed, so dropout draws the same masks in
both passes, and so does everything that draws from the global generators of Python, NumPy or torch. This module only
knows callables and tensors: a function that encodes a micro-batch, and a loss of the features of all micro-batches.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..processes.collectives import Processes
from ..refusals import refuse_second_derivative

# Share of the memory that stays free, for texts of other lengths that do not fit into the gaps that earlier ones have
# left. Where it is not enough, the step is repeated with fewer graphs, or with smaller micro-batches.
MARGIN = 0.05
_CPU = torch.device("cpu")
Features = tuple[Tensor, ...]
MicroBatchT = TypeVar("MicroBatchT")
_NO_SECOND_DERIVATIVE = (
    "The gradient of a window of micro-batches cannot be differentiated again, so its backward cannot run with "
    "create_graph=True. Compute the loss of one large batch for a second derivative."
)


# ---- The random generators that forwards draw from ----


@contextmanager
def random_state_kept(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """A context after which the generators of Python, NumPy, torch's CPU and ``device`` continue as before it.

    With a ``seed`` they start from it. Other GPUs than this one are left with the seed.
    """
    # Without a device any type that torch knows will do, because None is allowed only since torch 2.13.
    devices, kind = ((), "cuda") if device.type == "cpu" else ((device.index or 0,), device.type)
    with torch.random.fork_rng(devices=devices, device_type=kind), ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        after.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - other code draws from it
        if seed is not None:
            # torch's own function is slower: it queues the seed, with the stack, for accelerators not used yet.
            seed_torch = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
            seed_torch(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002  # it takes 32 bits
        yield


def undoing(model: Any, others: Iterable[Tensor] = ()) -> Callable[[], None]:
    """Returns a function that undoes a step before the optimizer's: gradients go, buffers become what they are now.

    The model may be a `Wrapper`, which knows them faster. ``others`` are parameters beside the model's.
    """
    parameters, buffers = [*model.parameters(), *others], [(buffer, buffer.clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def undo() -> None:
        for parameter in parameters:
            parameter.grad = None
        for buffer, value in buffers:
            buffer.copy_(value)

    return undo


@contextmanager
def undone(model: Any, device: torch.device, others: Iterable[Tensor] = ()) -> Iterator[None]:
    """A context after which the random generators continue as before it, too; see `undoing`."""
    with ExitStack() as after, random_state_kept(device):
        after.callback(undoing(model, others))
        yield


# ---- Inputs from host memory, one micro-batch ahead of the computation ----


class Fetcher:
    """Copies each micro-batch to a device while the previous one is being computed.

    On a GPU the copies run on a separate stream; from pinned memory (the data loader's ``pin_memory``) they overlap
    with the computation. At most two micro-batches are on the device at a time, however far the host is ahead of it:
    their memory comes from the current stream, which uses it again for a later micro-batch, and a copy waits for what
    was queued there before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields each batch on the device, ready for the current stream, after starting to copy the next one."""
        # A reference here to a yielded batch would keep it on the device together with the next two.
        sent = map(self.send, batches)
        arriving = deque(islice(sent, 1))
        try:
            while arriving:
                self._wait()  # before the next copy is queued behind it
                arriving.extend(islice(sent, 1))
                yield arriving.popleft()
        finally:
            self._wait()  # the memory of a batch that nobody takes is used again, too

    def send(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Begins to copy a batch to the device."""
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        # From the current stream. Memory of the other one could not be used again before the device has got there.
        sent = {name: torch.empty_like(value, device=self._device) for name, value in tensors.items()}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for name, value in tensors.items():
                sent[name].copy_(value, non_blocking=True)
        return {**batch, **sent}

    def _wait(self) -> None:
        """Lets the current stream wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


# ---- The micro-batches whose graph is kept from the first pass for the second ----


def left_over(peak: int, device: torch.device) -> tuple[int, int]:
    """The bytes that this process could allocate on a GPU above a peak, and all that it may.

    These are those of the GPU, or its share of them (`torch.cuda.set_per_process_memory_fraction`).
    """
    free, total = torch.cuda.mem_get_info(device)
    total = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free + torch.cuda.memory_reserved(device), total) - peak, total


class GraphBudget:
    """Decides for how many micro-batches of a window the autograd graph is kept.

    Args:
        retain: the number, or "auto" for as many as fit into the memory of the GPU. Until this is known, one graph is
            kept. It is measured in the second window, because the optimizer's state is created at the end of the
            first, and again in the third, whose further graphs show how large one is.
        alike: whether all micro-batches are of one size. The further graphs of others may be the smaller ones, so they
            are not measured.

    Attributes:
        kept: the number of graphs of the last window.
    """

    def __init__(self, retain: int | str | None, device: torch.device, *, alike: bool = True) -> None:
        self._wanted, self._device, self._alike = 1 if retain == "auto" else int(retain or 1), device, alike
        self._measures = retain == "auto" and device.type == "cuda"
        self._trained = 0  # windows
        self._resting, self._peak_of_one, self._most_of_one = 0, 0, 0  # bytes
        self.kept = 1

    def graphs(self, most: int) -> int:
        """The number of graphs for the window that begins now, from 1 to ``most``."""
        if self._measures:
            self._resting = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self.kept = max(1, min(self._wanted, most))
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
        unused, total = left_over(peak, self._device)
        unused -= int(MARGIN * total)
        # Wrappers need the same number of forwards on every process.
        fits = Processes().agree([self.kept + unused // max(1, graph)])
        self._wanted = max(1, int(min(number for (number,) in fits)))
        self._measures = first and self._wanted > 1 and self._alike


# ---- The two passes ----


class CachedWindow(Generic[MicroBatchT]):
    """One loss over the features of a window of micro-batches, and its gradient, in three steps.

    1. `encode` is the first pass: it computes the features of all micro-batches.
    2. `differentiate` computes the loss of the whole window's features and keeps its gradient with respect to them.
    3. `surrogate` is the second pass, for one micro-batch at a time: a scalar, the sum of the products of its features
       with their gradients. The gradients of all surrogates add up to the gradient of the loss, exactly.

        window = CachedWindow(encode, micro_batches)
        window.encode()
        loss = window.differentiate(loss_function)
        for index in range(len(micro_batches)):
            window.surrogate(index).backward()

    The first ``retain`` micro-batches keep the autograd graph of their first pass for the second pass; the others are
    encoded again. A window of K micro-batches therefore costs K - retain more forwards than one large batch. The first
    pass encodes the micro-batches with cached graphs last, so there are never more than ``retain`` graphs, even if all
    forwards run with autograd.

    Args:
        encode: maps a micro-batch to its features, each [rows, ...].
        micro_batches: the window, at least one micro-batch.
        device: the device whose random generator the forwards use in addition to those of the CPU.
        retain: the number of graphs to keep, limited to at least one and at most one per micro-batch.
        keep_grad_mode: run the whole first pass with autograd and drop the graphs. Compiled models need this, because
            the dropout masks of their inference graph differ from those of their training graph.
        alike: whether the same features require a gradient in all micro-batches, as if each runs through the same parts
            of a model. Otherwise, those of a micro-batch that is encoded again are assumed to require one.
        buffers: tensors that a forward changes in place, such as the running statistics of batch norms. The window
            changes them exactly like one forward of each micro-batch in order.

    Attributes:
        order: the indices of the micro-batches in the order in which both passes encode them.
        loss: the detached loss, once `differentiate` has computed it.
        gradients: those of the features of the whole window, each [all rows, ...], or None where none is needed, once
            `differentiate` has computed them.
        other_gradients: the gradients of the ``other_inputs`` that `differentiate` was given.
    """

    def __init__(
        self,
        encode: Callable[[MicroBatchT], Features],
        micro_batches: Sequence[MicroBatchT],
        *,
        device: torch.device = _CPU,
        retain: int = 1,
        keep_grad_mode: bool = False,
        alike: bool = False,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        count = len(micro_batches)
        self._encode, self._device, self._keep_grad_mode, self._alike = encode, device, keep_grad_mode, alike
        self._buffers = list(buffers)
        self._micro_batches = dict(enumerate(micro_batches))  # that are still to be encoded
        kept = max(1, min(retain, count))
        self._with_graph, self._recomputed = range(kept), range(kept, count)
        self.order = [*self._recomputed, *self._with_graph, *self._recomputed]
        # Drawn for all micro-batches at once, so that the masks of dropout do not depend on the order of encoding.
        self._seeds: list[int] = torch.randint(2**63 - 1, (count,)).tolist()
        self._graphs: dict[int, Features] = {}

    def encode(self) -> Features:
        """The first pass. Returns the features of the whole window, each [all rows, ...], detached."""
        cached: list[Features] = [()] * len(self._micro_batches)
        unchanged = [(b, b._version, b.clone()) for b in self._buffers] if self._recomputed else []
        for index in self._recomputed:
            with torch.set_grad_enabled(self._keep_grad_mode):
                # No name may refer to the features, and thus to a graph, while the next features are computed.
                cached[index] = tuple(f.detach() for f in self._forward(index, self._micro_batches[index]))
        with torch.no_grad():
            for buffer, version, value in unchanged:
                # Others may be in the graph of another window, and kernels of batch norms count no version.
                if buffer.is_floating_point() or buffer._version != version:
                    buffer.copy_(value)  # the second pass will change it again
        for index in self._with_graph:
            with torch.enable_grad():
                self._graphs[index] = self._forward(index, self._micro_batches.pop(index))
            cached[index] = tuple(f.detach() for f in self._graphs[index])
        columns = list(zip(*cached, strict=True))
        self._sizes = [[len(part) for part in column] for column in columns]  # for each feature
        self._features: Features = tuple(torch.cat(column) for column in columns)  # until `differentiate`
        return self._features

    def differentiate(
        self,
        loss: Callable[[Features, tuple[Tensor, ...]], Tensor],
        parameters: Callable[[], Sequence[Tensor]] = tuple,
        other_inputs: Sequence[Tensor] = (),
    ) -> Tensor:
        """The loss of the whole window, detached; call it once, after `encode`.

        Args:
            loss: ``loss(features, parameters)`` maps the features of the whole window, each [all rows, ...], to a
                scalar.
            parameters: returns the loss's other inputs (logit_scale, logit_bias). ``loss`` receives detached copies.
                Their gradients are part of the last micro-batch's surrogate, because DDP synchronises in its backward.
                ``parameters`` is called again for that surrogate, because FSDP replaces the tensors in every forward.
            other_inputs: further tensors on which ``loss`` depends, and that no wrapper synchronises. `other_gradients`
                has their gradients afterwards.
        """
        # The features are detached; only cached graphs show which of them (not a frozen tower's) require a gradient.
        unknown = bool(self._recomputed) and not self._alike
        leaves = tuple(
            feature.requires_grad_(
                feature.is_floating_point() and (unknown or any(graph.requires_grad for graph in graphs))
            )
            for feature, graphs in zip(self._features, zip(*self._graphs.values(), strict=True), strict=True)
        )
        self._features = ()
        copies = tuple(p.detach().clone().requires_grad_(p.requires_grad) for p in parameters())
        with torch.enable_grad():
            value = loss(leaves, copies)
        self.loss = value.detach()
        wanted = [t for t in (*leaves, *copies, *other_inputs) if t.requires_grad]
        # A step may do without some of the others, which then have a gradient of 0.
        fills = bool(other_inputs)
        found = torch.autograd.grad(value, wanted, allow_unused=fills, materialize_grads=fills) if wanted else ()
        gradients = dict(zip(map(id, wanted), found, strict=True))
        self._parameters = parameters
        self._parameter_gradients = [gradients.get(id(copy)) for copy in copies]
        self.other_gradients = [gradients[id(other)] for other in other_inputs]
        self.gradients = [gradients.get(id(leaf)) for leaf in leaves]
        parts = [
            [None] * len(sizes) if gradient is None else gradient.split(sizes)
            for gradient, sizes in zip(self.gradients, self._sizes, strict=True)
        ]
        self._feature_gradients = list(zip(*parts, strict=True))  # of each micro-batch
        return self.loss

    def surrogate(self, index: int) -> Tensor | None:
        """A scalar whose gradient is the share of micro-batch ``index`` in the loss's gradient; None if there is none.

        After `differentiate`, call this once for each index, in order, and run the backward before the next call.
        Unless its graph was kept, the micro-batch is encoded again with the random seed of the first pass. A backward
        with ``create_graph=True`` raises a RuntimeError.
        """
        features = self._graphs.pop(index, None)
        if features is None:
            with torch.enable_grad():
                features = self._forward(index, self._micro_batches.pop(index))
        terms = list(zip(features, self._feature_gradients[index], strict=True))
        if index == len(self._seeds) - 1:
            terms += list(zip(self._parameters(), self._parameter_gradients, strict=True))
        # A micro-batch may have no rows of the only feature that trains.
        products = [(v * gradient).sum() for v, gradient in terms if gradient is not None and v.requires_grad]
        if not products:
            return None
        surrogate = torch.stack(products).sum()
        surrogate.register_hook(lambda gradient: refuse_second_derivative(_NO_SECOND_DERIVATIVE))
        return surrogate

    def _forward(self, index: int, micro_batch: MicroBatchT) -> Features:
        with random_state_kept(self._device, self._seeds[index]):
            return self._encode(micro_batch)
