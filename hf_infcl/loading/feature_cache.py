"""What a frozen model returns for a dataset, computed once and read at every epoch.

These are the outputs of a frozen image tower, read instead of the images (LiT, arXiv 2111.07991), and the embeddings of
the start of a training, which ``keep_features`` compares with.

The name of the folder that holds the features of a dataset is a fingerprint of the weights and config of what is
frozen, the preparation of images and captions, the rows and their order, and the dtype of the computation. If any of
these changes, so does the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from transformers.utils import logging

from ..checkpoints.files import describe
from ..checkpoints.lock import check_writable
from ..checkpoints.run_options import options_of_model
from ..data import ContrastiveCollator, ImageTextDataset
from ..options.arguments import InfCLTrainingArguments
from ..processes.collectives import Processes, failures_announced

if TYPE_CHECKING:
    import datasets

logger = logging.get_logger(__name__)

ROWS_OF_SHARD = 4096


class CachedItems(Dataset[dict[str, Any]]):
    """The items of an `ImageTextDataset` with what a frozen model has returned for them.

    Args:
        images: the features of a frozen tower, by row. An item then has ``image_features`` [H] fp32 in place of
            ``image``, which is not read.
        start: the embeddings of the start of a training, by row: of its image and of all its captions. An item then
            also has ``at_start`` [1 + captions, D] fp32, of its image and of its own captions.
    """

    def __init__(
        self, pairs: ImageTextDataset, images: datasets.Dataset | None = None, start: datasets.Dataset | None = None
    ) -> None:
        self.dataset, self._images, self._start = pairs, images, start

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        item = self.dataset[row] if self._images is None else self.image_input(row) | self.dataset.without_image(row)
        if self._start is None:
            return item
        captions = self.dataset.captions(row)
        embeds = _read(self._start, row).view(1 + len(captions), -1)
        return {**item, "at_start": embeds[[0, *(1 + captions.index(caption) for caption in item["caption"])]]}

    def image_input(self, row: int) -> dict[str, Any]:
        """What the image tower, or what follows on it, gets for a row."""
        if self._images is None:
            return {"image": self.dataset.image(row)}
        return {"image_features": _read(self._images, row)}


def cached(
    content: str,
    inputs: FeatureInputs,
    args: InfCLTrainingArguments,
    tower: nn.Module,
    encode: Callable[[dict[str, Tensor]], Sequence[Tensor]],
    collator: ContrastiveCollator,
    dtype: str,
    agree: Callable[[], object],
) -> datasets.Dataset:
    """Computes the features that the folder ``cache_features`` does not contain yet. Collective.

    The processes divide the shards among themselves. A shard gets its name once it is complete, so a run after an
    interruption only computes the missing shards. A shard that differs from its checksum is computed again.

    Args:
        content: a fingerprint of the inputs.
        args: ``cache_features`` is a folder that all processes can read. Any number of datasets and models share it:
            `fingerprint` tells them apart.
        tower: what is frozen.
        encode: maps a batch of the collator to the features of its rows, in host memory.
        dtype: of the tower's computation.
        agree: called before each shard of a process and at the end; collective. It raises an error on all processes if
            one has failed, and may end the training.

    Returns:
        A dataset of the bytes of the features, in fp32, by row.

    Raises:
        ValueError: an image cannot be decoded, or the folder is not writable. The other processes raise an
            OtherRankFailedError.
    """
    import datasets

    place = Path(str(args.cache_features), fingerprint(content, tower, collator, dtype))
    count = -(-len(inputs) // ROWS_OF_SHARD)
    shards = [place / f"{number:06}-of-{count:06}.arrow" for number in range(count)]
    with failures_announced():
        check_writable(place, "cache_features")

    def compute(number: int) -> None:
        rows = range(number * ROWS_OF_SHARD, min(len(inputs), (number + 1) * ROWS_OF_SHARD))
        logger.info(f"Computing the features of rows {rows.start} to {rows.stop - 1} of {len(inputs)}.")
        options: Any = {"num_workers": args.dataloader_num_workers, "pin_memory": args.dataloader_pin_memory}
        loader = DataLoader(Subset(inputs, rows), args.per_device_train_batch_size, collate_fn=collator, **options)
        _write(shards[number], [row for batch in loader for row in encode(batch)])

    for_each_missing(count, lambda number: _is_whole(shards[number]), compute, agree)
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(shard)) for shard in shards])


def for_each_missing(
    count: int, is_there: Callable[[int], bool], compute: Callable[[int], None], agree: Callable[[], object]
) -> None:
    """Computes what is missing of the numbers below ``count``; the processes take turns. Collective; see `cached`."""
    processes = Processes()
    for first in range(0, count, processes.world_size):
        agree()
        number = first + processes.rank
        with failures_announced():
            if number < count and not is_there(number):
                compute(number)
    agree()  # waits until all are computed


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


def fingerprint(content: str, tower: nn.Module, collator: ContrastiveCollator, dtype: str) -> str:
    """A hash, 32 hexadecimal digits, of all that features of a dataset with this ``image_fingerprint`` depend on."""
    digest = hashlib.sha256(f"2 {type(tower).__name__} {dtype} {collator.image_backend}\n".encode())
    # The config has what the weights do not show, and the printed modules show what was changed after loading.
    digest.update(f"{json.dumps(options_of_model(tower), sort_keys=True)} {tower}\n".encode())
    digest.update(collator.processor.image_processor.to_json_string().encode())
    digest.update(content.encode())
    for name, value in tower.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


class FeatureInputs(Dataset[dict[str, Any]]):
    """What features are computed from: the images of a dataset, or images and all their captions."""

    def __init__(self, items: CachedItems, *, captions: bool) -> None:
        self._items, self._captions = items, captions

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, row: int) -> dict[str, Any]:
        captions = {"caption": self._items.dataset.captions(row)} if self._captions else {}
        return self._items.image_input(row) | captions


def _is_whole(path: Path) -> bool:
    """Whether a shard exists and is unchanged."""
    try:
        whole: bool = json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) == describe(path)
    except (OSError, ValueError):
        whole = False
    if not whole and path.exists():
        logger.warning(f"{path} is damaged, or has no checksum. It is computed again.")
    return whole


def _read(features: datasets.Dataset, row: int) -> Tensor:
    return torch.frombuffer(bytearray(features[row]["features"]), dtype=torch.float32)


def _write(path: Path, rows: list[Tensor]) -> None:
    """Writes the checksum of a shard, and then the shard completely or not at all."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    partial = path.with_suffix(f".{os.getpid()}.partial")
    schema = datasets.Features(features=datasets.Value("binary"))
    with ArrowWriter(path=str(partial), features=schema) as writer:
        for row in rows:
            writer.write({"features": row.float().numpy().tobytes()})
        writer.finalize()
    path.with_suffix(".json").write_text(json.dumps(describe(partial)), encoding="utf-8")
    os.replace(partial, path)
