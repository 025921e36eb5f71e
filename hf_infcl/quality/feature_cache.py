"""What a frozen model returns for a dataset, computed once and read at every epoch.

These are the outputs of a frozen image tower, read instead of the images (LiT, arXiv 2111.07991), and the embeddings of
the start of a training, which ``keep_features`` compares with.

The name of the folder that holds the features of a dataset is a fingerprint of the weights and config of what is
frozen, the preparation of images and captions, the rows and their order, and the dtype of the computation. If any of
these changes, so does the folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..data import ContrastiveCollator, ImageTextDataset
from ..data.replay import Replayed
from ..data.sources import TableSource
from ..data.store import Store, of_caption
from ..models.sharding import is_sharded
from ..processes.collectives import failures_announced
from ..processes.lock import check_writable
from ..processes.signals import Interruptions
from ..step.grad_cache import random_state_kept
from ..step.terms import Context
from .embedding import Encode, compute, fingerprint, normalised_by


class CachedItems(Dataset[dict[str, Any]]):
    """The items of an `ImageTextDataset` with what a frozen model has returned for them.

    Args:
        features: those of a frozen tower. An item then has ``image_features`` [H] fp32 in place of ``image``, which is
            not read.
        start: the embeddings of the start of a training, by "images" and "texts". An item then also has ``at_start``
            [1 + captions, D] fp32, of its image and of its captions.
    """

    def __init__(
        self, pairs: ImageTextDataset, features: Store | None = None, start: Mapping[str, Store] | None = None
    ) -> None:
        self.dataset, self._features, self._start = pairs, features, start

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        key = str(self.dataset.number(row))
        if self._features is None:
            item = self.dataset[row]
        else:
            item = {"image_features": _read(self._features, [key])[0]} | self.dataset.without_image(row)
        if self._start is None:
            return item
        captions = [of_caption(key, caption) for caption in item["caption"]]
        both = _read(self._start["images"], [key]), _read(self._start["texts"], captions)
        return {**item, "at_start": torch.cat(both)}


def _read(store: Store, keys: Sequence[str]) -> Tensor:
    values, known = store.find(keys)
    if not known.all():
        raise ValueError(f"{store.folder} lacks the features of {keys[int((~known).argmax())]!r}. Delete that folder.")
    return torch.from_numpy(values)


def with_cached_features(context: Context, interruptions: Interruptions) -> Any:
    """The training set with what ``args.cache_features`` has, if it is set, and computes what it lacks; collective.

    These are the outputs of a frozen image tower instead of the images, and with ``keep_features`` the embeddings of
    the start. Any number of datasets and models share the folder, which all processes can read.

    Raises:
        ValueError: the features of the images are not the same at every step, or cannot be used; the folder is not
            writable.
    """
    pairs, args = context.data, context.args
    if pairs is None or args.cache_features is None:
        return pairs
    if isinstance(pairs, Replayed):
        new, old = (with_cached_features(replace(context, data=part), interruptions) for part in pairs.datasets)
        return Replayed(new, old, args)
    interruptions.phases.enter("computing features")
    tower: Any = context.encoder.frozen_towers().get("image")
    start = context.start if args.keep_features else None
    of_run = {"sharded": is_sharded(context.accelerator), "compiled": bool(args.torch_compile)}
    check_cacheable(pairs, tower, context.collator, keeps=start is not None, **of_run)

    def encoded(encode: Encode, inputs: dict[str, Tensor]) -> Tensor:
        interruptions.phases.note_progress()
        return encode(inputs).float()

    def stores(model: nn.Module, encoders: Mapping[str, Encode]) -> dict[str, Store]:
        source = TableSource(pairs.table, pairs, pairs.caption_column if "texts" in encoders else None)
        place = Path(str(args.cache_features), fingerprint(source, model, context))
        with failures_announced():
            check_writable(place, "cache_features")
        found = {kind: Store(place, kind, source.parts) for kind in encoders}
        each = {kind: partial(encoded, encode) for kind, encode in encoders.items()}
        how: Any = {"batch_size": args.per_device_train_batch_size, "agree": interruptions.agree}
        compute(source, context, each, found, **how)
        return found

    features, of_start = None, None
    with random_state_kept(args.device):  # the training is the same if the features are there already
        if tower is not None:
            features = stores(tower.eval(), {"images": context.encoder.image_features})["images"]
        if start is not None:
            encoder = start.encoder
            assert encoder is not None
            both = {"images": encoder.encode_images, "texts": encoder.encode_texts}
            of_start = stores(encoder.model, {kind: partial(normalised_by, encode) for kind, encode in both.items()})
    return CachedItems(pairs, features, of_start)


def check_cacheable(
    pairs: object, tower: nn.Module | None, collator: object, *, keeps: bool, sharded: bool, compiled: bool
) -> None:
    """Raises a ValueError if the features of the images are not the same at every step, or cannot be used."""
    reason = ""
    if tower is None and not keeps:
        reason = 'the image tower trains. Freeze it with freeze="image", or keep the start\'s with keep_features'
    elif not isinstance(pairs, ImageTextDataset):
        reason = f"the training set is a {type(pairs).__name__}. Use an ImageTextDataset"
    elif pairs.changes_images:
        reason = (
            "the images of a row may differ from epoch to epoch. Use ImageTextDataset with augmentation='none' and "
            "on_bad_sample='raise'"
        )
    elif not isinstance(collator, ContrastiveCollator):
        reason = f"the data collator is a {type(collator).__name__}. Pass processing_class, or a ContrastiveCollator"
    elif sharded:
        reason = "FSDP is on. Use plain processes, which hold the whole tower"
    elif keeps and pairs.negative_caption_column:
        reason = "keep_features needs the embeddings of negative captions at every step. Leave one of the three out"
    elif compiled and tower is not None:
        reason = "torch_compile is on, which would compile the model again without the tower. Leave it off"
    if reason:
        raise ValueError(f"cache_features computes what is frozen once, but {reason}.")
