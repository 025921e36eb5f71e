"""The model card of a training run: `model_cards/template.md`, which reads `TrainingFacts`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml

from ..evaluation.metrics import CEILING, HIGH, LOW, METRICS, is_bound
from ..files.text import counted
from ..loss.objectives import OBJECTIVES
from ..models.model_types import reads_padding
from .facts import SPEED, Evaluation, TrainingFacts
from .outcome import changes, explained, outcome, words_of_scores
from .settings import cell, code, escaped, line, literal, row

_PADDED = 64  # tokens to which the pipeline of transformers pads the texts for SigLIP, whatever length the model reads


def model_card(facts: TrainingFacts, *, curves: str | None = None, pictures: str | None = None) -> ModelCard:
    """The card of a trained model: its data, its method, its results and what is unknown.

    Args:
        facts: what the card states.
        curves, pictures: the names of the pictures beside the card that were drawn: of the curves, and of evaluation
            images with their best captions.

    Returns:
        A card with model-index metadata; ``card.save(path)`` writes it.
    """
    datasets = [source.dataset for source in (*facts.sources, *facts.replay_sources) if source.on_hub]
    of_size = [] if facts.pairs is None else [f"dataset_size:{facts.pairs}"]
    data = ModelCardData(
        model_name=facts.name,
        library_name="peft" if facts.adapter else "transformers",
        pipeline_tag="zero-shot-image-classification",
        tags=["contrastive-learning", "image-text", "hf_infcl", f"loss:{facts.objective}", *of_size],
        base_model=facts.start if facts.start_on_hub else None,
        base_model_relation=("adapter" if facts.adapter else "finetune") if facts.start_on_hub else None,
        datasets=datasets or None,
        eval_results=_model_index(facts.evaluations) or None,
    )
    example = next((one for one in facts.evaluations if one.templates), None)
    labels = ["dog", "cat"] if example is None else list(example.class_names[:3])
    prompt = "a photo of a {}." if example is None else example.templates[0]
    functions: tuple[Any, ...] = (code, escaped, literal, row, line, cell, counted, explained, words_of_scores)
    return ModelCard.from_template(
        data,
        template_str=resources.files(__package__).joinpath("template.jinja").read_text(encoding="utf-8"),
        **{one.__name__: one for one in functions},
        place=_place,
        facts=facts,
        outcome=outcome(facts),
        objective=OBJECTIVES[facts.objective].words,
        changes=changes(facts),
        results=_results(facts),
        repeating=[_place(one) for one in facts.evaluations if any(name.endswith(CEILING) for name in one.metrics)],
        has_pipeline=facts.caption_limit in (None, _PADDED) or not reads_padding(facts.model_class),
        labels=labels,
        prompt=prompt,
        curves=curves,
        pictures=pictures,
    )


def write_eval_results(facts: TrainingFacts, folder: str | Path) -> None:
    """Writes the results on the Hub's datasets in the Hub's format for leaderboards, ``.eval_results/*.yaml``."""
    entries: dict[str, list[EvalResultEntry]] = {}
    for evaluation in (one for one in facts.evaluations if one.on_hub):
        of_set = {"dataset_revision": evaluation.commit, "notes": evaluation.part}
        entries.setdefault(evaluation.dataset, []).extend(
            EvalResultEntry(evaluation.dataset, metric, round(value, 4), **of_set)
            for metric, value in _defined(evaluation)
        )
    for dataset, of_dataset in entries.items():
        path = Path(folder, ".eval_results", dataset.replace("/", "_") + ".yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(eval_result_entries_to_yaml(of_dataset), sort_keys=False), encoding="utf-8")


def _defined(evaluation: Evaluation) -> list[tuple[str, float]]:
    """The metrics that have a value (top-5 accuracy has none for four classes), without ceilings and intervals."""
    return [
        (metric, value)
        for metric, value in evaluation.metrics.items()
        if metric not in SPEED and not is_bound(metric) and value is not None and not math.isnan(value)
    ]


def _metric_name(metric: str) -> str:
    return METRICS[metric].words if metric in METRICS else metric.replace("_", " ")


def _model_index(evaluations: Iterable[Evaluation]) -> list[EvalResult]:
    results = []
    for evaluation in evaluations:
        if evaluation.templates:
            task = "zero-shot-image-classification", "Zero-shot image classification"
        elif "text_acc" in evaluation.metrics:
            task = "image-caption-selection", "Image-caption selection"
        else:
            task = "image-text-retrieval", "Image-text retrieval"
        results += [
            EvalResult(
                task_type=task[0],
                task_name=task[1],
                dataset_type=evaluation.dataset,
                dataset_name=evaluation.dataset,
                dataset_config=evaluation.column,  # which keeps the results of several columns apart
                dataset_split=evaluation.split,
                dataset_revision=evaluation.commit,
                metric_type=METRICS[metric].hub_type if metric in METRICS else metric,
                metric_name=_metric_name(metric),
                metric_value=round(value, 4),
            )
            for metric, value in _defined(evaluation)
        ]
    return results


def _place(evaluation: Evaluation) -> str:
    return f"{code(evaluation.dataset)}, {escaped(evaluation.part)}"


def _results(facts: TrainingFacts) -> str:
    """A table of all metrics; columns that no metric fills are left out."""
    rows = [("set", "images", "metric", "value", "95% interval", "before the training", "at most")]
    for evaluation in facts.evaluations:
        metrics, before = evaluation.metrics, evaluation.before
        for metric, value in _defined(evaluation):
            bounds = [f"{metrics[metric + end]:.4f}" for end in (LOW, HIGH) if metric + end in metrics]
            ceiling = metrics.get(metric + CEILING)
            most = f"{ceiling:.4f}" if ceiling is not None and ceiling < 1 else ""
            old = f"{before[metric]:.4f}" if metric in before else ""
            name = METRICS[metric].words if metric in METRICS else escaped(_metric_name(metric))
            numbers = (f"{value:.4f}", " to ".join(bounds), old, most)
            rows.append((_place(evaluation), f"{evaluation.size:,}", name, *numbers))
    used = [n for n in range(len(rows[0])) if n < 4 or any(one[n] for one in rows[1:])]
    shown = [row(*(one[n] for n in used)) for one in rows]
    return "\n".join([shown[0], row(*["---"] * len(used)), *shown[1:]])
