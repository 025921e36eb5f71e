"""The data sets that the options name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import ConcatDataset

from ...checkpoints.average_search import halves
from ...data import ImageTextDataset, ImageTextStream, ZeroShotDataset, load_pairs
from ...data.columns import FIND, find_caption_column, find_label_column
from ...data.images import few_names, is_string
from ...data.labelled import captions_of_classes, names_by_label, read_lines, with_class_labels
from ...data.tables import Table
from ...options.arguments import InfCLTrainingArguments
from ...options.combinations import check_replay
from ...options.evaluation_options import EvaluationOptions, GuardOptions
from ...options.sets import facts_of
from ...shards.values import counted
from ..benchmarks.sets import benchmark_sets
from ..publishing.facts import source_name
from ..scoring.excluding import rows_kept, stream_kept
from .command_options import ColumnOptions, DataOptions

if TYPE_CHECKING:
    import datasets

_CLASSES = ("label_column", "class_names", "templates")  # facts of a set of classes, not of pairs


def training_set(
    data: DataOptions, columns: ColumnOptions, args: InfCLTrainingArguments, option: str = "--dataset"
) -> ImageTextDataset | ImageTextStream:
    """The pairs to train on: a table, or a stream of shards. ``option`` is how the user has given its name."""
    facts = facts_of(data.dataset[0])
    named = {name: facts[name] for name in (*vars(columns), "negative_caption_column") if name in facts}
    options = {**_options_of_items(data, args), **vars(columns), **named}
    place = {"split": facts.get("split", data.split), "name": facts.get("name", data.dataset_name)}
    weights = mixture_weights(data)
    if data.streaming:
        _check_alike("dataset", data.dataset)
        if data.caption_templates:
            raise ValueError("--caption_templates is for tables with classes, which shards that are streamed are not.")
        if args.max_steps <= 0 and data.samples_per_epoch is None:
            raise ValueError("A stream has no length. Pass --max_steps or --samples_per_epoch.")
        stream = ImageTextStream(
            data.dataset,
            weights=weights,
            shuffle_buffer=data.shuffle_buffer,
            lanes=data.lanes,
            samples_per_epoch=data.samples_per_epoch,
            **place,
            **options,
        )
        for asked in data.exclude or ():
            stream = stream_kept(stream, asked)
        return stream
    with _named(option, data.dataset[0]) as name:
        if weights is not None:
            raise ValueError("A weight is the share of one of several sets that are streamed, and this is a table.")
        rows = load_pairs(data.dataset[0], **place, image_column=options["image_column"])
        if data.caption_templates:
            labels = find_label_column(rows.features, facts.get("label_column", "label"))
            class_names = read_lines(facts["class_names"]) if "class_names" in facts else None
            templates = read_lines(data.caption_templates)
            rows = captions_of_classes(rows, templates, label_column=labels, class_names=class_names)
            options |= {"caption_column": "caption", "pair_id_column": options["pair_id_column"] or labels}
        if columns.pair_id_column == columns.caption_column and "pair_id_column" not in named:
            options["pair_id_column"] = options["caption_column"]
        dataset = whole = ImageTextDataset(rows, **options)
    kept = np.arange(len(rows))
    for asked in data.exclude or ():  # not named as the set is: the mistake is in the ledger
        chosen = rows_kept(dataset, asked)
        kept, rows = kept[chosen], rows.select(chosen)
        dataset = ImageTextDataset(rows, **options)
        dataset.whole, dataset.numbers = whole, kept  # by which a teacher's stored embeddings are found
    dataset.name = name
    return dataset


def replay_set(
    data: DataOptions, columns: ColumnOptions, args: InfCLTrainingArguments
) -> ImageTextDataset | ConcatDataset[Any] | ImageTextStream | None:
    """The old pairs to replay, if any: tables one after the other, or a stream of shards."""
    check_replay(data, args)
    if not data.replay_dataset:
        return None
    options = _options_of_items(data, args)
    streamed = {facts_of(source).get("streaming", data.replay_streaming) for source in data.replay_dataset}
    if len(streamed) > 1:
        raise ValueError("--replay_dataset names tables and streams, which are not mixed. Let all of them be one kind.")
    if streamed == {False}:
        tables = [_old_pairs(source, data, columns, options) for source in data.replay_dataset]
        return tables[0] if len(tables) == 1 else ConcatDataset(tables)
    _check_alike("replay_dataset", data.replay_dataset)
    facts = _facts(data.replay_dataset[0], data, "replay")
    images, captions = facts["image_column"] or columns.image_column, facts["caption_column"] or columns.caption_column
    options |= {"image_column": images, "caption_column": captions, "pair_id_column": _ids(facts, captions, columns)}
    with _named("--replay_dataset", " ".join(data.replay_dataset)) as name:
        order: dict[str, Any] = {"shuffle_buffer": data.shuffle_buffer, "lanes": data.lanes}
        order |= {"split": facts["split"], "name": facts.get("name")}
        stream = ImageTextStream(data.replay_dataset, **order, **options)
        stream.name = name
        return stream


def mixture_weights(data: DataOptions) -> list[float] | None:
    """The proportions in which the sets of a training are mixed, from the option or from the sets themselves."""
    weights: list[Any] = [facts_of(source).get("weight") for source in data.dataset]
    if all(weight is None for weight in weights):
        return data.dataset_weights
    if None in weights or data.dataset_weights is not None:
        raise ValueError("Give every --dataset its weight, or all of them with --dataset_weights.")
    return weights


def _check_alike(option: str, sources: Sequence[str]) -> None:
    """Raises a ValueError if sets that are read as one stream have different facts, except for their weights."""
    first, *rest = [{k: v for k, v in facts_of(source).items() if k != "weight"} for source in sources]
    for other in rest:
        if other != first:
            raise ValueError(
                f"The sets of --{option} are streamed as one and read alike, but one states {first} and another "
                f"{other}. Let all of them state the same."
            )


def _facts(source: str, options: object, of: str) -> dict[str, Any]:
    """The facts of a set, and those that the options state for it or for all of its kind, such as ``guard_split``."""
    names = ("split", "image_column", "caption_column")
    return facts_of(source, **{name: getattr(options, f"{of}_{name}", None) for name in names})


def _ids(facts: Mapping[str, Any], captions: str, columns: ColumnOptions) -> str | None:
    """The column of pair ids that a set states, or else the training's, which may be the column of captions."""
    ids = captions if columns.pair_id_column == columns.caption_column else columns.pair_id_column
    column: str | None = facts.get("pair_id_column", ids)
    return column


def _old_pairs(source: str, data: DataOptions, columns: ColumnOptions, options: dict[str, Any]) -> ImageTextDataset:
    """A table of old pairs. It need not have ids, negative captions or lists of captions, as the new pairs do."""
    facts = _facts(source, data, "replay")
    with _named("--replay_dataset", source) as name:
        named = facts["image_column"] or columns.image_column
        rows = load_pairs(source, split=facts["split"], name=facts.get("name"), image_column=named)
        options = {**options, **_columns_of_pairs(rows, "replay", facts, columns)}
        for option in ("pair_id_column", "negative_caption_column"):
            options[option] = options[option] if options[option] in rows.column_names else None
        if is_string(rows.features[options["caption_column"]]):
            options["captions_per_image"] = 1
        dataset = ImageTextDataset(rows, **options)
        dataset.name = name
        return dataset


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
        evaluation: names the labels and the templates.
        data: the training data, which must not be taken for a guard; None without a training.
        half: 0 or 1 for one of the `hf_infcl.checkpoints.average_search.halves` of each set; None for all rows.
    """
    sets: dict[str, ImageTextDataset | ZeroShotDataset] = {}
    for name, source in zip(guard_names(guards.guard_dataset), guards.guard_dataset or [], strict=True):
        with _named("--guard_dataset", source) as shown:
            facts = _facts(source, guards, "guard")
            rows = _rows(source, facts, columns, data)
            rows = rows if half is None else halves(rows)[half]
            captions = find_caption_column(rows.features, facts["caption_column"] or columns.caption_column)
            labels = find_label_column(rows.features, evaluation.label_column)
            if facts.keys() & set(_CLASSES) or (captions not in rows.column_names and labels in rows.column_names):
                sets[name] = _labelled(rows, "guard", facts, columns, evaluation)
            else:
                sets[name] = _pairs(rows, "guard", facts, columns)
            sets[name].name = shown
    chosen = None if half is None else lambda rows: halves(rows)[half]
    return sets | benchmark_sets(guards.guard_benchmark, evaluation.benchmark_folder, "guard_", chosen)


def evaluation_datasets(
    columns: ColumnOptions, options: EvaluationOptions, data: DataOptions | None = None
) -> dict[str, ImageTextDataset | ZeroShotDataset]:
    """The requested evaluation datasets by the prefix of their metrics: "pairs", "zero_shot", and the benchmarks.

    A set that does not have the columns of the training set is read by its usual ones. No set may be that of the
    training ``data``, if there is one.
    """
    sets: dict[str, ImageTextDataset | ZeroShotDataset] = {}
    if options.eval_dataset:
        with _named("--eval_dataset", options.eval_dataset) as shown:
            facts = _facts(options.eval_dataset, options, "eval")
            rows = _rows(options.eval_dataset, facts, columns, data)
            sets["pairs"] = _pairs(rows, "eval", facts, columns)
            sets["pairs"].name = shown
    if options.zero_shot_dataset:
        with _named("--zero_shot_dataset", options.zero_shot_dataset) as shown:
            facts = {"class_names": options.class_names} | _facts(options.zero_shot_dataset, options, "zero_shot")
            rows = _rows(options.zero_shot_dataset, facts, columns, data)
            sets["zero_shot"] = _labelled(rows, "zero_shot", facts, columns, options)
            sets["zero_shot"].name = shown
    return sets | benchmark_sets(options.eval_benchmark, options.benchmark_folder)


def describe_sets(sets: Mapping[str, ImageTextDataset | ZeroShotDataset]) -> Iterator[str]:
    """A line for each evaluation set: what is read from it and, for classes, the first three prompts."""
    for key, dataset in sets.items():
        columns = ", ".join(f"{option} {column}" for option, column in dataset.columns.items())
        line = f"{key} is {dataset.name}: {counted(len(dataset), 'image')} of the split {dataset.split}; {columns}."
        if isinstance(dataset, ZeroShotDataset):
            if dataset.known_names not in (None, dataset.class_names):
                named = zip(dataset.known_names[:3], dataset.class_names, strict=False)
                line += f" The classes begin with {', '.join(f'{known} = {name}' for known, name in named)}."
            line += f" The prompts begin with {', '.join(map(repr, dataset.prompts()[:3]))}."
        yield line


def what_was_measured(sets: Mapping[str, ImageTextDataset | ZeroShotDataset]) -> dict[str, Any]:
    """For the results, the first three prompts of each set of classes and the revision of each benchmark."""
    prompts = {f"eval_{key}_prompts": s.prompts()[:3] for key, s in sets.items() if isinstance(s, ZeroShotDataset)}
    return prompts | {f"eval_{key}_revision": s.benchmark.revision for key, s in sets.items() if s.benchmark}


def check_columns(columns: ColumnOptions, sets: Mapping[str, ImageTextDataset | ZeroShotDataset]) -> None:
    """Raises a ValueError if no set has a column that the user has named."""
    for option, column in vars(columns).items():
        if column != getattr(ColumnOptions, option) and all(column not in s.columns.values() for s in sets.values()):
            raise ValueError(f"No data set has a column {column!r}, which --{option} names.")


@contextmanager
def _named(option: str, source: str) -> Iterator[str]:
    name = f"{option} {source}"
    try:
        yield name
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _rows(source: str, facts: Mapping[str, Any], columns: ColumnOptions, data: DataOptions | None) -> datasets.Dataset:
    table = Table(source, facts.get("name"))
    split = facts["split"] or table.split_to_evaluate()
    trained = [] if data is None else [(one, facts_of(one, split=data.split)["split"]) for one in data.dataset]
    if facts["split"] is None and (source, split) in trained:
        raise ValueError(f"Its only split, {split!r}, is trained on. Name another set, or the split if this is meant.")
    return table.load(split, facts["image_column"] or columns.image_column)


def _pairs(rows: datasets.Dataset, of: str, facts: Mapping[str, Any], columns: ColumnOptions) -> ImageTextDataset:
    found = _columns_of_pairs(rows, of, facts, columns)
    if found["pair_id_column"] not in rows.column_names and "pair_id_column" not in facts:
        found["pair_id_column"] = None
    return ImageTextDataset(rows, **found, all_captions=True)


def _labelled(
    rows: datasets.Dataset, of: str, facts: Mapping[str, Any], columns: ColumnOptions, options: EvaluationOptions
) -> ZeroShotDataset:
    images = _column(rows, of, "image_column", facts, columns)
    labels = _column(rows, "", "label_column", facts, options)
    rows = with_class_labels(rows, labels)
    class_names = None if facts.get("class_names") is None else read_lines(facts["class_names"])
    if class_names is not None and (known := getattr(rows.features[labels], "names", None)) is not None:
        class_names = names_by_label(class_names, known)
    templates = read_lines(facts.get("templates", options.templates))
    return ZeroShotDataset(rows, image_column=images, label_column=labels, class_names=class_names, templates=templates)


def _columns_of_pairs(
    rows: datasets.Dataset, of: str, facts: Mapping[str, Any], columns: ColumnOptions
) -> dict[str, Any]:
    images = _column(rows, of, "image_column", facts, columns)
    captions = _column(rows, of, "caption_column", facts, columns)
    return {"image_column": images, "caption_column": captions, "pair_id_column": _ids(facts, captions, columns)}


def _column(rows: datasets.Dataset, of: str, fact: str, facts: Mapping[str, Any], of_training: object) -> str:
    """The column that the set or an option names; else the one of the training set, else one of a usual name."""
    column: str = facts.get(fact) or FIND[fact.removesuffix("_column")](rows.features, getattr(of_training, fact))
    if column not in rows.column_names:
        raise ValueError(
            f"It has no column {column!r}. Its columns are {few_names(rows.column_names)}. Name the right one with "
            f"--{of}{'_' if of else ''}{fact}, or for this set alone behind its name: '?{fact}=NAME'."
        )
    return column
