"""Adds up what single pairs look like to the facts of their set."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ...data import ImageTextStream, ZeroShotDataset
from ...data.images import ImageDataset
from ...encoders.pooling import Pooling, Reading
from .copies import Print
from .faults import Limits, find_faults
from .looking import Look, Looker
from .reading import Part, read

TRAINED = "train"  # the name of the training set among those of a check
REPLAYED = "replay"  # begins the names of sets of old pairs
KEPT = 10_000  # thumbnails of 3 kB each, and texts of captions


@dataclass
class ShardFacts:
    """The number of pairs that were read from a shard, and its size in bytes if it is known."""

    pairs: int = 0
    nbytes: int | None = None


@dataclass
class SetFacts:
    """The facts of a data set, as far as it was read.

    Args:
        name: of the set, as the user knows it.
        limits: of the model.
        is_trained: whether a training draws from it; otherwise it is measured.
        has_captions: whether its rows are pairs; otherwise they are labelled images.
        pairs: the number of its rows; None for a stream.
        pooling: of the `Looker`.

    Attributes:
        looks: the number of pairs that were read.
        faults: by the fault, and the name of the pair, what it consists in.
        sizes, nbytes, seconds: of each image that can be decoded, see `Look`.
        tokens, caption_bytes: of each caption.
        caption_ids: the ids of the captions of each pair that has any, by its name.
        seen: the same, one for each caption in their order, by what the model reads (`Caption.seen`).
        texts: the first caption of each of up to `KEPT` ids.
        one_embedding: why two different captions have one embedding, if they have; see `Pooling.fault`.
        prints: from which copies are recognised, by the name of the pair.
        thumbnails: the JPEG and the first caption or the class of up to `KEPT` pairs, by their names.
        shards: those that were read, by their number.
    """

    name: str
    limits: Limits
    is_trained: bool = True
    has_captions: bool = True
    pairs: int | None = None
    pooling: Pooling | None = None
    looks: int = 0
    faults: dict[str, dict[str, str]] = field(default_factory=dict)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    caption_bytes: list[int] = field(default_factory=list)
    caption_ids: dict[str, set[int]] = field(default_factory=dict)
    seen: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    one_embedding: str = ""
    prints: dict[str, Print] = field(default_factory=dict)
    thumbnails: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    shards: dict[int, ShardFacts] = field(default_factory=dict)
    _read: dict[tuple[int, ...], tuple[Reading, str]] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        """Adds successive pairs."""
        shard = self.shards.setdefault(part.shard, ShardFacts())
        shard.pairs += len(part.looks)
        shard.nbytes = shard.nbytes if part.nbytes is None else part.nbytes
        for look in part.looks:
            self.looks += 1
            for fault, detail in find_faults(look, self.limits):
                self.faults.setdefault(fault, {}).setdefault(look.name, detail)
            self._add_captions(look)
            self._add_image(look)

    def _add_captions(self, look: Look) -> None:
        if not look.captions:
            return
        self.caption_ids[look.name] = {caption.id for caption in look.captions}
        self.seen[look.name] = [caption.seen for caption in look.captions]
        for caption in look.captions:
            self.tokens.append(caption.tokens)
            self.caption_bytes.append(caption.nbytes)
            if len(self.texts) < KEPT:
                self.texts.setdefault(caption.id, caption.text)
            if self.pooling is not None and caption.reading is not None and not self.one_embedding:
                first, text = self._read.setdefault(caption.reading.read, (caption.reading, caption.text))
                if first.text != caption.reading.text:
                    self.one_embedding = self.pooling.fault(first, (text, caption.text))

    def _add_image(self, look: Look) -> None:
        if look.size is None:
            return
        self.sizes.append(look.size)
        self.nbytes.append(look.nbytes)
        self.seconds.append(look.seconds)
        if look.print is not None:
            self.prints[look.name] = look.print
        if len(self.thumbnails) < KEPT:
            self.thumbnails[look.name] = look.thumbnail, look.captions[0].text if look.captions else look.label

    @property
    def is_whole(self) -> bool:
        """Whether all pairs are known to have been read."""
        return self.looks == self.pairs

    @property
    def usable(self) -> int:
        """The number of pairs that were read and that a training can use."""
        return self.looks - len(self.faults.get("broken", {})) - len(self.faults.get("captionless", {}))

    @property
    def rate(self) -> float:
        """Pairs per second that one worker reads, decodes and prepares; 0 if no image could be decoded."""
        return 1 / float(np.mean(self.seconds)) if self.seconds else 0.0

    def captions_by_row(self) -> tuple[list[int], list[int]]:
        """What the model sees of each caption of a table (`Caption.seen`), in the order of its rows; and their rows."""
        seen = [self.seen[name] for name in sorted(self.seen, key=int)]
        return [i for own in seen for i in own], [row for row, own in enumerate(seen) for _ in own]

    def most_common_caption(self) -> tuple[str, int]:
        """The caption that most pairs have, and their number."""
        counts = Counter(number for own in self.caption_ids.values() for number in own)
        ((number, count),) = counts.most_common(1) or [(0, 0)]
        return self.texts.get(number, ""), count


def read_facts(
    key: str,
    dataset: ImageDataset | ImageTextStream,
    looker: Looker,
    limits: Limits,
    samples: int | None,
    workers: int,
    *,
    show: bool,
) -> SetFacts:
    """Reads a set.

    Args:
        key: the name of the set; `TRAINED` for the training set, and `REPLAYED` with a number for old pairs.
        dataset: raises an error for a bad row, see ``plain`` of the training sets.
        looker, limits: of the model.
        samples: the pairs to read; None for all.
        workers: processes that read; 0 for this one.
        show: whether to show a progress bar.
    """
    pairs = None if isinstance(dataset, ImageTextStream) else len(dataset)
    name = "the training set" if key == TRAINED else dataset.name
    has_captions = not isinstance(dataset, ZeroShotDataset)
    is_trained = key == TRAINED or key.startswith(REPLAYED)
    facts = SetFacts(name, limits, is_trained, has_captions, pairs, looker.pooling)
    for part in read(dataset, looker, samples, workers=workers, progress=f"check {key}" if show else ""):
        facts.add(part)
    if samples is None:
        facts.pairs = facts.looks
    return facts
