"""The arguments of `InfCLTrainer`: those of TrainingArguments, and a few that contrastive training adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from ..encoders.dual_encoder import TOWERS
from ..kernels import BACKENDS
from ..loss import OBJECTIVES
from ..loss.strategies import STRATEGIES
from ..processes.preemption import ended_with_launcher
from .batch_schedule import BatchSchedule, check_batch_schedule
from .combinations import SCHEDULES_BY_METRIC, check_accelerator, check_combinations, check_support, check_texts_at_once
from .image_sizes import ImageSizes, check_image_sizes
from .metric_sums import greater_is_better
from .muon_options import check_muon
from .ranges import RANGES, check_number

SAVE_FORMATS = ("transformers", "open_clip")
EQUAL_IDS = ("exclude", "positive")  # what pairs with equal ids are to each other

# Options of the learning rate that an optimizer from elsewhere does not know.
_RATES_OF_TOWERS = ("image_learning_rate", "text_learning_rate", "layer_decay")
RATES = ("logit_scale_learning_rate", "learning_rate_batch_size", *_RATES_OF_TOWERS)


@dataclass(repr=False)  # TrainingArguments' own hides the token
class InfCLTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` for exact contrastive training.

    One contrastive batch, the global batch, has ``per_device_train_batch_size × gradient_accumulation_steps ×
    world_size`` pairs, or those of ``global_batch_schedule``. The micro-batch of ``per_device_train_batch_size`` pairs
    determines the activation memory. More accumulation steps take more time, but additional memory only for embeddings
    and inputs. With several captions per image, or negative captions, these numbers count images, and the text tower
    processes all texts of a micro-batch at once.

    The ``help`` of each field describes it; the guide, hf_infcl/training/README.md, has all in one table. A short help
    of the command shows its first sentence.

    Defaults that differ from TrainingArguments: ``remove_unused_columns`` and ``logging_nan_inf_filter`` are off;
    ``ddp_find_unused_parameters=None`` means False; ``ddp_broadcast_buffers=None`` means False for models without batch
    norms; ``greater_is_better=None`` means what the table of metrics says.

    Raises:
        ValueError: an option has an unknown value, or would make the gradient of a window inexact.
    """

    objective: str | None = field(
        default=None,
        metadata={
            "help": "The loss: softmax (InfoNCE, as CLIP) or sigmoid (as SigLIP), which needs a model with a "
            "logit_bias. Defaults to the one that the model was designed for."
        },
    )
    strategy: str = field(
        default="ring", metadata={"help": "How the processes share the batch: ring, disco, local or gather."}
    )
    backend: str = field(default="auto", metadata={"help": "Which kernels compute the loss: auto, triton or torch."})
    equal_ids: str | None = field(
        default=None,
        metadata={
            "help": "The role of pairs with equal pair ids: 'exclude' (neither positives nor negatives of each other) "
            "or 'positive'. Defaults to 'positive' with several captions per image, which require it, else to "
            "'exclude'. It also applies to the evaluation loss."
        },
    )
    max_logit_scale: float | None = field(
        default=None,
        metadata={
            "help": "Upper limit of logit_scale, the multiplier of the cosines, after each step. Defaults to 100 with "
            "softmax, as in CLIP, and to none with sigmoid. The lower limit is then 1."
        },
    )
    logit_scale_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of logit_scale and logit_bias, on the same schedule. Defaults to learning_rate."
        },
    )
    learning_rate_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Global batch size for which learning_rate was chosen. The training uses learning_rate × global "
            "batch size / this number (the linear rule, arXiv 1706.02677)."
        },
    )
    global_batch_schedule: list[str] | None = field(
        default=None,
        metadata={
            "help": "A batch that grows, such as '256:0.25 512:0.25 1024'. These are the pairs of a global batch with "
            "their shares of the samples; the last one gets the rest. They replace gradient_accumulation_steps; "
            "micro-batches keep per_device_train_batch_size, or are all pairs of a process where these are fewer. "
            "Warm-up and decay run over samples, and learning_rate_batch_size applies to each batch."
        },
    )
    image_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of the image tower and its projection, on the same schedule and scaled with the "
            "batch like learning_rate, which is the default. The rate of Muon's matrices changes in proportion."
        },
    )
    text_learning_rate: float | None = field(
        default=None, metadata={"help": "The same for the text tower and its projection."}
    )
    layer_decay: float | None = field(
        default=None,
        metadata={
            "help": "Factor of the learning rate from each layer of a tower to the one below it, for example 0.75. "
            "Heads, projections and logit_scale train at the full rate, the last of L layers at this factor, and the "
            "embeddings at its power L + 1."
        },
    )
    no_decay_parameters: list[str] | None = field(
        default=None,
        metadata={
            "help": "Regular expressions, found in the names of parameters without weight decay, for example "
            "vision_model for a pretrained tower. Vectors and scalars never decay."
        },
    )
    optimizer: str | None = field(
        default=None,
        metadata={
            "help": "'muon': Muon (arXiv 2502.16982) for the matrices of the layers and projections, and the AdamW of "
            "optim for the rest. For training from random weights. By default optim updates all parameters."
        },
    )
    muon_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of Muon's matrices, on the same schedule and scaled with the batch like "
            "learning_rate. Defaults to four times learning_rate."
        },
    )
    muon_parameters: list[str] | None = field(
        default=None,
        metadata={
            "help": "With optimizer=muon: regular expressions, found in the names of further parameters for Muon."
        },
    )
    adamw_parameters: list[str] | None = field(
        default=None,
        metadata={
            "help": "With optimizer=muon: regular expressions, found in the names of parameters to leave to AdamW."
        },
    )
    ema_decay: float | None = field(
        default=None,
        metadata={
            "help": "Evaluate and save an exponential moving average of the trained weights with this decay, such as "
            "0.999, in place of the last ones. It is smaller in the first steps, min(decay, (1 + n) / (10 + n)). The "
            "average takes the memory of the weights beside Adam's moments, in whose file checkpoints keep the last "
            "weights, so that a resumed training continues to the bit. Running statistics of batch norms stay the "
            "last."
        },
    )
    ema_device: str | None = field(
        default=None,
        metadata={
            "help": "Where the average of ema_decay is kept: 'cpu' for host memory, which takes two copies of the "
            "weights per step, to the same bits. Defaults to the memory of the weights."
        },
    )
    freeze: str | None = field(
        default=None,
        metadata={
            "help": "Tower to freeze, with its projection: image or text (LiT, arXiv 2111.07991). It runs once per "
            "step, in evaluation mode."
        },
    )
    freeze_layers: int | None = field(
        default=None,
        metadata={
            "help": "Number of layers to freeze at the beginning of each tower, with the embeddings before them; 0 for "
            "these alone. They keep no graph, and frozen layers run in evaluation mode."
        },
    )
    image_size: int | None = field(
        default=None,
        metadata={
            "help": "Height and width of the images in pixels, for example 336. The position embeddings of the model "
            "are interpolated to this size, which is saved with the model and its processor. Defaults to the size of "
            "the model."
        },
    )
    image_size_schedule: list[str] | None = field(
        default=None,
        metadata={
            "help": "Smaller images first, for example '112:0.5 160:0.4 224': sizes with their shares of the steps, "
            "then the size of the model, which gets the rest and is that of evaluations (CLIPA, arXiv 2305.07017). "
            "Positions are interpolated in each forward, so what is saved is always of the full size."
        },
    )
    patch_dropout: float | None = field(
        default=None,
        metadata={
            "help": "Share of the patches of each image that is left out at random, for example 0.5 (FLIP, arXiv "
            "2212.00794). Evaluations see all patches."
        },
    )
    full_tokens_last: float | None = field(
        default=None,
        metadata={"help": "With patch_dropout: share of the steps, at the end, that see all patches."},
    )
    max_text_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Cut training captions to this many tokens, special ones included. Evaluations read all. More "
            "tokens than the tokenizer's limit, up to the positions of the model, raise that limit, which is saved, "
            "and evaluations read as many."
        },
    )
    keep_features: float | None = field(
        default=None,
        metadata={
            "help": "Weight β of the squared distance between the normalised embeddings of each pair and those of the "
            "model before the training. Its mean over the batch, summed over both towers, is minimised with the loss. "
            "A frozen copy of the model runs once per step."
        },
    )
    keep_weights: float | None = field(
        default=None,
        metadata={
            "help": "Strength λ of a pull to the weights before the training, in place of weight decay: each step "
            "subtracts learning rate × λ × (weight − start) from the weights that would decay. Adapters decay to zero."
        },
    )
    cache_features: str | None = field(
        default=None,
        metadata={
            "help": "Folder for what is computed once for all epochs, from images that are not augmented: the outputs "
            "of the frozen image tower (freeze=image), read instead of the images, and the embeddings of the start "
            "(keep_features). Many runs can share the folder."
        },
    )
    replay_share: float | None = field(
        default=None,
        metadata={
            "help": "With old pairs to replay: their share of every global batch, rounded to whole pairs. Defaults to "
            "0.5."
        },
    )
    replay_as: str | None = field(
        default=None,
        metadata={
            "help": "With old pairs to replay: 'negatives', the default, if old and new pairs are each other's "
            "negatives; 'own' if both are contrasted among themselves, in two losses weighted by their pairs."
        },
    )
    retain_graphs: str = field(
        default="1",
        metadata={
            "help": "Number of micro-batches of a step whose autograd graph is kept, which saves their second forward. "
            "Each takes the activation memory of a micro-batch. 'auto' keeps as many as fit into the GPU memory that "
            "the second step leaves free. The gradient stays the same, and 0 means 1, which is needed in any case."
        },
    )
    texts_at_once: int = field(
        default=1,
        metadata={"help": "Micro-batches whose texts are encoded at once. More of them save time and take memory."},
    )
    offload_inputs: bool = field(
        default=False,
        metadata={
            "help": "Keep the inputs of a step in pinned host memory and copy them to the GPU one micro-batch ahead. "
            "GPU memory then grows with gradient_accumulation_steps only by the embeddings."
        },
    )
    save_formats: list[str] = field(
        default_factory=lambda: ["transformers"],
        metadata={
            "help": "Formats of the saved models: transformers, and also open_clip for OpenCLIP's files beside those, "
            "in checkpoints too."
        },
    )
    resume_with_changes: bool = field(
        default=False,
        metadata={
            "help": "Allow resuming with another global batch, objective, model or training set, or with other options "
            "of the optimizer, the schedule (also its length) or the data. The log names the changes, which the loaded "
            "optimizer and schedule then use; the class of the optimizer cannot change. The count of steps goes on, "
            "and the epoch after the rows that were already trained."
        },
    )
    gradient_noise_steps: int | None = field(
        default=None,
        metadata={
            "help": "Log gradient_noise_scale from one of so many steps. These are the pairs of a global batch beyond "
            "which more of them add little to its direction (arXiv 1812.06162). Such a step needs two micro-batches."
        },
    )
    skip_nonfinite: int = field(
        default=0,
        metadata={
            "help": "Skip up to this many steps in a row if their embeddings, loss or gradient are not finite. One "
            "more ends the training."
        },
    )
    divergence_factor: float | None = field(
        default=None,
        metadata={
            "help": "The loss has exploded if it exceeds this factor, for example 3, times the mean of the previous "
            "20 steps. By default the loss is not checked."
        },
    )
    on_divergence: str = field(
        default="stop",
        metadata={
            "help": "What to do when the loss has exploded: 'stop' with an error, or 'roll_back' to the last "
            "checkpoint and continue with the next data. If it explodes again before the next checkpoint, the training "
            "ends."
        },
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "The folder of a checkpoint; 'true' for the newest complete one in output_dir; 'auto' for the "
            "same, or a new start if there is none; 'last-checkpoint' for one pushed with --hub_strategy checkpoint."
        },
    )
    metric_for_best_model: str | None = field(
        default=None,
        metadata={
            "help": "Metric that chooses the best checkpoint, ends the training (early_stopping_patience) or lowers "
            "the learning rate, for example pairs_loss. It may be a weighted sum, with spaces around its signs and a "
            "minus before losses: '0.5*pairs_image_retrieval_recall@1 - guard1_old_loss'."
        },
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "End the training when metric_for_best_model has not improved in this many evaluations in a row. "
            "By default, the training runs to its end."
        },
    )
    # A loss that is not finite stops the training, so the log must show it unfiltered.
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Log the average of earlier losses instead of one that is not finite."}
    )
    # The collator needs the raw columns of images and captions.
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Drop columns that neither the model's forward nor the loss uses."}
    )

    def __post_init__(self) -> None:
        self.check()
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = greater_is_better(self.metric_for_best_model)
        with ended_with_launcher():
            if self.use_cpu:
                # On CPUs, TrainingArguments would create the group without the timeout. It reuses an existing group.
                PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))
            super().__post_init__()
        if self.lr_scheduler_type in SCHEDULES_BY_METRIC and not isinstance(self.lr_scheduler_kwargs, str):
            # Otherwise they would take a metric that rises, such as an accuracy, for one that gets worse.
            mode = "max" if self.greater_is_better else "min"
            self.lr_scheduler_kwargs = {"mode": mode, **(self.lr_scheduler_kwargs or {})}
        check_accelerator(self)
        check_texts_at_once(self)
        accelerator: Any = self.accelerator_config
        if self.dataloader_pin_memory:
            accelerator.non_blocking = True  # the host prepares the next batch while the last one is computed
        if self.ddp_find_unused_parameters is None:
            # Every window uses every trained parameter; searching for unused ones costs time and copies.
            self.ddp_find_unused_parameters = False

    def check(self) -> None:
        """Raises a ValueError for values that InfCLTrainer cannot train with.

        Construction calls it; `InfCLTrainer` calls it again after a hyperparameter search has changed values.
        """
        self._check_choices()
        self._check_numbers()
        check_combinations(self)
        check_support(self)
        check_muon(self)
        check_image_sizes(self)
        check_batch_schedule(self)

    def _check_choices(self) -> None:
        for name, value, known in (
            ("objective", self.objective, (None, *OBJECTIVES)),
            ("strategy", self.strategy, STRATEGIES),
            ("backend", self.backend, BACKENDS),
            ("equal_ids", self.equal_ids, (None, *EQUAL_IDS)),
            ("optimizer", self.optimizer, (None, "muon")),
            ("ema_device", self.ema_device, (None, "cpu")),
            ("freeze", self.freeze, (None, *TOWERS)),
            ("replay_as", self.replay_as, (None, "negatives", "own")),
            ("on_divergence", self.on_divergence, ("stop", "roll_back")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        if "transformers" not in self.save_formats or set(self.save_formats) - set(SAVE_FORMATS):
            raise ValueError(
                "save_formats must be transformers, or transformers and open_clip, got "
                f"{' '.join(self.save_formats) or 'nothing'}: a training resumes from transformers' files."
            )
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(
                "train_sampling_strategy must be 'random' or 'sequential', because a contrastive batch must not be "
                f"selected by length, got {self.train_sampling_strategy!r}."
            )

    def _check_numbers(self) -> None:
        for name in RANGES:
            value, optional = getattr(self, name), self.__dataclass_fields__[name].default is None
            if not (optional and value is None):
                check_number(name, value)
        self.retain_graphs = str(self.retain_graphs)
        if self.retain_graphs != "auto" and not self.retain_graphs.isdecimal():
            raise ValueError(f"retain_graphs must be 'auto' or an integer of at least 0, got {self.retain_graphs!r}.")

    def __getstate__(self) -> dict[str, Any]:
        """Without ``hub_token``, because Trainer writes a pickle of the arguments beside every model."""
        return {**vars(self), "hub_token": None}

    @property
    def device(self) -> torch.device:
        """The device of this process, without an index if it is a CPU."""
        device: torch.device = super().device
        # transformers before 5.18 loads the optimizer's state to this device, which torch cannot do for "cpu:0".
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def global_batch_size(self) -> int:
        """The number of pairs in one contrastive batch, that is in one optimizer step; the last one if it grows."""
        if self.global_batch_schedule is not None:
            return BatchSchedule.of(self.global_batch_schedule).sizes[-1]
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    def image_sizes(self, steps: int) -> ImageSizes | None:
        """``image_size_schedule`` over this many steps, or None."""
        return None if self.image_size_schedule is None else ImageSizes.of(self.image_size_schedule, steps)

    @property
    def learning_rate_factor(self) -> float:
        """The factor by which ``learning_rate_batch_size`` scales ``learning_rate``."""
        return 1.0 if self.learning_rate_batch_size is None else self.global_batch_size / self.learning_rate_batch_size

    @property
    def seed_of_data(self) -> int:
        """The seed by which the rows of the training set are shuffled."""
        return self.seed if self.data_seed is None else self.data_seed
