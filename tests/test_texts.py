"""Texts that a window deals out to its micro-batches by their length."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from helpers.parity import PadsToLongest, train

from hf_infcl.windows.texts import sort_texts
from hf_infcl.windows.window import Window


def batches_of(lengths: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of texts whose tokens are all the number of their row, padded with 1 to the longest."""
    batches, row = [], 10
    for part in lengths:
        ids, mask = torch.ones(len(part), max(part), dtype=torch.int64), torch.zeros(len(part), max(part)).long()
        for place, length in enumerate(part):
            ids[place, :length], mask[place, :length] = row, 1
            row += 1
        batches.append({"pixel_values": torch.zeros(len(part), 3, 2, 2), "input_ids": ids, "attention_mask": mask})
    return batches


def test_the_longest_texts_come_first_and_nothing_is_padded_beyond_them():
    batches = batches_of([[3, 20, 5], [9, 2, 30], [16, 17, 1]])
    places = sort_texts(batches, PadsToLongest.text_padding)
    assert [batch["input_ids"].shape for batch in batches] == [(3, 30), (3, 16), (3, 8)]
    assert [batch["attention_mask"].sum(1).tolist() for batch in batches] == [[30, 20, 17], [16, 9, 5], [3, 2, 1]]
    rows = torch.cat([batch["input_ids"][:, 0] for batch in batches])
    assert rows[places].tolist() == list(range(10, 19))
    for batch in batches:
        assert torch.equal(batch["input_ids"] != 1, batch["attention_mask"] == 1)


def test_rows_of_a_window_come_back_in_the_order_of_its_images():
    window = Window(batches_of([[3, 20], [9, 2], [16, 4]]), PadsToLongest.text_padding)
    of_texts = torch.cat([batch["input_ids"][:, 0] for batch in window.batches])
    images, texts = window.in_order((torch.arange(6), of_texts))
    assert (images.tolist(), texts.tolist()) == (list(range(6)), list(range(10, 16)))
    assert window.in_order((images, texts[:0]))[1].numel() == 0, "a frozen tower has no gradients"
    untouched = Window(batches_of([[3, 20], [9, 2]]))
    assert torch.equal(untouched.in_order((images, texts))[1], texts)


@pytest.mark.parametrize("missing", ["attention_mask", "position_ids"])
def test_texts_without_a_mask_or_with_other_tensors_stay_where_they_are(missing):
    batches = batches_of([[3, 20], [9, 2]])
    for batch in batches:
        if missing == "attention_mask":
            del batch["attention_mask"]
        else:
            batch["position_ids"] = torch.zeros_like(batch["input_ids"])
    before = [batch["input_ids"] for batch in batches]
    assert sort_texts(batches, PadsToLongest.text_padding) is None
    assert all(a is b["input_ids"] for a, b in zip(before, batches, strict=True))


def test_the_text_tower_computes_less_for_the_same_loss():
    forward, tokens = transformers.CLIPModel.forward, []

    def counting(model: Any, *, input_ids: torch.Tensor, **inputs: Any) -> Any:
        tokens.append(input_ids.numel())
        return forward(model, input_ids=input_ids, **inputs)

    losses, computed = [], []
    for padding in (None, PadsToLongest.text_padding):
        tokens.clear()
        with (
            mock.patch.object(transformers.CLIPModel, "forward", counting),
            mock.patch.object(PadsToLongest, "text_padding", padding),
        ):
            trainer = train("softmax", "lengths", 1, 4, retain_graphs="4")
        losses.append(trainer.state.log_history[0]["loss"])
        computed.append(sum(tokens))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert computed[1] == 12 * (16 + 16 + 16 + 8) < computed[0]
