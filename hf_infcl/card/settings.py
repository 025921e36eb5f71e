"""The rows of a card on optimizer, learning rate, seed and precision, and the Markdown in which cards show any text.

The arguments alone do not decide about the rows: an optimizer may have been passed to the trainer, and `accelerate
launch` may have chosen the precision. Text of others, such as names of classes and data sets, prompts and licences,
begins neither HTML, links or pictures, nor new lines, and leaves a table whole, whatever it holds.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..data import transparency
from ..data.replay import Replayed
from ..files.text import counted
from ..optim.groups import words_of_groups
from ..options.combinations import WITHOUT_WARM_UP
from ..options.declaring import spelled
from ..options.facts import values_of_card

if TYPE_CHECKING:
    from ..trainer.trainer import InfCLTrainer


_LONGEST = 200  # characters of a name that are shown
# Control characters, and those that turn the direction of the text after them.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# What begins something in CommonMark, in HTML or as a link of GitHub.
_SPECIAL = re.compile(r"[\\`*\[\]<>#|!&~$@]|(?<!\w)_(?=\w)|:(?=//)|(?<=www)\.")


def one_line(text: str) -> str:
    return " ".join(_CONTROL.sub(" ", text).split())


def code(text: str) -> str:
    """The text in code style, enclosed in more backticks than it contains in a row, as CommonMark requires."""
    text = one_line(text)
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def escaped(text: str) -> str:
    """The text among other words, with a backslash before what Markdown would read as more than text."""
    return _SPECIAL.sub(r"\\\g<0>", one_line(text))


def literal(value: str | Sequence[str]) -> str:
    """The value in Python, on one line and without backticks, so that no fence of code ends in it."""
    return json.dumps(value, ensure_ascii=False).replace("`", "\\u0060")


def joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def cell(text: str) -> str:
    """The text in a cell of a table; pipes are escaped, also within code, as the tables of the Hub require."""
    # A pipe after an even number of backslashes would end the cell, since these escape each other.
    return re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", one_line(text))


def training_settings(trainer: InfCLTrainer) -> dict[str, str]:
    """The rows by name; an `InfCLTrainer` without an optimizer has no rows about it."""
    rows = {} if trainer.optimizer is None else _optimization(trainer)
    rows |= {"seed": str(trainer.args.seed), "precision": precision(trainer)}
    for _, row, value in values_of_card(trainer.args):
        values = value if isinstance(value, list) else [value]
        rows[row] = joined([code(one) if isinstance(one, str) else f"{one:g}" for one in values])
    pairs: Any = trainer.train_dataset
    pairs = pairs.datasets[0] if isinstance(pairs, Replayed) else pairs
    options = getattr(pairs, "options", {})
    if (augmentation := options.get("augmentation")) is not None:
        rows["augmentation"] = getattr(augmentation, "__name__", str(augmentation))
    if hasattr(pairs, "image_column"):
        rows["transparency of images"] = transparency()
    if "open_clip" in trainer.args.save_formats:
        rows["saved formats"] = "transformers and OpenCLIP"
    for part in trainer.window_step.extensions:
        rows |= part.card
    weight = trainer.args.teacher_weight
    distances = [e["teacher_loss"] / weight for e in trainer.state.log_history if weight and "teacher_loss" in e]
    if distances:
        rows["distance to the teacher"] = f"{distances[0]:.3g} in the first log, {distances[-1]:.3g} in the last"
    return rows


def highest_rates(trainer: InfCLTrainer) -> dict[str, float]:
    """The highest learning rates at the peak of the schedule, but for the temperature's, of "adamw" and "muon".

    Only optimizers whose steps are about as large as the rate count: Muon, and optimizers of Adam's kind, which have
    β. Prodigy and D-Adaptation have β as well, but estimate the rate (d). A schedule that follows a metric overwrites
    the rates that it began with, so they are not known.
    """
    rates: dict[str, float] = {}
    for group in () if trainer.optimizer is None else trainer.optimizer.param_groups:
        algorithm = group.get("algorithm", "adamw" if "betas" in group and "d" not in group else None)
        if algorithm is not None and group["params"] and "initial_lr" in group and group.get("name") != "temperature":
            rates[algorithm] = max(rates.get(algorithm, 0.0), float(group["initial_lr"]))
    return rates


def precision(trainer: InfCLTrainer) -> str:
    """The precision in which the trainer's forwards compute."""
    mixed = trainer.accelerator.mixed_precision
    # On CPUs with fp16, accelerate computes in the precision of the weights.
    if mixed != "no" and not (mixed == "fp16" and trainer.args.device.type == "cpu"):
        return f"{mixed} autocast"
    parameters = trainer.dual_encoder.model.parameters()
    kinds = {str(p.dtype).removeprefix("torch.") for p in parameters if p.is_floating_point()}
    return " and ".join(sorted(kinds)).replace("bfloat", "bf").replace("float", "fp")


def _optimization(trainer: InfCLTrainer) -> dict[str, str]:
    """The rows about a trainer's optimizer and its learning rates."""
    args, model = trainer.args, trainer.dual_encoder
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate has wrapped it
    groups = optimizer.param_groups
    if trainer.optimization.creates_optimizer:
        parts = [("Muon and " if args.optimizer == "muon" else "") + spelled(args.optim)]
        rate = f"{args.learning_rate:g}"
    else:
        parts = [type(optimizer).__name__]
        rates = [group.get("initial_lr", group["lr"]) for group in groups if group.get("name") != "temperature"]
        rate = " and ".join(sorted({f"{float(one):g}" for one in rates}))
    settings = ChainMap(*groups)  # those of the first group that has them
    if betas := settings.get("betas"):
        parts.append(f"β = ({', '.join(map(str, betas))})")
    if momentum := settings.get("momentum"):
        parts.append(f"momentum {momentum}")
    if "weight_decay" in settings:
        parts.append(f"weight decay {max(group.get('weight_decay', 0) for group in groups):g}")
    if trainer.optimization.creates_scheduler:
        rate += f", {(schedule := spelled(args.lr_scheduler_type))}"
        if schedule not in WITHOUT_WARM_UP:
            rate += f", {counted(args.get_warmup_steps(trainer.state.max_steps), 'step')} of warm-up"
    else:
        rate += f", {type(getattr(trainer.lr_scheduler, 'scheduler', trainer.lr_scheduler)).__name__}"
    rows = {"optimizer": ", ".join(parts), **words_of_groups(groups), "learning rate": rate}
    trained = any(parameter.requires_grad for parameter in model.temperature_parameters)
    if args.logit_scale_learning_rate is not None and trained:
        rows["learning rate of logit_scale"] = f"{args.logit_scale_learning_rate:g}"
    return rows
