"""The outputs of a frozen image tower, computed once and read instead of the images (LiT, arXiv 2111.07991).

The name of the folder that holds the features of a dataset is a fingerprint of the tower's weights and config, the
preparation of the images, the rows and their order, and the dtype of the computation. If any of these changes, so does
the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers.utils import logging

from ..checkpoints.files import describe
from ..checkpoints.lock import check_writable
from ..data import ContrastiveCollator, ImageTextDataset
from ..options.run_options import options_of_model
from ..processes.collectives import Processes, failures_announced

if TYPE_CHECKING:
    import datasets

logger = logging.get_logger(__name__)

ROWS_OF_SHARD = 4096


class CachedImages(Dataset[dict[str, Any]]):
    """The pairs of an `ImageTextDataset` with the features of a frozen tower instead of the images.

    Item i is the dataset's item i with ``image`` replaced by ``image_features`` [H] fp32.

    Args:
        pairs: the dataset that provides captions and pair ids. Its `set_epoch` is called along with this one's.
        features: the bytes of the features, one row for each row of ``pairs``, as written by `cache_images`.
    """

    def __init__(self, pairs: ImageTextDataset, features: datasets.Dataset) -> None:
        self.dataset, self._features = pairs, features

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def __getitem__(self, row: int) -> dict[str, Any]:
        features = torch.frombuffer(bytearray(self._features[row]["features"]), dtype=torch.float32)
        return {"image_features": features, **self.dataset.without_image(row)}


def cache_images(
    pairs: ImageTextDataset,
    folder: str,
    tower: nn.Module,
    encode: Callable[[dict[str, Any]], Tensor],
    collator: ContrastiveCollator,
    dtype: str,
    agree: Callable[[], Any],
    **loading: Any,
) -> CachedImages:
    """Computes the image features that the folder does not contain yet. Collective: every process calls it.

    The processes divide the shards among themselves. A shard gets its name once it is complete, so a run after an
    interruption only computes the missing shards. A shard that differs from its checksum is computed again.

    Args:
        pairs: the training set.
        folder: a folder that all processes can read; any number of datasets and models can share it.
        tower: the frozen tower. Its weights and its config are part of the fingerprint.
        encode: maps a batch of the collator to the tower's pooled output [b, H].
        collator: prepares the images.
        dtype: the dtype of the tower's computation, which is part of the fingerprint.
        agree: called before each shard of a process and at the end; collective. It raises an error on all processes if
            one has failed, and may end the training.
        **loading: options of the DataLoader.

    Raises:
        ValueError: an image cannot be decoded, or the folder is not writable. The other processes raise an
            OtherRankFailedError.
    """
    import datasets

    place = Path(folder, fingerprint(pairs.image_fingerprint(), tower, collator, dtype))
    count = -(-len(pairs) // ROWS_OF_SHARD)
    shards = [place / f"{number:06}-of-{count:06}.arrow" for number in range(count)]
    with failures_announced():
        check_writable(place, "cache_features")

    def compute(number: int) -> None:
        rows = range(number * ROWS_OF_SHARD, min(len(pairs), (number + 1) * ROWS_OF_SHARD))
        logger.info(f"Computing the image features of rows {rows.start} to {rows.stop - 1} of {len(pairs)}.")
        loader = DataLoader(_Images(pairs, rows), collate_fn=collator, **loading)
        _write(shards[number], [encode(batch) for batch in loader])

    for_each_missing(count, lambda number: _is_whole(shards[number]), compute, agree)
    parts = [datasets.Dataset.from_file(str(shard)) for shard in shards]
    return CachedImages(pairs, datasets.concatenate_datasets(parts))


def for_each_missing(
    count: int, is_there: Callable[[int], bool], compute: Callable[[int], None], agree: Callable[[], Any]
) -> None:
    """Computes those of the numbers 0 to ``count - 1`` that are not there; the processes take turns. Collective.

    Args:
        count: of the numbers.
        is_there: whether a number needs no computation.
        compute: called with each other number, by one process.
        agree: see `cache_images`.
    """
    processes = Processes()
    for first in range(0, count, processes.world_size):
        agree()
        number = first + processes.rank
        with failures_announced():
            if number < count and not is_there(number):
                compute(number)
    agree()  # waits until all are computed


def check_cacheable(pairs: Any, tower: nn.Module | None, collator: Any, *, sharded: bool, compiled: bool) -> None:
    """Raises a ValueError if the features of the images are not the same at every step, or cannot be used."""
    reason = ""
    if tower is None:
        reason = 'the image tower trains. Freeze it with freeze="image"'
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
        reason = "FSDP or DeepSpeed is on. Use plain processes, which hold the whole tower"
    elif compiled:
        reason = "torch_compile is on, which would compile the model again without the tower. Leave it off"
    if reason:
        raise ValueError(f"cache_features computes the image tower's outputs once, but {reason}.")


def fingerprint(content: str, tower: nn.Module, collator: ContrastiveCollator, dtype: str) -> str:
    """A hash, 32 hexadecimal digits, of everything on which the features of a dataset depend.

    Args:
        content: what ``image_fingerprint`` of the dataset returns.
        tower: whose weights and config count.
        collator: prepares the images.
        dtype: of the computation.
    """
    digest = hashlib.sha256(f"2 {type(tower).__name__} {dtype} {collator.image_backend}\n".encode())
    # The config has what the weights do not show, and the printed modules show what was changed after loading.
    digest.update(f"{json.dumps(options_of_model(tower), sort_keys=True)} {tower}\n".encode())
    digest.update(collator.processor.image_processor.to_json_string().encode())
    digest.update(content.encode())
    for name, value in tower.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


class _Images(Dataset[dict[str, Any]]):
    """The images of some rows."""

    def __init__(self, pairs: ImageTextDataset, rows: range) -> None:
        self._pairs, self._rows = pairs, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._pairs.image(self._rows[index])}


def _is_whole(path: Path) -> bool:
    """Whether a shard exists and is unchanged."""
    try:
        whole: bool = json.loads(_checksum_of(path).read_text(encoding="utf-8")) == describe(path)
    except (OSError, ValueError):
        whole = False
    if not whole and path.exists():
        logger.warning(f"{path} is damaged, or has no checksum. It is computed again.")
    return whole


def _checksum_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _write(path: Path, batches: list[Tensor]) -> None:
    """Writes the checksum of a shard, and then the shard completely or not at all."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    rows = torch.cat(batches).float().cpu().numpy()
    partial = path.with_suffix(f".{os.getpid()}.partial")
    schema = datasets.Features(features=datasets.Value("binary"))
    with ArrowWriter(path=str(partial), features=schema) as writer:
        for row in rows:
            writer.write({"features": row.tobytes()})
        writer.finalize()
    _checksum_of(path).write_text(json.dumps(describe(partial)), encoding="utf-8")
    os.replace(partial, path)
