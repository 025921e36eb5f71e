"""The model card of an average of two models, which no training describes: the wording of `average_template.md`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ...checkpoints.average_search import Averaged, not_trained
from ...shards.values import counted
from .cards import how_averaged, set_and_split, table_of_averages, usage
from .facts import Evaluation, source_name
from .front import FRONT_FILE
from .markdown import code, escaped, joined, table


def average_card(
    folder: Path,
    average: Averaged,
    start: str,
    end: str,
    *,
    model_class: str,
    tokens: int | None = None,
    adapter: bool = False,
    evaluations: Sequence[Evaluation] = (),
) -> ModelCard:
    """The card of an average: what was averaged, how, and what was measured.

    Args:
        folder: that holds the average; its name is that of the model.
        start, end: Hub ids or folders of both models, of which the card names the last part alone.
        model_class: the class of transformers that loads the model, or the model under the adapters.
        tokens: the tokens of a text that the model reads, if they are known.
        adapter: whether the folder holds an adapter of the start.
        evaluations: the sets that were measured, by their keys; their metrics are not read.
    """
    name, ends = folder.resolve().name, [source_name(start), source_name(end)]
    on_hub = [source for source, is_id in (ends[:1] if adapter else ends) if is_id]
    data = ModelCardData(
        model_name=name,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="zero-shot-image-classification",
        tags=["contrastive-learning", "image-text", "hf_infcl", "merge"],
        base_model=on_hub or None,
        base_model_relation=("adapter" if adapter else "merge") if on_hub else None,
    )
    by_depth = "" if average.path == "line" else ", less for early layers than for late ones"
    rows = [
        ("start (α = 0)", code(ends[0][0])),
        ("end (α = 1)", code(ends[1][0])),
        ("weights", f"start + **{average.alpha:g}** · (end − start){by_depth}"),
    ]
    base = ends[0][0] if ends[0][1] else f"path/to/{ends[0][0]}"
    return ModelCard.from_template(
        data,
        template_str=resources.files(__package__).joinpath("average_template.md").read_text(encoding="utf-8"),
        name=escaped(name),
        doubt=not_trained(average),
        model_class=code(model_class),
        adapter=adapter,
        weights=table(("", ""), rows),
        how=" ".join(how_averaged(average)),
        results=_results(average, evaluations),
        front=FRONT_FILE if (folder / FRONT_FILE).is_file() else None,
        usage=usage(model_class, name, base if adapter else None, evaluations, tokens=tokens),
    )


def _results(average: Averaged, evaluations: Sequence[Evaluation]) -> str:
    if not average.measured:
        return "None: neither the average nor its ends were measured."
    gains = [f"{set_and_split(one)} ({counted(one.size, 'image')})" for one in evaluations if not one.guard]
    words = "Scores are recall@1 of pairs (the mean of both directions) and top-1 accuracy of classes."
    if gains:
        words = f"“Trained for” is measured on {joined(gains)}. {words}"
    return f"{table_of_averages(average, evaluations)}\n\n{words}"
