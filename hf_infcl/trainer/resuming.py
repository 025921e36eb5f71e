"""Which run a checkpoint must come from to be resumed, and where the resumed run goes on."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerState
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..data import transparency
from ..data.replay import Replayed, epochs_of, is_own
from ..data.store import all_parts, content_fingerprint, most_captions, negative_caption_columns
from ..files.text import counted, was_and_is
from ..options.arguments import InfCLTrainingArguments
from ..options.declaring import facts_by_name, spelled
from ..options.record import RECORD_NAME, RunRecord, as_json, options_of_arguments, options_of_data, options_of_model
from ..processes.collectives import Processes
from ..step.terms import Context
from .checkpoints import choose
from .loop_events import Decisions, kept_state, why_complete
from .model_files import checkpoint_of_hub_if_named

logger = logging.get_logger(__name__)

_TRANSPARENCY = "transparency of images"
Position = tuple[int, int]  # completed epochs, and the batches of the next one that were trained


def make_run(context: Context) -> dict[str, Any]:
    """The properties of a training that a checkpoint must share to be resumed, as JSON values."""
    args, model, data = context.args, context.encoder.model, context.data
    kind = type(model).__name__.removeprefix("FSDP")  # the name of the wrapped class
    optimizer = spelled(args.optim).removesuffix("_fused")  # of the same state
    optimizer = optimizer if args.optimizer is None else f"{args.optimizer} and {optimizer}"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    start, keeps = context.start and context.start.fingerprint, args.keep_features
    run = {
        "global_batch_size": args.global_batch_size,
        "objective": context.objective,
        "model": f"{kind} with {sum(p.numel() for p in model.parameters()):,} parameters",
        "data": _described(data, args),
        "content": content_fingerprint(data),
        "equal_ids": context.equal_ids,
        "optimizer": f"{optimizer} of {trained:,} parameters",
        _TRANSPARENCY: transparency(),
    }
    options = {
        **options_of_arguments(args, context.accelerator.mixed_precision),
        **options_of_data(list(all_parts(data)), context.collator),
        **options_of_model(model),
        "fingerprint of the start": start if keeps else None,
        **({} if keeps or start is None else {"fingerprint of the adapted weights": start}),
        **as_json({name: value for part in context.extensions for name, value in part.options.items()}),
    }
    return {**run, **options, **run}


def _described(data: object, args: InfCLTrainingArguments) -> str:
    """Class, length, captions and order of a training set."""
    if isinstance(data, Replayed):
        new, old = (_described(part, args) for part in data.datasets)
        return f"{new}; {data.old} old pairs in a global batch from {old}"
    rows = f", {len(data)} rows" if has_length(data) else ""
    captions = f", {most} captions per image" if (most := most_captions(data)) > 1 else ""
    if columns := negative_caption_columns(data):
        captions += f", negative captions {' and '.join(columns)}"
    shuffled = args.train_sampling_strategy == "random"
    order = f", {'shuffled' if shuffled else 'in order'}, seed {args.seed_of_data}"
    return type(data).__name__ + rows + captions + ("" if isinstance(data, IterableDataset) else order)


def make_resumption(context: Context, resumes: str | bool | None, repository: str | None) -> "Resumption":
    """The checkpoint that a run resumes from, if any, after it was compared with the run; collective.

    Raises:
        ValueError: on every process, if their models, data or options differ, as an outdated copy does, or only some of
            them resume; there is no such checkpoint, it is damaged, or `Resumption.check` refuses it.
    """
    args, run = context.args, make_run(context)
    resumes = checkpoint_of_hub_if_named(resumes, args, repository)
    facts = facts_by_name(args)
    # What is no field, transformers adds, such as the version.
    of_this = {name: value for name, value in args.to_dict().items() if name in facts and not facts[name].one_machine}
    # The folder of a checkpoint may have different names on different machines.
    named = isinstance(resumes, str) and resumes != "auto"
    of_this |= run | {"resume_from_checkpoint": "a folder" if named else resumes or None}
    runs = Processes().gather_objects(as_json(of_this))
    for rank, other in enumerate(runs):
        if differences := [
            f"{name} is {value!r} on rank 0 and {other.get(name)!r} on rank {rank}"
            for name, value in runs[0].items()
            if other.get(name) != value
        ]:
            raise ValueError(
                f"The ranks would train different runs: {', '.join(differences)}. Give every machine the same model, "
                "data and options; a copy may be out of date."
            )
    resumption = Resumption(choose(str(args.output_dir), resumes, looks=args.should_save))
    resumption.check(run, context.data, args.world_size)
    return resumption


class Resumption:
    """The checkpoint (its folder) from which a training resumes, if any, and whether it may."""

    def __init__(self, checkpoint: str | None = None) -> None:
        self.checkpoint = checkpoint
        # None if there is no checkpoint, or another trainer wrote it.
        self.record = None if checkpoint is None else RunRecord.read(checkpoint)

    def check(self, run: Mapping[str, Any], data: object, world_size: int) -> None:
        """Raises a ValueError if the checkpoint is of another run or trainer, or has no position in a stream."""
        checkpoint, record = self.checkpoint, self.record
        if checkpoint is None:
            return
        if record is None:
            raise ValueError(
                f"{checkpoint} has no {RECORD_NAME}: another trainer wrote it, whose optimizer and data order do not "
                f"go on here. Start from its weights: --model {checkpoint}"
            )
        before = dict(record.run)
        if (rule := before.pop(_TRANSPARENCY, transparency())) != transparency():  # most images have none
            logger.warning(
                f"In {checkpoint}, transparency of images was {rule}. With this release of transformers it is "
                f"{transparency()}: transparent images change."
            )
        self._refuse(before, run)
        if isinstance(data, IterableDataset) and is_own(data) and not record.stream:
            raise ValueError(
                f"{checkpoint} holds no position in a stream, because it was not written by a training on such data. "
                f"Start anew from its weights: --model {checkpoint}"
            )
        if record.processes != world_size:
            logger.warning(
                f"{checkpoint} was written by {counted(record.processes, 'process')}, but this run has {world_size}. "
                "The global batches stay the same, but dropout draws different masks."
            )

    def check_optimizer(self, options: Mapping[str, Any]) -> None:
        """Raises a ValueError if the optimizer and the schedule of the checkpoint had other options than these."""
        self._refuse({} if self.record is None else self.record.optimizer, options)

    def _refuse(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        if different := was_and_is(before, now):
            raise ValueError(
                f"{self.checkpoint} is of another run: {different}. Restore the earlier values, or start anew from its "
                f"weights: --model {self.checkpoint}"
            )

    def ends_with_evaluation(self, trainer: Any, decisions: Decisions, epoch: int, kwargs: Mapping[str, Any]) -> bool:
        """Makes the evaluation that a signal cut off after the step of the checkpoint; whether the training then ends.

        The last epoch of a complete run begins again for this evaluation alone, after which the training ends.

        The learning rate, the end of the training and the choice of the best checkpoint may depend on it. What it
        logged before it was cut off is dropped. ``kwargs`` are the arguments of Trainer's method for an epoch.
        """
        state, args, control = trainer.state, trainer.args, trainer.control
        if epoch != kwargs["epochs_trained"] or not self._lacks_evaluation(state, args):
            return False
        is_complete = bool(why_complete(state, args.early_stopping_patience))
        state.log_history = [
            entry
            for entry in state.log_history
            if entry["step"] < state.global_step or not any(name.startswith("eval_") for name in entry)
        ]
        with decisions.shared(control):
            metrics = trainer._evaluate(kwargs["trial"], kwargs["ignore_keys_for_eval"])
            is_best = trainer._determine_best_metric(metrics, kwargs["trial"])
        if is_best and (args.save_strategy == "best" or is_complete):  # otherwise the next checkpoint notes it
            state.best_model_checkpoint = self.checkpoint
        return control.should_training_stop or is_complete

    def _lacks_evaluation(self, state: TrainerState, args: InfCLTrainingArguments) -> bool:
        """Whether a signal cut off the evaluation after the step of the checkpoint."""
        due = kept_state(state).get("TrainerControl", {}).get("args", {}).get("should_evaluate")
        return self.checkpoint is not None and bool(due) and args.eval_strategy != "no"

    def first_position(self, trainer: Any, counted: Position) -> Position:
        """The completed epochs, and the batches of the next one that Trainer's loop has trained.

        If the run is complete, which is warned of, these are all epochs, but for the last one if an evaluation is
        missing there: Trainer looks at the number of steps, and callbacks end a training, only after it has trained a
        step. The intervals of logs, evaluations and checkpoints become those of the arguments.

        ``counted`` are the numbers that Trainer computes, for checkpoints without a position in the data.
        """
        state, args = trainer.state, trainer.args
        if self.checkpoint is not None:  # Trainer would go on with the intervals of the checkpoint
            kinds = [kind for kind in ("logging", "eval", "save") if getattr(args, f"{kind}_strategy") == "steps"]
            before = {f"{kind}_steps": getattr(state, f"{kind}_steps") for kind in kinds}
            state.compute_steps(args, state.max_steps)
            if changed := was_and_is(before, {name: getattr(state, name) for name in before}):
                logger.warning(f"{self.checkpoint} is resumed with other intervals: {changed}.")
        if reason := why_complete(state, args.early_stopping_patience):
            at = f"{self.checkpoint} was saved after step {state.global_step}"
            logger.warning(f"Nothing is left to train: {at}, and {reason}.")
            return state.num_train_epochs - self._lacks_evaluation(state, args), 0
        if self.record is None or self.record.position is None:
            return counted
        epoch, position = 0, self.record.position
        if (passes := epochs_of(trainer.train_dataset, args)) is not None:
            epoch = passes.of(position)
            position -= passes.begin(epoch)
        return epoch, position * args.gradient_accumulation_steps
