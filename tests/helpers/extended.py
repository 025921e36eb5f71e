"""The loss and its gradients in extended precision, the truth for float64 results of random cases.

Elementwise functions and sums use numpy's `longdouble`. Its mantissa has 64 bits on x86 and 113 on 64-bit ARM Linux; on
Windows and on macOS on ARM it has 53, the same as float64. Matrix products would be slow in that dtype, so they are
computed as sums of exact float64 products.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

SLICES = 4  # slices of each factor of a matrix product: 4 times 20 bits or more


def loss_and_gradients(
    arguments: dict[str, Tensor], scale: float, bias: float, objective: str
) -> tuple[Array, dict[str, Array]]:
    """`hf_infcl.loss.reference.contrastive_loss` and its derivatives, written out. It takes the same arguments.

    Returns:
        The loss, and the gradients under the names of their arguments; all in longdouble.
    """
    x, y = (_numbers(arguments[name]) for name in ("image_embeds", "text_embeds"))
    n, m = len(x), len(y)
    if "image_ids" in arguments:
        positive = _equal(arguments["image_ids"], arguments["text_ids"])
    else:
        positive = np.eye(n, m, dtype=bool)
    excluded = np.zeros_like(positive)
    if "pair_ids" in arguments:
        excluded = _equal(arguments["pair_ids"], arguments["pair_ids"]) & ~positive
    if "negative_texts" in arguments:
        negatives = _numbers(arguments["negative_texts"])
        y = np.concatenate((y, negatives))
        positive, excluded = (np.pad(cells, ((0, 0), (0, len(negatives)))) for cells in (positive, excluded))
    device = arguments["image_embeds"].device
    exact_scale = np.longdouble(scale)
    cosines = product(x, y, device)
    logits = exact_scale * cosines + np.longdouble(bias)
    if objective == "softmax":
        logits[excluded] = -np.inf
        of_rows, by_rows = _cross_entropy(logits, positive)
        of_columns, by_columns = _cross_entropy(logits.T, positive.T)
        loss, by_logits = (of_rows + of_columns) / 2, (by_rows + by_columns.T) / 2
    else:
        loss, by_logits = _sigmoid(logits, positive, excluded)
    by_texts = exact_scale * product(by_logits.T, x.T, device)
    return loss, {
        "image_embeds": exact_scale * product(by_logits, y.T, device),
        "text_embeds": by_texts[:m],
        "negative_texts": by_texts[m:],
        "logit_scale": (by_logits * cosines).sum(),
        "logit_bias": by_logits.sum(),
    }


def parts(value: Array, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two float64 tensors whose sum is the value, with twice the digits of float64."""
    high = np.asarray(value, np.float64)
    low = np.asarray(value - high, np.float64)
    return torch.from_numpy(high).to(device), torch.from_numpy(low).to(device)


def product(a: Array, b: Array, device: torch.device) -> Array:
    """[n, m]: a @ b.T in longdouble of a [n, k] and b [m, k].

    Each row is split into slices: integers with so few bits that float64 holds sums of k of their products exactly
    (K. Ozaki et al., "Error-free transformations of matrix multiplication", 2012). The remainder after the last slice
    and the omitted products of small slices are below 2**-79 of the row's largest elements.
    """
    bits = (53 - math.ceil(math.log2(a.shape[1]))) // 2
    (of_a, scale_a), (of_b, scale_b) = (_slices(t, bits, device) for t in (a, b))
    total = np.zeros((len(a), len(b)), np.longdouble)
    for order in reversed(range(SLICES)):  # the smallest first
        exact = [of_a[i] @ of_b[order - i].t() for i in range(order + 1)]
        total += sum(np.ldexp(t.cpu().numpy().astype(np.longdouble), -bits * (order + 2)) for t in exact)
    return np.ldexp(total, scale_a + scale_b.T)


def _slices(t: Array, bits: int, device: torch.device) -> tuple[list[Tensor], Array]:
    """Slices [rows, k], and exponents [rows, 1]: t = 2**exponent · Σ slice_i · 2**(-bits · (i + 1))."""
    _, exponent = np.frexp(np.abs(t).max(1, keepdims=True))
    rest, slices = np.ldexp(t, -exponent), []
    for _ in range(SLICES):
        rest = np.ldexp(rest, bits)
        whole = np.rint(rest)
        rest = rest - whole
        slices.append(torch.from_numpy(whole.astype(np.float64)).to(device))
    return slices, exponent


def _numbers(t: Tensor) -> Array:
    return t.detach().cpu().numpy().astype(np.longdouble)


def _equal(rows: Tensor, columns: Tensor) -> Array:
    return np.asarray((rows[:, None] == columns[None, :]).cpu())


def _cross_entropy(logits: Array, positive: Array) -> tuple[Array, Array]:
    """The mean cross entropy of the rows that have positives, and its derivative by the logits."""
    shifted = logits - logits.max(1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(1, keepdims=True)
    positives = positive.sum(1, keepdims=True)
    shares = positive / np.maximum(positives, 1).astype(np.longdouble)
    counted = positives > 0
    losses = np.where(positive, np.log(totals) - shifted, 0)  # excluded cells would be infinite
    by_logits = np.where(counted, exponentials / totals - shares, 0)
    return (losses * shares).sum() / counted.sum(), by_logits / counted.sum()


def _sigmoid(logits: Array, positive: Array, excluded: Array) -> tuple[Array, Array]:
    """The sigmoid loss, and its derivative by the logits."""
    sign = np.where(positive, np.longdouble(-1), np.longdouble(1))  # in log(1 + exp(sign · logit))
    with np.errstate(over="ignore"):  # 1 / (1 + inf) is 0, as intended
        by_logits = sign / (1 + np.exp(-sign * logits))
    images, texts = (np.longdouble(positive.any(axis).sum()) for axis in (1, 0))
    weights = np.where(excluded, 0, (1 / images + 1 / texts) / 2)
    return (weights * np.logaddexp(0, sign * logits)).sum(), weights * by_logits
