"""One window: the micro-batches of one optimizer step on this process, and their texts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..models.dual_encoder import NO_MASK, NO_TEXTS, TEXT_INPUTS, images_of
from .grad_cache import Features

MULTIPLE = 8  # of tokens to which micro-batches are padded: few shapes, which suit the matrix units
# What a batch has for each text. Every other tensor has a row for each image.
_OF_TEXTS = (*TEXT_INPUTS, "start_texts", "teacher_texts", "teacher_known_texts")


# ---- Texts, dealt out to the micro-batches anew: by length, and those of several micro-batches at once ----


def deal_texts(
    batches: list[dict[str, Any]], padding: Mapping[str, int] | None, at_once: int = 1, *, last_has_texts: bool = True
) -> Tensor | None:
    """Gives the texts of each ``at_once`` micro-batches of a window to one of them, the longest to its first one.

    The padding beyond the longest text of a micro-batch is dropped. The gradient of the window stays the same, since
    its loss is one over all texts (see `Window.in_order`), unless the text tower draws random numbers.

    Args:
        batches: of one process, with tensors of texts [n, L]. They get new tensors; one without texts keeps a single
            text as a placeholder, and has ``no_texts``.
        padding: for each of these tensors, among them ``attention_mask``, the value that it is padded with at its end.
            With None texts are not sorted by length.
        last_has_texts: whether the last micro-batch keeps texts of its own.

    Returns:
        For each text of the window in its old order, its place in the new one, [texts] int64; None if nothing was
        moved, because the window is a single micro-batch, or its texts cannot be sorted and none are put together.

    Raises:
        ValueError: texts without a known padding are to be put together, but have several lengths.
    """
    names = [name for name in TEXT_INPUTS if batches and name in batches[0]]
    sorts = padding is not None and "attention_mask" in names and padding.keys() >= set(names)
    if len(batches) < 2 or not (sorts or at_once > 1):
        return None
    sizes = [len(batch["input_ids"]) for batch in batches]
    widths = {batch["input_ids"].shape[1] for batch in batches}
    widest = max(widths)
    if sorts:
        lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches]).cpu()
    elif len(widths) > 1:
        raise ValueError(
            f"texts_at_once={at_once} needs texts of one length, or a data collator with text_padding, as "
            f"ContrastiveCollator has; got micro-batches of {' and '.join(map(str, sorted(widths)))} tokens. Pad all "
            "texts to one length, or omit texts_at_once."
        )
    else:
        lengths = torch.full((sum(sizes),), widest)
    order = lengths.argsort(descending=True, stable=True)
    # The first micro-batches have the texts of all, but for the last one where it keeps its own.
    head = sizes[:-1] if last_has_texts and at_once > 1 else sizes
    groups = [sum(head[first : first + at_once]) for first in range(0, len(head), at_once)]
    new_sizes = [*groups, *[0] * (len(head) - len(groups)), *sizes[len(head) :]]
    fills = {name: (padding or {}).get(name, 0) for name in names}
    texts = {name: torch.cat([widened(batch[name], widest, fill) for batch in batches]) for name, fill in fills.items()}
    if "start_texts" in batches[0]:  # their embeddings at the start go with them
        texts["start_texts"] = torch.cat([batch["start_texts"] for batch in batches])
    for batch, part in zip(batches, order.split(new_sizes), strict=True):
        if len(part) == 0:
            batch[NO_TEXTS] = True
        rows = part if len(part) else order[-1:]
        # A tower of unknown padding may take texts of only one length.
        longest = int(lengths[rows[0]]) if len(part) or not sorts else MULTIPLE
        width = min(-(-longest // MULTIPLE) * MULTIPLE, widest)
        for name, values in texts.items():
            places = on_device(rows if name in fills else part, values.device)
            batch[name] = values[places, :width] if name in fills else values[places]
    return order.argsort()


def widened(tokens: Tensor, length: int, value: int) -> Tensor:
    """Tokens [n, L] padded with a value at their end, [n, length]."""
    return nn.functional.pad(tokens, (0, length - tokens.shape[1]), value=value)


# ---- The window ----


def on_device(rows: Tensor, device: torch.device) -> Tensor:
    """A small tensor, of the CPU perhaps, on a device. The host does not wait until the device has got there."""
    return rows.to(device, non_blocking=True)


class GradientNorms:
    """The norms of the gradients of a window, which are read once for those of all and of parts of them.

    Args:
        parameters: those that have a gradient, on one device and of one dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._gradients = {p: p.grad for p in parameters if p.grad is not None}
        self._versions = [gradient._version for gradient in self._gradients.values()]
        self._norms = dict(zip(self._gradients, torch._foreach_norm(list(self._gradients.values())), strict=True))
        self.total = self.of(self._gradients)

    def of(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of the gradients of these together, to the bit as `torch.nn.utils.get_total_norm` computes it."""
        return torch.linalg.vector_norm(torch.stack([self._norms[p] for p in parameters if p in self._norms]))

    def clipped(self, most: float = math.inf) -> Tensor | None:
        """Scales the gradients so that their norm is at most this, and returns what it was.

        None if they were changed since it was computed, or for a second call: then it does nothing.
        """
        gradients, self._gradients = self._gradients, {}  # which are freed after the optimizer's step
        found = [gradient._version if p.grad is gradient else -1 for p, gradient in gradients.items()]
        if found != self._versions:
            return None
        if most < math.inf:
            nn.utils.clip_grads_with_norm_(gradients, most, self.total)
        return self.total


@dataclass
class MicroBatch:
    """Keeps the outputs of the frozen towers for a batch of the data loader, and what each term compares it with."""

    frozen_outputs: dict[str, Any] = field(default_factory=dict)
    references: list[Features] = field(default_factory=list)  # from the first pass on


@dataclass(eq=False, repr=False)
class Window:
    """The micro-batches of one optimizer step on this process, while they are trained.

    Args:
        batches: as the data loader returned them; none between two windows.
        padding, at_once, last_has_texts: how texts are dealt out anew, as for `deal_texts`.
        keeps_loaded: whether the step may have to be repeated with smaller micro-batches.
        rows_at: the rows of the training set for places (micro-batch, row) of the window; empty if they are not known.
    """

    batches: list[Any]
    padding: Mapping[str, int] | None = None
    at_once: int = 1
    _: KW_ONLY
    last_has_texts: bool = True
    keeps_loaded: bool = False
    rows_at: Callable[[Sequence[tuple[int, int]]], list[int]] = lambda places: []

    def __post_init__(self) -> None:
        self.is_selected = False  # whether it is decided of which pairs the contrastive loss is computed
        self.selected: Tensor | None = None  # [images] bool on the CPU, these pairs; None for all
        self._take(self.batches)

    def _take(self, batches: list[Any]) -> None:
        self.batches = batches
        if not all(batch.get(NO_MASK) for batch in batches):  # texts of one go to another
            for batch in batches:
                batch.pop(NO_MASK, None)
        # As the data loader returned them, if they are kept.
        self.loaded = [dict(batch) for batch in batches] if self.keeps_loaded else []
        # The numbers of images, and of texts, in each micro-batch as the data loader returned it.
        self.sizes = [[len(images_of(batch)) for batch in batches], [len(batch["input_ids"]) for batch in batches]]
        self._text_places = deal_texts(batches, self.padding, self.at_once, last_has_texts=self.last_has_texts)
        self.gradient_norms: GradientNorms | None = None  # once they are known
        self.term_values: dict[str, Tensor] = {}  # means over the processes, by the names of the terms, once known

    def divide(self, largest: int | None) -> None:
        """Begins anew with micro-batches of at most so many pairs. Pairs that were selected stay so."""
        for index in range(len(self)):
            self.release(index)  # Trainer's loop holds its batches
        self._take(split_batches(self.loaded, largest))

    def __len__(self) -> int:
        return len(self.batches)

    def in_order(self, rows: Sequence[Tensor]) -> Features:
        """Rows of the window's images and texts, [images, ...] and [texts, ...], as the data loader ordered them."""
        images, texts = rows
        if self._text_places is None or len(texts) == 0:  # gradients of a frozen tower
            return images, texts
        return images, texts[on_device(self._text_places, texts.device)]

    def release(self, index: int) -> None:
        """Drops the images of a micro-batch after its backward: Trainer holds the window until it fetches the next."""
        self.batches[index].pop("pixel_values", None)

    def pair_ids(self) -> Tensor | None:
        """[images] int64, where the batches have them."""
        ids = [batch["pair_ids"] for batch in self.batches if "pair_ids" in batch]
        return torch.cat(ids) if ids else None

    def pair_keys(self) -> Tensor:
        """[images] int64: what each pair is known by from one window to the next, or -1; see `KeyedItem`."""
        return torch.cat([batch["pair_keys"] for batch in self.batches])

    def replayed(self) -> Tensor | None:
        """[images] bool on the CPU: which pairs are old; None without replay."""
        if "new_images" not in self.batches[0]:
            return None
        each = zip(self.batches, self.sizes[0], strict=True)
        return torch.cat([torch.arange(images) >= batch["new_images"] for batch, images in each])

    def caption_image(self) -> Tensor | None:
        """[texts] int64 on the CPU: the image of the window that each text belongs to, or -1 for negative captions.

        None if text i belongs to image i in all batches.
        """
        if not any("caption_image" in batch for batch in self.batches):
            return None
        parts, images = [], 0
        for batch, count in zip(self.batches, self.sizes[0], strict=True):
            part = batch["caption_image"].cpu() if "caption_image" in batch else torch.arange(count)
            parts.append(torch.where(part < 0, part, part + images))
            images += count
        return torch.cat(parts)


# ---- Batches with some of the images of another one ----


def split_batches(batches: Sequence[Mapping[str, Tensor]], largest: int | None) -> list[Any]:
    """The batches of a window in their order, split equally into parts of at most ``largest`` images; None splits none.

    Images keep their order. The captions of an image stay with it, and negative captions are shared equally.
    """
    if largest is None:
        return list(batches)
    parts: list[Any] = []
    for batch in batches:
        images = len(images_of(batch))
        count = -(-images // largest)
        shares = (rows.tensor_split(count) for rows in (torch.arange(images), _negatives(batch)))
        parts += [batch] if count == 1 else [_rows(batch, *share) for share in zip(*shares, strict=True)]
    return parts


def contents(batch: Mapping[str, object]) -> list[tuple[str, int, int]]:
    """A value that differs once an entry of a batch is added, replaced, removed or changed in place."""
    return [(name, id(value), getattr(value, "_version", 0)) for name, value in batch.items()]


def repeated(batch: Mapping[str, Tensor], images: int) -> dict[str, Any]:
    """A batch of so many images, which are those of another one in turn."""
    of_batch, negatives = len(images_of(batch)), _negatives(batch)
    return _rows(batch, torch.arange(images) % of_batch, negatives.repeat(-(-images // of_batch)))


def _negatives(batch: Mapping[str, Tensor]) -> Tensor:
    """The places of the texts that belong to no image, [negatives] int64."""
    belongs = batch.get("caption_image")
    return torch.empty(0, dtype=torch.int64) if belongs is None else (belongs.cpu() < 0).nonzero().flatten()


def _rows(batch: Mapping[str, Tensor], images: Tensor, negatives: Tensor) -> dict[str, Any]:
    """The batch of some images of another one, with their texts.

    Args:
        batch: as a data collator returned it; its texts have not been dealt out.
        images: [images] int64 on the CPU, the rows of the images.
        negatives: [texts] int64 on the CPU, the rows of negative captions to take along.
    """
    count, texts = len(images_of(batch)), images
    inputs: dict[str, Any] = {**batch}
    if (belongs := inputs.pop("caption_image", None)) is not None:
        # [images, texts]: in the order of the images, and of the texts of each of them.
        of_images, rows = (images[:, None] == belongs.cpu()[None]).nonzero(as_tuple=True)
        texts = torch.cat((rows, negatives))
    for name, value in inputs.items():
        if name == "new_images":  # the first ones
            inputs[name] = int((images < value).sum())
        elif isinstance(value, Tensor) and (name in _OF_TEXTS or (value.dim() and len(value) == count)):
            inputs[name] = _taken(value, texts if name in _OF_TEXTS else images)
    if belongs is not None:
        inputs["caption_image"] = torch.cat((of_images, torch.full_like(negatives, -1))).to(belongs.device)
    return inputs


def _taken(value: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor, without a copy if they are consecutive."""
    if len(rows) and torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + len(rows))):
        return value[int(rows[0]) : int(rows[0]) + len(rows)]
    return value[rows.to(value.device)]
