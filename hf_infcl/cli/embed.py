"""`infcl embed`: writes the embeddings of images and texts, with their keys."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets

from ..data import ImageTextStream, load_pairs
from ..data.images import ImageDataset, find_column
from ..data.sets import SetSpec
from ..data.sources import ItemSource, ShardSource, TableSource, source_of_training
from ..files.text import counted
from ..models.open_clip import load, stated_licence
from ..options.arguments import InfCLTrainingArguments
from ..options.commands import ColumnOptions, DataOptions, EmbedOptions
from ..quality.embedding import embed as embedded
from ..shards.layout import IMAGE_EXTENSIONS
from ..shards.opening import find_shards
from ..shards.readers import ParquetReader, reader_of
from ..trainer.checkpoints import full_disk_explained
from ..trainer.trainer import InfCLTrainer
from .commands import OF_EMBEDDING
from .datasets import replay_set, training_set
from .launched import leave, mistakes_in_one_line
from .parser import Parser

# What a training's file says of the machine and of chance. The rest is about the student.
_OF_FILE = {"bf16", "use_cpu", "per_device_eval_batch_size", "dataloader_num_workers", "seed", "data_seed"}


def embed(parser: Parser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Embeds the data, and prints what was written."""
    if namespace.data is None:
        if namespace.dataset is None:
            parser.error("Name the data to embed: DATA, or --dataset as in the training that will read the embeddings.")
        folder = namespace.teacher_embeddings
        parser.keep_only(namespace, OF_EMBEDDING | _OF_FILE | {"report_to"}, _OF_FILE)
        if not parser.typed("output_dir"):
            if folder is None:
                parser.error("Name the folder for the embeddings with --output_dir, or with --teacher_embeddings.")
            namespace.output_dir = folder
    options, _, _, data, columns, _, _, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        if args.fsdp:
            raise ValueError("Every process embeds with the whole model. Omit the options of FSDP.")
        if namespace.data is None:
            sources = _sources_of_training(options, data, columns, args)
        else:
            spec = SetSpec.read("data", namespace.data)
            sources = {"": make_source(spec, data, columns, options.key_column, user_options | spec.columns.keys())}
        model, processor, conversion = load(namespace.encoder)
        trainer = InfCLTrainer(model.eval(), args, processing_class=processor)
        if trainer.is_world_process_zero():
            of = {f"--{name}" if name else namespace.data: " and ".join(s.kinds) for name, s in sources.items()}
            print(*conversion, *[f"Embeds the {kinds} of {name}." for name, kinds in of.items()], sep="\n")
    how: Any = {"format": options.format, "half": options.half_precision, "licence": stated_licence(namespace.encoder)}
    counts = Counter[str]()
    for name, source in sources.items():
        folder, again = Path(args.output_dir, name), "again, which computes what is missing"
        with mistakes_in_one_line(parser.prog, of_libraries=False), full_disk_explained(folder, again, keeps=True):
            counts.update(embedded(source, folder, trainer.context, **how))
    if trainer.is_world_process_zero():
        skipped = f"; left out: {counted(counts['skipped'], 'row')}" if counts["skipped"] else ""
        use = f" `infcl train --teacher_embeddings {args.output_dir}` reads them." if namespace.data is None else ""
        print(
            f"{counted(counts['images'], 'image')} and {counted(counts['texts'], 'text')} were embedded{skipped}. All "
            f"embeddings are in {Path(args.output_dir)}.{use}"
        )
    leave(trainer)


# ---- What is embedded ----


def _sources_of_training(
    options: EmbedOptions, data: DataOptions, columns: ColumnOptions, args: InfCLTrainingArguments
) -> dict[str, ItemSource]:
    """New and old pairs, as a training reads them but for what changes them, by the names of their folders."""
    if options.key_column:
        raise ValueError("--key_column has no effect with --dataset: a training finds pairs by row or sample. Omit it.")
    data = replace(data, min_side=None, samples_per_epoch=1 if data.streaming else None)
    new, old = training_set(data, columns, args), replay_set(data, columns, args)
    olds: list[Any] = [] if old is None else getattr(old, "datasets", [old])
    sets = {"dataset": new, **{f"replay_dataset_{number}": one for number, one in enumerate(olds, 1)}}
    return {name: source_of_training(one) for name, one in sets.items()}


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
    if key_column:
        raise ValueError("--key_column is for tables: the keys of a stream are the names of its samples. Omit it.")
    found = _shard_columns(find_shards(spec.path, split=split), images, captions, named)
    options: Any = {"image_column": found[0], "caption_column": found[1], "on_bad_sample": data.on_bad_sample}
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
    _check_named({"key_column": key_column} if key_column else {}, table.features, named)
    images, captions = _found_columns(table.features, image_column, caption_column, named)
    columns = {"caption_column": captions, "key_column": key_column}
    dataset = ImageDataset(table, images, columns) if images else None
    return TableSource(table, dataset, captions, key_column, folder=folder, skips=skips)


def _shard_columns(
    shards: Sequence[str], image_column: str, caption_column: str, named: Collection[str]
) -> tuple[str | None, str | None]:
    """The columns of images and captions in shards, by the names that `ImageTextStream` takes."""
    reader = reader_of(shards)
    features = reader.features(shards, image_column)
    if reader is ParquetReader:
        return _found_columns(features, image_column, caption_column, named)
    several = "image" not in features and sum(name in IMAGE_EXTENSIONS for name in features) > 1
    if "image" in (image_column, *features) or several:  # several are told by the reader, to which "image" is any
        named = [option for option in named if option != "image_column"]
    if caption_column == "caption" and caption_column not in features and "txt" in features:
        features = {**features, "caption": features["txt"]}
    images, captions = _found_columns(features, image_column, caption_column, named)
    return image_column if images or several else None, captions


def _found_columns(
    features: datasets.Features, image_column: str, caption_column: str, named: Collection[str]
) -> tuple[str | None, str | None]:
    """The columns of images and captions: the wanted ones, or else the usual ones, or None; see `table_source`."""
    _check_named({"image_column": image_column, "caption_column": caption_column}, features, named)
    images, captions = find_column("image", features, image_column), find_column("caption", features, caption_column)
    if images not in features and captions not in features:
        raise ValueError(
            f"The data has neither images nor captions that could be found: its columns are {[*features]}. Name them "
            "with --image_column and --caption_column."
        )
    return images if images in features else None, captions if captions in features else None


def _check_named(wanted: Mapping[str, str], features: datasets.Features, named: Collection[str]) -> None:
    for option, column in wanted.items():
        if option in named and column not in features:
            raise ValueError(
                f"The data has no column {column!r}, which --{option} names. Its columns are {[*features]}."
            )
