"""The inputs of a window reach the device one micro-batch ahead, and leave it after their use."""

import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hf_infcl.step.grad_cache import Fetcher


class Watched(Fetcher):
    """Copies to the meta device, and records the copies."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.copies: list[weakref.ref] = []

    def send(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        sent = super().send(batch)
        self.copies.append(weakref.ref(sent["x"]))
        return sent


@pytest.mark.parametrize("count", [1, 2, 4])
def test_two_micro_batches_are_on_the_device_at_a_time(count):
    fetcher = Watched()
    batches = ({"x": torch.ones(rows), "names": ["a"]} for rows in range(count))
    seen = 0
    for index, batch in enumerate(fetcher.fetch(batches)):
        assert batch["x"].device.type == "meta"
        assert batch["x"].shape == (index,)
        assert batch["names"] == ["a"]
        alive = [copy() is not None for copy in fetcher.copies]
        assert alive == [False] * index + [True] * min(2, count - index)
        seen += 1
    assert seen == count
