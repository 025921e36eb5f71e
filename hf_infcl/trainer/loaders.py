"""Makes the data loaders of a trainer, warns about captions, and reads the windows of a training.

The windows are read on all processes or on none. `TrainingData` knows how far the training has come in the data.
"""

import collections
import inspect
import itertools
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard, prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..data.collator import ContrastiveCollator, DataCollator
from ..data.loader import SLOW_SHARE, WAIT_SHARE, WAIT_WINDOWS, DataWait, TrainingLoader, check_window, worker_options
from ..data.pairs import REPEATED, caption_pair_id
from ..data.replay import Epochs, Replayed
from ..data.store import KeyedItem, all_parts, most_captions, negative_caption_columns, set_epoch
from ..files.text import counted, describe_cause
from ..models.dual_encoder import NO_MASK, images_of
from ..options.arguments import InfCLTrainingArguments
from ..options.record import RunRecord
from ..processes.collectives import Processes, announce_failure
from ..processes.signals import Interruptions
from ..quality.teachers import StoredTeacher
from ..refusals import check_tokens
from ..step.extensions import of_kind
from ..step.terms import Context, TeacherDistance
from ..step.window import Window, contents, split_batches

logger = logging.get_logger(__name__)

_SAMPLED = 10_000  # images whose captions are compared
_TOKENIZED = 2_000  # captions whose tokens are counted
# The keys of items that are no arguments of the model, but are read by the trainer and by `ContrastiveCollator`.
_OF_TRAINER = ("pair_ids", "caption_image", "skipped")
_OF_COLLATOR = tuple("image cropped image_features at_start caption negative_captions pair_id skipped label".split())


# ---- Captions that are cut or repeated ----


@dataclass
class CaptionNotices:
    """Looks once at the captions of each dataset, and warns about those that are cut or repeated."""

    was_told: bool = False  # whether the run that is resumed has told all this
    cut: dict[str, float] = field(default_factory=dict)  # the share of captions that are, if any, by the dataset's name
    _seen: set[str] = field(default_factory=set)

    def look(self, name: str, datasets: Iterable[Any], collator: object, batch_size: int | None = None) -> None:
        """Looks at up to 10,000 images of each dataset, without reading images of tables.

        Args:
            name: the name of the datasets for the warnings. Only its first call has an effect.
            datasets: the parts of the data; those without a method ``sample_captions`` are left out.
            collator: captions are tokenized only for a `ContrastiveCollator`, which knows the limit.
            batch_size: the global batch of a training, in which repeated captions are each other's negatives.
        """
        if name in self._seen:
            return
        self._seen.add(name)
        parts = [part for part in datasets if hasattr(part, "sample_captions")]
        samples = [part.sample_captions(_SAMPLED) for part in parts]
        if isinstance(collator, ContrastiveCollator):
            texts = [caption for sample in samples for captions in sample for caption in captions]
            texts = texts[:: -(-len(texts) // _TOKENIZED) or 1]
            if cut := sum(map(collator.is_cut, texts)):
                self.cut[name] = share = cut / len(texts)
                tell = logger.info if self.was_told else logger.warning
                tell(
                    f"{share:.1%} of {len(texts):,} captions of the {name} have more than {collator.max_length} "
                    "tokens, the limit of the model, which does not see what follows. Captions that differ only there "
                    f"are equal to it. Shorten them, or use a model with a higher limit.{collator.more_positions}"
                )
        for part, sample in zip(parts, samples, strict=True):
            if self.was_told or batch_size is None or part.pair_id_column is not None:
                continue
            if (repeated := repeated_captions(sample)) > REPEATED * len(sample):
                logger.warning(
                    f"{repeated:,} of {len(sample):,} images of the {name} have a caption that another one also has. "
                    f"Equal captions in a global batch, which has {batch_size:,} pairs, are each other's negatives "
                    f"unless you pass pair_id_column={part.caption_column!r} (--pair_id_column {part.caption_column})."
                )

    def look_at_all(self, context: Context, evaluated: object) -> None:
        """Looks at the training set, or at the new and the old pairs of which it consists, and at evaluation sets."""
        parts = context.data.datasets if isinstance(context.data, Replayed) else [context.data]
        for name, part in zip(("training set", "replayed set"), parts, strict=False):
            self.look(name, all_parts(part), context.collator, context.args.global_batch_size)
        for name, dataset in evaluated.items() if isinstance(evaluated, Mapping) else [("", evaluated)]:
            self.look(f"evaluation set of eval_{name}{'_' if name else ''}*", all_parts(dataset), context.collator)


def repeated_captions(sample: list[list[str]]) -> int:
    """The number of images with a caption that reads the same as one of another image."""
    ids = [{caption_pair_id(caption) for caption in captions} for captions in sample]
    times = collections.Counter(number for ids_of_image in ids for number in ids_of_image)
    return sum(any(times[number] > 1 for number in ids_of_image) for ids_of_image in ids)


# ---- Loaders ----


def add_used_columns(columns: list[str] | None, collator: object) -> None:
    """Adds the columns that ``remove_unused_columns`` has to keep beside the arguments of the model."""
    used = _OF_COLLATOR if isinstance(collator, ContrastiveCollator) else _OF_TRAINER
    assert columns is not None
    columns += [name for name in used if name not in columns]


def set_sizes(collator: object, args: InfCLTrainingArguments) -> None:
    """Sets the ``image_size``, and ``max_text_tokens`` above the tokenizer's limit, for all rows and what is saved.

    Raises as `training_collator` does.
    """
    if isinstance(collator, ContrastiveCollator):
        if args.image_size is not None:
            collator.set_image_size(args.image_size)
        if args.max_text_tokens is not None:
            collator.lengthen(args.max_text_tokens)
    training_collator(collator, args)


class TrainingCollator:
    """The data collator of a training, which runs in the loader's workers: its batches also have what a teacher needs.

    While the tokens are in host memory, it checks them against the model's vocabulary, and says, for a GPU, whether the
    text tower needs the attention mask. Of items with keys, the batch gets ``pair_keys`` [images] int64.
    """

    def __init__(self, collate: DataCollator, context: Context) -> None:
        of_terms = [term.teacher for term in of_kind(context.extensions, TeacherDistance)]
        self._teachers = [teacher for teacher in of_terms if isinstance(teacher, StoredTeacher)]
        self._collate, self._vocabulary = collate, context.encoder.vocabulary
        self._reads_to_end = context.encoder.reads_to_end if context.args.device.type == "cuda" else None
        taken = {*inspect.signature(context.encoder.base.forward).parameters, *_OF_TRAINER}
        is_told = context.args.remove_unused_columns or isinstance(context.collator, ContrastiveCollator)
        self._taken = None if is_told else taken  # the columns that Trainer would give to a collator of one's own

    def __call__(self, items: list[Any]) -> Any:
        keyed = isinstance(items[0], KeyedItem)
        plain = [one.item for one in items] if keyed else items
        try:
            batch = self._collate(plain)
        except (TypeError, ValueError) as error:
            if self._taken is None or not isinstance(plain[0], Mapping) or not (more := plain[0].keys() - self._taken):
                raise
            raise ValueError(
                f"The data collator failed: {describe_cause(error)}. It gets all columns, and {', '.join(sorted(more))}"
                ", which Trainer leaves out: with remove_unused_columns=True InfCLTrainer does as well."
            ) from error
        if not isinstance(batch, Mapping) or images_of(batch) is None:
            return batch  # which is refused later
        if isinstance(tokens := batch.get("input_ids"), Tensor):
            check_tokens(tokens, self._vocabulary)
        added: dict[str, Any] = {}
        for teacher in self._teachers:
            added |= teacher.inputs(plain, batch)
        mask = batch.get("attention_mask")
        if self._reads_to_end is not None and isinstance(mask, Tensor) and isinstance(tokens, Tensor):
            added[NO_MASK] = not self._reads_to_end.needs_mask(tokens, mask)
        if keyed:
            added["pair_keys"] = torch.tensor([one.key for one in items])
        return {**batch, **added} if added else batch


def training_collator(collator: Any, args: InfCLTrainingArguments) -> DataCollator:
    """The data collator for the rows of a training, which cuts captions to ``max_text_tokens`` if that is set.

    Raises a ValueError if it is no `ContrastiveCollator`, and the errors of `ContrastiveCollator.cut_to`.
    """
    if args.max_text_tokens is None:
        return collator
    if not isinstance(collator, ContrastiveCollator):
        raise ValueError(
            f"max_text_tokens={args.max_text_tokens} needs a ContrastiveCollator, which the trainer creates from a "
            f"processing_class, but the data collator is a {type(collator).__name__}. Let that cut the captions."
        )
    return collator.cut_to(args.max_text_tokens)


def values_of_loop(args: InfCLTrainingArguments, loader: DataLoader, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `Trainer.set_initial_training_values` returns, with as many steps as train the pairs of all epochs.

    Passes over a stream of another class have full windows only, and its length may be a guess: it takes more passes.
    """
    last, windows, examples, _, batch, in_epoch, steps = values
    epochs, goes_on = getattr(loader, "epochs", None), isinstance(loader, TrainingLoader)
    data: Any = getattr(loader, "dataset", None)
    if not goes_on and isinstance(data, IterableDataset) and has_length(loader):
        windows = max(1, len(loader) // args.gradient_accumulation_steps)
        last, in_epoch = sys.maxsize, windows * args.gradient_accumulation_steps
        whole: Any = data.dataset if isinstance(data, IterableDatasetShard) else data
        epochs = Epochs(len(whole), batch)
    if epochs is None:
        return values
    if args.max_steps < 0:
        steps = epochs.steps(args.num_train_epochs)
        if args.process_index == 0 and (left := epochs.rows % epochs.of_window):
            further = steps * epochs.of_window - round(args.num_train_epochs * epochs.rows)
            logger.warning(
                f"An epoch of {counted(epochs.rows, 'pair')} leaves {left:,} over after its last full global batch of "
                f"{epochs.of_window:,}, {'which the next epoch begins with' if goes_on else 'which are left out'}: "
                f"{args.num_train_epochs:g} epochs are {counted(steps, 'step')}"
                + (f", with {counted(further, 'pair')} of a further epoch." if further > 0 else ".")
            )
    return epochs.of(steps - 1) + 1 if goes_on else last, windows, examples, steps * batch, batch, in_epoch, steps


def drawn_texts(data: object) -> tuple[int, str | None]:
    """The most captions that a training set draws of an image, and the column of its negative captions, if any."""
    return most_captions(data), next(iter(negative_caption_columns(data)), None)


def rows_of(data: object) -> int | None:
    """The number of rows of a training set without old pairs; None for a stream."""
    new = data.datasets[0] if isinstance(data, Replayed) else data
    return len(new) if has_length(new) and not isinstance(new, IterableDataset) else None


def loader_of_stream(dataset: IterableDataset, collate: TrainingCollator, args: InfCLTrainingArguments) -> DataLoader:
    """The training loader of a stream of another class than `ImageTextStream`, which each process reads as a whole.

    The processes take its rows in turn, in full micro-batches. A resumed training skips as many as were trained, but
    what the stream draws is its own.
    """
    if args.save_strategy != "no" and args.process_index == 0:
        logger.warning_once(
            f"Of a {type(dataset).__name__}, a checkpoint holds no position: a training resumes near it, but not with "
            "the same batches. For exact resumes, read shards with ImageTextStream (--streaming)."
        )
    size, how = args.per_device_train_batch_size, worker_options(args)
    loader = DataLoader(dataset, batch_size=size, collate_fn=collate, drop_last=True, **how)
    return prepare_data_loader(
        loader,
        args.device,
        args.world_size,
        args.process_index,
        put_on_device=not args.offload_inputs,
        dispatch_batches=False,  # the main process cannot deal out several captions of an image
    )


# ---- The windows of a training ----


class TrainingData:
    """The data of one training, read window by window.

    Args:
        context: its data collator knows how captions are padded.
        interruptions: end the training between two windows.
        loader: the training loader; None before there is one.
    """

    def __init__(
        self, context: Context, interruptions: Interruptions, loader: object, resumed: RunRecord | None = None
    ) -> None:
        args = context.args
        self.window = Window([])  # that is trained now
        self.wait = DataWait()
        self._loader = loader if isinstance(loader, TrainingLoader) else None
        self._stream = getattr(loader, "dataset", None)  # of another loader
        self._images = args.global_batch_size // args.world_size  # of a window
        self._args, self._processes = args, Processes()
        self._equal_ids, self._interruptions = context.equal_ids, interruptions
        self._text_padding: Mapping[str, int] | None = getattr(context.collator, "text_padding", None)
        # None until the data reports it. On the main process a resumed run continues the earlier count.
        self._skipped = None if resumed is None else resumed.skipped_samples
        if self._skipped is not None and self._processes.rank > 0:
            self._skipped = 0
        self._has_warned_of_wait = False
        self._behind = 0  # logs, one after the other, in which this process was notably behind
        self.given: list[tuple[Any, object]] = []  # the batches of the window for Trainer's loop, with their `contents`
        self._exhausted = False  # whether a stream has no full window left

    def begin_epoch(self, epoch: int, skipped_rows: Callable[[int], Tensor]) -> dict[str, int]:
        """Begins a pass over the data; see `WindowStep.skipped_rows` and `TrainingLoader.begin_epoch`."""
        self._exhausted = False
        if self._loader is not None:
            return self._loader.begin_epoch(epoch, partial(skipped_rows, epoch))
        set_epoch(self._stream, epoch)
        return {}

    def fetch(self, epoch_iterator: Iterator[Any], step: int) -> Window:
        """Fetches the next window, or an empty one if the remaining rows of a stream do not fill it; collective.

        All processes agree here that they have a window, so an error in the data of one process stops all of them.

        Args:
            epoch_iterator: of Trainer's loop; a `TrainingLoader` reads from one that lasts for the whole training.

        Raises:
            ValueError: the collator returns batches that cannot be trained on; the stream is shorter than a global
                batch.
            EndRequestedError: any process has received a signal to end.
        """
        self._interruptions.phases.enter("loading data", step)
        self.window, self.given = Window([]), []  # the batches of the last one take memory
        rows = 0
        batches: list[Any] = []
        if self._exhausted:
            return self.window
        try:
            with self.wait.waiting():
                iterator = epoch_iterator if self._loader is None else self._loader.lasting()
                batches = list(itertools.islice(iterator, self._args.gradient_accumulation_steps))
            check_window(batches, self._equal_ids)
            rows = sum(len(images_of(batch)) for batch in batches)
        except Exception as error:
            if not self._interruptions.is_ending:
                announce_failure(error)
                raise
        agreed = self._interruptions.agree([rows, len(batches)])
        seen = [int(rows) for rows, _ in agreed]
        if seen == [self._images] * len(seen):
            # Gradients are exchanged in the backward of the last micro-batch, which needs both towers for it.
            # Trainer's loop holds what it gets during the step, where images would take memory.
            loaded = [{name: value for name, value in batch.items() if name != "pixel_values"} for batch in batches]
            batches = split_batches(batches, self._args.largest_micro_batch)
            keeps = self._args.divides_by_itself or bool(self._args.chosen)
            how: Any = {"last_has_texts": self._processes.grouped, "keeps_loaded": keeps, "rows_at": self.rows_at}
            self.window = Window(batches, self._text_padding, self._args.texts_together, **how)
            # As many as were loaded, also where they have been split.
            given = self.window.batches if len(loaded) == len(self.window) else loaded
            self.given = [(batch, contents(batch)) for batch in given]
            return self.window
        # All batches of these loaders are full: a whole window lacks rows only if the collator left them out.
        if self._loader is not None and any(count == self._args.gradient_accumulation_steps for _, count in agreed):
            raise ValueError(
                f"The data collator has left rows out, or added some: the processes got {seen} rows of {self._images} "
                "each for a global batch. It must return every row that it receives. Remove bad rows beforehand."
            )
        # Training on a short window would change the objective, and Trainer would leave its gradient behind.
        if step == 0:
            raise ValueError(
                f"The stream ended before its first global batch of {self._images * self._processes.world_size} pairs "
                f"was full: the processes got {seen} of {self._images} each in full micro-batches. Lower the batch."
            )
        self._exhausted = True
        return self.window

    def is_as_fetched(self, inputs: Any) -> bool:
        """Whether these are a batch of the window in which nothing was changed since."""
        return any(inputs is batch and contents(batch) == before for batch, before in self.given)

    def end_window(self) -> None:
        """Records that the window is trained."""
        if skipped := [int(batch["skipped"].sum()) for batch in self.window.batches if "skipped" in batch]:
            self._skipped = (self._skipped or 0) + sum(skipped)
        if self._loader is not None:
            self._loader.consume()

    def rows_at(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """The rows of the training set at (micro-batch, row) of the current window; empty for a stream."""
        if self._loader is None:
            return []
        size = self._images // max(1, len(self.given))  # of the loader's micro-batches, which may have been split
        of_loader = [divmod(sum(self.window.sizes[0][:i]) + row, size) for i, row in places]
        return self._loader.batches.rows_at(of_loader)

    def position(self) -> dict[str, Any]:
        """The fields of `RunRecord` that say how far the training has come in the data; collective."""
        skipped = self._skipped_samples()
        if self._loader is None:
            return {"skipped_samples": skipped}
        batches = self._loader.batches
        states = self._processes.gather_objects(batches.state())  # of a stream, the part that each has trained on
        return {"position": batches.position, "skipped_samples": skipped, "stream": None if None in states else states}

    def _skipped_samples(self) -> int | None:
        """The sum over all processes since the run began, or None if the data does not report them; collective."""
        if self._skipped is None:
            return None
        return int(sum(count for (count,) in self._processes.agree([self._skipped])))

    def logs(self, first_pass: float) -> dict[str, float]:
        """Metrics of the data, and warnings if the training waits for it, or for one process; collective.

        The last first pass of this process took ``first_pass`` seconds. The README of the training lists the metrics:
        ``data_wait`` is since the last log, ``texts_per_image`` that of the last global batch; numbers of samples and
        of shards are since the run began.
        """
        logs: dict[str, float] = {}
        if (skipped := self._skipped_samples()) is not None:
            logs["skipped_samples"] = skipped
        wait, loader = self.wait, self._loader
        progress = {} if loader is None else loader.progress()
        step, waited = wait.since_last()
        own, recent = waited + first_pass, waited / step if step else 0.0
        numbers = [own, recent, wait.share(), sum(self.window.sizes[1]), *progress.values()]
        of_ranks, shares, overall, texts, *sums = zip(*self._processes.agree(numbers), strict=True)
        if sum(texts) != (images := self._images * len(texts)) and len(self.window):
            logs["texts_per_image"] = round(sum(texts) / images, 3)
        if wait.windows > 0:
            logs["data_wait"] = round(max(shares), 4)
            logs |= self._slowest(of_ranks, step, waited)
        if progress:
            totals = dict(zip(progress, map(sum, sums), strict=True))
            if "replayed" in totals:
                logs["replay_samples"] = int(totals["replayed"])
            if "shards" in totals:
                logs["stream_samples"], logs["stream_shards"] = int(totals["samples"]), int(totals["shards"])
            logs["loader_samples_per_second"] = round(totals["rate"], 1)
        if wait.windows >= WAIT_WINDOWS and max(overall) > WAIT_SHARE and not self._has_warned_of_wait:
            self._has_warned_of_wait = True
            if self._processes.rank == 0:
                workers = self._args.dataloader_num_workers
                logger.warning(
                    f"The training has waited for its data for {max(overall):.0%} of the time. Raise "
                    f"dataloader_num_workers, which is {workers}, up to the number of CPU cores; decode JPEGs faster "
                    "(pip install simplejpeg); or store smaller images."
                )
        return logs

    def _slowest(self, seconds: Sequence[float], step: float, waited: float) -> dict[str, float]:
        """The process that the others wait for, by the ``seconds`` of each; it warns if it falls notably behind.

        The whole step takes equally long on all of them.
        """
        if len(seconds) == 1:
            return {}
        slowest, median = max(range(len(seconds)), key=seconds.__getitem__), statistics.median_low(seconds)
        behind = slowest == self._processes.rank and seconds[slowest] - median > SLOW_SHARE * step
        self._behind = self._behind + 1 if behind and self.wait.windows >= WAIT_WINDOWS else 0
        if self._behind == 2:  # in two logs, since one step may be slow by chance
            logger.warning(
                f"The other processes wait for rank {slowest} on {platform.node()}: of a step of {step:.3g} s, it "
                f"takes {seconds[slowest]:.3g} s to load its data ({waited:.3g} s) and to encode it the first time, "
                f"where the median is {median:.3g} s. Look at the disk, the network and other programs of that machine."
            )
        return {"slowest_rank": slowest, "slowest_rank_seconds": round(seconds[slowest], 4)}

    def close(self) -> None:
        """Lets go of the last window, and ends the workers of a stream."""
        self.window, self.given = Window([]), []
        if self._loader is not None:
            self._loader.close()
