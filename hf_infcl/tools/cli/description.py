"""The facts about a run that only the options of `infcl train` know, for its model card."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import HfApi
from torch import nn
from transformers.utils import logging

from ...conversion.models import licence_of
from ...conversion.pretrained import base_of_adapters
from ...data import ImageTextDataset
from ...data.images import ImageDataset
from ...data.sets import SetSpec, read_sets
from ...encoders.adapters import has_adapters, layers_of_adapters, words_of_adapters
from ...loading.replay import Replayed
from ...options.commands import ColumnOptions, DataOptions, ModelOptions
from ...training.trainer import InfCLTrainer
from ..publishing.facts import Evaluation, Source, TrainingFacts, content_of, source_name, training_facts, with_texts
from ..publishing.markdown import code, escaped, joined
from ..scoring.ledger import words_of_excluded
from .datasets import mixture_weights

logger = logging.get_logger(__name__)


def describe_run(
    trainer: InfCLTrainer,
    model: ModelOptions,
    data: DataOptions,
    columns: ColumnOptions,
    conversion: Sequence[str] = (),
) -> functools.partial[TrainingFacts]:
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
        training_facts,
        trainer,
        model_class=type(encoder.base).__name__,
        start=(base or model.model).removeprefix("hf-hub:"),
        random_start=encoder.looks_random(),
        sources=describe_sources(data),
        content=content_of(pairs),
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
    rows = {"trained weights": words if base is None else f"{words}, those of {source_name(start)[0]}"}
    rows["layers with adapters"] = joined(list(map(code, layers))) + (f"; alpha {alpha:g}" if alpha else "")
    return rows, base


def describe_sources(options: DataOptions) -> list[Source]:
    """The training data for the card, with the licences that the Hub states."""
    weights = mixture_weights(options)
    shares = [None] * len(options.dataset) if weights is None else [weight / sum(weights) for weight in weights]
    specs = read_sets("dataset", options.dataset)
    return [_source(spec, options.split, share) for spec, share in zip(specs, shares, strict=True)]


def _source(spec: SetSpec, split: str, share: float | None = None) -> Source:
    name, is_on_hub = source_name(spec.path)
    return Source(name, is_on_hub, spec.split or split, _licence(name) if is_on_hub else None, share)


def _licence(dataset: str) -> str | None:
    """The licence in a dataset's card on the Hub; None if it states none or the Hub cannot be reached."""
    try:
        card = HfApi().dataset_info(dataset).card_data
    except Exception as error:  # of the Hub's client or of its HTTP library
        message = "The model card states no licence for %s, because the Hub did not return one: %s"
        logger.warning(message, dataset, error)
        return None
    return licence_of(card)


def describe_evaluations(datasets: Mapping[str, ImageDataset]) -> list[Evaluation]:
    """The evaluation data for the card; the metrics come from the logs."""
    entries = []
    for key, dataset in datasets.items():
        files = dataset.benchmark
        (name, on_hub) = source_name(dataset.source) if files is None else (files.dataset, files.on_hub)
        split, revision = (dataset.split or "test", None) if files is None else ("test", files.revision)
        is_guard = key.startswith("guard")
        entries.append(Evaluation(name, on_hub, split, len(dataset), key, guard=is_guard, revision=revision))
    return with_texts(entries, datasets)
