"""Creates the optimizer and its schedule, and refuses options that they do not take."""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.utils import logging

from ..models.dual_encoder import DualEncoder
from ..optim import MuonAdamW, parameter_groups
from ..optim.groups import divided, table_of_groups
from ..options.arguments import InfCLTrainingArguments
from ..options.contrastive import RATES, muon_settings
from ..options.declaring import spelled
from ..options.record import options_of_optimizer, options_of_schedule
from ..processes.collectives import Processes
from ..step.extensions import term_parameters
from .checkpoints import cause

ADAM_OPTIONS = ("adam_beta1", "adam_beta2", "adam_epsilon")
_MUON_RATE = 4.0  # the ratio of Muon's rate to AdamW's; see the guide to the trainer for what was measured
_HIGHEST_MUON_RATE = 0.1  # that is probably meant

logger = logging.get_logger(__name__)


class Optimization:
    """The optimizer of a training and its schedule: creates them, and knows where they come from."""

    def __init__(self, args: InfCLTrainingArguments) -> None:
        self._args = args
        # Whether Trainer created them from the arguments. Otherwise they were passed.
        self.creates_optimizer = self.creates_scheduler = False
        self.table_of_groups = ""  # of the optimizer that was created; see `table_of_groups` of `hf_infcl.optim`
        self._described: dict[object, dict[str, Any]] = {}  # the options of each of both, before its first step

    def optimizer(self, trainer: Any, create: Callable[[], Optimizer]) -> Optimizer:
        """The optimizer that was passed, or Trainer's (``create``) or Muon with the learning rates of the options.

        Raises a ValueError if no parameter would be trained, or the optimizer does not take its options.
        """
        encoder, passed, args = trainer.dual_encoder, trainer.optimizer, self._args
        if not any(parameter.requires_grad for parameter in encoder.model.parameters()):
            raise ValueError(
                "Nothing would be trained: no parameter of the model requires a gradient. Call requires_grad_(True) on "
                "the parameters to train, and freeze at most one tower."
            )
        beside = term_parameters(trainer.context.extensions)
        if passed is not None:
            if not {p for group in passed.param_groups for p in group["params"]}.issuperset(beside):
                raise ValueError(
                    "An optimizer was passed, but terms of the loss have parameters of their own, such as the linear "
                    "map to a teacher of another width, which it does not update. Let the trainer create the optimizer."
                )
            return passed
        self.creates_optimizer = trainer.optimizer_cls_and_kwargs is None
        if args.optimizer == "muon":
            optimizer: Optimizer = _create_muon(encoder, args, trainer.get_decay_parameter_names(encoder.model))
            start = getattr(getattr(encoder.model, "config", None), "_name_or_path", "")
            # Muon is for random weights.
            if start and trainer.resumption.checkpoint is None and not encoder.looks_random():
                logger.warning(
                    f"The model was loaded from {start} and was trained. If AdamW did that, as for most on the Hub, "
                    "compare the result with that of AdamW, which others found better (arXiv 2605.10468)."
                )
        else:
            with errors_of_options(args, "optim", "optim_args", "optimizer"):
                optimizer = create()
            if self.creates_optimizer:
                check_optimizer_options(args, trainer.get_optimizer_cls_and_kwargs)
        self.table_of_groups = set_learning_rates(optimizer, encoder, args, beside)
        return optimizer

    def scheduler(self, trainer: Any, make: Callable[[], LRScheduler]) -> LRScheduler:
        """The schedule that was passed, or Trainer's. Notes its options and those of the optimizer.

        Raises a ValueError if it does not take its options, or if a subclass makes the optimizer without the options.
        """
        args, optimizer, schedule = self._args, trainer.optimizer, trainer.lr_scheduler
        if not self.creates_optimizer and (names := options_of_own_optimizer(args)):
            raise ValueError(
                f"{', '.join(names)} apply only to an optimizer that InfCLTrainer.create_optimizer makes, but an "
                "override has made another. Call super().create_optimizer() there without setting self.optimizer "
                "before, or leave these options out."
            )
        self.creates_scheduler = self.creates_scheduler or schedule is None
        with errors_of_options(args, "lr_scheduler_type", "lr_scheduler_kwargs", "schedule"):
            schedule = make()
        of_both = {getattr(optimizer, "optimizer", optimizer): options_of_optimizer, schedule: options_of_schedule}
        # One that is described already has progressed in an earlier training: its options were those before that.
        self._described = {one: self._described.get(one) or options_of(one) for one, options_of in of_both.items()}
        return schedule

    @property
    def options(self) -> dict[str, Any]:
        """The options of both, for the record of a checkpoint."""
        return {name: value for options in self._described.values() for name, value in options.items()}


def options_of_own_optimizer(args: InfCLTrainingArguments) -> list[str]:
    """The options that are set and apply only to an optimizer that the trainer creates."""
    return [name for name in (*RATES, "no_decay_parameters", "optimizer") if getattr(args, name) is not None]


@contextmanager
def errors_of_options(args: InfCLTrainingArguments, kind: str, further: str, made: str) -> Iterator[None]:
    """Within the context, an error of a constructor becomes a ValueError that names the options ``kind``, ``further``.

    The former selects the class of what is ``made``, and the latter has its settings.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"{kind}={spelled(getattr(args, kind))!r} with {further}={getattr(args, further)!r} makes no {made}: "
            f"{cause(error)}."
        ) from error


def check_optimizer_options(
    args: InfCLTrainingArguments, optimizer_for: Callable[[InfCLTrainingArguments], object]
) -> None:
    """Raises a ValueError that lists options that the optimizer does not accept; transformers ignores them silently.

    These are names in ``args.optim_args``, and Adam's options that differ from their defaults. An optimizer accepts an
    option if its settings change with the value of that option, or an error occurs. Optimizers for
    ``optim_target_modules`` are not checked, because their settings hold parameters of the model. ``optimizer_for``
    returns the class and the settings of the optimizer for some arguments.
    """
    if args.optim_target_modules is not None:
        return

    def settings(**changes: object) -> Any:
        variant = copy.copy(args)
        vars(variant).update(changes)
        return optimizer_for(variant)

    optimizer = spelled(args.optim)
    defaults = {name: getattr(type(args), name) for name in ADAM_OPTIONS}
    changed = {name: default for name, default in defaults.items() if getattr(args, name) != default}
    if unused := [name for name, default in changed.items() if settings(**{name: default}) == settings()]:
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
            f"optim={optimizer!r} does not take {', '.join(ignored)} from optim_args={args.optim_args!r}: transformers "
            "would ignore it. Remove it; Adam's options are adam_beta1, adam_beta2, adam_epsilon and weight_decay."
        )


def _create_muon(encoder: DualEncoder, args: InfCLTrainingArguments, decaying: Collection[str]) -> MuonAdamW:
    """The optimizer of ``optimizer="muon"``. Raises as `parameter_groups` does."""
    rate = _MUON_RATE * args.learning_rate if args.muon_learning_rate is None else args.muon_learning_rate
    if rate > _HIGHEST_MUON_RATE:
        logger.warning(
            f"Muon's learning rate of {rate:g} changes every matrix by a large part of itself in each step. Rates "
            "from 0.001 to 0.01 are usual; muon_learning_rate sets it."
        )
    groups = parameter_groups(
        encoder.model,
        learning_rate=args.learning_rate,
        muon_learning_rate=rate,
        weight_decay=args.weight_decay,
        decaying=decaying,
        to_muon=args.muon_parameters or (),
        to_adamw=args.adamw_parameters or (),
    )
    return MuonAdamW(
        groups,
        args.learning_rate,
        args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=spelled(args.optim) == "adamw_torch_fused",
        processes=Processes(),  # unless FSDP2 shards the parameters, they hold equal ones
        **muon_settings(args.optim_args),
    )


def set_learning_rates(
    optimizer: Optimizer, encoder: DualEncoder, args: InfCLTrainingArguments, beside: Sequence[nn.Parameter]
) -> str:
    """Gives a new optimizer the learning rates that ``args`` sets, and returns the table of its groups.

    What trains ``beside`` the model forms a separate group.
    """
    trained = [parameter for parameter in encoder.temperature_parameters if parameter.requires_grad]
    if args.logit_scale_learning_rate is not None and trained:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if all(p is not t for t in trained)]
        rate = args.logit_scale_learning_rate
        optimizer.add_param_group({"params": trained, "weight_decay": 0.0, "lr": rate, "name": "temperature"})
    rates = {"image": args.image_learning_rate, "text": args.text_learning_rate}
    if set(rates.values()) != {None}:
        towers: dict[nn.Parameter, tuple[str, float]] = {}
        for side, modules in encoder.parts(rates, "A rate for one tower").items():
            factor = 1.0 if (own := rates[side]) is None else own / args.learning_rate
            trained = [p for module in modules for p in module.parameters() if p.requires_grad]
            towers |= dict.fromkeys(trained, (f"{side} tower", factor))
        optimizer.param_groups[:] = divided(optimizer.param_groups, towers)
    if beside:
        optimizer.add_param_group({"params": list(beside), "weight_decay": 0.0, "name": "beside the model"})
    return table_of_groups(optimizer.param_groups, type(optimizer).__name__)
