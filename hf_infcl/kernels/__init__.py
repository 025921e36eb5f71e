"""Block arithmetic of the contrastive losses: rows of images against columns of texts, never a stored matrix.

Two modules offer the same four functions, `positive_logits`, `softmax_statistics`, `softmax_gradients` and
`sigmoid_block`: `tiled` in plain torch for any device, and later ones for particular hardware. `select` picks.

The words of all of them: a *block* is m images against n texts, x [m, D] and y [n, D], with the logits
z_ij = scale · x_i·y_j (+ bias), never stored. ``diagonal`` says where the block's positives lie: image i belongs to
text i + diagonal; None: the block has no positives. ``ids_x`` [m], ``ids_y`` [n] int64, both or neither: a cell with
equal ids that is not a positive is excluded, as if it were not there.
"""

from __future__ import annotations

from types import ModuleType

import torch

from . import tiled

BACKENDS = ("auto", "torch")


def select(backend: str, device: torch.device) -> ModuleType:
    """The module that computes blocks on ``device``."""
    if backend in ("auto", "torch"):
        return tiled
    raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}.")
