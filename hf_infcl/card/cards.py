"""Writes the model card of a run from its `TrainingFacts` by `template.jinja`, with its curves and results.

`CardCallback` keeps it up to date while the model trains, so that every push to the Hub includes it. Text of others,
such as names of classes and data sets, prompts and licences, begins neither HTML, links or pictures, nor new lines, and
leaves a table whole, whatever it holds.
"""

import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from ..evaluation.metrics import CEILING, HIGH, LOW, METRICS, Metric
from ..files.text import code, counted, one_line
from ..files.whole import written_whole
from ..loss.objectives import OBJECTIVES
from ..models.model_types import reads_padding
from .facts import SPEED, Evaluation, TrainingFacts
from .pictures import PICTURES_FILE, plot_curves
from .telling import changes, explained, outcome, way, words_of_scores

CURVES_FILE = "curves.png"
# The characters that begin something in CommonMark or HTML, or a link of GitHub.
_SPECIAL = re.compile(r"[\\`*\[\]<>#|!&~$@]|(?<!\w)_(?=\w)|:(?=//)|(?<=www)\.")

logger = logging.get_logger(__name__)


def escaped(text: str) -> str:
    """The text among other words, with a backslash before what Markdown would read as more than text."""
    return _SPECIAL.sub(r"\\\g<0>", one_line(text))


def literal(value: str | Sequence[str]) -> str:
    """The value in Python, on one line and without backticks, so that no fence of code ends in it."""
    return json.dumps(value, ensure_ascii=False).replace("`", "\\u0060")


def cell(text: str) -> str:
    """The text in a cell of a table; pipes are escaped, also within code, as the tables of the Hub require."""
    # A pipe after an even number of backslashes would end the cell, since these escape each other.
    return re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", one_line(text))


def model_card(facts: TrainingFacts, *, curves: str | None = None, pictures: str | None = None) -> ModelCard:
    """The card of a trained model with its metadata; ``card.save(path)`` writes it.

    ``curves`` and ``pictures`` name the pictures beside it that were drawn: the curves, and evaluation images with
    their best captions.
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
    of_text: tuple[Any, ...] = (code, escaped, literal, cell, counted)
    of_facts: tuple[Any, ...] = (outcome, changes, explained, way, words_of_scores, place, results, reads_padding)
    return ModelCard.from_template(
        data,
        template_str=Path(__file__).with_name("template.jinja").read_text(encoding="utf-8"),
        **{one.__name__: one for one in of_text + of_facts},
        facts=facts,
        objective=OBJECTIVES[facts.objective].words,
        repeating=[place(one) for one in facts.evaluations if any(name.endswith(CEILING) for name in one.metrics)],
        curves=curves,
        pictures=pictures,
    )


def write_eval_results(facts: TrainingFacts, folder: str | Path) -> None:
    """Writes the results on the Hub's datasets in the Hub's format for leaderboards, ``.eval_results/*.yaml``."""
    entries: dict[str, list[EvalResultEntry]] = {}
    for one in facts.evaluations:
        for metric, _, value in _defined(one) if one.on_hub else ():
            entry = EvalResultEntry(one.dataset, metric, round(value, 4), dataset_revision=one.commit, notes=one.part)
            entries.setdefault(one.dataset, []).append(entry)
    for dataset, of_dataset in entries.items():
        path = Path(folder, ".eval_results", dataset.replace("/", "_") + ".yaml")
        path.parent.mkdir(exist_ok=True)
        with written_whole(path, folder) as file:
            file.write_text(yaml.safe_dump(eval_result_entries_to_yaml(of_dataset), sort_keys=False), encoding="utf-8")


def _defined(evaluation: Evaluation) -> list[tuple[str, Metric, float]]:
    """The name, the row of `METRICS` and the value of each metric that has one, without ceilings and intervals.

    Top-5 accuracy has no value for four classes. A metric that has no row is called by its name.
    """
    return [
        (name, METRICS.get(name, Metric("", None, name.replace("_", " "), name)), value)
        for name, value in evaluation.metrics.items()
        if not (name in SPEED or name.endswith((CEILING, LOW, HIGH)) or value is None or math.isnan(value))
    ]


def _model_index(evaluation: Evaluation) -> Iterator[EvalResult]:
    task = "zero-shot-image-classification" if evaluation.templates else "image-text-retrieval"
    for _, metric, value in _defined(evaluation):
        yield EvalResult(
            task_type="image-caption-selection" if "text_acc" in evaluation.metrics else task,
            dataset_type=evaluation.dataset,
            dataset_name=evaluation.dataset,
            dataset_config=evaluation.column,  # which keeps the results of several columns apart
            dataset_split=evaluation.split,
            dataset_revision=evaluation.commit,
            metric_type=metric.hub_type,
            metric_name=metric.words,
            metric_value=round(value, 4),
        )


def place(evaluation: Evaluation) -> str:
    return f"{code(evaluation.dataset)}, {escaped(evaluation.part)}"


def results(facts: TrainingFacts) -> list[list[str]]:
    """The rows of a table of all metrics; columns that no metric fills are left out."""
    rows = [["set", "images", "metric", "value", "95% interval", "before the training", "at most"]]
    for one in facts.evaluations:
        for name, metric, value in _defined(one):
            words = metric.words if name in METRICS else escaped(metric.words)
            bounds = [f"{one.metrics[name + end]:.4f}" for end in (LOW, HIGH) if name + end in one.metrics]
            before = f"{one.before[name]:.4f}" if name in one.before else ""
            most = f"{ceiling:.4f}" if (ceiling := one.metrics.get(name + CEILING, 1)) < 1 else ""
            rows.append([place(one), f"{one.size:,}", words, f"{value:.4f}", " to ".join(bounds), before, most])
    columns = [column for n, column in enumerate(zip(*rows, strict=True)) if n < 4 or any(column[1:])]
    return [list(cells) for cells in zip(*columns, strict=True)]


class CardCallback(TrainerCallback):
    """Writes the facts, the curves, the results and the card into ``output_dir``.

    The main process writes them after each evaluation and each checkpoint, before each push to the Hub, at the end of
    the training and after `InfCLTrainer.save_model`, so that it may also be added after the training. If they cannot be
    written, for example because the disk is full, the error is logged and the training continues.

    Args:
        describe: returns the facts of the run so far; `training_facts` with its arguments.
    """

    def __init__(self, describe: Callable[[], TrainingFacts]) -> None:
        self._describe = describe
        self._first_step = 0  # or that of the checkpoint from which this training resumed
        self._written = 0, 0  # the step and the number of log entries that the card tells of

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._first_step = state.global_step
        self._written = 0, 0  # an earlier training may have ended at the same step

    def _update(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        try:
            if (state.global_step, len(state.log_history)) != self._written:
                self.write(args, state)
        except OSError as error:
            logger.error(f"The card of step {state.global_step} could not be written to {args.output_dir}: {error}")

    on_evaluate = on_push_begin = on_save = on_train_end = on_model_saved = _update

    def write(self, args: TrainingArguments, state: TrainerState) -> None:
        """Writes all files on the main process.

        Before a step is trained nothing is written, because the folder still describes the previous run.
        """
        if state.is_world_process_zero and state.global_step > self._first_step:
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
    curves, pictures = (name if Path(folder, name).is_file() else None for name in (CURVES_FILE, PICTURES_FILE))
    with written_whole(Path(folder, "README.md")) as file:  # like the others: a push may read them meanwhile
        model_card(facts, curves=curves, pictures=pictures).save(file)
