"""The division of a global batch into micro-batches: found before the first step, and finer where memory runs out.

Windows of the training are tried with the largest shapes: both passes and the loss, and no update.
"""

import copy
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers.utils import logging

from ..files.text import counted
from ..loss.cuda_graphs import forget_recordings
from ..models.dual_encoder import TEXT_INPUTS
from ..options.arguments import InfCLTrainingArguments, divide_global_batch, largest_micro_batch, possible_micro_batches
from ..options.contrastive import DIVISION, SEARCHED
from ..options.record import RunRecord
from ..processes.collectives import OtherRankFailedError, Processes, alone, failures_announced
from ..processes.signals import Phases
from .compilation import may_compile
from .extensions import LossTerm, StepChange, term_parameters
from .grad_cache import MARGIN, left_over, random_state_kept, undone
from .step import WindowStep
from .terms import Context, autocast
from .window import Window, repeated, widened

ENOUGH = 256  # pairs of a micro-batch with which a GPU is near its rate
MOST = 4 * ENOUGH  # larger micro-batches gain nothing
# The host takes so many pairs' time for each micro-batch: on an H200, a ViT-B/16 with compiled layers made 2,980 images
# a second of 4,096 pairs, by 16 micro-batches of 256 with 8 graphs kept and by 4 of 1,024 with one alike.
_OF_HOST = 25
# A trial is not compiled, and compiled layers keep less: 22.4 GiB instead of 36.7 for 512 pairs of that model. So the
# search expects the graphs of 1.5 times the pairs to fit, and `GraphBudget` measures later how many do.
_OF_COMPILED = 1.5
TEXTS_AT_ONCE = (2, 4)  # texts are shorter than images: a GPU is at its rate with more of them
_STATE = 8  # bytes of an optimizer for each trained parameter: two moments in fp32
_FOUND = (*DIVISION, *SEARCHED, "largest_micro_batch")

logger = logging.get_logger(__name__)


class Trial(NamedTuple):
    """A window that is tried."""

    micro_batch: int  # its pairs
    texts: int = 1  # the micro-batches whose texts are encoded at once
    graphs: int = 1  # the micro-batches whose graphs are kept


# attempt(trial): the bytes that the window takes above its resting state, and those left over. Raises an
# OutOfMemoryError if it does not fit.
Attempt = Callable[[Trial], tuple[int, int]]


def recorded(args: InfCLTrainingArguments) -> dict[str, Any]:
    """What a checkpoint says of the division of the global batch, so that a resumed run has the same; collective."""
    return {**{name: getattr(args, name) for name in _FOUND}, "passed": list(args.passed), "machines": _machines(args)}


def memory_is_known(device: torch.device) -> bool:
    """Whether a window that does not fit into the memory of a device raises an OutOfMemoryError."""
    return device.type == "cuda"


def find_micro_batches(
    context: Context, record: RunRecord | None, batches_of: Callable[[], Iterable[Mapping[str, Tensor]]]
) -> None:
    """Sets micro-batch, accumulation, ``texts_at_once`` and ``retain_graphs``; collective.

    Where a run resumes on the same machines, they are those of the checkpoint. Otherwise, values that the user has not
    set are found by trying, if the memory of the device is known and the model is not sharded. The micro-batch of a
    stream, which its order depends on, stays that of the checkpoint.

    Args:
        record: of the checkpoint that the training resumes from, if any.
        batches_of: returns an iterable of the batches of a training loader, of which one is read.

    Raises:
        ValueError: not even one pair fits, what fits does not divide the global batch, or the model is sharded and no
            micro-batch is given.
    """
    args, began = context.args, time.perf_counter()
    # Values that an earlier training of these arguments chose are chosen again; values that were set since then stay.
    for name, passed in zip(SEARCHED, args.passed[2:], strict=True):
        if getattr(args, name) == args.chosen.get(name):
            setattr(args, name, passed or "auto")
    args.largest_micro_batch, args.chosen = None, {}
    if _resumed(args, record):
        return
    if context.accelerator.is_fsdp2:  # nothing can be tried, because no process holds the whole model
        if args.divides_by_itself:
            raise ValueError(
                f"global_batch_size={args.global_batch_size:,} needs a per_device_train_batch_size under FSDP, "
                "where none is tried before the model is sharded. Give it; the accumulation follows."
            )
        args.texts_at_once = str(args.texts_at_once).replace("auto", "1")
        args.retain_graphs = "1" if args.passed[3] is None else args.retain_graphs
        return
    of_stream = record.micro_batches if record is not None and isinstance(context.data, IterableDataset) else None
    kept = (of_stream or {}).get(DIVISION[0], 0)
    divides = args.divides_by_itself and kept not in possible_micro_batches(args)
    if args.divides_by_itself and not divides:
        divide_global_batch(args, kept, None)
    if not memory_is_known(args.device):
        return
    if not args.divides_by_itself and args.gradient_accumulation_steps == 1:
        # A single micro-batch, which was given, is encoded once, with its own texts.
        for name in SEARCHED:
            setattr(args, name, getattr(args, name).replace("auto", "1"))
        return
    # A trial is not compiled, so `GraphBudget` measures the graphs of a compiled model, or of compiled layers.
    tries_graphs = args.retain_graphs == "auto" and not (args.torch_compile or may_compile(args))
    if not (args.divides_by_itself or args.texts_at_once == "auto" or tries_graphs):
        return
    # A worker loads a batch where the training has workers: a generator of the dataset's own then stays where it was.
    one_worker = patch.object(args, "dataloader_num_workers", min(1, args.dataloader_num_workers))
    with failures_announced(), random_state_kept(args.device), one_worker:
        batch: Any = next(iter(batches_of()), None)
    if not all(read for (read,) in Processes().agree([batch is not None])):  # which the training will say
        return
    with failures_announced():
        trials = Trials(context, batch)
    trial = Trial(0, *(max(1, int(getattr(args, name).replace("auto", "1"))) for name in SEARCHED))
    if divides:
        divide_global_batch(args, _micro_batch(args, trials, trial), None)
    trial = trial._replace(micro_batch=args.per_device_train_batch_size)
    if args.texts_at_once == "auto":
        # A compiled model launches few kernels: texts at once save as much time as the graphs that fit in their place,
        # and it would have to be compiled twice, with texts and without. Large micro-batches have enough texts.
        several = trials.pads and not args.torch_compile and trial.micro_batch <= ENOUGH
        most = args.gradient_accumulation_steps - Processes().grouped if several else 1
        trial = trial._replace(texts=largest_that_fits(trials, trial, "texts", [n for n in TEXTS_AT_ONCE if n <= most]))
        args.texts_at_once = str(trial.texts)
    if tries_graphs:
        # See `Wrapper.most_graphs`. In a group of one process accelerate wraps no model.
        most = args.gradient_accumulation_steps - (args.world_size > 1)
        args.retain_graphs = str(largest_that_fits(trials, trial, "graphs", range(1, most + 1)) if most > 1 else 1)
    args.chosen = {name: getattr(args, name) for name in _FOUND}
    release_memory()
    if args.process_index == 0:
        factors = f"{args.per_device_train_batch_size} × {args.gradient_accumulation_steps} × {args.world_size}"
        logger.warning(
            f"Global batch of {args.global_batch_size:,} pairs = {factors}"
            + f", the texts of {args.texts_together} micro-batches at once" * (args.texts_together > 1)
            + f", {args.retain_graphs} graphs kept" * (args.retain_graphs not in ("auto", "0", "1"))
            + f": found in {time.perf_counter() - began:.0f} s. To fix it: "
            + " ".join(f"--{name} {getattr(args, name)}" for name in _FOUND[:4])
        )


def largest_that_fits(attempt: Attempt, trial: Trial, name: str, candidates: Sequence[int]) -> int:
    """The largest of rising candidates for a field of a trial that fits on all processes, or else what it has there.

    Graphs are many, and what is left of the memory says how many more fit: they are tried from the first one on. Of
    other fields the largest one is tried first, and then the middle of those that are left. Collective.
    """
    fits, fails, of_first = 0, len(candidates), 0  # all before the one fit, and none from the other on
    index = 0 if name == "graphs" else fails - 1
    with failures_announced():
        while fits < fails:
            more = None
            try:
                taken, left = attempt(trial._replace(**{name: candidates[index]}))
                fits = index + 1
                if name == "graphs" and index == 0:
                    # It includes the texts of several micro-batches, so it is an upper bound, and one more is tried.
                    of_first, more = taken, max(1, left // max(1, taken))
                elif name == "graphs":
                    more = left // max(1, (taken - of_first) // index)
            except torch.OutOfMemoryError:
                fails = index
            if fails == index:
                release_memory()  # what the error held
            if more == 0:
                break
            index = (fits + fails) // 2 if more is None else min(fails - 1, index + more)
    found = candidates[fits - 1] if fits else getattr(trial, name)
    return int(min(number for (number,) in Processes().agree([found])))


def _micro_batch(args: InfCLTrainingArguments, attempt: Attempt, trial: Trial) -> int:
    """The micro-batch that fits and divides the global batch, and takes the least time; collective."""
    pairs, possible = args.global_batch_size // args.world_size, possible_micro_batches(args)
    seen: dict[int, tuple[int, int]] = {}

    def noted(trial: Trial) -> tuple[int, int]:
        seen[trial.micro_batch] = attempt(trial)
        return seen[trial.micro_batch]

    fits = largest_that_fits(noted, trial, "micro_batch", [n for n in possible if n <= MOST])
    if fits == 0:
        raise ValueError(
            f"Not even micro-batches of {counted(possible[0], 'pair')} fit into the memory of every process. Pass "
            "gradient_checkpointing, offload_inputs or max_text_tokens, or train a smaller model."
        )
    following = next((n for n in possible if n > fits), fits)
    if fits < ENOUGH // 4 and following > 4 * fits:  # much more may fit than what divides the batch
        powers = [2**n for n in range(9) if 2**n <= pairs]
        fits = max(fits, largest_that_fits(attempt, trial, "micro_batch", powers))
    if fits > ENOUGH:
        largest = max(seen)
        found = Processes().agree([sum(seen[largest]), largest / seen[largest][0]])
        kept = min(memory * of_byte for memory, of_byte in found)  # the pairs whose graphs fit into the memory
        if may_compile(args):  # only a trial can show that the graphs of all pairs fit
            kept = max(kept, min(kept * _OF_COMPILED, pairs - 1))
        fits = quickest([n for n in possible if ENOUGH <= n <= fits], pairs, kept, synchronises=args.world_size > 1)
    return largest_micro_batch(args, possible, fits)


def quickest(sizes: Iterable[int], pairs: int, kept: float, *, synchronises: bool) -> int:
    """The micro-batch, of these sizes, with which a window of so many pairs takes the least time.

    Args:
        kept: the pairs whose graphs fit into the memory. The others are encoded twice, which takes a third more.
        synchronises: whether the last of several micro-batches has to be encoded twice.
    """

    def cost(size: int) -> float:
        count = pairs // size
        graphs = max(1, min(int(kept / size), count - (synchronises and count > 1)))
        return (1 + _OF_HOST / size) * (1 + (1 - graphs / count) / 3)

    return min(sizes, key=cost)


# ---- Trials ----


class Trials:
    """Tries windows on this process alone, whatever the other processes do.

    Args:
        batch: one of its data loader, whose rows are repeated.

    Attributes:
        pads: whether texts are padded to one length, or to the longest one of their batch.
    """

    def __init__(self, context: Context, batch: Mapping[str, Any]) -> None:
        args, collator = context.args, context.collator
        self._context, self._pairs = context, args.global_batch_size // args.world_size
        self._grouped = Processes().grouped
        # Texts are padded to the longest one of their batch, or all to one length. Other collators may return any.
        self._padding: Mapping[str, int] | None = getattr(collator, "text_padding", None)
        longest = args.max_text_tokens or getattr(collator, "max_length", None)
        self._batch = dict(batch)
        for name in {*TEXT_INPUTS} & batch.keys():
            if self._padding is not None and longest is not None and batch[name].shape[1] < longest:
                self._batch[name] = widened(batch[name], longest, 0)
        if "attention_mask" in batch:
            self._batch["attention_mask"] = torch.ones_like(self._batch["attention_mask"])
        all_to_one = getattr(collator, "text_options", {}).get("padding") == "max_length"
        self.pads = all_to_one or self._padding is not None

    def __call__(self, trial: Trial) -> tuple[int, int]:
        """Tries a window, as an `Attempt`; beside it, the optimizer and what else a step takes have their memory."""
        context, accelerator, device = self._context, self._context.accelerator, self._context.args.device
        model, args = context.encoder.model, copy.copy(context.args)
        args.retain_graphs = str(trial.graphs)
        args.skip_nonfinite = 1  # a loss that is not finite is the training's to refuse
        # Those that only look, or keep what they have seen, would take the trial for a step.
        changing = [one for one in context.extensions if isinstance(one, (LossTerm, StepChange))]
        others = term_parameters(context.extensions)
        batch = repeated(self._batch, trial.micro_batch)
        count = min(-(-self._pairs // trial.micro_batch), max(trial.graphs, trial.texts) + 1)
        forward = model.forward
        if accelerator.native_amp:  # as accelerate will prepare it
            forward = convert_outputs_to_fp32(autocast(accelerator)(forward))
        prepared = patch.object(model, "forward", forward)
        with undone(model, device, others), alone(), prepared, patch.object(accelerator, "scaler", None):
            changed = replace(context, args=args, extensions=changing)
            step = WindowStep(changed, model, phases=Phases())
            step.windows = 1  # the first one of a training is looked at more closely
            batches = [copy.deepcopy(batch) for _ in range(count)]
            before = torch.cuda.memory_allocated(device)
            reserved = torch.empty(self._reserve(trial, batch, count), dtype=torch.uint8, device=device)
            torch.cuda.reset_peak_memory_stats(device)
            # As a window of the training, which keeps what was loaded.
            window = Window(batches, self._padding, trial.texts, last_has_texts=self._grouped, keeps_loaded=True)
            with closing(step):
                step.run(window, 0)
            peak = torch.cuda.max_memory_allocated(device)
            return max(1, peak - before - len(reserved)), left_over(peak, device)[0]

    def _reserve(self, trial: Trial, batch: Mapping[str, Tensor], count: int) -> int:
        """The bytes that a step of the training takes beside the trial: optimizer, other inputs, and a margin."""
        args, encoder = self._context.args, self._context.encoder
        trained = sum(p.numel() for p in encoder.model.parameters() if p.requires_grad)
        of_each = _STATE + 4 * (args.world_size > 1)  # and DDP's buckets
        of_inputs = sum(value.nbytes for value in batch.values() if isinstance(value, Tensor))
        loaded = 0 if args.offload_inputs else max(0, self._pairs // trial.micro_batch - count) + 1  # and the next one
        of_features = 4 * encoder.width() * (4 * args.global_batch_size + 8 * self._pairs)
        total = torch.cuda.get_device_properties(args.device).total_memory
        return int(trained * of_each + loaded * of_inputs + of_features + MARGIN * total)


def release_memory() -> None:
    """Gives back what a window that did not fit has left."""
    forget_recordings()
    clear_device_cache(garbage_collection=True)


# ---- What is not tried ----


def _resumed(args: InfCLTrainingArguments, record: RunRecord | None) -> bool:
    """Takes the division of the checkpoint, if it is of the same options and machines; collective."""
    # Every process calls `_machines`, since all of them have the record or none.
    if record is None or (before := record.micro_batches) is None:
        return False
    was, now = ([*values[:2], *(value or "auto" for value in values[2:])] for values in (before["passed"], args.passed))
    if was != now or before["machines"] != _machines(args):
        return False
    args.chosen = {name: before[name] for name in _FOUND}
    vars(args).update(args.chosen)
    return True


def _machines(args: InfCLTrainingArguments) -> list[str]:
    """The device of each process, with its memory; collective."""
    description = args.device.type
    if description == "cuda":
        device = torch.cuda.get_device_properties(args.device)
        description = f"{device.name}, {device.total_memory} bytes"
    return Processes().gather_objects(description)


# ---- A step that runs out of memory is repeated before anything was updated ----


def run_repeating(step: WindowStep, window: Window, number: int) -> Tensor:
    """Runs the step of a window, repeats it as long as memory runs out, and returns the loss; collective.

    Each time it keeps one graph fewer or, if it keeps only one, has halved micro-batches.

    Args:
        step: has the arguments, of which ``largest_micro_batch`` becomes what fits.
        number: the optimizer steps that were trained.

    Raises:
        torch.OutOfMemoryError: the step cannot be repeated; see `WindowStep.may_repeat`.
    """
    args = step.context.args
    while True:
        largest = max(window.sizes[0])
        try:
            with step.compilation.active(window):
                loss = step.run(window, number)
            window.loaded.clear()
            return loss
        except (torch.OutOfMemoryError, OtherRankFailedError) as error:
            is_own = isinstance(error, torch.OutOfMemoryError)
            # All other processes have heard as well of a lack of memory elsewhere.
            repeats = step.may_repeat if is_own else step.repeats and torch.OutOfMemoryError.__name__ in str(error)
            if not (repeats and window.loaded and (step.graphs.kept > 1 or largest > 1)):
                if is_own:
                    traceback.clear_frames(error.__traceback__)  # which hold memory
                    _advise(step.context, number, window)
                raise
        # ---- The errors, which hold memory, are gone ----
        step.checks.undo()
        if (graphs := step.graphs.kept) > 1:
            step.graphs.keep_fewer()
            if args.retain_graphs != "auto":  # which is measured anew where graphs take another amount of memory
                args.retain_graphs = args.chosen["retain_graphs"] = str(graphs - 1)
            had, now, rounding = f"{graphs} graphs kept", graphs - 1, ""
        else:
            args.largest_micro_batch = -(-largest // 2)
            had, now, rounding = f"micro-batches of {largest} pairs", args.largest_micro_batch, "rounding and "
        window.divide(args.largest_micro_batch)
        step.recording.stop()
        release_memory()
        if args.process_index == 0:
            logger.warning(
                f"The step after step {number} ran out of memory with {had}. It is repeated with {now}, as are the "
                f"following ones; the result stays the same but for {rounding}dropout masks."
            )


def _advise(context: Context, number: int, window: Window) -> None:
    """Says what to do about a step that ran out of memory and is not repeated."""
    args = context.args
    if window.loaded:
        what = (
            "A part of it was being exchanged among the processes or selected, so it is not repeated. Resume from the "
            f"last checkpoint with per_device_train_batch_size={max(1, args.per_device_train_batch_size // 2)}."
        )
    else:
        sizes = "per_device_train_batch_size and gradient_accumulation_steps"
        what = (
            f"Pass global_batch_size={args.global_batch_size} in place of {sizes}: it finds the micro-batch that fits, "
            "and repeats such a step with smaller ones."
        )
        # The most pairs of a smaller micro-batch that fits on this process, if it can be tried.
        batch = next((one for one in window.batches if "pixel_values" in one), None)  # others were released
        if batch is not None and memory_is_known(args.device) and not context.accelerator.is_fsdp2:
            release_memory()
            of_process = args.global_batch_size // args.world_size
            smaller = [n for n in possible_micro_batches(args) if n < max(window.sizes[0]) and n <= MOST]
            with suppress(Exception):  # the error that is raised is that of the step
                trials = Trials(context, batch)
                with alone():
                    fits = largest_that_fits(trials, Trial(0), "micro_batch", smaller)
                if fits:
                    what = f"{fits} and {of_process // fits} would fit as {sizes}, with the same result. {what}"
    logger.error(f"The step after step {number} ran out of memory. {what}")
