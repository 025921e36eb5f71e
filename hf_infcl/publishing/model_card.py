"""The model card of a training run and the picture of its curves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import TrainerState

from .. import __version__
from ..training.arguments import InfCLTrainingArguments

# Okabe and Ito's colours, which the colour-blind tell apart: blue, vermilion, green, purple, orange, sky blue.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

_SPEED = ("runtime", "samples_per_second", "steps_per_second")  # Trainer puts these among the metrics


@dataclass(frozen=True)
class Evaluation:
    """What was measured on one set.

    Args:
        dataset: Hub id or folder.
        split: of the dataset.
        size: images in it.
        metrics: `InfCLTrainer.evaluate`'s, without their prefixes: zero-shot accuracies, or loss and recalls.
        templates: of the prompts, where this is zero-shot classification.
        class_names: likewise.
    """

    dataset: str
    split: str
    size: int
    metrics: Mapping[str, float]
    templates: Sequence[str] = ()
    class_names: Sequence[str] = ()


def model_card(
    *,
    model_class: str,
    start: str,
    dataset: str,
    pairs: int,
    objective: str,
    args: InfCLTrainingArguments,
    state: TrainerState,
    seconds: float,
    pair_id_column: str | None = None,
    evaluations: Iterable[Evaluation] = (),
    curves: str | None = None,
) -> ModelCard:
    """Describe a trained model: trained on what, how, with which results, and what is not known of it.

    Of what exists as a local path it tells the last part alone.

    Args:
        model_class: class of transformers that loads the model, "CLIPModel".
        start: Hub id or folder of the checkpoint that the training started from.
        dataset: Hub id or folder of what it was trained on.
        pairs: number of images with captions in it.
        objective: "softmax" or "sigmoid".
        args: of the training. The last part of ``output_dir`` is the model's name.
        state: of the trainer at the end.
        seconds: that the training took.
        pair_id_column: of the dataset: pairs of equal value there were not each other's negatives.
        evaluations: every set that was measured.
        curves: file name of the picture beside the card.

    Returns:
        A card with model-index metadata; ``card.save(path)`` writes it.
    """
    evaluations = list(evaluations)
    name = Path(args.output_dir or ".").resolve().name
    data = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="zero-shot-image-classification",
        tags=["contrastive-learning", "image-text", "hf_infcl"],
        base_model=None if Path(start).exists() else start,  # the Hub links it
        datasets=None if Path(dataset).exists() else [dataset],
        eval_results=_model_index(evaluations) or None,
    )
    settings = args.to_dict()  # enums as their values
    skipped = next((entry["skipped_samples"] for entry in reversed(state.log_history) if "skipped_samples" in entry), 0)
    seen = state.global_step * args.global_batch_size
    processes = "1 process" if args.world_size == 1 else f"{args.world_size} processes"
    device = torch.cuda.get_device_name() if args.device.type == "cuda" else args.device.type.upper()
    training = {
        "start": f"`{_name(start)}`",
        "data": f"`{_name(dataset)}`, {pairs:,} images with captions",
        **({"bad samples": f"{skipped:,} times another row took the place of one"} if skipped else {}),
        "objective": {"softmax": "softmax (InfoNCE, as CLIP)", "sigmoid": "sigmoid (as SigLIP)"}[objective],
        **({"frozen": f"{args.freeze} tower"} if args.freeze else {}),
        "global batch": f"**{args.global_batch_size:,} pairs** = {args.per_device_train_batch_size} per device × "
        f"{args.gradient_accumulation_steps} accumulation steps × {processes}",
        "negatives": "all other pairs of the batch"
        + (f" but those of equal `{pair_id_column}`" if pair_id_column else ", also of equal captions"),
        "length": f"{state.global_step:,} optimizer steps, {seen:,} pairs seen, "
        f"{seen / pairs:.1f} passes over the data",
        "optimizer": f"{settings['optim']}, β = ({args.adam_beta1}, {args.adam_beta2}), decay {args.weight_decay}",
        "learning rate": f"{args.learning_rate:g}, {settings['lr_scheduler_type']}, "
        f"{args.get_warmup_steps(state.max_steps)} steps of warm-up",
        "seed": str(args.seed),
        "precision": "bf16 autocast" if args.bf16 else "fp16 autocast" if args.fp16 else "fp32",
        "time": f"{seconds:.0f} s with {processes} on {device}",
        "versions": f"hf_infcl {__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
    }
    location = args.hub_model_id or f"path/to/{name}"
    zero_shot = next((e for e in evaluations if e.templates), None)
    labels = json.dumps(list(zero_shot.class_names[:3]) if zero_shot else ["dog", "cat"])
    template = zero_shot.templates[0] if zero_shot else "a photo of a {}."
    return ModelCard(
        f"""---
{data.to_yaml()}
---

# {name}

A `{model_class}` trained with `hf_infcl` on the captioned images of `{_name(dataset)}`. Every optimizer step minimised
the exact contrastive loss of one global batch, over all its micro-batches and processes at once.

## Training

{_table(("", ""), training.items())}
{f"{chr(10)}![Loss and evaluation during training]({curves}){chr(10)}" if curves else ""}
## Results

{_results(evaluations)}{_also_measured(args) if evaluations else ""}

## Use

```python
from transformers import AutoProcessor, {model_class}, pipeline

model = {model_class}.from_pretrained("{location}")
processor = AutoProcessor.from_pretrained("{location}")

classifier = pipeline("zero-shot-image-classification", model="{location}")
classifier("image.png", candidate_labels={labels}, hypothesis_template="{template}")
```

## Limits

What stands under Results is all that was measured. How the model does on other images, in other wording or another
language, and whether it treats groups of people alike, is not known: measure it on your own data before you rely on it.
Its scores rank candidates; they are not calibrated probabilities.
"""
    )


def plot_curves(log_history: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Draw the losses and, below them, every top-1 accuracy and recall@1 over the optimizer steps.

    Args:
        log_history: ``trainer.state.log_history``: dicts with "step" and any of "loss" and "eval_..." keys.
        path: of the picture, PNG or whatever else matplotlib writes.

    Raises:
        ValueError: the history holds no training loss.
    """
    # Not pyplot: its global state and its choice of a screen are none of a library's business.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    losses: dict[str, list[tuple[int, float]]] = {"loss": []}
    scores: dict[str, list[tuple[int, float]]] = {}
    for entry in log_history:
        for key, value in entry.items():
            if key == "loss" or (key.startswith("eval_") and key.endswith("_loss")):
                losses.setdefault(key, []).append((entry["step"], value))
            elif key.startswith("eval_") and key.endswith(("acc1", "recall@1")):
                scores.setdefault(key, []).append((entry["step"], value))
    if not losses["loss"]:
        raise ValueError("log_history holds no training loss: train with logging_steps no greater than the steps.")

    panels = [("contrastive loss (nats)", losses)] + ([("fraction correct", scores)] if scores else [])
    figure = Figure(figsize=(7, 1 + 2.6 * len(panels)), layout="constrained", dpi=150)
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (label, lines) in zip(axes, panels, strict=True):
        for index, (key, points) in enumerate(lines.items()):
            name = "global batch, training" if key == "loss" else key.removeprefix("eval_").replace("_", " ")
            axis.plot(*zip(*points, strict=True), color=COLOURS[index % len(COLOURS)], marker=".", label=name)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0, top=1.02 if lines is scores else None)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    axes[-1].set_xlabel("optimizer step")
    figure.savefig(path)


def _name(source: str) -> str:
    return Path(source).resolve().name if Path(source).exists() else source


def _quality(evaluation: Evaluation) -> list[tuple[str, float]]:
    """Metrics that are defined: a top-5 accuracy of four classes is not."""
    return [(metric, v) for metric, v in evaluation.metrics.items() if metric not in _SPEED and not math.isnan(v)]


def _also_measured(args: InfCLTrainingArguments) -> str:
    """Of sets that are looked at during training, a choice of anything by them makes the figures too good."""
    if args.eval_strategy == "no":
        return ""
    which = "the best of these" if args.load_best_model_at_end else "the last step, not of the best"
    return f"\n\nMeasured during training too, on the same sets; the figures are of {which}."


def _describe(metric: str) -> str:
    known = {
        "loss": "contrastive loss of the whole set as one batch",
        "acc1": "top-1 accuracy",
        "acc5": "top-5 accuracy",
    }
    return known.get(metric, metric.replace("_", " "))


def _model_index(evaluations: list[Evaluation]) -> list[EvalResult]:
    results = []
    for evaluation in evaluations:
        if evaluation.templates:
            task = "zero-shot-image-classification", "Zero-shot image classification"
        else:
            task = "image-text-retrieval", "Image-text retrieval"
        results += [
            EvalResult(
                task_type=task[0],
                task_name=task[1],
                dataset_type=_name(evaluation.dataset),
                dataset_name=_name(evaluation.dataset),
                dataset_split=evaluation.split,
                metric_type={"acc1": "accuracy", "acc5": "accuracy", "loss": "loss"}.get(metric, "recall"),
                metric_name=_describe(metric),
                metric_value=round(value, 4),
            )
            for metric, value in _quality(evaluation)
        ]
    return results


def _results(evaluations: list[Evaluation]) -> str:
    if not evaluations:
        return "None: the model was not evaluated."
    rows, notes = [], []
    for evaluation in evaluations:
        where = f"`{_name(evaluation.dataset)}`, {evaluation.split}"
        for metric, value in _quality(evaluation):
            rows.append((where, f"{evaluation.size:,}", _describe(metric), f"{value:.4f}"))
        if evaluation.templates:
            prompts = ", ".join(f"“{template}”" for template in evaluation.templates)
            notes.append(
                f"Zero-shot classification of {where} into {len(evaluation.class_names)} classes averages the "
                f"embeddings of the prompts {prompts}. The pipeline below takes one."
            )
    return "\n\n".join([_table(("set", "images", "metric", "value"), rows), *notes])


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
