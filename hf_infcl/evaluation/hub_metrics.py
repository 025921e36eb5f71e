"""The metrics of `hf_infcl.evaluation` as a module of the `evaluate` library.

`evaluate.load` takes one metric class from a file, so both metrics are configurations of one class:

    import evaluate
    from hf_infcl.evaluation import hub_metrics

    zero_shot = evaluate.load(hub_metrics.__file__, "zero_shot")  # or hub_metrics.ContrastiveMetric("zero_shot")
    for images, labels in batches:  # [b, D] and [b]
        zero_shot.add_batch(image_embeds=images, labels=labels)
    zero_shot.compute(classifier=classifier)  # {"acc1": ..., "acc5": ..., "mean_per_class_recall": ...}

    retrieval = evaluate.load(hub_metrics.__file__, "retrieval")
    for images, texts in batches:  # [b, D], and per image its captions: b arrays [n, D]
        retrieval.add_batch(image_embeds=images, text_embeds=texts)
    retrieval.compute(ks=(1, 5, 10))  # {"image_retrieval_recall@1": ..., "text_retrieval_recall@1": ..., ...}

`evaluate` keeps what is added in a file, as fp32. A metric that is not defined is left out instead of given as NaN,
which JSON does not have: `acc5` for fewer than five classes.
"""

from collections.abc import Sequence

import evaluate
import torch
from datasets import Features, List, Value
from torch import Tensor

from hf_infcl.evaluation import retrieval_metrics, zero_shot_metrics

_EMBEDDING = List(Value("float32"))
_FEATURES = {
    "zero_shot": Features({"image_embeds": _EMBEDDING, "labels": Value("int64")}),
    "retrieval": Features({"image_embeds": _EMBEDDING, "text_embeds": List(_EMBEDDING)}),
}


class ContrastiveMetric(evaluate.Metric):
    """Zero-shot classification ("zero_shot") or image-text retrieval ("retrieval"), named by `config_name`.

    Raises:
        ValueError: an unknown `config_name`; in `compute`, a missing classifier, or inputs that
            `hf_infcl.evaluation` refuses.
    """

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in _FEATURES:
            raise ValueError(f"config_name must be one of {list(_FEATURES)}, got {self.config_name!r}.")
        return evaluate.MetricInfo(
            description="Zero-shot classification and image-text retrieval, as CLIP_benchmark defines them.",
            citation="",
            inputs_description=(__doc__ or ""),
            features=_FEATURES[self.config_name],
            reference_urls=["https://github.com/LAION-AI/CLIP_benchmark"],
        )

    def _compute(
        self,
        *,
        image_embeds: list[list[float]],
        labels: list[int] | None = None,
        classifier: Tensor | None = None,
        text_embeds: list[list[list[float]]] | None = None,
        ks: Sequence[int] | None = None,
    ) -> dict[str, float]:
        images = torch.tensor(image_embeds)
        if text_embeds is not None:
            texts = torch.tensor([text for captions in text_embeds for text in captions])
            counts = torch.tensor([len(captions) for captions in text_embeds])
            return retrieval_metrics(images, texts, torch.arange(len(images)).repeat_interleave(counts), ks=ks)
        if classifier is None:
            raise ValueError("compute needs classifier=[C, D] with one row per class; zero_shot_classifier makes it.")
        return zero_shot_metrics(images, classifier, torch.tensor(labels))
