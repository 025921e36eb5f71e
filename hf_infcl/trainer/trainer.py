"""`InfCLTrainer`: one optimizer step is one contrastive batch. Trainer's methods that differ call the parts."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub import ModelCard
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from ..data.collator import normalised
from ..data.loader import checked_batches
from ..data.replay import is_own
from ..data.store import all_parts, check_has_rows, most_captions
from ..evaluation.metrics import Found
from ..models.dual_encoder import DualEncoder
from ..optim.groups import matching
from ..options.arguments import InfCLTrainingArguments
from ..options.record import RunRecord
from ..processes.collectives import gather_rows
from ..processes.lock import locked
from ..processes.signals import EndRequestedError, Interruptions, heed_parent_alone
from ..quality.embedding import with_cached_features
from ..quality.selection import make_selections
from ..quality.teachers import make_teachers
from ..step.micro_batches import find_micro_batches, recorded, run_repeating
from ..step.step import WindowStep
from ..step.terms import Context, Start
from . import construction, loaders, model_files
from .checkpoints import Checkpoint, rotate
from .evaluating import Evaluator, check_metric, checked_metrics, metrics_of, tell_predictions
from .loop_events import Decisions, Progress, add_own_callbacks, is_logged, saved_early, switch_weights
from .optimization import Optimization
from .resuming import Resumption, make_resumption, make_run


class InfCLTrainer(Trainer):
    """A `transformers.Trainer` in which each optimizer step minimises the loss of one global contrastive batch.

    However the batch is split, the gradient of every parameter, including logit_scale and logit_bias, equals the
    gradient of one process that holds the whole batch. `WindowStep.run` is the step.

    Args:
        model: a dual encoder of transformers (see `hf_infcl.models.dual_encoder`). Frozen parameters stay frozen.
        args: `InfCLTrainingArguments`.
        train_dataset: items for the data collator. The trainer draws only full global batches, which go on from one
            shuffled pass into the next. An IterableDataset needs ``max_steps`` and captions in lists, an
            `ImageTextStream` also takes epochs.
        eval_dataset: an `ImageTextDataset` (global contrastive loss and retrieval), a `ZeroShotDataset`
            (classification), or a dict of them.
        data_collator: returns batches for the model, optionally with ``pair_ids`` [b] int64; by default a
            `ContrastiveCollator` over ``processing_class``. ``caption_image`` [texts] int64 is the index of each text's
            image, -1 for a text that belongs to no image; without it, text i belongs to image i.
        **kwargs: ``replay_dataset``, old pairs to mix into every global batch: an `ImageTextStream` or a dataset with a
            length (see `hf_infcl.data.replay.Replayed`, which then is the attribute ``train_dataset``);
            ``extensions`` of the step (see `hf_infcl.step.extensions`); and the other arguments of
            `transformers.Trainer`, of which ``compute_metrics`` receives what `Evaluator.embed` describes.

    Attributes:
        context, window_step, training_data, progress, optimization: the parts of the last training; see their classes.
        saved_step: the step of the last checkpoint that the training wrote, or -1.
        resumption, interruptions: what it came from; signals and lost processes.
        found: ranks or scores of the last evaluation of each set, by the prefix of its metrics, such as ``eval_pairs``.
        caption_notices: notices about the captions of the datasets that were trained on or evaluated.

    Raises:
        ValueError: see `check_arguments`, `prepare_model` and `check_overrides`.
    """

    args: InfCLTrainingArguments
    _start: Start | None = None
    _partial_dir: str | None = None  # the folder of the checkpoint that is being written now, if any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: InfCLTrainingArguments | None = None,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        args = InfCLTrainingArguments() if args is None else args
        construction.check_arguments(model, args, data_collator, kwargs)
        construction.check_overrides(type(self), InfCLTrainer)
        self.resumption, self.interruptions = Resumption(), Interruptions()
        self.caption_notices = loaders.CaptionNotices()
        self.found: dict[str, Found | None] = {}
        self._evaluating: Evaluator | None = None
        self._pushes, self.optimization = model_files.Pushes(args), Optimization(args)
        self._extensions = tuple(kwargs.pop("extensions", ()))
        super().__init__(model, args, data_collator, **kwargs)
        if model is not None:  # otherwise `call_model_init` has prepared it
            self._start = construction.prepare_model(self.model, args, self.accelerator)
        self.data_collator = construction.make_collator(self, data_collator)
        self._extensions += make_teachers(self.context, remakes_model=model is None)
        add_own_callbacks(self)
        self._begin_training()

    # ---- The life of a training ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: object = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Trains like Trainer, but resumes only from complete checkpoints (see `hf_infcl.trainer.checkpoints`).

        A complete run trains and saves nothing, and evaluates only what a signal cut off. When any process receives
        SIGTERM, SIGUSR1 or SIGINT (Ctrl-C), all processes finish the step and save a checkpoint.

        Args:
            resume_from_checkpoint: the folder of a checkpoint; True for the newest complete one in ``output_dir``;
                ``"auto"`` for the newest complete one, or a new start if there is no checkpoint; ``"last-checkpoint"``
                for the one that ``hub_strategy="checkpoint"`` has pushed to ``hub_model_id``.

        Raises:
            ValueError: in addition to Trainer's reasons, there is no such checkpoint, or `make_resumption` refuses it
                or the processes; another run is training in ``output_dir``, or it is not writable.
            OtherRankFailedError: another process failed. If it has ended or hangs, the message states its last phase.
            Preempted: a signal ended the training, which has saved a checkpoint. This is a SystemExit.
        """
        measures_alone = self.compute_metrics is None and type(self).evaluate is Trainer.evaluate
        if measures_alone and self.args.eval_strategy != "no":
            check_metric(self.args, metrics_of(self.eval_dataset))
        shared = self.args.save_strategy != "no" and not self.args.save_only_model
        alone = locked(str(self.args.output_dir), locks=self.args.should_save, shared=shared)
        with alone, self.interruptions.watched(float(self.args.ddp_timeout), self._pushes.finish):
            self._pushes.fetch_checkpoint(resume_from_checkpoint)
            self.resumption = make_resumption(self.context, resume_from_checkpoint, self.hub_model_id)
            self._decisions = Decisions(self.callback_handler.callbacks)
            try:
                return super().train(self.resumption.checkpoint, trial, ignore_keys_for_eval)
            except EndRequestedError as requested:  # between two steps, on all processes alike
                raise saved_early(self, trial, requested.args[0]) from None
            finally:
                self.window_step.close()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        batches = partial(checked_batches, self.get_train_dataloader, self.context.equal_ids)
        find_micro_batches(self.context, self.resumption.record, batches)  # checkpointing is on
        self._train_batch_size = self.args.per_device_train_batch_size
        return super()._inner_training_loop(*args, **kwargs)

    def _begin_training(self) -> tuple[WindowStep, loaders.TrainingData]:
        """Creates the parts that live as long as a training."""
        record, loader = self.resumption.record, self.callback_handler.train_dataloader
        self.saved_step = -1
        context, steps = self.context, self.state.max_steps
        self.training_data = loaders.TrainingData(context, self.interruptions, loader, record)
        self.progress = Progress(self.state, self.args.global_batch_size)
        context = replace(context, extensions=(*make_selections(context, steps), *context.extensions))
        phases = self.interruptions.phases
        self.window_step = WindowStep(context, self.model_wrapped, record, phases=phases, steps=steps)
        self.window_step.load_state_dict(model_files.read_states(self.resumption.checkpoint))
        if record is not None and record.loss_since_log is not None:
            loss, self._globalstep_last_logged = record.loss_since_log
            self._tr_loss += loss  # so that the first log has the mean of all steps since the last one
            self._total_loss_scalar -= loss  # Trainer's loss at the end is the mean of this training's own steps
        if loader is not None and self.is_world_process_zero():
            self.caption_notices.was_told = record is not None
            self.caption_notices.look_at_all(self.context, self.eval_dataset)
        return self.window_step, self.training_data

    def _run_epoch(self, model: nn.Module, epoch: int, *args: object, **kwargs: Any) -> None:
        if not self.resumption.ends_with_evaluation(self, self._decisions, epoch, kwargs):
            kwargs |= self.training_data.begin_epoch(epoch, self.window_step.skipped_rows)
            super()._run_epoch(model, epoch, *args, **kwargs)
            self.interruptions.agree()  # a signal may have come in the last step

    @property
    def steps_trained(self) -> int:
        """Optimizer steps of the last call of `train`: 0 for a run that was complete when it was resumed."""
        return self.state.global_step - self.progress.first_step

    # ---- The model, its optimizer and its schedule ----

    @cached_property
    def dual_encoder(self) -> DualEncoder:
        """The unwrapped model as two towers and a temperature."""
        return DualEncoder(self.accelerator.unwrap_model(self.model), dims=self.args.dims)

    @property
    def context(self) -> Context:
        """What the parts have in common."""
        data = self.train_dataset
        equal_ids = self.args.equal_ids or ("positive" if most_captions(data) > 1 else "exclude")
        of_data: Any = self._start, data, self.data_collator, self._extensions, loaders.rows_of(data)
        return Context(self.dual_encoder, self.accelerator, self.args, equal_ids, self._prepare_inputs, *of_data)

    def call_model_init(self, trial: object = None) -> Any:
        model = super().call_model_init(trial)
        vars(self).pop("dual_encoder", None)  # of the model before
        self._start = construction.prepare_model(model, self.args, self.accelerator)
        return model

    def _hp_search_setup(self, trial: object) -> None:
        super()._hp_search_setup(trial)
        self.args.check()  # the trial has changed them

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's names without vectors and scalars: as in CLIP, only matrices decay, and never logit_scale.

        Names in which a pattern of ``no_decay_parameters`` is found do not decay either; see `matching` for the errors.
        """
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        exempt = matching(trained, "no_decay_parameters", self.args.no_decay_parameters or ())
        names = super().get_decay_parameter_names(model)
        return [name for name in names if name in trained and trained[name].ndim > 1 and name not in exempt]

    def create_optimizer(self, *args: object, **kwargs: object) -> torch.optim.Optimizer:
        """Trainer's optimizer or Muon, with the rates of the options of this package."""
        self.optimizer = self.optimization.optimizer(self, partial(super().create_optimizer, *args, **kwargs))
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> torch.optim.lr_scheduler.LRScheduler:
        return self.optimization.scheduler(self, partial(super().create_scheduler, *args, **kwargs))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.resumption.check_optimizer(self.optimization.options)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"The optimizer's state in {checkpoint} does not fit this run ({error}). Start anew from its weights: "
                f"--model {checkpoint}"
            ) from error

    # ---- Data ----

    def get_train_dataloader(self) -> DataLoader:
        """A new training loader, which begins where the training does, and may be looked into."""
        collator = loaders.training_collator(self.data_collator, self.args)
        pairs = with_cached_features(replace(self.context, collator=collator), self.interruptions)
        if pairs is None:
            return super().get_train_dataloader()  # which raises
        if (own := is_own(pairs)) and hasattr(pairs, "remove_columns"):  # a table of datasets
            pairs = self._remove_unused_columns(pairs, "training")
        elif not (own and isinstance(pairs, IterableDataset)):
            collator = self._get_collator_with_removed_columns(collator, "training")
        collate = loaders.TrainingCollator(collator, self.context)
        if not own:
            return loaders.loader_of_stream(pairs, collate, self.args)
        return loaders.TrainingLoader(pairs, collate, self.args, self.resumption.record)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        loaders.add_used_columns(self._signature_columns, self.data_collator)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> DataLoader:
        """Trainer's loader of an evaluation, whose workers no signal but that of their parent ends."""
        check_has_rows(dataset)
        # Loaders of accelerate call a method ``set_epoch`` whenever they are iterated. That of a dataset that is
        # evaluated would change the epoch of a training on the same dataset.
        rows = Subset(dataset, range(len(dataset))) if hasattr(dataset, "set_epoch") else dataset
        loader = super()._get_dataloader(rows, *args, **kwargs)
        getattr(loader, "base_dataloader", loader).worker_init_fn = heed_parent_alone  # of accelerate's, or of torch's
        return loader

    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> tuple[Any, ...]:
        return loaders.values_of_loop(args, dataloader, super().set_initial_training_values(args, dataloader))

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """The number of completed epochs, and of trained micro-batches of the next one."""
        # Trainer takes shares of the training (logging_steps=0.01), and micro-batches that were found, for changes.
        # `first_position` warns of those of intervals, and the micro-batch decides nothing.
        with patch("transformers.trainer.compare_trainer_and_checkpoint_args", lambda *_: None):
            counted = super()._init_training_state(*args)
        return self.resumption.first_position(self, counted)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        # No forward may run here, because on resume Trainer restores the random state after this call.
        self.training_data.fetch(epoch_iterator, self.state.global_step)
        return [batch for batch, _ in self.training_data.given], None

    def _prepare_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """Moves a batch to the device and normalises uint8 images there."""
        return normalised(super()._prepare_inputs(inputs), self.data_collator, self._prepare_input)

    # ---- The step ----

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """Adds the gradient of a whole window in the last of Trainer's calls for it: see `WindowStep.run`.

        Raises a ValueError if it gets other batches than those of the window.
        """
        if not self.training_data.is_as_fetched(inputs):
            raise ValueError(
                "InfCLTrainer trains the batches of its data loader twice over, and would not see what training_step "
                "or get_batch_samples make of them. Change batches in the data_collator, in _prepare_inputs or in a "
                "StepChange (hf_infcl.step.extensions)."
            )
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        switch_weights(self.optimizer, "train")
        self.progress.look_at(self.training_data.window)
        return run_repeating(self.window_step, self.training_data.window, self.state.global_step)

    def floating_point_ops(self, inputs: dict[str, Tensor]) -> int:
        return self.progress.operations(inputs, super().floating_point_ops)

    def _clip_grad_norm(self, model: nn.Module, *args: Any) -> Any:
        norms = self.training_data.window.gradient_norms  # that the step has read all gradients for
        norm = None if norms is None else norms.clipped(self.args.max_grad_norm)
        return super()._clip_grad_norm(self._with_terms(model), *args) if norm is None else norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and (norms := self.training_data.window.gradient_norms) is not None:
            grad_norm = norms.clipped()
        return super()._get_grad_norm(self._with_terms(model), grad_norm=grad_norm)

    def _with_terms(self, model: nn.Module) -> nn.Module:
        """The model with what terms train beside it: the gradients of all have one norm."""
        beside = self.window_step.term_parameters
        return nn.ParameterList([*model.parameters(), *beside]) if beside else model

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # With callbacks from elsewhere, the exchange has to wait for the reduction of the gradients.
        with self.training_data.wait.stopped(), self._decisions.shared(self.control):
            self.control.should_log |= is_logged(self.args, self.state, self.control)
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds `WindowStep.logs`, `Progress.logs` and `TrainingData.logs` to the logs of the training; collective."""
        if "loss" in logs:
            self.progress.keep_seconds(self.state)  # which the card after an evaluation reads
            logs |= self.window_step.logs(logs)
            logs |= self.training_data.logs(self.window_step.seconds_of_first_pass())
            logs |= self.progress.logs(self.state.global_step, self.args.device, self.dual_encoder)
        logs |= self.progress.rate(logs, self.state.global_step)
        super().log(logs, start_time)

    # ---- Evaluations ----

    @property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.context, self.processing_class, self.state)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: object = None
    ) -> tuple[None, Any, Any]:
        """The embeddings and labels of this process's rows; see `Evaluator.embed`."""
        predictions, labels = (self._evaluating or self._evaluator).embed(inputs)
        self.interruptions.end_batch()
        return None, predictions, labels

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Computes the same exact metrics of the whole set on every process; see `Evaluator.run`."""
        self.gather_function, evaluator, loop = gather_rows, self._evaluator, super().evaluation_loop
        compute = None if self.compute_metrics is None else partial(checked_metrics, self.compute_metrics)
        if self.is_world_process_zero():
            name, parts = f"evaluation set of {metric_key_prefix}_*", all_parts(dataloader.dataset)
            self.caption_notices.look(name, parts, self.data_collator)
            if compute is not None or description == "Prediction":
                tell_predictions()
        more: Any = description, False, ignore_keys, metric_key_prefix
        with patch.multiple(self, compute_metrics=compute, _evaluating=evaluator):
            output = evaluator.run(lambda batches: loop(batches, *more), dataloader, metric_key_prefix)
        self.found[metric_key_prefix] = evaluator.found
        return output

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.interruptions.evaluation(self.state.global_step, self.control):
            return super()._evaluate(*args, **kwargs)

    # ---- Checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Writes Trainer's checkpoint completely or not at all, removes old ones and pushes it; collective."""
        args, state = self.args, self.state
        checkpoint = Checkpoint(super()._get_output_dir(trial), state.global_step)
        self.interruptions.phases.enter("saving", state.global_step)
        self.progress.keep_seconds(state)
        record = RunRecord(
            make_run(self.context),
            **self.training_data.position(),
            **self.window_step.checks.record(),
            processes=args.world_size,
            only_model=args.save_only_model,
            optimizer=self.optimization.options,
            micro_batches=recorded(args),
            compiled=self.window_step.compilation.decided,
            loss_since_log=(self._tr_loss.item(), self._globalstep_last_logged),
        )
        save, best_before = partial(super()._save_checkpoint, model, trial), state.best_model_checkpoint
        write = partial(model_files.write_checkpoint, self, save, checkpoint)
        completes, flushes, sharded = args.should_save, args.local_process_index == 0, self.accelerator.is_fsdp2
        with patch.object(self, "_partial_dir", str(checkpoint.partial_dir)):
            saved = checkpoint.save(record, write, completes=completes, flushes=flushes, ends_on_failure=sharded)
        if not saved:
            state.best_model_checkpoint = best_before
            return
        self.saved_step, folder = state.global_step, checkpoint.folder
        if completes:
            best = Path(state.best_model_checkpoint or folder)
            rotate(folder.parent, args.save_total_limit, [folder, best, *self._pushes.uploading().values()])
        self._pushes.copy_checkpoint(folder)
        if args.push_to_hub:  # last, as the Hub's client looks into all folders
            self._push_from_checkpoint(str(folder))

    def _get_output_dir(self, trial: object) -> str:
        return self._partial_dir or super()._get_output_dir(trial)

    def _finalize_training(self, trial: object, samples: int, start_time: float) -> TrainOutput:
        switch_weights(self.optimizer, "eval")  # before the best ones are loaded
        self.training_data.close()
        self.progress.keep_seconds(self.state)
        # It removes all checkpoints but the best with save_total_limit=1.
        return super()._finalize_training(trial, samples, start_time + self._pushes.finish())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model like Trainer, but also if FSDP2 writes its checkpoints in shards, which Trainer does not."""
        switch_weights(self.optimizer, "eval")
        if model_files.saves_shards(self.accelerator) and self._partial_dir is None:
            state = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:  # older releases of transformers write on every process that calls it
                self._save(output_dir, state)
        super().save_model(output_dir, _internal_call)
        if not _internal_call and output_dir is None:
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, "on_model_saved"):  # an event that Trainer does not have
                    callback.on_model_saved(self.args, self.state, self.control)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        model_files.save_weights(self, output_dir, state_dict, super()._save)

    def init_hf_repo(self, token: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Creates the repository and the branch ``hub_revision``; see `model_files.make_repository`."""
        model_files.make_repository(self, partial(super().init_hf_repo, token, *args, **kwargs), token)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a complete checkpoint in the background, as ``hub_strategy`` asks for; see `Pushes`."""
        if self._partial_dir is None:  # the checkpoint is complete
            self._pushes.push_checkpoint(self, Path(checkpoint_folder), super()._push_from_checkpoint)

    def push_folder(self, message: str = "End of training", delete: tuple[str, ...] = ()) -> None:
        """Pushes the current ``output_dir`` without its checkpoints; see `Pushes.push_output_dir`."""
        if self.hub_model_id is None:  # without push_to_hub
            self.init_hf_repo()
        self._pushes.push_output_dir(self.hub_model_id, message, delete)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes Trainer's draft, unless the folder already has a card that `hf_infcl.card` updates."""
        card = Path(str(self.args.output_dir), "README.md")
        if not (card.is_file() and "hf_infcl" in (ModelCard.load(card).data.tags or [])):
            super().create_model_card(*args, **kwargs)
