"""`infcl embed`: writes the embeddings of images and texts, with their keys."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...conversion.models import load, stated_licence
from ...data import ImageTextStream, load_pairs
from ...options.sets import facts_of
from ...shards.opening import find_shards
from ...training.trainer import InfCLTrainer
from ..embedding.embedding import embed as embedded
from ..embedding.options import EmbedOptions
from ..embedding.sources import ItemSource, ShardSource, TableSource, shard_columns
from .command_options import ColumnOptions
from .launched import leave, mistakes_in_one_line, tell_deepspeed_of_cpu
from .parser import Parser


def embed(parser: Parser, namespace: argparse.Namespace, given: set[str]) -> None:
    """Embeds the data, and prints what was written."""
    options, columns, args = parser.build(namespace)
    tell_deepspeed_of_cpu(args)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        if args.fsdp or args.deepspeed:
            raise ValueError("Every process embeds with the whole model. Omit the options of FSDP and DeepSpeed.")
        source = source_of(namespace.data, options, columns, given)
        model, processor, conversion = load(namespace.model)
        trainer = InfCLTrainer(model.eval(), args, processing_class=processor)
        collator: Any = trainer.data_collator
        if trainer.is_world_process_zero():
            print(*conversion, *[f"{namespace.data} has {' and '.join(source.kinds)}."], sep="\n")
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        counts = embedded(
            source,
            args.output_dir,
            trainer.dual_encoder,
            collator,
            prepare=trainer._prepare_inputs,
            autocast=trainer.accelerator.autocast,
            dtype=trainer.accelerator.mixed_precision,
            format=options.format,
            half=options.half_precision,
            licence=stated_licence(namespace.model) if options.format == "npy" else None,
            batch_size=args.per_device_eval_batch_size,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )
    if trainer.is_world_process_zero():
        skipped = f"; {counts['skipped']:,} rows were left out" if counts["skipped"] else ""
        print(
            f"{counts['images']:,} images and {counts['texts']:,} texts were embedded{skipped}. All embeddings are in "
            f"{Path(args.output_dir)}."
        )
    leave(trainer)


def source_of(data: str, options: EmbedOptions, columns: ColumnOptions, given: set[str]) -> ItemSource:
    """The images and captions that the options and the facts of the data name."""
    own = facts_of(data, split=options.split, **columns.of_pairs)
    split, images, captions = own["split"], own["image_column"], own["caption_column"]
    named = sorted(given | getattr(data, "facts", {}).keys())
    if options.streaming:
        if options.key_column:
            raise ValueError("--key_column is for tables: the keys of a stream are the names of its samples. Omit it.")
        shards = find_shards(data, split=split)
        images, captions = shard_columns(shards, images, captions, named)
        chosen: dict[str, Any] = {"image_column": images, "caption_column": captions}
        return ShardSource(ImageTextStream(data, split=split, on_bad_sample=options.on_bad_sample, **chosen))
    table = load_pairs(data, split=split, name=own.get("name"), image_column=images)
    skips = options.on_bad_sample == "skip"
    return TableSource(table, images, captions, options.key_column, data, skips=skips, named=named)
