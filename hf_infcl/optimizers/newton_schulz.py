"""Orthogonalises stacks of matrices: Muon's iteration."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x³ and x⁵: the steepest at zero that stay near one
STEPS = 5
EPSILON = 1e-7


def orthogonalised(stack: Tensor, steps: int = STEPS) -> Tensor:
    """The nearly orthogonal matrices to those of a stack, with singular values between about 0.7 and 1.2.

    The same operations in the same order as in `torch.optim.Muon`, for all matrices of the stack at once: a quintic
    Newton-Schulz iteration in bf16 (https://kellerjordan.github.io/posts/muon).

    Args:
        stack: [n, rows, columns] in any floating point dtype.

    Returns:
        [n, rows, columns] in bfloat16.
    """
    a, b, c = COEFFICIENTS
    tall = stack.size(-2) > stack.size(-1)
    X = stack.to(torch.bfloat16)
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)  # no singular value above one
    X = X.mT if tall else X  # X @ X.mT is then the smaller of the two products
    for _ in range(steps):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X
