"""The facts about a training run, stored as JSON beside the model so that its card can be rewritten at any time."""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import TrainerState

from .. import __version__
from ..data import ImageTextDataset, ImageTextStream, ZeroShotDataset, transparency
from ..data.replay import Replayed
from ..evaluation.metrics import score_if_measured
from ..files.text import Url, code, counted, describe_cause, joined, without_secrets
from ..files.whole import written_whole
from ..optim.groups import words_of_groups
from ..options.declaring import WITHOUT_WARM_UP, spelled, values_of_card
from ..quality.averages import Averaged, Measured
from ..shards.opening import digest
from ..trainer.loaders import drawn_texts
from ..trainer.loop_events import trained_seconds

if TYPE_CHECKING:
    from ..trainer.trainer import InfCLTrainer

FACTS_FILE = "training_record.json"
_END = "train_runtime"  # Trainer logs it when a training has ended, before it loads the best weights
_FILES = re.compile(r"[{*?\[]|\.(tar|parquet)$")  # shards, which belong to the folder that holds them
_PACKAGES = ("transformers", "accelerate", "torch")  # whose versions a card states
SPEED = ("runtime", "samples_per_second", "steps_per_second")  # Trainer adds these to the metrics of an evaluation


@dataclass(frozen=True)
class _Dataset:
    """A dataset that a card names.

    Raises:
        ValueError: ``dataset`` is a URL, or should be a Hub id and cannot be one.
    """

    dataset: str  # Hub id, or the last part of a local path. `source_name` finds both
    on_hub: bool  # whether ``dataset`` is a Hub id, which the card links

    def __post_init__(self) -> None:
        if "://" in self.dataset:  # which must not be published
            name = source_name(self.dataset)[0]
            raise ValueError(f"{Url(self.dataset)!r} is a URL, of which a card should only tell {name!r}.")
        try:
            if self.on_hub:
                validate_repo_id(self.dataset)
        except HFValidationError as error:
            raise ValueError(f"{self.dataset!r} is not the id of a dataset on the Hub. Use on_hub=False.") from error


@dataclass(frozen=True)
class Source(_Dataset):
    """A dataset that was trained on."""

    split: str = "train"
    license: str | None = None  # the licence that the Hub states; None if it states none
    weight: float | None = None  # the share of the samples in a mixture of several sources; None for a single source


@dataclass(frozen=True)
class Evaluation(_Dataset):
    """The measurements on one dataset."""

    split: str
    size: int  # the number of images
    key: str  # its name in ``InfCLTrainer.eval_dataset``; its metrics are logged as ``eval_{key}_...``
    # What `InfCLTrainer.evaluate` returns, without prefixes: zero-shot accuracies, or loss and recalls.
    metrics: Mapping[str, float] = field(default_factory=dict)
    templates: Sequence[str] = ()  # the prompts of a zero-shot classification; empty for image-text pairs
    class_names: Sequence[str] = ()  # the names of its classes; empty for image-text pairs
    guard: bool = False  # whether the set serves to show what the training makes worse
    before: Mapping[str, float] = field(default_factory=dict)  # its metrics before the training, if they were measured
    step: int | None = None  # the step whose weights were measured; None if it is not known
    revision: str | None = None  # of a named benchmark, the commit on the Hub, or "sha256:" and a hash of a local copy
    column: str | None = None  # of the captions, where the same images are measured with those of several columns

    @property
    def commit(self) -> str | None:
        """The revision if it is a commit on the Hub."""
        return None if self.revision is None or ":" in self.revision else self.revision

    @property
    def part(self) -> str:
        """Which part of the dataset it is, in words."""
        return f"split {self.split}" + (f", column {self.column}" if self.column else "")

    @property
    def images(self) -> tuple[str, str]:
        """The data set and the part of it, which are equal for evaluations of the same images."""
        return self.dataset, self.split

    @property
    def score(self) -> float | None:
        return score_if_measured(self.metrics)


@dataclass(frozen=True)
class TrainingFacts:
    """Every fact that a model card states about a training run; values that do not apply are None or empty."""

    name: str
    location: str  # the argument of ``from_pretrained`` in the card's example
    model_class: str  # the class of transformers that loads the model, "CLIPModel"
    start: str  # the checkpoint that the training started from: Hub id, or the last part of a local path
    start_on_hub: bool
    sources: Sequence[Source]
    objective: str  # "softmax" or "sigmoid"
    strategy: str  # how the processes shared a batch
    per_device_batch_size: int  # the global batch is the product of this one and the next two
    accumulation_steps: int
    processes: int
    steps: int  # of the optimizer
    seconds: float  # of the training, including the time before an interruption
    device: str  # the name of the processor, "NVIDIA H200" or "CPU"
    versions: Mapping[str, str]  # of the packages, by name
    random_start: bool = False  # whether the weights of the start were random, as far as its temperature shows it
    revision: str | None = None  # the branch of the Hub repository that holds the model; None for the main branch
    pairs: int | None = None  # images with captions in all sources together; None for a stream of unknown length
    adapter: bool = False  # whether the repository holds an adapter (LoRA) instead of the whole model
    pair_id_column: str | None = None  # pairs with equal values in this column were not each other's negatives
    equal_ids: str = "exclude"  # "positive" if pairs with equal values, and all captions of an image, were positives
    captions_per_image: int | None = 1  # drawn per image and epoch, at most; None for all that each item has
    negative_caption_column: str | None = None  # of captions that were negatives of all images
    caption_limit: int | None = None  # the tokens of a caption that the model reads, if known; the rest is cut off
    cut_captions: Mapping[str, float] = field(default_factory=dict)  # the shares of longer ones, by their dataset
    replayed: int = 0  # the old pairs in each global batch, which are not among ``pairs``
    replay_sources: Sequence[Source] = field(default_factory=list)
    frozen: str | None = None  # the tower that did not train, "image" or "text"
    settings: Mapping[str, str] = field(default_factory=dict)  # further rows of the training table, by name
    peak_memory: int | None = None  # the largest memory of one GPU in bytes, None on CPUs
    skipped: int = 0  # how many times a bad sample was replaced or left out
    evaluations: Sequence[Evaluation] = ()
    measured_during_training: bool = False  # whether the same sets were evaluated during the training
    # The scores of evaluation sets with only the first dimensions of the embeddings, by the set and their number.
    scores_by_width: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    best: bool = False  # whether the weights are those of the best evaluation, which Trainer loads at the end
    average: Averaged | None = None  # with the start, whose weights the model holds; None if it holds the trained ones
    planned_steps: int | None = None  # to which shares in ``settings`` apply, if the training has not made all of them
    rates: Mapping[str, float] = field(default_factory=dict)  # see `highest_rates`
    content: str = ""  # `content_of` the training set without old pairs; empty if it is not known

    @property
    def global_batch_size(self) -> int:
        """The pairs of one contrastive batch."""
        return self.per_device_batch_size * self.accumulation_steps * self.processes

    def save(self, folder: str | Path) -> None:
        """Writes the facts into the folder, as `FACTS_FILE`."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)
        with written_whole(Path(folder, FACTS_FILE)) as file:
            file.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> TrainingFacts:
        """Reads the facts of a folder; raises a ValueError if it has none, or they cannot be read."""
        path = Path(folder, FACTS_FILE)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            for name, kind in (("sources", Source), ("replay_sources", Source), ("evaluations", Evaluation)):
                if name in values:
                    values[name] = [kind(**one) for one in values[name]]
            if (average := values.get("average")) is not None:
                measured = [Measured(**one) for one in average["measured"]]
                values["average"] = Averaged(**average | {"measured": measured})
            known = {one.name for one in fields(cls)}  # earlier versions knew more of a run
            return cls(**{name: value for name, value in values.items() if name in known})
        except (FileNotFoundError, NotADirectoryError) as error:
            above = Path(folder).absolute().parent
            hint = f" {above}, the folder above, has one." if (above / FACTS_FILE).is_file() else ""
            what = f"{folder} has no {FACTS_FILE}, which `infcl train` writes to --output_dir"
            raise ValueError(f"{what}: the facts from which a card is written.{hint}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no facts of a training: {describe_cause(error)}.") from error


def facts_of_model(model: str) -> TrainingFacts:
    """The facts of the training whose result, or one of whose checkpoints, is in a folder; see `TrainingFacts.load`."""
    folder = Path(model)
    return TrainingFacts.load(folder.parent if folder.name.startswith("checkpoint-") else folder)


def training_facts(
    trainer: InfCLTrainer,
    *,
    start: str,
    pair_id_column: str | None,
    evaluations: Sequence[Evaluation] = (),
    settings: Mapping[str, str] | None = None,
    **fields: Any,
) -> TrainingFacts:
    """The facts of a run so far.

    Memory, bad samples and metrics are the last in the log, which a resumed run continues, as it does the duration.

    Args:
        trainer: the last part of its ``hub_model_id``, or else of ``output_dir``, is the model's name.
        start: Hub id or folder of the checkpoint that the training started from.
        pair_id_column: None if the batches had no ``pair_ids``. The card then says that pairs with equal captions were
            each other's negatives, so this argument has no default.
        evaluations: the evaluated datasets, without their metrics; the trainer knows the prompts of a set of classes.
            A guard set that is also another evaluation set with the same results is listed once.
        settings: further rows of the training table, by name; they replace rows of `training_settings`.
        **fields: further fields of `TrainingFacts` that the trainer does not know, at least ``model_class`` and
            ``sources``.
    """
    args, state = trainer.args, trainer.state
    last: Mapping[str, Any] = ChainMap(*reversed(state.log_history))  # the last value of each name
    repository = trainer.hub_model_id or args.hub_model_id or ""
    name = Path(repository or args.output_dir or ".").resolve().name
    on_hub = "/" in repository  # the Hub adds the user's name when it creates a repository
    start_name, start_on_hub = source_name(start)
    # Whether Trainer has loaded the best weights.
    best = args.load_best_model_at_end and state.best_model_checkpoint is not None and _END in last
    drawn, negatives = drawn_texts(trainer.train_dataset)
    takes_all = drawn == 1 and negatives is None and last.get("texts_per_image", 1) > 1  # that an item has
    return TrainingFacts(
        name=name,
        location=repository if on_hub else f"path/to/{name}",
        revision=args.hub_revision if on_hub else None,
        start=start_name,
        start_on_hub=start_on_hub,
        objective=trainer.context.objective,
        strategy=args.strategy,
        per_device_batch_size=args.per_device_train_batch_size,
        accumulation_steps=args.gradient_accumulation_steps,
        processes=args.world_size,
        pair_id_column=pair_id_column,
        equal_ids=trainer.context.equal_ids,
        captions_per_image=None if takes_all else drawn,
        negative_caption_column=negatives,
        caption_limit=getattr(trainer.data_collator, "max_length", None),
        cut_captions=dict(trainer.caption_notices.cut),
        replayed=trainer.train_dataset.old if isinstance(trainer.train_dataset, Replayed) else 0,
        frozen=args.freeze,
        steps=state.global_step,
        planned_steps=state.max_steps if state.global_step < state.max_steps else None,
        rates=highest_rates(trainer),
        settings={**training_settings(trainer), **(settings or {})},
        seconds=trained_seconds(state),
        device=torch.cuda.get_device_name() if args.device.type == "cuda" else args.device.type.upper(),
        peak_memory=last.get("peak_memory"),
        skipped=last.get("skipped_samples", 0),
        versions={"hf_infcl": __version__, **{name: metadata.version(name) for name in _PACKAGES}},
        evaluations=_measured(with_texts(evaluations, trainer.eval_dataset), state, best),
        measured_during_training=args.eval_strategy != "no",
        best=best,
        **fields,
    )


def training_settings(trainer: InfCLTrainer) -> dict[str, str]:
    """The rows of a card on optimizer, learning rate, seed, precision and options, by name.

    The arguments alone do not decide about them: an optimizer may have been passed to the trainer, and `accelerate
    launch` may have chosen the precision. A trainer without an optimizer has no rows about it.
    """
    rows = {} if trainer.optimizer is None else _optimization(trainer)
    rows |= {"seed": str(trainer.args.seed), "precision": precision(trainer)}
    for _, row, value in values_of_card(trainer.args):
        values = value if isinstance(value, list) else [value]
        rows[row] = joined([code(one) if isinstance(one, str) else f"{one:g}" for one in values])
    pairs: Any = trainer.train_dataset
    pairs = pairs.datasets[0] if isinstance(pairs, Replayed) else pairs
    options = getattr(pairs, "options", {})
    if (augmentation := options.get("augmentation")) is not None:
        rows["augmentation"] = getattr(augmentation, "__name__", str(augmentation))
    if hasattr(pairs, "image_column"):
        rows["transparency of images"] = transparency()
    if "open_clip" in trainer.args.save_formats:
        rows["saved formats"] = "transformers and OpenCLIP"
    for part in trainer.window_step.extensions:
        rows |= part.card
    weight = trainer.args.teacher_weight
    distances = [e["teacher_loss"] / weight for e in trainer.state.log_history if weight and "teacher_loss" in e]
    if distances:
        rows["distance to the teacher"] = f"{distances[0]:.3g} in the first log, {distances[-1]:.3g} in the last"
    return rows


def highest_rates(trainer: InfCLTrainer) -> dict[str, float]:
    """The highest learning rates at the peak of the schedule, but for the temperature's, of "adamw" and "muon".

    Only optimizers whose steps are about as large as the rate count: Muon, and optimizers of Adam's kind, which have
    β. Prodigy and D-Adaptation have β as well, but estimate the rate (d). A schedule that follows a metric overwrites
    the rates that it began with, so they are not known.
    """
    rates: dict[str, float] = {}
    for group in () if trainer.optimizer is None else trainer.optimizer.param_groups:
        algorithm = group.get("algorithm", "adamw" if "betas" in group and "d" not in group else None)
        if algorithm is not None and group["params"] and "initial_lr" in group and group.get("name") != "temperature":
            rates[algorithm] = max(rates.get(algorithm, 0.0), float(group["initial_lr"]))
    return rates


def precision(trainer: InfCLTrainer) -> str:
    """The precision in which the trainer's forwards compute."""
    mixed = trainer.accelerator.mixed_precision
    # On CPUs with fp16, accelerate computes in the precision of the weights.
    if mixed != "no" and not (mixed == "fp16" and trainer.args.device.type == "cpu"):
        return f"{mixed} autocast"
    kinds = {str(p.dtype) for p in trainer.dual_encoder.model.parameters() if p.is_floating_point()}
    return " and ".join(sorted(kinds)).replace("torch.", "").replace("bfloat", "bf").replace("float", "fp")


def _optimization(trainer: InfCLTrainer) -> dict[str, str]:
    """The rows about a trainer's optimizer and its learning rates."""
    args, model = trainer.args, trainer.dual_encoder
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate has wrapped it
    groups = optimizer.param_groups
    if trainer.optimization.creates_optimizer:
        parts = [("Muon and " if args.optimizer == "muon" else "") + spelled(args.optim)]
        rate = f"{args.learning_rate:g}"
    else:
        parts = [type(optimizer).__name__]
        rates = [group.get("initial_lr", group["lr"]) for group in groups if group.get("name") != "temperature"]
        rate = " and ".join(sorted({f"{float(one):g}" for one in rates}))
    settings = ChainMap(*groups)  # those of the first group that has them
    if betas := settings.get("betas"):
        parts.append(f"β = ({', '.join(map(str, betas))})")
    if momentum := settings.get("momentum"):
        parts.append(f"momentum {momentum}")
    if "weight_decay" in settings:
        parts.append(f"weight decay {max(group.get('weight_decay', 0) for group in groups):g}")
    if trainer.optimization.creates_scheduler:
        rate += f", {(schedule := spelled(args.lr_scheduler_type))}"
        if schedule not in WITHOUT_WARM_UP:
            rate += f", {counted(args.get_warmup_steps(trainer.state.max_steps), 'step')} of warm-up"
    else:
        rate += f", {type(getattr(trainer.lr_scheduler, 'scheduler', trainer.lr_scheduler)).__name__}"
    rows = {"optimizer": ", ".join(parts), **words_of_groups(groups), "learning rate": rate}
    trained = any(parameter.requires_grad for parameter in model.temperature_parameters)
    if args.logit_scale_learning_rate is not None and trained:
        rows["learning rate of logit_scale"] = f"{args.logit_scale_learning_rate:g}"
    return rows


def scores_by_width(trainer: InfCLTrainer, sets: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The score of each evaluation set at each of ``matryoshka_dims``, by the set and the width; collective.

    Each width takes an evaluation of its own, which the trainer does not log.
    """
    scores: dict[str, dict[str, float]] = {}
    for width in trainer.args.matryoshka_dims or ():
        for name, dataset in sets.items():
            with patch.object(trainer.dual_encoder, "dims", width):
                metrics = trainer.predict(dataset, metric_key_prefix=f"eval_{name}").metrics or {}
            if (score := score_if_measured(metrics, f"eval_{name}_")) is not None:
                scores.setdefault(name, {})[str(width)] = score
    return scores


def source_name(source: str) -> tuple[str, bool]:
    """The name under which a card mentions a dataset, shards or a checkpoint, and whether it is a Hub id.

    Of a local path or a URL, only the last folder is used, so that cards tell nothing about the machine, its user or
    his passwords. Without a folder, it is the name of the files, or else the host.
    """
    if on_hub := re.match(r"hf://datasets/([\w.-]+/[\w.-]+)(?=[/@]|$)", source):
        return on_hub[1], True
    if "://" in source:
        place = without_secrets(source).rpartition("://")[2].rpartition("@")[2].partition("?")[0]
        host, *folders = [part for part in place.split("/") if part] or ["files"]
        file = folders.pop() if folders and _FILES.search(folders[-1]) else host
        return (folders or [file])[-1], False
    path = Path(source)
    if _FILES.search(path.name) and not path.is_dir():
        return path.resolve().parent.name, False
    if not (path.exists() or path.is_absolute()):
        with suppress(HFValidationError):  # of a relative path, which is not there
            validate_repo_id(source)
            return source, True
    return path.resolve().name, False


def with_texts(evaluations: Sequence[Evaluation], sets: Any) -> list[Evaluation]:
    """The evaluations with the prompts and names of classes, or with the captions' column where it tells them apart.

    ``sets`` are the evaluated datasets by the keys of the evaluations; what is no such mapping tells nothing.
    """
    known = sets if isinstance(sets, Mapping) else {}
    columns = {one.key: getattr(known.get(one.key), "caption_column", None) for one in evaluations}
    made = []
    for one in evaluations:
        alike = {columns[other.key] for other in evaluations if other.images == one.images} - {None}
        if isinstance(dataset := known.get(one.key), ZeroShotDataset):
            one = replace(one, templates=dataset.templates, class_names=dataset.class_names)
        elif len(alike) > 1:
            one = replace(one, column=columns[one.key])
        made.append(one)
    return made


def _measured(evaluations: Sequence[Evaluation], state: TrainerState, best: bool) -> list[Evaluation]:
    """The evaluations that were made, with their metrics before the training and those of the present weights.

    If an evaluation has not yet measured the present weights, its metrics are those of the last one, with its step.
    If a guard set and another set are alike, only the guard set is returned.
    """
    log = state.log_history
    if best:  # what was measured at the other steps is of other weights, until the best ones are loaded
        end = next(number for number, entry in enumerate(log) if _END in entry)
        log = [entry for entry in log[:end] if entry["step"] in (0, state.best_global_step)] + log[end:]
    prefixes = [f"eval_{one.key}_" for one in evaluations]
    measured = []
    for one, prefix in zip(evaluations, prefixes, strict=True):
        # Some names of sets begin with the name of another set: voc2007 and voc2007_multilabel.
        longer = tuple(other for other in prefixes if other.startswith(prefix) and other != prefix)
        results: dict[int, dict[str, float]] = {}  # by their steps, which only grow
        for entry in log:
            names = [name for name in entry if name.startswith(prefix) and not name.startswith(longer)]
            if names:
                results[int(entry["step"])] = {name.removeprefix(prefix): entry[name] for name in names}
        before = results.pop(0, {})
        if results:
            step, last = results.popitem()
            measured.append(replace(one, metrics=last, before=before, step=state.best_global_step if best else step))
    guards = [_figures(one) for one in measured if one.guard]
    return [one for one in measured if one.guard or _figures(one) not in guards]


def _figures(evaluation: Evaluation) -> tuple[Any, ...]:
    """The figures that are equal if one set is evaluated twice: no times, and no last digits, which vary on a GPU."""
    results = {name: round(value, 4) for name, value in evaluation.metrics.items() if name not in SPEED}
    return evaluation.dataset, evaluation.part, evaluation.size, results


def content_of(dataset: ImageTextDataset | ImageTextStream) -> str:
    """The `content_fingerprint` of a training set and, as shards may be equally large, a digest of their names."""
    return f"{dataset.content_fingerprint()} {digest([shard.name for shard in getattr(dataset, 'shards', ())])}"


def has_learned(model: str, content: str) -> bool:
    """Whether the record of a checkpoint in a folder says that it was trained on all pairs of a data set.

    ``content`` is the `content_of` the data set. It is False without a record that can be read, or that tells it.
    """
    with suppress(ValueError):
        facts = facts_of_model(model)
        left_none_out = facts.settings.get("pairs left out", "none").startswith("none")
        return facts.content == content and left_none_out and "pairs excluded before" not in facts.settings
    return False
