"""`InfCLTrainer`: one optimizer step is one contrastive batch.

Here are the methods of transformers' Trainer that are overridden, each with a few lines that call a part. The step is
in `windows/step.py`, the data in `loading/training_data.py` and `loading/loaders.py`, evaluations in `evaluating.py`,
checkpoints in `checkpoints/` and `resuming.py`, pushes in `pushes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, HubStrategy, SaveStrategy, TrainOutput, has_length
from transformers.utils import logging

from ..checkpoints.files import Checkpoint, choose
from ..checkpoints.lock import locked
from ..checkpoints.record import Run, RunRecord
from ..checkpoints.saving import Checkpoints
from ..data import ContrastiveCollator, ImageTextStream
from ..data.notices import CaptionNotices
from ..data.wrapped import check_has_end, has_epochs, most_captions, parts_of
from ..encoders.dual_encoder import DualEncoder
from ..encoders.sharding import failures_announced_unless_sharded
from ..loading import loaders
from ..loading.sampling import RowsOfEpoch, WindowSampler
from ..loading.training_data import TrainingData
from ..loss import OBJECTIVES
from ..options.arguments import InfCLTrainingArguments
from ..options.best_metric import check_metric_of_training
from ..options.run_options import OptimizerOptions
from ..processes.collectives import Processes, failures_announced
from ..processes.phases import Phases
from ..processes.preemption import AskedToEndError, Preempted, Preemption, describe_end
from ..windows.number_checks import check_supported
from ..windows.step import WindowStep
from ..windows.window import Window
from . import pushes
from .construction import check_construction, check_overrides, with_processor
from .evaluating import Evaluator, gather_rows
from .loop_events import LoopEvents, has_callbacks_of_others, share_decisions
from .muon import create_muon
from .optimization import check_optimizer_options, check_trains, errors_of_options, set_learning_rates
from .preparation import prepare_model
from .progress import Progress
from .resuming import Resumption, check_same_on_all_ranks, run_of
from .saving import best_checkpoint_kept, save_weights, saves_shards

logger = logging.get_logger(__name__)


class InfCLTrainer(Trainer):
    """A `transformers.Trainer` in which each optimizer step minimises the loss of one global contrastive batch.

    The batch has ``per_device_train_batch_size × gradient_accumulation_steps × world_size`` pairs. However it is split,
    the gradient of every parameter, including logit_scale and logit_bias, equals the gradient of one process that holds
    the whole batch. `hf_infcl.contrastive_loss` describes the loss. `hf_infcl.passes.grad_cache` describes the two
    passes that train a window of micro-batches in the activation memory of a single one.

    This class holds the methods of Trainer that are overridden, and its parts do the work. Subclasses override and
    extend methods as those of Trainer.

    Args:
        model: a dual encoder of transformers (see `hf_infcl.encoders.dual_encoder`). Frozen parameters stay frozen.
        args: `InfCLTrainingArguments`.
        train_dataset: items for the data collator. The trainer draws only full global batches, reshuffled each epoch.
            An IterableDataset needs ``max_steps``, an `ImageTextStream` needs ``max_steps`` or ``samples_per_epoch``.
        eval_dataset: an `ImageTextDataset` (global contrastive loss and retrieval), a `ZeroShotDataset`
            (classification), or a dict of them.
        data_collator: returns batches for the model, optionally with ``pair_ids`` [b] int64; by default a
            `ContrastiveCollator` over ``processing_class``. ``caption_image`` [texts] int64 is the index of each text's
            image, -1 for a text that belongs to no image; without it, text i belongs to image i.
        **kwargs: the other arguments of `transformers.Trainer`. ``compute_metrics`` receives an EvalPrediction whose
            predictions are ``(image_embeds [N, D], text_embeds [M, D])``, with the captions in the order of their
            images, and whose label_ids are ``(counts [N], caption_ids [M])``: the number of captions of each image, and
            an int64 that is equal for captions with equal tokens. If the batches have ``pair_ids``, these [N] are the
            third label. For a `ZeroShotDataset`, the predictions are ``image_embeds`` and the label_ids the labels [N].

    Attributes:
        window: the micro-batches that are trained now.
        window_step, training_data, progress: the parts of the last training; see their classes.
        checkpoints, resumption: the checkpoints that it wrote, and the one that it came from.
        caption_notices: what was found out about the captions of the datasets that were trained on or evaluated.
        creates_optimizer, creates_scheduler: whether Trainer created them from the arguments. Otherwise they were
            passed, or come from DeepSpeed's config.

    Raises:
        ValueError: the model is not a dual encoder, or was split while it was loaded; ``args`` has another class;
            several GPUs are visible without a launcher; ``args.world_size`` is not the number of processes; FSDP1, or
            DeepSpeed's ZeRO with a stage other than 1 and 2, is used; only the temperature trains under FSDP; the
            objective is sigmoid for a model without logit_bias; ``compute_loss_func`` is given, or a subclass overrides
            ``compute_loss``; a dataset of images has neither a processor nor a collator; ``equal_ids="exclude"`` is
            set for a training set that draws several captions per image.
    """

    args: InfCLTrainingArguments
    creates_optimizer = creates_scheduler = False

    def __init__(
        self,
        model: nn.Module | None = None,
        args: InfCLTrainingArguments | None = None,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        args = InfCLTrainingArguments() if args is None else args
        kwargs = with_processor(data_collator, kwargs)
        check_construction(model, args, data_collator, kwargs)
        check_overrides(type(self), InfCLTrainer, Trainer)
        # ---- Parts that Trainer's constructor needs ----
        self.window = Window([])
        self.resumption = Resumption()
        self.training_data = TrainingData(None, args)
        self.caption_notices = CaptionNotices()
        self._pushes = pushes.Pushes(args)
        self._preemption, self._phases = Preemption(), Phases()
        self._optimizer_options = OptimizerOptions(None)
        self._partial_dir: str | None = None  # in place of output_dir while a checkpoint is written
        self._is_between_steps = False  # in an evaluation
        self._first_step = 0  # the first step of the last `train`; transformers before 5.18 does not keep it
        self._shares_decisions = False
        super().__init__(model, args, data_collator, **kwargs)
        # ---- What needs the accelerator, or the model that model_init has made ----
        if data_collator is None and (processor := kwargs.get("processing_class")) is not None:
            config = getattr(self.model, "config", None)
            self.data_collator = ContrastiveCollator.for_model(processor, config, uint8=True)
        check_supported(self.accelerator, args.skip_nonfinite, args.on_divergence)
        if model is not None:  # otherwise `call_model_init` has prepared it
            prepare_model(self.model, args, self.accelerator)
        # This callback comes first, so that the user's callbacks see the clamped logit_scale.
        self.callback_handler.callbacks.insert(
            0,
            LoopEvents(
                self.callback_handler.callbacks,
                begin_training=self._begin_training,
                end_training=self._end_training,
                before_optimizer_step=self._before_optimizer_step,
                after_optimizer_step=self._after_optimizer_step,
                end_window=lambda: self.training_data.end_window(self.window),
            ),
        )
        self.checkpoints = self._new_checkpoints()
        self._begin_training()

    # ---- The life of a training ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Trains like Trainer, but resumes only from complete checkpoints (see `hf_infcl.checkpoints.files`).

        If the run is already complete, nothing is trained, saved or evaluated. When any process receives SIGTERM,
        SIGUSR1 or SIGINT (Ctrl-C), all processes finish the step and save a checkpoint.

        Args:
            resume_from_checkpoint: the folder of a checkpoint; True for the newest complete one in ``output_dir``;
                ``"auto"`` for the newest complete one, or a new start if there is no checkpoint; ``"last-checkpoint"``
                for the one that ``hub_strategy="checkpoint"`` has pushed to ``hub_model_id``.
            trial, ignore_keys_for_eval: as in Trainer.

        Raises:
            ValueError: in addition to Trainer's reasons, the checkpoint is damaged, or comes from a run with other
                options while ``resume_with_changes`` is off; the ranks would train different runs; another run is
                training in ``output_dir``, or it is not writable; the Hub has no ``last-checkpoint``.
            OtherRankFailedError: another process failed. If it has ended or hangs, the message states its last phase.
            Preempted: a signal ended the training, which has saved a checkpoint. This is a SystemExit.
        """
        # ---- Before the training: what it may look up, and who else trains here ----
        self._trial = trial
        if self.compute_metrics is None and type(self).evaluate is Trainer.evaluate:
            check_metric_of_training(self.args, self.eval_dataset)
        output_dir, saves = str(self.args.output_dir), self.args.should_save
        shared = self.args.save_strategy != SaveStrategy.NO and not self.args.save_only_model
        lock = locked(output_dir, locks=saves, shared=shared)
        watch = Phases(float(self.args.ddp_timeout))
        with lock, Preemption() as self._preemption, watch as self._phases:
            # ---- The checkpoint to resume from ----
            resumes = pushes.checkpoint_of_hub_if_named(resume_from_checkpoint, self.args, self.hub_model_id)
            run = self._run()
            check_same_on_all_ranks(self.args, run, resumes)
            self._shares_decisions = has_callbacks_of_others(self.callback_handler.callbacks)
            checkpoint = choose(output_dir, resumes, looks=saves)
            self.resumption = Resumption(checkpoint, allows_changes=self.args.resume_with_changes)
            self.resumption.check(run, self.train_dataset, self.args.world_size)
            self.checkpoints = self._new_checkpoints(last=checkpoint)
            # ---- Trainer's loop ----
            with self._phases.errors_of_lost():
                return super().train(checkpoint, trial, ignore_keys_for_eval)

    def _begin_training(self) -> None:
        """Creates the parts that live as long as a training."""
        args, record = self.args, self.resumption.record
        vars(self).pop("dual_encoder", None)  # `model_init` may have created another model
        loader: Any = self.callback_handler.train_dataloader
        self.training_data = TrainingData(loader, args, record)
        source = self.training_data.source
        own = type(self).get_train_dataloader is InfCLTrainer.get_train_dataloader
        if loader is not None and own and source.stream_loader is None:
            # Callbacks may look into the loader that they receive. The training's would begin its epoch anew.
            data = loader.dataset if source.stream is None else self.train_dataset
            self.callback_handler.train_dataloader = self._training_loader(data)
        self.window = Window([])
        step, samples = self.state.global_step, 0 if record is None else record.samples_seen
        self.progress = Progress(step, samples, args.global_batch_size, self.state.log_history)
        self.window_step = WindowStep(
            self.dual_encoder,
            self.model_wrapped,
            self.accelerator,
            args,
            record,
            objective=self.contrastive_objective,
            equal_ids=self.equal_ids,
            prepare_inputs=lambda batch: self._prepare_inputs(batch),
            rows_of_dataset=self.training_data.rows_at,
            roll_back=self._roll_back,
            phases=self._phases,
        )
        if loader is not None and self.is_world_process_zero():
            batch = args.global_batch_size
            self.caption_notices.look_at_all(self.train_dataset, self.eval_dataset, self.data_collator, batch)

    def _end_training(self) -> None:
        self._to_evaluation_point()
        self.window = Window([])
        self.training_data.close()

    def _run_epoch(self, model: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
        resumed = epoch == kwargs["epochs_trained"]
        trained = kwargs["steps_trained_in_current_epoch"] if resumed else 0
        self.training_data.begin_epoch(epoch, trained // self.args.gradient_accumulation_steps)
        super()._run_epoch(model, epoch, *args, **kwargs)
        self._agree()  # a signal may have come in the last step

    def _agree(self, numbers: Sequence[float] = ()) -> list[list[float]]:
        """`Processes.agree` between two steps; also ends the training if any process has received a signal to end."""
        agreed = Processes().agree([self._preemption.signal, *numbers])
        if signals := {int(number) for number, *_ in agreed if number}:
            self._end_early(max(signals))
        return [values for _, *values in agreed]

    def _end_early(self, number: int) -> NoReturn:
        """Saves a checkpoint between two steps and ends the training, on all processes alike."""
        step, trained = self.state.global_step, self.steps_trained > 0
        if trained and self.checkpoints.saved_step != step:
            self._save_checkpoint(self.model_wrapped, self._trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        if self.is_world_process_zero():
            logger.warning(describe_end(number, step, trained=trained, saved=self.checkpoints.saved_step == step))
        raise Preempted(128 + number)

    @property
    def steps_trained(self) -> int:
        """Optimizer steps of the last call of `train`: 0 for a run that was complete when it was resumed."""
        return self.state.global_step - self._first_step

    @property
    def samples_seen(self) -> int:
        """The pairs trained so far, also those of other global batch sizes before the training was resumed."""
        return self.progress.samples(self.state.global_step)

    # ---- The model, its optimizer and its schedule ----

    @cached_property
    def dual_encoder(self) -> DualEncoder:
        """The unwrapped model as two towers and a temperature."""
        return DualEncoder(self.accelerator.unwrap_model(self.model))

    @property
    def contrastive_objective(self) -> str:
        """``"softmax"`` or ``"sigmoid"``: the argument, or else the objective that the model was designed for."""
        return self.args.objective or self.dual_encoder.objective

    @property
    def equal_ids(self) -> str:
        """``"exclude"`` or ``"positive"``: the argument, or else what the training set needs."""
        return self.args.equal_ids or ("positive" if most_captions(self.train_dataset) > 1 else "exclude")

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        prepare_model(model, self.args, self.accelerator)
        return model

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        self.args.check()  # the trial has changed them

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's names without vectors and scalars: as in CLIP, only matrices decay, and never logit_scale."""
        flat = {name for name, parameter in model.named_parameters() if parameter.ndim <= 1}
        return [name for name in super().get_decay_parameter_names(model) if name not in flat]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Trainer's optimizer or Muon, with the rates of the options of this package."""
        encoder, given = self.dual_encoder, self.optimizer is not None
        check_trains(encoder.model)
        own = self.args.optimizer == "muon" and not given
        if own:
            decaying = self.get_decay_parameter_names(encoder.model)
            self.optimizer = create_muon(encoder.model, self.args, decaying, self.accelerator)
        with errors_of_options(self.args, "optim", "optim_args", "optimizer"):
            optimizer = super().create_optimizer(*args, **kwargs)
        if not given:
            self.creates_optimizer = self.optimizer_cls_and_kwargs is None
            if self.creates_optimizer and not own:
                check_optimizer_options(self.args, self.get_optimizer_cls_and_kwargs)
            set_learning_rates(optimizer, encoder.temperature_parameters, self.args)
        return optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> torch.optim.lr_scheduler.LRScheduler:
        """Trainer's schedule of the learning rate; also notes its options and those of the optimizer."""
        self.creates_scheduler = self.creates_scheduler or self.lr_scheduler is None
        with errors_of_options(self.args, "lr_scheduler_type", "lr_scheduler_kwargs", "schedule"):
            scheduler = super().create_scheduler(*args, **kwargs)
        self._optimizer_options = OptimizerOptions(self.optimizer, scheduler, self._optimizer_options)
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads their progress. With ``resume_with_changes``, their options are those of this run."""
        if checkpoint is None:
            return
        from_checkpoint = Resumption(checkpoint, allows_changes=self.args.resume_with_changes)
        changed = from_checkpoint.check_optimizer(self._optimizer_options)
        with from_checkpoint.errors_of_optimizer():
            super()._load_optimizer_and_scheduler(checkpoint)
        if changed or from_checkpoint.differs(self._run()):
            assert from_checkpoint.record is not None
            self._optimizer_options.apply(from_checkpoint.record.optimizer, self.optimizer, self.lr_scheduler)

    def _to_evaluation_point(self) -> None:
        """Puts the weights to evaluate into the model; schedule-free optimizers keep them apart from those they train.

        The next training step returns to the others.
        """
        if callable(evaluate := getattr(self.optimizer, "eval", None)):
            evaluate()

    # ---- Data ----

    def get_train_dataloader(self) -> DataLoader:
        """A training loader. With ``offload_inputs`` its batches stay in host memory until they are fetched.

        Each call returns a new loader, and looking into one does not change a training. Iterating it again shuffles the
        rows anew, but leaves the epoch of the dataset as it is. A loader of an `ImageTextStream` begins where the
        training began.
        """
        pairs: Any = self.train_dataset
        if pairs is not None and self.args.cache_features is not None:
            self._phases.enter("computing image features", self.state.global_step)
            pairs = loaders.with_cached_images(
                pairs,
                self.args,
                self.dual_encoder,
                self.data_collator,
                self.accelerator,
                prepare_inputs=self._prepare_inputs,
                agree=self._agree,
                note_progress=self._phases.note_progress,
            )
        if isinstance(pairs, ImageTextStream):
            states = (self.resumption.record and self.resumption.record.stream) or []
            return loaders.stream_loader(pairs, self.data_collator, self.dual_encoder.vocabulary, self.args, states)
        return self._training_loader(pairs)

    def _training_loader(self, pairs: Any) -> DataLoader:
        """Trainer's loader of a training set that is no `ImageTextStream`."""
        train_dataset, self.train_dataset = self.train_dataset, pairs
        try:
            dataloader: Any = super().get_train_dataloader()
        finally:
            self.train_dataset = train_dataset
        loaders.adapt_training_loader(dataloader, self.dual_encoder.vocabulary, offload_inputs=self.args.offload_inputs)
        return dataloader

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not has_length(dataset):
            return None
        shuffle = self.args.train_sampling_strategy == "random"
        return WindowSampler(dataset, self.args.global_batch_size, shuffle=shuffle, seed=self.args.seed_of_data)

    def _set_signature_columns_if_needed(self) -> None:
        """Trainer's columns that ``remove_unused_columns`` keeps, and those that the collator and the loss use."""
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        columns += [name for name in loaders.used_columns(self.data_collator) if name not in columns]

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        """Trainer's loader. A stream yields only full batches in training, and every row once in evaluation."""
        if not isinstance(dataset, IterableDataset):
            if has_epochs(dataset) and not isinstance(dataset, RowsOfEpoch):
                dataset = RowsOfEpoch(dataset)
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        if not is_training:
            check_has_end(dataset)
        collate = self._get_collator_with_removed_columns(self.data_collator, description)
        loader = loaders.loader_of_stream(dataset, collate, self.args, batch_size, is_training=is_training)
        if is_training:
            return self.accelerator.prepare(loader)
        return loaders.stream_for_evaluation(loader, self.args.device)

    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> tuple[Any, ...]:
        """Trainer's values, computed from full windows and trained samples only."""
        return loaders.windows_of_stream(args, dataloader, super().set_initial_training_values(args, dataloader))

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any
    ) -> tuple[int, int]:
        """The number of completed epochs, and of trained micro-batches of the next one."""
        epochs, micro_batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, *args
        )
        self._first_step = step = self.state.global_step
        if step >= max_steps:
            # Trainer looks at the number of steps only after it has trained one.
            self.resumption.warn_of_nothing_left(step, max_steps)
            return num_train_epochs, 0
        return self.resumption.position(self.args, num_update_steps_per_epoch) or (epochs, micro_batches)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """Fetches a window, or nothing if the remaining rows of a stream do not fill one.

        All processes agree here that they have a window, so an error in the data of one process stops all of them, and
        a signal to one ends the training on all. No forward may run here, because on resume Trainer restores the random
        state after this call.
        """
        self._phases.enter("loading data", self.state.global_step)
        self.window = Window([])
        read = super().get_batch_samples
        self.window = self.training_data.fetch(
            lambda batches: read(batches, num_batches, device)[0],
            epoch_iterator,
            equal_ids=self.equal_ids,
            agree=self._agree,
            step=self.state.global_step,
            is_ending=lambda: bool(self._preemption.signal),
        )
        return self.window.batches, None

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Moves a batch to the device and normalises uint8 images there."""
        inputs = super()._prepare_inputs(inputs)
        # Trainer's preparation runs once more, because under DeepSpeed it casts to the dtype of the model.
        return loaders.normalised(inputs, self.data_collator, self._prepare_input)

    # ---- The step ----

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Adds the gradient of one micro-batch: see `WindowStep.run`, in which a whole step can be read.

        Trainer's loop calls this once for each micro-batch of the window that `get_batch_samples` returned, in order.
        ``inputs`` is ignored: the data comes from that window.

        Returns:
            The global loss for the last micro-batch of a window and 0 for the others, because Trainer adds up these
            values. If the window is skipped, the loss of the last trained window.
        """
        if callable(prepare := getattr(self.optimizer, "train", None)):  # schedule-free optimizers
            prepare()
        return self.window_step.run(model, self.window, self.state.global_step)

    def _before_optimizer_step(self) -> None:
        self._phases.enter("the optimizer's step", self.state.global_step)
        self.window_step.checks.before_optimizer_step(self.optimizer)

    def _after_optimizer_step(self) -> None:
        largest = self.args.max_logit_scale
        if largest is None:
            largest = OBJECTIVES[self.contrastive_objective].largest_scale
        self.window_step.end(self.optimizer, largest)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.training_data.wait.stop()
        # Among callbacks of others, the exchange has to wait for the reduction of the gradients.
        asked = self._shares_decisions and share_decisions(self.control)
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if asked:  # a callback may ask for the end after an evaluation
            share_decisions(self.control)
        self.training_data.wait.start()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics of contrastive training to the training logs; collective.

        They are described at `WindowStep.logs`, `Progress.logs` and `TrainingData.logs`.
        """
        if "loss" in logs:
            logs |= self.window_step.logs(logs)
            logs |= self.progress.logs(self.state.global_step, self.args.device)
            logs |= self.training_data.logs(self.window)
        super().log(logs, start_time)

    # ---- Evaluations ----

    @property
    def _evaluator(self) -> Evaluator:
        return Evaluator(
            self.dual_encoder,
            self.accelerator,
            self.args,
            objective=self.contrastive_objective,
            equal_ids=self.equal_ids,
            collator=self.data_collator,
            processing_class=self.processing_class,
            prepare_inputs=self._prepare_inputs,
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Any, Any]:
        """The embeddings and labels of this rank's rows, which are image-text pairs or labelled images."""
        if self.is_fsdp_enabled:
            Processes().agree([])  # before the forward, in which a process would wait for one that has failed
        with failures_announced_unless_sharded(self.accelerator):
            predictions, labels = self._evaluator.embed(inputs)
        self._phases.note_progress()
        number = max(int(number) for (number,) in Processes().agree([self._preemption.signal]))
        if number and self._is_between_steps:
            raise AskedToEndError(number)  # an evaluation within the training ends after a batch
        return None, predictions, labels

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Runs Trainer's loop over embeddings, then computes the same exact metrics of the whole set on every process.

        For pairs, these are ``loss``, the contrastive loss of the whole set as one batch, and retrieval recalls over
        all captions; for a `ZeroShotDataset`, they are accuracies. The loss uses the first caption of each image, or
        all of them with ``equal_ids="positive"``. No metric uses negative captions. Every process gets the numbers of
        rank 0. A training goes on as if it had not been evaluated: the random state of dropout stays the same.
        """
        self.gather_function = gather_rows
        if self.is_world_process_zero():
            name = f"evaluation set of {metric_key_prefix}_*"
            self.caption_notices.look(name, parts_of(dataloader.dataset), self.data_collator)
        compute, loop = self.compute_metrics, super().evaluation_loop
        self.compute_metrics = None if compute is None else failures_announced()(compute)
        try:
            return self._evaluator.run(
                lambda batches: loop(batches, description, False, ignore_keys, metric_key_prefix),
                dataloader,
                metric_key_prefix,
            )
        finally:
            self.compute_metrics = compute

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Trainer's evaluation between two steps, which a signal to any process ends together with the training."""
        self._phases.enter("evaluating", self.state.global_step)
        self._is_between_steps = True
        try:
            return super()._evaluate(*args, **kwargs)
        except AskedToEndError as asked:
            self._end_early(asked.number)  # here the random state is that of the training again
        finally:
            self._is_between_steps = False

    # ---- Checkpoints ----

    def _run(self) -> Run:
        return run_of(
            self.args,
            self.dual_encoder.model,
            self.train_dataset,
            self.data_collator,
            objective=self.contrastive_objective,
            equal_ids=self.equal_ids,
            mixed_precision=self.accelerator.mixed_precision,
        )

    def _record(self) -> RunRecord:
        """The record for a checkpoint of the current state; collective."""
        return RunRecord(
            self._run(),
            **self.training_data.position(),
            **self.window_step.skipped.record(),
            processes=self.args.world_size,
            only_model=self.args.save_only_model,
            optimizer=self._optimizer_options.record,
            samples_seen=self.samples_seen,
        )

    def _new_checkpoints(self, last: str | None = None) -> Checkpoints:
        return Checkpoints(
            completes=self.args.should_save,
            flushes=self.args.local_process_index == 0,
            ends_on_failure=self.is_fsdp_enabled or self.is_deepspeed_enabled,
            limit=self.args.save_total_limit,
            last=last,
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes Trainer's checkpoint completely or not at all; see `Checkpoints.save`."""
        self._phases.enter("saving", self.state.global_step)
        best_before = self.state.best_model_checkpoint
        saved = self.checkpoints.save(
            super()._get_output_dir(trial),
            self.state.global_step,
            self._record(),
            lambda checkpoint: self._write_checkpoint(checkpoint, model, trial),
        )
        if saved is None:
            self.state.best_model_checkpoint = best_before
            return
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(saved.folder))
        best = self.state.best_model_checkpoint
        # A checkpoint that is being uploaded stays until it has arrived.
        self.checkpoints.rotate(saved, [*self._pushes.uploading(), *([] if best is None else [Path(best)])])

    def _write_checkpoint(self, checkpoint: Checkpoint, model: Any, trial: Any) -> None:
        self._partial_dir = str(checkpoint.partial_dir)
        try:
            with best_checkpoint_kept(self.state, self.args, checkpoint):
                super()._save_checkpoint(model, trial)
        finally:
            self._partial_dir = None

    def _get_output_dir(self, trial: Any) -> str:
        return self._partial_dir or super()._get_output_dir(trial)

    def _load_best_model(self) -> None:
        self._to_evaluation_point()  # before the weights change
        super()._load_best_model()

    def _roll_back(self, reason: str) -> None:
        """Restores weights, optimizer, schedule and scaler, at most once; see `Checkpoints.to_go_back_to`."""
        checkpoint = self.checkpoints.to_go_back_to(reason)
        self._load_from_checkpoint(checkpoint)
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_scaler(checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model like Trainer, but also if FSDP2 writes its checkpoints in shards.

        With the state dict type SHARDED_STATE_DICT, Trainer writes no weights that ``from_pretrained`` could load.
        """
        self._to_evaluation_point()
        if self._partial_dir is None and saves_shards(self.accelerator):
            state = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir, state_dict=state)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        others = self.processing_class, self.hub_model_id if self.args.push_to_hub else None
        save_weights(self.dual_encoder, self.args, output_dir, state_dict, super()._save, *others)

    # ---- The Hub ----

    def init_hf_repo(self, token: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Creates the repository, and the branch ``hub_revision`` if it is given, unless they exist.

        Trainer calls this in its constructor, so a failure is reported before the first step.

        Raises:
            OSError: on the main process, if the Hub is unreachable or rejects the token or the name.
        """
        with pushes.errors_of_repository(self.args):
            super().init_hf_repo(token, *args, **kwargs)
            if self.is_world_process_zero():
                pushes.create_branch(self.args, str(self.hub_model_id), token)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a complete checkpoint in the background, as ``hub_strategy`` asks for; see `Pushes`."""
        if self._partial_dir is not None:
            return  # it is pushed once it is complete
        if saves_shards(self.accelerator) and self.args.hub_strategy != HubStrategy.END:
            self.save_model(_internal_call=True)  # the checkpoint has no whole model that could be pushed
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        push = partial(super()._push_from_checkpoint, checkpoint_folder)
        step, repository = self.state.global_step, str(self.hub_model_id)
        repeated = self._pushes.push_checkpoint(Path(checkpoint_folder), step, repository, push, self._push_jobs)
        if repeated:
            self.push_in_progress.jobs.extend(repeated)  # type: ignore[attr-defined]

    def _push_jobs(self) -> list[Any]:
        return list(getattr(getattr(self, "push_in_progress", None), "jobs", []))

    def _push_what_is_missing(self) -> None:
        """Waits for the pushes under way, and then pushes the checkpoints that the Hub lacks."""
        if self.is_world_process_zero():
            self._finish_current_push()
            self._pushes.push_missing(str(self.hub_model_id))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> CommitInfo:
        """Pushes the model like Trainer, after the checkpoints whose push has failed."""
        self._push_what_is_missing()
        return super().push_to_hub(*args, **kwargs)

    def push_folder(self, message: str = "End of training", delete: tuple[str, ...] = ()) -> None:
        """Pushes the current ``output_dir`` without its checkpoints, after the checkpoints whose push has failed.

        Args:
            message: the summary of the commit.
            delete: patterns of files that the commit removes from the repository.

        Raises:
            OSError: on the main process, if the push has failed; the message contains the reason.
        """
        if not self.is_world_process_zero():
            return
        with pushes.errors_of_push(self.args, lambda: str(self.hub_model_id)):
            if self.hub_model_id is None:  # without args.push_to_hub
                self.init_hf_repo()
            self._push_what_is_missing()
            pushes.push_output_dir(self.args, str(self.hub_model_id), message, delete)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes Trainer's draft, unless the folder already has a card that `hf_infcl.publishing` updates."""
        if not pushes.has_own_card(str(self.args.output_dir)):
            super().create_model_card(*args, **kwargs)
