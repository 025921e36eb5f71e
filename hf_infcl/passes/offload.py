"""Moves the inputs of a window from host memory to the device, one micro-batch ahead of the computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor


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
        arriving: deque[dict[str, Any]] = deque()
        try:
            for following in chain(batches, [None]):
                if arriving:
                    self._wait()  # before the next copy is queued behind it
                if following is not None:
                    arriving.append(self.send(following))
                if len(arriving) == (1 if following is None else 2):
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
