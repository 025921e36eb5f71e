"""What DDP and FSDP2 need so that a window of several micro-batches has one loss and one exact gradient."""

import contextlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel import DistributedDataParallel

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def without_compiler(model: nn.Module) -> Any:
    """The module from which `torch.compile` created ``model``, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)


def hooked(modules: Iterable[nn.Module]) -> bool:
    """Whether functions are to be called around the forward or the backward of any of the modules."""
    return _has_any_global_hook() or any(vars(one)[name] for one in modules for name in _HOOKS)


class Wrapper:
    """A model, as the training loop calls it, without a wrapper. Subclasses for wrappers override what they need."""

    synchronises = False  # whether the last backward of a window exchanges gradients

    def __init__(self, model: nn.Module) -> None:
        self.model = without_compiler(model)
        # Whether `torch.compile` compiles the model or a part of it.
        self.is_compiled = self.model is not model or any(one._compiled_call_impl for one in model.modules())
        self.unwrapped = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    # ---- Torch goes through all modules for each of these, which takes the host a millisecond ----

    @cached_property
    def modules(self) -> list[nn.Module]:
        """The model's modules, in its order."""
        return list(self.model.modules())

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model, in its order."""
        return list(dict.fromkeys(p for one in self.modules for p in one._parameters.values() if p is not None))

    def buffers(self) -> list[Tensor]:
        """The buffers of the model, in its order."""
        return list(dict.fromkeys(b for one in self.modules for b in one._buffers.values() if b is not None))

    def train(self) -> None:
        """Sets the model to training mode, unless all of it is."""
        if not all(one.training for one in self.modules):
            self.model.train()

    # ---- What wrappers exchange ----

    def most_graphs(self, micro_batches: int) -> int:
        """The maximum number of graphs that a window of this many micro-batches can keep from its first pass.

        A wrapper prepares the exchange of gradients in the preceding forward, so the last micro-batch must be encoded
        in the second pass, unless it is the only one.
        """
        return max(1, micro_batches - 1) if self.synchronises else micro_batches

    def begin_window(self) -> None:
        """Called before the first forward of a window."""

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """A context for a micro-batch's forward and backward; gradients are exchanged for the ``last`` of a window."""
        return contextlib.nullcontext()

    def check_gradients(self) -> None:
        """Called after the first window.

        Raises:
            ValueError: trained parameters got no gradient although the wrapper waits for one.
        """


class DDP(Wrapper):
    """A model in `torch.nn.parallel.DistributedDataParallel`.

    If it is created in a `no_sync`, as in an accumulation, it exchanges nothing, also in a backward after that context.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.synchronises = self.model.require_backward_grad_sync

    def begin_window(self) -> None:
        if not self.synchronises:
            return
        # DDP would run both of these collectives in the next forward. A process that fails before that forward would
        # leave the others waiting there. The first one only has an effect once, after the first backward. The second
        # one must come before `CachedWindow` saves the state of the buffers.
        self.model.reducer._rebuild_buckets()
        if self.model.will_sync_module_buffers():
            self.model._sync_buffers()

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last and self.synchronises else self.model.no_sync()

    def check_gradients(self) -> None:
        if self.model.find_unused_parameters or self.model.static_graph:
            return
        if unused := [n for n, p in self.unwrapped.named_parameters() if p.requires_grad and p.grad is None]:
            names = ", ".join(unused[:10]) + (" ..." if unused[10:] else "")
            raise ValueError(
                f"No embedding depends on {names}, but DDP waits for their gradients before it averages the others. "
                "Freeze unused parameters (requires_grad_(False)), or pass ddp_find_unused_parameters=True."
            )


class FSDP2(Wrapper):
    """A model sharded by `torch.distributed.fsdp.fully_shard`."""

    synchronises = True

    @contextlib.contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)


def make_wrapper(model: nn.Module, *, without_fsdp: str = "") -> Wrapper:
    """The `Wrapper` for ``model`` as the training loop calls it.

    Raises:
        ValueError: the model is in another wrapper than DDP, and ``without_fsdp`` names what needs that one or none.
    """
    module = without_compiler(model)
    if isinstance(module, DistributedDataParallel):
        return DDP(model)
    if without_fsdp and (isinstance(module, FSDPModule) or isinstance(getattr(module, "module", None), nn.Module)):
        raise ValueError(
            f"{without_fsdp} needs an unwrapped model or one in DistributedDataParallel, got a "
            f"{type(module).__name__}. FSDP2 needs InfCLTrainer."
        )
    return FSDP2(model) if isinstance(module, FSDPModule) else Wrapper(model)
