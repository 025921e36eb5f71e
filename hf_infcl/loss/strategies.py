"""Who computes which part of the B×B logits, and what travels for it: the strategies of the papers.

A process r of W holds the images x [b, D] and texts y [b, D] of b of the B = W·b pairs. Every strategy gives it the
same three things: the statistics of its own rows and columns, the products of the coefficients with its own embeddings,
and for the sigmoid loss both at once. They differ in memory and traffic.

| strategy | blocks of a process | what travels | memory beside tiles |
|---|---|---|---|
| ring (Inf-CL, arXiv 2410.17243) | W of b×b, one after another | texts and their gradients, around | O(b·D) |
| disco (DisCo-CLIP, arXiv 2304.08480) | one b×B | texts gathered, their gradients reduced | O(B·D) |
| local (OpenCLIP's local loss) | b×B for images, B×b for texts | both gathered, both gradients reduced | O(B·D) |
| gather (CLIP) | the whole B×B | both gathered, nothing returns | O(B·D) |

A ring of small texts is computed as disco: `select_strategy`.

Words as in `hf_infcl.kernels`; the log-odds of softmax are explained at `softmax_statistics` there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..processes import Processes
from .ring import Ring, RingReduction

GATHERED_BYTES = 256 << 20  # up to which a ring gathers its texts: a constant, so that its memory stays O(b·D)


class Collector(Protocol):
    """Combines what the processes say about each other's columns."""

    def add(self, part: Tensor) -> None: ...

    def result(self) -> Tensor: ...


class RingStrategy:
    """Inf-CL: one ring for both directions. Texts travel; each process computes its images' rows block by block.

    Columns' statistics and gradients travel along with the texts and arrive home complete. Transfers overlap the
    computation of the block at hand.
    """

    def __init__(self, processes: Processes, backend: str) -> None:
        self.processes, self.backend = processes, backend

    def columns(self, *tensors: Tensor | None) -> Iterator[tuple[int | None, tuple[Any, ...]]]:
        """Blocks of columns with their ``diagonal``: all processes' tensors of [b, ...], None stays None."""
        for source, held in Ring(self.processes).rotate(*tensors):
            yield (0 if source == self.processes.rank else None), held

    def collector(self, combine: Callable[..., Any]) -> Collector:
        """Takes a part per block of `columns`, in their order; combined by `torch.add` or `torch.logaddexp`."""
        return RingReduction(Ring(self.processes), combine)

    def softmax(
        self, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, want_x: bool, want_y: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Four products in all: one of the statistics, one recomputed, two of the gradients.

        Returns:
            The sum of the cross entropies of this process's images and texts; ΣC, which is 0; and C·Y and Cᵀ·X of its
            images and texts, [b, D], None if not wanted. C is 2B times the derivative of the loss by the logits.
        """
        positive = kernels.positive_logits(x, y, scale, backend=self.backend)
        odds = torch.stack(self.softmax_statistics(x, y, scale, positive, ids))
        loss, total = F.softplus(odds).sum(), torch.zeros_like(scale)
        if not (want_x or want_y):
            return loss, total, None, None
        return loss, total, *self.softmax_gradients(x, y, scale, positive, odds, ids, want_x, want_y)

    def softmax_statistics(
        self, x: Tensor, y: Tensor, scale: Tensor, positive: Tensor, ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The log-odds of the negatives of this process's images and of its texts, each [b]."""
        odds_x: Tensor | None = None
        odds_y = self.collector(torch.logaddexp)
        for diagonal, (text, text_positive, text_ids) in self.columns(y, positive, ids):
            rows, part = kernels.softmax_statistics(
                x, text, scale, positive, text_positive, ids, text_ids, diagonal, backend=self.backend
            )
            odds_x = rows if odds_x is None else torch.logaddexp(odds_x, rows)
            odds_y.add(part)
        assert odds_x is not None
        return odds_x, odds_y.result()

    def softmax_gradients(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        positive: Tensor,
        odds: Tensor,
        ids: Tensor | None,
        want_x: bool,
        want_y: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """C·Y and Cᵀ·X as `softmax` returns them; ``odds`` [2, b] are the statistics."""
        lse_x, lse_y = positive + F.softplus(odds)
        own = -torch.sigmoid(odds).sum(0)
        grad_x = _zeros(x, positive) if want_x else None
        texts = self.collector(torch.add)
        for diagonal, (text, text_lse, text_ids) in self.columns(y, lse_y, ids):
            part = _zeros(text, positive) if want_y else None
            kernels.softmax_gradients(
                *(x, text, scale, lse_x, text_lse, own, ids, text_ids, diagonal),
                grad_x=grad_x,
                grad_y=part,
                backend=self.backend,
            )
            if part is not None:
                texts.add(part)
        return grad_x, texts.result() if want_y else None

    def sigmoid(
        self, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, want_x: bool, want_y: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """As `softmax`, in three products: one pass gives the loss's terms and C, which is B times its derivative."""
        loss, total = torch.zeros_like(scale), torch.zeros_like(scale)
        grad_x = _zeros(x, scale) if want_x else None
        texts = self.collector(torch.add)
        for diagonal, (text, text_ids) in self.columns(y, ids):
            part = _zeros(text, scale) if want_y else None
            terms, coefficients = kernels.sigmoid_block(
                x, text, scale, bias, ids, text_ids, diagonal, grad_x=grad_x, grad_y=part, backend=self.backend
            )
            loss, total = loss + terms, total + coefficients
            if part is not None:
                texts.add(part)
        return loss, total, grad_x, texts.result() if want_y else None


class DiscoStrategy(RingStrategy):
    """DisCo-CLIP: all texts at once. Image gradients are complete on the spot; text gradients are reduced.

    The paper all-reduces the inter-GPU gradients of everyone's embeddings; a reduce-scatter returns to each process its
    own, which is all it needs, at half the traffic.
    """

    def columns(self, *tensors: Tensor | None) -> Iterator[tuple[int | None, tuple[Any, ...]]]:
        gathered = tuple(None if t is None else self.processes.gather(t).flatten(0, 1) for t in tensors)
        rows = next(len(t) for t in tensors if t is not None)
        yield self.processes.rank * rows, gathered

    def collector(self, combine: Callable[..., Any]) -> Collector:
        reduce = {torch.add: self.processes.scatter_sum, torch.logaddexp: self.processes.scatter_logaddexp}
        return _Scattered(reduce[combine])


class _Scattered:
    """A collector of one part, [B, ...], of which each process gets back the combination of its own b rows."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        self._reduce = reduce

    def add(self, part: Tensor) -> None:
        self._own = self._reduce(part)

    def result(self) -> Tensor:
        return self._own


class LocalStrategy(DiscoStrategy):
    """OpenCLIP's local loss with gradients through the gather: each process scores its images and its texts.

    Its images against all texts make the image-to-text cross entropy, its texts against all images the other, so
    no statistics are exchanged, but each logit is computed twice. The sigmoid loss has one direction and equals disco.
    """

    def softmax_statistics(
        self, x: Tensor, y: Tensor, scale: Tensor, positive: Tensor, ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        def of_rows(a: Tensor, b: Tensor) -> Tensor:
            ((diagonal, (columns, column_positive, column_ids)),) = self.columns(b, positive, ids)
            return kernels.softmax_statistics(
                a, columns, scale, positive, column_positive, ids, column_ids, diagonal, backend=self.backend
            )[0]

        return of_rows(x, y), of_rows(y, x)

    def softmax_gradients(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        positive: Tensor,
        odds: Tensor,
        ids: Tensor | None,
        want_x: bool,
        want_y: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        def of_rows(
            a: Tensor, b: Tensor, odds_a: Tensor, want_a: bool, want_b: bool
        ) -> tuple[Tensor | None, Tensor | None]:
            ((diagonal, (columns, column_ids)),) = self.columns(b, ids)
            # Of the two exponentials of a coefficient only the rows' belongs to this direction.
            no_columns = torch.full((len(columns),), torch.inf, dtype=positive.dtype, device=positive.device)
            grad_a = _zeros(a, positive) if want_a else None
            grad_b = _zeros(columns, positive) if want_b else None
            kernels.softmax_gradients(
                *(a, columns, scale, positive + F.softplus(odds_a), no_columns, -torch.sigmoid(odds_a)),
                *(ids, column_ids, diagonal),
                grad_x=grad_a,
                grad_y=grad_b,
                backend=self.backend,
            )
            return grad_a, None if grad_b is None else self.processes.scatter_sum(grad_b)

        x_of_images, y_of_images = of_rows(x, y, odds[0], want_x, want_y)
        y_of_texts, x_of_texts = of_rows(y, x, odds[1], want_y, want_x)
        return (
            x_of_images + x_of_texts if x_of_images is not None and x_of_texts is not None else None,
            y_of_images + y_of_texts if y_of_images is not None and y_of_texts is not None else None,
        )


class GatherStrategy(DiscoStrategy):
    """CLIP: everyone gathers everything and computes the whole loss; nothing returns, for everyone has it all.

    Gradients, and the sigmoid loss, are computed of a process's own rows and columns only.
    """

    def softmax_statistics(
        self, x: Tensor, y: Tensor, scale: Tensor, positive: Tensor, ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ((start, (images, texts, positives, all_ids)),) = self.columns(x, y, positive, ids)
        odds_x, odds_y = kernels.softmax_statistics(
            images, texts, scale, positives, positives, all_ids, all_ids, 0, backend=self.backend
        )
        assert start is not None
        own = slice(start, start + len(x))
        return odds_x[own], odds_y[own]

    def softmax_gradients(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        positive: Tensor,
        odds: Tensor,
        ids: Tensor | None,
        want_x: bool,
        want_y: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        lse_x, lse_y = positive + F.softplus(odds)
        own = -torch.sigmoid(odds).sum(0)

        def of_rows(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> Tensor:
            ((diagonal, (columns, column_lse, column_ids)),) = self.columns(b, lse_b, ids)
            grad = _zeros(a, positive)
            kernels.softmax_gradients(
                *(a, columns, scale, lse_a, column_lse, own, ids, column_ids, diagonal),
                grad_x=grad,
                grad_y=None,
                backend=self.backend,
            )
            return grad

        return of_rows(x, lse_x, y, lse_y) if want_x else None, of_rows(y, lse_y, x, lse_x) if want_y else None

    def sigmoid(
        self, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, ids: Tensor | None, want_x: bool, want_y: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        def of_rows(a: Tensor, b: Tensor, want: bool) -> tuple[Tensor, Tensor, Tensor | None]:
            ((diagonal, (columns, column_ids)),) = self.columns(b, ids)
            grad = _zeros(a, scale) if want else None
            terms, total = kernels.sigmoid_block(
                a, columns, scale, bias, ids, column_ids, diagonal, grad_x=grad, grad_y=None, backend=self.backend
            )
            return terms, total, grad

        loss, total, grad_x = of_rows(x, y, want_x)
        return loss, total, grad_x, of_rows(y, x, True)[2] if want_y else None


STRATEGIES = {"ring": RingStrategy, "disco": DiscoStrategy, "local": LocalStrategy, "gather": GatherStrategy}


def select_strategy(name: str, processes: Processes, backend: str, texts: Tensor) -> RingStrategy:
    """The strategy of this name; a ring whose texts and their gradients take up to `GATHERED_BYTES` is disco.

    Small blocks take longer to launch than to compute, and a ring of W processes launches W of them.
    """
    of_features = 16 if texts.dtype == torch.float32 else texts.element_size()  # Triton multiplies six parts of fp32
    gathered = processes.world_size * texts.numel() * (of_features + 4)  # of all processes, with gradients in fp32
    if name == "ring" and processes.world_size > 1 and gathered <= GATHERED_BYTES:
        name = "disco"
    return STRATEGIES[name](processes, backend)


def _zeros(like: Tensor, scalar: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=scalar.dtype, device=like.device)
