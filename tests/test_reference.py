"""The reference gives the losses of transformers' CLIP and SigLIP and, with `pair_ids`, the defined ones."""

import pytest
import torch
import torch.nn.functional as F
from helpers import models
from helpers.numerics import features

from hf_infcl.loss import reference


@pytest.mark.parametrize(("build", "objective"), [(models.clip, "softmax"), (models.siglip, "sigmoid")])
def test_equals_the_loss_of_transformers_models(build, objective):
    model = build().double().eval()
    batch = models.Pairs(9).batch()
    batch["pixel_values"] = batch["pixel_values"].double()
    outputs = model(**batch, return_loss=True)
    loss = reference.contrastive_loss(
        outputs.image_embeds,
        outputs.text_embeds,
        model.logit_scale.exp(),
        getattr(model, "logit_bias", None),
        objective=objective,
    )
    torch.testing.assert_close(loss, outputs.loss.reshape(loss.shape))


def test_equal_ids_are_never_negatives():
    x, y = features(4, 8, dtype=torch.float64)
    ids = torch.tensor([5, 7, 5, 9])
    softmax = reference.contrastive_loss(x, y, 10.0, pair_ids=ids)
    sigmoid = reference.contrastive_loss(x, y, 10.0, -3.0, objective="sigmoid", pair_ids=ids)
    logits = 10 * x @ y.t()
    rows = [[0, 1, 3], [1, 0, 2, 3], [2, 1, 3], [3, 0, 1, 2]]  # the positive first, then the negatives
    by_row = [-F.log_softmax(logits[i, r], 0)[0] for i, r in enumerate(rows)]
    by_column = [-F.log_softmax(logits[r, i], 0)[0] for i, r in enumerate(rows)]
    torch.testing.assert_close(softmax, (sum(by_row) + sum(by_column)) / 8)
    terms = [F.softplus((1 if j else -1) * (logits[i, c] - 3)) for i, r in enumerate(rows) for j, c in enumerate(r)]
    torch.testing.assert_close(sigmoid, sum(terms) / 4)


def test_several_positives_are_unicl_and_siglip():
    """With several positives a row's loss is the mean of their cross entropies; without one it has no loss."""
    x, y = features(3, 8, dtype=torch.float64)[0], features(4, 8, seed=1, dtype=torch.float64)[1]
    negatives = features(2, 8, seed=2, dtype=torch.float64)[0]
    ids = {"image_ids": torch.tensor([5, 7, 9]), "text_ids": torch.tensor([7, 5, 7, 1])}
    softmax = reference.contrastive_loss(x, y, 10.0, negative_texts=negatives, **ids)
    logits = 10 * x @ torch.cat((y, negatives)).t()
    by_row, by_column = F.log_softmax(logits, 1), F.log_softmax(logits, 0)
    rows = -(by_row[0, 1] + (by_row[1, 0] + by_row[1, 2]) / 2) / 2
    columns = -(by_column[1, 0] + by_column[0, 1] + by_column[1, 2]) / 3
    torch.testing.assert_close(softmax, (rows + columns) / 2)
    sigmoid = reference.contrastive_loss(x, y, 10.0, -3.0, objective="sigmoid", negative_texts=negatives, **ids)
    positive = {(0, 1), (1, 0), (1, 2)}
    terms = [F.softplus((-1 if (i, j) in positive else 1) * (logits[i, j] - 3)) for i in range(3) for j in range(6)]
    torch.testing.assert_close(sigmoid, (1 / 2 + 1 / 3) / 2 * sum(terms))


def test_negative_texts_are_those_of_negclip():
    """As in NegCLIP's code: cross entropies of the rows of all images, and of the columns of the images' texts."""
    x, y = features(5, 8, dtype=torch.float64)
    z = features(3, 8, seed=1, dtype=torch.float64)[1]
    logits_per_image = 10 * x @ torch.cat((y, z)).t()
    logits_per_text = logits_per_image.t()
    target = torch.arange(5)
    truth = (F.cross_entropy(logits_per_image, target) + F.cross_entropy(logits_per_text[:5], target)) / 2
    torch.testing.assert_close(reference.contrastive_loss(x, y, 10.0, negative_texts=z), truth)


def test_an_unknown_objective_is_refused():
    with pytest.raises(ValueError, match=r"softmax.*sigmoid.*'infonce'"):
        reference.contrastive_loss(*features(2, 3), 1.0, objective="infonce")
