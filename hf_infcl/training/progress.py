"""How much a training has trained and how fast, for its logs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import ProgressCallback, TrainerState
from transformers.utils import logging
from transformers.utils.logging import tqdm

from ..loading.batch_plan import BatchPlan
from ..options.batch_schedule import Course
from ..windows.setup import Setup
from ..windows.window import Window

_SECONDS = "train_seconds"
# Steps after the warm-up that show nothing yet: a training from random weights may begin to learn after a hundred.
_SLOW_START = 100
# A loss is flat if it is near that of chance, or above it (equal pair ids, of which it does not know, lower that of
# chance a little), and its mean has not fallen by a share that shows that it learns.
_NEAR, _FALLS = 0.97, 0.005
# The share of its first norm below which a gradient has vanished, as it does where all embeddings are alike.
_VANISHED = 0.02
# How far a loss has risen above its first value if the steps are too large, relative to it; and the loss, relative to
# that of chance, up to which all embeddings may be alike.
_RISES, _AT_CHANCE = 1.1, 1.02

logger = logging.get_logger(__name__)


class Progress:
    """Counts the pairs and the seconds of a training, interruptions included, and the operations of a batch.

    Args:
        step: the number of trained optimizer steps at the start.
        course: the pairs trained before each step of this training, also in global batches of other sizes.
        earlier: the seconds of the training before, if it was interrupted; see `trained_seconds`.
    """

    def __init__(self, step: int, course: Course, earlier: float = 0.0) -> None:
        now = time.perf_counter()
        self._first_step, self.samples = step, course.samples_before
        self._began = now - earlier
        self._last_log = now, step
        self._operations: dict[tuple[tuple[str, torch.Size], ...], int] = {}  # by the shapes of a batch
        self._looked: int | None = None  # the last step at which the loss was looked at; of a flat one, all have been

    def warn_of_flat_loss(self, state: TrainerState, setup: Setup, window: Window) -> None:
        """Tells once if the loss stays that of chance: when half of the training is done, or else at its end.

        That of chance is known where each image has one caption, which is its only positive.
        """
        if not state.is_world_process_zero or setup.equal_ids != "exclude" or window.caption_image() is not None:
            return
        args, warmup = setup.args, setup.args.get_warmup_steps(state.max_steps)
        half = warmup + max(_SLOW_START, (state.max_steps - warmup) // 2)
        if state.global_step < (half if self._looked is None else max(state.max_steps, self._looked + 1)):
            return
        self._looked = state.global_step
        since = max(warmup, state.global_step // 2)
        if words := flat_loss(
            state.log_history, since, setup.objective, args.learning_rate * args.learning_rate_factor
        ):
            self._looked = state.max_steps
            logger.warning(words)

    def keep_seconds(self, state: TrainerState) -> None:
        """Puts the seconds of the training up to now into the part of Trainer's state that checkpoints keep."""
        kept: Any = state.stateful_callbacks
        kept[_SECONDS] = round(time.perf_counter() - self._began, 3)

    def steps(self, step: int) -> int:
        """The optimizer steps of this training up to a step."""
        return step - self._first_step

    def logs(self, step: int, device: torch.device) -> dict[str, float]:
        """global_batch_size, samples_seen, samples_per_second since the last call, train_seconds, peak_memory.

        The global batch is that of the last step.
        """
        now, (since, at) = time.perf_counter(), self._last_log
        self._last_log = now, step
        seen = self.samples(step)
        logs: dict[str, float] = {"global_batch_size": seen - self.samples(step - 1), "samples_seen": seen}
        if step > at:
            logs["samples_per_second"] = round((seen - self.samples(at)) / (now - since), 3)
        logs[_SECONDS] = round(now - self._began, 3)
        if device.type == "cuda":
            logs["peak_memory"] = torch.cuda.max_memory_allocated(device)
        return logs

    def operations(self, inputs: dict[str, Tensor], count: Callable[[dict[str, Tensor]], int]) -> int:
        """Trainer's ``count`` of the operations of a batch, made once for each shape, since it lists all parameters."""
        shapes = tuple((name, value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor))
        if shapes not in self._operations:
            self._operations[shapes] = count(inputs)
        return self._operations[shapes]


def loss_of_chance(pairs: int, objective: str) -> float:
    """The loss, in nats, of a model to which all pairs of a global batch look alike; with the best bias for sigmoid."""
    if objective == "softmax" or pairs < 2:
        return math.log(pairs)
    return math.log(pairs) + (pairs - 1) * math.log(pairs / (pairs - 1))


def flat_loss(history: Sequence[Mapping[str, Any]], since: int, objective: str, rate: float) -> str:
    """Sentences about a loss that has stayed that of chance, or above it, since a step; empty if it has not.

    A loss with further terms, such as those of teachers, is not judged.

    Args:
        history: Trainer's ``log_history``.
        since: the last step that is not looked at.
        objective: "softmax" or "sigmoid".
        rate: the learning rate at its peak.
    """
    logs = [entry for entry in history if "loss" in entry and "global_batch_size" in entry]
    shown = [entry for entry in logs if entry["step"] > since]
    if len(shown) < 4 or any(name.endswith("_loss") for name in shown[-1]):
        return ""
    ratios = [entry["loss"] / max(loss_of_chance(entry["global_batch_size"], objective), 1e-9) for entry in shown]
    middle = len(ratios) // 2
    before, after = sum(ratios[:middle]) / middle, sum(ratios[middle:]) / (len(ratios) - middle)
    if not (after >= _NEAR and after >= before * (1 - _FALLS)):
        return ""
    pairs, mean = shown[-1]["global_batch_size"], sum(entry["loss"] for entry in shown) / len(shown)
    norms = [entry["grad_norm"] for entry in logs if entry.get("grad_norm")]
    vanished = bool(norms) and norms[-1] < _VANISHED * norms[0]
    rises, at_chance = after > 1 and mean > _RISES * logs[0]["loss"], after < _AT_CHANCE
    lower = f"start again with a tenth of the learning rate, {rate / 10:g}, and a warm-up (warmup_steps)"
    higher = (
        f"raise the learning rate, which is {rate:g}, or train longer; from random weights, take more pairs or a "
        "pretrained model. If nothing helps, see whether images and captions belong together (infcl check)"
    )
    if vanished and at_chance:
        norm = f"norm {norms[-1]:.2g}, first {norms[0]:.2g}"
        advice = f"The gradient has vanished ({norm}), because all embeddings are alike: {lower}."
    elif rises:
        advice = f"It is higher than at the start: {lower}."
    elif at_chance:
        advice = (
            f"If all embeddings became alike in the first steps, {lower}. If the weights change too slowly, {higher}."
        )
    else:
        advice = f"The weights change too slowly: {higher}."
    chance = f"ln {pairs:,}" if objective == "softmax" else f"about ln {pairs:,} + 1"
    return (
        f"The model has learned nothing from step {shown[0]['step']:,} to {shown[-1]['step']:,}: the loss stays at "
        f"{mean:.3g}, and where all {pairs:,} pairs of a global batch look alike it is "
        f"{loss_of_chance(pairs, objective):.3g} ({chance}). {advice}"
    )


def trained_seconds(state: TrainerState) -> float:
    """The seconds of a training, which its checkpoints keep; for those of versions that did not, up to the last log."""
    kept: Any = state.stateful_callbacks
    logged = (entry[_SECONDS] for entry in reversed(state.log_history) if _SECONDS in entry)
    seconds: float = kept[_SECONDS] if _SECONDS in kept else next(logged, 0.0)
    return seconds


class BarOfSamples(ProgressCallback):
    """Trainer's progress bar, in pairs: where the global batch grows, the later steps take longer."""

    def __init__(self, plan: Callable[[], BatchPlan]) -> None:
        super().__init__()
        self._plan_of = plan

    def on_train_begin(self, args: object, state: TrainerState, *_: object, **kwargs: object) -> None:
        self._plan = self._plan_of()
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=self._plan.samples, unit="pairs", unit_scale=True, dynamic_ncols=True)

    def on_step_end(self, args: object, state: TrainerState, *_: object, **kwargs: object) -> None:
        bar: Any = self.training_bar
        if state.is_world_process_zero:
            bar.update(self._plan.samples_before(state.global_step) - bar.n)
