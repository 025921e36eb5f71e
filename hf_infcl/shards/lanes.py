"""Lanes: the order in which the shards of a stream are read, shuffled and, from a cursor on, read again.

Each pass over a source distributes its shards over L lanes, in an order drawn from (seed, source, pass). A lane reads a
few of its shards in turn until it holds `shuffle_buffer` encoded samples, and permutes them. The contents of the buffer
are not saved. Instead, a cursor holds the positions of the readers before they filled the buffer, and the number of
samples already taken from it. Reading the same samples again restores the buffer, so resuming reads one buffer per lane
at any position.
"""

import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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

    def borders(self, parts: int) -> list[tuple[int, int | None]]:
        """(start, stop) of ``parts`` pieces whose numbers of samples differ by at most one."""
        # A sample begins where the one before it ends.
        starts = [0, *(end for end, _ in self.reader.ends(self.url))][:-1]
        if len(starts) < parts:
            raise ValueError(
                f"The shard {self.url!r} has {counted(len(starts), 'sample')} and cannot be shared among {parts} "
                "readers. Use fewer DataLoader workers or processes, or more shards."
            )
        firsts = [starts[len(starts) * part // parts] for part in range(parts)]
        return list(zip(firsts, [*firsts[1:], None], strict=True))


class Piece(NamedTuple):
    """A part of shard number ``shard`` that is dealt to one lane: its samples from ``start`` to before ``stop``."""

    shard: int
    start: int = 0
    stop: int | None = None


class SampleOrder(NamedTuple):
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


class LaneSource(NamedTuple):
    """The samples that one lane reads of one source."""

    shards: Sequence[Shard]
    pieces: Sequence[Piece]
    order: SampleOrder
    lane: int  # its number
    source: int  # its number

    def samples(self, cursor: dict[str, Any] | None) -> Iterator[tuple[int, int, str, Sample, dict[str, Any]]]:
        """(passes before it, shard, key, raw sample, cursor after it) of each sample after a cursor, without end.

        A cursor is a dict of
            pass: number of passes that the lane has completed.
            buffer: number of the buffer in this pass.
            next: first of the lane's pieces of this pass that had not been opened when the buffer began to fill.
            open: [piece, position] of the pieces that were open then, in the order of their turns.
            taken: number of samples already taken from the buffer.
            opened: number of pieces that had been opened in all passes when the buffer was full.
        """
        size, empty_passes = self.order.shuffle_buffer, 0
        dealt = len(self.pieces[self.lane :: self.order.lanes])  # as many in each pass, in whichever order
        at = cursor or _begin_of_pass(0)
        samples = self._in_turns(at)
        buffer: list[Any] = list(itertools.islice(samples, size))
        while True:
            if len(buffer) == size:
                *_, entries = buffer[-1]  # the next buffer begins after the last sample that was read
                following = {"pass": at["pass"], "buffer": at["buffer"] + 1, **entries, "taken": 0}
            else:  # the pass ends with this buffer
                empty_passes = 0 if buffer or at["buffer"] else empty_passes + 1
                if empty_passes == _MAX_EMPTY_PASSES:
                    urls = sorted({self.shards[piece.shard].url for piece in self.pieces})
                    raise ValueError(f"There are no samples in {counted(len(urls), 'shard')} such as {urls[0]!r}.")
                following = _begin_of_pass(at["pass"] + 1)
                samples = self._in_turns(following)
            opened = following["pass"] * dealt + following["next"]
            places = list(range(len(buffer)))
            self.order.random(self.source, self.lane, at["pass"], at["buffer"]).shuffle(places)
            # The next buffer fills as this one empties. No sample has to wait until a whole buffer has been read, and
            # together they hold no more samples than one buffer.
            refill: list[Any] = []
            for taken, place in enumerate(places[at["taken"] :], at["taken"] + 1):
                refill.extend(itertools.islice(samples, 1))
                (*sample, _), buffer[place] = buffer[place], None
                after = {**at, "taken": taken} if taken < len(places) else following
                yield at["pass"], *sample, {**after, "opened": opened}
            refill.extend(itertools.islice(samples, size - len(refill)))
            buffer, at = refill, following

    def _in_turns(self, at: Mapping[str, Any]) -> Iterator[tuple[int, str, Sample, dict[str, Any]]]:
        """(shard, key, raw sample, the entries of a cursor from which the next ones follow) in the rest of a pass.

        The pieces of the lane are every L-th of an order that each pass draws anew. Several of them are open and yield
        one sample in turn. Where a shard is damaged, the error replaces the rest of it.
        """
        pieces = [*self.pieces]
        self.order.random(self.source, at["pass"]).shuffle(pieces)
        pieces = pieces[self.lane :: self.order.lanes]

        def read(number: int, position: int) -> tuple[int, int, Iterator[tuple[int, str, Sample]]]:
            piece = pieces[number]
            return number, position, self.shards[piece.shard].samples(position, piece.stop)

        pending, following = deque(itertools.starmap(read, at["open"])), at["next"]
        while True:
            while len(pending) < self.order.open_shards and following < len(pieces):
                pending.append(read(following, pieces[following].start))
                following += 1
            if not pending:
                return
            number, _, samples = pending.popleft()
            try:
                position, key, sample = next(samples)
            except StopIteration:
                continue
            except DamagedShardError as error:
                key, sample = "", error
            else:
                pending.append((number, position, samples))
            entries = {"next": following, "open": [[piece, place] for piece, place, _ in pending]}
            yield pieces[number].shard, key, sample, entries


def _begin_of_pass(number: int) -> dict[str, Any]:
    """The cursor at the beginning of a pass."""
    return {"pass": number, "buffer": 0, "next": 0, "open": [], "taken": 0}
