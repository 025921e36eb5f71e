"""The arguments of `InfCLTrainer`: TrainingArguments and the few things that contrastive training adds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from accelerate import PartialState
from transformers import TrainingArguments

from ..kernels import BACKENDS
from ..loss import OBJECTIVES
from ..loss.strategies import STRATEGIES
from .dual_encoder import TOWERS


@dataclass(repr=False)  # TrainingArguments' own hides the token
class InfCLTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` for exact contrastive training.

    ``per_device_train_batch_size × gradient_accumulation_steps × world_size`` pairs are one contrastive batch. The
    micro-batch bounds the memory of activations, the accumulation steps cost time alone.

    Args:
        objective: ``"softmax"`` (CLIP) or ``"sigmoid"`` (SigLIP); None takes what the model was made for.
        strategy: how the processes share the batch; see `hf_infcl.contrastive_loss`.
        backend: what computes the blocks of logits; see `hf_infcl.contrastive_loss`.
        max_logit_scale: the multiplier is kept within [1, max_logit_scale] after each step. None: 100 with the softmax
            objective, as CLIP, and no limits with sigmoid.
        freeze: ``"image"`` or ``"text"`` stops the training of that tower and its projection (LiT, arXiv 2111.07991). A
            frozen tower runs once per window, in eval mode, and the loss computes no gradient for it.
        retain_graphs: of how many micro-batches of a window the autograd graph is kept, so that they need no second
            forward: a number, or ``"auto"`` for as many as GPU memory allows by the measure of the second window.
            Each costs the activations of a micro-batch; the first costs none, so 0 is 1. The gradient is the same.
        offload_window: the window's inputs stay in pinned host memory and are moved one micro-batch ahead, so device
            memory does not grow with gradient_accumulation_steps but by the embeddings.
        resume_with_changes: go on from a checkpoint although the global batch size, the objective, the model or the
            training set are not those of the run that wrote it. The steps are counted on, the data goes on after the
            rows of the epoch that were trained.

    Pickled or copied, the arguments lose their ``hub_token``: Trainer writes a pickle of them beside every model.

    Other defaults than those of TrainingArguments: ``remove_unused_columns`` and ``logging_nan_inf_filter`` are off;
    ``ddp_find_unused_parameters=None`` means False, and so does ``ddp_broadcast_buffers=None`` for a model without
    batch norms.

    Raises:
        ValueError: an option is unknown, or contradicts exact windows.
    """

    objective: str | None = field(
        default=None, metadata={"help": f"{' or '.join(OBJECTIVES)}; by default what the model was made for."}
    )
    strategy: str = field(default="ring", metadata={"help": f"How processes share the batch: {', '.join(STRATEGIES)}."})
    backend: str = field(default="auto", metadata={"help": f"What computes the logits: {', '.join(BACKENDS)}."})
    max_logit_scale: float | None = field(
        default=None, metadata={"help": "Upper limit of logit_scale; by default 100 with softmax, none with sigmoid."}
    )
    freeze: str | None = field(default=None, metadata={"help": f"Tower that does not train: {' or '.join(TOWERS)}."})
    retain_graphs: str = field(
        default="1", metadata={"help": "Micro-batches of a window that keep their graph: a number or 'auto'."}
    )
    offload_window: bool = field(
        default=False, metadata={"help": "Keep the window's inputs in host memory and move them one step ahead."}
    )
    resume_with_changes: bool = field(
        default=False,
        metadata={"help": "Resume from a checkpoint of another global batch, objective, model or training set."},
    )
    # A loss that is not finite stops the training; a log must not paint it over.
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Log the average of earlier losses for one that is not finite."}
    )
    # Raw image and caption columns are needed by the collator, which processes them.
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Drop columns that the model's forward does not name; breaks raw images."}
    )

    def __post_init__(self) -> None:
        for name, value, known in (
            ("objective", self.objective, (None, *OBJECTIVES)),
            ("strategy", self.strategy, STRATEGIES),
            ("backend", self.backend, BACKENDS),
            ("freeze", self.freeze, (None, *TOWERS)),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        if self.max_logit_scale is not None and not self.max_logit_scale >= 1:
            raise ValueError(
                f"max_logit_scale must be at least 1 (it limits the multiplier, not its logarithm), got "
                f"{self.max_logit_scale}. Use {math.inf} for no limit."
            )
        self.retain_graphs = str(self.retain_graphs)
        if self.retain_graphs != "auto" and not self.retain_graphs.isdecimal():
            raise ValueError(f"retain_graphs must be a number from 0 or 'auto', got {self.retain_graphs!r}.")
        for name, default, reason in (
            ("dataloader_drop_last", False, "it would drop rows of evaluations too; training has full windows anyway"),
            ("batch_eval_metrics", False, "metrics are of the whole set, not of batches"),
            ("eval_do_concat_batches", True, "metrics are of the whole set, not of batches"),
            ("label_smoothing_factor", 0.0, "the contrastive loss has no labels"),
        ):
            if (value := getattr(self, name)) != default:
                raise ValueError(f"{name}={value} is not for InfCLTrainer: {reason}. Leave it at {default}.")
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size would change the contrastive batch and with it the objective. Lower "
                "per_device_train_batch_size and raise gradient_accumulation_steps by the same factor instead: the "
                "result is the same."
            )
        if self.ddp_static_graph and self.gradient_accumulation_steps > 1:
            raise ValueError(
                "ddp_static_graph=True does not work with gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: DDP fails in a window's second micro-batch. Leave it off."
            )
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(
                "A contrastive batch must be drawn without regard to lengths: train_sampling_strategy must be 'random' "
                f"or 'sequential', got {self.train_sampling_strategy!r}."
            )
        if self.use_cpu:
            # TrainingArguments form the group without the timeout on CPUs; an existing one they take as it is.
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))
        super().__post_init__()
        if getattr(self.accelerator_config, "split_batches", False):
            raise ValueError("split_batches would divide per_device_train_batch_size by the processes; leave it off.")
        if self.ddp_find_unused_parameters is None:
            # Every parameter that trains takes part in every window; searching costs a traversal and copies.
            self.ddp_find_unused_parameters = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hub_token": None}

    @property
    def global_batch_size(self) -> int:
        """The pairs of one contrastive batch, which is one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
