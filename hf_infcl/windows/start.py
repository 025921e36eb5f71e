"""The weights from which a training began, and what keeps a model near them while it is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..encoders.adapters import LORA, weight_fingerprint
from ..encoders.dual_encoder import DualEncoder
from ..passes.grad_cache import Features


class Start:
    """The start of a training: a frozen copy of the model, if it ``embeds``, or else copies of its trained weights.

    Without ``keeps``, the training does not stay near it, and it only has the fingerprint of the frozen weights.
    What is frozen is not copied, unless FSDP2 shards the model. Under FSDP2 every process has the whole copy. The model
    is unwrapped, and has not been trained yet. A copy that ``embeds`` is the `Teacher` of ``keep_features``.
    """

    width: int | None = None  # that of the student
    options: Mapping[str, Any] = {}  # the run knows the start
    inputs = None
    words = "the model before the training"

    def __init__(self, model: nn.Module, accelerator: Accelerator, *, embeds: bool, keeps: bool = True) -> None:
        self._accelerator = accelerator
        self.fingerprint = weight_fingerprint(model, frozen=not keeps)
        self.encoder: DualEncoder | None = None  # the copy of the model, if its embeddings are needed
        if not keeps:
            return
        if not embeds:
            self._weights = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
            return
        alike = accelerator.distributed_type != DistributedType.FSDP
        shared = {id(p): p for p in model.parameters() if alike and not p.requires_grad}
        kept = copy.deepcopy(model, shared).requires_grad_(False).eval().to(accelerator.device)
        self.encoder = DualEncoder(kept)
        self._weights = {n: p.detach() for n, p in kept.named_parameters()}

    @property
    def model(self) -> nn.Module:
        """The frozen copy of the model."""
        assert self.encoder is not None
        return self.encoder.model

    def embed(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, Any]) -> Features:
        """The embeddings of a micro-batch at the start, [images, D] and [texts, D], without a graph.

        They may be in the inputs (``cache_features``). The copies of frozen towers do not run: ``frozen_outputs`` are
        what the model's have returned.
        """
        if "start_images" in inputs:
            return inputs["start_images"], inputs["start_texts"]
        assert self.encoder is not None
        # A forward writes the projection into the output that it gets, which the second pass needs as it is.
        outputs = {name: type(output)(**output) for name, output in frozen_outputs.items()}
        with torch.no_grad(), self._accelerator.autocast():
            return self.encoder.embed(self.encoder.model, inputs, outputs)

    def known(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError  # it knows all pairs

    def pull(
        self, optimizer: torch.optim.Optimizer, model: Callable[[], nn.Module], names: Collection[str], strength: float
    ) -> None:
        """Lets each step of an optimizer begin with p ← p − rate · strength · (p − start), as decoupled weight decay.

        The rate is that of the parameter's group at that step.

        Raises:
            ValueError: the rate of a group times the strength is 1 or more.
        """
        largest = max(float(group["lr"]) for group in optimizer.param_groups)
        if largest * strength >= 1:
            raise ValueError(
                f"keep_weights={strength:g} times the learning rate {largest:g} is {largest * strength:g}, so each "
                "step would return to the start or beyond. The product must be less than 1; 0.01 is strong."
            )
        starts: dict[Tensor, Tensor] = {}

        @torch.no_grad()
        def pull(stepping: torch.optim.Optimizer, *_: object) -> None:
            if not starts:
                trained = {n: p for n, p in model().named_parameters() if n in names}
                starts.update({p: self._start_of_parameter(name, p) for name, p in trained.items()})
            for group in stepping.param_groups:
                pulled = [p for p in group["params"] if p in starts and p.grad is not None]
                if pulled:
                    ends = [starts[p] for p in pulled]
                    torch._foreach_lerp_([_local(p) for p in pulled], ends, float(group["lr"]) * strength)

        optimizer.register_step_pre_hook(pull)

    def _start_of_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """The start of a parameter; of one that FSDP2 shards, this process's part."""
        if LORA in name:
            return torch.zeros_like(_local(parameter))
        start = self._weights[name].to(parameter.device)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            start = distribute_tensor(start, mesh, placements, src_data_rank=None).to_local()
        return start


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
