"""What is wrong with a data set, or between two, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...data import ZeroShotDataset
from ...data.pairs import REPEATED
from ...evaluation.metrics import CEILING
from ...evaluation.retrieval import recall_ceilings
from ...shards.values import counted
from .copies import copies
from .looking import FAULTS, Inspected, Inspector
from .reading import read

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
        self.pairs: list[Inspected] = []
        self.is_whole = True  # whether all pairs were read
        for pairs, is_cut in read(dataset, inspector, samples, **how):
            self.pairs += pairs
            self.is_whole &= not is_cut
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
    cures = dict.fromkeys(("broken", "captionless"), "--on_bad_sample skip")
    cures = {**cures, "huge": f"--min_side {2 * facts.inspector.side}"} if facts.is_trained else {}
    for kind, fault in FAULTS.items():
        if not (rows := facts.rows(kind)):
            continue
        is_skipped = skips_bad and facts.is_trained and kind in ("broken", "captionless")
        option = "" if is_skipped else cures.get(kind, "")
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
