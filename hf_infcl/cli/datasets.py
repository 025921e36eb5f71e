"""The data sets that the options name, and which images of an evaluation set are also trained on."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from ..card.facts import source_name
from ..data import ImageTextDataset, ImageTextStream, ZeroShotDataset
from ..data.images import ImageDataset, find_column
from ..data.labelled import captions_of_classes, read_lines
from ..data.sets import SetSpec, read_sets
from ..files.text import counted
from ..options.arguments import InfCLTrainingArguments
from ..options.commands import ColumnOptions, DataOptions, EvaluationOptions, GuardOptions
from ..quality.averages import halves
from ..quality.ledger import rows_kept, stream_kept
from ..shards.readers import is_string
from .benchmarks import benchmark_sets

Sets = Mapping[str, ImageTextDataset | ZeroShotDataset]  # by the beginnings of their metrics' names


def training_set(
    data: DataOptions, columns: ColumnOptions, args: InfCLTrainingArguments
) -> ImageTextDataset | ImageTextStream:
    """The pairs to train on: a table, or a stream of shards."""
    specs = read_sets("dataset", data.dataset)
    spec = replace(specs[0], split=specs[0].split or data.split, name=specs[0].name or data.dataset_name)
    options = _options_of_items(data, args) | spec.wanted(vars(columns))
    options["negative_caption_column"] = spec.columns.get("negative_caption_column", data.negative_caption_column)
    weights = mixture_weights(data)
    if data.streaming:
        if data.caption_templates:
            raise ValueError("--caption_templates is for tables with classes, which shards that are streamed are not.")
        options |= {"weights": weights, "samples_per_epoch": data.samples_per_epoch}
        stream = _stream(specs, spec, data, options)
        for ledger in data.exclude or ():
            stream = stream_kept(stream, ledger)
        return stream
    with spec.named():
        if weights is not None:
            raise ValueError("A weight is the share of one of several sets that are streamed, and this is a table.")
        rows = spec.rows(vars(columns))
        if data.caption_templates:
            labels = find_column("label", rows.features, spec.columns.get("label_column", "label"))
            class_names = None if spec.class_names is None else read_lines(spec.class_names)
            templates = read_lines(data.caption_templates)
            rows = captions_of_classes(rows, templates, label_column=labels, class_names=class_names)
            options |= {"caption_column": "caption", "pair_id_column": options["pair_id_column"] or labels}
        dataset = whole = ImageTextDataset(rows, **options)
    kept = np.arange(len(rows))
    for ledger in data.exclude or ():  # not named as the set is: the mistake is in the ledger
        chosen = rows_kept(dataset, ledger)
        kept, rows = kept[chosen], rows.select(chosen)
        dataset = ImageTextDataset(rows, **options)
        dataset.whole, dataset.numbers = whole, kept  # by which a teacher's stored embeddings are found
    dataset.name = str(spec)
    return dataset


def replay_set(
    data: DataOptions, columns: ColumnOptions, args: InfCLTrainingArguments
) -> ImageTextDataset | ConcatDataset[Any] | ImageTextStream | None:
    """The old pairs to replay, if any: tables one after the other, or a stream of shards."""
    specs = [replace(spec, split=spec.split or "train") for spec in read_sets("replay_dataset", data.replay_dataset)]
    if not specs:
        return None
    options = _options_of_items(data, args)
    streamed = {spec.streaming for spec in specs}
    if len(streamed) > 1:
        raise ValueError("--replay_dataset names tables and streams, which are not mixed. Let all of them be one kind.")
    if streamed == {False}:
        tables = [_old_pairs(spec, columns, options) for spec in specs]
        return tables[0] if len(tables) == 1 else ConcatDataset(tables)
    with specs[0].named():
        stream = _stream(specs, specs[0], data, options | specs[0].wanted(vars(columns)))
    stream.name = f"--replay_dataset {stream.name}"
    return stream


def training_parts(data: DataOptions, columns: ColumnOptions, args: InfCLTrainingArguments) -> list[Any]:
    """The sets that a training reads, table by table or stream by stream: first the new pairs, then the old ones."""
    new, old = training_set(data, columns, args), replay_set(data, columns, args)
    return [new, *([] if old is None else getattr(old, "datasets", [old]))]


def _stream(specs: Sequence[SetSpec], read: SetSpec, data: DataOptions, options: dict[str, Any]) -> ImageTextStream:
    """The stream of sets that must state the same, except for their weights, read as one of them."""
    first, *rest = [{k: v for k, v in vars(s).items() if v and k not in ("path", "role", "weight")} for s in specs]
    for other in rest:
        if other != first:
            raise ValueError(
                f"The sets of --{read.role} are streamed as one: let all state the same, not {first} and {other}."
            )
    order: dict[str, Any] = {"split": read.split, "name": read.name}
    order |= {"shuffle_buffer": data.shuffle_buffer, "lanes": data.lanes}
    return ImageTextStream([spec.path for spec in specs], **order, **options)


def mixture_weights(data: DataOptions) -> list[float] | None:
    """The proportions in which the sets of a training are mixed, from the option or from the sets themselves."""
    weights: list[Any] = [spec.weight for spec in read_sets("dataset", data.dataset)]
    if all(weight is None for weight in weights):
        return data.dataset_weights
    if None in weights or data.dataset_weights is not None:
        raise ValueError("Give every --dataset its weight, or all of them with --dataset_weights.")
    return weights


def _old_pairs(spec: SetSpec, columns: ColumnOptions, options: dict[str, Any]) -> ImageTextDataset:
    """A table of old pairs. It need not have ids, negative captions or lists of captions, as the new pairs do."""
    with spec.named():
        rows = spec.rows(vars(columns))
        if options["negative_caption_column"] not in rows.column_names:
            options = options | {"negative_caption_column": None}
        if is_string(rows.features[spec.column(rows, "caption_column", vars(columns))]):
            options = options | {"captions_per_image": 1}
        dataset = spec.pairs(rows, vars(columns), **options)
    dataset.name = str(spec)
    return dataset


def _options_of_items(data: DataOptions, args: InfCLTrainingArguments) -> dict[str, Any]:
    names = "on_bad_sample", "augmentation", "min_side", "captions_per_image", "negative_caption_column"
    return {"seed": args.seed_of_data, **{name: getattr(data, name) for name in names}}


def guard_names(guards: Sequence[Any] | None) -> list[str]:
    """The names of the guard sets, with which their metrics begin: "guard1_" and the name of the first, and so on."""
    names = [source_name(spec.path)[0] for spec in read_sets("guard_dataset", guards)]
    return [re.sub(r"\W+", "_", f"guard{number}_{name}") for number, name in enumerate(names, 1)]


def guard_datasets(
    columns: ColumnOptions,
    guards: GuardOptions,
    evaluation: EvaluationOptions,
    data: DataOptions | None = None,
    half: int | None = None,
    *,
    chooses: bool = False,
) -> dict[str, ImageTextDataset | ZeroShotDataset]:
    """The guard sets by their names: image-text pairs, or labelled images if they have classes but no captions.

    Args:
        columns: the columns of the training set.
        evaluation: names the labels and the templates.
        data: the training data, which must not be taken for a guard; None without a training.
        half: 0 or 1 for one of the `hf_infcl.quality.averages.halves` of each set; None for all rows.
        chooses: whether the evaluation chooses the model, which then is not done on a split "test".
    """
    chosen = None if half is None else lambda rows: halves(rows)[half]
    how = _how(columns, evaluation, data, chooses)
    specs = read_sets("guard_dataset", guards.guard_dataset)
    named = zip(guard_names(specs), specs, strict=True)
    sets = {name: spec.evaluated(**how, select=chosen) for name, spec in named}
    return sets | benchmark_sets(guards.guard_benchmark, evaluation.benchmark_folder, "guard_", chosen)


def evaluation_datasets(
    columns: ColumnOptions, options: EvaluationOptions, data: DataOptions | None = None, *, chooses: bool = False
) -> dict[str, ImageTextDataset | ZeroShotDataset]:
    """The requested evaluation datasets by the prefix of their metrics: "pairs", "zero_shot", and the benchmarks.

    A set that does not have the columns of the training set is read by its usual ones. No set may be that of the
    training ``data``, if there is one; ``chooses`` as for `guard_datasets`.
    """
    sets: dict[str, ImageTextDataset | ZeroShotDataset] = {}
    how = _how(columns, options, data, chooses)
    if options.eval_dataset:
        sets["pairs"] = SetSpec.read("eval_dataset", options.eval_dataset).evaluated(**how)
    if options.zero_shot_dataset:
        spec = SetSpec.read("zero_shot_dataset", options.zero_shot_dataset)
        spec = replace(spec, class_names=spec.class_names or options.class_names)
        sets["zero_shot"] = spec.evaluated(**how)
    return sets | benchmark_sets(options.eval_benchmark, options.benchmark_folder)


def _how(
    columns: ColumnOptions, evaluation: EvaluationOptions, data: DataOptions | None, chooses: bool
) -> dict[str, Any]:
    """The arguments of `SetSpec.evaluated`: the options that hold where a set states none, and the training sets."""
    of_classes = {"label_column": evaluation.label_column, "templates": evaluation.templates}
    trained = [] if data is None else [(s.path, s.split or data.split) for s in read_sets("dataset", data.dataset)]
    return {"defaults": {**vars(columns), **of_classes, "chooses": chooses}, "trained": trained}


def describe_sets(sets: Sets) -> Iterator[str]:
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


def what_was_measured(sets: Sets) -> dict[str, Any]:
    """For the results, the first three prompts of each set of classes and the revision of each benchmark."""
    prompts = {f"eval_{key}_prompts": s.prompts()[:3] for key, s in sets.items() if isinstance(s, ZeroShotDataset)}
    return prompts | {f"eval_{key}_revision": s.benchmark.revision for key, s in sets.items() if s.benchmark}


def check_columns(columns: ColumnOptions, sets: Sets) -> None:
    """Raises a ValueError if no set has a column that the user has named."""
    for option, column in vars(columns).items():
        if column != getattr(ColumnOptions, option) and all(column not in s.columns.values() for s in sets.values()):
            raise ValueError(f"No data set has a column {column!r}, which --{option} names.")


_SAMPLED = 1_000  # images of the evaluation set that are looked for
_TRAINED = 200_000  # training images among which they are looked for


def overlaps(trained: object, evaluated: Mapping[str, ImageDataset]) -> Iterator[str]:
    """A warning for each guard set that has images of the training set; streams are not looked into."""
    if not isinstance(trained, ImageTextDataset):
        return
    for name, guard in ((name, dataset) for name, dataset in evaluated.items() if name.startswith("guard")):
        shared, looked_for = shared_images(trained, guard)
        if shared:
            yield (
                f"Warning: {shared:,} of {looked_for:,} images of {name}, {guard.name}, "
                f"{'is' if shared == 1 else 'are'} also trained on and cannot show what is forgotten. Name another set."
            )


def shared_images(trained: ImageDataset, evaluated: ImageDataset) -> tuple[int, int]:
    """The number of images of an evaluation set whose file is also one of the training set, and that looked for.

    1,000 images at most are looked for among 200,000 training images at most, at equal distances. The sizes of the
    files are compared first, which costs a look into the table or the folder; only training images of a size that
    occurs are read and hashed. Remote images and copies in another format or size are not found.
    """
    looked_for = dict(evaluated.file_sizes(-(-len(evaluated) // _SAMPLED)))
    sizes, every = set(looked_for.values()), trained.file_sizes(-(-len(trained) // _TRAINED))
    wanted = {digest for row in looked_for if (digest := _digest(evaluated, row))}
    digests = {_digest(trained, row) for row, size in every if size in sizes}
    return len(wanted & digests), len(wanted)


def _digest(dataset: ImageDataset, row: int) -> bytes:
    with suppress(ValueError):  # a bad sample, which the training or the evaluation names
        return hashlib.blake2b(dataset.encoded(row), digest_size=16).digest()
    return b""
