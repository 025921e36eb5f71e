"""Lanes: the order in which the shards of a stream are read, shuffled and, from a cursor on, read again.

Each pass over a source distributes its shards over L lanes, in an order drawn from (seed, source, pass). A lane reads a
few of its shards in turn until it holds `shuffle_buffer` encoded samples, and permutes them. The contents of the buffer
are not saved. Instead, a cursor holds the positions of the readers before they filled the buffer, and the number of
samples already taken from it. Reading the same samples again restores the buffer, so resuming reads one buffer per lane
at any position.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..files.text import counted
from .layout import DamagedShardError, sample_key
from .readers import Reader, Sample

_MAX_EMPTY_PASSES = 100


class Shard(NamedTuple):
    url: str
    name: str  # stays the same when the folder of all shards moves
    reader: Reader
    without: np.ndarray | None = None  # [n] int64 in ascending order: the keys of the samples that are left out

    def samples(self, position: int = 0, stop: int | None = None) -> Iterator[tuple[int, str, Sample]]:
        """As those of the reader."""
        samples, without = self.reader.samples(self.url, position, stop), self.without
        if without is None:
            return samples
        keyed = ((sample_key(self.name, sample[1]), sample) for sample in samples)
        return (sample for key, sample in keyed if key not in without[np.searchsorted(without, key) :][:1])


class Piece(NamedTuple):
    """A part of shard number ``shard`` that is dealt to one lane: its samples from ``start`` to before ``stop``."""

    shard: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class SampleOrder:
    """The options that, together with the shards, determine the order of the samples."""

    seed: int
    lanes: int
    shuffle_buffer: int  # samples that a lane permutes at a time
    open_shards: int  # shards that a lane reads in turns

    def random(self, *purpose: object) -> random.Random:
        """A generator that is equal for equal purposes, seeded with their SHA-512 hash."""
        return random.Random(f"{self.seed} {purpose}")

    def check_shares(self, world_size: int, workers: int) -> None:
        """Raises a ValueError if not every worker of every process can have equally many lanes."""
        if self.lanes % (world_size * workers) == 0:
            return
        divisors = [number for number in range(1, self.lanes + 1) if self.lanes % number == 0]
        if self.lanes % world_size:
            cure = f"Use one of {divisors} processes"
        else:
            allowed = [number for number in divisors if self.lanes % (world_size * number) == 0]
            cure = f"With {counted(world_size, 'process')} set dataloader_num_workers to one of {allowed}"
        raise ValueError(
            f"The shards of the stream are dealt to {self.lanes} lanes (--lanes), which "
            f"{counted(world_size, 'process')} with {counted(workers, 'DataLoader worker')} each cannot share. {cure}."
        )


class LaneSource:
    """The samples that one lane reads from one source, pass after pass.

    Its cursor is a dict of
        pass: number of passes that the lane has completed.
        buffer: number of the buffer in this pass.
        next: first of the lane's pieces of this pass that had not been opened when the buffer began to fill.
        open: [piece, position] of the pieces that were open then, in the order of their turns.
        taken: number of samples already taken from the buffer.
        opened: number of pieces of the previous passes.
        reached: as ``next``, when the buffer was full.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        pieces: Sequence[Piece],
        order: SampleOrder,
        lane: int,
        source: int,
        cursor: dict[str, Any] | None,
    ) -> None:
        self._shards, self._pieces, self._order, self._lane, self._source = shards, pieces, order, lane, source
        self._start = cursor or _begin_of_pass(0, 0)
        self._taken, self._reached = self._start["taken"], self._start.get("reached", 0)

    def cursor(self) -> dict[str, Any]:
        """The position after the last sample returned."""
        return {**self._start, "taken": self._taken, "reached": self._reached}

    def __iter__(self) -> Iterator[tuple[int, int, str, Any]]:
        """(number of passes before it, shard, key, raw sample) of each sample, without end."""
        size, empty_passes = self._order.shuffle_buffer, 0
        turns = self._turns(self._start)
        buffer: list[Any] = list(itertools.islice(turns, size))
        while True:
            start, self._reached = self._start, turns.next
            if len(buffer) == size:
                following = {**start, "buffer": start["buffer"] + 1, **turns.position(), "taken": 0}
            else:  # the pass ends with this buffer
                empty_passes = 0 if buffer or start["buffer"] else empty_passes + 1
                if empty_passes == _MAX_EMPTY_PASSES:
                    urls = sorted({self._shards[piece.shard].url for piece in self._pieces})
                    raise ValueError(f"There are no samples in {counted(len(urls), 'shard')} such as {urls[0]!r}.")
                following = _begin_of_pass(start["pass"] + 1, start["opened"] + len(turns.pieces))
                turns = self._turns(following)
            places = list(range(len(buffer)))
            self._order.random(self._source, self._lane, start["pass"], start["buffer"]).shuffle(places)
            # The next buffer fills as this one empties. No sample has to wait until a whole buffer has been read, and
            # together they hold no more samples than one buffer.
            refill: list[Any] = []
            for taken, place in enumerate(places[self._taken :], self._taken + 1):
                refill.extend(itertools.islice(turns, 1))
                sample, buffer[place] = buffer[place], None
                self._start, self._taken = (start, taken) if taken < len(places) else (following, 0)
                yield start["pass"], *sample
            refill.extend(itertools.islice(turns, size - len(refill)))
            buffer, self._start, self._taken = refill, following, 0

    def _turns(self, cursor: Mapping[str, Any]) -> _Turns:
        """The pieces of this lane in a pass, which are every L-th of an order drawn anew."""
        dealt = list(range(len(self._pieces)))
        self._order.random(self._source, cursor["pass"]).shuffle(dealt)
        mine = [self._pieces[number] for number in dealt[self._lane :: self._order.lanes]]
        return _Turns(self._shards, mine, self._order.open_shards, cursor)


def _begin_of_pass(number: int, opened: int) -> dict[str, Any]:
    """The cursor at the beginning of a pass, after so many ``opened`` pieces."""
    return {"pass": number, "buffer": 0, "next": 0, "open": [], "taken": 0, "opened": opened}


class _Turns:
    """Raw samples of pieces. Several pieces are open and yield one sample in turn."""

    def __init__(self, shards: Sequence[Shard], pieces: Sequence[Piece], most: int, cursor: Mapping[str, Any]) -> None:
        self.pieces, self.next = pieces, cursor["next"]
        self._shards, self._most = shards, most
        self._open = deque((number, position, self._samples(number, position)) for number, position in cursor["open"])

    def _samples(self, number: int, position: int) -> Iterator[tuple[int, str, Any]]:
        piece = self.pieces[number]
        return self._shards[piece.shard].samples(position, piece.stop)

    def position(self) -> dict[str, Any]:
        """The entries of a cursor from which the same samples follow."""
        return {"next": self.next, "open": [[number, position] for number, position, _ in self._open]}

    def __iter__(self) -> Iterator[tuple[int, str, Any]]:
        return self

    def __next__(self) -> tuple[int, str, Any]:
        """(shard, key, raw sample); if a shard is damaged from here on, the error replaces the rest of it."""
        while True:
            while len(self._open) < self._most and self.next < len(self.pieces):
                start = self.pieces[self.next].start
                self._open.append((self.next, start, self._samples(self.next, start)))
                self.next += 1
            if not self._open:
                raise StopIteration
            number, _, samples = self._open.popleft()
            shard = self.pieces[number].shard
            try:
                position, key, sample = next(samples)
            except StopIteration:
                continue
            except DamagedShardError as error:
                return shard, "", error
            self._open.append((number, position, samples))
            return shard, key, sample
