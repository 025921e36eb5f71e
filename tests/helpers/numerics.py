"""Features whose loss is far from zero, relative errors, and the size of the largest tensor of a computation."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def relative_error(value: Tensor, truth: Tensor) -> float:
    """‖value - truth‖ / ‖truth‖ in float64; 0 where both are zero, infinite for NaN."""
    value, truth = value.double(), truth.double()
    assert value.shape == truth.shape, f"{value.shape} for {truth.shape}"
    if torch.equal(value, truth):
        return 0.0
    error = (torch.linalg.vector_norm(value - truth) / torch.linalg.vector_norm(truth)).item()
    return float("inf") if error != error else error


def features(b: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """L2-normalised [b, d] images and texts with cosine about 0.24, so that at scale 100 the loss is far from zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.normalize(torch.randn(b, d, generator=g, dtype=torch.float64), dim=-1)
    noise = torch.nn.functional.normalize(torch.randn(b, d, generator=g, dtype=torch.float64), dim=-1)
    return x.to(dtype), torch.nn.functional.normalize(x + 4 * noise, dim=-1).to(dtype)


def run(
    function: Callable[..., Tensor], x: Tensor, y: Tensor, scale: float, bias: float, dtype: torch.dtype, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """The loss and its gradients by images, texts, scale and bias; zeros for arguments that it does not depend on."""
    leaves = [t.to(dtype).clone().requires_grad_() for t in (x, y, torch.tensor(scale), torch.tensor(bias))]
    loss = function(*leaves, **options)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients, strict=True)]


class LargestTensor(TorchDispatchMode):
    """A context that records the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out


def descend(parameters: Iterable[Tensor], rate: float) -> None:
    """A step of plain gradient descent, after which there are no gradients."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
                parameter.grad = None
