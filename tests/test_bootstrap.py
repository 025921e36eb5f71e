"""Bootstrap intervals of metrics and of paired differences."""

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from hf_infcl.evaluation.intervals import (
    RESAMPLES,
    Difference,
    bounds,
    count_hits,
    differences,
    interval,
    resampled,
)
from hf_infcl.evaluation.metrics import ClassRanks, Hits, PairRanks, measured


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.int64)


def classified(right: Tensor, labels: Tensor, num_classes: int = 4) -> ClassRanks:
    return ClassRanks((~right).int(), labels, num_classes)


def retrieved(found: Tensor, text_image: Tensor, num_images: int) -> PairRanks:
    texts = torch.full((num_images,), len(text_image), dtype=torch.int32)
    return PairRanks(100 * (~found).int(), texts, text_image)


def test_the_interval_of_an_accuracy_is_scipys():
    right = torch.rand(200, generator=random(0)) < 0.7
    (values,) = resampled([Hits(right, ones(200))])
    assert values.shape == (RESAMPLES,)
    expected = scipy.stats.bootstrap([right.numpy()], np.mean, method="percentile", random_state=1, n_resamples=20_000)
    assert interval(values) == pytest.approx((*expected.confidence_interval,), abs=0.006)


def test_the_paired_interval_of_a_difference_is_scipys_and_narrower_than_an_unpaired_one():
    first = torch.rand(300, generator=random(0)) < 0.5
    second = first ^ (torch.rand(300, generator=random(1)) < 0.05)
    labels = torch.arange(300) % 4
    found = differences(classified(first, labels), classified(second, labels))["acc1"]

    def change(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return b.mean(axis) - a.mean(axis)

    expected = scipy.stats.bootstrap(
        [first.numpy(), second.numpy()], change, paired=True, method="percentile", random_state=1, n_resamples=20_000
    )
    assert (found.low, found.high) == pytest.approx((*expected.confidence_interval,), abs=0.006)
    assert found.second - found.first == pytest.approx((second.double().mean() - first.double().mean()).item())
    assert found.high - found.low < 0.06, "of independent sets it would be 0.16"


def test_the_captions_of_an_image_are_drawn_together():
    """50 images with 8 captions each, all right or all wrong, say as much as 50 captions."""
    right = torch.rand(50, generator=random(0)) < 0.5
    text_image = torch.arange(50).repeat_interleave(8)
    several = bounds(_values(retrieved(right[text_image], text_image, 50)))
    single = bounds(_values(retrieved(right, torch.arange(50), 50)))
    for end in ("low", "high"):
        name = f"image_retrieval_recall@1_{end}"
        assert several[name] == pytest.approx(single[name])


def _values(ranks: PairRanks | ClassRanks) -> dict[str, np.ndarray]:
    hits = count_hits(ranks)
    return dict(zip(hits, resampled([*hits.values()]), strict=True))


def test_the_mean_of_classes_weighs_each_class_that_was_drawn_alike():
    labels = torch.tensor([0] * 90 + [2] * 10)
    right = torch.cat([torch.ones(90), torch.arange(10) % 2]).bool()
    ranks = classified(right, labels)
    assert measured(ranks)["mean_per_class_recall"] == pytest.approx(0.75)
    values = _values(ranks)["mean_per_class_recall"]
    assert values.mean() == pytest.approx(0.75, abs=0.01)
    assert values.std() == pytest.approx(0.5 * 0.5 / np.sqrt(10), rel=0.1), "the noise of the small class"


def test_images_of_one_kind_are_drawn_as_if_each_was_drawn_alone():
    """To the bit, as the sums are of whole numbers."""
    ranks, labels = torch.randint(0, 9, (400,), generator=random(3)), torch.randint(0, 9, (400,), generator=random(4))
    text_image = torch.arange(400).repeat_interleave(torch.arange(400) % 3 + 1)
    texts = torch.randint(0, 9, (len(text_image),), generator=random(5))
    pairs = PairRanks(texts.int(), ranks.int(), text_image)
    drawn = np.random.default_rng(0).integers(400, size=(RESAMPLES, 400))
    for found in (ClassRanks(ranks.int(), labels, 9), pairs):
        for name, hits in count_hits(found).items():
            right, queries = (part.numpy()[drawn] for part in (hits.right, hits.queries))
            if hits.groups is None:
                expected = right.sum(1) / queries.sum(1)
            else:
                of = hits.groups.numpy()[drawn][..., None] == np.arange(9)
                expected = ((of * right[..., None]).sum(1) / of.sum(1)).sum(1) / 9
            assert np.array_equal(_values(found)[name], expected), name


def test_blocks_of_resamples_are_those_of_one(monkeypatch):
    hits = [Hits(torch.rand(37, generator=random(0)) < 0.4, ones(37))]
    whole = resampled(hits)
    monkeypatch.setattr("hf_infcl.evaluation.intervals.WEIGHTS_NUMEL", 1)
    assert np.array_equal(resampled(hits), whole)


def test_a_difference_whose_interval_includes_0_is_noise():
    assert Difference(0.5, 0.52, -0.01, 0.05).words(100, 1) == "+2.0 [-1.0, +5.0] within noise"
    assert Difference(0.5, 0.52, 0.01, 0.03).words() == "+0.0200 [+0.0100, +0.0300]"


def test_results_on_other_images_are_not_compared():
    few, many = (classified(torch.ones(n).bool(), torch.zeros(n).long()) for n in (3, 4))
    with pytest.raises(ValueError, match=r"Only results on the same images can be compared, got \[3\] and \[4\]"):
        differences(few, many)
