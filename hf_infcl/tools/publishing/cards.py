"""The model card of a training run: `TrainingFacts` in the wording of `model_cards/template.md`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml

from ...checkpoints.averages import Averaged, not_trained
from ...evaluation.metrics import CEILING, HIGH, LOW, METRICS, is_bound, score_if_measured
from ...loss.objectives import OBJECTIVES
from ...shards.values import counted
from .changes import changes, explained, words_of_scores
from .facts import SPEED, Evaluation, Source, TrainingFacts
from .markdown import code, escaped, joined, literal, table
from .outcome import outcome

_SHOWN = 10  # prompts that the results name
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
    return ModelCard.from_template(
        data,
        template_str=resources.files(__package__).joinpath("template.md").read_text(encoding="utf-8"),
        name=escaped(facts.name),
        model_class=code(facts.model_class),
        base=code(facts.start) if facts.adapter else None,
        outcome=outcome(facts),
        trained=not (facts.average is not None and not_trained(facts.average)),
        sources=joined([code(source.dataset) for source in facts.sources]),
        training=table(("", ""), _training_rows(facts)),
        changes=_changes(facts),
        results=_results(facts),
        usage=_usage(facts),
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


def _training_rows(facts: TrainingFacts) -> Iterable[tuple[str, str]]:
    processes = counted(facts.processes, "process")
    same = facts.steps * facts.global_batch_size  # pairs, if all steps had this batch
    seen = same if facts.samples is None else facts.samples
    epochs, earlier = "", "" if seen == same else "; earlier steps had other sizes"
    new = facts.global_batch_size - facts.replayed
    if facts.pairs is not None and (batches := facts.pairs // new):
        full = f" of {counted(batches, 'full batch')}" if seen == same else ""
        trained = batches * new if full else facts.pairs
        epochs = f", {seen * new / facts.global_batch_size / trained:.1f} epochs{full}"
    of_total = "" if facts.pairs is None else f"{facts.pairs:,} images with captions: "
    yield "start", code(facts.start) + (" (random weights, by its temperature)" if facts.random_start else "")
    yield "data", of_total + joined([_describe_source(source) for source in facts.sources])
    if facts.replayed:
        yield "replay", _replay(facts)
    if facts.skipped:
        yield "bad samples", f"{facts.skipped:,} replaced by another row or left out"
    yield "objective", OBJECTIVES[facts.objective].words
    if facts.frozen:
        yield "frozen", f"{facts.frozen} tower"
    batch = (
        f"**{facts.global_batch_size:,} pairs** = {facts.per_device_batch_size} per device × "
        f"{counted(facts.accumulation_steps, 'accumulation step')} × {processes}"
    )
    yield "global batch", batch + earlier
    if facts.processes > 1:
        yield "strategy", f"{code(facts.strategy)} shares the batch among the processes"
    yield from _positives_and_negatives(facts)
    if facts.caption_limit is not None:
        yield "captions", _captions(facts.caption_limit, facts.cut_captions)
    if facts.average is not None:
        yield "weights", f"start + {facts.average.alpha:g} · (end of the training − start)"
    planned = "" if facts.planned_steps is None else f" of {facts.planned_steps:,} planned"
    steps = f"{facts.steps:,}{planned} optimizer steps" if planned else counted(facts.steps, "optimizer step")
    yield "length", f"{steps}, {seen:,} pairs seen{epochs}"
    yield from facts.settings.items()
    yield "time", f"{_duration(facts.seconds)} with {processes} on {facts.device}"
    if facts.peak_memory is not None:
        yield "peak memory", f"{facts.peak_memory / 2**30:.1f} GiB on one GPU"
    yield "versions", ", ".join(f"{package} {version}" for package, version in facts.versions.items())


def _replay(facts: TrainingFacts) -> str:
    sources = [_describe_source(source) for source in facts.replay_sources]
    of_sources = f" of {joined(sources)}" if sources else ""
    share = facts.replayed / facts.global_batch_size
    role = "negatives of the new pairs, and these of them"
    return f"{facts.replayed:,} old pairs in each global batch ({share:.1%}){of_sources}; {role}"


def _captions(limit: int, cut: Mapping[str, float]) -> str:
    shares = [f"{share:.1%} of those of the {escaped(name.replace('*', '…'))}" for name, share in cut.items()]
    longer = f"; longer, and so cut, are {joined(shares)}" if shares else ""
    return f"the model reads the first {limit} tokens of each{longer}"


def _positives_and_negatives(facts: TrainingFacts) -> Iterator[tuple[str, str]]:
    with_equal = f"those with equal {code(facts.pair_id_column)}" if facts.pair_id_column else ""
    if facts.equal_ids == "positive":
        if facts.captions_per_image is None:
            positives = "all captions of the image"
        elif facts.captions_per_image == 1:
            positives = "the caption of the image"
        else:
            positives = f"up to {facts.captions_per_image} captions of the image, drawn anew each epoch"
        yield "positives", f"{positives}, and {with_equal}" if with_equal else positives
        negatives = "all other captions of the batch"
    else:
        negatives = "all other pairs of the batch"
        negatives += f" except {with_equal}" if with_equal else ", including those with equal captions"
    if facts.negative_caption_column:
        negatives += f"; for all images also one of {code(facts.negative_caption_column)} of each image that has any"
    yield "negatives", negatives


def _describe_source(source: Source) -> str:
    facts = [f"split {escaped(source.split)}"]
    if source.weight is not None:
        facts.append(f"{source.weight:.1%} of the draws")
    facts.append(f"licence {escaped(source.license)}" if source.license else "no licence stated")
    return f"{code(source.dataset)} ({', '.join(facts)})"


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


def _changes(facts: TrainingFacts) -> str:
    """What was gained and what it cost, and all averages with the start; empty if neither was measured."""
    parts = []
    if set_changes := changes(facts):
        rows = [
            (
                set_and_split(change.evaluation) + change.kind,
                "guard" if change.evaluation.guard else "evaluation",
                f"{change.score.first:.4f}",
                f"{change.score.second:.4f}",
                change.score.words(),
            )
            for change in set_changes
        ]
        parts += [table(("set", "role", "before the training", "this model", "change"), rows), explained(set_changes)]
    if (average := facts.average) is not None:
        parts.append(" ".join(_how_averaged(average)))
        if average.measured:
            names = {evaluation.key: set_and_split(evaluation) for evaluation in facts.evaluations}
            head = ["α", "trained for", *(f"kept: {names.get(key, escaped(key))}" for key in average.measured[0].rest)]
            scores = [(one.alpha, (one.gained, *one.rest.values())) for one in average.measured]
            parts.append(table(head, [(f"{a:g}", *("" if v is None else f"{v:.4f}" for v in of)) for a, of in scores]))
    return "\n\n".join(parts)


def _how_averaged(average: Averaged) -> Iterator[str]:
    """Sentences about the average whose weights the model has, above the table of all that were measured."""
    yield f"The weights are an average of those before (α = 0) and after (1) the training, at α = {average.alpha:g}."
    if average.tolerance is not None:
        least = "; of gains within the 95% interval of the greatest, it has the lowest loss"
        by_loss = least if average.measured and average.measured[0].loss is not None else ""
        yield (
            "Of the averages below it is the one with the greatest gain at which no guard loses more than "
            f"{average.tolerance:g}{by_loss}. A random half of the rows of each guard decided that, and the figures "
            "are of the other half. The gain was measured on the rows that decided."
        )
    elif average.measured and average.measured[0].rest:
        yield "The figures of guards are of a random half of their rows."
    if average.batch_norms:
        yield (
            f"The running statistics of {average.batch_norms} batch norms were averaged as well; they are not those "
            "that the averaged weights would have on data."
        )


def set_and_split(evaluation: Evaluation) -> str:
    return f"{code(evaluation.dataset)}, {escaped(evaluation.part)}"


def _results(facts: TrainingFacts) -> str:
    if not facts.evaluations:
        return "None: the model was not evaluated."
    rows, notes, repeating = [], [], []
    for evaluation in facts.evaluations:
        where = set_and_split(evaluation)
        for metric, value in _defined(evaluation):
            ceiling = evaluation.metrics.get(metric + CEILING)
            bounds = [evaluation.metrics[metric + end] for end in (LOW, HIGH) if metric + end in evaluation.metrics]
            interval = " to ".join(f"{bound:.4f}" for bound in bounds)
            most = f"{ceiling:.4f}" if ceiling is not None and ceiling < 1 else ""
            before = f"{evaluation.before[metric]:.4f}" if metric in evaluation.before else ""
            name = _metric_name(metric) if metric in METRICS else escaped(_metric_name(metric))
            rows.append((where, f"{evaluation.size:,}", name, f"{value:.4f}", interval, before, most))
        if evaluation.revision is not None:
            notes.append(f"{where} was read at {code(evaluation.revision)}.")
        if evaluation.guard:
            notes.append(f"{where} is a guard set: it shows what the training made worse.")
        if any(metric.endswith(CEILING) for metric in evaluation.metrics):
            repeating.append(where)
        if evaluation.templates:
            notes.append(f"{where} was classified into {len(evaluation.class_names)} classes{_prompts(evaluation)}")
    if repeating:
        notes.append(
            f"Some captions of {'; '.join(repeating)} belong to several images, but only an image's own captions count "
            "as correct. Under “at most” stands the highest recall that any model can reach."
        )
    if computed := facts.settings.get("precision"):
        notes.append(f"Measured in {escaped(computed)}; another precision rounds otherwise, and changes a few answers.")
    notes += _when(facts)
    head = ("set", "images", "metric", "value", "95% interval", "before the training", "at most")
    used = [n for n in range(len(head)) if any(row[n] for row in rows)]
    shown = table([head[n] for n in used], [[row[n] for n in used] for row in rows])
    return "\n\n".join([shown, *notes, *_results_by_width(facts)])


def _results_by_width(facts: TrainingFacts) -> Iterator[str]:
    """A table with a line for each set and width, and what a score is; nothing without `scores_by_width`."""
    measured = [one for one in facts.evaluations if one.key in facts.scores_by_width]
    rows = []
    for one in measured:
        scores = {f"first {width}": score for width, score in facts.scores_by_width[one.key].items()}
        if (whole := score_if_measured(one.metrics)) is not None:
            scores["as above"] = whole
        rows += [(set_and_split(one), width, f"{n:.4f}") for width, n in scores.items()]
    if rows:
        yield table(("set", "dimensions", "score"), rows)
        yield words_of_scores([one.metrics for one in measured])
        least = min(int(n) for one in measured for n in facts.scores_by_width[one.key])
        yield (
            "Normalise embeddings again after you have cut them: "
            f"`torch.nn.functional.normalize(embeddings[:, :{least}], dim=-1)`, or "
            f"`SentenceTransformer(..., truncate_dim={least})`."
        )


def _prompts(evaluation: Evaluation) -> str:
    """The prompts of a zero-shot classification, as the end of a sentence."""
    first, *rest = map(code, evaluation.templates)
    example = code(evaluation.templates[0].replace("{}", "".join(evaluation.class_names[:1])))
    if not rest:
        return f" with the prompt {first}, such as {example}."
    named = joined([first, *rest[: _SHOWN - 1]])
    more = f" and {len(rest) - _SHOWN + 1} more" if len(rest) >= _SHOWN else ""
    return (
        f". The vector of a class is the mean of the embeddings of {len(rest) + 1} prompts, such as {example}: "
        f"{named}{more}. The code below takes only the first prompt, so its accuracy may differ."
    )


def _when(facts: TrainingFacts) -> Iterator[str]:
    """Says which weights were measured, if the sets were measured several times."""
    steps = {evaluation.step for evaluation in facts.evaluations} - {None}
    if not facts.measured_during_training or len(steps) != 1:
        return
    (step,) = steps
    if facts.average is not None:
        of = "the average, not of a step"
    elif facts.best:
        of = f"the best of these evaluations, at step {step:,}, and so are the weights"
    elif step == facts.steps:
        of = "the last step, not of the best"
    else:
        of = f"step {step:,}, but the weights are those of step {facts.steps:,}"
    yield f"The same sets were measured during training; the figures are those of {of}."


def _usage(facts: TrainingFacts) -> str:
    """The code that loads the model and classifies an image.

    The first zero-shot evaluation, if there was one, gives the example its classes and prompt.
    """
    model_class, tokens = facts.model_class, facts.caption_limit
    base = None if not facts.adapter else facts.start if facts.start_on_hub else f"path/to/{facts.start}"
    labels, template = ["dog", "cat"], "a photo of a {}."
    if (example := next((one for one in facts.evaluations if one.templates), None)) is not None:
        labels, template = list(example.class_names[:3]), example.templates[0]
    at = literal(facts.location) + (f", revision={literal(facts.revision)}" if facts.revision else "")
    if base is None:
        of_peft, model, given = "", f"{model_class}.from_pretrained({at})", f"model={at}"
    else:
        of_peft = "from peft import PeftModel\n"
        model = f"PeftModel.from_pretrained({model_class}.from_pretrained({literal(base)}), {at})"
        given = (
            "model=model.merge_and_unload(),\n"
            "                      tokenizer=processor.tokenizer, image_processor=processor.image_processor"
        )
    load = f"model = {model}\nprocessor = AutoProcessor.from_pretrained({at})\n\n"
    if tokens in (None, _PADDED) or not model_class.startswith("Siglip"):
        return (
            f"{of_peft}from transformers import AutoProcessor, {model_class}, pipeline\n\n{load}"
            f'classifier = pipeline("zero-shot-image-classification", {given})\n'
            f'classifier("image.png", candidate_labels={literal(labels)}, hypothesis_template={literal(template)})'
        )
    texts = [template.replace("{}", label) for label in labels]
    return (
        f"import torch\nfrom PIL import Image\n{of_peft}from transformers import AutoProcessor, {model_class}\n\n{load}"
        f"# The model reads texts of {tokens} tokens, to which transformers' pipeline would not pad them.\n"
        f'inputs = processor(images=Image.open("image.png").convert("RGB"), text={literal(texts)},\n'
        f'                   padding="max_length", max_length={tokens}, truncation=True, return_tensors="pt")\n'
        f"with torch.no_grad():\n"
        f"    scores = model(**inputs).logits_per_image.sigmoid()  # [1, {len(texts)}]"
    )


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min {rest} s"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
