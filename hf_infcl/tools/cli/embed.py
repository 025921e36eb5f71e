"""`infcl embed`: writes the embeddings of images and texts, with their keys."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...conversion.models import load, stated_licence
from ...data.sets import SetSpec
from ...options.arguments import InfCLTrainingArguments
from ...shards.values import counted
from ...training.trainer import InfCLTrainer
from ..embedding.embedding import embed as embedded
from ..embedding.sources import make_source, make_sources
from .command_options import ColumnOptions, DataOptions, EmbedOptions
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
        folders = [*(namespace.teacher_embeddings or [])]
        parser.keep_only(namespace, OF_EMBEDDING | _OF_FILE | {"report_to"}, _OF_FILE)
        if not parser.typed("output_dir") and len(folders) != 1:
            parser.error("Name the folder for the embeddings with --output_dir, or with --teacher_embeddings.")
        namespace.output_dir = namespace.output_dir if parser.typed("output_dir") else folders[0]
        namespace.format = namespace.format if "format" in user_options else "npy"
    options, _, _, data, columns, _, _, args = parser.build(namespace)
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        if args.fsdp:
            raise ValueError("Every process embeds with the whole model. Omit the options of FSDP.")
        if namespace.data is None:
            sources = make_sources(*_sets_to_embed(options, data, columns, args), options.views)
        else:
            if options.views is not None:
                raise ValueError("--views are those of a training. Give its --dataset instead of DATA.")
            spec = SetSpec.read("data", namespace.data)
            wanted = spec.wanted(vars(columns))
            source = make_source(
                spec.path,
                wanted["image_column"],
                wanted["caption_column"],
                options.key_column,
                sorted(user_options | spec.columns.keys()),
                split=spec.split or data.split,
                name=spec.name,
                streaming=data.streaming,
                on_bad_sample=data.on_bad_sample,
            )
            sources = {"": source}
        model, processor, conversion = load(namespace.encoder)
        trainer = InfCLTrainer(model.eval(), args, processing_class=processor)
        if trainer.is_world_process_zero():
            of = {f"--{name}" if name else namespace.data: " and ".join(s.kinds) for name, s in sources.items()}
            print(*conversion, *[f"Embeds the {kinds} of {name}." for name, kinds in of.items()], sep="\n")
    licence = stated_licence(namespace.encoder) if options.format == "npy" else None
    counts: dict[str, int] = {}
    for name, source in sources.items():
        with mistakes_in_one_line(parser.prog, of_libraries=False):
            source_counts = embedded(
                source,
                Path(args.output_dir, name),
                trainer,
                format=options.format,
                half=options.half_precision,
                licence=licence,
            )
        counts = {kind: counts.get(kind, 0) + count for kind, count in source_counts.items()}
    if trainer.is_world_process_zero():
        skipped = f"; left out: {counted(counts['skipped'], 'row')}" if counts["skipped"] else ""
        use = f" `infcl train --teacher_embeddings {args.output_dir}` reads them." if namespace.data is None else ""
        print(
            f"{counted(counts['images'], 'image')} and {counted(counts['texts'], 'text')} were embedded{skipped}. All "
            f"embeddings are in {Path(args.output_dir)}.{use}"
        )
    leave(trainer)


def _sets_to_embed(
    options: EmbedOptions, data: DataOptions, columns: ColumnOptions, args: InfCLTrainingArguments
) -> tuple[Any, Any]:
    """New and old pairs, as a training reads them but for what changes images and captions."""
    if options.key_column:
        raise ValueError("--key_column has no effect with --dataset: a training finds pairs by row or sample. Omit it.")
    if options.views is None:
        data = replace(data, augmentation="none", min_side=None)
    elif options.format != "npy" or data.augmentation == "none":
        raise ValueError(
            "--views are embeddings of augmented images for a training, which need --format npy and an --augmentation "
            f"other than none, got {options.format} and {data.augmentation}."
        )
    data = replace(data, samples_per_epoch=1 if data.streaming else None)
    return training_set(data, columns, args), replay_set(data, columns, args)
