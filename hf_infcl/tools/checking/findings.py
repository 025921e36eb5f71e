"""What is wrong with a data set, or between two, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.pairs import REPEATED
from ...shards.values import counted
from ..scoring.ledger import CERTAIN, RATHER_WRONG, SHEET_FILE, Ledger
from .copies import copies
from .faults import FAULTS
from .set_facts import SetFacts

SAME_CAPTION = 0.5  # the share of the pairs with one and the same caption that tells nothing about their images
OVERLAP = 0.01  # the share of evaluated images that are trained on, above which their figures mean little
SPOILING_WRONG = 0.05  # the share of pairs that a ledger tells to be wrong, above which they spoil a training
COPIES = 0.1  # the share of images with copies in the set that spoils a training


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    # One of the `FAULTS`, same_caption, repeated_captions, one_embedding, repeated_images, wrong_pairs, ceiling or
    # overlap.
    kind: str
    text: str  # a few sentences with numbers and examples
    spoils: bool  # whether a training would fail, learn something else, or be measured wrongly
    rows: tuple[str, ...] = ()  # the names of all pairs that it concerns
    options: str = ""  # of `infcl train`, which remedy it


def findings_of_set(facts: SetFacts, dataset: Any, *, skips_bad: bool) -> list[Finding]:
    """What is wrong with one set; ``skips_bad`` if the training leaves bad pairs out (``on_bad_sample="skip"``)."""
    findings = [*_of_faults(facts, skips_bad), *_of_captions(facts, dataset), *_of_copies(facts)]
    if facts.one_embedding:
        findings.append(Finding("one_embedding", facts.one_embedding, spoils=True))
    return sorted(findings, key=lambda finding: not finding.spoils)


def _of_faults(facts: SetFacts, skips_bad: bool) -> Iterator[Finding]:
    cures = {"broken": "--on_bad_sample skip", "captionless": "--on_bad_sample skip"}
    cures = {**cures, "huge": f"--min_side {2 * facts.limits.side}"} if facts.is_trained else {}
    for kind, fault in FAULTS.items():
        if not (rows := facts.faults.get(kind, {})):
            continue
        is_skipped = skips_bad and facts.is_trained and kind in ("broken", "captionless")
        option = "" if is_skipped else cures.get(kind, "")
        words = fault.words.format(limits=facts.limits)
        examples = _examples(rows, 240 if kind == "broken" else 80)  # a path and what is wrong with the file
        text = f"{_count(len(rows), facts.looks, words)}: {examples}. {fault.cure}"
        text += facts.limits.more_positions if kind == "cut" else ""
        text += " The training leaves them out." if is_skipped else f" Or pass {option}." if option else ""
        spoils = len(rows) > (0.1 if is_skipped else fault.spoils) * facts.looks
        yield Finding(kind, text, spoils, tuple(rows), option)


def _of_captions(facts: SetFacts, dataset: Any) -> Iterator[Finding]:
    captioned = len(facts.caption_ids)
    text, count = facts.most_common_caption()
    if count > max(1.0, SAME_CAPTION * captioned):
        what = _count(count, facts.looks, f"have the caption {_short(text)!r}")
        what += ". It tells nothing about their images. Name the column of the captions."
        yield Finding("same_caption", what, spoils=True)
    if not facts.is_trained or dataset.pair_id_column is not None:
        return
    times = Counter(number for ids in facts.caption_ids.values() for number in ids)
    repeated = (name for name, ids in facts.caption_ids.items() if any(times[number] > 1 for number in ids))
    often = {name: max((times[number], number) for number in facts.caption_ids[name]) for name in repeated}
    rows = tuple(sorted(often, key=often.__getitem__, reverse=True))  # those of one caption beside each other
    if len(rows) > REPEATED * captioned:
        option = f"--pair_id_column {dataset.caption_column}"
        text = (
            f"{_count(len(rows), facts.looks, 'have a caption that another one also has')}, such as {_short(text)!r} "
            f"({count:,} times). In a batch they are each other's negatives. Pass {option}."
        )
        yield Finding("repeated_captions", text, True, rows, option)


def _of_copies(facts: SetFacts) -> Iterator[Finding]:
    names = list(facts.prints)
    pairs = [(names[first], names[second]) for first, second in copies(list(facts.prints.values()))]
    ids = facts.pair_ids if facts.is_trained else {}
    pairs = [(one, other) for one, other in pairs if ids.get(one) is None or ids[one] != ids.get(other)]
    rows = tuple(dict.fromkeys(name for pair in pairs for name in pair))
    if len(rows) <= REPEATED * len(names):
        return
    effect = "They are each other's negatives, which equal pair ids (--pair_id_column) would prevent."
    effect = effect if facts.is_trained else "Retrieval cannot tell them apart."
    text = _count(len(rows), facts.looks, "have an image that looks like another one")
    yield Finding("repeated_images", f"{text}: {_and_copy(pairs)}. {effect}", len(rows) > COPIES * len(names), rows)


def findings_of_ceilings(facts: SetFacts, ceilings: Mapping[str, float]) -> list[Finding]:
    """Captions that belong to several images, so that the highest recalls that a model can reach are ``ceilings``."""
    if not ceilings or min(ceilings.values()) == 1:
        return []
    images = Counter(number for ids in facts.seen.values() for number in {*ids})
    rows = tuple(name for name, ids in facts.seen.items() if any(images[number] > 1 for number in ids))
    highest = " or ".join(f"{name} of {value:.2%}" for name, value in ceilings.items())
    among = "" if facts.is_whole else " among those that were read"
    text = _count(len(rows), facts.looks, "have a caption that also belongs to another image, as the model reads it")
    text += (
        f". No model can exceed {highest}{among}. Compare with these values, or evaluate on captions of one image each."
    )
    return [Finding("ceiling", text, min(ceilings.values()) < 1 - COPIES, rows)]


def findings_of_ledger(ledger: Ledger, path: str | Path) -> list[Finding]:
    """Pairs that do not belong together, as the ledger in a file says."""
    if ledger.says_nothing():
        text = (
            f"To the model of {path} most of its {len(ledger):,} pairs look wrong, so its scores do not mean anything "
            "yet. Score with a model that knows such pairs before you exclude any."
        )
        return [Finding("wrong_pairs", text, spoils=False)]
    wrong = ledger.certainly_wrong().tolist()
    rows = tuple(map(ledger.name, wrong))
    if not rows:
        return []
    kind = "sample" if ledger.sample else "row"
    examples = [(ledger.name(place), ledger.caption[place]) for place in wrong[:3]]
    shown = ", ".join(f"{kind} {name}" + (f" ({_short(caption)})" if caption else "") for name, caption in examples)
    option = f"--exclude {path}:{RATHER_WRONG:g}"
    sheet = Path(path).with_name(SHEET_FILE)
    drawn = sheet if sheet.is_file() else "the sheet that `infcl score` draws"
    text = (
        f"{_count(len(rows), len(ledger), 'do not belong together')} with a probability of at least {CERTAIN:g}: "
        f"{shown}. Right pairs of rare things look wrong, too, so look at {drawn}. Then pass {option}, which leaves "
        "out all that are likelier wrong than right."
    )
    if ledger.left_out is not None:
        text += f" At its end the training left out {_count(int(ledger.left_out.sum()), len(ledger))}."
    return [Finding("wrong_pairs", text, len(rows) > SPOILING_WRONG * len(ledger), rows, option)]


def findings_of_overlap(trained: SetFacts, evaluated: SetFacts) -> list[Finding]:
    """Images of an evaluation set that look like one of a set that is trained on."""
    before, after = list(trained.prints), list(evaluated.prints)
    every = copies([*trained.prints.values(), *evaluated.prints.values()])
    crossing = every[(every[:, 0] < len(before)) & (every[:, 1] >= len(before))]
    pairs = {after[second - len(before)]: before[first] for first, second in crossing}
    if not pairs:
        return []
    more = "" if trained.is_whole else f" Only some of {trained.name} was read, so there may be more."
    text = (
        f"{_count(len(pairs), len(after), 'look like', 'image')} an image of {trained.name}: "
        f"{_and_copy(pairs.items())}. Drop them from one of the two sets.{more}"
    )
    return [Finding("overlap", text, len(pairs) > OVERLAP * len(after), tuple(pairs))]


def _count(count: int, of: int, words: str = "", what: str = "pair") -> str:
    """A number, its share, and what such pairs do, in ``words`` of several: of one, "has" takes the place of "have"."""
    verb, _, rest = words.partition(" ")
    verb = {"have": "has", "do": "does", "look": "looks"}.get(verb, verb) if count == 1 else verb
    return f"{count:,} of {counted(of, what)} ({count / max(1, of):.2%}) {verb} {rest}".rstrip()


def _examples(rows: dict[str, str], most: int) -> str:
    return ", ".join(f"{_named(name)} ({_short(detail, most)})" for name, detail in list(rows.items())[:3])


def _and_copy(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{_named(row)} like {_named(other)}" for row, other in list(pairs)[:3])


def _named(name: str) -> str:
    """A pair as a person knows it: a table's row, a stream's sample, or the rest of a shard."""
    kind = "row " if name.isdigit() else "" if name.startswith("the rest of ") else "sample "
    return f"{kind}{_short(name)}"


def _short(text: str, most: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."
