"""What may end a training from outside: signals to any of its processes, and processes that are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .collectives import Processes
from .phases import Phases
from .preemption import AskedToEndError, Preemption


class Interruptions:
    """Learns of signals and of lost processes while a training is `watched`; before and after it, of none.

    Attributes:
        phases: records what this process is doing.
    """

    def __init__(self) -> None:
        self._preemption, self.phases = Preemption(), Phases()
        self._evaluates = False

    @contextmanager
    def watched(self, timeout: float, finish: Callable[[], None]) -> Iterator[None]:
        """The context of a training.

        Args:
            timeout: of the group's collectives, in seconds.
            finish: is called after the training, also after one that has failed. While it runs, `Phases` no longer ends
                this process because another one is lost.
        """
        with Preemption() as self._preemption:
            try:
                with Phases(timeout) as self.phases:
                    yield
            finally:
                finish()

    @property
    def is_ending(self) -> bool:
        """Whether a signal has asked this process to end, which may also have ended its workers."""
        return bool(self._preemption.signal)

    def agree(self, numbers: Sequence[float] = ()) -> list[list[float]]:
        """`Processes.agree` between two steps.

        Raises:
            AskedToEndError: on all processes, if any has received a signal to end.
        """
        agreed = Processes().agree([self._preemption.signal, *numbers])
        if signals := {int(number) for number, *_ in agreed if number}:
            raise AskedToEndError(max(signals))
        return [values for _, *values in agreed]

    @contextmanager
    def evaluation(self, step: int, control: Any) -> Iterator[None]:
        """The context of an evaluation between two steps, which a signal ends after a batch.

        Args:
            step: the number of trained optimizer steps.
            control: Trainer's. The checkpoint that is saved then says by it that the evaluation is still to be made.
        """
        self.phases.enter("evaluating", step)
        self._evaluates = True
        try:
            yield
        except AskedToEndError:
            control.should_evaluate = True
            raise
        finally:
            self._evaluates = False

    def end_batch(self) -> None:
        """Notes that a batch of an evaluation is done; collective.

        Raises:
            AskedToEndError: as `agree`, in an evaluation between two steps.
        """
        self.phases.note_progress()
        signals = Processes().agree([self._preemption.signal])
        if self._evaluates and (number := max(int(number) for (number,) in signals)):
            raise AskedToEndError(number)
