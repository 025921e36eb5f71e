"""The data sets that the options name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import ConcatDataset

from ...checkpoints.average_choice import halves
from ...data import ImageTextDataset, ImageTextStream, ZeroShotDataset, load_pairs
from ...data.columns import find_caption_column, find_image_column, find_label_column
from ...data.images import few_names, is_string
from ...data.labelled import lines_of, names_by_label
from ...data.tables import Table
from ...options.arguments import InfCLTrainingArguments
from ...options.combinations import check_replay
from ...options.evaluation_options import EvaluationOptions, GuardOptions
from ..benchmarks import benchmark_sets
from ..checking.overlap import shared_images
from ..publishing import source_name
from ..scoring.excluding import rows_kept, stream_kept
from .command_options import ColumnOptions, DataOptions


def training_set(
    data: DataOptions, columns: ColumnOptions, args: InfCLTrainingArguments
) -> ImageTextDataset | ImageTextStream:
    """The pairs to train on: a table, or a stream of shards."""
    options = {**_options_of_items(data, args), **columns.of_pairs}
    if data.streaming:
        if args.max_steps <= 0 and data.samples_per_epoch is None:
            raise ValueError("A stream has no length. Pass --max_steps or --samples_per_epoch.")
        stream = ImageTextStream(
            data.dataset,
            weights=data.dataset_weights,
            split=data.split,
            name=data.dataset_name,
            shuffle_buffer=data.shuffle_buffer,
            lanes=data.lanes,
            samples_per_epoch=data.samples_per_epoch,
            **options,
        )
        for asked in data.exclude or ():
            stream = stream_kept(stream, asked)
        return stream
    with _named("dataset", data.dataset[0]) as name:
        rows = load_pairs(data.dataset[0], split=data.split, name=data.dataset_name, image_column=columns.image_column)
        for option, find in (("image_column", find_image_column), ("caption_column", find_caption_column)):
            if options[option] == getattr(ColumnOptions, option):  # the default, not what the user has named
                options[option] = find(rows.features)
        if columns.pair_id_column == columns.caption_column:
            options["pair_id_column"] = options["caption_column"]
        dataset = ImageTextDataset(rows, **options)
        for asked in data.exclude or ():
            rows = rows.select(rows_kept(dataset, asked))
            dataset = ImageTextDataset(rows, **options)
        return _with_name(dataset, name)


def replay_set(
    data: DataOptions, columns: ColumnOptions, args: InfCLTrainingArguments
) -> ImageTextDataset | ConcatDataset[Any] | ImageTextStream | None:
    """The old pairs to replay, if any: tables one after the other, or a stream of shards.

    Raises:
        ValueError: a set cannot be read; there are options of old pairs, but none of these.
    """
    check_replay(data, args)
    if not data.replay_dataset:
        return None
    options = _options_of_items(data, args)
    own_columns = data.replay_image_column, data.replay_caption_column
    if not data.replay_streaming:
        tables = [_old_pairs(source, data, columns, options) for source in data.replay_dataset]
        return tables[0] if len(tables) == 1 else ConcatDataset(tables)
    images, captions = own_columns[0] or columns.image_column, own_columns[1] or columns.caption_column
    ids = captions if columns.pair_id_column == columns.caption_column else columns.pair_id_column
    options |= {"image_column": images, "caption_column": captions, "pair_id_column": ids}
    with _named("replay_dataset", " ".join(data.replay_dataset)) as name:
        order: dict[str, Any] = {"shuffle_buffer": data.shuffle_buffer, "lanes": data.lanes}
        return _with_name(ImageTextStream(data.replay_dataset, split=data.replay_split, **order, **options), name)


def _old_pairs(source: str, data: DataOptions, columns: ColumnOptions, options: dict[str, Any]) -> ImageTextDataset:
    """A table of old pairs. It need not have ids, negative captions or lists of captions, as the new pairs do."""
    images, captions = data.replay_image_column, data.replay_caption_column
    with _named("replay_dataset", source) as name:
        rows = load_pairs(source, split=data.replay_split, image_column=images or columns.image_column)
        images = _column(rows, "replay_image_column", images, columns.image_column, find_image_column)
        captions = _column(rows, "replay_caption_column", captions, columns.caption_column, find_caption_column)
        ids = captions if columns.pair_id_column == columns.caption_column else columns.pair_id_column
        options = {**options, "image_column": images, "caption_column": captions, "pair_id_column": ids}
        for option in ("pair_id_column", "negative_caption_column"):
            options[option] = options[option] if options[option] in rows.column_names else None
        if is_string(rows.features[captions]):
            options["captions_per_image"] = 1
        return _with_name(ImageTextDataset(rows, **options), name)


def _options_of_items(data: DataOptions, args: InfCLTrainingArguments) -> dict[str, Any]:
    return {
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "on_bad_sample": data.on_bad_sample,
        "augmentation": data.augmentation,
        "min_side": data.min_side,
        "text_dropout": data.text_dropout,
        "captions_per_image": data.captions_per_image,
        "negative_caption_column": data.negative_caption_column,
    }


def guard_names(datasets: Sequence[str] | None) -> list[str]:
    """The names of the guard sets, with which their metrics begin: "guard1_" and the name of the first, and so on."""
    return [re.sub(r"\W+", "_", f"guard{n}_{source_name(dataset)[0]}") for n, dataset in enumerate(datasets or [], 1)]


def guard_datasets(
    columns: ColumnOptions,
    guards: GuardOptions,
    evaluation: EvaluationOptions,
    data: DataOptions | None = None,
    half: int | None = None,
) -> dict[str, ImageTextDataset | ZeroShotDataset]:
    """The guard sets by their names: image-text pairs, or labelled images if they have classes but no captions.

    Args:
        columns: the columns of the training set.
        guards: name the sets.
        evaluation: names the labels and the templates.
        data: the training data, which must not be taken for a guard; None without a training.
        half: 0 or 1 for one of the `hf_infcl.checkpoints.average_halves` of each set; None for all rows.
    """
    found: dict[str, ImageTextDataset | ZeroShotDataset] = {}
    for name, source in zip(guard_names(guards.guard_dataset), guards.guard_dataset or [], strict=True):
        with _named("guard_dataset", source) as shown:
            rows = _rows(source, guards.guard_split, guards.guard_image_column or columns.image_column, data)
            rows = rows if half is None else halves(rows)[half]
            captions = find_caption_column(rows.features, guards.guard_caption_column or columns.caption_column)
            if (
                captions not in rows.column_names
                and find_label_column(rows.features, evaluation.label_column) in rows.column_names
            ):
                found[name] = _labelled(rows, "guard", guards.guard_image_column, columns, evaluation, None)
            else:
                found[name] = _pairs(rows, "guard", guards.guard_image_column, guards.guard_caption_column, columns)
            _with_name(found[name], shown)
    chosen = None if half is None else lambda rows: halves(rows)[half]
    return found | benchmark_sets(guards.guard_benchmark, evaluation.benchmark_folder, "guard_", chosen)


def evaluation_datasets(
    columns: ColumnOptions, options: EvaluationOptions, data: DataOptions | None = None
) -> dict[str, ImageTextDataset | ZeroShotDataset]:
    """The requested evaluation datasets by the prefix of their metrics: "pairs", "zero_shot", and the benchmarks.

    Args:
        columns: the columns of the training set. A set that does not have them is read by its usual ones.
        options: those of the evaluation.
        data: the training data, which must not be taken for that of the evaluation; None without a training.
    """
    found: dict[str, ImageTextDataset | ZeroShotDataset] = {}
    if options.eval_dataset:
        with _named("eval_dataset", options.eval_dataset) as shown:
            images, captions = options.eval_image_column, options.eval_caption_column
            rows = _rows(options.eval_dataset, options.eval_split, images or columns.image_column, data)
            found["pairs"] = _with_name(_pairs(rows, "eval", images, captions, columns), shown)
    if options.zero_shot_dataset:
        with _named("zero_shot_dataset", options.zero_shot_dataset) as shown:
            images = options.zero_shot_image_column
            rows = _rows(options.zero_shot_dataset, options.zero_shot_split, images or columns.image_column, data)
            names = None if options.class_names is None else lines_of(options.class_names)
            found["zero_shot"] = _with_name(_labelled(rows, "zero_shot", images, columns, options, names), shown)
    return found | benchmark_sets(options.eval_benchmark, options.benchmark_folder)


def describe_sets(sets: Mapping[str, ImageTextDataset | ZeroShotDataset]) -> Iterator[str]:
    """A line for each evaluation set: what is read from it and, for classes, the first three prompts."""
    for key, dataset in sets.items():
        columns = ", ".join(f"{option} {column}" for option, column in dataset.columns.items())
        line = f"{key} is {dataset.name}: {len(dataset):,} images of the split {dataset.split}; {columns}."
        if isinstance(dataset, ZeroShotDataset):
            if dataset.known_names not in (None, dataset.class_names):
                named = zip(dataset.known_names[:3], dataset.class_names, strict=False)
                line += f" The classes begin with {', '.join(f'{known} = {name}' for known, name in named)}."
            line += f" The prompts begin with {', '.join(map(repr, dataset.prompts()[:3]))}."
        yield line


def overlaps(trained: Any, sets: Mapping[str, ImageTextDataset | ZeroShotDataset]) -> Iterator[str]:
    """A warning for each guard set that has images of the training set; streams are not looked into."""
    guards = {name: dataset for name, dataset in sets.items() if name.startswith("guard")}
    for name, guard in guards.items() if isinstance(trained, ImageTextDataset) else ():
        shared, looked_for = shared_images(trained, guard)
        if shared:
            yield (
                f"Warning: {shared:,} of {looked_for:,} images of {name}, {guard.name}, are also trained on, so they "
                "cannot show what is forgotten. Name a set that the training does not contain."
            )


def what_was_measured(sets: Mapping[str, Any]) -> dict[str, Any]:
    """For the results, the first three prompts of each set of classes and the revision of each benchmark."""
    prompts = {f"eval_{key}_prompts": s.prompts()[:3] for key, s in sets.items() if isinstance(s, ZeroShotDataset)}
    return prompts | {f"eval_{key}_revision": s.benchmark.revision for key, s in sets.items() if s.benchmark}


def check_columns(columns: ColumnOptions, sets: Mapping[str, ImageTextDataset | ZeroShotDataset]) -> None:
    """Raises a ValueError if no set has a column that the user has named."""
    for option, column in columns.of_pairs.items():
        if column != getattr(ColumnOptions, option) and all(column not in s.columns.values() for s in sets.values()):
            raise ValueError(f"No data set has a column {column!r}, which --{option} names.")


@contextmanager
def _named(option: str, source: str) -> Iterator[str]:
    name = f"--{option} {source}"
    try:
        yield name
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _with_name(dataset: Any, name: str) -> Any:
    dataset.name = name
    return dataset


def _rows(source: str, split: str | None, image_column: str, data: DataOptions | None) -> Any:
    table = Table(source)
    found = split or table.split_to_evaluate()
    if split is None and data is not None and (source, found) in [(trained, data.split) for trained in data.dataset]:
        raise ValueError(f"Its only split, {found!r}, is trained on. Name another set, or the split if this is meant.")
    return table.load(found, image_column)


def _pairs(
    rows: Any, option: str, image_column: str | None, caption_column: str | None, columns: ColumnOptions
) -> ImageTextDataset:
    ids = columns.pair_id_column
    captions = _column(rows, f"{option}_caption_column", caption_column, columns.caption_column, find_caption_column)
    if ids == columns.caption_column:
        ids = captions
    return ImageTextDataset(
        rows,
        image_column=_column(rows, f"{option}_image_column", image_column, columns.image_column, find_image_column),
        caption_column=captions,
        pair_id_column=ids if ids in rows.column_names else None,
        all_captions=True,
    )


def _labelled(
    rows: Any,
    option: str,
    image_column: str | None,
    columns: ColumnOptions,
    options: EvaluationOptions,
    class_names: Sequence[str] | None,
) -> ZeroShotDataset:
    images = _column(rows, f"{option}_image_column", image_column, columns.image_column, find_image_column)
    labels = _column(rows, "label_column", None, options.label_column, find_label_column)
    if class_names is not None and (known := getattr(rows.features[labels], "names", None)) is not None:
        class_names = names_by_label(class_names, known)
    return ZeroShotDataset(
        rows,
        image_column=images,
        label_column=labels,
        class_names=class_names,
        templates=lines_of(options.templates),
    )


def _column(rows: Any, option: str, own: str | None, of_training: str, find: Callable[..., str]) -> str:
    """The column that the option names; or else that of the training set, or the usual one.

    Raises:
        ValueError: the set has none of these.
    """
    column = own or find(rows.features, of_training)
    if column not in rows.column_names:
        raise ValueError(
            f"It has no column {column!r}. Its columns are {few_names(rows.column_names)}. Name the right one with "
            f"--{option}."
        )
    return column
