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
class SetFacts:
    """The facts of a data set, as far as it was read. Pairs are known by their names."""

    name: str  # as the user knows the set
    limits: Limits  # of the model
    is_trained: bool  # whether a training draws from it; otherwise it is measured
    has_captions: bool  # whether its rows are pairs; otherwise they are labelled images
    pairs: int | None  # the number of its rows; None for a stream
    pooling: Pooling | None  # of the `Looker`
    split: str | None  # of its source, where that is known
    # ---- What `add` adds up ----
    looks: int = 0  # the number of pairs that were read
    faults: dict[str, dict[str, str]] = field(default_factory=dict)  # by fault and pair, what it consists in
    # Of each image that can be decoded, see `Look`.
    sizes: list[tuple[int, int]] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    # Of each caption, and of each pair that has captions.
    tokens: list[int] = field(default_factory=list)
    caption_bytes: list[int] = field(default_factory=list)
    caption_ids: dict[str, set[int]] = field(default_factory=dict)
    seen: dict[str, list[int]] = field(default_factory=dict)  # `Caption.seen` of its captions, in their order
    texts: dict[int, str] = field(default_factory=dict)  # the first caption of each of up to `KEPT` ids
    one_embedding: str = ""  # why two different captions have one embedding, if they have; see `Pooling.fault`
    prints: dict[str, Print] = field(default_factory=dict)  # from which copies are recognised
    pair_ids: dict[str, int] = field(default_factory=dict)  # of the pairs that have one
    thumbnails: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # JPEG and caption or class, of up to `KEPT`
    pairs_of_shards: Counter[int] = field(default_factory=Counter)  # that were read, by the number of the shard
    bytes_of_shards: dict[int, int] = field(default_factory=dict)  # where they are known
    _read: dict[tuple[int, ...], tuple[Reading, str]] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        """Adds successive pairs."""
        self.pairs_of_shards[part.shard] += len(part.looks)
        if part.nbytes is not None:
            self.bytes_of_shards[part.shard] = part.nbytes
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
        if look.pair_id is not None:
            self.pair_ids[look.name] = look.pair_id
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
        return [i for ids in seen for i in ids], [row for row, ids in enumerate(seen) for _ in ids]

    def most_common_caption(self) -> tuple[str, int]:
        """The caption that most pairs have, and their number."""
        counts = Counter(number for ids in self.caption_ids.values() for number in ids)
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
    """Reads a set that raises an error for a bad row, as ``plain`` of the training sets does.

    Args:
        key: the name of the set; `TRAINED` for the training set, and `REPLAYED` with a number for old pairs.
        dataset, looker, samples, workers: as for `read`.
        show: whether to show a progress bar.
    """
    facts = SetFacts(
        name="the training set" if key == TRAINED else dataset.name,
        limits=limits,
        is_trained=key == TRAINED or key.startswith(REPLAYED),
        has_captions=not isinstance(dataset, ZeroShotDataset),
        pairs=None if isinstance(dataset, ImageTextStream) else len(dataset),
        pooling=looker.pooling,
        split=getattr(dataset, "split", None),
    )
    is_cut = False
    for part in read(dataset, looker, samples, workers=workers, progress=f"check {key}" if show else ""):
        facts.add(part)
        is_cut |= part.is_cut
    if isinstance(dataset, ImageTextStream) and not is_cut and len(facts.pairs_of_shards) == len(dataset.shards):
        facts.pairs = facts.looks
    return facts
