"""The arguments of `InfCLTrainer`: those of TrainingArguments, and a few that contrastive training adds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from ..kernels import BACKENDS
from ..loss import OBJECTIVES
from ..loss.strategies import STRATEGIES
from .dual_encoder import TOWERS
from .preemption import ended_with_launcher

EQUAL_IDS = ("exclude", "positive")  # what pairs with equal ids are to each other


@dataclass(repr=False)  # TrainingArguments' own hides the token
class InfCLTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` for exact contrastive training.

    One contrastive batch, the global batch, has ``per_device_train_batch_size × gradient_accumulation_steps ×
    world_size`` pairs. The micro-batch of ``per_device_train_batch_size`` pairs bounds the memory of activations; more
    accumulation steps cost time, and memory only for embeddings and inputs. With several captions per image, or
    negative captions, these numbers count images, and the text tower sees all texts of a micro-batch at once.

    Args:
        objective: ``"softmax"`` (CLIP) or ``"sigmoid"`` (SigLIP), which needs a model with a logit_bias. None is the
            objective that the model was made for.
        strategy: how the processes share the batch; see `hf_infcl.contrastive_loss`.
        backend: which kernels compute the loss; see `hf_infcl.contrastive_loss`.
        equal_ids: how pairs with equal pair ids count for each other. ``"exclude"``: neither as positives nor as
            negatives. ``"positive"``: as positives, like the captions of one image; with labels as pair ids this is
            UniCL's loss (arXiv 2204.03610). None is ``"positive"`` if the training set draws several captions per
            image, which needs it, and ``"exclude"`` otherwise. It also applies to the loss of an evaluation.
        max_logit_scale: after each step logit_scale, the multiplier, is clamped to [1, max_logit_scale]. None is 100
            with the softmax objective, as in CLIP, and no limit with the sigmoid objective.
        logit_scale_learning_rate: the learning rate of logit_scale and logit_bias, on the same schedule. None is
            ``learning_rate``.
        learning_rate_batch_size: the global batch size that ``learning_rate`` was chosen for. Training then takes
            ``learning_rate × global batch size / learning_rate_batch_size``, the linear rule (arXiv 1706.02677).
        freeze: ``"image"`` or ``"text"`` freezes that tower and its projection (LiT, arXiv 2111.07991). A frozen tower
            runs once per window, in eval mode, and the loss computes no gradient for its embeddings.
        cache_features: a folder for the outputs of a frozen image tower. They are computed once for the training set,
            an `ImageTextDataset` without augmentation, and the training then runs the text tower alone. The folder may
            serve many runs: the tower's weights, the processor and the data decide which features are read.
        retain_graphs: the number of micro-batches of a window whose autograd graph is kept, which saves their second
            forward. ``"auto"`` keeps as many as fit into GPU memory, measured in the second window. Each takes the
            activations of one micro-batch. One is needed anyway, so 0 means 1. The gradient does not depend on it.
        offload_inputs: keep the inputs of a window in pinned host memory and copy them to the device one micro-batch
            ahead. Device memory then grows with gradient_accumulation_steps only by the embeddings.
        resume_with_changes: go on from a checkpoint although the global batch size, the objective, the model or the
            training set are not those of the run that wrote it. The count of steps goes on, and the epoch continues
            after the rows that were already trained. An `ImageTextDataset` is recognised by its captions, an
            `ImageTextStream` by its shards, other data sets by their class, length and order alone.
        skip_nonfinite: at most this many windows in a row are skipped if their embeddings, loss or gradient are not
            finite; one more ends the training, as the first does by default. A skipped window counts as a step, but
            changes no weight, no buffer, no optimizer and no learning rate. The log counts ``skipped_windows``; in its
            average of the loss, the loss of the window before stands for that of a skipped one.
        divergence_factor: the loss has exploded if that of a window is more than this many times the mean of the 20
            windows before, 3 for instance. None compares nothing.
        on_divergence: ``"stop"`` ends the training with an error when the loss has exploded. ``"roll_back"`` takes
            weights, optimizer and learning rate from the last checkpoint and goes on with the data that follows; if the
            loss explodes again before the next checkpoint, the training ends.

    Pickled or copied, the arguments lose their ``hub_token``: Trainer writes a pickle of them beside every model.

    Defaults that differ from those of TrainingArguments: ``remove_unused_columns`` and ``logging_nan_inf_filter`` are
    off; ``ddp_find_unused_parameters=None`` means False; ``ddp_broadcast_buffers=None`` means False for models without
    batch norms.

    Raises:
        ValueError: an option has an unknown value, or would make the gradient of a window inexact.
    """

    objective: str | None = field(
        default=None,
        metadata={"help": f"The loss: {' or '.join(OBJECTIVES)}. By default the one that the model was made for."},
    )
    strategy: str = field(
        default="ring", metadata={"help": f"How the processes share the batch: {', '.join(STRATEGIES)}."}
    )
    backend: str = field(default="auto", metadata={"help": f"Which kernels compute the loss: {', '.join(BACKENDS)}."})
    equal_ids: str | None = field(
        default=None,
        metadata={
            "help": "How pairs with equal pair ids count for each other: 'exclude' (neither positive nor negative) or "
            "'positive'. By default 'positive' with several captions per image, else 'exclude'."
        },
    )
    max_logit_scale: float | None = field(
        default=None, metadata={"help": "Upper limit of logit_scale; by default 100 with softmax, none with sigmoid."}
    )
    logit_scale_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of logit_scale and logit_bias; by default learning_rate."}
    )
    learning_rate_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Global batch size that learning_rate was chosen for. It is scaled to that of the run (linear "
            "rule)."
        },
    )
    freeze: str | None = field(
        default=None, metadata={"help": f"Tower to freeze, with its projection: {' or '.join(TOWERS)}."}
    )
    cache_features: str | None = field(
        default=None,
        metadata={
            "help": "Folder for the outputs of the frozen image tower (freeze=image). They are computed once, and the "
            "training reads them in place of the images, which must not be augmented."
        },
    )
    retain_graphs: str = field(
        default="1",
        metadata={
            "help": "Number of micro-batches of a window whose autograd graph is kept, which saves their second "
            "forward; 'auto' keeps as many as fit into GPU memory."
        },
    )
    offload_inputs: bool = field(
        default=False,
        metadata={"help": "Keep a window's inputs in host memory and copy them to the GPU one micro-batch ahead."},
    )
    resume_with_changes: bool = field(
        default=False,
        metadata={"help": "Resume from a checkpoint of another global batch, objective, model or training set."},
    )
    skip_nonfinite: int = field(
        default=0,
        metadata={
            "help": "Skip up to this many windows in a row if their embeddings, loss or gradient are not finite."
        },
    )
    divergence_factor: float | None = field(
        default=None,
        metadata={
            "help": "The loss has exploded if it is more than this many times the mean of the 20 windows before; by "
            "default it is not compared."
        },
    )
    on_divergence: str = field(
        default="stop",
        metadata={
            "help": "When the loss has exploded: 'stop' with an error, or 'roll_back' to the last checkpoint and go on "
            "with the next data."
        },
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "A checkpoint's folder; 'true', the newest complete one in output_dir; 'auto', the same, or a new "
            "start if there is none; or 'last-checkpoint', which --hub_strategy checkpoint has pushed."
        },
    )
    # A loss that is not finite stops the training, so it must appear in the log as it is.
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Log the average of earlier losses in place of one that is not finite."}
    )
    # The collator needs the raw columns of images and captions.
    remove_unused_columns: bool = field(
        default=False,
        metadata={"help": "Drop the columns that are no arguments of the model's forward, raw images included."},
    )

    def __post_init__(self) -> None:
        self.check()
        with ended_with_launcher():
            if self.use_cpu:
                # TrainingArguments form the group without the timeout on CPUs; they use an existing group as it is.
                PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))
            super().__post_init__()
        if getattr(self.accelerator_config, "split_batches", False):
            raise ValueError(
                "accelerator_config's split_batches=True would divide per_device_train_batch_size by the number of "
                "processes. Leave it off."
            )
        if not getattr(self.accelerator_config, "even_batches", True):
            raise ValueError(
                "accelerator_config's even_batches=False would give the processes unequal numbers of batches in "
                "evaluations, where they wait for each other. Leave it at True: rows that only fill a batch are not "
                "counted."
            )
        if self.ddp_find_unused_parameters is None:
            # Every trained parameter takes part in every window; searching for unused ones costs time and copies.
            self.ddp_find_unused_parameters = False

    def check(self) -> None:
        """Raises a ValueError for values that InfCLTrainer cannot train with.

        A new instance calls it; `InfCLTrainer` calls it again after a hyperparameter search has changed values.
        """
        self._check_choices()
        self._check_numbers()
        self._check_combinations()
        self._check_support()

    def _check_choices(self) -> None:
        for name, value, known in (
            ("objective", self.objective, (None, *OBJECTIVES)),
            ("strategy", self.strategy, STRATEGIES),
            ("backend", self.backend, BACKENDS),
            ("equal_ids", self.equal_ids, (None, *EQUAL_IDS)),
            ("freeze", self.freeze, (None, *TOWERS)),
            ("on_divergence", self.on_divergence, ("stop", "roll_back")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(
                "A contrastive batch must be drawn without regard to lengths: train_sampling_strategy must be 'random' "
                f"or 'sequential', got {self.train_sampling_strategy!r}."
            )

    def _check_numbers(self) -> None:
        if self.max_logit_scale is not None and not self.max_logit_scale >= 1:
            raise ValueError(
                f"max_logit_scale must be at least 1 (it limits the multiplier, not its logarithm), got "
                f"{self.max_logit_scale}. Use {math.inf} for no limit."
            )
        if self.logit_scale_learning_rate is not None and not 0 <= self.logit_scale_learning_rate < math.inf:
            raise ValueError(
                f"logit_scale_learning_rate must be finite and at least 0, got {self.logit_scale_learning_rate}."
            )
        if self.learning_rate_batch_size is not None and self.learning_rate_batch_size < 1:
            raise ValueError(
                f"learning_rate_batch_size is a number of pairs, at least 1, got {self.learning_rate_batch_size}."
            )
        self.retain_graphs = str(self.retain_graphs)
        if self.retain_graphs != "auto" and not self.retain_graphs.isdecimal():
            raise ValueError(f"retain_graphs must be 'auto' or an integer from 0 on, got {self.retain_graphs!r}.")
        for name, least in (
            ("per_device_train_batch_size", 1),
            ("per_device_eval_batch_size", 1),
            ("gradient_accumulation_steps", 1),
            ("dataloader_num_workers", 0),
            ("ddp_timeout", 1),
            ("skip_nonfinite", 0),
        ):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        if self.dataloader_prefetch_factor is not None and self.dataloader_prefetch_factor < 1:
            raise ValueError(f"dataloader_prefetch_factor must be at least 1, got {self.dataloader_prefetch_factor}.")
        for name in ("learning_rate", "weight_decay", "adam_epsilon"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value}.")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 0 and less than 1, got {value}.")
        if self.max_grad_norm is not None and not self.max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm must be at least 0, where 0 clips nothing, got {self.max_grad_norm}.")
        if self.divergence_factor is not None and not self.divergence_factor > 1:
            raise ValueError(f"divergence_factor must be more than 1, got {self.divergence_factor}.")

    def _check_combinations(self) -> None:
        if self.max_steps <= 0 and not 0 < self.num_train_epochs < math.inf:
            raise ValueError(
                "num_train_epochs or max_steps must be more than 0, or nothing is trained, got "
                f"{self.num_train_epochs} and {self.max_steps}."
            )
        for strategy, steps in (
            ("save_strategy", "save_steps"),
            ("eval_strategy", "eval_steps"),
            ("logging_strategy", "logging_steps"),
        ):
            interval = getattr(self, steps)
            if getattr(self, strategy) == "steps" and interval is not None and not interval > 0:
                raise ValueError(f"{steps} must be more than 0 with {strategy}='steps', got {interval}.")
        if self.on_divergence == "roll_back":
            if self.divergence_factor is None:
                raise ValueError("on_divergence='roll_back' needs a divergence_factor, 3 for instance.")
            if self.save_strategy == "no" or self.save_only_model:
                raise ValueError(
                    "on_divergence='roll_back' needs checkpoints with the optimizer: choose a save_strategy other than "
                    "'no', and leave save_only_model off."
                )
        if self.ddp_static_graph and self.gradient_accumulation_steps > 1:
            raise ValueError(
                "ddp_static_graph=True does not work with gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: DDP fails in a window's second micro-batch. Leave it off."
            )

    def _check_support(self) -> None:
        """Raises a ValueError for options of TrainingArguments that InfCLTrainer does not support."""
        for name, default, reason in (
            ("dataloader_drop_last", False, "it would drop rows of evaluations; training has full windows anyway"),
            ("batch_eval_metrics", False, "metrics are those of the whole set, not of batches"),
            ("eval_do_concat_batches", True, "metrics are those of the whole set, not of batches"),
            ("enable_jit_checkpoint", False, "it saves a checkpoint at SIGTERM and SIGUSR1 by itself"),
            ("label_smoothing_factor", 0.0, "the contrastive loss has no labels"),
            ("neftune_noise_alpha", None, "it adds noise to the embeddings of language models"),
        ):
            if (value := getattr(self, name)) != default:
                raise ValueError(f"InfCLTrainer does not support {name}={value}: {reason}. Leave it at {default}.")
        if (optimizer := getattr(self.optim, "value", self.optim)) in ("lomo", "adalomo"):
            raise ValueError(
                f"optim={optimizer!r} changes the weights within every backward, "
                "that is between the micro-batches of a window, so that their gradients would not add up to that of "
                "the global batch. Use another optimizer, such as 'adamw_torch_fused'."
            )
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size would change the contrastive batch and with it the objective. Lower "
                "per_device_train_batch_size and raise gradient_accumulation_steps by the same factor instead: the "
                "result is the same."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hub_token": None}

    @property
    def device(self) -> torch.device:
        """The device of this process, without an index if it is a CPU."""
        device: torch.device = super().device
        # transformers before 5.18 loads the optimizer's state to this device, which torch cannot do for "cpu:0".
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def global_batch_size(self) -> int:
        """The number of pairs in one contrastive batch, which is that of one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def learning_rate_factor(self) -> float:
        """The factor of ``learning_rate``, see ``learning_rate_batch_size``."""
        return 1.0 if self.learning_rate_batch_size is None else self.global_batch_size / self.learning_rate_batch_size
