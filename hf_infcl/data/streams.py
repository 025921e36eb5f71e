"""Streams of image-text pairs from shards, whose items do not depend on the process or worker that reads them."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import logging
import math
import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from ..files.text import Url, describe_cause, shortened
from ..shards.lanes import Shard
from ..shards.layout import DamagedShardError
from ..shards.opening import ReadError, content_tag, digest, find_shards, open_shard, shard_names
from ..shards.readers import Columns, Sample, reader_of
from .collator import DataCollator
from .images import BadSampleError, decode_rgb
from .pairs import PairSource, content_pair_id, usable_captions
from .stream_batches import Share, StreamBatches
from .transforms import Augmentation, augment

logger = logging.getLogger(__name__)

_CURE = 'Repair or drop it, or leave such samples out with on_bad_sample="skip".'
_SAMPLED, _SAMPLED_SHARDS = 256, 8  # of `sample_captions`


class ImageTextStream(PairSource, IterableDataset[dict[str, Any]]):
    """Image-caption pairs from tar or parquet shards, without end: pass after pass, each in another order.

    It yields the same items as `ImageTextDataset`, always with a pair id: dicts of
        image, cropped: as in `ImageTextDataset`.
        caption: list of one str, or of up to `captions_per_image`, drawn anew in each pass.
        negative_captions: as in `ImageTextDataset`; only with a `negative_caption_column`.
        pair_id: int64, determined by `pair_id_column`, or else by image and captions: equal for items of the same
            sample, and different from the ids of all others, also of other streams (see `content_pair_id`).
        skipped: int, the number of bad samples left out before this item; only with `on_bad_sample="skip"`.

    A sample is bad if its image is missing or cannot be decoded, if it has no visible caption or no pair id, or if its
    name points outside its folder. The rest of a damaged shard counts as one bad sample. A failed read is not a bad
    sample: it is repeated from the byte that it had reached and, if it keeps failing, raised.

    `InfCLTrainer` accepts a stream as its training set. In your own training loop, use the micro-batches of `batches`.

    Args:
        sources: names of shards, in any form that `hf_infcl.shards.opening.find_shards` accepts: files, globs, ranges
            such as ``shards/{00000..00127}.tar``, folders, Hub ids.
        weights: one per source. Samples are drawn from the sources in this proportion, and an exhausted source starts
            its next pass. Without weights, the shards of all sources form one set, and each pass contains every sample
            once.
        split: the split of sources that are folders or Hub ids.
        name: the configuration of sources that are folders or Hub ids.
        image_column: in tar files, an extension; "image" means the file with the extension of an image. None reads no
            images, and a ``caption_column`` of None no captions, as `infcl embed` does; training needs both.
        caption_column: in tar files a field of the ``.json`` or an extension; "caption" also finds ``.txt``.
        captions_per_image: the maximum number of different captions to draw from a list.
        negative_caption_column: as in `ImageTextDataset`; in tar files a field of the ``.json`` or an extension,
            which at least one of the first samples must have.
        pair_id_column: samples with equal values are never each other's negatives; see `ImageTextDataset`.
        seed: determines the order, the mixture, the drawn captions and the augmentation.
        on_bad_sample: "raise" a ValueError that names the sample, or "skip" the sample and count it.
        shuffle_buffer: the number of encoded samples that a lane holds and permutes.
        open_shards: the number of shards that a lane reads in turn.
        lanes: a multiple of every value of processes × workers that the run may ever have; by default, that value at
            the start of the run. More lanes hold more buffers.
        samples_per_epoch: the number of samples that `InfCLTrainer` counts as an epoch, because the length of a pass is
            unknown. Without it, training needs ``max_steps``.
        augmentation, min_side: as in `ImageTextDataset`.

    Raises:
        ValueError: there are no such shards, columns or captions, or an option is invalid.
    """

    _LACKS = "it has no {0} in column {1!r}"

    def __init__(
        self,
        sources: str | Sequence[str],
        *,
        weights: Sequence[float] | None = None,
        split: str = "train",
        name: str | None = None,
        image_column: str | None = "image",
        caption_column: str | None = "caption",
        captions_per_image: int = 1,
        negative_caption_column: str | None = None,
        pair_id_column: str | None = None,
        seed: int = 0,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        shuffle_buffer: int = 2048,
        open_shards: int = 4,
        lanes: int | None = None,
        samples_per_epoch: int | None = None,
        augmentation: Augmentation = "none",
        min_side: int | None = None,
    ) -> None:
        columns = Columns(image_column, caption_column, pair_id_column, negative_caption_column)
        self._keep(columns, captions_per_image, seed, on_bad_sample, augmentation, min_side)
        self.shuffle_buffer, self.open_shards, self.lanes = shuffle_buffer, open_shards, lanes
        self.samples_per_epoch = samples_per_epoch
        for option in ("shuffle_buffer", "open_shards", "lanes", "samples_per_epoch"):
            if (value := getattr(self, option)) is not None and value < 1:
                raise ValueError(f"{option} must be at least 1, got {value}.")
        sources = [Url(source) for source in ([sources] if isinstance(sources, str) else sources)]
        if not sources:
            raise ValueError("A stream needs at least one source, got none.")
        if weights is not None and len(weights) != len(sources):
            raise ValueError(f"There are {len(weights)} weights for {len(sources)} sources: {weights}, {sources}.")
        if wrong := [weight for weight in weights or () if not 0 < weight < math.inf]:
            raise ValueError(f"A weight must be a positive number, got {wrong[0]}. Leave out sources without one.")
        self.sources, self.name = sources, " ".join(sources)
        self.weights = [1.0] if weights is None else [float(weight) for weight in weights]
        self._processes = 1  # when the stream was pickled
        self.left_out = ""  # says which samples are

        self.shards: list[Shard] = []
        groups: list[list[int]] = []
        for number, source in enumerate(sources):
            urls = find_shards(source, split=split, name=name)
            reader = reader_of(urls)(columns, urls)
            if not reader.has_lists and caption_column:
                self._check_single()
            groups.append(list(range(len(self.shards), len(self.shards) + len(urls))))
            names = [f"{number}/{short}" for short in shard_names(urls)]
            self.shards += [Shard(url, short, reader) for url, short in zip(urls, names, strict=True)]
        self.groups = groups if weights is not None else [list(range(len(self.shards)))]

    @property
    def optional_keys(self) -> set[str]:
        """As `ImageTextDataset.optional_keys`."""
        return {"pair_id", *(["skipped"] if self.on_bad_sample == "skip" else [])}

    def content_fingerprint(self) -> str:
        """The number of shards, and a fingerprint of the sizes of local ones and the revisions of those on the Hub."""
        return f"{self._content}{self.left_out}"

    key_fingerprint = content_fingerprint

    @functools.cached_property
    def _content(self) -> str:
        return f"{len(self.shards)} shards {digest([content_tag(shard.url) for shard in self.shards])}"

    @functools.cached_property
    def places(self) -> list[str]:
        """For each shard, the beginning of its samples' places: its file's name, or its path if files share that name.

        The paths are relative to the folder that holds all shards, so it may move.
        """
        names = [posixpath.splitext(posixpath.basename(shard.url))[0] for shard in self.shards]
        counts, paths = Counter(names), shard_names([shard.url for shard in self.shards])
        return [name if counts[name] == 1 else path for name, path in zip(names, paths, strict=True)]

    def place(self, shard: int, key: str) -> str:
        """The name of a sample of shard number ``shard``, after that of the shard."""
        return f"{self.places[shard]}/{key}"

    def __len__(self) -> int:
        """`samples_per_epoch`, without which Trainer refuses to count epochs. Iteration does not end there."""
        if self.samples_per_epoch is None:
            raise TypeError("A stream without samples_per_epoch has no length.")
        return self.samples_per_epoch

    def __bool__(self) -> bool:
        return True  # without a length as well

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The items one by one, under a DataLoader shared by its workers. To resume, use `batches`.

        Raises:
            ValueError: there are several processes, which would all get the same items.
        """
        if (processes := max(self._processes, _world_size())) > 1:
            raise ValueError(
                f"Each of the {processes} processes would iterate over the same items of the stream. Give each its "
                "share with stream.batches(batch_size, rank=..., world_size=...)."
            )
        info = get_worker_info()
        for (item,), _ in self.batches(1, num_workers=info.num_workers if info else 0):
            yield item

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_processes": _world_size()}  # a worker that is not forked belongs to no group

    def without(self, keys: np.ndarray) -> ImageTextStream:
        """The stream without the samples of some keys, [n] int64 in ascending order; see `sample_key`."""
        changed = copy.copy(self)
        left_out = [keys if shard.without is None else np.union1d(shard.without, keys) for shard in self.shards]
        changed.shards = [shard._replace(without=out) for shard, out in zip(self.shards, left_out, strict=True)]
        changed.left_out = f"{self.left_out} without {len(keys)} samples {hashlib.sha256(keys.data).hexdigest()[:16]}"
        return changed

    def sample_captions(self, count: int) -> list[list[str]]:
        """The captions of up to 256 samples at the beginnings of eight shards, or fewer; bad samples are left out."""
        if (column := self.caption_column) is None:
            return []
        count = min(count, _SAMPLED)
        shards = self.shards[:: -(-len(self.shards) // _SAMPLED_SHARDS)]
        samples: list[list[str]] = []
        for shard in shards:
            with suppress(DamagedShardError, ReadError):  # which the training names
                for _, _, sample in itertools.islice(shard.samples(), -(-count // len(shards))):
                    with suppress(ValueError):
                        if not isinstance(sample, DamagedShardError):
                            row: dict[str, Any] = shard.reader.row(sample)
                            samples.append(usable_captions(row[column]))
        return [captions for captions in samples if captions]

    def batches(self, batch_size: int | Share, collate: DataCollator = list, **where: Any) -> StreamBatches:
        """The micro-batches of one process; see `StreamBatches` for the options."""
        return StreamBatches(self, batch_size, collate, **where)

    def item(self, passes: int, shard: int, key: str, sample: Sample) -> dict[str, Any]:
        """The item of a raw sample, after this many passes.

        Raises:
            BadSampleError: the sample cannot be used, with the names of shard and sample.
        """
        name = f"{self.shards[shard].name} {key}"
        with self._row(shard, key, sample) as row:
            if self.image_column is None or self.caption_column is None:
                raise ValueError("it is read without its image or its captions")
            encoded, item = self._encoded(shard, row), self._draw_texts(row, name, passes)
            if self.pair_id_column is None:
                item["pair_id"] = content_pair_id(encoded, usable_captions(row[self.caption_column]))
            if self._number is not None:
                item["place"] = (self._number, self.place(shard, key))
            image = decode_rgb(encoded, self._min_side)
            return augment(image, self._augmentation, self._seed_for(name, "augmentation", passes)) | item

    def image_and_captions(self, shard: int, key: str, sample: Sample) -> tuple[np.ndarray | None, list[str]]:
        """The image of a raw sample and all its captions, of which it need not have any.

        Raises:
            BadSampleError: as `item`.
        """
        with self._row(shard, key, sample) as row:
            image = None if self.image_column is None else decode_rgb(self._encoded(shard, row), self._min_side)
            return image, [] if self.caption_column is None else usable_captions(row[self.caption_column])

    @contextmanager
    def _row(self, shard: int, key: str, sample: Sample) -> Iterator[dict[str, Any]]:
        """The values of a sample; what fails with them is a BadSampleError with the names of shard and sample."""
        if isinstance(sample, DamagedShardError):
            raise BadSampleError(f"{sample} {_CURE}", str(sample)) from sample
        try:
            if _leaves_folder(key):
                raise ValueError("its name points outside its folder")
            yield self.shards[shard].reader.row(sample)
        except ReadError:
            raise
        except Exception as error:  # decoders raise exceptions of any class
            name, cause = f"Sample {shortened(key)} of the shard {self.shards[shard].url!r}", describe_cause(error)
            raise BadSampleError(f"{name} is bad: {cause}. {_CURE}", cause) from error

    def _encoded(self, shard: int, row: dict[str, Any]) -> bytes:
        image: bytes | str | None = row[self.image_column or ""]
        if image is None:
            raise ValueError(f"it has no image in column {self.image_column!r}")
        if not isinstance(image, str):
            return image
        if _leaves_folder(image):
            raise ValueError(f"the path of its image, {image!r}, points outside the shard's folder")
        with open_shard(posixpath.join(posixpath.dirname(self.shards[shard].url), image)) as file:
            return file.read()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _leaves_folder(name: str) -> bool:
    return name.startswith("/") or ".." in name.split("/") or "://" in name
