"""The reference: the losses of transformers' CLIP and SigLIP, and with `pair_ids` those of its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import models
from helpers.numerics import features

from hf_infcl import reference


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


def test_an_unknown_objective_is_refused():
    with pytest.raises(ValueError, match=r"softmax.*sigmoid.*'infonce'"):
        reference.contrastive_loss(*features(2, 3), 1.0, objective="infonce")
