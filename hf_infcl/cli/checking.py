"""The findings of `infcl check`: faults of pairs, copies within a data set or between two, and their cures.

Several workers read all pairs or a sample. Copies of an image are found when scaled or compressed again."""

import itertools
import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from transformers import PretrainedConfig
from transformers.utils.logging import tqdm

from ..data import ContrastiveCollator, ImageTextStream, ZeroShotDataset, caption_pair_id
from ..data.images import BadSampleError, ImageDataset
from ..data.labelled import NUMBER
from ..data.pairs import REPEATED, usable_captions
from ..evaluation.metrics import CEILING
from ..evaluation.tasks import caption_ids, recall_ceilings
from ..files.text import counted
from ..models.model_types import Pooling, SameEmbeddings
from ..refusals import check_tokens
from ..shards.layout import IMAGE_EXTENSIONS, DamagedShardError

# Of 300 pictures of 64 × 64 pixels, these limits find 97% of the copies in JPEG at quality 75, 83% at quality 40 and
# 87% of those at half the size. Of the 12.5 million pairs of 5,000 such pictures, all icons, they find 63.
GRID, STEP = 8, 3  # cells of a side; grey levels by which a cell must be brighter than the one before
MOST_BITS, MOST_LEVELS = 3, 12  # by which the hashes, and any cell's colour, of two copies differ
_BANDS = MOST_BITS + 1  # two hashes that differ in MOST_BITS bits agree in one of as many bands and one more
_CHUNK = 512  # rows that are compared at once


def image_hash(pixels: np.ndarray) -> bytes:
    """A hash of an image, uint8 [H, W, 3], of 200 bytes; it is about the same for copies of the image.

    The first 8 are the difference hash (dHash): whether each cell of an 8 × 9 grid of mean grey levels is brighter than
    the one to its left, by more than the noise of compression. The others are the mean colours of an 8 × 8 grid:
    pictures with little in them have equal hashes.
    """
    image = Image.fromarray(pixels)
    grey = np.asarray(image.convert("L").resize((GRID + 1, GRID), Image.Resampling.BOX), dtype=np.int16)
    brighter = np.diff(grey, axis=1) > STEP
    return np.packbits(brighter).tobytes() + image.resize((GRID, GRID), Image.Resampling.BOX).tobytes()


def copies(hashes: Sequence[bytes]) -> np.ndarray:
    """The pairs of images that are copies of each other, int64 [pairs, 2] with the smaller index first."""
    parts = np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, 8 + 3 * GRID**2)
    outlines, colours = parts[:, :8].copy().view(np.uint64)[:, 0], parts[:, 8:]
    count, numbers = max(1, len(hashes)), [np.empty(0, dtype=np.int64)]  # of each pair one number, count·first + second
    for band in outlines.view(np.uint16).reshape(-1, _BANDS).T:
        order = np.argsort(band, kind="stable")
        for alike in np.split(order, np.flatnonzero(np.diff(band[order])) + 1):  # equal in this band, in rising order
            for start in range(0, len(alike) - 1, _CHUNK):
                chunk = alike[start : start + _CHUNK]
                differing = np.bitwise_count(outlines[chunk, None] ^ outlines[alike])
                first, second = np.nonzero(differing <= MOST_BITS)
                first, second = chunk[first], alike[second]
                first, second = first[first < second], second[first < second]
                levels = np.abs(colours[first].astype(np.int16) - colours[second]).max(axis=1, initial=0)
                numbers.append((count * first + second)[levels <= MOST_LEVELS])
    return np.stack(np.divmod(np.unique(np.concatenate(numbers)), count), axis=1)


USUAL_SIDE = 224  # of the images of a model whose config does not tell
SAME_LEVELS = 4  # grey levels by which each channel of an image of one colour varies at most
HUGE = 16_000_000  # pixels from which decoding takes much longer than a model needs: a large photograph has as many
_IMAGE_FILE = re.compile(rf"\.({'|'.join(sorted(IMAGE_EXTENSIONS))})$", re.IGNORECASE)
# A byte-level tokenizer splits a script that it was not trained on into nearly single bytes. Text that it knows has 3
# to 5 bytes in a token, in any script.
_FEW_BYTES = 2.0
_FEW_LETTERS = 4  # of a caption too short to judge its script
_MANY_UNKNOWN = 0.2  # the share of unknown tokens from which a caption is not understood


class Fault(NamedTuple):
    """A fault of single pairs."""

    words: str  # what such pairs do, for `str.format` with the `Inspector`; it follows their number
    spoils: float  # the share of the pairs above which they spoil a training
    cure: str  # a sentence
    option: str = ""  # of `infcl train`, which remedies it


FAULTS = {
    "broken": Fault("cannot be read", 0.0, "Repair or drop them.", "--on_bad_sample skip"),
    "captionless": Fault("have no caption with a visible character", 0.0, "Drop them.", "--on_bad_sample skip"),
    "tiny": Fault("have a tiny image, whose shorter side has fewer than {inspector.tiny} pixels", 0.1, "Drop them."),
    "huge": Fault("have a huge image, which takes long to decode", math.inf, "Scale them once.", "--min_side {side}"),
    "one_colour": Fault("have an image of a single colour", 0.1, "Drop them: such files stand for missing images."),
    "cut": Fault(
        "have a caption of more than {inspector.tokens} tokens, which the model does not read to its end",
        0.5,
        "Shorten them, or take a model with a higher limit.{inspector.more_positions}",
    ),
    "foreign": Fault("have a caption in a script that the tokenizer does not know", 0.1, "Take a multilingual model."),
    "file_name": Fault("have the name of a file as their caption", 0.1, "Name the column of the captions."),
    "number": Fault("have a number as their caption", 0.1, "Replace numbers of classes by their names."),
}


class Caption(NamedTuple):
    """A caption as the model reads it."""

    text: str  # shortened
    id: int  # equal for captions that read the same, see `caption_pair_id`
    seen: int  # equal for captions of which the model reads the same tokens


@dataclass(slots=True)
class Inspected:
    """What one pair, or labelled image, looks like."""

    name: str  # the number of its row, or its shard and its name there
    faults: dict[str, str] = field(default_factory=dict)  # by their names, what they consist in
    captions: list[Caption] = field(default_factory=list)  # all usable ones
    pair_id: int | None = None  # if the training gives it one
    hash: bytes | None = None  # see `image_hash`; None if the image has one colour or cannot be decoded


class Inspector:
    """Looks at pairs, with the collator of the training, which knows the tokenizer, and the config of the model.

    With ``before_training`` it leaves captions that get one embedding to the trainer, which checks those that it reads.
    """

    def __init__(
        self, collator: ContrastiveCollator, config: PretrainedConfig, *, before_training: bool = False
    ) -> None:
        self._collator, self._vocabulary = collator, getattr(config.text_config, "vocab_size", None)
        side = getattr(config.vision_config, "image_size", USUAL_SIDE)
        self.side: int = min(side) if isinstance(side, (list, tuple)) else side  # of the images that the model reads
        self.tiny = self.side // 4  # a shorter side is enlarged more than four times, and shows next to nothing
        self.tokens, self.more_positions = collator.max_length, collator.more_positions
        self._same_embeddings = SameEmbeddings(None if before_training else Pooling.of_config(config.text_config))

    def inspect(self, name: str, values: dict[str, Any], item: Callable[[], dict[str, Any]]) -> Inspected:
        """Looks at one pair.

        Args:
            name: as in `Inspected`.
            values: ``file``, the name of its image file or of its sample, and for a pair ``caption``, one or a list.
            item: reads, decodes and returns the item of the training, as `ImageTextDataset` does.

        Raises:
            ValueError: the tokenizer gives a token that the model does not have, or two captions get one embedding.
        """
        pair, file = Inspected(name), os.path.basename(str(values.get("file") or ""))
        texts: list[str] | None = None
        with suppress(ValueError):  # of a value that is no text, which the item tells
            texts = usable_captions(values["caption"]) if "caption" in values else None
        pair.captions = [self.caption(text, file, pair.faults) for text in texts or ()]
        try:
            made = item()
        except BadSampleError as error:
            pair.faults["captionless" if texts == [] else "broken"] = error.cause or str(error)
            return pair
        height, width, _ = made["image"].shape
        is_plain = bool((np.ptp(made["image"], axis=(0, 1)) <= SAME_LEVELS).all())
        pair.hash, pair.pair_id = None if is_plain else image_hash(made["image"]), made.get("pair_id")
        faults = {"tiny": min(width, height) < self.tiny, "huge": width * height > HUGE, "one_colour": is_plain}
        pair.faults |= {fault: f"{width} × {height}" for fault, holds in faults.items() if holds}
        return pair

    def caption(self, text: str, file: str, faults: dict[str, str]) -> Caption:
        """Looks at one caption of the image in a file, and adds what is wrong with it to the faults."""
        tokenizer, ids = self._collator.processor.tokenizer, self._collator.token_ids(text)
        check_tokens(torch.tensor([ids]), self._vocabulary)
        plain = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        # The end token of CLIP is its unknown one as well.
        unknown = plain.count(tokenizer.unk_token_id) / max(1, len(plain))
        letters, bare = [letter for letter in text if letter.isalpha()], text.strip()
        is_of_others = len(letters) >= _FEW_LETTERS and sum(one.isascii() for one in letters) < len(letters) / 2
        is_file = bool(_IMAGE_FILE.search(bare)) or (" " not in bare and bare in (file, os.path.splitext(file)[0]))
        shown = text if len(text) <= 200 else f"{text[:199]}…"
        found = {
            "cut": len(ids) > self.tokens,
            "foreign": unknown >= _MANY_UNKNOWN or (is_of_others and len(text.encode()) <= _FEW_BYTES * len(plain)),
            "file_name": is_file,
            "number": not is_file and NUMBER.fullmatch(bare) is not None,
        }
        for fault in (fault for fault, holds in found.items() if holds):
            faults.setdefault(fault, f"{len(ids):,} tokens" if fault == "cut" else repr(shown))
        tokens = self._collator.tokenize([text])
        read = tokens["input_ids"], tokens.get("attention_mask")
        self._same_embeddings.check(*read)
        seen = caption_ids(*read)  # as an evaluation has them
        return Caption(shown, caption_pair_id(text), int(seen))


ROWS = 32  # of a table that a worker reads at once
Part = tuple[list[Inspected], bool]  # pairs, and whether what they were read from has more
_OF_SHARD = 256  # samples of each shard that is read for a sample, or more if there are few shards


def read(data: Any, inspector: Inspector, samples: int | None, *, workers: int = 0, progress: str = "") -> Part:
    """Looks at a data set: its pairs, and whether there are more that were not to be read.

    Args:
        data: pairs or labelled images that raise an error for a bad row, without augmentation.
        inspector: looks at each pair.
        samples: the number of pairs: rows of a table drawn at random, but always the same ones; of a stream the first
            samples of shards that are evenly spread. None for all.
        workers: processes that read; with 0, this one.
        progress: the title of a progress bar; empty for none.
    """
    units: Any
    if isinstance(data, ImageTextStream):
        total, units = samples, range(len(data.shards))
        units = units if samples is None else units[:: -(-len(units) // max(8, samples // _OF_SHARD))]
        is_cut, each = len(units) < len(data.shards), None if samples is None else -(-samples // len(units))
        read_unit: Any = partial(_read_shard, data, inspector, each)
    else:
        rows: Sequence[int] = range(len(data))
        if is_cut := samples is not None and samples < len(rows):
            rows = sorted(random.Random(0).sample(rows, samples))
        total, units = len(rows), [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
        read_unit = partial(_read_rows, data, inspector)
    # Without a generator of its own, the loader would draw from torch's random state, and change a training.
    how: dict[str, Any] = {"num_workers": min(workers, len(units)), "generator": torch.Generator()}
    loader: DataLoader[Any] = DataLoader(units, batch_size=None, collate_fn=read_unit, **how)
    every: list[Inspected] = []
    with tqdm(total=total, desc=progress, unit=" pairs", disable=not progress) as bar:
        for pairs, has_more in loader:
            bar.update(len(pairs))
            every += pairs
            is_cut |= has_more
    return every, is_cut


def _read_rows(data: ImageDataset, inspector: Inspector, rows: Sequence[int]) -> Part:
    pairs = []
    for row in rows:
        values, image = data.table[row], data.columns["image_column"]
        known = {"file": values[image] and values[image]["path"]}
        if not isinstance(data, ZeroShotDataset):
            known["caption"] = values[data.columns["caption_column"]]
        pairs.append(inspector.inspect(str(data.number(row)), known, partial(data.__getitem__, row)))
    return pairs, False


def _read_shard(stream: ImageTextStream, inspector: Inspector, most: int | None, number: int) -> Part:
    """At most so many pairs of a shard."""
    shard, pairs, has_more = stream.shards[number], [], False
    try:
        samples = shard.samples()
        for _, key, sample in itertools.islice(samples, most):
            known: dict[str, Any] = {}
            with suppress(ValueError):  # of a broken sample, which the item tells
                if not isinstance(sample, DamagedShardError):
                    known = {"file": key, "caption": shard.reader.row(sample)[stream.options["caption_column"]]}
            pairs.append(inspector.inspect(f"{shard.name} {key}", known, partial(stream.item, 0, number, key, sample)))
        has_more = next(samples, None) is not None
    except DamagedShardError as error:
        pairs.append(Inspected(f"the rest of {shard.name}", {"broken": str(error)}))
    return pairs, has_more


TRAINED = "train"  # the name of the training set among those of a check
REPLAYED = "replay"  # begins the names of sets of old pairs
SAME_CAPTION = 0.5  # the share of the pairs with one and the same caption that tells nothing about their images
OVERLAP = 0.01  # the share of evaluated images that are trained on, above which their figures mean little
COPIES = 0.1  # the share of images with copies in the set that spoils a training


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    kind: str  # one of the `FAULTS`, same_caption, repeated_captions, repeated_images, ceiling or overlap
    text: str  # a few sentences with numbers and examples
    spoils: bool  # whether a training would fail, learn something else, or be measured wrongly
    rows: tuple[str, ...] = ()  # the names of all pairs that it concerns
    options: str = ""  # of `infcl train`, which remedy it


class SetFacts:
    """A data set as far as it was read.

    Args:
        key: `TRAINED` for the training set, `REPLAYED` and a number for old pairs; any other is evaluated.
        dataset: raises an error for a bad row, as ``plain`` of the training sets does.
        inspector, samples, how: as for `read`.
    """

    def __init__(self, key: str, dataset: Any, inspector: Inspector, samples: int | None, **how: Any) -> None:
        self.dataset, self.inspector = dataset, inspector
        self.name = "the training set" if key == TRAINED else dataset.name  # as the user knows it
        self.is_trained = key.startswith((TRAINED, REPLAYED))  # whether a training draws from it
        self.pairs, is_cut = read(dataset, inspector, samples, **how)
        self.is_whole = not is_cut  # whether all pairs were read
        self.captions = {pair.name: pair.captions for pair in self.pairs if pair.captions}
        self.hashes = {pair.name: pair.hash for pair in self.pairs if pair.hash is not None}
        what = "labelled images" if isinstance(dataset, ZeroShotDataset) else "pairs"
        split = "" if (split := getattr(dataset, "split", None)) is None else f", split {split}"
        self.words = f"{self.name}{split}: {len(self.pairs):,} {what}{', all' * self.is_whole} read."

    def rows(self, fault: str) -> dict[str, str]:
        """What a fault consists in, by the names of the pairs that have it."""
        return {pair.name: pair.faults[fault] for pair in self.pairs if fault in pair.faults}


def find(facts: SetFacts, others: Iterable[SetFacts], *, skips_bad: bool) -> list[Finding]:
    """What is wrong with one set, or between it and those that a training draws from.

    ``skips_bad`` if the training leaves bad pairs out (``on_bad_sample="skip"``).
    """
    findings = [*_of_faults(facts, skips_bad), *_of_captions(facts), *_of_copies(facts)]
    if not facts.is_trained:
        findings += [*(one for other in others for one in _of_overlap(other, facts)), *_of_ceilings(facts)]
    return sorted(findings, key=lambda finding: not finding.spoils)


def _of_faults(facts: SetFacts, skips_bad: bool) -> Iterator[Finding]:
    for kind, fault in FAULTS.items():
        if not (rows := facts.rows(kind)):
            continue
        is_skipped = skips_bad and facts.is_trained and kind in ("broken", "captionless")
        option = fault.option.format(side=2 * facts.inspector.side) if facts.is_trained and not is_skipped else ""
        most = 240 if kind == "broken" else 80  # a path and what is wrong with the file
        examples = ", ".join(f"{_named(name)} ({_short(detail, most)})" for name, detail in [*rows.items()][:3])
        words, cure = (one.format(inspector=facts.inspector) for one in (fault.words, fault.cure))
        text = f"{_count(len(rows), len(facts.pairs), words)}: {examples}. {cure}"
        text += " The training leaves them out." if is_skipped else f" Or pass {option}." if option else ""
        spoils = len(rows) > (0.1 if is_skipped else fault.spoils) * len(facts.pairs)
        yield Finding(kind, text, spoils, tuple(rows), option)


def _of_captions(facts: SetFacts) -> Iterator[Finding]:
    times = Counter(number for captions in facts.captions.values() for number in {one.id for one in captions})
    ((number, count),) = times.most_common(1) or [(0, 0)]
    text = _short(next((one.text for every in facts.captions.values() for one in every if one.id == number), ""))
    if count > max(1.0, SAME_CAPTION * len(facts.captions)):
        what = _count(count, len(facts.pairs), f"have the caption {text!r}")
        what += ". It tells nothing about their images. Name the column of the captions."
        yield Finding("same_caption", what, spoils=True)
    if not facts.is_trained or facts.dataset.pair_id_column is not None:
        return
    often = {name: max((times[one.id], one.id) for one in captions) for name, captions in facts.captions.items()}
    repeated = [name for name, (most, _) in often.items() if most > 1]
    rows = tuple(sorted(repeated, key=often.__getitem__, reverse=True))  # those of one caption beside each other
    if len(rows) > REPEATED * len(facts.captions):
        option = f"--pair_id_column {facts.dataset.caption_column}"
        what = (
            f"{_count(len(rows), len(facts.pairs), 'have a caption that another one also has')}, such as {text!r} "
            f"({count:,} times). In a batch they are each other's negatives. Pass {option}."
        )
        yield Finding("repeated_captions", what, True, rows, option)


def _of_copies(facts: SetFacts) -> Iterator[Finding]:
    names = list(facts.hashes)
    pairs = [(names[first], names[second]) for first, second in copies(list(facts.hashes.values()))]
    ids = {pair.name: pair.pair_id for pair in facts.pairs if facts.is_trained}
    pairs = [(one, other) for one, other in pairs if ids.get(one) is None or ids[one] != ids.get(other)]
    rows = tuple(dict.fromkeys(name for pair in pairs for name in pair))
    if len(rows) <= REPEATED * len(names):
        return
    effect = "They are each other's negatives, which equal pair ids (--pair_id_column) would prevent."
    effect = effect if facts.is_trained else "Retrieval cannot tell them apart."
    text = _count(len(rows), len(facts.pairs), "have an image that looks like another one")
    yield Finding("repeated_images", f"{text}: {_and_copy(pairs)}. {effect}", len(rows) > COPIES * len(names), rows)


def _of_overlap(trained: SetFacts, evaluated: SetFacts) -> Iterator[Finding]:
    """Images of an evaluation set that look like one of a set that is trained on."""
    before, after = list(trained.hashes), list(evaluated.hashes)
    every = copies([*trained.hashes.values(), *evaluated.hashes.values()])
    crossing = every[(every[:, 0] < len(before)) & (every[:, 1] >= len(before))]
    if pairs := {after[second - len(before)]: before[first] for first, second in crossing}:
        more = "" if trained.is_whole else f" Only some of {trained.name} was read, so there may be more."
        text = (
            f"{_count(len(pairs), len(after), 'look like', 'image')} an image of {trained.name}: "
            f"{_and_copy(pairs.items())}. Drop them from one of the two sets.{more}"
        )
        yield Finding("overlap", text, len(pairs) > OVERLAP * len(after), tuple(pairs))


def _of_ceilings(facts: SetFacts) -> Iterator[Finding]:
    """Captions that belong to several images, so that no model can reach a recall of 1."""
    if not facts.captions or getattr(facts.dataset, "kind", "pairs") != "pairs":
        return
    seen = [(name, {one.seen for one in facts.captions[name]}) for name in sorted(facts.captions, key=int)]
    of_texts = [(one.seen, row) for row, (name, _) in enumerate(seen) for one in facts.captions[name]]
    ids, rows = torch.tensor(of_texts).T
    ceilings = recall_ceilings(ids, rows, len(seen), [1])
    if not ceilings or min(ceilings.values()) == 1:
        return
    images = Counter(number for _, numbers in seen for number in numbers)
    shared = tuple(name for name, numbers in seen if any(images[number] > 1 for number in numbers))
    highest = " or ".join(f"{name.removesuffix(CEILING)} of {value:.2%}" for name, value in ceilings.items())
    among = "" if facts.is_whole else " among those that were read"
    text = (
        f"{_count(len(shared), len(facts.pairs), 'have a caption that also belongs to another image')}, as the model "
        f"reads it. No model can exceed {highest}{among}. Compare with these values, or evaluate on other captions."
    )
    yield Finding("ceiling", text, min(ceilings.values()) < 1 - COPIES, shared)


def _count(count: int, of: int, words: str, what: str = "pair") -> str:
    """A number, its share, and what such pairs do, in ``words`` of several: of one, "has" takes the place of "have"."""
    verb, _, rest = words.partition(" ")
    verb = {"have": "has", "look": "looks"}.get(verb, verb) if count == 1 else verb
    return f"{count:,} of {counted(of, what)} ({count / max(1, of):.2%}) {verb} {rest}"


def _and_copy(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{_named(row)} like {_named(other)}" for row, other in [*pairs][:3])


def _named(name: str) -> str:
    """A pair as a person knows it: a table's row, a stream's sample, or the rest of a shard."""
    kind = "row " if name.isdigit() else "" if name.startswith("the rest of ") else "sample "
    return f"{kind}{_short(name)}"


def _short(text: str, most: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."
