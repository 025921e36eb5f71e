"""Fewer micro-batches for the second pass over a window of which some pairs do not take part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..encoders.dual_encoder import IMAGE_FEATURES, IMAGE_INPUTS, NO_TEXTS, TEXT_INPUTS
from ..passes.offload import Fetcher
from .texts import widened
from .window import MicroBatch, Window


class DealtAnew:
    """The needed rows of a window in fewer micro-batches, filled up with rows that are not needed.

    All micro-batches have as many images as those of the window, so a compiled model sees no other shapes.

    Args:
        needed: [images] bool on the CPU, the images whose rows, or whose captions' rows, have a gradient.
        fetcher: copies inputs to the device, if they are in host memory.
    """

    def __init__(
        self,
        window: Window,
        micro_batches: Sequence[MicroBatch],
        needed: Tensor,
        count: int,
        fetcher: Fetcher | None = None,
    ) -> None:
        size = window.sizes[0][0]
        filling = (~needed).nonzero().flatten()[: count * size - int(needed.sum())]
        chosen = torch.cat((needed.nonzero().flatten(), filling)).sort().values
        # ---- The texts of each new micro-batch ----
        belongs = window.caption_image()
        belongs = torch.arange(len(needed)) if belongs is None else belongs
        rows_of_texts = [torch.isin(belongs, part).nonzero().flatten() for part in chosen.split(size)]
        texts = _tensors_of_texts(window)
        device = window.batches[0]["input_ids"].device
        batches: list[dict[str, Any]] = [
            {"pixel_values": torch.empty(size, 0), **{name: t[rows.to(device)] for name, t in texts.items()}}
            for rows in rows_of_texts
        ]
        # Which deals the texts out by length again.
        self.window = Window(batches, window.padding, window.at_once, last_has_texts=window.last_has_texts)
        self._images = chosen
        self._texts = torch.cat(rows_of_texts)[self.window.text_order()]
        # ---- The images, gathered when they are encoded ----
        images = _gathered(window.batches, self.window.batches, chosen.split(size), size)
        self.window.arrive(images if fetcher is None else fetcher.fetch(images))
        # ---- What frozen towers have returned in the first pass ----
        frozen = self._frozen(window, micro_batches)
        self.micro_batches = [
            MicroBatch(batch, {name: outputs[index] for name, outputs in frozen.items()}, references=[])
            for index, batch in enumerate(self.window.batches)
        ]

    def rows(self, features: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """Rows of the old window's images and texts, in its order, for each new micro-batch; None stays None."""
        texts = [0 if NO_TEXTS in batch else len(batch["input_ids"]) for batch in self.window.batches]
        sizes_of_both = self.window.sizes[0], texts  # as they are encoded
        columns = []
        for rows, order, sizes in zip(features, (self._images, self._texts), sizes_of_both, strict=True):
            parts = [None] * len(self.window) if rows is None else rows[order.to(rows.device)].split(sizes)
            columns.append(parts)
        return [list(parts) for parts in zip(*columns, strict=True)]

    def _frozen(
        self, window: Window, micro_batches: Sequence[MicroBatch]
    ) -> dict[str, list[BaseModelOutputWithPooling]]:
        by_tower: dict[str, list[Any]] = {}
        for place, (name, count) in enumerate(zip(("image", "text"), map(sum, window.sizes), strict=True)):
            outputs = [m.frozen_outputs[name] for m in micro_batches if name in m.frozen_outputs]
            fields: dict[str, Tensor] = {
                key: torch.cat([output[key] for output in outputs]) for key in (outputs[0] if outputs else ())
            }
            if not fields or any(len(rows) != count for rows in fields.values()):  # or placeholders are among them
                continue
            parts: list[dict[str, Any]] = [{} for _ in self.window.batches]
            for key, rows in fields.items():
                both: list[Tensor | None] = [None, None]
                both[place] = rows if place == 0 else window.texts_in_order(rows)
                for part, of_micro_batch in zip(parts, self.rows(both), strict=True):
                    part[key] = of_micro_batch[place]
            by_tower[name] = [BaseModelOutputWithPooling(**part) for part in parts]
        return by_tower


def can_be_dealt_anew(window: Window) -> bool:
    """Whether the pairs of a window can be put together in other micro-batches."""
    belongs = window.caption_image()
    if belongs is not None and bool((belongs < 0).any()):  # negative captions, which belong to no image
        return False
    widths = {batch["input_ids"].shape[1] for batch in window.batches}
    return len(set(window.sizes[0])) == 1 and (len(widths) == 1 or window.padding is not None)


def _tensors_of_texts(window: Window) -> dict[str, Tensor]:
    """The tensors of a window's texts, [texts, tokens], as the data loader ordered them."""
    batches = [batch for batch in window.batches if NO_TEXTS not in batch]
    widest = max(batch["input_ids"].shape[1] for batch in batches)
    tensors = {}
    for name in TEXT_INPUTS:
        if name in batches[0]:
            value = (window.padding or {}).get(name, 0)
            rows = torch.cat([widened(batch[name], widest, value) for batch in batches])
            tensors[name] = window.texts_in_order(rows)
    return tensors


def _gathered(
    old: Sequence[dict[str, object]], new: Sequence[dict[str, object]], rows: Sequence[Tensor], size: int
) -> Iterator[Mapping[str, Any]]:
    """The new batches with the images of these rows of the old ones, which let go of theirs after their last use."""
    names = [name for name in (*IMAGE_INPUTS, IMAGE_FEATURES) if name in old[0]]
    for number, (batch, chosen) in enumerate(zip(new, rows, strict=True)):
        inputs: dict[str, Any] = {name: value for name, value in batch.items() if name != "pixel_values"}
        parts = [
            (place, chosen[chosen // size == place] - place * size) for place in (chosen // size).unique().tolist()
        ]
        for name in names:
            pieces = [old[place][name] for place, _ in parts]
            images = torch.cat([p[within.to(p.device)] for p, (_, within) in zip(pieces, parts, strict=True)])
            inputs[name] = images.pin_memory() if pieces[0].is_pinned() else images
        later = rows[number + 1][0].item() // size if number + 1 < len(rows) else len(old)
        for used in old[: int(later)]:
            for name in names:
                used.pop(name, None)
        yield inputs
