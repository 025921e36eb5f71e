"""Points of Trainer's loop where it has no method to override: progress, the end, and what callbacks request."""

import logging
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..files.text import counted
from ..models.counting import count_window, peak_of, shapes_of
from ..models.dual_encoder import DualEncoder
from ..processes.collectives import Processes
from ..processes.signals import Preempted
from ..step.step import WindowStep
from ..step.window import Window
from .checkpoints import cause
from .loaders import TrainingData

_SECONDS = "train_seconds"
# The flags of Trainer's control that callbacks can set.
DECISIONS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")

logger = logging.getLogger(__name__)


# ---- How much a training has trained, and how fast ----


class Progress:
    """Counts the pairs and the seconds of a training, interruptions included, and the operations of a batch.

    Args:
        state: Trainer's at the start, which a checkpoint may have kept.
        batch: the pairs of a global batch.
    """

    def __init__(self, state: TrainerState, batch: int) -> None:
        now = time.perf_counter()
        self.first_step, self._batch = state.global_step, batch
        self._began = now - trained_seconds(state)
        self._last_log = now, state.global_step
        self._operations: dict[tuple[tuple[str, torch.Size], ...], int] = {}  # by the shapes of a batch
        self._first_window: list[dict[str, Any]] = []  # the shapes of its micro-batches
        self._of_window: int | None = None  # the operations of the first window; 0 if they cannot be counted

    def keep_seconds(self, state: TrainerState) -> None:
        """Puts the seconds of the training up to now into `kept_state`."""
        kept_state(state)[_SECONDS] = round(time.perf_counter() - self._began, 3)

    def look_at(self, window: Window) -> None:
        """Keeps the shapes of the first window, before it is trained."""
        self._first_window = self._first_window or shapes_of(window.batches)

    def logs(self, step: int, device: torch.device, encoder: DualEncoder) -> dict[str, float]:
        """global_batch_size, samples_seen, samples_per_second since the last call, train_seconds, peak_memory.

        On a chip whose peak is known also train_mfu: the share of it with which this process computes the products of
        its model, by those of the first window. What is computed again counts once.
        """
        now, (since, at) = time.perf_counter(), self._last_log
        logs: dict[str, float] = {"global_batch_size": self._batch, "samples_seen": step * self._batch}
        if step > at:
            logs["samples_per_second"] = round((step - at) * self._batch / (now - since), 3)
            peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
            if peak is not None and self._of_window is None:
                self._of_window = 0
                with suppress(ValueError):  # a model that cannot be counted
                    self._of_window = count_window(encoder, self._first_window)
            if peak is not None and self._of_window:
                logs["train_mfu"] = round((step - at) * self._of_window / (now - since) / peak, 4)
        self._last_log = time.perf_counter(), step  # counting takes a second
        logs[_SECONDS] = round(now - self._began, 3)
        if device.type == "cuda":
            logs["peak_memory"] = torch.cuda.max_memory_allocated(device)
        return logs

    def rate(self, logs: dict[str, float], step: int) -> dict[str, float]:
        """train_samples_per_second, at the end of this training: Trainer's has the steps before a resume."""
        pairs = (step - self.first_step) * self._batch
        return {"train_samples_per_second": round(pairs / logs["train_runtime"], 3)} if "train_runtime" in logs else {}

    def operations(self, inputs: dict[str, Tensor], count: Callable[[dict[str, Tensor]], int]) -> int:
        """Trainer's ``count`` of the operations of a batch, made once for each shape, since it lists all parameters."""
        shapes = tuple((name, value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor))
        if shapes not in self._operations:
            self._operations[shapes] = count(inputs)
        return self._operations[shapes]


def kept_state(state: TrainerState) -> dict[str, Any]:
    """The part of Trainer's state that checkpoints keep for callbacks, and for others under names of their own."""
    kept: Any = state.stateful_callbacks
    return kept


def trained_seconds(state: TrainerState) -> float:
    """The seconds of a training up to its last log or checkpoint, or to its end."""
    return float(kept_state(state).get(_SECONDS, 0.0))


# ---- Its end: by a signal, or by a metric that no longer improves ----


def saved_early(trainer: Any, trial: object, number: int) -> Preempted:
    """The end of a training by a signal, for which it saves a checkpoint, if it has trained any step; collective."""
    state, what = trainer.state, "Nothing was trained before that"
    step = state.global_step
    if trainer.steps_trained > 0:
        if trainer.saved_step != step:
            trainer._save_checkpoint(trainer.model_wrapped, trial)
            trainer.callback_handler.on_save(trainer.args, state, trainer.control)
        is_saved = trainer.saved_step == step
        what = f"checkpoint-{step} is saved" if is_saved else "No checkpoint of it could be saved"
    if state.is_world_process_zero:
        logger.warning(
            f"{signal.Signals(number).name} has ended the training after step {step}. {what}. "
            "Resume with --resume_from_checkpoint auto (in Python, trainer.train(resume_from_checkpoint='auto'))."
        )
    return Preempted(128 + number)


def measured_last(state: TrainerState, datasets: Iterable[str]) -> dict[str, float]:
    """The metrics of all datasets if they were measured after the last step; otherwise nothing.

    Measuring them again after the training would take time, and MLflow and trackio would start a new run for it.
    """
    entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
    metrics = {name: value for entry in entries for name, value in entry.items() if name.startswith(("eval_", "epoch"))}
    complete = all(any(name.startswith(f"eval_{dataset}_") for name in metrics) for dataset in datasets)
    return metrics if complete else {}


class EarlyStopping(EarlyStoppingCallback):
    """transformers' callback, also for several evaluation sets, for each of which Trainer calls it, and after a resume.

    A resumed training continues its count of evaluations without improvement, and does not count that of
    ``eval_on_start``, as if it had not been interrupted. Trainer itself would restore the callback with the patience of
    the checkpoint (``restore_callback_states_from_checkpoint``), which may change.
    """

    _first_step = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: object) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.early_stopping_patience_counter, self._first_step = _count(state), state.global_step

    def on_epoch_begin(self, *_: object, **kwargs: object) -> None:
        self._first_step = -1  # a resumed training may repeat the evaluation of its first step

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **more: object) -> None:
        is_of_its_set = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}" in metrics
        if is_of_its_set and state.global_step != self._first_step:
            super().on_evaluate(args, state, control, metrics, **more)


def _count(state: TrainerState) -> int:
    """The evaluations without improvement before the training was resumed."""
    saved = kept_state(state).get(EarlyStopping.__name__, {}) if state.global_step else {}
    return int(saved.get("attributes", {}).get("early_stopping_patience_counter", 0))


def why_complete(state: TrainerState, patience: int | None) -> str:
    """Why a resumed training has no step left; empty if it has one."""
    if state.global_step >= state.max_steps:
        return f"the run has {counted(state.max_steps, 'step')}"
    if patience is not None and _count(state) >= patience:
        return f"early_stopping_patience={patience} ended the run there; raise it to train on"
    return ""


# ---- Callbacks ----


class LoopEvents(TrainerCallback):
    """Calls the parts of a training at points of Trainer's loop; ``begin_training`` returns them.

    Trainer passes arguments, state and control by position, and everything else by name. While it trains, a
    `CompleteWindows` is the last of its callbacks.
    """

    def __init__(
        self, callbacks: list[TrainerCallback], begin_training: Callable[[], tuple[WindowStep, TrainingData]]
    ) -> None:
        self._callbacks, self._begin_training = callbacks, begin_training

    def on_train_begin(self, *_: object, **kwargs: object) -> None:
        self._callbacks[:] = [one for one in self._callbacks if not isinstance(one, CompleteWindows)]
        self._callbacks.append(CompleteWindows())  # after the user's callbacks
        self._step, self._data = self._begin_training()

    def on_pre_optimizer_step(self, args: object, state: TrainerState, *_: object, **kwargs: Any) -> None:
        self._step.before_optimizer_step(kwargs["optimizer"], state.global_step)

    def on_optimizer_step(self, *_: object, **kwargs: Any) -> None:
        self._step.after_optimizer_step(kwargs["optimizer"])

    def on_step_end(self, *_: object, **kwargs: object) -> None:
        self._data.end_window()


def add_own_callbacks(trainer: Any) -> None:
    """Adds the callbacks of this package to those of an `InfCLTrainer`, whose trackers no longer end it by an error."""
    handler, args = trainer.callback_handler, trainer.args
    for callback in handler.callbacks:
        if type(callback).__module__.startswith("transformers.integrations."):
            _guard(callback)
    # This callback comes first, so that the user's callbacks see the clamped logit_scale.
    handler.callbacks.insert(0, LoopEvents(handler.callbacks, trainer._begin_training))
    if args.early_stopping_patience is not None:
        handler.add_callback(EarlyStopping(args.early_stopping_patience))
        return
    for place, callback in enumerate(handler.callbacks):
        if type(callback) is EarlyStoppingCallback:  # which knows neither several evaluation sets nor resumes
            limits = callback.early_stopping_patience, callback.early_stopping_threshold
            handler.callbacks[place] = EarlyStopping(*limits)


def _guard(tracker: TrainerCallback) -> None:
    """Lets a tracker end with its first error, such as that of a server that is down, and the training go on."""
    has_failed = False

    def call(event: Callable[..., TrainerControl | None], *args: Any, **kwargs: Any) -> TrainerControl | None:
        nonlocal has_failed
        try:
            return None if has_failed else event(*args, **kwargs)
        except Exception as error:  # trackers raise exceptions of any class
            has_failed, name = True, type(tracker).__name__
            logger.warning(f"{name} records nothing from now on, because of its error: {cause(error)}.")
            return None

    for name in dir(TrainerCallback):
        if name.startswith("on_"):
            setattr(tracker, name, partial(call, getattr(tracker, name)))


class CompleteWindows(TrainerCallback):
    """Postpones what other callbacks ask for at the begin of a window, or within it, to its end.

    Trainer would leave the window at once, whose gradient so far would be part of the next window's.
    """

    _epoch_stop = _training_stop = False

    def on_step_begin(self, args: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        self._epoch_stop |= control.should_epoch_stop
        self._training_stop |= control.should_training_stop
        control.should_epoch_stop = control.should_training_stop = False

    on_substep_end = on_step_begin  # requests within the window wait as well

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        control.should_epoch_stop |= self._epoch_stop
        control.should_training_stop |= self._training_stop
        self._epoch_stop = self._training_stop = False


def is_logged(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> bool:
    """Whether a step is to be logged even if it ends no interval of ``logging_steps``.

    With ``logging_first_step`` these are the first step and the last, which Trainer would not log unless it ends an
    interval. An evaluation may make any step the last. If nobody has chosen an interval, or it is longer than the
    training, so are ten steps at equal distances.
    """
    if args.logging_strategy != "steps":
        return False
    chosen = args.logging_steps != TrainingArguments.logging_steps and state.logging_steps <= state.max_steps
    if chosen and not args.logging_first_step:
        return False
    of_ten = not chosen and state.global_step % max(1, state.max_steps // 10) == 0
    return of_ten or state.global_step == 1 or control.should_evaluate or control.should_training_stop


class Decisions:
    """Makes all processes log, evaluate, save or end the training if a callback on any process asks for it.

    For example, a callback may read the clock, which differs between processes. Callbacks of transformers and of this
    package decide alike on all processes; among them nothing is exchanged. The constructor compares the callbacks with
    those of the other processes; collective.
    """

    def __init__(self, callbacks: Iterable[TrainerCallback]) -> None:
        packages = {type(callback).__module__.split(".")[0] for callback in callbacks}
        has_foreign = not packages <= {"transformers", "hf_infcl"}
        self._differ = any(has for (has,) in Processes().agree([has_foreign]))

    @contextmanager
    def shared(self, control: TrainerControl) -> Iterator[None]:
        """The context in which Trainer does what callbacks request; collective."""
        requested = self._differ and _share(control)
        yield
        if requested:  # a callback may request the end after an evaluation
            _share(control)


# ---- Values that Trainer's loop reads ----


def switch_weights(optimizer: Optimizer | None, mode: Literal["train", "eval"]) -> None:
    """Puts the weights to train, or those to evaluate and save, into the model: schedule-free optimizers have both."""
    if callable(switch := getattr(optimizer, mode, None)):
        switch()


def _share(control: TrainerControl) -> bool:
    """Whether anything was requested."""
    requested = Processes().agree([getattr(control, name) for name in DECISIONS])
    for name, votes in zip(DECISIONS, zip(*requested, strict=True), strict=True):
        setattr(control, name, any(votes))
    return any(map(any, requested))
