"""The model from which a training began, whose embeddings `keep_features` stays near."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ..encoders.adapters import weight_fingerprint
from ..encoders.dual_encoder import DualEncoder
from ..passes.grad_cache import Features


class Start:
    """The start of a training: with ``keeps`` a frozen copy of the model, which is the `Teacher` of ``keep_features``.

    Without ``keeps`` it only has the fingerprint of the frozen weights. What is frozen is not copied, unless FSDP2
    shards the model. Under FSDP2 every process has the whole copy. The model is unwrapped, and has not been trained
    yet.
    """

    width: int | None = None  # that of the student
    options: Mapping[str, Any] = {}  # the run knows the start
    words = "the model before the training"

    def __init__(self, model: nn.Module, accelerator: Accelerator, *, keeps: bool) -> None:
        self._accelerator = accelerator
        self.fingerprint = weight_fingerprint(model, frozen=not keeps)
        self.encoder: DualEncoder | None = None  # the copy of the model
        if not keeps:
            return
        alike = accelerator.distributed_type != DistributedType.FSDP
        shared = {id(p): p for p in model.parameters() if alike and not p.requires_grad}
        self.encoder = DualEncoder(copy.deepcopy(model, shared).requires_grad_(False).eval().to(accelerator.device))

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
