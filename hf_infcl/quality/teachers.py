"""A teacher whose embeddings were stored: which of these belong to which part of a training set, and pairs without.

It also makes the term of a training's teacher, and refuses one that could not teach exactly."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from ..data import ImageTextDataset, ImageTextStream
from ..data.collator import ContrastiveCollator, normalised
from ..data.pairs import usable_captions
from ..data.sources import differences, source_of_training
from ..data.store import Store, all_parts, of_caption
from ..files.hub import stated_licence
from ..files.text import counted
from ..models.dual_encoder import DualEncoder
from ..models.open_clip import load
from ..options.arguments import InfCLTrainingArguments
from ..step.extensions import LossTerm, of_kind
from ..step.terms import OF_TEACHER, Context, TeacherDistance
from .embedding import RECORD, described, embed, read_record

logger = logging.getLogger(__name__)


class StoredEmbeddings:
    """A folder of embeddings of one set.

    Raises:
        ValueError: there is no such folder, it is not complete, of another format or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if (record := read_record(self.folder)) is None:
            raise ValueError(f"{folder} has no {RECORD}, so it holds no embeddings of `infcl embed`. Was it moved?")
        self.record = record  # what was embedded, with which model
        if self.record.get("format") != "npy":
            raise ValueError(
                f"The embeddings in {folder} are in the format {self.record.get('format')!r}, in which a training "
                "cannot look up single ones. Write them with `infcl embed --format npy`, the default."
            )
        self.stores = {kind: Store(self.folder, kind, self.record["parts"]) for kind in self.record["kinds"]}
        if missing := [kind for kind, store in self.stores.items() if not store.is_finished]:
            what = f"The embeddings of {' and '.join(missing)} in {folder}"
            raise ValueError(f"{what} are not complete. The same `infcl embed` computes what is missing.")
        widths = {kind: store.first_part.shape[1] for kind, store in self.stores.items()}
        if len(set(widths.values())) > 1:
            raise ValueError(f"The embeddings in {folder} have several widths: {widths}. Embed the data again.")
        self.width: int = next(iter(widths.values()))

    def find(self, kind: str, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As `Store.find`; a ValueError also says that an embedding is zero or not finite."""
        embeddings, known = self.stores[kind].find(keys)
        is_usable = np.isfinite(embeddings).all(1) & (embeddings.any(1) | ~known)
        for bad in np.flatnonzero(~is_usable)[:1]:
            what = "zero" if np.isfinite(embeddings[bad]).all() else "not finite"
            place = f"The embedding of {keys[bad]!r} in {self.folder} ({kind})"
            raise ValueError(f"{place} is {what}, so the file is damaged. Embed the data again.")
        return embeddings, known


class StoredTeacher:
    """A teacher whose embeddings were stored: looked up by the place of each item, which it lets the sets name.

    Args:
        folders: of embeddings, or of such folders, of which `infcl embed --dataset` makes one for each set it has read.
        data: the training sets.

    Raises:
        ValueError: the embeddings are of other data or of several models, or pairs have none.
    """

    def __init__(self, folders: Iterable[str | Path], data: Iterable[object], args: InfCLTrainingArguments) -> None:
        opened: list[StoredEmbeddings] = []
        for folder in map(Path, folders):
            parts = [] if (folder / RECORD).exists() else folder.glob(f"*/{RECORD}")
            opened += map(StoredEmbeddings, sorted(path.parent for path in parts) or [folder])
        self.sides = ("image", "text") if args.teacher_side == "both" else (args.teacher_side,)
        self._kinds = [f"{side}s" for side in self.sides]
        sets = [_DataSet(part, self._kinds, opened) for one in data for part in leaves(one)]
        for stored in opened:
            if lacking := [kind for kind in self._kinds if kind not in stored.stores]:
                raise ValueError(
                    f"{stored.folder} has no embeddings of {' and '.join(lacking)}. Embed data that has them, or "
                    f"choose another teacher_side than {args.teacher_side!r}."
                )
            if all(one.difference(stored) for one in sets):
                raise ValueError(
                    f"The embeddings in {stored.folder} are of other data than the training set: "
                    f"{'; '.join(one.difference(stored) for one in sets)}. Embed the training set itself, with the "
                    "same columns if it has any: `infcl embed` takes the whole command of a training."
                )
        if len({(stored.record["weights"], stored.width) for stored in opened}) > 1:
            models = ", ".join(f"{stored.record['model']} in {stored.folder}" for stored in opened)
            raise ValueError(f"The sets were embedded by several models: {models}. Embed all of them with one teacher.")
        self.partial = args.teacher_missing == "contrastive"  # whether it may not know all pairs
        if without := ", and ".join(filter(None, (one.describe_missing() for one in sets))):
            if not self.partial:
                raise ValueError(
                    f"Pairs have no stored embedding of the teacher: {without}. Embed them, or leave them to the "
                    "contrastive loss with teacher_missing='contrastive'."
                )
            if args.process_index == 0:
                logger.warning(f"{without} have no teacher embedding; they get the contrastive loss only.")
        for number, one in enumerate(sets):
            one.part.set_number = number
        # By the number of each set, its embeddings, and the beginnings of the places of samples that have changed.
        self._sets = {n: (one.stored, one.changed) for n, one in enumerate(sets) if one.stored is not None}
        record, self.width = opened[0].record, opened[0].width
        prints = [stored.record["fingerprint"] for stored in opened]
        self.options: Mapping[str, Any] = {"fingerprint": " ".join(prints), "weights": record["weights"]}
        name, licence = record["model"], record.get("licence")
        shown = os.path.basename(os.path.normpath(name)) if os.path.isabs(name) or os.path.exists(name) else name
        of_licence = f"licence {licence}" if licence else "no licence stated"
        self.words = f"{shown} ({of_licence}), whose embeddings were stored"

    def inputs(self, items: Sequence[Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a batch of some items gets for the teacher."""
        images = [(row, *item["place"]) for row, item in enumerate(items)]
        texts = [(row, n, of_caption(key, text)) for row, n, key in images for text in items[row]["caption"]]
        known, added = np.ones(len(items), bool), {}
        for kind, places in (("images", images), ("texts", texts)):
            if kind in self._kinds:
                added[kind], found = self._find(kind, places)
                known[[places[place][0] for place in np.flatnonzero(~found)]] = False
        if self.partial:
            of_texts = known[[row for row, *_ in texts]]
            negatives = len(batch["input_ids"]) - len(texts)
            added["known_images"], added["known_texts"] = known, np.concatenate([of_texts, np.zeros(negatives, bool)])
        elif not known.all():
            number, key = items[int((~known).argmax())]["place"]
            raise ValueError(
                f"{self._sets[number][0].folder} has no embedding of {key} or of its caption, although it was made "
                "from this training set. Was it changed since? Embed it again, or pass teacher_missing='contrastive'."
            )
        return {f"{OF_TEACHER}{name}": torch.from_numpy(values) for name, values in added.items()}

    def _find(self, kind: str, places: Sequence[tuple[int, int, str]]) -> tuple[np.ndarray, np.ndarray]:
        """The embeddings of some places, each a set's number and a key within it, and whether there are any."""
        dtype = np.result_type(*(stored.stores[kind].first_part.dtype for stored, _ in self._sets.values()))
        values, known = np.zeros((len(places), self.width), dtype), np.zeros(len(places), bool)
        for number, (stored, changed) in self._sets.items():
            rows = [row for row, (_, n, key) in enumerate(places) if n == number and not key.startswith(changed)]
            values[rows], known[rows] = stored.find(kind, [places[row][-1] for row in rows])
        return values, known


def leaves(data: object) -> Iterator[ImageTextDataset | ImageTextStream]:
    """The tables and streams of a training set.

    Raises:
        ValueError: it has other parts.
    """
    for part in all_parts(data):
        if isinstance(part, (ImageTextDataset, ImageTextStream)):
            yield part
        elif not any(getattr(part, name, None) is not None for name in ("dataset", "datasets")):
            raise ValueError(
                "A teacher's embeddings are stored by the rows of an ImageTextDataset or the samples of the shards of "
                f"an ImageTextStream, but the training set has a {type(part).__name__}. Use one of these."
            )


class _DataSet:
    """A table or a stream of the training set, which is compared with what was embedded.

    If pairs were excluded from a table, the embeddings may be those of the pairs that remain or of the whole table.

    Attributes:
        stored: its embeddings; None if there are none.
        changed: the beginnings of the places of samples whose shards have changed since they were embedded.

    Raises:
        ValueError: its captions have no stored embeddings.
    """

    def __init__(
        self, part: ImageTextDataset | ImageTextStream, kinds: Sequence[str], opened: Sequence[StoredEmbeddings]
    ) -> None:
        self.part, self._kinds = part, kinds
        if "texts" in kinds and part.negative_caption_column:
            raise ValueError(
                "A teacher's embeddings are of the captions of the pairs as they are, but negative captions have none. "
                "Leave one of both out, or choose teacher_side='image'."
            )
        self._described = source_of_training(part).described()
        if isinstance(part, ImageTextDataset) and part.whole is not None and all(map(self.difference, opened)):
            whole = source_of_training(part.whole).described()
            if not all(differences(stored.record["data"], whole, self._kinds) for stored in opened):
                self._described = whole
        self.stored = next((stored for stored in opened if not self.difference(stored)), None)
        recorded = {} if self.stored is None else self.stored.record["data"]
        self._shards, self._embedded = self._described.get("shards", {}), recorded.get("shards", {})
        self.changed = tuple(f"{name}/" for name, tag in self._embedded.items() if self._shards.get(name, tag) != tag)

    def difference(self, stored: StoredEmbeddings) -> str:
        """How this set differs from the one that was embedded; empty if it does not, or has some of its shards."""
        return differences(stored.record["data"], self._described, self._kinds)

    def describe_missing(self) -> str:
        """How many rows or shards have no embeddings, in words; empty if there are none."""
        if isinstance(self.part, ImageTextDataset):
            every, missing = counted(len(self.part), "row"), len(self.part)
            if self.stored is not None:
                stores, rows = self.stored.stores, self.stored.record["data"]["rows"]
                without = _rows_without_captions(self.part, stores["texts"]) if "texts" in self._kinds else 0
                missing = max(without, rows - len(stores["images"])) if "images" in stores else without
        else:
            every, missing = counted(len(self._shards), "shard"), len(self._shards.items() - self._embedded.items())
        return f"{missing:,} of the {every} of {self.part.name}" if missing else ""


def _rows_without_captions(part: ImageTextDataset, texts: Store) -> int:
    """The number of rows of a table that have a caption without an embedding. A million captions take six seconds."""
    table, lacking = part.table.select_columns([part.caption_column]).with_format(None), 0
    for first in range(0, len(table), 10_000):
        values = enumerate(table[first : first + 10_000][part.caption_column], first)
        captions = [(row, caption) for row, value in values for caption in usable_captions(value)]
        missing = texts.missing([of_caption(str(part.number(row)), text) for row, text in captions])
        lacking += len({captions[place][0] for place in np.flatnonzero(missing)})
    return lacking


CACHE = "_teacher"  # in output_dir; a push leaves out what begins with an underscore


def make_teachers(context: Context, *, remakes_model: bool) -> tuple[TeacherDistance, ...]:
    """The term of the teacher that the arguments name; none without a teacher. Collective.

    Args:
        remakes_model: whether ``model_init`` makes a new model for each training.

    Raises:
        ValueError: the training cannot be exact with the teacher; it cannot be loaded; stored embeddings are of other
            data, or pairs have none.
    """
    args = context.args
    if not args.teacher and not args.teacher_embeddings:
        if args.contrastive_weight == 0 and not args.keep_features and not of_kind(context.extensions, LossTerm):
            raise ValueError("contrastive_weight=0 leaves nothing to learn without a teacher. Name one, or omit it.")
        return ()
    if context.data is None:
        return ()
    folders: Any = [args.teacher_embeddings] if args.teacher_embeddings else embedded_by(str(args.teacher), context)
    teacher = StoredTeacher(folders, [context.data], args)
    term = TeacherDistance(teacher, args.teacher_weight, context.encoder.width(), args.seed, args.device)
    if term.parameters() and context.accelerator.is_fsdp2:
        raise ValueError(
            f"A teacher of another width ({teacher.width}, the student has {context.encoder.width()}) needs a linear "
            "map beside the model, whose optimizer FSDP shards. Use DDP, or a teacher of the same width."
        )
    if term.parameters() and remakes_model:
        raise ValueError(
            "model_init makes a new model for each training, but the linear map to a teacher of another width would "
            "go on from the last one. Pass the model itself, or a teacher of the same width."
        )
    return (term,)


def embedded_by(name: str, context: Context) -> list[Path]:
    """The folders with the embeddings that a teacher has of each training set, which it computes unless they are there.

    Args:
        name: of the teacher, a Hub id or a folder.
    """
    parts = [*leaves(context.data)]
    model, processor, _ = load(name)
    encoder = DualEncoder(model.eval().to(context.args.device))
    collator = ContrastiveCollator.for_model(processor, getattr(encoder.base, "config", None), uint8=True)

    def prepared(inputs: dict[str, Any]) -> dict[str, Any]:
        return normalised(send_to_device(inputs, context.args.device), collator, lambda images: images)

    of_teacher = replace(context, encoder=encoder, collator=collator, prepare_inputs=prepared)
    folders = []
    for part in parts:
        source = source_of_training(part)
        record = described(source, of_teacher)
        folders.append(Path(str(context.args.output_dir), CACHE, record["fingerprint"]))
        counts = embed(source, folders[-1], of_teacher, record=record, licence=stated_licence(name))
        if any(counts.values()):
            logger.info(f"The teacher has embedded {part.name} into {folders[-1]}: {counts}.")
    return folders
