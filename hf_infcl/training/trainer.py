"""`InfCLTrainer`: one optimizer step is one contrastive batch.

`evaluating.py` holds its evaluation, `checkpointing.py` its saving and resuming.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils.memory import clear_device_cache
from huggingface_hub import ModelCard
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import (
    has_length,
)
from transformers.utils import logging

from ..data import ContrastiveCollator, ImageTextDataset, ImageTextStream, ZeroShotDataset
from ..loss import contrastive_loss
from ..processes import Processes, announce_failure
from .arguments import InfCLTrainingArguments
from .checkpointing import CheckpointingTrainer
from .checkpoints import Run, RunRecord
from .data_wait import WAIT_SHARE, WAIT_WINDOWS, DataWait
from .dual_encoder import DualEncoder
from .evaluating import EvaluatingTrainer
from .feature_cache import CachedImages, cache_images, check_cacheable
from .grad_cache import CachedWindow, Features, GraphBudget
from .offload import Fetcher
from .stream_loader import StreamLoader
from .windows import WindowSampler, check_batch, set_epoch, stream_for_evaluation
from .wrappers import check_wrapper, is_compiled, prepare_for_wrapper, stock_shapes, wrapper_of

logger = logging.get_logger(__name__)


class InfCLTrainer(EvaluatingTrainer, CheckpointingTrainer):
    """A `transformers.Trainer` whose every optimizer step minimises the loss of one global contrastive batch.

    The batch has ``per_device_train_batch_size × gradient_accumulation_steps × world_size`` pairs. However it is split,
    the gradient of every parameter, logit_scale and logit_bias included, equals that of one process that holds the
    whole batch. See `hf_infcl.contrastive_loss` for the loss, and `hf_infcl.training.grad_cache` for how a window of
    micro-batches needs the activations of one.

    Args:
        model: a dual encoder of transformers (see `hf_infcl.training.dual_encoder`). Frozen parameters stay frozen.
        args: `InfCLTrainingArguments`.
        train_dataset: items for the data collator; only full global batches are drawn from it, reshuffled each epoch.
            An IterableDataset needs ``max_steps``, an `ImageTextStream` that or ``samples_per_epoch``.
        eval_dataset: `ImageTextDataset` (global contrastive loss and retrieval), `ZeroShotDataset` (classification), or
            a dict of them.
        data_collator: gives batches for the model, with ``pair_ids`` [b] int64 if wanted; by default a
            `ContrastiveCollator` over ``processing_class``.
        **kwargs: as `transformers.Trainer`. ``compute_metrics`` gets an EvalPrediction whose predictions are
            ``(image_embeds [N, D], text_embeds [M, D])``, the captions in the order of their images, and whose
            label_ids are ``(counts [N], caption_ids [M])``, the number of captions of each image and an int64 that is
            equal for captions of equal tokens, with ``pair_ids`` [N] for a third if the batches have them. For a
            `ZeroShotDataset` predictions are ``image_embeds`` and label_ids the labels [N].

    Raises:
        ValueError: the model is not a dual encoder, or was split while it was loaded; ``args`` are of another class;
            several GPUs are visible without a launcher, or ``args`` do not know of the other processes; FSDP1, or a
            stage of DeepSpeed's ZeRO other than 1 and 2; only the temperature trains under FSDP; the objective is
            sigmoid for a model without logit_bias; ``compute_loss_func`` is given, or a subclass has a
            ``compute_loss``; a data set of images has neither a processor nor a collator.
    """

    args: InfCLTrainingArguments

    def __init__(
        self,
        model: nn.Module | None = None,
        args: InfCLTrainingArguments | None = None,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        args = InfCLTrainingArguments() if args is None else args
        if not isinstance(args, InfCLTrainingArguments):
            raise ValueError(f"InfCLTrainer needs InfCLTrainingArguments, got {type(args).__name__}.")
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs are visible to one process, for which Trainer uses nn.DataParallel; its replicas "
                "cannot share a contrastive batch. Start one process per GPU with `accelerate launch` or `torchrun`, "
                "or show this process one GPU with CUDA_VISIBLE_DEVICES=0."
            )
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() != args.world_size:
            raise ValueError(
                f"{dist.get_world_size()} processes were started, but each trains for itself: args.world_size is "
                f"{args.world_size}. On CPUs pass use_cpu=True."
            )
        if model is not None:
            DualEncoder(model)  # raises here for any other model, with a clear message
        if kwargs.get("processing_class") is None and isinstance(data_collator, ContrastiveCollator):
            kwargs["processing_class"] = data_collator.processor  # so that it is saved beside the model
        processor = kwargs.get("processing_class")
        needs_processor = _needs_processor(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        if data_collator is None and processor is None and needs_processor:
            raise ValueError(
                "Images and captions have to be prepared for the model: pass "
                "processing_class=AutoProcessor.from_pretrained(...), or a data_collator."
            )
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "InfCLTrainer computes the loss itself and would never call compute_loss_func. Leave it out."
            )
        own_step = type(self).training_step is not InfCLTrainer.training_step
        if type(self).compute_loss is not Trainer.compute_loss and not own_step:
            raise ValueError(
                f"InfCLTrainer computes the loss of a window itself and would never call {type(self).__name__}."
                "compute_loss. Override training_step to change the training, or use transformers.Trainer."
            )
        self._sampler: WindowSampler | None = None
        self._stream: IterableDataset | None = None
        self._stream_loader: StreamLoader | None = None  # for an ImageTextStream
        self._dispatcher: DataLoaderDispatcher | None = None  # for a stream that the main process reads for all
        self._worker_seeds = torch.Generator()
        super().__init__(model, args, data_collator, **kwargs)
        if model is not None:  # otherwise `call_model_init` has prepared it
            self._prepare_model(self.model)
        if data_collator is None and processor is not None:
            config = getattr(self.model, "config", None)  # not before: `model_init` has made a model by now
            self.data_collator = ContrastiveCollator.for_model(processor, config, uint8=True)
        # First, so that the user's callbacks see the clamped logit_scale.
        self.callback_handler.callbacks.insert(0, _LoopEvents(self))
        self._begin_training()

    # Mutable state, by its lifetime: a training, a pass over the data, a window.

    def _begin_training(self) -> None:
        vars(self).pop("dual_encoder", None)  # `model_init` may have made another model
        self._wrapper = wrapper_of(self.model_wrapped, self.accelerator.distributed_type)
        self._wrapper.begin_training(self.dual_encoder, self.args.ddp_broadcast_buffers)
        self._compiled = is_compiled(self.model_wrapped)
        retain = self.args.retain_graphs
        self._graph_budget = GraphBudget(None if retain == "auto" else int(retain), self.args.device)
        self._fetcher = Fetcher(self.args.device) if self.args.offload_inputs else None
        self._windows_trained = 0
        # None until the data reports it. The count of the run before a resume is added on the main process.
        self._skipped = None if self._resumed is None else self._resumed.skipped_samples
        if self._skipped is not None and not self.is_world_process_zero():
            self._skipped = 0
        self._last_log = time.perf_counter(), self.state.global_step
        self._data_wait, self._has_warned_of_wait = DataWait(), False
        # The time trained before an interruption counts.
        logged = (entry["train_seconds"] for entry in reversed(self.state.log_history) if "train_seconds" in entry)
        self._began = time.perf_counter() - next(logged, 0.0)
        self._begin_epoch(0)
        self._begin_window([])

    def _begin_epoch(self, epoch: int, windows: int = 0) -> None:
        """Begins a pass over the data, in which ``windows`` windows are trained already."""
        self._exhausted = False  # whether a stream is exhausted in this pass
        self._epoch, self._windows_of_epoch = epoch, windows
        # torch's loaders draw seeds for their workers; the number of draws depends on the options and on resuming. If
        # they came from the random state that dropout uses, they would change the training.
        self._worker_seeds.manual_seed(self.args.seed + epoch)
        # accelerate passes the epoch on to plain samplers only, not through the loader of a resumed epoch.
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)
        set_epoch(self._stream, epoch)

    def _begin_window(self, batches: list[Any]) -> None:
        self._window = batches
        self._next_micro_batch = 0
        self._cached: CachedWindow | None = None
        self._arriving: Iterator[dict[str, Any]] | None = None  # the micro-batches on the device, with offload_inputs

    # ---- Model ----

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        self._prepare_model(model)
        return model

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        self.args.check()  # the trial has changed them

    def _prepare_model(self, model: Any) -> None:
        """Prepares a model before it is wrapped and its optimizer is created."""
        check_wrapper(self.accelerator)
        dual_encoder = DualEncoder(model)
        dual_encoder.freeze_unused()
        if self.args.freeze is not None:
            dual_encoder.freeze(self.args.freeze)
        prepare_for_wrapper(dual_encoder, self.accelerator.distributed_type)
        scale, *bias = dual_encoder.temperature_parameters
        if self.args.objective == "sigmoid" and not bias:
            raise ValueError(
                f"{type(dual_encoder.base).__name__} has no logit_bias, without which the sigmoid loss of a large "
                "batch starts far from where it can train. Train a SiglipModel or Siglip2Model, keep "
                "objective='softmax', or add SigLIP's start to the model before: model.logit_bias = "
                "torch.nn.Parameter(torch.full((1,), -10.0)) and model.logit_scale.data.fill_(math.log(10)). What is "
                "saved then holds a logit_bias that from_pretrained of this class leaves out."
            )
        trains = any(p.requires_grad for p in model.parameters())
        if trains and not scale.requires_grad:
            value = dual_encoder.scale_and_bias()[0].item()
            logger.warning(
                f"{dual_encoder.temperature_name} is frozen, so logit_scale stays {value:.4g}: peft, for one, freezes "
                "all parameters but the adapters. To train it, call "
                f"model.{dual_encoder.temperature_name}.requires_grad_(True); peft does not save it with an adapter."
            )
        half = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.float16, torch.bfloat16}
        in_fp32 = self.is_deepspeed_enabled or (self.is_fsdp_enabled and self.accelerator.mixed_precision != "no")
        if half and not in_fp32:  # for the optimizer
            logger.warning(
                f"The parameters that train are in {half.pop()}, whose rounding swallows small steps. Load the model "
                "with from_pretrained(..., dtype=torch.float32); bf16=True then still computes in bf16."
            )
        if dual_encoder.initialise_sigmoid():
            logger.warning("logit_scale and logit_bias were both 0; they now start as SigLIP's, at ln 10 and -10.")
        one_micro_batch = self.args.global_batch_size == self.args.per_device_train_batch_size
        if not one_micro_batch and (names := dual_encoder.batch_norms()):
            logger.warning(
                f"The batch norms {', '.join(names)} normalise over a micro-batch. The loss is that of the global "
                "batch, but the outputs of these layers depend on the size of the micro-batch."
            )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's names without vectors and scalars: as in CLIP, only matrices are decayed, never logit_scale."""
        flat = {name for name, parameter in model.named_parameters() if parameter.ndim <= 1}
        return [name for name in super().get_decay_parameter_names(model) if name not in flat]

    # ---- Training ----

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not has_length(dataset):
            return None
        self._sampler = WindowSampler(
            dataset,
            self.args.global_batch_size,
            shuffle=self.args.train_sampling_strategy == "random",
            seed=self._data_seed,
        )
        return self._sampler

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        """Trainer's loader. A stream gives only full batches in training, and every row once in evaluation."""
        if not isinstance(dataset, IterableDataset):
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        args = self.args
        workers = args.dataloader_num_workers if is_training else min(args.dataloader_num_workers, 1)
        loader: DataLoader = DataLoader(
            dataset,
            batch_size=batch_size,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description),
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers and is_training,
            multiprocessing_context=args.dataloader_multiprocessing_context if workers else None,
            prefetch_factor=args.dataloader_prefetch_factor,
            in_order=args.dataloader_in_order,
            drop_last=is_training,
        )
        return self.accelerator.prepare(loader) if is_training else stream_for_evaluation(loader, args.device)

    def get_train_dataloader(self) -> DataLoader:
        """The training loader. With ``offload_inputs`` its batches stay in host memory until they are fetched."""
        pairs = self.train_dataset
        if self.args.cache_features is not None:
            self.train_dataset = self._with_cached_images(pairs, self.args.cache_features)
        self._stream_loader = None
        if isinstance(self.train_dataset, ImageTextStream):
            self._stream = self.train_dataset
            device = None if self.args.offload_inputs else self.args.device
            states = (self._resumed and self._resumed.stream) or []
            self._stream_loader = StreamLoader(
                self.train_dataset, self.data_collator, self.args, device=device, states=states
            )
            return self._stream_loader
        dataloader: Any = super().get_train_dataloader()
        self.train_dataset = pairs
        self._dispatcher = dataloader if isinstance(dataloader, DataLoaderDispatcher) else None
        self._stream = dataloader.dataset if isinstance(dataloader.dataset, IterableDataset) else None
        if self._dispatcher is not None and self._stream is None:
            raise ValueError(
                "accelerator_config has dispatch_batches=True, which is for streams only: the main process would read "
                "all rows, and a resumed run would not find its place. Leave it out, and every process reads its own."
            )
        dataloader.base_dataloader.generator = self._worker_seeds
        if self.args.offload_inputs:
            if self._dispatcher is not None:
                raise ValueError(
                    "offload_inputs keeps batches in host memory, but this stream is read by the main process and sent "
                    'out through devices. Pass accelerator_config={"dispatch_batches": False}.'
                )
            dataloader.device = None
        return dataloader

    def set_initial_training_values(
        self, args: Any, dataloader: DataLoader
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Trainer's values, computed from full windows and trained samples only."""
        epochs, windows, examples, _, batch, micro_batches, max_steps = super().set_initial_training_values(
            args, dataloader
        )
        if self._stream is not None and has_length(dataloader):
            windows = max(1, len(dataloader) // args.gradient_accumulation_steps)
            micro_batches = windows * args.gradient_accumulation_steps
            if args.max_steps < 0:
                max_steps = math.ceil(args.num_train_epochs * windows)
            epochs = sys.maxsize  # the length may be a guess, so that max_steps takes more passes
        return epochs, windows, examples, max_steps * batch, batch, micro_batches, max_steps

    def _check_same_run(self, checkpoint: str) -> None:
        if isinstance(self.train_dataset, ImageTextStream) and not (self._resumed and self._resumed.stream):
            raise ValueError(
                f"{checkpoint} holds no place in a stream, because it was not written by a training on one. Start a "
                "new run from its model."
            )
        super()._check_same_run(checkpoint)

    def _run(self) -> Run:
        data, shuffled = self.train_dataset, self.args.train_sampling_strategy == "random"
        rows = f", {len(data)} rows" if has_length(data) else ""
        order = f", {'shuffled' if shuffled else 'in order'}, seed {self._data_seed}"
        model = self.dual_encoder.model
        kind = type(model).__name__.removeprefix("FSDP")  # the name of the wrapped class
        return Run(
            global_batch_size=self.args.global_batch_size,
            objective=self.contrastive_objective,
            model=f"{kind} with {sum(p.numel() for p in model.parameters()):,} parameters",
            data=type(data).__name__ + rows + ("" if isinstance(data, IterableDataset) else order),
        )

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """The epochs that are trained already, and the trained micro-batches of the next one."""
        epochs, micro_batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._first_step = self.state.global_step
        if self.state.global_step >= max_steps:
            # Trainer looks at the number of steps only after it has trained one.
            logger.warning(
                f"Nothing is left to train: {resume_from_checkpoint} was saved after step {self.state.global_step}, "
                f"and the run has {max_steps} steps."
            )
            return num_train_epochs, 0
        if self._resumed is not None and not self.args.ignore_data_skip:
            # Trainer divides the steps by those of an epoch, which a stream does not know.
            rows = self._resumed.windows * self._resumed.run.global_batch_size
            windows = math.ceil(rows / self.args.global_batch_size)
            epochs = self._resumed.epoch + windows // num_update_steps_per_epoch
            micro_batches = windows % num_update_steps_per_epoch * self.args.gradient_accumulation_steps
        return epochs, micro_batches

    def _run_epoch(self, model: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
        resumed = epoch == kwargs["epochs_trained"]
        trained = kwargs["steps_trained_in_current_epoch"] if resumed else 0
        self._begin_epoch(epoch, trained // self.args.gradient_accumulation_steps)
        super()._run_epoch(model, epoch, *args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """Fetches a window, or nothing if the remaining rows of a stream do not fill one.

        All processes agree here that they have a window, so that an error in the data of one process stops all of them,
        and a signal to one ends the training on all. No forward happens here: on resume Trainer restores the
        random state after this call.
        """
        self._begin_window([])
        if self._exhausted:
            return [], None
        window: list[Any] = []
        rows = 0
        try:
            batches = epoch_iterator if self._stream_loader is None else self._stream_loader
            with self._data_wait.waiting():
                window, _ = super().get_batch_samples(batches, num_batches, device)
            for batch in window:
                check_batch(batch)
            rows = sum(len(batch["pixel_values"]) for batch in window)
        except Exception as error:
            if self._dispatcher is None:
                # The signal that asks a process to end may have ended the workers that load its data.
                if not self._preemption.signal:
                    announce_failure(error)
                    raise
            else:
                # The main process reads the stream. The others wait in a broadcast, where they learn of no error.
                if isinstance(error, TypeError) and self._dispatcher._stop_iteration and self.state.global_step == 0:
                    # Every process gets here: accelerate sends nothing without a full micro-batch for each of them.
                    raise self._stream_too_short([0] * self.args.world_size) from error
                raise
        agreed = Processes().agree([rows, self._preemption.signal])
        if signals := {int(number) for _, number in agreed if number}:
            self._end_early(max(signals))
        seen = [int(rows) for rows, _ in agreed]
        wanted = self.args.global_batch_size // self.args.world_size
        if seen != [wanted] * len(seen):
            # Training on a short window would change the objective, and Trainer would leave its gradient behind.
            if self.state.global_step == 0:
                raise self._stream_too_short(seen)
            self._exhausted = True
            return [], None
        self._begin_window(window)
        self._windows_of_epoch += 1
        if self._stream_loader is not None:
            self._stream_loader.consume()
        return window, None

    def _stream_too_short(self, seen: list[int]) -> ValueError:
        wanted = self.args.global_batch_size // self.args.world_size
        return ValueError(
            f"The stream ended before its first global batch of {self.args.global_batch_size} pairs was full: the "
            f"processes got {seen} of {wanted} each in full micro-batches. Lower the batch, or use more data."
        )

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Adds the gradient of one micro-batch; the first of a window also runs the first pass and the loss.

        Trainer's loop calls this once for each micro-batch of the window that `get_batch_samples` returned, in order.
        ``inputs`` only says that the next one is due: the data is the window's.

        Returns:
            The global loss for the last micro-batch of a window and 0 before, because Trainer adds up these values.
        """
        model.train()
        for frozen in self.dual_encoder.frozen_parts():
            frozen.eval()  # without dropout a frozen tower gives the same output in both passes, and runs in one
        if callable(prepare := getattr(self.optimizer, "train", None)):  # schedule-free optimizers
            prepare()
        index = self._next_micro_batch
        self._next_micro_batch += 1
        last = index == len(self._window) - 1
        if index == 0:
            self._wrapper.begin_window()
        with self._wrapper.gradient_sync(last):
            if index == 0:
                self._cached = self._first_pass(model)
            assert self._cached is not None
            with record_function("infcl: second pass"):
                surrogate = self._cached.surrogate(index)
                if surrogate is not None:
                    self.accelerator.backward(surrogate, **self._wrapper.backward_options)
        # Trainer holds the window until the next one is fetched; the images are not needed any more.
        self._window[index].pop("pixel_values", None)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        loss = self._cached.loss.float()
        if not last:
            return torch.zeros_like(loss)
        self._cached = None
        if self._windows_trained == 0:
            self._wrapper.check_gradients()
        self._windows_trained += 1
        return loss

    def _first_pass(self, model: nn.Module) -> CachedWindow:
        """Encodes the window and evaluates its loss, on every process at once."""
        if skipped := [int(batch["skipped"].sum()) for batch in self._window if "skipped" in batch]:
            self._skipped = (self._skipped or 0) + sum(skipped)
        count = len(self._window)
        window = CachedWindow(
            partial(self._encode, model),
            [_MicroBatch(batch) for batch in self._window],
            device=self.args.device,
            retain=self._graph_budget.graphs(max(1, count - 1) if self._wrapper.synchronises else count),
            keep_grad_mode=self._compiled,
            buffers=model.buffers(),
        )
        if self._fetcher is not None:
            self._arriving = self._fetcher.fetch(self._window[i] for i in window.order)
        try:
            with record_function("infcl: first pass"):
                features = window.encode()
        except Exception as error:
            # The other processes exchange the loss's inputs next. Under FSDP they are waiting within their forwards.
            if not self.is_fsdp_enabled:
                announce_failure(error)
            raise
        finite = torch.stack([f.isfinite().all() for f in features]).all()
        del features  # they take the memory of the whole window
        with record_function("infcl: loss"):
            loss = window.evaluate(self._loss, lambda: self.dual_encoder.temperature_parameters)
        if not loss.isfinite():  # the same on every process, before anything has been changed
            ranks = [rank for rank, (ok,) in enumerate(Processes().agree([finite.item()])) if not ok]
            cause = f"logit_scale is {self.dual_encoder.scale_and_bias()[0].item():g}"
            if ranks:
                cause = f"an image or the model gives embeddings that are not finite (those of ranks {ranks} are not)"
            raise ValueError(
                f"The loss of the global batch after step {self.state.global_step} is {loss.item()}: {cause}. "
                "The weights are those of that step. Look at the data of this batch, lower the learning rate, or use "
                "bf16 instead of fp16."
            )
        return window

    def _encode(self, model: nn.Module, micro_batch: _MicroBatch) -> Features:
        inputs = micro_batch.inputs if self._arriving is None else next(self._arriving)
        # A compiled model would be compiled again for every tower that is left out.
        frozen_outputs = None if self._compiled else micro_batch.frozen_outputs
        embeds = self.dual_encoder.embed(model, self._prepare_inputs(inputs), frozen_outputs)
        # DeepSpeed's fp16 has no autocast that returns fp32.
        return tuple(e.float() if e.dtype == torch.float16 else e for e in embeds)

    def _loss(self, features: Features, parameters: tuple[Tensor, ...]) -> Tensor:
        ids = [batch["pair_ids"] for batch in self._window if "pair_ids" in batch]
        # accelerate returns fp32 from an autocast forward; the loss's products belong in the autocast dtype. Not in
        # fp16: divided by the global batch, gradients of features would underflow where no loss scale helps.
        bf16 = self.accelerator.mixed_precision == "bf16"
        images, texts = (f.bfloat16() if bf16 else f for f in features)
        return contrastive_loss(
            images,
            texts,
            *self.dual_encoder.scale_and_bias(parameters),
            objective=self.contrastive_objective,
            strategy=self.args.strategy,
            backend=self.args.backend,
            pair_ids=torch.cat(ids).to(self.args.device) if ids else None,
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the figures of a contrastive run to the training logs.

        The figures are logit_scale, the multiplier, and logit_bias, if any; global_batch_size in pairs;
        samples_per_second, the rate of pairs since the last log, the evaluations in between included; train_seconds,
        the duration of the training so far, the parts before an interruption included; peak_memory of this GPU in
        bytes; skipped_samples since the training began, if the data reports them; data_wait, the share of the
        time since the last log, evaluations and checkpoints apart, that the slowest process waited for data.

        For an `ImageTextStream` the logs also have stream_samples, trained since the run began, stream_shards, opened
        since then, and loader_samples_per_second, the rate that the workers can reach.
        """
        if "loss" in logs:
            scale, bias = self.dual_encoder.scale_and_bias()
            logs["logit_scale"] = scale.item()
            if bias is not None:
                logs["logit_bias"] = bias.item()
            logs["global_batch_size"] = self.args.global_batch_size
            now, step = time.perf_counter(), self.state.global_step
            since, at = self._last_log
            if step > at:
                logs["samples_per_second"] = round((step - at) * self.args.global_batch_size / (now - since), 3)
            self._last_log = now, step
            logs["train_seconds"] = round(now - self._began, 3)
            if self.args.device.type == "cuda":
                logs["peak_memory"] = torch.cuda.max_memory_allocated(self.args.device)
            if (skipped := self._skipped_samples()) is not None:
                logs["skipped_samples"] = skipped
            self._log_data(logs)
        super().log(logs, start_time)

    def _log_data(self, logs: dict[str, float]) -> None:
        """Adds the data figures of all processes to the logs, and warns if the training waits for data; collective."""
        wait = self._data_wait
        progress = None if self._stream_loader is None else self._stream_loader.progress()
        numbers = [wait.share_since_last(), wait.share(), *(progress or {}).values()]
        recent, overall, *sums = zip(*Processes().agree(numbers), strict=True)
        if wait.windows > 0:
            logs["data_wait"] = round(max(recent), 4)
        if progress is not None:
            totals = dict(zip(progress, map(sum, sums), strict=True))
            logs["stream_samples"], logs["stream_shards"] = int(totals["samples"]), int(totals["shards"])
            logs["loader_samples_per_second"] = round(totals["rate"], 1)
        if wait.windows >= WAIT_WINDOWS and max(overall) > WAIT_SHARE and not self._has_warned_of_wait:
            self._has_warned_of_wait = True
            workers = self.args.dataloader_num_workers
            logger.warning(
                f"The training has waited for its data in {max(overall):.0%} of the time. Set dataloader_num_workers "
                f"higher, which is {workers}, as far as there are CPU cores; decode JPEGs faster (pip install "
                '"hf_infcl[fast]"); or store smaller images.'
            )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._data_wait.stop()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._data_wait.start()

    def _skipped_samples(self) -> int | None:
        """The sum over all processes since the run began, or None if the data does not report them; collective."""
        if self._skipped is None:
            return None
        return int(self.accelerator.reduce(torch.tensor(self._skipped, device=self.args.device), "sum"))

    def _record(self) -> RunRecord:
        return RunRecord(
            self._run(),
            self._epoch,
            self._windows_of_epoch,
            self._skipped_samples(),
            processes=self.args.world_size,
            only_model=self.args.save_only_model,
            stream=self._places_in_stream(),
        )

    def _places_in_stream(self) -> list[dict[str, Any]] | None:
        """For each process, the part of an `ImageTextStream` that it has trained on; collective."""
        if self._stream_loader is None:
            return None
        return [json.loads(state) for state in Processes().gather_text(json.dumps(self._stream_loader.state()))]

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if state_dict is not None:
            state_dict = stock_shapes(self.dual_encoder, state_dict)
        super()._save(output_dir, state_dict)

    def _with_cached_images(self, pairs: Any, folder: str) -> CachedImages:
        """The training set with features in place of images, which are computed now if the folder lacks them."""
        tower: Any = self.dual_encoder.frozen_towers().get("image")
        collator: Any = self.data_collator
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        check_cacheable(pairs, tower, collator, sharded=sharded, compiled=self.args.torch_compile)

        def encode(batch: dict[str, Any]) -> Tensor:
            with torch.no_grad(), self.accelerator.autocast():
                return self.dual_encoder.image_features(self._prepare_inputs(batch))

        return cache_images(
            pairs,
            folder,
            tower.eval(),
            encode,
            collator,
            dtype=self.accelerator.mixed_precision,
            batch_size=self.args.per_device_train_batch_size,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Moves a batch to the device, and there normalises images that the data loader gave as uint8."""
        inputs = super()._prepare_inputs(inputs)
        pixel_values = inputs.get("pixel_values")
        if pixel_values is None or pixel_values.dtype != torch.uint8:
            return inputs
        if not hasattr(self.data_collator, "normalise"):
            raise ValueError(
                "The data collator gives pixel_values in uint8, which no model takes as they are. Give floating point, "
                "or let the collator have a method normalise(pixel_values) such as ContrastiveCollator's, not "
                f"{type(self.data_collator).__name__}."
            )
        # Trainer's preparation runs once more, because under DeepSpeed it casts to the dtype of the model.
        return {**inputs, "pixel_values": self._prepare_input(self.data_collator.normalise(pixel_values))}

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes Trainer's draft, unless the folder already has a card that `hf_infcl.publishing` updates."""
        card = Path(str(self.args.output_dir), "README.md")
        if not (card.is_file() and "hf_infcl" in (ModelCard.load(card).data.tags or [])):
            super().create_model_card(*args, **kwargs)


class _LoopEvents(TrainerCallback):
    """Callbacks at points of Trainer's loop for which it has no method to override."""

    def __init__(self, trainer: InfCLTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin_training()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin_window([])
        if self._trainer._stream_loader is not None:
            self._trainer._stream_loader.close()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        maximum = args.max_logit_scale
        if maximum is None and self._trainer.contrastive_objective == "softmax":
            maximum = 100.0
        if maximum is not None:
            self._trainer._wrapper.clamp_logit_scale(self._trainer.dual_encoder, maximum)


@dataclass
class _MicroBatch:
    """A batch of the data loader, and the outputs of its frozen towers in the first pass."""

    inputs: dict[str, Any]
    frozen_outputs: dict[str, Any] = field(default_factory=dict)


def _needs_processor(*datasets: Any) -> bool:
    """Whether one of the data sets, or of those in a dictionary, gives images and captions that are not prepared."""
    pending = list(datasets)
    while pending:
        dataset = pending.pop()
        if isinstance(dataset, (ImageTextDataset, ImageTextStream, ZeroShotDataset)):
            return True
        if isinstance(dataset, Mapping):
            pending += dataset.values()
        elif isinstance(dataset, Subset):
            pending.append(dataset.dataset)
        elif isinstance(dataset, ConcatDataset):
            pending += dataset.datasets
    return False
