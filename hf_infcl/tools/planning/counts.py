"""Operations and bytes of a model, as `operations` counts them. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Floating point operations for each pair, and operators that the host launches for all pairs at once."""

    flops: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.launches + other.launches)

    def __mul__(self, times: float) -> Work:
        return Work(times * self.flops, times * self.launches)


NOTHING = Work()


@dataclass(frozen=True)
class Tower:
    """Memory in bytes, and operations, of a tower with its projection."""

    weight_copies: int = 0  # in bf16, which autocast creates in every forward
    graph: float = 0.0  # of each pair: what a forward keeps for its backward, without those copies
    peak: float = 0.0  # of each pair: the maximum during both, without weights, their copies and gradients
    forward: Work = NOTHING
    again: Work = NOTHING  # the forward of the second pass, in which a frozen tower does not run
    backward: Work = NOTHING


@dataclass(frozen=True)
class Counts:
    """The counted parameters, operations and bytes of a model."""

    parameters: int
    trained: int  # of the parameters
    dim: int  # of the embeddings
    pixels: int  # values of one image
    objective: str  # the one that the model was designed for
    image: Tower
    text: Tower
    matrices: tuple[tuple[int, int], ...] = ()  # rows and columns of each matrix that Muon would update

    @property
    def weight_copies(self) -> int:
        return self.image.weight_copies + self.text.weight_copies

    @property
    def graph(self) -> float:
        """`Tower.graph` of both towers together."""
        return self.image.graph + self.text.graph

    @property
    def peak(self) -> float:
        """`Tower.peak` of both towers together: the images run forward before the texts, and backward after them."""
        return max(self.image.peak, self.image.graph + self.text.peak)
