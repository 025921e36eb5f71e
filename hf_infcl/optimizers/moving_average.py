"""An exponential moving average of the weights that an optimizer trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .exchange import local_part

AVERAGE = "moving_average"  # in the state of each parameter
UPDATES, EVALUATES = "moving_average_updates", "moving_average_evaluates"  # in the first group of the optimizer


class MovingAverage:
    """Keeps an exponential moving average of the weights in the state of their optimizer, beside Adam's moments.

    It is therefore sharded, saved and loaded as these are, to the bit. The optimizer gets the methods ``eval``, which
    puts the average into the model, and ``train``, which returns the weights that are trained; Trainer and
    `InfCLTrainer` call them where they call those of schedule-free optimizers. The one that is not in the model is in
    the state.

    Update n, counted from 0, is average ← d · average + (1 − d) · weights with d = min(decay, (1 + n) / (10 + n)), so
    that the first weights are soon forgotten. The average begins with the weights after the first step.

    Args:
        optimizer: of the weights, before its first step.
        decay: in [0, 1).
        before_switch: called before the weights of the optimizer change, to let go of those that FSDP2 has gathered.
        after_switch: called when they have changed, to copy them into the model.
        in_host: whether the average is in host memory. It is computed where the weights are, so its bits are the same.

    Raises:
        ValueError: the optimizer averages its weights itself, or some weights are not in fp32.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        decay: float,
        before_switch: Callable[[], None] = lambda: None,
        after_switch: Callable[[], None] = lambda: None,
        *,
        in_host: bool = False,
    ) -> None:
        if callable(getattr(optimizer, "eval", None)):
            raise ValueError(
                f"{type(optimizer).__name__} averages the weights itself, so ema_decay would average them twice. Leave "
                "one of them out."
            )
        kinds = {p.dtype for group in optimizer.param_groups for p in group["params"]} - {torch.float32}
        if kinds:
            raise ValueError(
                f"ema_decay averages weights in fp32, but some are in {', '.join(map(str, kinds))}, in which the "
                "average would not move. Load the model with dtype=torch.float32; bf16=True computes in bf16 all the "
                "same."
            )
        self._optimizer, self._decay, self._in_host = optimizer, decay, in_host
        self._before_switch, self._after_switch = before_switch, after_switch
        self._stepped = False
        self.begins = True  # the average of weights without one, with their next step
        self._first.update({UPDATES: 0, EVALUATES: False})
        self._hook = optimizer.register_step_post_hook(self._note_step)
        # Instance attributes: the class of the optimizer stays what it is.
        methods = {"eval": self.evaluate, "train": self.train, "update_average": self.update}
        self._added = {**methods, "moving_average": self}
        vars(optimizer).update(self._added)

    @property
    def _first(self) -> dict[str, Any]:
        return self._optimizer.param_groups[0]

    def _note_step(self, *_: object) -> None:
        """Begins the average of weights that were updated for the first time.

        Not earlier, because optimizers take an empty state for that of a new parameter.
        """
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._stepped = True
                    if self.begins and AVERAGE not in self._optimizer.state[p]:
                        self._optimizer.state[p][AVERAGE] = _in_host(p) if self._in_host else p.detach().clone()

    @torch.no_grad()
    def update(self) -> None:
        """Adds the weights to their average, if the optimizer has updated them since the last call."""
        if not self._stepped:
            return
        self._stepped = False
        pairs = list(self._pairs())
        number = self._first.get(UPDATES, 0)  # a loaded optimizer may have been without average
        # The first time the average becomes the weights: after the step that began it, logit_scale was limited.
        decay = min(self._decay, (1 + number) / (10 + number)) if number else 0.0
        update = get_ema_multi_avg_fn(decay)
        if self._in_host:
            for average, weights in pairs:
                near = average.to(weights.device, non_blocking=True)
                update([near], [weights], number)
                average.copy_(near)
        elif pairs:
            update(*zip(*pairs, strict=True), number)
        self._first[UPDATES] = number + 1

    def evaluate(self) -> None:
        """Puts the average into the model."""
        self._switch(evaluates=True)

    def train(self) -> None:
        """Puts the weights that are trained into the model."""
        self._switch(evaluates=False)

    def end(self) -> None:
        """Puts the weights that are trained into the model, and removes the average and these methods."""
        self.train()
        self._hook.remove()
        for name in self._added:
            del vars(self._optimizer)[name]
        _remove(self._optimizer)

    @torch.no_grad()
    def _switch(self, *, evaluates: bool) -> None:
        if self._first.get(EVALUATES, False) == evaluates:
            return
        self._before_switch()
        for average, weights in self._pairs():
            before = weights.clone()
            weights.copy_(average)
            average.copy_(before)
        self._first[EVALUATES] = evaluates
        self._after_switch()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(the one in the state, the one in the model) of each parameter, this process's part of them."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if AVERAGE in (state := self._optimizer.state.get(p, {})):
                    if self._in_host and state[AVERAGE].device.type != "cpu":  # as it is loaded
                        state[AVERAGE] = _in_host(state[AVERAGE])
                    yield local_part(state[AVERAGE]), local_part(p)


@contextmanager
def without_average(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The context in which the state of a training without average is loaded; the next step begins one, if any.

    Earlier versions left the average of the training before in the state, where nothing updated it.
    """
    average: MovingAverage | None = vars(optimizer).get("moving_average")
    if average is not None:
        average.begins = False
    _remove(optimizer)
    yield
    _remove(optimizer)
    if average is not None:
        average.begins = True


def _remove(optimizer: torch.optim.Optimizer) -> None:
    """Removes an average from the state of an optimizer."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state.get(p, {}).pop(AVERAGE, None)
    for name in (UPDATES, EVALUATES):
        optimizer.param_groups[0].pop(name, None)


def update_average(optimizer: object) -> None:
    """Updates the moving average of an optimizer, or of the one that was wrapped, if it has one."""
    if callable(update := getattr(unwrapped(optimizer), "update_average", None)):
        update()


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that accelerate has wrapped."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _in_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
