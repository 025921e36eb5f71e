"""The metrics against brute-force oracles that share no code with them, and within their promised memory."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import balanced_accuracy_score
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_infcl.evaluation import retrieval as evaluation
from hf_infcl.evaluation import retrieval_metrics, zero_shot_classifier, zero_shot_metrics

KS = (1, 2, 5, 10)


def order(scores: np.ndarray) -> np.ndarray:
    """Candidates from best to worst; of equal ones the lower index first."""
    return np.argsort(-scores, kind="stable")


def recall_by_sorting(scores: np.ndarray, positive: np.ndarray, k: int) -> float:
    """scores and positive [queries, candidates]."""
    return float(np.mean([positive[q, order(scores[q])[:k]].any() for q in range(len(scores))]))


def retrieval_by_sorting(images: np.ndarray, texts: np.ndarray, text_image: np.ndarray) -> dict[str, float]:
    scores = texts @ images.T
    positive = text_image[:, None] == np.arange(len(images))
    return {f"image_retrieval_recall@{k}": recall_by_sorting(scores, positive, k) for k in KS} | {
        f"text_retrieval_recall@{k}": recall_by_sorting(scores.T, positive.T, k) for k in KS
    }


def zero_shot_by_sorting(images: np.ndarray, classifier: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    ranked = np.stack([order(scores) for scores in 100 * images @ classifier.T])
    return {
        "acc1": float(np.mean(ranked[:, 0] == labels)),
        "acc5": float(np.mean((ranked[:, :5] == labels[:, None]).any(1))) if len(classifier) >= 5 else math.nan,
        "mean_per_class_recall": float(balanced_accuracy_score(labels, ranked[:, 0])),
    }


def unit_rows(count: int):
    """Rows of four signs over two: unit vectors whose products are exact in fp32, so that ties are exact, and many."""
    return arrays(np.float32, (count, 4), elements=st.sampled_from([-0.5, 0.5]))


@st.composite
def pairs(draw):
    num_images, num_texts = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    text_image = arrays(np.int64, num_texts, elements=st.integers(0, num_images - 1))  # some images have no caption
    return draw(unit_rows(num_images)), draw(unit_rows(num_texts)), draw(text_image)


@st.composite
def labelled(draw):
    num_images, num_classes = draw(st.integers(1, 15)), draw(st.integers(1, 8))
    labels = arrays(np.int64, num_images, elements=st.integers(0, num_classes - 1))
    return draw(unit_rows(num_images)), draw(unit_rows(num_classes)), draw(labels)


@pytest.fixture(params=[1, 13, 2**22], ids=lambda numel: f"tile{numel}")
def tile(request, monkeypatch):
    monkeypatch.setattr(evaluation, "_TILE_NUMEL", request.param)


@pytest.mark.usefixtures("tile")
class TestAgainstSorting:
    @settings(max_examples=150, deadline=None)
    @given(pairs())
    def test_retrieval(self, example):
        images, texts, text_image = example
        result = retrieval_metrics(*map(torch.from_numpy, example), ks=KS)
        assert result == pytest.approx(retrieval_by_sorting(images, texts, text_image), abs=1e-12)

    # balanced_accuracy_score warns of a single label and of predictions that are no label
    @pytest.mark.filterwarnings("ignore:y_pred contains classes:UserWarning", "ignore:A single label:UserWarning")
    @settings(max_examples=150, deadline=None)
    @given(labelled())
    def test_zero_shot(self, example):
        images, classifier, labels = example
        result = zero_shot_metrics(*map(torch.from_numpy, example))
        assert result == pytest.approx(zero_shot_by_sorting(images, classifier, labels), abs=1e-12, nan_ok=True)


def features(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("k", [1, 5, 10])
def test_equals_clip_benchmarks_topk_without_ties(k):
    """The definition of CLIP_benchmark: is any positive among torch.topk of the cosine similarities?"""
    text_image = torch.randint(40, (200,), generator=torch.Generator().manual_seed(0))
    images = features(40, 16, seed=1)
    texts = images[text_image] + 2 * features(200, 16, seed=2)
    scores = torch.nn.functional.normalize(texts) @ torch.nn.functional.normalize(images).T
    positive = text_image[:, None] == torch.arange(40)

    result = retrieval_metrics(images, texts, text_image, ks=[k])

    for name, s, p in [("image", scores, positive), ("text", scores.T, positive.T)]:
        expected = p.gather(1, s.topk(k).indices).any(1).double().mean().item()
        assert 0.1 < expected < 1  # or the comparison would say little
        assert result[f"{name}_retrieval_recall@{k}"] == pytest.approx(expected, abs=1e-12)


def test_classifier_is_the_normalised_mean_of_normalised_prompts():
    text_embeds = features(6, 5, seed=0) * torch.tensor([1, 10, 100, 1, 1, 1])[:, None]
    rows = text_embeds.numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    means = np.stack([rows[:3].mean(0), rows[3:].mean(0)])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(zero_shot_classifier(text_embeds, 3).numpy(), expected, rtol=1e-12)


def test_a_collapsed_model_gets_the_score_of_chance():
    ones = torch.ones(20, 3)
    assert retrieval_metrics(ones, ones, torch.arange(20), ks=[1, 5]) == {
        "image_retrieval_recall@1": 1 / 20,
        "text_retrieval_recall@1": 1 / 20,
        "image_retrieval_recall@5": 5 / 20,
        "text_retrieval_recall@5": 5 / 20,
    }
    assert zero_shot_metrics(ones, ones, torch.arange(20)) == {
        "acc1": 1 / 20,
        "acc5": 5 / 20,
        "mean_per_class_recall": 1 / 20,
    }


def test_several_captions_and_an_image_without_one():
    images = torch.eye(3)
    texts = torch.tensor([[1.0, 0, 0], [0, 0.1, 1], [0, 1, 0], [0.9, 0.1, 0]])
    text_image = torch.tensor([0, 0, 1, 0])  # the second caption of image 0 looks like image 2, which has none
    result = retrieval_metrics(images, texts, text_image, ks=[1, 100])
    assert result["image_retrieval_recall@1"] == 3 / 4
    assert result["text_retrieval_recall@1"] == 2 / 3  # one right caption is enough; image 2 counts, and misses
    assert result["image_retrieval_recall@100"] == 1
    assert result["text_retrieval_recall@100"] == 2 / 3


def test_acc5_is_nan_under_five_classes():
    assert math.isnan(zero_shot_metrics(torch.eye(4), torch.eye(4), torch.arange(4))["acc5"])
    assert zero_shot_metrics(torch.eye(5), torch.eye(5), torch.arange(5))["acc5"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_fp32(dtype):
    images, texts = features(50, 32, seed=1).to(dtype), features(50, 32, seed=2).to(dtype)
    exact = retrieval_metrics(images.double(), texts.double(), torch.arange(50))
    assert retrieval_metrics(images, texts, torch.arange(50)) == exact
    assert zero_shot_classifier(texts, 2).dtype == torch.float32


class LargestOutput(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *(tensor.numel() for tensor in tensors)])
        return output


def test_no_tensor_is_larger_than_the_tile():
    rows = 4096
    assert rows * rows == 4 * evaluation._TILE_NUMEL
    x, index = features(rows, 4, seed=0, dtype=torch.float32), torch.arange(rows)
    with LargestOutput() as retrieval:
        retrieval_metrics(x, x, index)
    with LargestOutput() as zero_shot:
        zero_shot_metrics(x, x, index)
    assert retrieval.numel == zero_shot.numel == evaluation._TILE_NUMEL


def test_one_row_of_candidates_may_exceed_the_tile(monkeypatch):
    monkeypatch.setattr(evaluation, "_TILE_NUMEL", 16)
    x, index = features(100, 2, seed=0), torch.arange(100)
    with LargestOutput() as largest:
        retrieval_metrics(x, x, index)
    assert largest.numel == x.numel() == 200


X, I = torch.eye(3), torch.arange(3)  # noqa: E741
NAN = torch.eye(3).index_fill(0, torch.tensor([1]), math.nan)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: retrieval_metrics(X[:0], X, I), r"image_embeds must be .* at least one row; got shape \(0, 3\)"),
        (lambda: retrieval_metrics(X, X[:0], I[:0]), r"text_embeds must be .* got shape \(0, 3\)"),
        (lambda: retrieval_metrics(X[0], X, I), r"image_embeds must be .* got shape \(3,\)"),
        (lambda: retrieval_metrics(X.long(), X, I), "image_embeds must be a floating point .* torch.int64"),
        (lambda: retrieval_metrics(X, X[:, :2], I), "text_embeds must agree with image_embeds in D .* D=2 .* D=3"),
        (lambda: retrieval_metrics(NAN, X, I), "image_embeds holds NaN or infinity in 1 of 3 rows, .* row 1"),
        (lambda: retrieval_metrics(X, X / 0, I), "text_embeds holds NaN or infinity in 3 of 3 rows, .* row 0"),
        (lambda: retrieval_metrics(X, X, I[:2]), r"text_image must be .* shape \(3,\); got shape \(2,\)"),
        (lambda: retrieval_metrics(X, X, I.float()), "text_image must be an integer .* torch.float32"),
        (lambda: retrieval_metrics(X, X, I + 1), r"text_image must lie in \[0, 3\); got values from 1 to 3"),
        (lambda: retrieval_metrics(X, X, I - 1), r"text_image must lie in \[0, 3\); got values from -1 to 1"),
        (lambda: retrieval_metrics(X, X, I, ks=[]), r"ks must name one k or more, .* got \(\)"),
        (lambda: retrieval_metrics(X, X, I, ks=[1, 0]), r"ks .* each at least 1; got \(1, 0\)"),
        (lambda: zero_shot_metrics(X, NAN, I), "classifier holds NaN"),
        (lambda: zero_shot_metrics(X, X, I + 1), r"labels must lie in \[0, 3\)"),
        (lambda: zero_shot_metrics(X, X, I.bool()), "labels must be an integer .* torch.bool"),
        (lambda: zero_shot_classifier(NAN, 1), "text_embeds holds NaN"),
        (lambda: zero_shot_classifier(X, 2), "3 rows, which cannot be split into classes of num_templates=2"),
        (lambda: zero_shot_classifier(X, 0), "num_templates=0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
