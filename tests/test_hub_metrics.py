"""The `evaluate` module gives the results of `hf_infcl.evaluation`, loaded either way, in batches or all at once."""

import evaluate
import pytest
import torch

from hf_infcl.evaluation import hub_metrics, retrieval_metrics, zero_shot_metrics


@pytest.fixture(params=["class", "evaluate.load"])
def metric(request, tmp_path, monkeypatch):
    """A function that loads the metric for a configuration, with its files in a temporary folder."""
    if request.param == "class":
        return lambda name: hub_metrics.ContrastiveMetric(name, cache_dir=str(tmp_path))
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path / "modules")
    return lambda name: evaluate.load(hub_metrics.__file__, name, cache_dir=str(tmp_path))


def features(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size", [7, 20])
def test_zero_shot(metric, batch_size, dtype):
    images, classifier, labels = features(20, 8, seed=0).to(dtype), features(6, 8, seed=1), torch.arange(20) % 6
    expected = zero_shot_metrics(images, classifier, labels)
    assert 0 < expected["acc1"] < expected["acc5"] < 1

    zero_shot = metric("zero_shot")
    for image_embeds, batch_labels in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        zero_shot.add_batch(image_embeds=image_embeds, labels=batch_labels)
    assert zero_shot.compute(classifier=classifier) == expected
    # A second round starts without data of the first.
    assert zero_shot.compute(image_embeds=images, labels=labels, classifier=classifier) == expected


@pytest.mark.parametrize("batch_size", [7, 20])
def test_retrieval(metric, batch_size):
    images, counts = features(20, 8, seed=0), torch.arange(20) % 4  # 0 to 3 captions per image
    text_image = torch.arange(20).repeat_interleave(counts)
    texts = images[text_image] + features(30, 8, seed=1)
    expected = retrieval_metrics(images, texts, text_image, ks=(1, 3))
    assert 0 < expected["image_retrieval_recall@1"] < expected["image_retrieval_recall@3"] < 1

    retrieval = metric("retrieval")
    captions = texts.split(counts.tolist())
    for start in range(0, 20, batch_size):
        batch = slice(start, start + batch_size)
        retrieval.add_batch(image_embeds=images[batch], text_embeds=captions[batch])
    assert retrieval.compute(ks=(1, 3)) == expected


def test_an_unknown_configuration_is_refused(metric):
    with pytest.raises(ValueError, match=r"config_name must be one of \['zero_shot', 'retrieval'\], got 'default'"):
        metric(None)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"labels": [0, 1]}, "compute needs classifier="),
        ({"labels": [0, 2], "classifier": torch.eye(2)}, r"labels must lie in \[0, 2\)"),
        ({"labels": [0], "classifier": torch.eye(2)}, "Mismatch in the number of image_embeds"),
    ],
)
def test_bad_input_is_named(metric, inputs, message):
    with pytest.raises(ValueError, match=message):
        metric("zero_shot").compute(image_embeds=torch.eye(2), **inputs)
