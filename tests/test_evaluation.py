"""The metrics agree with brute-force oracles that share no code with them, and keep to their memory bound."""

import itertools
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

from hf_infcl.evaluation import retrieval_metrics, zero_shot_classifier, zero_shot_metrics
from hf_infcl.evaluation import tasks as ranking
from hf_infcl.evaluation.tasks import (
    caption_ids,
    checked_classes,
    group_by_image,
    image_of_captions,
    recall_ceilings,
)

KS = (1, 2, 5, 10)


def order(scores: np.ndarray) -> np.ndarray:
    """Candidates from best to worst; among equal scores the lower index comes first."""
    return np.argsort(-scores, kind="stable")


def recall_by_sorting(scores: np.ndarray, positive: np.ndarray, k: int) -> float:
    """Recall@k. scores and positive are [queries, candidates]."""
    return float(np.mean([positive[q, order(scores[q])[:k]].any() for q in range(len(scores))]))


def retrieval_by_sorting(images: np.ndarray, texts: np.ndarray, text_image: np.ndarray) -> dict[str, float]:
    scores = texts @ images.T
    positive = text_image[:, None] == np.arange(len(images))
    return {f"image_retrieval_recall@{k}": recall_by_sorting(scores, positive, k) for k in KS} | {
        f"text_retrieval_recall@{k}": recall_by_sorting(scores.T, positive.T, k) for k in KS
    }


def zero_shot_by_sorting(images: np.ndarray, classifier: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    ranked = np.stack([order(scores) for scores in 100 * images @ classifier.T])
    found = {f"acc{k}": float(np.mean((ranked[:, :k] == labels[:, None]).any(1))) for k in (1, 5)}
    if len(classifier) < 5:
        del found["acc5"]
    return {**found, "mean_per_class_recall": float(balanced_accuracy_score(labels, ranked[:, 0]))}


def unit_rows(count: int):
    """Rows of four elements ±1/2: unit vectors with exact products in fp32, so that there are many exact ties."""
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
    monkeypatch.setattr(ranking, "TILE_NUMEL", request.param)


@pytest.mark.usefixtures("tile")
class TestAgainstSorting:
    @settings(max_examples=150, deadline=None)
    @given(pairs())
    def test_retrieval(self, example):
        images, texts, text_image = example
        result = retrieval_metrics(*map(torch.from_numpy, example), ks=KS)
        assert result == pytest.approx(retrieval_by_sorting(images, texts, text_image), abs=1e-12)

    # balanced_accuracy_score warns about a single label and about predictions that are not among the labels
    @pytest.mark.filterwarnings("ignore:y_pred contains classes:UserWarning", "ignore:A single label:UserWarning")
    @settings(max_examples=150, deadline=None)
    @given(labelled())
    def test_zero_shot(self, example):
        images, classifier, labels = example
        result = zero_shot_metrics(*map(torch.from_numpy, example))
        assert result == pytest.approx(zero_shot_by_sorting(images, classifier, labels), abs=1e-12)


def features(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("k", [1, 5, 10])
def test_equals_clip_benchmarks_topk_without_ties(k):
    """CLIP_benchmark's definition: whether any positive is among torch.topk of the cosine similarities."""
    text_image = torch.randint(40, (200,), generator=torch.Generator().manual_seed(0))
    images = features(40, 16, seed=1)
    texts = images[text_image] + 2 * features(200, 16, seed=2)
    scores = torch.nn.functional.normalize(texts) @ torch.nn.functional.normalize(images).T
    positive = text_image[:, None] == torch.arange(40)

    result = retrieval_metrics(images, texts, text_image, ks=[k])

    for name, s, p in [("image", scores, positive), ("text", scores.T, positive.T)]:
        expected = p.gather(1, s.topk(k).indices).any(1).double().mean().item()
        assert 0.1 < expected < 1  # otherwise the comparison would prove little
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
    expected = {f"{way}_retrieval_recall@{k}": k / 20 for way in ("image", "text") for k in (1, 5)}
    assert retrieval_metrics(ones, ones, torch.arange(20), ks=[1, 5]) == expected
    expected = {"acc1": 1 / 20, "acc5": 5 / 20, "mean_per_class_recall": 1 / 20}
    assert zero_shot_metrics(ones, ones, torch.arange(20)) == expected


def test_several_captions_and_an_image_without_one():
    images = torch.eye(3)
    texts = torch.tensor([[1.0, 0, 0], [0, 0.1, 1], [0, 1, 0], [0.9, 0.1, 0]])
    text_image = torch.tensor([0, 0, 1, 0])  # the second caption of image 0 resembles image 2, which has no caption
    result = retrieval_metrics(images, texts, text_image, ks=[1, 100])
    assert result["image_retrieval_recall@1"] == 3 / 4
    assert result["text_retrieval_recall@1"] == 2 / 3  # one correct caption is enough; image 2 counts as a miss
    assert result["image_retrieval_recall@100"] == 1
    assert result["text_retrieval_recall@100"] == 2 / 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_fp32(dtype):
    images, texts = features(50, 32, seed=1).to(dtype), features(50, 32, seed=2).to(dtype)
    exact = retrieval_metrics(images.double(), texts.double(), torch.arange(50))
    assert retrieval_metrics(images, texts, torch.arange(50)) == exact
    assert zero_shot_classifier(texts, 2).dtype == torch.float32


# ---- Captions that repeat ----


def ceilings_by_trying(ids: np.ndarray, text_image: np.ndarray, num_images: int, k: int) -> tuple[float, float]:
    """The best recalls over all possible rankings by a model. Equal captions tie and are ordered by index."""
    found_images = 0
    for caption in set(ids):
        wanted = [text_image[j] for j in range(len(ids)) if ids[j] == caption]
        answers = itertools.combinations(range(num_images), min(k, num_images))
        found_images += max(sum(image in answer for image in wanted) for answer in answers)
    found_texts = 0
    for image in range(num_images):
        orders = itertools.permutations(sorted(set(ids)))
        answers = [[j for caption in order for j in np.flatnonzero(ids == caption)] for order in orders]
        found_texts += max(any(text_image[j] == image for j in answer[:k]) for answer in answers)
    return found_images / len(ids), found_texts / num_images


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_ceilings_are_the_best_of_all_answers(data):
    num_images, num_texts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    ids = data.draw(arrays(np.int64, num_texts, elements=st.integers(-2, 1)))
    text_image = data.draw(arrays(np.int64, num_texts, elements=st.integers(0, num_images - 1)))
    repeated = any(len(set(text_image[ids == caption])) > 1 for caption in ids)
    result = recall_ceilings(torch.from_numpy(ids), torch.from_numpy(text_image), num_images, KS)
    assert bool(result) == repeated
    for k in KS if repeated else ():
        images, texts = ceilings_by_trying(ids, text_image, num_images, k)
        assert result[f"image_retrieval_recall@{k}_ceiling"] == pytest.approx(images, abs=1e-12)
        assert result[f"text_retrieval_recall@{k}_ceiling"] == pytest.approx(texts, abs=1e-12)


def test_equal_captions_tie_whatever_the_rounding_of_their_embeddings_and_the_ceiling_holds():
    """40 images with 15 captions. Each image has the embedding of its caption, so no model can do better."""
    ids = torch.arange(40) % 15
    captions = features(15, 32, seed=0)[ids]
    images, index = captions + 1e-9 * features(40, 32, seed=1), torch.arange(40)
    results = [
        retrieval_metrics(images, captions + 1e-12 * features(40, 32, seed=seed), index, caption_ids=ids * 2**40)
        for seed in (2, 3)
    ]
    assert results[0] == results[1]
    assert results[0]["image_retrieval_recall@1_ceiling"] == results[0]["text_retrieval_recall@1_ceiling"] == 15 / 40
    for name in ("image_retrieval_recall", "text_retrieval_recall"):
        for k in (1, 5, 10):
            assert results[0][f"{name}@{k}"] == results[0][f"{name}@{k}_ceiling"], "reached"


def test_captions_that_do_not_repeat_have_no_ceiling():
    images, texts, index = features(20, 8, seed=1), features(20, 8, seed=2), torch.arange(20)
    assert retrieval_metrics(images, texts, index, caption_ids=index + 7) == retrieval_metrics(images, texts, index)


def test_captions_in_any_order_are_grouped_by_their_images_and_back():
    caption_image = torch.tensor([2, 0, 2, 1, 0])
    order, counts = group_by_image(caption_image, 5, 3)
    assert order.tolist() == [1, 4, 3, 0, 2]
    assert counts.tolist() == [2, 1, 2]
    assert image_of_captions(counts).tolist() == caption_image[order].tolist()
    order, counts = group_by_image(torch.tensor([-1, 1, 0, -1, 1]), 5, 2)  # two negative captions
    assert order.tolist() == [2, 1, 4]
    assert counts.tolist() == [1, 2]
    order, counts = group_by_image(None, 4, 4)
    assert order.tolist() == [0, 1, 2, 3]
    assert counts.tolist() == [1] * 4


def test_caption_ids_are_of_the_tokens_without_their_padding():
    short = caption_ids(torch.tensor([[5, 6, 0], [7, 5, 6]]), torch.tensor([[1, 1, 0], [1, 1, 1]]))
    long = caption_ids(torch.tensor([[0, 0, 5, 6], [6, 5, 1, 1], [5, 6, 0, 1]]), torch.tensor([[0, 0, 1, 1]] * 3))
    assert short[0] == long[0]
    assert len({*short.tolist(), *long.tolist()}) == 4
    assert caption_ids(torch.tensor([[5, 6]])) == short[0]


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
    assert rows * rows == 4 * ranking.TILE_NUMEL
    x, index = features(rows, 4, seed=0, dtype=torch.float32), torch.arange(rows)
    with LargestOutput() as retrieval:
        retrieval_metrics(x, x, index)
    with LargestOutput() as zero_shot:
        zero_shot_metrics(x, x, index)
    assert retrieval.numel == zero_shot.numel == ranking.TILE_NUMEL


def test_one_row_of_candidates_may_exceed_the_tile(monkeypatch):
    monkeypatch.setattr(ranking, "TILE_NUMEL", 16)
    x, index = features(100, 2, seed=0), torch.arange(100)
    with LargestOutput() as largest:
        retrieval_metrics(x, x, index)
    assert largest.numel == x.numel() == 200


X, I = torch.eye(3), torch.arange(3)  # noqa: E741
NAN = torch.eye(3).index_fill(0, torch.tensor([1]), math.nan)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: retrieval_metrics(X[:0], X, I), r"image_embeds must be .* at least one row, got shape \(0, 3\)"),
        (lambda: retrieval_metrics(X, X[:0], I[:0]), r"text_embeds must be .* got shape \(0, 3\)"),
        (lambda: retrieval_metrics(X[0], X, I), r"image_embeds must be .* got shape \(3,\)"),
        (lambda: retrieval_metrics(X.long(), X, I), "image_embeds must be a floating point .* torch.int64"),
        (lambda: retrieval_metrics(X, X[:, :2], I), "text_embeds must agree with image_embeds in D .* D=2 .* D=3"),
        (lambda: retrieval_metrics(NAN, X, I), "image_embeds must be finite, .* stand in 1 of 3 rows, .* row 1"),
        (lambda: retrieval_metrics(X, X / 0, I), "text_embeds must be finite, .* stand in 3 of 3 rows, .* row 0"),
        (lambda: retrieval_metrics(X, X, I[:2]), r"text_image must be .* shape \(3,\), got shape \(2,\)"),
        (lambda: retrieval_metrics(X, X, I.float()), "text_image must be an integer .* torch.float32"),
        (lambda: retrieval_metrics(X, X, I + 1), r"text_image must lie in \[0, 3\), got values from 1 to 3"),
        (lambda: retrieval_metrics(X, X, I - 1), r"text_image must lie in \[0, 3\), got values from -1 to 1"),
        (lambda: retrieval_metrics(X, X, I, ks=[]), r"ks must name at least one k, .* got \(\)"),
        (lambda: retrieval_metrics(X, X, I, ks=[1, 0]), r"ks .* each must be at least 1, got \(1, 0\)"),
        (lambda: retrieval_metrics(X, X, I, caption_ids=I / 2), "caption_ids must be an integer .* torch.float32"),
        (lambda: group_by_image(None, 4, 3), r"4 captions for 3 images. The data collator must return caption_image"),
        (lambda: group_by_image(I, 4, 3), r"caption_image must be an integer tensor of shape \(4,\)"),
        (lambda: group_by_image(I + 1, 3, 3), r"caption_image must lie in \[0, 3\)"),
        (lambda: group_by_image(I - 2, 3, 3), r"caption_image must lie in \[0, 3\), got values from -2 to 0"),
        (lambda: group_by_image(I * 0, 3, 3), "Image 1 of a batch has no caption"),
        (lambda: zero_shot_metrics(X, NAN, I), "classifier must be finite"),
        (lambda: zero_shot_metrics(X, X, I + 1), r"labels must lie in \[0, 3\)"),
        (lambda: zero_shot_metrics(X, X, I.bool()), "labels must be an integer .* torch.bool"),
        (lambda: zero_shot_metrics(X, X, 2 * torch.eye(3)), r"labels \[N, C\] must hold 0 or 1 .* from 0.0 to 2.0"),
        (lambda: zero_shot_metrics(X, X, torch.eye(3)[:, :2]), r"3 images and 3 classes, got shape \(3, 2\)"),
        (
            lambda: checked_classes(NAN, torch.eye(3), 3),
            "image_embeds must be finite, .* stand in 1 of 3 rows, .* row 1",
        ),
        (lambda: zero_shot_classifier(NAN, 1), "text_embeds must be finite"),
        (lambda: zero_shot_classifier(X, 2), "3 rows of text_embeds cannot be divided into classes of num_templates=2"),
        (lambda: zero_shot_classifier(X, 0), "num_templates=0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
