"""Writes the model card of a run from its `TrainingFacts` by `template.jinja`, with its curves and results.

`CardCallback` keeps it up to date while the model trains, so that every push to the Hub includes it.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from ..evaluation.metrics import CEILING, HIGH, LOW, METRICS, is_bound
from ..files.text import counted
from ..loss.objectives import OBJECTIVES
from ..models.model_types import reads_padding
from .facts import SPEED, Evaluation, TrainingFacts
from .outcome import changes, explained, outcome, words_of_scores
from .pictures import PICTURES_FILE, plot_curves
from .settings import cell, code, escaped, line, literal, row

CURVES_FILE = "curves.png"
_PADDED = 64  # tokens to which the pipeline of transformers pads the texts for SigLIP, whatever length the model reads

logger = logging.get_logger(__name__)


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
        eval_results=[result for one in facts.evaluations for result in _model_index(one)] or None,
    )
    functions: tuple[Any, ...] = (code, escaped, literal, row, line, cell, counted, explained, words_of_scores)
    return ModelCard.from_template(
        data,
        template_str=Path(__file__).with_name("template.jinja").read_text(encoding="utf-8"),
        **{one.__name__: one for one in functions},
        place=_place,
        facts=facts,
        outcome=outcome(facts),
        objective=OBJECTIVES[facts.objective].words,
        changes=changes(facts),
        results=_results(facts),
        repeating=[_place(one) for one in facts.evaluations if any(name.endswith(CEILING) for name in one.metrics)],
        has_pipeline=facts.caption_limit in (None, _PADDED) or not reads_padding(facts.model_class),
        curves=curves,
        pictures=pictures,
    )


def write_eval_results(facts: TrainingFacts, folder: str | Path) -> None:
    """Writes the results on the Hub's datasets in the Hub's format for leaderboards, ``.eval_results/*.yaml``."""
    entries: dict[str, list[EvalResultEntry]] = {}
    for one in facts.evaluations:
        of_set = {"dataset_revision": one.commit, "notes": one.part}
        for metric, value in _defined(one) if one.on_hub else ():
            entry = EvalResultEntry(one.dataset, metric, round(value, 4), **of_set)
            entries.setdefault(one.dataset, []).append(entry)
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


def _model_index(evaluation: Evaluation) -> Iterator[EvalResult]:
    task = "zero-shot-image-classification" if evaluation.templates else "image-text-retrieval"
    for metric, value in _defined(evaluation):
        known = METRICS.get(metric)
        yield EvalResult(
            task_type="image-caption-selection" if "text_acc" in evaluation.metrics else task,
            dataset_type=evaluation.dataset,
            dataset_name=evaluation.dataset,
            dataset_config=evaluation.column,  # which keeps the results of several columns apart
            dataset_split=evaluation.split,
            dataset_revision=evaluation.commit,
            metric_type=known.hub_type if known else metric,
            metric_name=_words(metric),
            metric_value=round(value, 4),
        )


def _words(metric: str) -> str:
    return METRICS[metric].words if metric in METRICS else metric.replace("_", " ")


def _place(evaluation: Evaluation) -> str:
    return f"{code(evaluation.dataset)}, {escaped(evaluation.part)}"


def _results(facts: TrainingFacts) -> list[list[str]]:
    """The rows of a table of all metrics; columns that no metric fills are left out."""
    rows = [["set", "images", "metric", "value", "95% interval", "before the training", "at most"]]
    for one in facts.evaluations:
        for metric, value in _defined(one):
            words = _words(metric) if metric in METRICS else escaped(_words(metric))
            bounds = [f"{one.metrics[metric + end]:.4f}" for end in (LOW, HIGH) if metric + end in one.metrics]
            before = f"{one.before[metric]:.4f}" if metric in one.before else ""
            most = f"{ceiling:.4f}" if (ceiling := one.metrics.get(metric + CEILING, 1)) < 1 else ""
            rows.append([_place(one), f"{one.size:,}", words, f"{value:.4f}", " to ".join(bounds), before, most])
    columns = [column for n, column in enumerate(zip(*rows, strict=True)) if n < 4 or any(column[1:])]
    return [list(cells) for cells in zip(*columns, strict=True)]


class CardCallback(TrainerCallback):
    """Writes the facts, the curves, the results and the card into ``output_dir``.

    The main process writes them after each evaluation and each checkpoint, before each push to the Hub, at the end of
    the training and after `InfCLTrainer.save_model`, so that it may also be added after the training. If they cannot be
    written, for example because the disk is full, the error is logged and the training continues.

    Args:
        describe: returns the facts of the run so far; `training_facts` with its arguments.

    Attributes:
        first_step: the step at which this training began: 0, or the step of the checkpoint from which it resumed.
            Nothing is written before a step has been trained, because the folder still describes the previous run.
    """

    def __init__(self, describe: Callable[[], TrainingFacts]) -> None:
        self._describe = describe
        self._written = 0, 0  # the step and the number of log entries that the card tells of
        self.first_step = 0

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self.first_step = state.global_step
        self._written = 0, 0  # an earlier training may have ended at the same step

    def _update(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        if (state.global_step, len(state.log_history)) == self._written:
            return
        try:
            self.write(args, state)
        except OSError as error:
            logger.error(f"The card of step {state.global_step} could not be written to {args.output_dir}: {error}")

    on_evaluate = on_push_begin = on_save = on_train_end = on_model_saved = _update

    def write(self, args: TrainingArguments, state: TrainerState) -> None:
        """Writes all files for the current state, if this is the main process and a step has been trained."""
        if state.is_world_process_zero and state.global_step > self.first_step:
            folder = Path(str(args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            facts = self._describe()
            facts.save(folder)
            write_publication(facts, folder, state)
            self._written = state.global_step, len(state.log_history)


def write_publication(facts: TrainingFacts, folder: str | Path, state: TrainerState) -> None:
    """Writes the results, the card and the curves of a run into the folder.

    The curves are drawn if matplotlib is installed and a training loss was logged. Otherwise the card shows the curves
    that are already in the folder. It also shows a picture of `PicturesCallback` if there is one.
    """
    if importlib.util.find_spec("matplotlib") is not None and any("loss" in entry for entry in state.log_history):
        plot_curves(state.log_history, Path(folder, CURVES_FILE))
    write_eval_results(facts, folder)
    shown = {"curves": CURVES_FILE, "pictures": PICTURES_FILE}
    there = {what: file for what, file in shown.items() if Path(folder, file).is_file()}
    model_card(facts, **there).save(Path(folder, "README.md"))
