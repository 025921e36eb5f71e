"""Points of Trainer's loop where it has no method to override, what callbacks ask for, and values that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from torch.optim import Optimizer
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import IntervalStrategy

from ..loading.training_data import TrainingData
from ..options.arguments import InfCLTrainingArguments
from ..processes.collectives import Processes
from ..windows.step import WindowStep
from .ending import EarlyStopping
from .progress import Progress

# The flags of Trainer's control that callbacks can set.
DECISIONS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


class LoopEvents(TrainerCallback):
    """Calls the parts of a training at points of Trainer's loop; ``begin_training`` returns them.

    Trainer passes arguments, state and control by position, and everything else by name. While it trains, a
    `CompleteWindows` is the last of its callbacks.
    """

    def __init__(
        self, callbacks: list[TrainerCallback], begin_training: Callable[[], tuple[WindowStep, TrainingData, Progress]]
    ) -> None:
        self._callbacks, self._begin_training = callbacks, begin_training
        self._progress: Progress | None = None  # of a training, not before or after it

    def on_train_begin(self, *_: object, **kwargs: object) -> None:
        self._callbacks[:] = [one for one in self._callbacks if not isinstance(one, CompleteWindows)]
        self._callbacks.append(CompleteWindows())  # after the user's callbacks
        self._step, self._data, self._progress = self._begin_training()

    def on_train_end(
        self, args: object, state: TrainerState, *_: object, optimizer: Optimizer | None = None, **kwargs: object
    ) -> None:
        switch_weights(optimizer, "eval")
        self._data.close()
        self._count_seconds(state)
        self._progress = None

    def on_pre_optimizer_step(
        self, args: object, state: TrainerState, *_: object, optimizer: Optimizer | None = None, **kwargs: object
    ) -> None:
        self._step.before_optimizer_step(optimizer, state.global_step)

    def on_optimizer_step(self, *_: object, optimizer: Optimizer | None = None, **kwargs: object) -> None:
        self._step.after_optimizer_step(optimizer)

    def on_step_end(self, args: object, state: TrainerState, *_: object, **kwargs: object) -> None:
        self._data.end_window()
        self._count_seconds(state)

    def on_evaluate(self, args: object, state: TrainerState, *_: object, **kwargs: object) -> None:
        self._count_seconds(state)  # a checkpoint may follow

    def _count_seconds(self, state: TrainerState) -> None:
        if self._progress is not None:
            self._progress.keep_seconds(state)


def add_own_callbacks(
    handler: CallbackHandler,
    args: InfCLTrainingArguments,
    begin_training: Callable[[], tuple[WindowStep, TrainingData, Progress]],
) -> None:
    """Adds the callbacks of this package to those of a trainer."""
    # This callback comes first, so that the user's callbacks see the clamped logit_scale.
    handler.callbacks.insert(0, LoopEvents(handler.callbacks, begin_training))
    if args.early_stopping_patience is not None:
        handler.add_callback(EarlyStopping(args.early_stopping_patience))
        return
    for place, callback in enumerate(handler.callbacks):
        if type(callback) is EarlyStoppingCallback:  # which knows neither several evaluation sets nor resumes
            asked = callback.early_stopping_patience, callback.early_stopping_threshold
            handler.callbacks[place] = EarlyStopping(*asked)


class CompleteWindows(TrainerCallback):
    """Postpones what other callbacks ask for at the begin of a window, or within it, to its end; asks for logs.

    Trainer would leave the window at once, whose gradient so far would be part of the next window's. The last callback
    knows whether a step is the last one, which Trainer would not log unless it ends an interval.
    """

    def __init__(self) -> None:
        self._epoch_stop = self._training_stop = False

    def on_step_begin(self, args: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        self._epoch_stop |= control.should_epoch_stop
        self._training_stop |= control.should_training_stop
        control.should_epoch_stop = control.should_training_stop = False

    on_substep_end = on_step_begin  # what was asked for within the window waits as well

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        control.should_epoch_stop |= self._epoch_stop
        control.should_training_stop |= self._training_stop
        self._epoch_stop = self._training_stop = False
        control.should_log |= is_logged(args, state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        control.should_log |= is_logged(args, state, control)


def is_logged(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> bool:
    """Whether a step is to be logged even if it ends no interval of ``logging_steps``.

    With ``logging_first_step`` these are the first step and the last. An evaluation may make any step the last. If
    nobody has chosen an interval, or it is longer than the training, so are ten steps at equal distances.
    """
    if args.logging_strategy != IntervalStrategy.STEPS:
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
        """The context in which Trainer does what was asked for; collective."""
        asked = self._differ and _share(control)
        yield
        if asked:  # a callback may ask for the end after an evaluation
            _share(control)


def switch_weights(optimizer: Optimizer | None, mode: Literal["train", "eval"]) -> None:
    """Puts the weights to train, or those to evaluate and save, into the model: schedule-free optimizers have both."""
    if callable(switch := getattr(optimizer, mode, None)):
        switch()


@contextmanager
def replaced(trainer: object, **values: object) -> Iterator[None]:
    """The context in which Trainer's methods find these values in attributes of a trainer."""
    before = {name: getattr(trainer, name) for name in values}
    for name, value in values.items():
        setattr(trainer, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)


def _share(control: TrainerControl) -> bool:
    """Whether anything was asked for."""
    asked = Processes().agree([getattr(control, name) for name in DECISIONS])
    for name, votes in zip(DECISIONS, zip(*asked, strict=True), strict=True):
        setattr(control, name, any(votes))
    return any(map(any, asked))
