"""Scores of single pairs against plain torch on all cosines, and their averages by keys."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_infcl.loss.pair_scores import pair_scores
from hf_infcl.quality.selection import NO_KEY, PairAverages

DIM, IMAGES = 12, 12
KINDS = ("pairs", "ids", "captions", "captions and ids")


def whole(kind: str) -> dict[str, Any]:
    """A global batch, in which all cosines are near 0.9: images, texts, the image of each text, ids."""
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(DIM, generator=generator)
    images = F.normalize(3 * common + torch.randn(IMAGES, DIM, generator=generator), dim=1)
    belongs = torch.arange(IMAGES)
    if kind.startswith("captions"):  # one to three of each image
        belongs = belongs.repeat_interleave(1 + torch.arange(IMAGES) % 3)
    texts = F.normalize(3 * common + torch.randn(len(belongs), DIM, generator=generator), dim=1)
    ids = torch.tensor([0, 1, 2, 0, 4, 5, 2, 7, 2, 9, 5, 11]) if kind.endswith("ids") else None
    return {"images": images, "texts": texts, "belongs": belongs, "ids": ids}


def expected(kind: str) -> Tensor:
    batch = whole(kind)
    images, texts, belongs = batch["images"].double(), batch["texts"].double(), batch["belongs"]
    ids = torch.arange(IMAGES) if batch["ids"] is None else batch["ids"]
    cosines, others = images @ texts.T, ids[:, None] != ids[belongs]
    own = torch.arange(IMAGES)[:, None] == belongs
    found = []
    for image in range(IMAGES):
        negatives = cosines[image][others[image]]
        z = (cosines[image][own[image]].mean() - negatives.mean()) / negatives.std(correction=0)
        of_texts = []
        for text in own[image].nonzero().flatten():
            negatives = cosines[:, text][others[:, text]]
            of_texts.append((cosines[image, text] - negatives.mean()) / negatives.std(correction=0))
        found.append((z + torch.stack(of_texts).mean()) / 2)
    return torch.stack(found)


def rank_scores(rank: int, world_size: int) -> list[Tensor]:
    found = []
    for kind in KINDS:
        batch, each = whole(kind), IMAGES // world_size
        mine = (batch["belongs"] // each) == rank
        texts, belongs = batch["texts"][mine], batch["belongs"][mine] - rank * each
        ids = None if batch["ids"] is None else batch["ids"][rank * each : (rank + 1) * each]
        if kind != "pairs":  # a negative caption, in another order than that of the images
            texts, belongs = torch.cat((texts[:1], texts)).flip(0), torch.cat((torch.tensor([-1]), belongs)).flip(0)
        found.append(
            pair_scores(
                batch["images"][rank * each : (rank + 1) * each], texts, None if kind == "pairs" else belongs, ids
            )
        )
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_scores_are_those_of_all_cosines(ranks, world_size):
    by_rank = ranks.run(rank_scores, world_size)
    for number, kind in enumerate(KINDS):
        found = torch.cat([scores[number] for scores in by_rank])
        torch.testing.assert_close(found.double(), expected(kind), rtol=2e-4, atol=2e-4, msg=kind)


def test_a_pair_that_does_not_belong_together_scores_0_on_average():
    generator = torch.Generator().manual_seed(0)
    images = F.normalize(torch.randn(4096, DIM, generator=generator), dim=1)
    texts = F.normalize(images + 0.2 * torch.randn(4096, DIM, generator=generator), dim=1)
    wrong = torch.arange(4096) < 2048
    texts[wrong] = texts[wrong].roll(1, 0)
    scores = pair_scores(images, texts)
    assert scores[wrong].mean().abs() < 0.1
    assert scores[~wrong].mean() > 2


def few_classes(classes: int, sizes: list[float], noise: float = 0.05) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images near the one text of their class, a tenth of them with another class's text and id: these are wrong."""
    generator = torch.Generator().manual_seed(4)
    names = F.normalize(torch.randn(classes, DIM, generator=generator), dim=1)
    label = torch.multinomial(torch.tensor(sizes).float(), 192, True, generator=generator)
    images = F.normalize(names[label] + noise * torch.randn(192, DIM, generator=generator), dim=1)
    wrong = torch.rand(192, generator=generator) < 0.1
    given = (label + wrong) % classes
    return images, names[given], given, wrong


@pytest.mark.parametrize("sizes", [[1, 1], [1, 1, 1], [1, 1, 1, 1], [90, 7, 3], [70, 10, 10, 10]])
def test_scores_of_few_classes_stay_near_each_other(sizes):
    """The others of an image are the same one or two texts, whose deviation says nothing."""
    for batch in (8, 192):
        for first in range(0, 192, batch):
            images, texts, ids, wrong = (part[first : first + batch] for part in few_classes(len(sizes), sizes))
            scores = pair_scores(images, texts, pair_ids=ids)
            scored = (ids[:, None] != ids).any(1)
            assert torch.equal(scores.isfinite(), scored), "without others there is no score"
            if batch == 192:
                assert scores[~wrong].median() > 2
                assert scores[~wrong].max() < 6 * scores[~wrong].median()
                assert scores[wrong].mean() < 0.5


# ---- Averages ----


def plain(visits: list[tuple[list[int], list[float]]], least: float) -> dict[int, float]:
    averages: dict[int, float] = {}
    counts: dict[int, int] = {}
    for keys, values in visits:
        for key in set(keys) - {NO_KEY}:
            new = [value for k, value in zip(keys, values, strict=True) if k == key]
            counts[key] = counts.get(key, 0) + 1
            before = averages.get(key, 0.0)
            averages[key] = before + max(least, 1 / counts[key]) * (sum(new) / len(new) - before)
    return averages


def drawn(windows: int, keys: int, size: int = 40) -> list[tuple[list[int], list[float]]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(windows):
        chosen = torch.randint(0, keys, (size,), generator=generator)
        chosen[0] = NO_KEY
        found.append((chosen.tolist(), torch.randn(size, dtype=torch.float64, generator=generator).tolist()))
    return found


def visited(averages: PairAverages, visits: list[tuple[list[int], list[float]]]) -> PairAverages:
    for keys, values in visits:
        averages.visit(torch.tensor(keys), torch.tensor(values, dtype=torch.float64))
    return averages


def test_averages_of_a_table():
    visits = drawn(60, 100)
    averages = visited(PairAverages(100), visits)
    for found, least in zip(averages._averages, (0.3, 0.1), strict=True):
        by_key = plain(visits, least)
        known = averages.visits > 0
        assert dict(zip(torch.arange(100)[known].tolist(), found[known].tolist(), strict=True)) == pytest.approx(
            by_key, abs=1e-5
        )
    fast = plain(visits, 0.3)
    assert averages.share_below_zero == sum(value < 0 for value in fast.values()) / len(fast)
    assert averages.mean_visits == sum(len({*k} - {NO_KEY}) for k, _ in visits) / len(fast)
    names, slow = averages.slow()
    assert dict(zip(names.tolist(), slow.tolist(), strict=True)) == pytest.approx(plain(visits, 0.1), abs=1e-5)
    assert names.tolist() == sorted(fast)


def test_values_that_are_not_finite_are_not_kept():
    averages = PairAverages(5)
    found, visits = averages.visit(torch.tensor([1, 2, NO_KEY]), torch.tensor([torch.nan, 1.0, 1.0]).double())
    assert found.isnan().tolist() == [True, False, True]
    assert visits.tolist() == [0, 1, 0]
    assert averages.slow()[0].tolist() == [2]


def test_averages_go_on_from_a_state():
    visits = drawn(20, 100)
    whole_run, first = visited(PairAverages(100), visits), visited(PairAverages(100), visits[:9])
    rest = PairAverages(100)
    rest.load_state_dict(first.state_dict())
    visited(rest, visits[9:])
    for one, other in zip(whole_run.slow(), rest.slow(), strict=True):
        assert torch.equal(one, other)
    assert (whole_run.mean_visits, whole_run.share_below_zero) == (rest.mean_visits, rest.share_below_zero)
