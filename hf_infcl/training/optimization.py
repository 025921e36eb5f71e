"""Creates the optimizer and its schedule, and refuses options that they do not take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import nn

from ..options.arguments import InfCLTrainingArguments
from .pushes import cause

ADAM_OPTIONS = ("adam_beta1", "adam_beta2", "adam_epsilon")


@contextmanager
def errors_of_options(args: InfCLTrainingArguments, kind: str, further: str, made: str) -> Iterator[None]:
    """Within the context, an error of a constructor becomes a ValueError that names the options ``kind``, ``further``.

    Args:
        args: the arguments.
        kind, further: the names of the option that selects a class, and of that with its settings.
        made: what the class makes.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        name = getattr(getattr(args, kind), "value", getattr(args, kind))
        raise ValueError(
            f"{kind}={name!r} with {further}={getattr(args, further)!r} makes no {made}: {cause(error)}."
        ) from error


def check_trains(model: nn.Module) -> None:
    """Raises a ValueError if no parameter would be trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "Nothing would be trained: no parameter of the model requires a gradient. Call requires_grad_(True) on "
            "the parameters to train, and freeze at most one tower."
        )


def check_optimizer_options(
    args: InfCLTrainingArguments, optimizer_for: Callable[[InfCLTrainingArguments], Any]
) -> None:
    """Refuses options that the optimizer does not accept; transformers ignores them silently.

    These are names in ``args.optim_args``, and Adam's options with values of their own. An optimizer accepts an option
    if its settings change with the value of that option, or an error occurs. Optimizers for ``optim_target_modules``
    are not checked, because their settings hold parameters of the model.

    Args:
        optimizer_for: returns the class and the settings of the optimizer for given arguments.

    Raises:
        ValueError: there are such options; the message lists them.
    """
    if args.optim_target_modules is not None:
        return

    def settings(**changes: Any) -> Any:
        others = copy.copy(args)
        vars(others).update(changes)
        return optimizer_for(others)

    optimizer = getattr(args.optim, "value", args.optim)
    defaults = {option.name: option.default for option in fields(args) if option.name in ADAM_OPTIONS}
    changed = [name for name, default in defaults.items() if getattr(args, name) != default]
    if unused := [name for name in changed if settings(**{name: defaults[name]}) == settings()]:
        raise ValueError(
            f"{' and '.join(f'{name}={getattr(args, name)}' for name in unused)} would have no effect, because "
            f"optim={optimizer!r} has no such option. Leave it out, or choose another optimizer."
        )
    without, ignored = settings(optim_args=None), []
    for pair in (args.optim_args or "").replace(" ", "").split(","):
        name, _, _ = pair.partition("=")
        # An accepted name changes the settings, or its value cannot be converted.
        with suppress(AttributeError, TypeError, ValueError):
            if name and settings(optim_args=f"{name}=?") == without:
                ignored.append(name)
    if ignored:
        raise ValueError(
            f"optim={optimizer!r} does not take {', '.join(ignored)} from optim_args={args.optim_args!r}: "
            "transformers would ignore this. Remove it; Adam's options are the arguments adam_beta1, adam_beta2, "
            "adam_epsilon and weight_decay."
        )


def switch_weights(optimizer: Any, mode: Literal["train", "eval"]) -> None:
    """Puts the weights to train, or those to evaluate and save, into the model; schedule-free optimizers have both."""
    if callable(switch := getattr(optimizer, mode, None)):
        switch()


def set_learning_rates(
    optimizer: torch.optim.Optimizer, temperature: Sequence[nn.Parameter], args: InfCLTrainingArguments
) -> None:
    """Gives a new optimizer the learning rates that ``args`` sets.

    Args:
        temperature: logit_scale's parameter and, where there is one, logit_bias.
    """
    # Schedules that end at an absolute rate, such as min_lr, divide it by the default rate.
    for rates in (optimizer.defaults, *optimizer.param_groups):
        if rates.get("lr") is not None:
            rates["lr"] *= args.learning_rate_factor
    trained = [parameter for parameter in temperature if parameter.requires_grad]
    if args.logit_scale_learning_rate is None or not trained:
        return
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if all(p is not t for t in trained)]
    rate = args.logit_scale_learning_rate
    optimizer.add_param_group({"params": trained, "weight_decay": 0.0, "lr": rate, "name": "temperature"})
