"""How good embeddings are once they are cut to the widths of ``matryoshka_dims``, for the card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...evaluation.metrics import score_if_measured
from .changes import words_of_scores
from .facts import TrainingFacts
from .markdown import code, escaped, table


def scores_by_width(trainer: Any, sets: Mapping[str, object]) -> dict[str, dict[str, float]]:
    """The score of each evaluation set at each width of its embeddings, by the set and the width; collective.

    Each width takes an evaluation of its own, which the trainer, an `InfCLTrainer`, does not log. Without
    ``matryoshka_dims`` the result is empty.
    """
    encoder, scores = trainer.dual_encoder, {name: dict[str, float]() for name in sets}
    before, found = encoder.dims, dict(trainer.found)
    try:
        for width in trainer.args.matryoshka_dims or ():
            encoder.dims = width
            for name, dataset in sets.items():
                metrics = trainer.predict(dataset, metric_key_prefix=f"eval_{name}").metrics or {}
                if (score := score_if_measured(metrics, f"eval_{name}_")) is not None:
                    scores[name][str(width)] = score
    finally:
        encoder.dims = before
        trainer.found.update(found)
    return {name: by_width for name, by_width in scores.items() if by_width}


def results_by_width(facts: TrainingFacts) -> Iterator[str]:
    """A table with a line for each set and width, and what a score is; nothing without `scores_by_width`."""
    measured = [one for one in facts.evaluations if one.key in facts.scores_by_width]
    rows = []
    for one in measured:
        scores = {f"first {width}": score for width, score in facts.scores_by_width[one.key].items()}
        if (whole := score_if_measured(one.metrics)) is not None:
            scores["as above"] = whole
        rows += [(f"{code(one.dataset)}, {escaped(one.split)}", width, f"{n:.4f}") for width, n in scores.items()]
    if rows:
        yield table(("set", "dimensions", "score"), rows)
        yield words_of_scores([one.metrics for one in measured])
        least = min(int(n) for one in measured for n in facts.scores_by_width[one.key])
        yield (
            "Normalise embeddings again after you have cut them: "
            f"`torch.nn.functional.normalize(embeddings[:, :{least}], dim=-1)`, or "
            f"`SentenceTransformer(..., truncate_dim={least})`."
        )
