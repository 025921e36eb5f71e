"""Wrong inputs of `contrastive_loss` on one process raise an error on all processes, with the values of each."""

import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.numerics import features

from hf_infcl import contrastive_loss
from hf_infcl.loss.inputs import Inputs


def bad_inputs(rank: int) -> dict[str, tuple[tuple, dict, str]]:
    """Arguments that are wrong on rank 1, with the message that both ranks must raise."""
    x, y = features(4, 8)
    wrong = rank == 1
    ids = torch.arange(4)
    both = {"image_ids": ids, "text_ids": ids}
    return {
        "model output": ((x, (y,) if wrong else y, 1.0), {}, r"rank 1: text_embeds must be a tensor, .*got a tuple"),
        "text scale": ((x, y, "1" if wrong else 1.0), {}, "rank 1: logit_scale must be a number .*got a str"),
        "vector of numpy": (
            (x, y, np.ones(2) if wrong else 1.0),
            {},
            "rank 1: logit_scale must be a number .*got a ndarr",
        ),
        "no scale": ((x, y, None if wrong else 1.0), {}, "rank 1: logit_scale must be a number .*got a NoneType"),
        "width": ((x[:, :5], y[:, :5], 1.0) if wrong else (x, y, 1.0), {}, r"\[4, 8\][\s\S]*\[4, 5\]"),
        "towers": ((x, y[:3], 1.0) if wrong else (x, y, 1.0), {}, r"rank 1: .*\[4, 8\] and \[3, 8\]"),
        "one dimension": ((x[0], y[0], 1.0) if wrong else (x, y, 1.0), {}, r"rank 1: .*\[n, D\].*\[8\]"),
        "nothing": ((x[:0], y[:0], 1.0) if wrong else (x, y, 1.0), {}, r"rank 1: .*\[0, 8\]"),
        "dtype": ((x.double(), y.double(), 1.0) if wrong else (x, y, 1.0), {}, "float32[\\s\\S]*float64"),
        "integers": ((x.long(), y.long(), 1.0) if wrong else (x, y, 1.0), {}, "rank 1: .*floating.*int64"),
        "device": ((x.to("meta"), y, 1.0) if wrong else (x, y, 1.0), {}, "rank 1: .*one device.*meta"),
        "scale": ((x, y, torch.tensor(torch.nan if wrong else 1.0)), {}, "rank 1: .*logit_scale must be finite.*nan"),
        "scales": ((x, y, 2.0 if wrong else 1.0), {}, "logit_scale 1[\\s\\S]*logit_scale 2"),
        "vector scale": ((x, y, torch.ones(2) if wrong else 1.0), {}, "rank 1: .*one element.*\\[2\\]"),
        "bias": ((x, y, 1.0, torch.inf if wrong else 0.0), {}, "rank 1: .*logit_bias must be finite.*inf"),
        "no bias": ((x, y, 1.0, None if wrong else 0.0), {}, "logit_bias 0[\\s\\S]*logit_bias None"),
        "ids": ((x, y, 1.0), {"pair_ids": None if wrong else ids}, "0: .*pair_ids[\\s\\S]*1: .*no ids"),
        "ids' dtype": ((x, y, 1.0), {"pair_ids": ids.int() if wrong else ids}, "rank 1: .*\\[4\\] int64.*int32"),
        "ids' shape": ((x, y, 1.0), {"pair_ids": ids[:2] if wrong else ids}, "rank 1: .*\\[4\\] int64.*\\[2\\]"),
        "ids' type": ((x, y, 1.0), {"pair_ids": [0, 1, 2, 3] if wrong else ids}, "rank 1: .*tensor.*got a list"),
        "texts of no image": ((x, y[:3], 1.0) if wrong else (x, y, 1.0), {}, "rank 1: Pairs.*text_ids.*as negative_t"),
        "direction": ((x, y, 1.0), {"directions": "both" if not wrong else "up"}, "rank 1: directions must be .*'up'"),
        "directions": ((x, y, 1.0), {} if wrong else {"directions": "image_to_text"}, "image_to_text[\\s\\S]*both"),
        "direction of sigmoid": (
            (x, y, 1.0),
            {"directions": "image_to_text", "objective": "sigmoid" if wrong else "softmax"},
            "rank 1: directions='image_to_text' is for the softmax loss",
        ),
        "half of the ids": ((x, y, 1.0), {"image_ids": ids} | ({} if wrong else both), "rank 1: .*got only image_ids"),
        "two kinds of ids": ((x, y, 1.0), both | ({"pair_ids": ids} if wrong else {}), "rank 1: pair_ids exclude"),
        "other ids": ((x, y, 1.0), {} if wrong else both, "0: .* image_ids and text_ids[\\s\\S]*1: .*no ids"),
        "text_ids' shape": (
            (x, y[:3], 1.0),
            {"image_ids": ids, "text_ids": ids if wrong else ids[:3]},
            r"rank 1: text_ids must be \[3\] int64, got \[4\]",
        ),
        "text_ids' dtype": ((x, y, 1.0), both | {"text_ids": ids.float() if wrong else ids}, "rank 1: text_ids.*float"),
        "image_ids' device": (
            (x, y, 1.0),
            both | {"image_ids": ids.to("meta") if wrong else ids},
            "rank 1: image_ids must be on .*meta",
        ),
        "no text": ((x, y[:0] if wrong else y, 1.0), both | {"text_ids": ids[:0] if wrong else ids}, r"1: .*m, D >="),
        "negatives": ((x, y, 1.0), {"negative_texts": None if wrong else y}, r"0: .*negative_texts \[4, 8\][\s\S]*1: "),
        "negatives' type": ((x, y, 1.0), {"negative_texts": [y] if wrong else y}, "1: negative_texts.*tensor.*list"),
        "negatives' width": (
            (x, y, 1.0),
            {"negative_texts": y[:, :5] if wrong else y},
            r"rank 1: negative_texts must be \[h, D\] = \[h, 8\], got \[4, 5\]",
        ),
        "negatives' dtype": ((x, y, 1.0), {"negative_texts": y.double() if wrong else y}, "rank 1: negative.*float64"),
        "negatives' device": ((x, y, 1.0), {"negative_texts": y.to("meta") if wrong else y}, "rank 1: negative.*meta"),
        "gradients": ((x.clone().requires_grad_(wrong), y, 1.0), {}, "for nothing[\\s\\S]*for image_embeds"),
        "objective": ((x, y, 1.0), {"objective": "clip" if wrong else "softmax"}, "rank 1: objective .*'clip'"),
        "objectives": ((x, y, 1.0), {"objective": "sigmoid" if wrong else "softmax"}, "softmax[\\s\\S]*sigmoid"),
        "strategy": ((x, y, 1.0), {"strategy": "star" if wrong else "ring"}, "rank 1: strategy .*'ring'.*'star'"),
        "strategies": ((x, y, 1.0), {"strategy": "disco" if wrong else "ring"}, "0: .*, ring,.*\\n.*1: .*, disco,"),
        "backend": ((x, y, 1.0), {"backend": "cuda" if wrong else "torch"}, "rank 1: backend .*'torch'.*'cuda'"),
    }


def rank_errors(rank: int, world_size: int) -> None:
    for args, options, message in bad_inputs(rank).values():
        with pytest.raises(ValueError, match=message):
            contrastive_loss(*args, **options)
    x, y = features(4, 8)
    contrastive_loss(x, y, 1.0)  # no process is left hanging
    rows = 4 - rank
    contrastive_loss(x[:rows], y[:rows], 1.0)  # other numbers of pairs are no mistake
    with warnings.catch_warnings():  # torch warns about numbers taken from tensors with a gradient
        warnings.simplefilter("error")
        contrastive_loss(x, y, torch.tensor(1.0, requires_grad=True), torch.zeros(1, requires_grad=True))


def test_every_process_is_told_what_is_wrong_on_one(ranks):
    ranks.run(rank_errors, 2, always_ring=True)


def rank_errors_with_late_scalars(rank: int, world_size: int, backend: str) -> None:
    """On GPUs the values of scalars are compared after the loss has been queued, with the same messages."""
    if backend == "gloo":
        with mock.patch.object(Inputs, "scalars_are_read", return_value=False):
            rank_errors(rank, world_size)
        return

    def on_gpu(value: Any) -> Any:
        return value.to("cuda") if isinstance(value, torch.Tensor) else value

    for name, (args, options, message) in bad_inputs(rank).items():
        if "device" not in name:
            with pytest.raises(ValueError, match=message):
                contrastive_loss(*map(on_gpu, args), **{key: on_gpu(value) for key, value in options.items()})
    contrastive_loss(*map(on_gpu, features(4, 8)), torch.tensor(1.0))  # no process is left hanging


def test_scalars_that_are_read_late_are_refused_alike(ranks, backend):
    ranks.run(rank_errors_with_late_scalars, 2, backend, backend=backend)


@pytest.mark.parametrize(
    "name",
    [
        *("model output", "text scale", "towers", "one dimension", "scale", "vector scale", "ids' shape", "objective"),
        *("texts of no image", "half of the ids", "two kinds of ids", "text_ids' shape", "negatives' width"),
    ],
)
def test_a_single_process_is_told_what_is_wrong(name):
    args, options, message = bad_inputs(1)[name]
    with pytest.raises(ValueError, match=message.removeprefix("rank 1: ")):
        contrastive_loss(*args, **options)
