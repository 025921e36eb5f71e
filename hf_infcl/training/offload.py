"""Moving a window's inputs from host memory to the device, one micro-batch ahead of the computation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class Fetcher:
    """Copies micro-batches to a device while the one before is being computed.

    On a GPU the copies run on a stream of their own; from pinned memory (the data loader's ``pin_memory``) they overlap
    the computation. At most two micro-batches are on the device at a time.

    Args:
        device: the destination.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arriving: dict[int, dict[str, Any]] = {}

    def fetch(self, batch: Mapping[str, Any], following: Mapping[str, Any] | None) -> dict[str, Any]:
        """The batch on the device, ready for the current stream; ``following`` is sent on its way."""
        arrived = self._arriving.pop(id(batch), None) or self._send(batch)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for value in arrived.values():
                if isinstance(value, Tensor):
                    value.record_stream(current)  # allocated on the other stream
        if following is not None:
            self._arriving = {id(following): self._send(following)}
        return arrived

    def _send(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            return {
                name: value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value
                for name, value in batch.items()
            }
