"""Evaluates a dual encoder on several processes: gathers the embeddings, then computes metrics of the whole set.

`Evaluator.run` has the stages: workers load the set, the prompts of its classes are encoded (`class_vectors`), each
batch is encoded by `Evaluator.embed`, and from what all batches have given, `Evaluator.metrics` are computed.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import GradientState
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerState
from transformers.trainer_utils import EvalLoopOutput, has_length
from transformers.utils import logging

from ..data import ContrastiveCollator, ZeroShotDataset
from ..data.store import all_parts
from ..evaluation import tasks
from ..evaluation.intervals import ScoreChanges
from ..evaluation.metrics import CEILING, KS, Found, measured, metrics_of_kind
from ..loss import local_contrastive_loss
from ..models.dual_encoder import IMAGE_INPUTS, TEXT_INPUTS
from ..models.sharding import failures_announced_unless_sharded, fsdp_tower_methods
from ..options.declaring import SCHEDULES_BY_METRIC, spelled
from ..processes.collectives import AnnouncingDataLoader, Processes, failures_announced, gather_rows
from ..step.grad_cache import random_state_kept
from ..step.terms import Context, autocast
from ..step.window import widened
from .loop_events import kept_state

MOST_PROMPTS = 8  # the most batches of prompts that are encoded at once

logger = logging.get_logger(__name__)


# ---- The classes of a zero-shot set ----


def class_vectors(dataset: ZeroShotDataset, context: Context, processing_class: Any) -> Tensor:
    """A vector [C, D] fp32 for each class, on every process; collective.

    Args:
        context: its data collator tokenizes the prompts if it has a method ``tokenize``.
        processing_class: the processor, which tokenizes them otherwise.

    Raises a ValueError if neither of them has a tokenizer, or a token has no embedding.
    """
    encoder, collator, processes = context.encoder, context.collator, Processes()
    if getattr(collator, "tokenize", None) is None:
        if not hasattr(processing_class, "tokenizer"):
            raise ValueError(
                f"The prompts of the classes must be tokenized, but the data collator, a {type(collator).__name__}, "
                f"has no method tokenize(texts), and the processing_class, a {type(processing_class).__name__}, has no "
                "tokenizer. Pass processing_class=AutoProcessor.from_pretrained(...), beside any data_collator."
            )
        collator = ContrastiveCollator.for_model(processing_class, getattr(encoder.model, "config", None))
    prompts, places = tasks.distinct(dataset.prompts())
    size = context.args.per_device_eval_batch_size
    # All ranks encode equally often, because under FSDP a forward communicates. The shares follow the order of the
    # ranks, and the last prompt is repeated to fill the last ones.
    of_each = -(-len(prompts) // processes.world_size)
    share = [prompts[min(place + processes.rank * of_each, len(prompts) - 1)] for place in range(of_each)]
    with failures_announced_unless_sharded(context.accelerator):
        padding = (collator.text_padding if isinstance(collator, ContrastiveCollator) else None) or {}
        at_once = 1
        # A forward of few tokens takes as long as its kernels take to be launched, so one has as many prompts as have
        # the tokens of a batch of the longest captions. A tokenizer of one's own may return what cannot be padded.
        if padding and (longest := collator.tokenize([max(prompts, key=len)])).keys() <= padding.keys():
            at_once = min(MOST_PROMPTS, max(1, collator.max_length // longest["input_ids"].shape[1]))
        encoded = []
        for first in range(0, of_each, size * at_once):
            part = share[first : first + size * at_once]
            # A few at a time, because Python's garbage collector would go through long lists again and again.
            batches = [collator.tokenize(part[start : start + size]) for start in range(0, len(part), size)]
            tokens, most = batches[0], max(batch["input_ids"].shape[1] for batch in batches)
            if len(batches) > 1:
                tokens = {n: torch.cat([widened(batch[n], most, padding[n]) for batch in batches]) for n in tokens}
            encoder.check_texts(tokens)  # on the host, where nothing is waited for
            batch = context.prepare_inputs(tokens)
            with torch.no_grad(), autocast(context.accelerator):
                encoded.append(encoder.encode_texts(batch, checked=True).float())
    texts = gather_rows(torch.cat(encoded))[places]
    return tasks.zero_shot_classifier(texts, num_templates=len(dataset.templates))


# ---- The metric by which checkpoints are chosen or the learning rate falls ----


def use_of_metric(options: Any) -> str | None:
    """The option for which Trainer looks up a metric after every evaluation, or None if there is no such option."""
    schedule = spelled(options.lr_scheduler_type)
    uses = {
        "early_stopping_patience": options.early_stopping_patience is not None,
        "load_best_model_at_end": options.load_best_model_at_end,
        "save_strategy='best'": options.save_strategy == "best",
        f"lr_scheduler_type={schedule!r}": schedule in SCHEDULES_BY_METRIC,
        "metric_for_best_model": options.metric_for_best_model is not None,
    }
    return next((use for use, is_set in uses.items() if is_set), None)


def metrics_of(dataset: object) -> list[str]:
    """The names of the metrics of a set, without the prefix ``eval_``; for a dictionary of sets with their names."""
    if isinstance(dataset, Mapping):
        return [f"{name}_{metric}" for name, one in dataset.items() for metric in metrics_of(one)]
    num_classes = len(dataset.class_names) if isinstance(dataset, ZeroShotDataset) else None
    return list(metrics_of_kind(getattr(dataset, "kind", "pairs"), num_classes))


def check_metric(options: Any, names: Sequence[str]) -> None:
    """Raises a ValueError if the metric that an option looks up is not measured.

    The option may write ``eval_`` before its name; ``names`` are those of the measured metrics, without it.
    """
    use, name = use_of_metric(options), str(options.metric_for_best_model).removeprefix("eval_")
    if use is not None and name not in names:
        looked_up = use if use == "metric_for_best_model" else f"{use} looks up metric_for_best_model, which"
        raise ValueError(f"{looked_up} must be one of {', '.join(names)}, got {name!r}.")


# ---- The evaluation ----


class Evaluator:
    """Embeds the batches of an evaluation, and computes the metrics of the whole set from all embeddings.

    Args:
        context, processing_class: as for `class_vectors`.
        state: Trainer's. Before the first step, `run` notes in it, for each set by the prefix of its metrics, a digest
            of its labels and the resampled values of its score; later it compares with them.

    Attributes:
        found: the ranks or scores of the set, once its metrics are computed.
    """

    def __init__(self, context: Context, processing_class: object, state: TrainerState) -> None:
        self._context, self._processing_class = context, processing_class
        self._encoder, self._accelerator, self._args = context.encoder, context.accelerator, context.args
        self._logged = state.log_history
        before = kept_state(state).setdefault("scores_before", {})
        self._changes = ScoreChanges(before, state.log_history, at_start=state.global_step == 0)
        self._classifier: Tensor | None = None
        self._type_of_set, self._prefix = "dataset", "eval"
        self.found: Found | None = None

    def run(self, loop: Callable[[Any], EvalLoopOutput], dataloader: DataLoader, prefix: str) -> EvalLoopOutput:
        """Runs Trainer's loop over embeddings, then adds the same exact metrics of the whole set on every process.

        For pairs, these are ``loss``, the contrastive loss of the whole set as one batch, and retrieval recalls over
        all captions; for a `ZeroShotDataset`, they are accuracies. Accuracies and recalls have 95% bootstrap intervals
        (``acc1_low``, ``acc1_high``). During a training, ``score_change_low`` and ``score_change_high`` are the paired
        interval of the change of the score (see `metrics.score`) since before it. The loss uses the
        first caption of each image, or all of them with ``equal_ids="positive"``. No metric uses negative captions.
        Every process gets the numbers of rank 0. A training goes on as if it had not been evaluated: the random state
        of dropout stays the same.

        Args:
            loop: Trainer's loop over a loader, with `gather_rows` as its function to gather.

        Raises:
            ValueError: on every process, if the set has another length on one of them; the set is empty.
        """
        dataset: Any = dataloader.dataset
        self._type_of_set, self._prefix = type(dataset).__name__, prefix
        sizes = [int(size) for (size,) in Processes().agree([len(dataset)])] if has_length(dataset) else []
        if len(set(sizes)) > 1:
            raise ValueError(
                f"The evaluation set of {prefix}_* has {sizes} rows on the ranks (in the order of the ranks). Give "
                "every machine the same data; a copy may be out of date."
            )
        with random_state_kept(self._args.device), fsdp_tower_methods(self._encoder), _texts_kept(dataloader):
            batches = AnnouncingDataLoader(dataloader)
            if isinstance(dataset, ZeroShotDataset):
                batches.begin()  # workers load the first ones while prompts are encoded
                self._classifier = class_vectors(dataset, self._context, self._processing_class)
            # The embeddings have one width on all processes. To ask them for it, the loop would wait for the device
            # after every batch. The widths of inputs may differ.
            unpadded = patch.object(self._accelerator, "pad_across_processes", lambda tensor, **_: tensor)
            with nullcontext() if "inputs" in self._args.include_for_metrics else unpadded:
                output = loop(batches)  # which calls `embed`
            Processes().agree([])  # where an error of another process's compute_metrics arrives
            assert output.metrics is not None
            if output.num_samples == 0:
                raise ValueError(f"The evaluation set of {prefix}_* is empty: it returned no batch.")
            metrics = self.metrics(dataset, output)
            if Processes().rank == 0:
                metrics |= self._changes.intervals(prefix, self.found)
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        # The numbers of rank 0: they decide on checkpoints, the learning rate and the end, but rounding may differ.
        numbers = {name: value for name, value in output.metrics.items() if isinstance(value, (int, float))}
        output.metrics.update(Processes().gather_objects(numbers)[0])
        return output

    # ---- Encoding ----

    def embed(self, inputs: dict[str, Tensor]) -> tuple[Any, Any]:
        """The predictions and labels of this process's rows, which are image-text pairs or labelled images.

        Rows that accelerate repeated are left out.

        Returns:
            For pairs, ``(image_embeds [n, D], text_embeds [m, D])``, with the captions in the order of their images,
            and ``(counts [n], caption_ids [m])``: the number of captions of each image, and an int64 that is equal for
            captions with equal tokens. If the batch has ``pair_ids``, these [n] are the third label. For labelled
            images, [n] int32, the rank of the image's class, and the labels [n]; if an image may be of several
            classes, the scores [n, C] and the labels [n, C].
        """
        if self._accelerator.is_fsdp2:
            Processes().agree([])  # before the forward, in which a process would wait for one that has failed
        with failures_announced_unless_sharded(self._accelerator):
            return self._embed(inputs)

    def _embed(self, inputs: dict[str, Tensor]) -> tuple[Any, Any]:
        loaded, on_host = tasks.taken_apart(inputs)
        batch = self._context.prepare_inputs(loaded)
        classified = "labels" in batch
        if "pixel_values" not in batch or not (classified or "input_ids" in batch):
            raise ValueError(
                "A batch of an evaluation must have pixel_values and input_ids, for image-text pairs, or pixel_values "
                f"and labels, for a ZeroShotDataset, got keys {list(batch)}."
            )
        name: str = getattr(self._encoder.model, "main_input_name", "input_ids")
        if (with_inputs := "inputs" in self._args.include_for_metrics) and name not in batch:
            raise ValueError(f'include_for_metrics=["inputs"] asks for {name}, but a batch has {list(batch)}.')
        with torch.no_grad(), autocast(self._accelerator):
            if not classified:  # before the forwards, which the checks would wait for if the texts are not on the host
                self._encoder.check_texts(on_host)
            images = self._encoder.encode_images(batch).float()
            texts = None if classified else self._encoder.encode_texts(batch, checked=True).float()
        rows = rows_to_keep(len(images), self._args.process_index)
        kept: dict[str, Any] = dict.fromkeys(IMAGE_INPUTS, slice(rows))
        if texts is None:
            if self._classifier is None:
                raise ValueError(
                    "Images with labels are evaluated zero-shot, which needs a ZeroShotDataset, not a "
                    f"{self._type_of_set} around one. Select rows of the dataset inside it instead."
                )
            labels: Any = batch["labels"][:rows]
            # A check would wait for the device, which works on while the next batches are prepared; see `metrics`.
            predictions: Any = tasks.class_places(images[:rows], self._classifier, labels)
        else:
            order, counts = tasks.group_by_image(on_host.get("caption_image"), len(texts), len(images))
            counts = counts[:rows]
            order = order[: int(counts.sum())]
            mask = on_host.get("attention_mask")
            ids = tasks.caption_ids(on_host["input_ids"][order], None if mask is None else mask[order])
            order, counts, ids = (one.to(texts.device, non_blocking=True) for one in (order, counts, ids))
            kept |= dict.fromkeys(TEXT_INPUTS, order)
            predictions, labels = (images[:rows], texts[order]), (counts, ids)
            if "pair_ids" in batch:
                labels += (batch["pair_ids"][:rows],)
        if with_inputs:  # Trainer gathers this input after this method returns
            inputs[name] = batch[name][kept[name]]
        return predictions, labels

    # ---- Metrics ----

    def metrics(self, dataset: object, output: EvalLoopOutput) -> dict[str, float]:
        """The metrics of a set whose embeddings, or the ranks of its classes, are gathered in ``output``."""
        predictions: Any = output.predictions
        labels: Any = output.label_ids
        self._changes.recognise(self._prefix, labels)
        if of_choices := [part for part in all_parts(dataset) if getattr(part, "kind", "") == "choices"]:
            images, texts, counts = map(self._on_device, (*predictions, labels[0]))
            self.found = tasks.choices(images, texts, tasks.image_of_captions(counts), of_choices[0].right)
            return measured(self.found)
        if isinstance(predictions, tuple):
            return self._pair_metrics(predictions, labels)
        assert self._classifier is not None
        predictions, labels = (torch.as_tensor(array).cpu() for array in (predictions, labels))
        self.found = tasks.checked_classes(predictions, labels, len(self._classifier))
        return measured(self.found)

    def _pair_metrics(self, predictions: tuple[Any, Any], labels: tuple[Any, ...]) -> dict[str, float]:
        images, texts = map(self._on_device, predictions)
        counts, ids, *pair_ids = map(self._on_device, labels)
        text_image = tasks.image_of_captions(counts)
        with torch.no_grad():
            if self._context.equal_ids == "positive":
                image_ids = pair_ids[0] if pair_ids else torch.arange(len(images), device=images.device)
                captions, ids_of = texts, {"image_ids": image_ids, "text_ids": image_ids[text_image]}
            else:
                captions = texts[counts.cumsum(0) - counts]  # the first of each image
                ids_of = {"pair_ids": pair_ids[0]} if pair_ids else {}
            how: Any = {"objective": self._context.objective, "backend": self._args.backend, **ids_of}
            loss = local_contrastive_loss(images, captions, *self._encoder.scale_and_bias(), **how)
        self.found = ranks = tasks.pair_ranks(images, texts, text_image, ids)
        every = tasks.recall_ceilings(ids, ranks.text_image, len(images), KS)
        ceilings = {name: value for name, value in every.items() if value < 1}
        was_logged = any(f"{self._prefix}_{name}" in entry for name in ceilings for entry in self._logged)
        if ceilings and not was_logged and self._accelerator.is_main_process:
            highest = ", ".join(f"{name.removesuffix(CEILING)} {value:.2%}" for name, value in ceilings.items())
            logger.warning_once(
                f"Some captions of {self._prefix}_*, as the model reads them, belong to several images, so some "
                f"recalls cannot reach 100%. The highest that any model can reach: {highest}."
            )
        return {"loss": loss.item(), **measured(ranks), **every}

    def _on_device(self, array: object) -> Tensor:
        return torch.as_tensor(array, device=self._args.device)


def tell_predictions() -> None:
    """Tells once what people who know Trainer do not expect."""
    logger.warning_once(
        "compute_metrics and predict() get embeddings here, (image_embeds, text_embeds), where Trainer gives logits: "
        "these are logit_scale * text_embeds @ image_embeds.T (of a ZeroShotDataset: the ranks of Evaluator.embed)."
    )


@failures_announced()
def checked_metrics(compute_metrics: Callable[..., object], *args: object) -> dict[str, Any]:
    """Calls a function of the user, which has to return a dict; the other processes learn of its errors."""
    if isinstance(metrics := compute_metrics(*args), dict):
        return metrics
    raise ValueError(f"compute_metrics must return a dict, {{'name': number}}, got a {type(metrics).__name__}.")


def rows_to_keep(batch_size: int, rank: int) -> int:
    """The number of rows in this rank's batch that are not repeated.

    accelerate gives all ranks batches of equal size and repeats rows to fill the last ones. The rows that are not
    repeated come first: those of rank 0, then those of rank 1 and so on.
    """
    state = GradientState()
    if not state.end_of_dataloader or state.remainder <= 0:
        return batch_size
    return min(max(state.remainder - rank * batch_size, 0), batch_size)


def _texts_kept(dataloader: DataLoader) -> AbstractContextManager[Any]:
    """The context in which a loader's batches keep their texts on the host, if it is a loader of torch."""
    loader = getattr(dataloader, "base_dataloader", dataloader)
    if not isinstance(loader, DataLoader):
        return nullcontext()
    return patch.object(loader, "collate_fn", partial(tasks.with_texts_on_host, loader.collate_fn))
