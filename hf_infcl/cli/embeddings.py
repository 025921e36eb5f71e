"""`infcl embed` and `infcl score`: the embeddings of images and texts, and how well those of a pair agree."""

import argparse
import heapq
import itertools
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ..card.facts import content_of, has_learned
from ..data import ImageTextDataset, ImageTextStream, load_pairs
from ..data.collator import DataCollator
from ..data.images import ImageDataset, find_column
from ..data.loader import worker_options
from ..data.pairs import usable_captions
from ..data.sets import SetSpec
from ..data.sources import ItemSource, ShardSource, TableSource, source_of_training
from ..data.store import NO_KEY, KeyedItem, KeyedRows
from ..files.hub import stated_licence
from ..files.text import counted
from ..loss.pair_scores import pair_scores
from ..models.open_clip import load
from ..options.commands import ColumnOptions, DataOptions
from ..processes.collectives import Processes, failures_announced
from ..quality.embedding import embed as embedded
from ..quality.ledger import SHOWN, Ledger, ledger_lines, small_jpeg, write_ledger_and_sheet
from ..quality.selection import WithoutNoisyPairs
from ..shards.layout import IMAGE_EXTENSIONS, member_file
from ..shards.opening import find_shards
from ..shards.readers import TarReader, reader_of
from ..trainer.checkpoints import full_disk_explained
from ..trainer.trainer import InfCLTrainer
from .commands import OF_EMBEDDING
from .datasets import training_parts, training_set
from .launched import leave, mistakes_in_one_line, tell
from .parser import Parser

# The entries of a training's file that are about the machine and about chance; the others are about the student.
_OF_FILE = {"bf16", "use_cpu", "per_device_eval_batch_size", "dataloader_num_workers", "seed", "data_seed"}


def embed(parser: Parser, namespace: argparse.Namespace) -> None:
    """Embeds the data, and prints what was written."""
    if namespace.data is None:
        if namespace.dataset is None:
            parser.error("Name the data to embed: DATA, or --dataset as in the training that will read the embeddings.")
        folder = namespace.teacher_embeddings
        parser.keep_only(namespace, {*OF_EMBEDDING.split(), *_OF_FILE, "report_to"}, _OF_FILE)
        if "output_dir" not in parser.typed:
            if folder is None:
                parser.error("Name the folder for the embeddings with --output_dir, or with --teacher_embeddings.")
            namespace.output_dir = folder
    else:
        namespace.dataset = None  # of a file: DATA is embedded instead
    options, _, _, data, columns, _, _, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        if namespace.data is None:
            # New and old pairs, as a training reads them but for what changes them, by the names of their folders.
            parts = enumerate(training_parts(replace(data, min_side=None), columns, args))
            sources = {f"replay_dataset_{n}" if n else "dataset": source_of_training(part) for n, part in parts}
        else:
            spec = SetSpec.read("data", namespace.data)
            sources = {"": make_source(spec, data, columns, options.key_column, parser.given | spec.columns.keys())}
        model, processor, conversion = load(namespace.encoder)
        trainer = InfCLTrainer(model.eval(), args, processing_class=processor)
        of = {f"--{name}" if name else namespace.data: " and ".join(s.kinds) for name, s in sources.items()}
        tell(trainer, *conversion, *[f"Embeds the {kinds} of {name}." for name, kinds in of.items()])
    how: Any = {"format": options.format, "half": options.half_precision, "licence": stated_licence(namespace.encoder)}
    counts = Counter[str]()
    for name, source in sources.items():
        folder, again = Path(args.output_dir, name), "again, which computes what is missing"
        with full_disk_explained(folder, again, keeps=True):
            counts.update(embedded(source, folder, trainer.context, **how))
    skipped = f"; left out: {counted(counts['skipped'], 'row')}" if counts["skipped"] else ""
    use = f" `infcl train --teacher_embeddings {args.output_dir}` reads them." if namespace.data is None else ""
    embedded_so = f"{counted(counts['images'], 'image')} and {counted(counts['texts'], 'text')} were embedded{skipped}."
    tell(trainer, f"{embedded_so} All embeddings are in {Path(args.output_dir)}.{use}")
    leave(trainer)


# ---- What is embedded ----


def make_source(
    spec: SetSpec, data: DataOptions, columns: ColumnOptions, key_column: str | None, named: Collection[str]
) -> ItemSource:
    """The images and captions of a collection: a folder, a Hub id or, streamed, shards; see `table_source`."""
    wanted, split = spec.wanted(vars(columns)), spec.split or data.split
    images, captions = wanted["image_column"], wanted["caption_column"]
    if not data.streaming:
        table = load_pairs(spec.path, split=split, name=spec.name, image_column=images)
        skips = data.on_bad_sample == "skip"
        return table_source(table, images, captions, key_column, spec.path, skips=skips, named=named)
    shards = find_shards(spec.path, split=split)
    reader = reader_of(shards)
    features = reader.features(shards, images)
    if reader is TarReader:
        # It finds a file of any of these extensions as "image" too, and a .txt as "caption".
        found_as = {**dict.fromkeys(IMAGE_EXTENSIONS, "image"), "txt": "caption"}
        features = {**{found_as.get(name, name): one for name, one in features.items()}, **features}
    options = _found_columns(features, {"image_column": images, "caption_column": captions}, named)
    options["on_bad_sample"] = data.on_bad_sample
    return ShardSource(ImageTextStream(spec.path, split=split, **options))


def table_source(
    table: datasets.Dataset,
    image_column: str,
    caption_column: str,
    key_column: str | None,
    folder: str,
    *,
    skips: bool = False,
    named: Collection[str] = (),
) -> TableSource:
    """A table with the wanted columns, or else those of `find_column`, if it has any.

    ``named`` are the options of columns that must exist, because the user has set them.
    """
    if len(table) == 0:
        raise ValueError("The data has no rows.")
    wanted = {"image_column": image_column, "caption_column": caption_column}
    wanted |= {"key_column": key_column} if key_column else {}
    columns = _found_columns(table.features, wanted, named)
    dataset = ImageDataset(table, columns) if columns["image_column"] else None
    return TableSource(table, dataset, columns["caption_column"], key_column, folder=folder, skips=skips)


def _found_columns(features: Any, wanted: Mapping[str, str], named: Collection[str]) -> dict[str, Any]:
    """The columns by their options: the wanted ones, or else the usual ones, or None; see `table_source`."""
    for option, column in wanted.items():
        if option in named and column not in features:
            raise ValueError(
                f"The data has no column {column!r}, which --{option} names. Its columns are {[*features]}."
            )
    usual = {f"{kind}_column": find_column(kind, features, wanted[f"{kind}_column"]) for kind in ("image", "caption")}
    found = {option: column if column in features else None for option, column in {**wanted, **usual}.items()}
    if not (found["image_column"] or found["caption_column"]):
        raise ValueError(
            f"The data has neither images nor captions among its columns {[*features]}. Name --image_column or "
            "--caption_column."
        )
    return found


logger = logging.getLogger(__name__)

# A pair: its key, a caption, the name of a stream's sample and, until it is drawn, a small JPEG; its score, and whether
# it has none because it is alone, among pairs of its own pair id.
_PAIR = np.dtype([("key", "i8"), ("caption", "O"), ("name", "O"), ("picture", "O"), ("score", "f4"), ("alone", "?")])
Batch = tuple[dict[str, Tensor], np.ndarray]  # the model's inputs for some pairs, and these, [n] of `_PAIR`


class _Embedded(NamedTuple):
    """Pairs with their embeddings."""

    pairs: np.ndarray  # [images] of `_PAIR`
    images: Tensor  # [images, D] fp32, of length 1
    texts: Tensor  # [texts, D] fp32, of length 1
    belongs: Tensor  # [texts] int64, the image of each text
    pair_ids: Tensor | None  # [images] int64


def score_pairs(
    trainer: InfCLTrainer, dataset: ImageTextDataset | ImageTextStream, window: int
) -> tuple[Ledger, dict[int, bytes]]:
    """The ledger of a training set, read once, and pictures of its most suspicious pairs by their keys; collective.

    The processes divide the pairs among themselves. Each compares those of a window with each other: so many pairs
    drawn at random from a table, or those that a stream gives one after the other. The last window is larger.

    Args:
        trainer: of the model, which is in evaluation mode. ``per_device_eval_batch_size`` is the number of pairs of a
            forward.
        dataset: the pairs. Of a stream every sample is read once.
        window: the pairs of a window.

    Raises:
        ValueError: there are fewer than two pairs for a process, or a score is not finite.
    """
    processes, parts = Processes(), list[np.ndarray]()
    lowest: list[tuple[float, int, bytes]] = []
    with failures_announced(), torch.no_grad():
        for several in _windows(dataset, trainer, window):
            pairs = _scored(several)
            of_window = pairs[~pairs["alone"]][["score", "key", "picture"]].tolist()
            lowest = heapq.nsmallest(SHOWN, [*lowest, *of_window])
            pairs["picture"] = None
            parts.append(pairs)
    processes.agree([])  # raises what another process has announced
    gathered = processes.gather_objects((np.concatenate(parts), lowest))
    of_ranks, lowest_of_ranks = zip(*gathered, strict=True)
    every = np.concatenate(of_ranks)
    pairs = every[~every["alone"]]
    if wrong := int((~np.isfinite(pairs["score"])).sum()):
        raise ValueError(
            f"The scores of {wrong:,} of {len(pairs):,} pairs are not finite, because embeddings are not. Compute in "
            "another precision, or look at the weights of the model."
        )
    if alone := len(every) - len(pairs):
        said = f"{alone:,} of {len(every):,} pairs have no score, because all pairs of their window have one pair id. "
        said += "Pass a larger --window, or shuffle the shards."
        if not len(pairs):
            raise ValueError(said)
        if processes.rank == 0:
            logger.warning(said)
    shown = {key: picture for _, key, picture in heapq.nsmallest(SHOWN, itertools.chain(*lowest_of_ranks))}
    caption, name = pairs["caption"].tolist(), pairs["name"].tolist()
    ledger = Ledger(dataset.key_fingerprint(), pairs["key"], pairs["score"], caption, name if any(name) else ())
    return ledger, shown


def _windows(
    dataset: ImageTextDataset | ImageTextStream, trainer: InfCLTrainer, window: int
) -> Iterator[list[_Embedded]]:
    """The batches of this process, embedded, as many at once as are compared with each other; the last are more."""
    context, waiting = trainer.context, list[_Embedded]()
    for inputs, pairs in _read(dataset, trainer):
        inputs = context.prepare_inputs(inputs)
        with context.accelerator.autocast():  # of the forwards alone: scores are products in fp32
            embeds = context.encoder.embed(context.encoder.model, inputs)
        images, texts = (F.normalize(rows.float(), dim=-1) for rows in embeds)
        belongs = inputs.get("caption_image", torch.arange(len(images))).to(images.device)
        right = belongs >= 0
        waiting.append(_Embedded(pairs, images, texts[right], belongs[right], inputs.get("pair_ids")))
        if sum(len(one.images) for one in waiting) >= 2 * window:
            whole = -(-window // context.args.per_device_eval_batch_size)
            yield waiting[:whole]
            waiting = waiting[whole:]
    if sum(len(one.images) for one in waiting) < 2:
        raise ValueError("There are fewer than two pairs for each process, so none can be compared.")
    yield waiting


def _read(dataset: ImageTextDataset | ImageTextStream, trainer: InfCLTrainer) -> Iterator[Batch]:
    """The pairs of this process, every one once."""
    args, processes, collate = trainer.args, Processes(), partial(_collated, trainer.data_collator)
    rank, count, workers = processes.rank, processes.world_size, args.dataloader_num_workers
    load: Any = partial(DataLoader, **worker_options(args))
    if not isinstance(dataset, ImageTextStream):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
        rows = KeyedRows(dataset, order.tensor_split(count)[rank].tolist())
        yield from filter(None, load(rows, args.per_device_eval_batch_size, collate_fn=collate))
        return
    lanes, without_new = max(1, workers), 0
    where = {"rank": rank, "world_size": count, "num_workers": workers, "keyed": True}
    batches = dataset.batches(args.per_device_eval_batch_size, collate, **where)
    for batch, _ in load(batches, batch_size=None, collate_fn=tuple):  # torch's own knows no arrays of pairs
        # One batch comes from each lane in turn: when none of them has a new pair, the pass is over.
        without_new = without_new + 1 if batch is None else 0
        if without_new == lanes:
            return
        if batch is not None:
            yield batch


def _collated(collate: DataCollator, items: list[KeyedItem]) -> Batch | None:
    """The pairs of the first pass; None without any. Items that stand in for bad rows are left out as well."""
    new = [one for one in items if one.key != NO_KEY and one.passes == 0]
    if not new:
        return None
    facts = [(one.key, one.item["caption"][0], one.name, small_jpeg(one.item["image"]), 0, False) for one in new]
    return collate([one.item for one in new]), np.array(facts, _PAIR)


def _scored(parts: Sequence[_Embedded]) -> np.ndarray:
    """The pairs of several batches, [n] of `_PAIR`, with their scores, for which they are compared with each other."""
    pairs, images, texts, belongs, ids = zip(*parts, strict=True)
    firsts = itertools.accumulate(map(len, images), initial=0)
    caption_image = torch.cat([of_part + first for of_part, first in zip(belongs, firsts, strict=False)])
    both = torch.cat(images), torch.cat(texts)
    pair_ids = None if ids[0] is None else torch.cat(ids)
    score = pair_scores(*both, caption_image, pair_ids, Processes(alone=True))
    scored = np.concatenate(pairs)
    scored["score"] = score.cpu()
    scored["alone"] = (score.isnan() & all(embeds.isfinite().all() for embeds in both)).cpu()
    return scored


def write_ledger_of_training(trainer: InfCLTrainer, dataset: ImageTextDataset | ImageTextStream) -> list[str]:
    """Writes a ledger with the averages of a training that had ``leave_out``, in the main process; returns its report.

    If it cannot be written, this warns and reports nothing, because the results of the training are still to be saved.
    ``dataset`` is what was trained, a table if anything was left out. Of its images, those of the pairs with the lowest
    averages are read.
    """
    selections = [one for one in trainer.window_step.extensions if isinstance(one, WithoutNoisyPairs)]
    if not selections or isinstance(dataset, ImageTextStream) or not trainer.is_world_process_zero():
        return []
    rows, scores = (part.numpy() for part in selections[0].averages.slow())
    folder = Path(str(trainer.args.output_dir))
    try:
        column = dataset.caption_column
        captions = dataset.table.select_columns([column])[rows.tolist()][column] if len(rows) else []
        captions = [usable_captions(value)[0] for value in captions]
        left_out, names = selections[0].left_out().tolist(), file_names(dataset, rows)
        ledger = Ledger(dataset.key_fingerprint(), rows, scores, captions, names, left_out)
        lowest = ledger.key[ledger.most_suspicious(SHOWN)].tolist()
        pictures = {row: small_jpeg(dataset.image_and_path(row)[0]) for row in lowest}
        write_ledger_and_sheet(ledger, pictures, folder)
    except Exception as error:
        logger.warning("The ledger was not written. %s: %s", type(error).__name__, error)
        return []
    return [*ledger_lines(ledger, folder, waits_for=selections[0].waits_for)]


def file_names(dataset: ImageTextDataset, keys: np.ndarray) -> list[str]:
    """The image files of some rows of a table, from the folder on that holds all files; none if it does not name all.

    ``keys`` [n] int64 are the rows.
    """
    paths = dataset.computed("path")
    if paths.null_count:
        return []
    files = [member_file(path) for path in paths.to_pylist()]
    names, folders = [files[row] for row in keys], {os.path.dirname(file) for file in files}
    if all(map(os.path.isabs, folders)):
        shared = os.path.commonpath(folders)
        names = [os.path.relpath(name, shared) for name in names]
    return names


def score(parser: Parser, namespace: argparse.Namespace) -> None:
    """Scores the pairs, and tells how many are wrong."""
    options, columns, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        chosen = {name: value for name, value in vars(options).items() if name != "window"}
        named: Any = [SetSpec.read("data", namespace.data)]
        dataset = training_set(DataOptions(named, **chosen), columns, args)
        model, processor, conversion = load(namespace.model)
        trainer = InfCLTrainer(model.eval(), args, processing_class=processor)
        tell(trainer, *conversion)
    with full_disk_explained(folder := Path(str(args.output_dir)), "again"):
        ledger, pictures = score_pairs(trainer, dataset, options.window)
        if trainer.is_world_process_zero():
            if isinstance(dataset, ImageTextDataset):
                ledger.sample = file_names(dataset, ledger.key)
            write_ledger_and_sheet(ledger, pictures, folder)
    if trainer.is_world_process_zero():
        learned = has_learned(namespace.model, content_of(dataset))
        print(*ledger_lines(ledger, str(folder), learned=learned), sep="\n")
        if not learned:
            print(
                "A model that was trained on these pairs may know wrong ones by heart. Score with another model, or "
                "train with --leave_out noisy, whose ledger has the scores from during the training."
            )
    leave(trainer)
