"""The facts about a run that only the options of `infcl train` know, for its model card.

What an earlier run has left in the output folder, which is continued, deleted or refused.

Which images of an evaluation set are also trained on, by the contents of their files."""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, logging

from ..card import facts
from ..card.callback import CURVES_FILE
from ..card.pictures import PICTURES_FILE
from ..card.settings import code, escaped, joined
from ..data import ImageTextDataset
from ..data.images import ImageDataset
from ..data.replay import Replayed
from ..data.sets import STATED, SetSpec, read_sets
from ..models.adapters import ADAPTER_FILES, has_adapters, layers_of_adapters, words_of_adapters
from ..models.open_clip import licence_of
from ..models.pretrained import base_of_adapters
from ..options.commands import ColumnOptions, DataOptions, EvaluationOptions, GuardOptions, ModelOptions
from ..processes.collectives import Processes
from ..quality.ledger import words_of_excluded
from ..trainer.trainer import InfCLTrainer
from .datasets import mixture_weights

logger = logging.get_logger(__name__)


def describe_run(
    trainer: InfCLTrainer,
    model: ModelOptions,
    data: DataOptions,
    columns: ColumnOptions,
    conversion: Sequence[str] = (),
) -> functools.partial[facts.TrainingFacts]:
    """`training_facts` with the facts that the options and the trainer know, and what `load` said of a conversion."""
    trained: Any = trainer.train_dataset
    pairs = trained.datasets[0] if isinstance(trained, Replayed) else trained
    eval_datasets: Any = trainer.eval_dataset or {}
    collator: Any = trainer.data_collator
    encoder = trainer.dual_encoder
    settings = {"converted": f"from OpenCLIP's format. {escaped(' '.join(conversion))}"} if conversion else {}
    trains, base = trained_part(encoder.model, model.model)
    settings |= trains
    if not encoder.temperature_parameters[0].requires_grad:
        settings["logit_scale"] = f"{encoder.scale_and_bias()[0].item():.4g}, frozen"
    if excluded := [f"{which} by {code(file)}" for which, file in map(words_of_excluded, data.exclude or ())]:
        settings["pairs excluded before"] = joined(excluded)
    settings["image preprocessing"] = collator.image_backend
    return functools.partial(
        facts.training_facts,
        trainer,
        model_class=type(encoder.base).__name__,
        start=(base or model.model).removeprefix("hf-hub:"),
        random_start=encoder.looks_random(),
        sources=describe_sources(data),
        content=facts.content_of(pairs),
        replay_sources=[_source(spec, "train") for spec in read_sets("replay_dataset", data.replay_dataset)],
        pairs=len(pairs) if isinstance(pairs, ImageTextDataset) else None,
        pair_id_column=getattr(pairs, "pair_id_column", columns.pair_id_column),
        evaluations=describe_evaluations(eval_datasets),
        settings=settings,
    )


def trained_part(model: nn.Module, start: str) -> tuple[dict[str, str], str | None]:
    """The card's rows on adapters, if only they train; and the model under them, if the start came with them."""
    if not has_adapters(model):
        return {}, None
    words, base = words_of_adapters(model), base_of_adapters(start)
    layers, alpha = layers_of_adapters(model)
    rows = {"trained weights": words if base is None else f"{words}, those of {facts.source_name(start)[0]}"}
    rows["layers with adapters"] = joined(list(map(code, layers))) + (f"; alpha {alpha:g}" if alpha else "")
    return rows, base


def describe_sources(options: DataOptions) -> list[facts.Source]:
    """The training data for the card, with the licences that the Hub states."""
    weights = mixture_weights(options)
    shares = [None] * len(options.dataset) if weights is None else [weight / sum(weights) for weight in weights]
    specs = read_sets("dataset", options.dataset)
    return [_source(spec, options.split, share) for spec, share in zip(specs, shares, strict=True)]


def _source(spec: SetSpec, split: str, share: float | None = None) -> facts.Source:
    name, is_on_hub = facts.source_name(spec.path)
    return facts.Source(name, is_on_hub, spec.split or split, _licence(name) if is_on_hub else None, share)


def _licence(dataset: str) -> str | None:
    """The licence in a dataset's card on the Hub; None if it states none or the Hub cannot be reached."""
    try:
        card = HfApi().dataset_info(dataset).card_data
    except Exception as error:  # of the Hub's client or of its HTTP library
        message = "The model card states no licence for %s, because the Hub did not return one: %s"
        logger.warning(message, dataset, error)
        return None
    return licence_of(card)


def describe_evaluations(datasets: Mapping[str, ImageDataset]) -> list[facts.Evaluation]:
    """The evaluation data for the card; the metrics come from the logs."""
    entries = []
    for key, dataset in datasets.items():
        files = dataset.benchmark
        (name, on_hub) = facts.source_name(dataset.source) if files is None else (files.dataset, files.on_hub)
        split, revision = (dataset.split or "test", None) if files is None else ("test", files.revision)
        is_guard = key.startswith("guard")
        entries.append(facts.Evaluation(name, on_hub, split, len(dataset), key, guard=is_guard, revision=revision))
    return facts.with_texts(entries, datasets)


RESULTS = ("*_results.json", ".eval_results", "trainer_state.json", facts.FACTS_FILE, CURVES_FILE, PICTURES_FILE)
LAST_RESULTS = ("eval_results.json", TRAINER_STATE_NAME)  # written only at the end of a run


def earlier_results(folder: Path, resume: str | None) -> list[Path]:
    """The checkpoints and results of an earlier run in the folder, unless this run continues it.

    With ``"auto"``, a run that ended before its first checkpoint and before its results starts again.
    """
    checkpoints = list(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    if resume and (checkpoints or resume != "auto"):
        return []
    if resume and not any((folder / name).exists() for name in LAST_RESULTS):
        return []
    return sorted([*checkpoints, *(path for pattern in RESULTS for path in folder.glob(pattern))])


def weights_of_other_kind(folder: Path, adapters: bool) -> list[Path]:
    """The whole model of an earlier run if this one saves adapters, or its adapters, which would be added to this one.

    A folder that holds both is loaded as both together.
    """
    patterns = (CONFIG_NAME, "model*.safetensors*") if adapters else ADAPTER_FILES
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


class EarlierDeleted(TrainerCallback):
    """Deletes the results of an earlier run once a training begins, which no wrong option can prevent any more.

    That is done on every machine that saves its own results.
    """

    def __init__(self, results: Sequence[Path]) -> None:
        self._results = results

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        for path in self._results if args.should_save else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def has_results(trainer: InfCLTrainer) -> bool:
    """Whether the results in output_dir belong to the current step; the same answer on all processes."""
    path = Path(str(trainer.args.output_dir), TRAINER_STATE_NAME)
    try:
        written = TrainerState.load_from_json(str(path)).global_step == trainer.state.global_step
    except (OSError, ValueError, TypeError):  # it is missing, or a run was killed while it wrote the file
        written = False
    return bool(Processes().agree([written])[0][0])


def check_output_folder(
    output_dir: str | None, model: ModelOptions, data: DataOptions, evaluation: EvaluationOptions, guards: GuardOptions
) -> None:
    """Raises a ValueError if the results would overwrite the model, or be written among the files of a dataset."""
    output = Path(str(output_dir)).resolve()
    named = {**vars(data), **vars(evaluation), **vars(guards)}
    datasets = [(role, spec.path) for role in STATED if role in named for spec in read_sets(role, named[role])]
    base = base_of_adapters(model.model) if Path(model.model).is_dir() else None
    for option, source in (("model", model.model), ("model", base), *datasets):
        folder = Path(source or "").resolve()
        if not source or not folder.is_dir():
            continue
        if folder == output or (option != "model" and folder in output.parents):
            raise ValueError(
                f"--output_dir {output_dir} is inside the folder of --{option} {source}, whose files the results would "
                "replace or mix with. Choose another --output_dir."
            )


_SAMPLED = 1_000  # images of the evaluation set that are looked for
_TRAINED = 200_000  # training images among which they are looked for


def overlaps(trained: object, sets: Mapping[str, ImageDataset]) -> Iterator[str]:
    """A warning for each guard set that has images of the training set; streams are not looked into."""
    if not isinstance(trained, ImageTextDataset):
        return
    for name, guard in ((name, dataset) for name, dataset in sets.items() if name.startswith("guard")):
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
